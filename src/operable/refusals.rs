//! The last refusals of each limit, for operators: why was this caller refused?

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use super::{identity::SEEN, look::TenantLook};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{Label, Lease},
    ledger::weight_of,
    limit::LimitId,
};

/// Number of refusals kept for each limit.
pub(crate) const MAX_REFUSALS: usize = 20;

/// A refusal, with the numbers that decided it.
#[derive(Clone)]
pub(crate) struct RefusalNote {
    pub at: Instant,
    pub kind: AcquireErrorKind,
    pub key: Option<Key>,
    pub label: Option<Label>,
    pub tenant: Option<TenantLook>,
    pub weight: u32,
    pub max: u32,
    pub in_use: u32,
    pub waiting: u32,
    pub waited: Duration,
}

/// By [`LimitId`], oldest first.
#[derive(Default)]
pub(crate) struct Refusals(Vec<VecDeque<RefusalNote>>);

impl Refusals {
    /// Keeps a refusal. `about`: the key under the limit, a lease of the request, and its tenant, if any.
    pub(crate) fn keep<'a>(
        &mut self,
        limit: LimitId,
        error: &AcquireError,
        at: Instant,
        about: impl FnOnce() -> (Option<&'a Key>, Option<&'a Lease>, Option<TenantLook>),
    ) {
        if !SEEN {
            return;
        }
        let (key, lease, tenant) = about();
        let note = RefusalNote {
            at,
            kind: error.kind(),
            key: key.cloned(),
            label: lease.and_then(|lease| lease.label(lease.owners().tenure())),
            tenant,
            weight: lease.map_or(1, |lease| weight_of(lease.seq())),
            max: error.max(),
            in_use: error.in_use(),
            waiting: error.waiting(),
            waited: error.waited(),
        };
        let limits = self.0.len().max(limit.0 + 1);
        self.0.resize_with(limits, VecDeque::new);
        let notes = &mut self.0[limit.0];
        if notes.len() == MAX_REFUSALS {
            notes.pop_front();
        }
        notes.push_back(note);
    }

    pub(crate) fn of(&self, limit: LimitId) -> Vec<RefusalNote> {
        let notes = self.0.get(limit.0).into_iter().flatten();
        notes.cloned().collect()
    }
}
