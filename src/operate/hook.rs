//! A replica's side of the record of overrides.

use futures_util::future::BoxFuture;

#[cfg(feature = "redis")]
use super::names::Names;
#[cfg(feature = "redis")]
use crate::{keeper::KeeperHandle, store::redis::control::ControlConnection};

/// The record as followed by a replica.
pub(crate) trait Hook: Send + Sync {
    /// Reads the record, and restores any part that the store has lost: on each new connection to operators, after a
    /// change, and once a minute. The only time limit is the connection's; questions wait meanwhile.
    #[cfg(feature = "redis")]
    fn read_again<'a>(
        &'a self,
        keeper: &'a KeeperHandle,
        control: &'a ControlConnection,
        names: &'a Names,
    ) -> BoxFuture<'a, ()>;

    /// The version in force in this process.
    fn token(&self) -> Option<String>;

    /// Overrides in force but missing from the record, as fields and texts of the record.
    fn unrecorded(&self) -> Vec<[String; 2]>;
}
