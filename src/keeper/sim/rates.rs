//! The check of rates: the promise itself.
//!
//! Among the charges that stand, in any time `t` no more than `t / T + burst` begin, by the store's clock. Each charge
//! takes its own `T`, as limits change and callers have values of their own; then the largest burst counts.
//!
//! Charges that the store has lost are not counted any more, nor those from before its clock was stepped back: what comes
//! after that keeps the promise by itself.

use std::{collections::BTreeMap, time::Duration};

use super::world::World;
use crate::ledger::{Charge, Charged, Exchange, Refund, Reply, Tat};

/// All periods are a second, and no count is above this: a multiple of all counts, so that `T` is a whole number.
const PARTS: i128 = 27_720;
/// Charges that began longer ago have run out.
const KEPT_US: u64 = 30_000_000;

/// All charges that stand, by the key of their rate.
#[derive(Default)]
pub(super) struct Charges {
    keys: BTreeMap<String, Vec<Standing>>,
    /// Those that were taken back.
    refunded: Vec<(String, Tat)>,
}

struct Standing {
    start_us: u64,
    /// Cost times `T` and burst times `T`, in parts of a microsecond.
    fills: i128,
    burst: i128,
    tat: Tat,
    at: Duration,
}

impl Charges {
    /// All that was charged is lost.
    pub(super) fn clear(&mut self) {
        self.keys.clear();
    }

    /// The charges since then are lost.
    pub(super) fn forget_since(&mut self, since: Duration) {
        let charges = self.keys.values_mut();
        charges.for_each(|charges| charges.retain(|charge| charge.at < since));
    }

    fn add(&mut self, charge: &Charge, tat: Tat, start_us: u64, at: Duration) {
        let rate = charge.rate;
        let time = i128::from(rate.period_us) * PARTS / i128::from(rate.count);
        let charges = self.keys.entry(charge.key.to_string()).or_default();
        let place = charges.partition_point(|one| one.start_us <= start_us);
        charges.retain(|one| one.start_us + KEPT_US > start_us);
        let place = place.min(charges.len());
        charges.insert(
            place,
            Standing {
                start_us,
                fills: i128::from(charge.cost) * time,
                burst: i128::from(rate.burst) * time,
                tat,
                at,
            },
        );
        charges.sort_by_key(|one| one.start_us);
    }

    /// `repeated`: the store runs it once more. It cannot tell, and may take back what others were charged.
    fn refund(&mut self, refund: &Refund, repeated: bool) {
        let key = refund.key.to_string();
        let charges = self.keys.entry(key.clone()).or_default();
        let place = charges.iter().position(|one| one.tat == refund.charged);
        match place {
            _ if repeated => charges.clear(),
            Some(place) => drop(charges.remove(place)),
            // Charges that the store has lost are taken back from others. Nothing excuses a keeper that does it twice.
            None if !self.refunded.contains(&(key.clone(), refund.charged)) => charges.clear(),
            None => {}
        }
        self.refunded.push((key, refund.charged));
    }

    /// By how much a key's promise is broken, in microseconds.
    fn excess(&self, key: &str) -> i128 {
        let Some(charges) = self.keys.get(key) else {
            return 0;
        };
        let burst = charges.iter().map(|one| one.burst).max().unwrap_or(0);
        let (mut filled, mut first, mut worst) = (0, i128::MIN, i128::MIN);
        for one in charges {
            let start = i128::from(one.start_us) * PARTS;
            first = first.max(start - filled);
            filled += one.fills;
            worst = worst.max(filled - start + first);
        }
        (worst - burst).max(0) / PARTS
    }
}

impl World {
    pub(super) fn check_rates(&mut self, exchange: &Exchange, reply: &Reply, repeated: bool) {
        for refund in &exchange.refunds {
            self.charges.refund(refund, repeated);
        }
        for (claim, reply) in exchange.claims.iter().zip(&reply.claims) {
            let Ok(reply) = reply else { continue };
            for (charge, charged) in claim.charges.iter().zip(&reply.charged) {
                if let Charged::Until { tat, start_us } = *charged {
                    self.totals.charges += 1;
                    self.charges.add(charge, tat, start_us, self.now);
                    let excess_us = self.charges.excess(&charge.key);
                    if excess_us > 0 {
                        self.fail(&format!("rate: {charge:?} is {excess_us} us too soon"));
                    }
                }
            }
        }
    }
}
