//! The expected state of a rate, recalculated in whole numbers from the executed commands.

use crate::support::recorder::{Charge, Refund, State};

/// 33,331 tokens in 8 hours, so that few drain during a test. The count has no factor in common with the period, so
/// every charge leaves a remainder.
pub(super) const COUNT: u64 = 33_331;
pub(super) const PERIOD_US: u64 = 8 * 3_600 * 1_000_000;
pub(super) const BURST: u64 = 60_000;

/// The rate of one key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Replay {
    bucket: Option<Bucket>,
    /// The withheld part of refunds, in parts of a microsecond.
    pub(super) kept_back: i128,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// When the bucket is empty, in parts of a microsecond (`COUNT` parts each).
    end: i128,
    since_us: u64,
    /// Charged since then, and the part of it charged before the current group.
    charged: u64,
    before_group: u64,
    /// The standing part of the group.
    group: u64,
    start_us: u64,
}

impl Bucket {
    /// When the bucket is empty without this cost.
    fn without(&self, cost: u64) -> i128 {
        self.end - time_of(cost)
    }
}

impl Replay {
    /// Returns the bucket's end, and the state that identifies the charge.
    pub(super) fn charge(&mut self, now_us: u64, charge: &Charge) -> ([u64; 2], State) {
        let bucket = self.filled(now_us).unwrap_or(Bucket {
            end: parts(now_us),
            since_us: now_us,
            charged: 0,
            before_group: 0,
            group: 0,
            start_us: now_us,
        });
        // No stream waits for a future start.
        let mut after = Bucket {
            end: bucket.end + time_of(charge.cost),
            charged: bucket.charged + charge.cost,
            group: bucket.group + charge.cost,
            start_us: now_us.max(bucket.start_us),
            ..bucket
        };
        if after.without(after.group) < parts(after.start_us) {
            (after.before_group, after.group) = (bucket.charged, charge.cost);
        }
        self.bucket = Some(after);
        (
            end(&after),
            [after.since_us, after.charged, bucket.start_us],
        )
    }

    pub(super) fn refund(&mut self, now_us: u64, refund: &Refund) {
        let back = self.give_back(now_us, refund).unwrap_or(0);
        self.kept_back += time_of(refund.cost) - back;
    }

    /// Returns the amount, or `None` if the charge belongs to another filling, or was lost.
    fn give_back(&mut self, now_us: u64, refund: &Refund) -> Option<i128> {
        let mut bucket = self.filled(now_us)?;
        let [since_us, charged, before_us] = refund.charged;
        if since_us != bucket.since_us || charged > bucket.charged {
            return None;
        }
        let since = bucket.charged - charged;
        let is_of_group = charged > bucket.before_group;
        if is_of_group {
            bucket.group = bucket.group.saturating_sub(refund.cost);
        }
        // All charges that may have come later.
        let later = if is_of_group {
            since.min(bucket.group)
        } else {
            since
        };
        let lowest = match since {
            0 => i128::MIN,
            _ => parts(bucket.start_us) + time_of(later),
        };
        if since == 0 {
            bucket.charged = bucket.charged.saturating_sub(refund.cost);
            bucket.before_group = bucket.before_group.min(bucket.charged);
            bucket.start_us = before_us.max(bucket.start_us.min(now_us));
        }
        let end = bucket.without(refund.cost).max(lowest).max(parts(now_us));
        let back = (bucket.end - end).max(0);
        bucket.end -= back;
        self.bucket = Some(bucket);
        Some(back)
    }

    /// The bucket, unless everything has drained.
    fn filled(&self, now_us: u64) -> Option<Bucket> {
        self.bucket.filter(|bucket| bucket.end > parts(now_us))
    }

    pub(super) fn has_drained(&self, now_us: u64) -> bool {
        self.filled(now_us).is_none()
    }

    pub(super) fn lose(&mut self) {
        self.bucket = None;
    }

    /// The text in the store.
    pub(super) fn text(&self) -> Option<String> {
        let bucket = self.bucket?;
        let ([us, rem], rate) = (end(&bucket), format!("{COUNT}/{PERIOD_US}/{BURST}"));
        let Bucket {
            since_us,
            charged,
            before_group,
            group,
            start_us,
            ..
        } = bucket;
        Some(format!(
            "{us} {rem} {rate}/0/{before_group}/{group}/{start_us} {charged} {since_us}"
        ))
    }

    /// The counted cost, in parts of a microsecond.
    pub(super) fn counted(&self) -> i128 {
        let filled = |bucket: Bucket| bucket.end - parts(bucket.since_us);
        self.bucket.map_or(0, filled)
    }
}

fn end(bucket: &Bucket) -> [u64; 2] {
    let count = i128::from(COUNT);
    [bucket.end / count, bucket.end % count].map(|part| part as u64)
}

/// The duration of a cost.
pub(super) fn time_of(cost: u64) -> i128 {
    i128::from(cost) * i128::from(PERIOD_US)
}

fn parts(us: u64) -> i128 {
    i128::from(us) * i128::from(COUNT)
}
