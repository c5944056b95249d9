//! Walks over all queues of a process, and the sums and rows that are made of them.
//!
//! A walk consists of looks at 256 queues and entries, each 4 to 20 microseconds under the lock, and yields in between,
//! so that requests can proceed. A look only copies; everything else happens without the lock.
//!
//! Tests: below; `operators/tests/operate/questions.rs`.

use std::{cmp::Reverse, collections::HashMap};

use tokio::{task::yield_now, time::Instant};

use crate::{
    keeper::KeeperHandle,
    key::Key,
    ledger::{TenantId, weight_of},
    limit::LimitId,
    operable::{Cursor, EntryLook, LOOK, PaceLook, QueueLook, RateLook, Seen, Which},
};

/// Number of rows kept during a walk: more than fit into an answer.
const MAX_ROWS: usize = 256;

/// Passes each selected queue to `fold` once, and then each of its entries.
pub(super) async fn walk(
    keeper: &KeeperHandle,
    which: &Which,
    mut fold: impl FnMut(&QueueLook, Option<EntryLook>),
) {
    let mut last: Option<QueueLook> = None;
    // Nothing is allocated under the lock.
    let mut all_seen = Vec::with_capacity(LOOK + 1);
    let mut from = Some(Cursor::default());
    while let Some(cursor) = from {
        from = keeper.look(cursor, which, &mut all_seen);
        for seen in all_seen.drain(..) {
            match (seen, &last) {
                (Seen::Entry(entry), Some(queue)) => fold(queue, Some(entry)),
                (Seen::Entry(_), None) => {}
                // A queue left in the middle by a look is visited again.
                (Seen::Queue(queue), Some(last))
                    if queue.budget.is_none()
                        && (queue.limit, &queue.key) == (last.limit, &last.key) => {}
                (Seen::Queue(queue), _) => fold(last.insert(queue), None),
            }
        }
        yield_now().await;
    }
}

/// The first rows of many, by rank.
struct Top<T, K> {
    rows: Vec<T>,
    dropped: u64,
    rank: fn(&T) -> K,
}

impl<T, K: Ord> Top<T, K> {
    fn new(rank: fn(&T) -> K) -> Self {
        Self {
            rows: Vec::new(),
            dropped: 0,
            rank,
        }
    }

    fn add(&mut self, row: T) {
        self.rows.push(row);
        if self.rows.len() > 4 * MAX_ROWS {
            self.cut();
        }
    }

    fn cut(&mut self) {
        self.rows.sort_by_key(self.rank);
        self.dropped += self.rows.len().saturating_sub(MAX_ROWS) as u64;
        self.rows.truncate(MAX_ROWS);
    }

    /// Returns the rows in order, and the number of dropped ones.
    fn finish(mut self) -> (Vec<T>, u64) {
        self.cut();
        (self.rows, self.dropped)
    }
}

/// A permit or a request of a key.
pub(super) struct SeenPermit {
    pub limit: LimitId,
    pub key: Key,
    pub entry: EntryLook,
}

impl SeenPermit {
    pub(super) fn new(queue: &QueueLook, entry: EntryLook) -> Self {
        Self {
            limit: queue.limit,
            key: queue.key.clone(),
            entry,
        }
    }
}

/// The oldest permits and requests, oldest first, and the number of the others.
pub(super) async fn permits(keeper: &KeeperHandle, which: &Which) -> (Vec<SeenPermit>, u64) {
    let mut top = Top::new(|permit: &SeenPermit| {
        let EntryLook { since, id, .. } = permit.entry;
        (since, id.member().seq)
    });
    walk(keeper, which, |queue, entry| {
        if let Some(entry) = entry {
            top.add(SeenPermit::new(queue, entry));
        }
    })
    .await;
    top.finish()
}

/// Slots in use, and waiting requests.
#[derive(Clone, Copy, Default)]
pub(super) struct Count {
    pub held: usize,
    pub waiting: usize,
    pub oldest: Option<Instant>,
}

impl Count {
    fn add(&mut self, entry: &EntryLook) {
        if entry.waits {
            self.waiting += 1;
            let oldest = self.oldest.unwrap_or(entry.since);
            self.oldest = Some(oldest.min(entry.since));
        } else {
            self.held += weight_of(entry.id.member().seq) as usize;
        }
    }
}

/// A key in use.
pub(super) struct KeySum {
    pub queue: QueueLook,
    pub count: Count,
}

/// The keys in use or paused, longest queues first; for a rate, smallest remaining budget first. And the number of the
/// others.
pub(super) async fn keys(keeper: &KeeperHandle, which: &Which) -> (Vec<KeySum>, u64) {
    let mut top = Top::new(|sum: &KeySum| {
        let Count { held, waiting, .. } = sum.count;
        let left = sum.queue.budget.map(|budget| budget.remaining);
        (Reverse((waiting, held)), left)
    });
    // A requested key is shown even if its whole burst is available.
    let shows = |budget: &RateLook| budget.is_used() || which.is_one();
    let is_used = |sum: &KeySum| {
        let is_known = sum.queue.budget.as_ref().is_some_and(shows) || sum.queue.pause.is_some();
        sum.count.held + sum.count.waiting > 0 || is_known
    };
    each_key(keeper, which, |sum| {
        if is_used(&sum) {
            top.add(sum);
        }
    })
    .await;
    top.finish()
}

/// A tenant in use.
pub(super) struct TenantSum {
    pub id: TenantId,
    pub name: Key,
    /// The largest of its requests.
    pub share: u32,
    pub count: Count,
}

/// The tenants in use, those with the most waiters first, and the number of the others. `one`: set to the key that has
/// been selected, or to the key that all callers share, if it is in use.
pub(super) async fn tenants(
    keeper: &KeeperHandle,
    which: &Which,
    one: &mut Option<Key>,
) -> (Vec<TenantSum>, u64) {
    // No more than permits and waiters of this process.
    let mut sums: HashMap<TenantId, TenantSum> = HashMap::new();
    walk(keeper, which, |queue, entry| {
        let Some((entry, tenant)) = entry.and_then(|mut entry| {
            let tenant = entry.tenant.take()?;
            Some((entry, tenant))
        }) else {
            if which.is_one() || queue.key == Key::SHARED {
                *one = Some(queue.key.clone());
            }
            return;
        };
        let sum = sums.entry(tenant.id).or_insert_with(|| TenantSum {
            id: tenant.id,
            name: tenant.name,
            share: tenant.share,
            count: Count::default(),
        });
        sum.share = sum.share.max(tenant.share);
        sum.count.add(&entry);
    })
    .await;
    let mut top = Top::new(|sum: &TenantSum| {
        let Count { held, waiting, .. } = sum.count;
        (Reverse((waiting, held)), sum.id)
    });
    sums.into_values().for_each(|sum| top.add(sum));
    top.finish()
}

/// The paused keys.
pub(super) async fn paused_keys(keeper: &KeeperHandle, which: &Which) -> Vec<KeySum> {
    let mut paused = Vec::new();
    each_key(keeper, which, |sum| {
        paused.extend(sum.queue.pause.is_some().then_some(sum));
    })
    .await;
    paused
}

/// Passes each selected key to `fold`.
async fn each_key(keeper: &KeeperHandle, which: &Which, mut fold: impl FnMut(KeySum)) {
    let mut last: Option<KeySum> = None;
    walk(keeper, which, |queue, entry| match (entry, &mut last) {
        (Some(entry), Some(sum)) => sum.count.add(&entry),
        _ => {
            let next = KeySum {
                queue: queue.clone(),
                count: Count::default(),
            };
            last.replace(next).map(&mut fold);
        }
    })
    .await;
    last.map(&mut fold);
}

/// A limit in use.
#[derive(Clone, Copy, Default)]
pub(super) struct LimitCount {
    pub count: Count,
    pub keys: usize,
    pub paused_keys: usize,
    pub recovering: bool,
    /// Of all keys, with the past of the last one.
    pub pace: Option<PaceLook>,
    /// The value that was found for the key shared by all callers.
    found: Option<u32>,
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

    /// The value of an adaptive limit, if all callers share it.
    pub(super) fn shared_max(&self) -> Option<u32> {
        self.found.filter(|_| self.is_shared())
    }

    fn add_pace(&mut self, key: &QueueLook) {
        let Some(mut pace) = key.pace else { return };
        if let Some(others) = self.pace.filter(|_| self.has_other) {
            pace.cuts += others.cuts;
            pace.overloaded += others.overloaded;
            pace.past = None;
        }
        (self.pace, self.found) = (Some(pace), Some(key.max));
    }

    fn count_key(&mut self) {
        self.keys += usize::from(!self.counted);
        self.counted = true;
    }
}

/// All limits that have queues or keys, by id.
pub(super) async fn limits(keeper: &KeeperHandle) -> Vec<LimitCount> {
    let mut all: Vec<LimitCount> = Vec::new();
    walk(keeper, &Which::All, |queue, entry| {
        let id = queue.limit.0;
        if all.len() <= id {
            all.resize(id + 1, LimitCount::default());
        }
        let limit = &mut all[id];
        if let Some(entry) = entry {
            limit.count_key();
            limit.count.add(&entry);
            return;
        }
        if queue.key == Key::SHARED {
            limit.has_shared = true
        } else {
            limit.has_other = true
        }
        limit.add_pace(queue);
        limit.counted = false;
        limit.paused_keys += usize::from(queue.pause.is_some());
        limit.recovering |= queue.recovering;
        if queue.budget.is_some_and(|budget| budget.is_used()) || queue.pause.is_some() {
            limit.count_key();
        }
    })
    .await;
    all
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Limit, Limiter, Permit};

    const PERMITS: u64 = 10_000;
    const MANY: Limit = Limit::concurrent("many", PERMITS as u32);

    async fn held(limiter: &Limiter, keys: u64) -> Vec<Permit> {
        let mut held = Vec::new();
        for number in 0..PERMITS {
            let semaphore = limiter.semaphore(&MANY, number % keys).unwrap();
            held.push(semaphore.acquire().await.expect("a free slot"));
        }
        held
    }

    #[tokio::test]
    async fn a_look_is_bounded() {
        for keys in [1, PERMITS] {
            let limiter = Limiter::in_memory();
            let _held = held(&limiter, keys).await;
            let keeper = limiter.keeper();
            let (mut from, mut entries) = (Some(Cursor::default()), 0);
            while let Some(cursor) = from {
                let mut seen = Vec::new();
                from = keeper.look(cursor, &Which::All, &mut seen);
                assert!(seen.len() <= LOOK + 1, "and the queue that it is in");
                entries += seen.len();
            }
            assert!(entries as u64 >= PERMITS + keys, "{entries}");
        }
    }

    /// The median time of a look under the lock.
    fn look_time(limiter: &Limiter, which: &Which) -> Duration {
        let keeper = limiter.keeper();
        let (mut from, mut times) = (Some(Cursor::default()), Vec::new());
        while let Some(cursor) = from {
            let mut seen = Vec::with_capacity(LOOK + 1);
            let start = Instant::now();
            from = keeper.look(cursor, which, &mut seen);
            times.push(start.elapsed());
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
            let one = Which::Of {
                limit: limiter.keeper().limit_of("many").expect("it is in use"),
                name: "many".to_owned(),
                key: None,
            };
            for (name, which) in [("all limits", &Which::All), ("one limit", &one)] {
                let time = (0..9).map(|_| look_time(&limiter, which)).min();
                let time = time.expect("some");
                println!("{PERMITS} permits, {keys} keys: a look at {name} takes {time:.1?}");
                assert!(time < Duration::from_micros(20));
            }
        }
    }
}
