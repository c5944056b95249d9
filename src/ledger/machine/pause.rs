//! A pause: until its end nobody gets a slot, and then the limit rises over a ramp, so that the waiters do not all
//! proceed at once: `pause`.

use std::cmp::{max, min};

use super::{Call, Ledger, Pause};
use crate::ledger::{Batch, RAMP_MS};

impl Ledger {
    /// Starts or ends a pause. The longest applies. An end too far ahead was set before the clock was stepped back.
    pub(super) fn pause(&mut self, call: &Call, batch: &Batch) {
        let (now_ms, latest_ms) = (call.now_ms, call.latest_end_ms());
        let before = self.pause.map(|pause| Pause {
            end_ms: min(pause.end_ms, latest_ms),
            now_ms,
            ..pause
        });
        let was_ended = before.is_some_and(|pause| pause.was_ended);
        let pause = match batch.pause_ms {
            Some(0) => before.map(|pause| Pause {
                was_ended: true,
                ..pause
            }),
            Some(length_ms) if !(was_ended && batch.asks_pause) => {
                let running = before.filter(|pause| !pause.was_ended);
                let end_ms = min(now_ms + length_ms, latest_ms);
                Some(Pause {
                    end_ms: max(end_ms, running.map_or(0, |pause| pause.end_ms)),
                    was_ended: false,
                    now_ms,
                })
            }
            _ => before,
        };
        self.pause = pause.filter(|pause| pause.end_ms + RAMP_MS > now_ms);
    }
}
