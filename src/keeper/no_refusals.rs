//! In place of the last refusals: nobody could see them.

use tokio::time::Instant;

use super::demand::LimitId;
use crate::{error::AcquireError, key::Key, leases::Lease};

#[derive(Default)]
pub(super) struct Refusals(());

impl Refusals {
    pub(super) fn keep<'a>(
        &mut self,
        _: LimitId,
        _: &AcquireError,
        _: Instant,
        _: impl FnOnce() -> (Option<&'a Key>, Option<&'a Lease>),
    ) {
    }
}
