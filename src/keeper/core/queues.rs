//! The queues of a core, indexed by key, by ledger, and by their next work.
//!
//! [`change`](Queues::change) changes a queue and updates its listing, or drops the queue if it is idle.
//! [`without_listing`](Queues::without_listing) is for changes that do not affect where a queue is listed, or that a
//! `change` follows in the same step.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    hash::Hash,
    mem,
    num::NonZeroU32,
    ops,
    sync::Arc,
};

use slab::Slab;
use tokio::time::Instant;

use crate::{
    keeper::{
        context::Context,
        queue::{KeyTerms, Queue},
    },
    key::Key,
    leases::QueueId,
    limit::LimitId,
    part::{Part, Parts},
};

/// Number of idle queues of ledgers in this process that are kept: about 2 KiB each.
pub(in crate::keeper) const MAX_CACHED: usize = 64;

/// Capacity up to which a map is not shrunk.
pub(super) const SMALL_ROOM: usize = 1_000;

pub(super) struct Queues {
    /// Boxed, since growing the slab would otherwise take long.
    members: Slab<Box<ListedQueue>>,
    /// Indexed by [`LimitId`].
    by_key: Vec<ByKey>,
    /// Queues whose ledger is in the store.
    by_ledger: HashMap<Arc<str>, QueueId>,
    /// Queues with work, by part of the store and kind of work, in the order in which they got the work.
    ready: Box<[[Ready; 2]]>,
    due: BTreeSet<(Instant, QueueId)>,
    /// Queues that have been idle, and may be in use now, ordered by when each first became idle: a queue keeps its
    /// place while it is used.
    cached: VecDeque<QueueId>,
    /// Whether idle queues are kept for a while. With a ledger in this process the key is likely to recur, and
    /// rebuilding its queue costs more than all other work on it.
    caches: bool,
}

/// The kind of work that a queue has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkKind {
    /// Requests, and perhaps other work.
    Newcomers,
    /// Releases, renewals, introductions and polls.
    Others,
}

/// A row of queues, linked through its members: a queue whose kind of work changes leaves the row from the middle.
#[derive(Clone, Copy, Default)]
struct Ready {
    first: Option<QueueId>,
    last: Option<QueueId>,
    count: usize,
}

/// A queue next to another in a row, in four bytes, since each queue has two.
#[derive(Clone, Copy, Default)]
struct Neighbour(Option<NonZeroU32>);

impl Neighbour {
    fn to(id: Option<QueueId>) -> Self {
        Self(id.and_then(|id| NonZeroU32::new(id.0.wrapping_add(1))))
    }

    fn id(self) -> Option<QueueId> {
        self.0.map(|number| QueueId(number.get() - 1))
    }
}

/// A queue, and where it is listed.
struct ListedQueue {
    queue: Queue,
    /// Its row in `ready`.
    kind: Option<WorkKind>,
    /// Its neighbours in the row.
    before: Neighbour,
    after: Neighbour,
    /// Its place in `due`.
    due: Option<Instant>,
    /// Whether it is in `cached`.
    cached: bool,
}

/// The queues of one limit, by key.
#[derive(Default)]
struct ByKey {
    /// The queue of the key shared by all requests, found without a hash.
    shared: Option<QueueId>,
    /// Callers choose their keys, so the hash must be unpredictable.
    others: HashMap<Key, QueueId>,
}

impl Queues {
    pub fn new(parts: Parts, caches: bool) -> Self {
        Self {
            members: Slab::new(),
            by_key: Vec::new(),
            by_ledger: HashMap::new(),
            ready: parts.all().map(|_| [Ready::default(); 2]).collect(),
            due: BTreeSet::new(),
            cached: VecDeque::new(),
            caches,
        }
    }

    pub fn add_limit(&mut self) {
        self.by_key.push(ByKey::default());
    }

    /// The queue of a key, created if necessary. A queue that is idle after a change is dropped.
    #[inline]
    pub fn find_or_make(&mut self, ctx: &mut Context, limit: LimitId, key: &Key) -> QueueId {
        match self.of_key(limit, key) {
            Some(id) => id,
            None => self.make(ctx, limit, key),
        }
    }

    fn make(&mut self, ctx: &mut Context, limit: LimitId, key: &Key) -> QueueId {
        let id = QueueId::of_index(self.members.vacant_key());
        let rules = ctx.registry.limit(limit).clone();
        let ledger: Arc<str> = if ctx.shared {
            ctx.settings.ledger_name(key, rules.name()).into()
        } else {
            Arc::default()
        };
        let part = ctx.settings.part_of(key, rules.name());
        let terms = KeyTerms::new(id, (limit, key.clone()), (part, ledger), rules);
        let mut queue = Queue::new(terms, ctx);
        if !ctx.registry.overrides().is_empty() {
            queue.follow_limit(ctx);
        }
        queue.start(ctx);
        self.by_key[limit.0].insert(key.clone(), id);
        if ctx.shared {
            self.by_ledger.insert(queue.terms().ledger.clone(), id);
        }
        self.members.insert(Box::new(ListedQueue {
            queue,
            kind: None,
            before: Neighbour::default(),
            after: Neighbour::default(),
            due: None,
            cached: false,
        }));
        id
    }

    /// Changes a queue, then lists or drops it.
    #[inline]
    pub fn change<R>(
        &mut self,
        ctx: &mut Context,
        id: QueueId,
        change: impl FnOnce(&mut Queue, &mut Context) -> R,
    ) -> R {
        let result = change(&mut self.members[id.index()].queue, ctx);
        self.list(ctx, id);
        result
    }

    /// A queue for a change that does not affect its listing, or that [`change`](Self::change) follows in the same
    /// step.
    #[inline]
    pub fn without_listing(&mut self, id: QueueId) -> &mut Queue {
        &mut self.members[id.index()].queue
    }

    /// Lists a queue after a change, or drops it.
    pub fn list(&mut self, ctx: &mut Context, id: QueueId) {
        let member = &mut self.members[id.index()];
        member.queue.after_change(ctx);
        let kind = match member.kind {
            _ if member.queue.has_newcomers() => Some(WorkKind::Newcomers),
            // All its newcomers have left: those of other queues do not wait behind its remaining work. If no work
            // remains, the next exchange finds that out, which costs less than leaving the row now.
            Some(_) => Some(WorkKind::Others),
            None => member.queue.has_work().then_some(WorkKind::Others),
        };
        if kind != member.kind {
            self.leave_row(id);
            kind.into_iter().for_each(|kind| self.join_row(id, kind));
        }
        let member = &mut self.members[id.index()];
        let idle = member.kind.is_none() && member.queue.is_idle(ctx);
        let due = if idle { None } else { member.queue.next_due() };
        let due = due.map(|(at, _)| at);
        if due != member.due {
            if let Some(old) = member.due {
                self.due.remove(&(old, id));
            }
            self.due.extend(due.map(|at| (at, id)));
            member.due = due;
        }
        if idle {
            self.cache_or_drop(ctx, id);
        }
    }

    fn cache_or_drop(&mut self, ctx: &mut Context, id: QueueId) {
        if !self.caches {
            return self.drop_queue(ctx, id);
        }
        if !mem::replace(&mut self.members[id.index()].cached, true) {
            self.cached.push_back(id);
        }
        while self.cached.len() > MAX_CACHED {
            self.drop_oldest_cached(ctx);
        }
    }

    /// A queue in use only leaves the list, and returns when it is idle again.
    fn drop_oldest_cached(&mut self, ctx: &mut Context) {
        if let Some(id) = self.cached.pop_front() {
            let member = &mut self.members[id.index()];
            member.cached = false;
            if member.kind.is_none() && member.queue.is_idle(ctx) {
                self.drop_queue(ctx, id);
            }
        }
    }

    fn drop_queue(&mut self, ctx: &mut Context, id: QueueId) {
        self.members[id.index()].queue.empty_pool(ctx);
        let queue = self.members.remove(id.index()).queue;
        let terms = queue.terms();
        self.by_key[terms.limit_id.0].remove(&terms.key);
        self.by_ledger.remove(&terms.ledger);
        leave_room(&mut self.by_ledger);
    }

    /// From now on idle queues are dropped at once.
    pub fn stop_caching(&mut self, ctx: &mut Context) {
        self.caches = false;
        while !self.cached.is_empty() {
            self.drop_oldest_cached(ctx);
        }
    }
}

/// Lookup.
impl Queues {
    #[inline]
    pub fn of_key(&self, limit: LimitId, key: &Key) -> Option<QueueId> {
        self.by_key[limit.0].get(key)
    }

    pub fn of_ledger(&self, ledger: &str) -> Option<QueueId> {
        self.by_ledger.get(ledger).copied()
    }

    /// Whether the queue is still there: some are dropped on behalf of others.
    #[inline]
    pub fn has(&self, id: QueueId) -> bool {
        self.members.get(id.index()).is_some()
    }

    pub fn get(&self, id: QueueId) -> Option<&Queue> {
        let member = self.members.get(id.index())?;
        Some(&member.queue)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Queue> {
        self.members.iter().map(|(_, member)| &member.queue)
    }

    /// All, or those with ledgers in this part.
    pub fn ids(&self, of: Option<Part>) -> Vec<QueueId> {
        let terms = self.iter().map(Queue::terms);
        let terms = terms.filter(|terms| of.is_none_or(|part| terms.part == part));
        terms.map(|terms| terms.id).collect()
    }

    /// All ids are below this bound.
    pub fn id_bound(&self) -> QueueId {
        QueueId::of_index(self.members.capacity())
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Queues with work for a part of the store.
    pub fn ready(&self, part: Part) -> impl Iterator<Item = &Queue> {
        let after = |id: &QueueId| self.members[id.index()].after.id();
        let row = move |ready: &Ready| std::iter::successors(ready.first, after);
        let rows = self.ready[part.number()].iter();
        rows.flat_map(row).map(|id| &self[id])
    }

    pub fn ready_count(&self, part: Part) -> usize {
        let rows = self.ready[part.number()].iter();
        rows.map(|ready| ready.count).sum()
    }

    /// Number of queues with this kind of work.
    pub fn count_of(&self, part: Part, kind: WorkKind) -> usize {
        self.ready[part.number()][kind as usize].count
    }

    /// Removes the queue that has had this kind of work for the longest time. A [`change`](Self::change) has to follow.
    pub fn pop_ready(&mut self, part: Part, kind: WorkKind) -> Option<QueueId> {
        let id = self.ready[part.number()][kind as usize].first?;
        self.leave_row(id);
        Some(id)
    }

    fn join_row(&mut self, id: QueueId, kind: WorkKind) {
        let part = self[id].terms().part;
        let ready = &mut self.ready[part.number()][kind as usize];
        let last = ready.last.replace(id);
        ready.count += 1;
        match last {
            Some(last) => self.members[last.index()].after = Neighbour::to(Some(id)),
            None => ready.first = Some(id),
        }
        let member = &mut self.members[id.index()];
        (member.kind, member.before, member.after) =
            (Some(kind), Neighbour::to(last), Neighbour::default());
    }

    fn leave_row(&mut self, id: QueueId) {
        let member = &mut self.members[id.index()];
        let (before, after) = (mem::take(&mut member.before), mem::take(&mut member.after));
        let Some(kind) = member.kind.take() else {
            return;
        };
        let part = member.queue.terms().part;
        let ready = &mut self.ready[part.number()][kind as usize];
        ready.count -= 1;
        match before.id() {
            Some(before) => self.members[before.index()].after = after,
            None => ready.first = after.id(),
        }
        match after.id() {
            Some(after) => self.members[after.index()].before = before,
            None => ready.last = before.id(),
        }
    }

    /// When the next timer is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A queue with a timer that is due.
    pub fn overdue(&self, now: Instant) -> Option<QueueId> {
        let (_, id) = self.due.first().filter(|(at, _)| *at <= now)?;
        Some(*id)
    }
}

impl ops::Index<QueueId> for Queues {
    type Output = Queue;

    fn index(&self, id: QueueId) -> &Queue {
        &self.members[id.index()].queue
    }
}

impl ByKey {
    #[inline]
    fn get(&self, key: &Key) -> Option<QueueId> {
        if *key == Key::SHARED {
            self.shared
        } else {
            self.others.get(key).copied()
        }
    }

    fn insert(&mut self, key: Key, queue: QueueId) {
        if key == Key::SHARED {
            self.shared = Some(queue);
        } else {
            self.others.insert(key, queue);
        }
    }

    fn remove(&mut self, key: &Key) {
        if *key == Key::SHARED {
            self.shared = None
        } else {
            self.others.remove(key);
            leave_room(&mut self.others);
        }
    }
}

/// Releases the capacity of a map that has become much smaller.
fn leave_room<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    let room = map.capacity();
    if room > SMALL_ROOM && map.len() < room / 8 {
        map.shrink_to(room / 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::queue::audit::ensure;

    impl Queues {
        pub fn len(&self) -> usize {
            self.members.len()
        }

        /// Returns the first queue that is not listed as it should be.
        pub fn audit(&mut self, ctx: &Context) -> Result<(), String> {
            let rows = self
                .ready
                .iter()
                .map(|_| [BTreeSet::new(), BTreeSet::new()]);
            let (mut kinds, mut due) = (rows.collect::<Vec<_>>(), BTreeSet::new());
            for (id, member) in &mut self.members {
                let (id, queue) = (QueueId::of_index(id), &mut member.queue);
                let at = format!("queue {} ({})", id.0, queue.terms().limit().name());
                ensure!(
                    self.by_key[queue.terms().limit_id.0].get(&queue.terms().key) == Some(id),
                    "{at}: lost its key"
                );
                ensure!(
                    queue.terms().ledger.is_empty()
                        || self.by_ledger.get(&queue.terms().ledger) == Some(&id),
                    "{at}: lost its ledger"
                );
                let idle = member.kind.is_none() && queue.is_idle(ctx);
                ensure!(!idle || member.cached, "{at}: is idle and there");
                ensure!(
                    member.kind.is_some() || !queue.has_work(),
                    "{at}: has work and is not listed"
                );
                ensure!(
                    member.kind == Some(WorkKind::Newcomers) || !queue.has_newcomers(),
                    "{at}: has newcomers and is listed with others"
                );
                let next = if idle {
                    None
                } else {
                    queue.next_due().map(|(at, _)| at)
                };
                ensure!(
                    member.due == next,
                    "{at}: due {:?}, not {next:?}",
                    member.due
                );
                if let Some(kind) = member.kind {
                    kinds[queue.terms().part.number()][kind as usize].insert(id);
                }
                due.extend(member.due.map(|at| (at, id)));
            }
            let rows = self.ready.iter().flatten();
            for (ready, kind) in rows.zip(kinds.iter().flatten()) {
                let after = |id: &QueueId| self.members[id.index()].after.id();
                let row = std::iter::successors(ready.first, after);
                let row: Vec<_> = row.take(ready.count + 1).collect();
                let listed = row.iter().copied().collect();
                ensure!(*kind == listed, "listed {listed:?}, not {kind:?}");
                ensure!(
                    row.len() == ready.count && ready.last == row.last().copied(),
                    "{} in a row of {}",
                    row.len(),
                    ready.count
                );
            }
            let lens = self.by_key.iter().map(|keys| {
                let shared = usize::from(keys.shared.is_some());
                keys.others.len() + shared
            });
            ensure!(
                lens.sum::<usize>() == self.members.len(),
                "keys without queues"
            );
            ensure!(
                self.by_ledger.is_empty() || self.by_ledger.len() == self.members.len(),
                "ledgers without queues"
            );
            ensure!(due == self.due, "due {:?}, not {due:?}", self.due);
            Ok(())
        }
    }
}
