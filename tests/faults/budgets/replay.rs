//! What the state of a rate must be: reckoned anew, in whole numbers, from what the server has run.

use crate::support::recorder::{Charge, Refund, State};

/// 33,331 tokens in 8 hours, so in a test only a few drain. It has no factor in common with the period: every charge
/// leaves a remainder.
pub(super) const COUNT: u64 = 33_331;
pub(super) const PERIOD_US: u64 = 8 * 3_600 * 1_000_000;
pub(super) const BURST: u64 = 60_000;

/// The rate of one key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Replay {
    bucket: Option<Bucket>,
    /// Refunds that came to nothing, as they may below a debt.
    pub(super) void: u64,
    /// Refunds that gave back whole microseconds only.
    pub(super) rounded: u64,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// When it is empty, in parts of a microsecond, `COUNT` to one.
    end: i128,
    refunded_us: u64,
    since_us: u64,
}

impl Replay {
    pub(super) fn charge(&mut self, now_us: u64, charge: &Charge) {
        let mut bucket = self.filled(now_us).unwrap_or(Bucket {
            end: parts(now_us),
            refunded_us: 0,
            since_us: now_us,
        });
        bucket.end += time_of(charge.cost);
        self.bucket = Some(bucket);
    }

    /// Returns whether something was given back.
    pub(super) fn refund(&mut self, now_us: u64, refund: &Refund) {
        match self.share_of(now_us, refund) {
            Some(after) => {
                self.rounded += u64::from(after.refunded_us > 0);
                self.bucket = Some(after);
            }
            None => self.void += refund.cost,
        }
    }

    fn share_of(&self, now_us: u64, refund: &Refund) -> Option<Bucket> {
        let mut bucket = self.filled(now_us)?;
        let [us, rem, refunded_us, since_us] = refund.charged;
        // Of this filling, and not from before a loss.
        let below_us = bucket.refunded_us.checked_sub(refunded_us);
        let below_us = below_us.filter(|_| since_us == bucket.since_us)?;
        let top = parts(us) + i128::from(rem) - parts(below_us);
        let (is_last, undrained) = (top == bucket.end, top - parts(now_us));
        let in_debt = bucket.end > parts(now_us) + time_of(BURST);
        if top > bucket.end {
            return None;
        }
        if is_last && undrained >= time_of(refund.cost) {
            bucket.end -= time_of(refund.cost);
            return Some(bucket);
        }
        let share_us = time_of(refund.cost).min(undrained) / i128::from(COUNT);
        if share_us <= 0 || in_debt && !is_last {
            return None;
        }
        bucket.end -= share_us * i128::from(COUNT);
        bucket.refunded_us += share_us as u64;
        Some(bucket)
    }

    /// Unless all has drained.
    fn filled(&self, now_us: u64) -> Option<Bucket> {
        self.bucket.filter(|bucket| bucket.end > parts(now_us))
    }

    pub(super) fn lose(&mut self) {
        self.bucket = None;
    }

    pub(super) fn state(&self) -> Option<State> {
        let bucket = self.bucket?;
        let count = i128::from(COUNT);
        let [us, rem] = [bucket.end / count, bucket.end % count].map(|part| part as u64);
        Some([us, rem, bucket.refunded_us, bucket.since_us])
    }

    /// What is counted, in parts of a microsecond.
    pub(super) fn counted(&self) -> i128 {
        let filled = |bucket: Bucket| bucket.end - parts(bucket.since_us);
        self.bucket.map_or(0, filled)
    }
}

/// The text in the store.
pub(super) fn text(state: State) -> String {
    let [us, rem, refunded_us, since_us] = state;
    format!("{us} {rem} {COUNT}/{PERIOD_US}/{BURST} {refunded_us} {since_us}")
}

/// The time that a cost fills.
pub(super) fn time_of(cost: u64) -> i128 {
    i128::from(cost) * i128::from(PERIOD_US)
}

fn parts(us: u64) -> i128 {
    i128::from(us) * i128::from(COUNT)
}
