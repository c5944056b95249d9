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
    part::Part,
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
pub(crate) struct PermitReport {
    pub(crate) limit: LimitId,
    pub(crate) topic: Topic,
    pub(crate) keys: usize,
    pub(crate) permits: u64,
}

impl PermitReport {
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
    pub(crate) fn take(&mut self) -> impl Iterator<Item = PermitReport> + use<> {
        self.due = None;
        let pending = std::mem::take(&mut self.pending).into_iter();
        pending.map(
            |((limit, topic), Concerned { keys, permits })| PermitReport {
                limit,
                topic,
                keys: keys.len(),
                permits,
            },
        )
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

/// Number of [`Cause`]s.
pub(crate) const CAUSES: usize = 3;

impl Cause {
    pub(crate) fn of(failure: Failure) -> Self {
        match failure {
            Failure::Refused => Self::Refusal,
            Failure::Cut | Failure::TimedOut => Self::Outage,
        }
    }
}

/// The trouble of the store, as far as it was logged. The first part to fail speaks for all of them, and so does the last to
/// recover. Meanwhile each cause is told once: what is wrong may change.
#[derive(Debug, Default)]
pub(crate) struct StoreNews {
    failed: BTreeSet<Part>,
    told: Vec<(Cause, String)>,
}

/// A store that finds ever new words is not told of any further.
const MOST_TOLD: usize = 16;

impl StoreNews {
    /// Marks a part as failed. Returns whether no part had failed for this cause, since all were well.
    pub(crate) fn begins(&mut self, cause: Cause, why: &str, part: Part) -> bool {
        self.failed.insert(part);
        // Errors of the connection vary with the moment, for one cause. Those of a server have a code.
        let mut words = why.split(|one: char| !one.is_ascii_uppercase());
        let code = words.find(|word| word.len() >= SHORTEST_CODE).unwrap_or("");
        let told = (cause, code.to_owned());
        let is_news = self.told.len() < MOST_TOLD && !self.told.contains(&told);
        if is_news {
            self.told.push(told);
        }
        is_news
    }

    /// Marks a part as recovered. Returns whether this was the last failed part.
    pub(crate) fn ends(&mut self, part: Part) -> bool {
        let is_last = self.failed.remove(&part) && self.failed.is_empty();
        if is_last {
            self.told.clear();
        }
        is_last
    }
}

/// Length of `OOM`.
const SHORTEST_CODE: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_part_that_fails_and_the_last_that_recovers_are_news() {
        let mut news = StoreNews::default();
        let began = Part::all().filter(|part| news.begins(Cause::Outage, "timed out", *part));
        assert_eq!(began.collect::<Vec<_>>(), [Part::of(0)]);
        let ended = Part::all().rev().filter(|part| news.ends(*part));
        assert_eq!(ended.collect::<Vec<_>>(), [Part::of(0)]);
        assert!(!news.ends(Part::of(0)), "nothing was wrong");
    }

    #[test]
    fn a_cause_is_news_until_all_is_well() {
        let mut news = StoreNews::default();
        let mut is_news = |cause, why: &str| news.begins(cause, why, Part::of(0));
        let tells = [
            (Cause::Outage, "connection refused", true),
            (Cause::Outage, "no answer in 500ms", false),
            (Cause::Outage, "READONLY: the server is a replica", true),
            (Cause::Refusal, "127.0.0.1:1: WRONGPASS: the user", true),
            (Cause::Refusal, "127.0.0.1:2: WRONGPASS: the user", false),
            (Cause::Refusal, "NOPERM: the user", true),
            (Cause::Full, "OOM: the server", true),
            (Cause::Outage, "connection refused", false),
        ];
        for (cause, why, expected) in tells {
            assert_eq!(is_news(cause, why), expected, "{why}");
        }
        let ever_new = ('A'..='Z').filter(|one| is_news(Cause::Outage, &one.to_string().repeat(3)));
        assert_eq!(ever_new.count(), MOST_TOLD - 5);
        assert!(news.ends(Part::of(0)));
        assert!(news.begins(Cause::Outage, "connection refused", Part::of(0)));
    }
}
