//! Rates: the generic cell rate algorithm (GCRA, ITU-T I.371), in exact arithmetic.
//!
//! The state of a key is one time, the *theoretical arrival time* (TAT): when the bucket that the charges have filled
//! will be empty. It is stored as whole microseconds and a remainder, in parts of the rate's count, so that no charge
//! is ever rounded.
//!
//! # Refunds
//!
//! A charge may be refunded in part or in whole. Each lies in the bucket between earlier and later charges, and only
//! what has not run out yet can be refunded. The promise for the charges that stand is that in any time `t` (of whole
//! microseconds, the first and the last included) at most `t / T + burst` requests start. These rules keep it:
//!
//! - A refund takes no more than the charge, so nothing changes for earlier charges.
//! - Later charges, say of cost `K` in all, still fill `K x T` or more from now on: the end of the refunded charge is
//!   computed as if everything refunded since had lain below it. If none of them starts later than now, the promise
//!   needs no more of them.
//! - If one of them starts later, its start is fixed, and another request could be given the time before it. So nothing
//!   is refunded then, unless this charge is the last.
//! - The last charge is undone as long as nothing of it has run out; the one before it is then the last. So all starts
//!   that a replica has reserved can be refunded, from the last to the first.
//!
//! Tests are in `tests/rates.rs`.

use std::{cmp::min, time::Duration};

use crate::ranges::{MAX_LIMIT, MAX_WAIT};

/// Largest product of two numbers: exact in the script's floating point numbers, with room for sums.
pub(super) const MAX_EXACT: u64 = 1 << 52;
/// Longest time from now to a start that is reserved.
pub(super) const MAX_WAIT_US: u64 = MAX_WAIT.as_micros() as u64;
/// A wait that no rate refuses: the cost is charged whatever the rate has left.
pub(crate) const WAIT_FOREVER_US: u64 = MAX_EXACT;
/// Largest burst.
pub(super) const MAX_BURST: u32 = MAX_LIMIT;

/// `count` starts in each `period_us`, in lowest terms, and up to `burst` at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rate {
    pub(crate) count: u32,
    pub(crate) period_us: u64,
    pub(crate) burst: u32,
}

/// The state of a key: the time `us + rem / rate.count`, in store time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tat {
    pub(crate) us: u64,
    pub(crate) rem: u32,
    /// The rate of the last charge. The limit may have changed since.
    pub(crate) rate: Rate,
    /// Time refunded since `since_us`, from which the position of an earlier charge in the bucket is computed.
    pub(crate) refunded_us: u64,
    /// When the bucket was last empty. Charges from before are not refunded.
    pub(crate) since_us: u64,
}

/// The outcome of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charged {
    /// Charged. The request may start at `start_us`; if that is ahead, no slot was taken yet.
    Until { tat: Tat, start_us: u64 },
    /// Refused: the rate would allow it at `start_us`. Every rate that refuses reports this, whatever else refused.
    TooSoon { start_us: u64 },
    /// Not charged, because another part of the claim was refused.
    Not,
}

impl Rate {
    pub(crate) fn new(count: u32, period: Duration, burst: u32) -> Self {
        let period_us = period.as_micros() as u64;
        let common = common_divisor(u64::from(count), period_us).max(1);
        Self {
            count: (u64::from(count) / common) as u32,
            period_us: period_us / common,
            burst,
        }
    }

    /// Whether its arithmetic is exact in the script too.
    pub(crate) fn is_exact(&self) -> bool {
        let filled = self.period_us.checked_mul(u64::from(self.burst));
        (1..=MAX_BURST).contains(&self.burst) && filled.is_some_and(|filled| filled <= MAX_EXACT)
    }

    /// With the nearest burst for which it is exact.
    pub(crate) fn clamped(self) -> Self {
        let most = (MAX_EXACT / self.period_us).min(MAX_BURST.into()) as u32;
        let burst = self.burst.clamp(1, most);
        Self { burst, ..self }
    }

    /// The largest part of a debt that is charged at once, with [`WAIT_FOREVER_US`]: so much that the arithmetic is exact
    /// in the script too, and that drains within the longest wait.
    pub(crate) fn most_at_once(&self) -> u32 {
        let exact = MAX_EXACT / self.period_us;
        let most = exact.min(self.drains_in_longest_wait().max(1));
        most.min(u32::MAX.into()) as u32
    }

    /// The most that a key can owe: beyond that it is forgotten. See [`read`](Self::read).
    pub(crate) fn most_owed(&self) -> u64 {
        u64::from(self.burst) + self.drains_in_longest_wait()
    }

    fn drains_in_longest_wait(&self) -> u64 {
        let parts = u128::from(MAX_WAIT_US) * u128::from(self.count);
        (parts / u128::from(self.period_us)) as u64
    }

    /// Charges a key. The caller stores the state that is returned.
    pub(crate) fn charge(
        self,
        state: Option<Tat>,
        now_us: u64,
        cost: u32,
        wait_us: u64,
    ) -> Charged {
        let most = self.burst.max(self.most_at_once());
        debug_assert!((1..=most).contains(&cost), "{cost} of {self:?}");
        let before = match state {
            Some(state) if !state.is_over(now_us) => self.read(state, now_us),
            _ => Tat::empty(self, now_us),
        };
        let filled = self.parts(before) + self.cost(cost);
        let start_us = self.up_us(filled - self.cost(self.burst)).max(now_us);
        if start_us - now_us > wait_us {
            return Charged::TooSoon { start_us };
        }
        let tat = self.with_parts(before, filled);
        Charged::Until { tat, start_us }
    }

    /// Refunds what is left of a charge, in whole microseconds, and returns the new state of its key. `charged` is the
    /// state that the charge left. No charge is refunded twice.
    pub(crate) fn refund(self, state: Tat, charged: Tat, cost: u32, now_us: u64) -> Tat {
        let tat = self.read(state, now_us);
        if state.is_over(now_us)
            || tat.since_us != charged.since_us
            || tat.rate != charged.rate
            || tat.refunded_us < charged.refunded_us
        {
            return state;
        }
        let moved_us = tat.refunded_us - charged.refunded_us;
        let top = self.parts(charged) - i128::from(moved_us) * i128::from(self.count);
        let is_last = top == self.parts(tat);
        let now = i128::from(now_us) * i128::from(self.count);
        if top > self.parts(tat) {
            // It was refunded.
            return state;
        }
        if is_last && top - self.cost(cost) >= now {
            // The state is as it was before: the charge before it is the last one.
            return self.with_parts(tat, top - self.cost(cost));
        }
        if self.parts(tat) - self.cost(self.burst) > now && !is_last {
            return state;
        }
        let share_us = min(self.cost(cost), top - now).div_euclid(self.count.into());
        if share_us <= 0 {
            return state;
        }
        let tat = Tat {
            us: tat.us - share_us as u64,
            refunded_us: tat.refunded_us + share_us as u64,
            ..tat
        };
        if tat.refunded_us > MAX_EXACT {
            tat.renewed()
        } else {
            tat
        }
    }

    /// How many requests may start at once.
    pub(crate) fn remaining(self, state: Tat, now_us: u64) -> u32 {
        if state.is_over(now_us) {
            return self.burst;
        }
        let now = i128::from(now_us) * i128::from(self.count);
        let room = self.cost(self.burst) - (self.parts(self.read(state, now_us)) - now);
        (room.max(0) / i128::from(self.period_us)) as u32
    }

    /// How much of what was charged is above the burst, and has to drain before the next request may start.
    pub(crate) fn debt(self, state: Tat, now_us: u64) -> u64 {
        let now = i128::from(now_us) * i128::from(self.count);
        let debt = self.parts(self.read(state, now_us)) - now - self.cost(self.burst);
        (debt.max(0) / i128::from(self.period_us)) as u64
    }

    /// When the next request may start.
    pub(crate) fn next_at_us(self, state: Tat, now_us: u64) -> u64 {
        let tat = self.read(state, now_us);
        let next = self.parts(tat) - self.cost(self.burst - 1);
        self.up_us(next).max(now_us)
    }

    /// The time that a cost fills, rounded up.
    pub(crate) fn time_of(self, cost: u32) -> u64 {
        self.up_us(self.cost(cost))
    }

    /// The state as this rate counts. One too far ahead was set before the clock was stepped back.
    fn read(self, state: Tat, now_us: u64) -> Tat {
        let mut tat = state;
        if tat.rate != self {
            tat.us += u64::from(tat.rem > 0);
            (tat.rem, tat.rate) = (0, self);
            // Reserved starts belong to another rate: what lies below them is not known any more.
            tat = tat.renewed();
        }
        let latest_us = i128::from(now_us + MAX_WAIT_US);
        let latest = latest_us * i128::from(self.count) + self.cost(self.burst);
        if self.parts(tat) > latest {
            tat = self.with_parts(tat, latest).renewed();
        }
        tat
    }

    /// In parts of a microsecond, `count` to one.
    fn parts(self, tat: Tat) -> i128 {
        i128::from(tat.us) * i128::from(self.count) + i128::from(tat.rem)
    }

    fn with_parts(self, tat: Tat, parts: i128) -> Tat {
        Tat {
            us: (parts / i128::from(self.count)) as u64,
            rem: (parts % i128::from(self.count)) as u32,
            ..tat
        }
    }

    /// The time that a cost fills, in these parts.
    fn cost(self, cost: u32) -> i128 {
        i128::from(cost) * i128::from(self.period_us)
    }

    /// Parts as microseconds, rounded up; 0 if negative.
    fn up_us(self, parts: i128) -> u64 {
        (parts.max(0) as u128).div_ceil(self.count.into()) as u64
    }
}

impl Tat {
    fn empty(rate: Rate, now_us: u64) -> Self {
        Self {
            us: now_us,
            rem: 0,
            rate,
            refunded_us: 0,
            since_us: now_us,
        }
    }

    /// The bucket is empty: the same as no state at all.
    pub(crate) fn is_over(self, now_us: u64) -> bool {
        (self.us, self.rem) <= (now_us, 0)
    }

    /// Excludes all charges until now from refunds.
    fn renewed(self) -> Self {
        Self {
            refunded_us: 0,
            since_us: self.since_us + 1,
            ..self
        }
    }

    /// The text in the store.
    #[cfg(test)]
    pub(super) fn text(self) -> String {
        let Self {
            us,
            rem,
            rate,
            refunded_us,
            since_us,
        } = self;
        let Rate {
            count,
            period_us,
            burst,
        } = rate;
        format!("{us} {rem} {count}/{period_us}/{burst} {refunded_us} {since_us}")
    }
}

fn common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 {
        one
    } else {
        common_divisor(other, one % other)
    }
}
