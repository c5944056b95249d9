//! A pause: until its end nobody gets a slot, and then the limit rises over a ramp, so that the waiters do not all
//! proceed at once: `pause`.

use std::cmp::{max, min};

use super::{Call, Ledger, Pause};
use crate::ledger::{Batch, RAMP_MS};

impl Ledger {
    /// Starts or ends a pause. The longest applies. An end too far ahead was set before the clock was stepped back.
    pub(super) fn pause(&mut self, call: &Call, batch: &Batch) {
        let (now_ms, latest_ms) = (call.now_ms, call.latest_end_ms());
        let before = self.pause.map(|pause| min(pause.end_ms, latest_ms));
        let end_ms = match batch.pause_ms {
            Some(0) => None,
            Some(length_ms) => max(before, Some(min(now_ms + length_ms, latest_ms))),
            None => before,
        };
        let runs = end_ms.filter(|end_ms| end_ms + RAMP_MS > now_ms);
        self.pause = runs.map(|end_ms| Pause { end_ms, now_ms });
    }
}
