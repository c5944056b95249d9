//! Limits that find their own value, before an upstream whose capacity changes: what it refuses, and the invariants of each
//! exchange.

use std::time::Duration;

use super::world::World;
use crate::{
    ledger::{Batch, Exchange, PaceState},
    limit::{Adapt, Verdict},
};

/// Draws the worlds with such limits, so that the others stay as they were.
const PACES: u64 = 0x7061_6365_7300;
/// How long an upstream has one capacity.
const STEADY: Duration = Duration::from_secs(3);

/// The bounds of the limit for single keys.
pub(super) fn draw(seed: u64, scale: u32) -> Option<Adapt> {
    let mut rng = fastrand::Rng::with_seed(seed ^ PACES);
    (rng.u8(0..4) == 0).then(|| Adapt {
        floor: 1,
        ceiling: rng.u32(8..=20) * scale,
    })
}

impl World {
    /// The requests that the upstream takes at once.
    fn capacity(&self) -> u64 {
        let period = self.now.as_millis() / STEADY.as_millis();
        fastrand::Rng::with_seed(self.seed ^ period as u64).u64(0..12)
    }

    /// The upstream takes the request of a client, or refuses it.
    pub fn judges(&mut self, client: usize) {
        if self.adapt.is_none() || self.rng.u8(0..6) == 0 {
            return;
        }
        let Some(leases) = &self.clients[client].holds else {
            return;
        };
        let held = self.clients.iter().flat_map(|client| &client.holds);
        let in_progress: u64 = held.map(|leases| u64::from(leases.weight())).sum();
        let verdict = if in_progress > self.capacity() {
            Verdict::Overloaded
        } else {
            Verdict::Accepted
        };
        let (replica, now) = (self.clients[client].replica, self.local());
        let core = &mut self.replicas[replica].core;
        if core.begin_step(now).report(leases, "sim", verdict) {
            self.totals.verdicts += 1;
            self.note(|| format!("client {client} finds its upstream: {verdict:?}"));
        }
    }

    /// The states and the units in use before an exchange runs, by batch; with the waiters that it releases, which are not told
    /// from holders.
    pub fn paces(&self, exchange: &Exchange) -> Vec<(Option<PaceState>, u32)> {
        let before = |batch: &Batch| {
            let Some(ledger) = self.ledgers.get(&batch.key) else {
                return (None, 0);
            };
            let leaving = ledger.waiting().min(batch.release.len() as u32);
            (ledger.pace_of(), ledger.in_use() + leaving)
        };
        exchange.batches.iter().map(before).collect()
    }

    /// The state of each ledger changes by the results of the present generation only: it grows by what was accepted, if it binds,
    /// and is cut at most once.
    pub fn check_paces(&mut self, exchange: &Exchange, before: Vec<(Option<PaceState>, u32)>) {
        for ((batch, (before, in_use)), (after, _)) in
            (exchange.batches.iter().zip(before)).zip(self.paces(exchange))
        {
            let fail = |why: &str| {
                self.fail(&format!(
                    "pace: {why}: {before:?} to {after:?} by {batch:?}"
                ));
            };
            let Some(results) = batch.results else {
                if before != after {
                    fail("without results");
                }
                continue;
            };
            let start = PaceState::new(batch.limit);
            let is_present = results.generation == before.unwrap_or(start).generation;
            let has_any = results.accepted.max(results.overloaded) > 0;
            let Some(after) = after.filter(|_| is_present && has_any) else {
                if before != after {
                    fail("by nothing that counts");
                }
                continue;
            };
            let before = before.unwrap_or(start);
            let (first, last) = (before.pacing(&results).limit, after.limit);
            if !(results.floor..=results.ceiling).contains(&last) {
                fail("out of bounds");
            }
            let grown = last.saturating_sub(first);
            if grown > results.accepted || grown > 0 && 10 * in_use < 9 * first {
                fail("it grows");
            }
            let cuts = after.generation - before.generation;
            let is_lower = last < first || last == results.floor;
            if cuts > 1 || cuts == 1 && !(is_lower && results.overloaded > 0) {
                fail("it was cut");
            }
            if cuts == 0 && last < first {
                fail("it falls");
            }
            self.totals.cuts += cuts;
            self.totals.grown += u64::from(grown);
        }
    }
}
