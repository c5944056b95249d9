//! Freed slots that replicas keep for their next requests: `recall`, `keep`.

use super::{Call, Ledger};
use crate::ledger::{Batch, RIGHT_MS, Reuse};

impl Ledger {
    /// Recalls kept slots, or lets the caller keep some.
    pub(super) fn grant_rights(&mut self, call: &mut Call, batch: &Batch) {
        let refused = std::mem::take(&mut self.refused);
        if batch.reuse != Reuse::Never
            && (refused || !self.queue.is_empty() || self.running_pause().is_some())
        {
            self.recall(call, batch);
        }
        if batch.reuse == Reuse::Keep && self.queue.is_empty() && self.may_keep(batch) {
            self.keep(call);
        }
    }

    /// Ends the other replicas' rights to keep slots. Each is notified once; if the notice is lost, the right expires
    /// anyway. The caller learns it from its reply.
    fn recall(&mut self, call: &mut Call, batch: &Batch) {
        let caller = call.replica;
        for &owner in self.rights.keys().filter(|owner| **owner != caller) {
            call.publish(batch, owner, 0, Vec::new());
        }
        self.rights.retain(|owner, _| *owner == caller);
    }

    /// Ended rights are removed when a new one is added, so that they cannot accumulate.
    fn keep(&mut self, call: &Call) {
        let until_ms = call.now_ms + RIGHT_MS;
        if self.rights.insert(call.replica, until_ms).is_none() {
            self.rights.retain(|_, until_ms| *until_ms >= call.now_ms);
        }
    }

    /// Holders may exceed the limit if it was lowered or some were adopted. No slot is kept then, so that the excess
    /// goes away, nor during a pause and its ramp.
    fn may_keep(&self, batch: &Batch) -> bool {
        self.running_pause().is_none() && (1..=self.whole(batch)).contains(&self.units)
    }
}
