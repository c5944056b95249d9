//! Gathers simultaneous events into one event of the log: permits of thousands of keys when a store recovers, and all
//! parts of a cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::Adopted;
use crate::{
    error::LostErrorKind,
    leases::QueueId,
    limit::{Limit, LimitId},
    part::{PARTS, Part},
    store::Failure,
};

/// How long a report waits for more of its kind.
const GATHERED_FOR: Duration = Duration::from_secs(1);

/// An event that affects permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Topic {
    /// Not renewed in time.
    Lost,
    /// Registered with a store that did not have them.
    Adopted(Adopted),
    /// Ended at the bound with this code.
    Ended(&'static str),
    /// Not permits but keys: an upstream asked for a pause.
    Paused,
}

/// Reports that are not logged yet.
#[derive(Default)]
pub(crate) struct Reports {
    pending: BTreeMap<(LimitId, Topic), Concerned>,
    due: Option<Instant>,
}

#[derive(Default)]
struct Concerned {
    keys: BTreeSet<QueueId>,
    permits: u64,
}

/// One event of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) limit: LimitId,
    pub(crate) topic: Topic,
    pub(crate) keys: usize,
    pub(crate) permits: u64,
}

impl Report {
    pub(crate) fn write(self, namespace: &str, limit: &Limit) {
        let (limit, keys, count) = (limit.name(), self.keys, self.permits);
        // Users search for these texts, so each is a literal.
        match self.topic {
            Topic::Lost => tracing::warn!(
                namespace,
                limit,
                keys,
                count,
                "permits were lost: not renewed in time"
            ),
            Topic::Adopted(Adopted::Lost) => tracing::warn!(
                namespace,
                limit,
                keys,
                count,
                "permits that the store had lost were put back"
            ),
            Topic::Adopted(Adopted::Fallback) => tracing::info!(
                namespace,
                limit,
                keys,
                count,
                "permits that a fallback had admitted were entered into the store"
            ),
            Topic::Ended(kind) => {
                tracing::info!(namespace, limit, keys, count, kind, "slots were taken back")
            }
            Topic::Paused => tracing::info!(
                namespace,
                limit,
                keys,
                count,
                "keys were paused: an upstream is overloaded"
            ),
        }
    }
}

impl Topic {
    /// `None`: the end was requested, so it is not reported.
    pub(crate) fn of_end(reason: Option<LostErrorKind>) -> Option<Self> {
        match reason? {
            LostErrorKind::Lost => Some(Self::Lost),
            bound @ (LostErrorKind::HeldTooLong | LostErrorKind::Idle) => {
                Some(Self::Ended(bound.as_str()))
            }
            LostErrorKind::ShutDown | LostErrorKind::Revoked => None,
        }
    }
}

impl Reports {
    pub(crate) fn add(
        &mut self,
        limit: LimitId,
        topic: Topic,
        key: QueueId,
        permits: u64,
        now: Instant,
    ) {
        let concerned = self.pending.entry((limit, topic)).or_default();
        concerned.keys.insert(key);
        concerned.permits += permits;
        self.due.get_or_insert(now + GATHERED_FOR);
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due
    }

    /// Takes all reports, to log them.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Report> + use<> {
        self.due = None;
        let pending = std::mem::take(&mut self.pending).into_iter();
        pending.map(|((limit, topic), Concerned { keys, permits })| Report {
            limit,
            topic,
            keys: keys.len(),
            permits,
        })
    }
}

/// Why a store has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Outage,
    Refusal,
    /// The store answers, but refuses to write.
    Full,
}

pub(crate) const CAUSES: usize = 3;

impl Cause {
    pub(crate) fn of(failure: Failure) -> Self {
        match failure {
            Failure::Refused => Self::Refusal,
            Failure::Cut | Failure::TimedOut => Self::Outage,
        }
    }
}

/// Failures of the store's parts that were logged: the first part to fail speaks for all of them, and so does the last
/// to recover. A bit for each cause and part.
#[derive(Debug, Default)]
pub(crate) struct StoreNews(u64);

const _: () = assert!(CAUSES * PARTS <= 64);

impl StoreNews {
    /// Marks a part as failed. Returns whether no part had failed before for this cause.
    pub(crate) fn begins(&mut self, cause: Cause, part: Part) -> bool {
        let all = ((1 << PARTS) - 1) << (cause as usize * PARTS);
        let is_first = self.0 & all == 0;
        self.0 |= bit(cause as usize, part);
        is_first
    }

    /// Marks a part as recovered. Returns whether this was the last failed part.
    pub(crate) fn ends(&mut self, part: Part) -> bool {
        let causes = (0..CAUSES).map(|cause| bit(cause, part));
        let own = causes.fold(0, |all, bit| all | bit);
        let had_failed = self.0 != 0;
        self.0 &= !own;
        had_failed && self.0 == 0
    }
}

fn bit(cause: usize, part: Part) -> u64 {
    1 << (cause * PARTS + part.number())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_part_that_fails_and_the_last_that_recovers_are_news() {
        let mut news = StoreNews::default();
        let began = Part::all().filter(|part| news.begins(Cause::Outage, *part));
        assert_eq!(began.collect::<Vec<_>>(), [Part::of(0)]);
        assert!(news.begins(Cause::Refusal, Part::of(15)), "another cause");
        let ended = Part::all().rev().filter(|part| news.ends(*part));
        assert_eq!(ended.collect::<Vec<_>>(), [Part::of(0)]);
        assert!(!news.ends(Part::of(0)), "nothing was wrong");
    }
}
