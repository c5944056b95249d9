//! Rates: the generic cell rate algorithm (GCRA, ITU-T I.371), in exact arithmetic.
//!
//! The state of a key is a single time, the *theoretical arrival time* (TAT), at which the bucket filled by the charges
//! will be empty. It is stored as whole microseconds and a remainder in parts of the rate's count, so that no charge is
//! ever rounded.
//!
//! # Rates that change
//!
//! The state records the rate under which it was written. A charge at another rate first converts the contents of the
//! bucket: the number of units stays, and their duration changes. The result is rounded up, by less than a microsecond
//! and less than a unit. The state also records the rounding, and the next conversion subtracts it, so replicas that
//! disagree on the rate may alternate any number of times. (An error of 2^-35 of a unit per turn remains.) A refused
//! charge converts too: the bucket must drain at the new rate from then on, or the reported start would be wrong.
//!
//! Reserved starts keep their times when the rate changes. Until the last of them has begun, they may come on top of
//! the starts that the fastest of these rates allows.
//!
//! A rate can remember no more than its burst and the units that drain within the longest wait. If the bucket contains
//! more, it is not converted to a slower rate: the recorded rate stays in force until the excess has drained, since
//! another replica could admit forgotten units again. For the same reason a recorded rate with only a larger burst
//! stays. The burst is not part of the use: each charge applies its own burst, whatever the record says.
//!
//! # Refunds
//!
//! The promise for the standing charges is that in any time `t` (in whole microseconds, including the first and the
//! last) at most `t / T + burst` requests start. It is kept as long as the TAT is not before the *true end*: the time
//! at which a bucket would be empty if each standing charge fell into it at its start, even a start in the future. A
//! request of cost `c` starts at `TAT + (c - burst) x T` at the earliest, and the charges that fell in from any earlier
//! moment `m` on are at most `(TAT - m) / T`; so no interval has more than its share.
//!
//! A refund may lower the TAT as far as the true end provably moves: by the cost, but not below `S + x`, where `S` is
//! the latest start, and `x` the duration of all charges that may have come later. Three rules apply, and the most
//! generous one counts:
//!
//! - **Last:** the latest charge is undone. Nothing was built on it, so there is no bound.
//! - **Since:** `x` covers all charges made since, refunded or not. The rest of the bucket's contents at `S` has been
//!   there since the charge: the level was never below that, and the true end moves by as much.
//! - **Group:** the latest charges form a group, and `x` is the group's standing part without this charge. Let `B` be
//!   the TAT without the group. In whatever order its charges and refunds come, the true end is at most `max(B, S) +
//!   x`. A charge that starts after `B` begins the next group, so `S` is not after `B`, and the current group is
//!   refunded in full. (Refunds of older charges lower `B`. The part of the group that is withheld then raises it.)
//!
//! A refund within the current group therefore loses nothing, however many requests leave in whatever order. A refund
//! of an older charge loses at most the units drained and refunded since, less the contents of the bucket before that
//! charge.
//!
//! Tests are in `tests/rates.rs` and `tests/refunds.rs`.

use std::{
    cmp::{max, min},
    time::Duration,
};

use super::layout::{
    MAX_BURST_US, MAX_EXACT, MAX_RATE, MAX_WAIT_US, ROUNDING_PARTS, WAIT_FOREVER_US,
};

/// `count` starts per `period_us`, in lowest terms, and up to `burst` at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rate {
    pub(crate) count: u32,
    pub(crate) period_us: u64,
    pub(crate) burst: u32,
}

/// The state of a key: the store time `us + rem / rate.count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RateState {
    pub(crate) us: u64,
    pub(crate) rem: u32,
    /// The rate under which the state was written.
    pub(crate) rate: Rate,
    /// Total rounding by conversions, in [`ROUNDING_PARTS`] of a unit.
    pub(crate) rounded: u64,
    /// When the bucket was last empty. Earlier charges are not refunded.
    pub(crate) since_us: u64,
    /// Units charged since then, refunded or not, except charges undone as the latest.
    pub(crate) charged: u64,
    /// [`charged`](Self::charged) before the current group.
    pub(crate) before_group: u64,
    /// Standing units of the current group.
    pub(crate) group: u64,
    /// The latest start of all charges.
    pub(crate) start_us: u64,
}

/// The record of a charge: the rate's state after it, and the data for a refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tat {
    pub(crate) us: u64,
    pub(crate) rem: u32,
    /// The rate of the charge.
    pub(crate) rate: Rate,
    /// As in [`RateState`].
    pub(crate) since_us: u64,
    /// As in [`RateState`], including this charge.
    pub(crate) charged: u64,
    /// The latest start among the earlier charges.
    pub(crate) before_us: u64,
}

/// The outcome of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charged {
    /// Charged. The request may start at `start_us`; if that time is in the future, no slot was taken yet.
    Until { tat: Tat, start_us: u64 },
    /// Refused: the rate would allow the request at `start_us`. Every refusing rate reports this, whichever other part
    /// was refused.
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

    /// Whether the rate's arithmetic is also exact in the script.
    pub(crate) fn is_exact(&self) -> bool {
        (1..=self.most_burst()).contains(&self.burst)
    }

    /// The largest burst that keeps the rate exact: it drains within [`MAX_BURST_US`].
    pub(crate) fn most_burst(&self) -> u32 {
        let most = self.parts_at(MAX_BURST_US) / i128::from(self.period_us);
        most.min(MAX_RATE.into()) as u32
    }

    /// The rate with the nearest burst that keeps it exact.
    pub(crate) fn clamped(self) -> Self {
        let burst = self.burst.clamp(1, self.most_burst());
        Self { burst, ..self }
    }

    /// The largest part of a debt that is charged at once, with [`WAIT_FOREVER_US`]: small enough to drain within the longest
    /// wait, or one unit.
    pub(crate) fn most_at_once(&self) -> u32 {
        self.drains_in_longest_wait().clamp(1, u32::MAX.into()) as u32
    }

    /// The largest charge. A request that costs more than the burst starts as soon as the bucket is empty, and leaves a debt.
    pub(crate) fn most_charged(&self) -> u32 {
        self.burst.max(self.most_at_once())
    }

    /// Maximum debt of a key: the excess is forgotten. See [`RateState::clamped`].
    pub(crate) fn most_owed(&self) -> u64 {
        u64::from(self.burst) + self.drains_in_longest_wait()
    }

    fn drains_in_longest_wait(&self) -> u64 {
        let parts = u128::from(MAX_WAIT_US) * u128::from(self.count);
        (parts / u128::from(self.period_us)) as u64
    }

    /// Converts a key's state to this rate. The caller stores the result whether or not the charge succeeds.
    pub(crate) fn convert(self, state: RateState, now_us: u64) -> RateState {
        if state.is_over(now_us) {
            return state;
        }
        let state = state.clamped(now_us);
        if self.drains_like(state.rate) {
            return state;
        }
        state.converted(self, now_us).unwrap_or(state)
    }

    /// Charges a key. Returns the state to store if the charge is made.
    pub(crate) fn charge(
        self,
        state: Option<RateState>,
        now_us: u64,
        cost: u32,
        wait_us: u64,
    ) -> (Charged, RateState) {
        debug_assert!(
            (1..=self.most_charged()).contains(&cost),
            "{cost} of {self:?}"
        );
        let before = match state {
            Some(state) if !state.is_over(now_us) => self.convert(state, now_us),
            _ => RateState::empty(self, now_us),
        };
        let before = if before.charged + u64::from(cost) > MAX_EXACT {
            before.renewed()
        } else {
            before
        };
        // The rate in force: another one if the use is too large for this rate to remember.
        let rate = Rate {
            burst: self.burst,
            ..before.rate
        };
        let filled = before.parts() + rate.time(cost.into());
        // The excess over the burst is a debt.
        let room = self.burst.saturating_sub(cost);
        let start_us = rate
            .up_us(before.parts() - rate.time(room.into()))
            .max(now_us);
        if start_us - now_us > wait_us {
            return (Charged::TooSoon { start_us }, before);
        }
        // An unconditional charge begins at once.
        let begins_us = match wait_us {
            WAIT_FOREVER_US => now_us,
            _ => start_us,
        };
        let named = RateState {
            rate: self,
            ..before
        };
        let [named, unnamed] =
            [named, before].map(|state| state.with_charge(cost, filled, begins_us));
        let remembers = self.burst >= before.rate.burst || named.is_remembered(now_us);
        let after = if self.drains_like(before.rate) && remembers {
            named
        } else {
            unnamed
        };
        let tat = Tat {
            rate: self,
            before_us: before.start_us,
            ..after.tat()
        };
        (Charged::Until { tat, start_us }, after)
    }

    /// How many requests may start at once.
    pub(crate) fn remaining(self, tat: Tat, now_us: u64) -> u32 {
        let room = self.time(self.burst.into()) - self.ahead(tat, now_us);
        (room.max(0) / i128::from(self.period_us)) as u32
    }

    /// Units charged above the burst, which must drain before the next request may start.
    pub(crate) fn debt(self, tat: Tat, now_us: u64) -> u64 {
        let debt = self.ahead(tat, now_us) - self.time(self.burst.into());
        (debt.max(0) / i128::from(self.period_us)) as u64
    }

    /// When the next request may start.
    pub(crate) fn next_at_us(self, tat: Tat, now_us: u64) -> u64 {
        let next = self.ahead(tat, now_us) - self.time(u64::from(self.burst) - 1);
        now_us + self.up_us(next)
    }

    /// Time until the bucket will be empty, in parts.
    fn ahead(self, tat: Tat, now_us: u64) -> i128 {
        let now = self.parts_at(now_us);
        let end = self.parts_at(tat.us) + i128::from(tat.rem);
        end.clamp(now, self.latest(now_us)) - now
    }

    /// Units that can be charged now, if this cost can be charged after `rest_us`. May be one too few, because that was
    /// rounded up.
    pub(crate) fn left_of(self, cost: u32, rest_us: u64) -> u32 {
        let room = self.time(cost.into()) - self.parts_at(rest_us);
        (room.max(0) / i128::from(self.period_us)) as u32
    }

    /// Duration of a cost, rounded up.
    pub(crate) fn time_of(self, cost: u32) -> u64 {
        self.up_us(self.time(cost.into()))
    }

    fn drains_like(self, other: Self) -> bool {
        (self.count, self.period_us) == (other.count, other.period_us)
    }

    /// Duration of these units, in parts of a microsecond (`count` parts each).
    fn time(self, units: u64) -> i128 {
        i128::from(units) * i128::from(self.period_us)
    }

    fn parts_at(self, us: u64) -> i128 {
        i128::from(us) * i128::from(self.count)
    }

    fn split(self, parts: i128) -> (u64, u32) {
        let count = i128::from(self.count);
        ((parts / count) as u64, (parts % count) as u32)
    }

    /// The latest time of an empty bucket that this rate can remember.
    fn latest(self, now_us: u64) -> i128 {
        self.parts_at(now_us + MAX_WAIT_US) + self.time(self.burst.into())
    }

    /// Converts parts to microseconds, rounded up; 0 if negative.
    fn up_us(self, parts: i128) -> u64 {
        (parts.max(0) as u128).div_ceil(self.count.into()) as u64
    }
}

impl RateState {
    fn empty(rate: Rate, now_us: u64) -> Self {
        Self {
            us: now_us,
            rem: 0,
            rate,
            rounded: 0,
            since_us: now_us,
            charged: 0,
            before_group: 0,
            group: 0,
            start_us: now_us,
        }
    }

    /// Whether the bucket is empty, which is equivalent to no state at all.
    pub(crate) fn is_over(&self, now_us: u64) -> bool {
        (self.us, self.rem) <= (now_us, 0)
    }

    /// Refunds a charge, or a part of it, as far as the rules allow. No charge is refunded twice.
    pub(crate) fn refund(self, charged: Tat, cost: u32, now_us: u64) -> Self {
        if self.is_over(now_us)
            || self.since_us != charged.since_us
            || self.charged < charged.charged
        {
            return self;
        }
        let (mut after, cost) = (self, u64::from(cost));
        let since = self.charged - charged.charged;
        let mut later = since;
        if charged.charged > self.before_group {
            after.group = self.group.saturating_sub(cost);
            later = min(since, after.group);
        }
        let mut share = min(
            self.rate.time(cost),
            self.at_latest_start() - self.rate.time(later),
        );
        if since == 0 {
            share = self.rate.time(cost);
            after.charged = self.charged.saturating_sub(cost);
            after.before_group = min(self.before_group, after.charged);
            after.start_us = max(charged.before_us, min(self.start_us, now_us));
        }
        let end = self.parts() - share.max(0);
        after.with_parts(end.max(self.rate.parts_at(now_us)))
    }

    /// Contents of the bucket at the latest start.
    fn at_latest_start(&self) -> i128 {
        self.parts() - self.rate.parts_at(self.start_us)
    }

    fn with_charge(self, cost: u32, filled: i128, begins_us: u64) -> Self {
        let cost = u64::from(cost);
        let mut after = Self {
            charged: self.charged + cost,
            group: self.group + cost,
            start_us: max(self.start_us, begins_us),
            ..self
        }
        .with_parts(filled);
        if self.rate.time(after.group) > after.at_latest_start() {
            (after.before_group, after.group) = (self.charged, cost);
        }
        after
    }

    /// A state too far in the future was set before the clock was stepped back, or holds a debt that is forgotten.
    fn clamped(self, now_us: u64) -> Self {
        if self.is_remembered(now_us) {
            self
        } else {
            let clamped = self.with_parts(self.rate.latest(now_us));
            let start_us = min(self.start_us, now_us);
            Self {
                start_us,
                ..clamped.renewed()
            }
        }
    }

    fn is_remembered(&self, now_us: u64) -> bool {
        self.parts() <= self.rate.latest(now_us)
    }

    /// Converts to the same number of units under another rate, unless that rate cannot remember as many.
    fn converted(self, rate: Rate, now_us: u64) -> Option<Self> {
        let (of_old, of_new) = (i128::from(self.rate.period_us), i128::from(rate.period_us));
        let unit = i128::from(ROUNDING_PARTS);
        let ahead = self.parts() - self.rate.parts_at(now_us);
        let whole = ahead / of_old * unit;
        let fraction = (ahead % of_old * unit + of_old - 1) / of_old;
        let level = max(0, whole + fraction - i128::from(self.rounded));
        let parts = (level * of_new + unit - 1) / unit;
        let rounded = (parts * unit - level * of_new) / of_new;
        let end = rate.parts_at(now_us) + parts;
        let converted = Self {
            rate,
            rounded: rounded as u64,
            // The units drained since then did not drain at this rate.
            start_us: max(self.start_us, now_us),
            ..self
        };
        (end <= rate.latest(now_us)).then(|| converted.with_parts(end))
    }

    /// Excludes all charges until now from refunds.
    fn renewed(self) -> Self {
        Self {
            since_us: self.since_us + 1,
            charged: 0,
            before_group: 0,
            group: 0,
            ..self
        }
    }

    fn parts(&self) -> i128 {
        self.rate.parts_at(self.us) + i128::from(self.rem)
    }

    fn with_parts(self, parts: i128) -> Self {
        let (us, rem) = self.rate.split(parts);
        Self { us, rem, ..self }
    }

    pub(super) fn tat(self) -> Tat {
        Tat {
            us: self.us,
            rem: self.rem,
            rate: self.rate,
            since_us: self.since_us,
            charged: self.charged,
            before_us: self.start_us,
        }
    }
}

impl Tat {
    /// The state without its latest charge, of this cost.
    pub(crate) fn without(self, cost: u32) -> Self {
        let end = self.rate.parts_at(self.us) + i128::from(self.rem);
        let (us, rem) = self.rate.split(end - self.rate.time(cost.into()));
        Self { us, rem, ..self }
    }
}

fn common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 {
        one
    } else {
        common_divisor(other, one % other)
    }
}
