//! A pool: slots freed while no request waited, for the next requests of this process.
//!
//! A slot in the pool is held like any other: its lease is renewed, and the store counts it. The store grants the
//! *right* to keep slots for a moment to any replica that asks while no request waits. During that time slots pass from
//! one local permit to the next under the pool's own locks, without the store, the keeper or its driver. When a request
//! waits or is refused elsewhere, the right is recalled: idle slots are released at once, the others when they are
//! freed. If that message is lost, the right expires soon.
//!
//! The ledger in this process grants the same right for as long as no request waits.

use std::{
    array, iter, mem,
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::lease::{Lease, Recycle};
#[cfg(test)]
use crate::ledger::Seq;
use crate::{
    ledger::RIGHT_MS,
    limit::LimitValue,
    sync::{Mutex, MutexGuard, thread_number},
    telemetry::{LimitMeter, Measure},
};

/// How long the store's right lasts, from the sending of the exchange that requested it.
pub(crate) const RIGHT: Duration = Duration::from_millis(RIGHT_MS);

/// Loom explores every order of steps, and two shards already show every case.
const SHARDS: usize = if cfg!(turnstile_loom) { 2 } else { 4 };

/// The idle slots of one queue.
///
/// # Locks
///
/// Sharded, to reduce contention: a thread puts slots into its own shard, and searches the others only if its own is
/// empty. A slot is idle while it is in a shard, and is put there or taken out under the lock of that shard alone, so
/// two threads never have the same slot.
///
/// The keeper's lock comes before the shards' locks, which are taken in order if several are needed. Code under them
/// takes no lock, does not wait, and calls nothing foreign: no recorder of metrics, no waker.
///
/// All shards agree on the right, the number of semaphores and the limit's value, except while the keeper changes them
/// one by one. So each decision depends only on its own shard, under one lock. Once [`close`](Self::close) has visited
/// a shard, the shard is empty and accepts no slot. A slot released meanwhile is drained from a shard that `close` has
/// yet to visit, or is refused. In the same way no slot is put into a shard or taken from it for a permit once
/// [`withhold`](Self::withhold) has visited it.
///
/// The end of each permit is counted once (`turnstile_released_total` and others): by the pool that takes its slot, or
/// by the keeper under its lock, when the slot's entry is removed. An entry does not know whether its slot is idle, so
/// a keeper that finds the lease over first records the end, and then [removes](Self::remove) the slot from the shards.
/// A slot that was put back earlier is found there, and its permit was counted. A slot that comes later is refused,
/// since its lease is over by then: the lock of the shard orders the two.
pub(crate) struct Pool {
    shards: [Shard; SHARDS],
    meter: Arc<LimitMeter>,
}

/// Each on its own cache line.
#[repr(align(128))]
struct Shard(Mutex<Slots>);

#[derive(Default)]
struct Slots {
    right: Right,
    /// The right, while it is [withheld](Pool::withhold); `right` is `None` then.
    withheld: Option<Right>,
    /// The last slot in is the first slot out.
    idle: Vec<Arc<Lease>>,
    /// Number of slots idle since the pool was last tended.
    surplus: usize,
    /// Whether a slot was put or taken since then.
    used: bool,
    /// Number of semaphores bound to the pool.
    bound: usize,
    /// The queue's own value of the limit: a request that would change it must go through the keeper.
    own_value: Option<LimitValue>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Right {
    #[default]
    None,
    Until(Instant),
    /// The ledger is in this process.
    Ours,
}

impl Pool {
    pub(crate) fn new(meter: Arc<LimitMeter>) -> Self {
        let shards = array::from_fn(|_| Shard(Mutex::new(Slots::default())));
        Self { shards, meter }
    }

    /// Takes an idle slot for a new permit, if one is usable.
    pub(crate) fn take(&self, now: Instant) -> Option<Arc<Lease>> {
        self.take_if(now, |_| true)
    }

    /// Like [`take`](Self::take), for a request that bypasses the keeper, with its own value of the limit.
    pub(crate) fn take_unseen(&self, own_value: Option<LimitValue>) -> Option<Arc<Lease>> {
        self.take_if(Instant::now(), |slots| slots.own_value == own_value)
    }

    /// Call once a slot that was [taken unseen](Self::take_unseen) has an owner.
    pub(crate) fn record_take(&self) {
        self.meter.note(Measure::Held(1.0));
        self.meter.note(Measure::Admitted(Duration::ZERO));
    }

    fn take_if(&self, now: Instant, may: impl Fn(&Slots) -> bool) -> Option<Arc<Lease>> {
        let own = own_shard();
        let lease = (own..own + SHARDS).find_map(|number| {
            let mut slots = self.shards[number % SHARDS].lock();
            if slots.right.is_over(now) || !may(&slots) {
                return None;
            }
            let lease = slots.pop(|lease| !lease.is_over(now))?;
            slots.used = true;
            Some(lease)
        })?;
        lease.begin_tenure(now);
        Some(lease)
    }

    /// Takes the slot of a dropped permit, if the pool may keep it. Returns how the permit ended.
    pub(crate) fn put(&self, lease: &Arc<Lease>, now: Instant) -> Option<Measure> {
        self.put_if(lease, now, |_| true)
    }

    fn put_if(
        &self,
        lease: &Arc<Lease>,
        now: Instant,
        may: impl Fn(&Slots) -> bool,
    ) -> Option<Measure> {
        let mut slots = self.shards[own_shard()].lock();
        if slots.right.is_over(now) || !may(&slots) || lease.is_over(now) {
            return None;
        }
        // Read before the tenure ends, because a later permit is not revoked with this one.
        let reason = lease.end_reason();
        let held = lease.end_tenure(now);
        slots.idle.push(lease.clone());
        slots.used = true;
        Some(Measure::Ended(reason, held))
    }

    /// The store has granted the right until then.
    pub(crate) fn open(&self, until: Instant) {
        self.each(|slots| slots.set_right(Right::Until(until)));
    }

    /// The ledger is in this process, and no request waits.
    pub(crate) fn open_here(&self) {
        self.each(|slots| slots.set_right(Right::Ours));
    }

    /// A request is on its way to the store. Until the right is [restored](Self::restore), no newcomer takes a slot
    /// ahead of that request, and freed slots go through the keeper.
    pub(crate) fn withhold(&self) {
        self.each(|slots| {
            if slots.withheld.is_none() {
                slots.withheld = Some(mem::replace(&mut slots.right, Right::None));
            }
        });
    }

    /// The store has answered all requests.
    pub(crate) fn restore(&self) {
        self.each(|slots| {
            if let Some(right) = slots.withheld.take() {
                slots.right = right;
            }
        });
    }

    /// Whether slots may be kept, even if the right is withheld.
    pub(crate) fn has_right(&self, now: Instant) -> bool {
        !self.first().right().is_over(now)
    }

    /// Ends the right. Returns the idle slots, which the caller must release.
    pub(crate) fn close(&self) -> Vec<Arc<Lease>> {
        let mut idle = Vec::new();
        self.each(|slots| {
            slots.set_right(Right::None);
            slots.surplus = 0;
            idle.append(&mut slots.idle);
        });
        idle
    }

    /// Call periodically while the pool has slots. Returns the slots not needed lately, which the caller must release.
    pub(crate) fn tend(&self, now: Instant) -> Vec<Arc<Lease>> {
        let mut shards = self.lock_all();
        let used = shards.iter().any(|slots| slots.used);
        if !used || shards[0].right().is_over(now) {
            drop(shards);
            return self.close();
        }
        let mut idle = Vec::new();
        for slots in &mut shards {
            // The most recently freed slots stay.
            let surplus = slots.surplus;
            idle.extend(slots.idle.drain(..surplus));
            (slots.surplus, slots.used) = (slots.idle.len(), false);
        }
        idle
    }

    /// Takes up to `count` idle slots, which the caller must release. The right continues.
    pub(crate) fn withdraw(&self, count: usize, now: Instant) -> Vec<Arc<Lease>> {
        let mut idle = Vec::new();
        self.each(|slots| {
            let rest = count - idle.len();
            let slots = iter::from_fn(|| slots.pop(|lease| !lease.is_over(now)));
            idle.extend(slots.take(rest));
        });
        idle
    }

    /// Removes this slot, whose lease is over. Returns whether the slot was idle. Otherwise a permit has it, since a
    /// slot with an ended lease is neither put back nor taken.
    pub(crate) fn remove(&self, lease: &Arc<Lease>) -> bool {
        let is_it = |idle: &Arc<Lease>| Arc::ptr_eq(idle, lease);
        self.shards.iter().any(|shard| {
            let mut slots = shard.lock();
            let place = slots.idle.iter().position(is_it);
            let removed = place.map(|place| slots.remove(place));
            removed.is_some()
        })
    }

    /// Whether to request the right, for the first time or again.
    pub(crate) fn wants_right(&self, now: Instant) -> bool {
        self.first().right().is_over(now + RIGHT / 2)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.first().right() != Right::None
    }

    /// The number of idle slots. Takes all locks at once: if shards were counted one by one, a moving slot could be
    /// counted twice or missed.
    pub(crate) fn idle(&self) -> usize {
        self.lock_all().iter().map(|slots| slots.idle.len()).sum()
    }

    pub(crate) fn follow_own_value(&self, own_value: Option<LimitValue>) {
        self.each(|slots| slots.own_value = own_value);
    }

    pub(crate) fn bind(&self) {
        self.each(|slots| slots.bound += 1);
    }

    pub(crate) fn unbind(&self) {
        self.each(|slots| slots.bound -= 1);
    }

    pub(crate) fn is_bound(&self) -> bool {
        self.first().bound > 0
    }

    #[cfg(test)]
    pub(crate) fn names(&self) -> Vec<Seq> {
        let shards = self.lock_all();
        let idle = shards.iter().flat_map(|slots| &slots.idle);
        idle.map(|lease| lease.seq()).collect()
    }

    fn first(&self) -> MutexGuard<'_, Slots> {
        self.shards[0].lock()
    }

    fn lock_all(&self) -> [MutexGuard<'_, Slots>; SHARDS] {
        self.shards.each_ref().map(Shard::lock)
    }

    fn each(&self, mut visit: impl FnMut(&mut Slots)) {
        self.shards
            .iter()
            .for_each(|shard| visit(&mut shard.lock()));
    }
}

impl Recycle for Pool {
    /// Like [`put`](Pool::put), but bypasses the keeper. A queue with an in-process ledger and no bound semaphore is
    /// dropped only when a step finds it idle, so its slots must go through the keeper.
    fn put_unseen(&self, lease: &Arc<Lease>) -> bool {
        let may = |slots: &Slots| slots.right != Right::Ours || slots.bound > 0;
        if !lease.is_reusable() {
            return false;
        }
        let Some(ended) = self.put_if(lease, Instant::now(), may) else {
            return false;
        };
        self.meter.note(ended);
        self.meter.note(Measure::Held(-1.0));
        true
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The current thread's shard.
fn own_shard() -> usize {
    thread_number() % SHARDS
}

impl Slots {
    fn right(&self) -> Right {
        self.withheld.unwrap_or(self.right)
    }

    fn set_right(&mut self, right: Right) {
        match &mut self.withheld {
            Some(withheld) => *withheld = right,
            None => self.right = right,
        }
    }

    /// The most recently freed suitable slot. The keeper will find the unsuitable ones.
    fn pop(&mut self, will_do: impl Fn(&Lease) -> bool) -> Option<Arc<Lease>> {
        let last = self.idle.iter().rposition(|lease| will_do(lease))?;
        Some(self.remove(last))
    }

    fn remove(&mut self, place: usize) -> Arc<Lease> {
        let lease = self.idle.remove(place);
        self.surplus = self.surplus.min(self.idle.len());
        lease
    }
}

impl Right {
    fn is_over(self, at: Instant) -> bool {
        match self {
            Self::None => true,
            Self::Ours => false,
            Self::Until(until) => at >= until,
        }
    }
}
