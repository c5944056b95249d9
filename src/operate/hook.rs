//! A replica's side of the record of overrides.

use futures_util::future::BoxFuture;

#[cfg(feature = "redis")]
use super::names::Names;
#[cfg(feature = "redis")]
use crate::{keeper::Keepers, store::redis::control::ControlConnection};

/// The record, as a replica follows it.
pub(crate) trait Hook: Send + Sync {
    /// Reads the record, and writes back what the store has lost of it: on each new connection to operators, when it has
    /// changed, and once a minute. It has no time limit but the connection's own; questions wait for it meanwhile.
    #[cfg(feature = "redis")]
    fn read_again<'a>(
        &'a self,
        keepers: &'a Keepers,
        control: &'a ControlConnection,
        names: &'a Names,
    ) -> BoxFuture<'a, ()>;

    /// The version that is applied here.
    fn token(&self) -> Option<String>;

    /// What is applied here and not recorded, as fields and texts of the record.
    fn unrecorded(&self) -> Vec<[String; 2]>;
}
