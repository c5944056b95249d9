//! A limit that finds its own value: `pace`. The rule is in `ledger/pace.rs`.

use std::cmp::{max, min};

use super::{Call, Ledger};
use crate::ledger::{Batch, PaceState, Pacing};

impl Ledger {
    /// Counts what a replica reports of the upstream. `released`: the units that left with this batch were in use until then, as far
    /// as they were not waiters, which hardly leave while slots are free.
    #[inline]
    pub(super) fn pace(&mut self, call: &Call, batch: &Batch, released: u32) {
        let Some(results) = &batch.results else {
            return;
        };
        let mut state = self.pace_state(batch);
        let limit = state.pacing(results).limit;
        let in_use = max(self.units, min(self.units + released, limit));
        // Keys may be many: as long as a limit is as declared, nothing is kept.
        let counts = state.count(results, in_use, call.now_ms);
        if counts && (self.pace.is_some() || !state.is_as_begun(limit)) {
            self.pace = Some(Box::new(state));
        }
    }

    fn pace_state(&self, batch: &Batch) -> PaceState {
        let known = self.pace.as_deref().copied();
        known.unwrap_or_else(|| PaceState::new(batch.limit))
    }

    /// What the limit has found, if it finds its own value.
    pub(super) fn pacing(&self, batch: &Batch) -> Option<Pacing> {
        let results = batch.results.as_ref()?;
        Some(self.pace_state(batch).pacing(results))
    }
}
