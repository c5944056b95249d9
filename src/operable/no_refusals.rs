//! Replaces the last refusals, which nobody could see.

use tokio::time::Instant;

use crate::{error::AcquireError, key::Key, leases::Lease, limit::LimitId};

#[derive(Default)]
pub(crate) struct Refusals(());

impl Refusals {
    pub(crate) fn keep<'a>(
        &mut self,
        _: LimitId,
        _: &AcquireError,
        _: Instant,
        _: impl FnOnce() -> (Option<&'a Key>, Option<&'a Lease>),
    ) {
    }
}
