//! The check of rates: their promise.
//!
//! Among the standing charges, no more than `t / T + burst` begin in any time `t`, by the store's clock. Limits change,
//! and callers have values of their own: then the shortest `T` and the largest burst requested count. Starts reserved
//! earlier keep their times when the rate changes, and may come on top.
//!
//! Spending is charged regardless of the remaining budget, and begins when it is charged. It may break the promise, and
//! makes later requests wait: when a charge begins, all earlier charges and the charge itself fill no more than its
//! burst, less the drained part.
//!
//! Charges that the store has lost, or from before its clock was stepped back, no longer count: later charges keep the
//! promise on their own.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::world::World;
use crate::ledger::{Charge, Charged, Exchange, Rate, Refund, Reply, Tat, WAIT_FOREVER_US};

/// All periods are a second, and counts do not exceed this: a multiple of all counts, so that `T` is a whole number.
const PARTS: i128 = 27_720;
/// Charges that began earlier have drained.
const KEPT_US: u64 = 120_000_000;

/// All standing charges, by the key of their rate.
#[derive(Default)]
pub(super) struct Charges {
    keys: BTreeMap<String, Vec<Standing>>,
    /// The cost, after refunds, of every charge ever made, including charges that the store has lost, by the state that
    /// they left. A refund restores an earlier state, so several charges may have left the same one.
    made: HashMap<(String, Tat), u32>,
    /// `T` of each rate requested for a key, and when last: even a refusal leaves its rate in force.
    asked: BTreeMap<String, BTreeMap<i128, u64>>,
}

struct Standing {
    /// When it begins.
    start_us: u64,
    /// Spending of a permit, which no rate refuses.
    is_forced: bool,
    is_reserved: bool,
    cost: u32,
    burst: u32,
    tat: Tat,
    /// When it was charged.
    at: Duration,
}

impl Standing {
    /// The order in which charges were made. In one step, clients may learn of them in another order.
    fn turn(&self) -> (Duration, u64, u64) {
        (self.at, self.tat.since_us, self.tat.charged)
    }
}

impl Charges {
    /// All charges are lost.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Charges since then are lost.
    pub fn forget_since(&mut self, since: Duration) {
        let charges = self.keys.values_mut();
        charges.for_each(|charges| charges.retain(|charge| charge.at < since));
    }

    pub fn ask(&mut self, charge: &Charge, now_us: u64) {
        let time = time_of(charge.rate);
        let asked = self.asked.entry(charge.key.to_string()).or_default();
        asked.insert(time, now_us);
        asked.retain(|_, last_us| *last_us + 2 * KEPT_US > now_us);
    }

    /// Returns by how much this charge breaks the promises, in microseconds.
    pub fn add(
        &mut self,
        charge: &Charge,
        tat: Tat,
        (start_us, is_ahead): (u64, bool),
        at: Duration,
    ) -> i128 {
        let rate = charge.rate;
        let asked = self.asked.get(&*charge.key);
        let time = asked.and_then(|asked| Some(*asked.first_key_value()?.0));
        let (time, changed) = (
            time.unwrap_or(0),
            asked.is_some_and(|asked| asked.len() > 1),
        );
        let charges = self.keys.entry(charge.key.to_string()).or_default();
        charges.retain(|one| one.start_us + KEPT_US > start_us);
        let is_forced = charge.wait_us == WAIT_FOREVER_US;
        *self.made.entry((charge.key.to_string(), tat)).or_default() += charge.cost;
        let added = Standing {
            start_us,
            is_forced,
            is_reserved: is_ahead,
            cost: charge.cost,
            burst: rate.burst,
            tat,
            at,
        };
        let order = |one: &Standing| (one.start_us, one.turn());
        let place = charges.partition_point(|one| order(one) <= order(&added));
        charges.insert(place, added);
        if is_forced {
            return 0;
        }
        let reserved = charges.iter().filter(|one| one.is_reserved && changed);
        let on_top: i128 = reserved.map(|one| i128::from(one.cost) * time).sum();
        // Those of the same step may have been charged in another order.
        let of_step = (0..charges.len()).filter(|index| charges[*index].at == at);
        let overflows = of_step
            .filter(|index| !charges[*index].is_forced)
            .map(|index| {
                // Later charges found this one there, even if it begins earlier.
                let earlier = |one: &&Standing| one.turn() <= charges[index].turn();
                overflow(charges[..=index].iter().filter(earlier), time)
            });
        let most = overflows.max().unwrap_or(0);
        (excess(charges, time).max(most) - on_top) / PARTS
    }

    /// `repeated`: the store runs the refund once more. It cannot tell, and may refund other charges.
    fn refund(&mut self, refund: &Refund, repeated: bool) {
        let key = refund.key.to_string();
        let charges = self.keys.entry(key.clone()).or_default();
        // A lost charge may have left the same state as a smaller standing one.
        let stands = |one: &Standing| one.tat == refund.charged && one.cost >= refund.cost;
        let place = charges.iter().rposition(stands);
        let rest = self.made.get_mut(&(key, refund.charged));
        let rest = rest.filter(|rest| **rest >= refund.cost);
        let same = charges.iter().filter(|one| one.tat == refund.charged);
        let known: u32 = same.map(|one| one.cost).sum();
        let is_part = place.is_some_and(|place| charges[place].cost > refund.cost);
        let may_be_lost = |rest: &u32| *rest >= known + refund.cost;
        match place {
            _ if repeated => charges.clear(),
            // Either part of a standing charge, or a charge that the store has lost.
            Some(_) if is_part && rest.as_deref().is_some_and(may_be_lost) => charges.clear(),
            Some(place) => {
                let charge = &mut charges[place];
                charge.cost -= refund.cost;
                if charge.cost == 0 {
                    charges.remove(place);
                }
            }
            // A lost charge is refunded from others. Nothing excuses a keeper that refunds twice.
            None if rest.is_some() => charges.clear(),
            None => {}
        }
        if let Some(rest) = rest {
            *rest -= refund.cost;
        }
    }
}

/// By how much the starts in some time exceed the promise, in parts. Forced charges are exempt.
fn excess(charges: &[Standing], time: i128) -> i128 {
    let (mut filled, mut first, mut worst) = (0, i128::MIN, i128::MIN);
    for one in charges.iter().filter(|one| !one.is_forced) {
        let start = i128::from(one.start_us) * PARTS;
        first = first.max(start - filled);
        filled += i128::from(one.cost) * time;
        worst = worst.max(filled - start + first);
    }
    worst - largest_burst(charges) * time
}

fn time_of(rate: Rate) -> i128 {
    i128::from(rate.period_us) * PARTS / i128::from(rate.count)
}

fn largest_burst(charges: &[Standing]) -> i128 {
    charges
        .iter()
        .map(|one| one.burst)
        .max()
        .unwrap_or(0)
        .into()
}

/// By how much the last charge exceeds its burst when it begins, in parts.
fn overflow<'a>(charges: impl Iterator<Item = &'a Standing>, time: i128) -> i128 {
    let (mut level, mut last_us, mut burst) = (0, 0, 0);
    for one in charges {
        let drained = i128::from(one.start_us - last_us) * PARTS;
        level = (level - drained).max(0) + i128::from(one.cost) * time;
        (last_us, burst) = (one.start_us, one.burst);
    }
    level - i128::from(burst) * time
}

impl World {
    pub fn check_rates(&mut self, exchange: &Exchange, reply: &Reply, repeated: bool) {
        for refund in &exchange.refunds {
            self.charges.refund(refund, repeated);
        }
        for (claim, answer) in exchange.claims.iter().zip(&reply.claims) {
            let Ok(answer) = answer else { continue };
            for (charge, charged) in claim.charges.iter().zip(&answer.charged) {
                self.charges.ask(charge, reply.now_us);
                if let Charged::Until { tat, start_us } = *charged {
                    self.totals.charges += 1;
                    let begins_us = match charge.wait_us {
                        WAIT_FOREVER_US => reply.now_us,
                        _ => start_us,
                    };
                    let begins = (begins_us, begins_us > reply.now_us);
                    let excess_us = self.charges.add(charge, tat, begins, self.now);
                    if excess_us > 0 {
                        self.fail(&format!("rate: {charge:?} is {excess_us} us too soon"));
                    }
                }
            }
        }
    }
}
