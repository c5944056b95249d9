//! Walks over all queues of a process, and the visitors that collect the answers.
//!
//! A walk consists of looks at 256 queues and entries, each 4 to 20 microseconds under the lock, and yields in between,
//! so that requests can proceed.
//!
//! Tests: below; `tests/operate/questions.rs`.

use std::{cmp::Reverse, mem};

use tokio::{task::yield_now, time::Instant};

use super::{digest::KeyDigest, wire::Of};
use crate::{
    keeper::Keepers,
    key::Key,
    leases::Label,
    ledger::{MemberId, ReplicaId, Seq, weight_of},
    limit::LimitId,
    operable::{Cursor, EntryLook, RateLook, Visitor},
    status::Usage,
};

/// Number of rows kept during a walk: more than fit into an answer.
const MAX_ROWS: usize = 256;

/// A visitor for all keepers.
pub(super) trait Walk: Visitor {
    fn enter(&mut self, _replica: ReplicaId) {}

    /// Called between two looks, without the lock.
    fn rest(&mut self) {}
}

pub(super) async fn walk(keepers: &Keepers, visitor: &mut impl Walk) {
    for (keeper, replica) in keepers.replicas().enumerate() {
        visitor.enter(replica);
        let mut from = Some(Cursor::default());
        while let Some(cursor) = from {
            from = keepers.look(keeper, cursor, visitor);
            visitor.rest();
            yield_now().await;
        }
    }
}

/// Rows with an order: only the first ones are kept.
trait Ranked {
    type Rank: Ord;

    fn rank(&self) -> Self::Rank;
}

/// The first rows of many, by rank.
struct Top<T> {
    rows: Vec<T>,
    dropped: u64,
}

impl<T: Ranked> Top<T> {
    fn new() -> Self {
        Self {
            rows: Vec::new(),
            dropped: 0,
        }
    }

    fn prune(&mut self) {
        if self.rows.len() > 4 * MAX_ROWS {
            self.cut();
        }
    }

    fn cut(&mut self) {
        self.rows.sort_by_key(T::rank);
        self.dropped += self.rows.len().saturating_sub(MAX_ROWS) as u64;
        self.rows.truncate(MAX_ROWS);
    }

    /// Returns the rows in order, and the number of dropped ones.
    fn finish(mut self) -> (Vec<T>, u64) {
        self.cut();
        (self.rows, self.dropped)
    }
}

/// Selects the queues to count.
pub(super) struct Which {
    limit: LimitId,
    limit_name: String,
    key: Option<(KeyDigest, String)>,
}

impl Which {
    pub(super) fn new(limit: LimitId, of: &Of) -> Self {
        Self {
            limit,
            limit_name: of.limit.clone(),
            key: of.key.map(|key| (key, key.to_string())),
        }
    }

    /// Whether only one key is selected.
    fn is_one(&self) -> bool {
        self.key.is_some()
    }

    pub(super) fn counts(&self, limit: LimitId, key: &Key, ledger: &str) -> bool {
        let is_key = || match &self.key {
            None => true,
            // In memory the ledgers have no names.
            Some((digest, _)) if ledger.is_empty() => {
                *digest == KeyDigest::of(&self.limit_name, key)
            }
            Some((_, text)) => ledger.contains(text),
        };
        limit == self.limit && is_key()
    }
}

/// The oldest permits and requests of a limit.
pub(super) struct Permits {
    which: Which,
    replica: ReplicaId,
    key: Key,
    seen: Top<SeenPermit>,
}

pub(super) struct SeenPermit {
    pub since: Instant,
    pub member: MemberId,
    pub tenure: u64,
    pub key: Key,
    pub label: Option<Label>,
    pub waits: bool,
    pub place: u32,
}

impl Ranked for SeenPermit {
    type Rank = (Instant, Seq);

    fn rank(&self) -> (Instant, Seq) {
        (self.since, self.member.seq)
    }
}

impl Permits {
    /// Oldest first, with the number of dropped rows.
    pub(super) fn finish(self) -> (Vec<SeenPermit>, u64) {
        self.seen.finish()
    }

    pub(super) fn new(limit: LimitId, of: &Of) -> Self {
        Self {
            which: Which::new(limit, of),
            replica: ReplicaId::from_bits(0),
            key: Key::SHARED,
            seen: Top::new(),
        }
    }
}

impl Visitor for Permits {
    fn queue(&mut self, limit: LimitId, key: &Key, ledger: &str, _: &dyn Fn() -> Usage) -> bool {
        let counts = self.which.counts(limit, key, ledger);
        if counts {
            self.key = key.clone();
        }
        counts
    }

    fn entry(&mut self, entry: EntryLook<'_>) {
        let (replica, seq) = (self.replica, entry.lease.seq());
        self.seen.rows.push(SeenPermit {
            since: entry.since,
            member: MemberId { replica, seq },
            tenure: entry.tenure,
            key: self.key.clone(),
            label: entry.lease.label(entry.tenure),
            waits: entry.waits,
            place: entry.place,
        });
    }
}

impl Walk for Permits {
    fn enter(&mut self, replica: ReplicaId) {
        self.replica = replica;
    }

    fn rest(&mut self) {
        self.seen.prune();
    }
}

/// The keys of a limit, longest queues first; for a rate, smallest remaining budget first.
pub(super) struct Keys {
    which: Which,
    now: Option<KeySum>,
    seen: Top<KeySum>,
}

pub(super) struct KeySum {
    pub key: Key,
    pub held: usize,
    pub waiting: usize,
    pub max: u32,
    pub oldest: Option<Instant>,
    /// For a rate.
    pub budget: Option<RateLook>,
}

impl Ranked for KeySum {
    type Rank = (Reverse<(usize, usize)>, Option<u32>);

    fn rank(&self) -> Self::Rank {
        let left = self.budget.as_ref().map(|budget| budget.remaining);
        (Reverse((self.waiting, self.held)), left)
    }
}

impl Keys {
    pub(super) fn new(limit: LimitId, of: &Of) -> Self {
        Self {
            which: Which::new(limit, of),
            now: None,
            seen: Top::new(),
        }
    }

    fn next(&mut self, next: Option<KeySum>) {
        let last = mem::replace(&mut self.now, next);
        let is_used = |sum: &KeySum| sum.held + sum.waiting > 0;
        self.seen.rows.extend(last.filter(is_used));
    }

    pub(super) fn finish(mut self) -> (Vec<KeySum>, u64) {
        self.next(None);
        self.seen.finish()
    }
}

impl Visitor for Keys {
    fn queue(
        &mut self,
        limit: LimitId,
        key: &Key,
        ledger: &str,
        usage: &dyn Fn() -> Usage,
    ) -> bool {
        if !self.which.counts(limit, key, ledger) {
            return false;
        }
        // A queue left in the middle by a look is visited again.
        if self.now.as_ref().is_none_or(|now| now.key != *key) {
            self.next(Some(KeySum {
                key: key.clone(),
                held: 0,
                waiting: 0,
                max: usage().max,
                oldest: None,
                budget: None,
            }));
        }
        true
    }

    fn entry(&mut self, entry: EntryLook<'_>) {
        if let Some(sum) = &mut self.now {
            add(entry, &mut sum.held, &mut sum.waiting, &mut sum.oldest);
        }
    }

    fn rate(&mut self, limit: LimitId, key: &Key, look: &dyn Fn(Instant) -> Option<RateLook>) {
        // Rates do not have ledgers.
        if !self.which.counts(limit, key, "") {
            return;
        }
        // A requested key is shown even if its whole burst is available.
        let budget = look(Instant::now());
        let budget = budget.filter(|budget| budget.is_used() || self.which.is_one());
        self.seen.rows.extend(budget.map(|budget| KeySum {
            key: key.clone(),
            held: 0,
            waiting: 0,
            max: budget.max,
            oldest: None,
            budget: Some(budget),
        }));
    }
}

impl Walk for Keys {
    fn rest(&mut self) {
        self.seen.prune();
    }
}

/// All limits, by id.
#[derive(Default)]
pub(super) struct LimitCounts {
    pub by_limit: Vec<LimitCount>,
    now: Option<(LimitId, Key)>,
}

#[derive(Default)]
pub(super) struct LimitCount {
    pub held: usize,
    pub waiting: usize,
    pub keys: usize,
    pub oldest: Option<Instant>,
    /// Whether the key shared by all callers is known, and whether any other key is.
    has_shared: bool,
    has_other: bool,
    /// Whether the latest queue was counted as a key.
    counted: bool,
}

impl LimitCount {
    /// Whether the key shared by all callers is the only one.
    pub(super) fn is_shared(&self) -> bool {
        self.has_shared && !self.has_other
    }

    fn know(&mut self, key: &Key) {
        match *key == Key::SHARED {
            true => self.has_shared = true,
            false => self.has_other = true,
        }
    }
}

impl Visitor for LimitCounts {
    fn queue(&mut self, limit: LimitId, key: &Key, _: &str, _: &dyn Fn() -> Usage) -> bool {
        if self.by_limit.len() <= limit.0 {
            self.by_limit.resize_with(limit.0 + 1, LimitCount::default);
        }
        let now = (limit, key.clone());
        if self.now.as_ref() != Some(&now) {
            self.by_limit[limit.0].counted = false;
            self.by_limit[limit.0].know(key);
            self.now = Some(now);
        }
        true
    }

    fn entry(&mut self, entry: EntryLook<'_>) {
        if let Some((limit, _)) = &self.now {
            let count = &mut self.by_limit[limit.0];
            if !mem::replace(&mut count.counted, true) {
                count.keys += 1;
            }
            add(
                entry,
                &mut count.held,
                &mut count.waiting,
                &mut count.oldest,
            );
        }
    }

    fn rate(&mut self, limit: LimitId, key: &Key, look: &dyn Fn(Instant) -> Option<RateLook>) {
        if self.by_limit.len() <= limit.0 {
            self.by_limit.resize_with(limit.0 + 1, LimitCount::default);
        }
        self.by_limit[limit.0].know(key);
        if look(Instant::now()).is_some_and(|budget| budget.is_used()) {
            self.by_limit[limit.0].keys += 1;
        }
    }
}

impl Walk for LimitCounts {}

fn add(entry: EntryLook<'_>, held: &mut usize, waiting: &mut usize, oldest: &mut Option<Instant>) {
    if entry.waits {
        *waiting += 1;
        *oldest = Some(oldest.map_or(entry.since, |oldest| oldest.min(entry.since)));
    } else {
        *held += weight_of(entry.lease.seq()) as usize;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Limit, Limiter, Permit, operable::LOOK};

    const PERMITS: u64 = 10_000;
    const MANY: Limit = Limit::concurrent("many", PERMITS as u32);

    async fn held(limiter: &Limiter, keys: u64) -> Vec<Permit> {
        let mut held = Vec::new();
        for number in 0..PERMITS {
            let semaphore = limiter.semaphore(&MANY, number % keys);
            held.push(semaphore.acquire().await.expect("a free slot"));
        }
        held
    }

    /// Counts the queues and entries per look.
    #[derive(Default)]
    struct Passed(usize);

    impl Visitor for Passed {
        fn queue(&mut self, _: LimitId, _: &Key, _: &str, _: &dyn Fn() -> Usage) -> bool {
            self.0 += 1;
            true
        }

        fn entry(&mut self, _: EntryLook<'_>) {
            self.0 += 1;
        }
    }

    #[tokio::test]
    async fn a_look_is_bounded() {
        for keys in [1, PERMITS] {
            let limiter = Limiter::in_memory();
            let _held = held(&limiter, keys).await;
            let keepers = limiter.keepers();
            let (mut from, mut entries) = (Some(Cursor::default()), 0);
            while let Some(cursor) = from {
                let mut passed = Passed::default();
                from = keepers.look(0, cursor, &mut passed);
                assert!(passed.0 <= LOOK + 1, "and the queue that it is in");
                entries += passed.0;
            }
            assert!(entries as u64 >= PERMITS + keys, "{entries}");
        }
    }

    /// The median time of a look under the lock.
    fn look_time(limiter: &Limiter, visitor: &mut impl Walk) -> Duration {
        let keepers = limiter.keepers();
        let (mut from, mut times) = (Some(Cursor::default()), Vec::new());
        while let Some(cursor) = from {
            let start = Instant::now();
            from = keepers.look(0, cursor, visitor);
            times.push(start.elapsed());
            visitor.rest();
        }
        times.sort();
        times[times.len() / 2]
    }

    /// `cargo test -p tests --release --all-features --lib operate::walk -- --ignored --nocapture`
    #[tokio::test]
    #[ignore = "measures times: of a release build, with nothing else running"]
    async fn a_look_takes_20_microseconds() {
        for keys in [1, PERMITS] {
            let limiter = Limiter::in_memory();
            let _held = held(&limiter, keys).await;
            let (limit, key) = ("many".to_owned(), None);
            let of = Of { limit, key };
            let number = limit_id(&limiter);
            let best = |time: &dyn Fn() -> Duration| (0..9).map(|_| time()).min();
            for (name, time) in [
                (
                    "limits",
                    best(&|| look_time(&limiter, &mut LimitCounts::default())),
                ),
                (
                    "keys",
                    best(&|| look_time(&limiter, &mut Keys::new(number, &of))),
                ),
                (
                    "permits",
                    best(&|| look_time(&limiter, &mut Permits::new(number, &of))),
                ),
            ] {
                let time = time.expect("some");
                println!("{PERMITS} permits, {keys} keys: a look for {name} takes {time:.1?}");
                assert!(time < Duration::from_micros(20));
            }
        }
    }

    fn limit_id(limiter: &Limiter) -> LimitId {
        let keepers = limiter.keepers();
        keepers.limit_id("many").expect("it is in use")
    }
}
