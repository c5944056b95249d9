//! A pool: slots that came free while nobody waited, for the next requests of this process.
//!
//! A slot in the pool is held like any other: its lease is renewed, and the store counts it. The store gives the *right*
//! to keep slots for a moment, to whoever asks while nobody waits. While it lasts, slots go from one local permit to the
//! next under the pool's own lock, without the store, the keeper or its driver. When somebody waits or is refused
//! elsewhere, the right is recalled: what lies idle goes back at once, the rest when it comes free. If that message is
//! lost, the right ends by itself.
//!
//! The ledger in this process gives the same right for as long as nobody waits.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::Lease;
#[cfg(test)]
use crate::ledger::Seq;
use crate::{ledger::RIGHT_MS, telemetry::LimitMeter};

/// How long the store's right lasts, from the sending of the exchange that asked for it.
pub(super) const RIGHT: Duration = Duration::from_millis(RIGHT_MS);

/// The idle slots of one line.
pub(crate) struct Pool {
    slots: Mutex<Slots>,
    /// Idle slots in all pools of the keeper.
    all_idle: Arc<AtomicUsize>,
    meter: Arc<LimitMeter>,
}

struct Slots {
    right: Right,
    /// The last one to come free is the next one to go.
    idle: Vec<Arc<Lease>>,
    /// How many lay idle all the time since the pool was last tended.
    surplus: usize,
    /// Whether one came or went since then.
    used: bool,
    /// How many semaphores are bound to it.
    bound: usize,
    /// The line's own value of the limit: one that would change it has to be told to the keeper.
    own_max: Option<u32>,
}

#[derive(Clone, Copy, PartialEq)]
enum Right {
    None,
    Until(Instant),
    /// The ledger is in this process.
    Ours,
}

impl Pool {
    pub(super) fn new(all_idle: Arc<AtomicUsize>, meter: Arc<LimitMeter>) -> Self {
        Self {
            slots: Mutex::new(Slots {
                right: Right::None,
                idle: Vec::new(),
                surplus: 0,
                used: false,
                bound: 0,
                own_max: None,
            }),
            all_idle,
            meter,
        }
    }

    /// A slot for a new permit, if one lies idle and may be used.
    pub(super) fn take(&self, now: Instant) -> Option<Arc<Lease>> {
        self.take_if(now, |_| true)
    }

    /// As [`take`](Self::take), for a request that the keeper does not see, with its own value of the limit.
    pub(super) fn take_unseen(&self, own_max: Option<u32>) -> Option<Arc<Lease>> {
        let lease = self.take_if(Instant::now(), |slots| slots.own_max == own_max)?;
        self.meter.let_in(Duration::ZERO);
        Some(lease)
    }

    fn take_if(&self, now: Instant, may: impl Fn(&Slots) -> bool) -> Option<Arc<Lease>> {
        let mut slots = self.lock();
        if slots.right.is_over(now) || !may(&slots) {
            return None;
        }
        loop {
            let lease = self.pop(&mut slots)?;
            // One that is over is the keeper's concern.
            if !lease.is_over(now) {
                slots.used = true;
                lease.begin_tenure(now);
                return Some(lease);
            }
        }
    }

    /// Takes back the slot of a permit that is dropped; not if it may not be kept.
    pub(super) fn put(&self, lease: &Arc<Lease>, now: Instant) -> bool {
        self.put_if(lease, now, |_| true)
    }

    /// As [`put`](Self::put), behind the keeper's back: not if it has to see to it. A line of its own ledger that nobody
    /// is bound to is only dropped when it is seen to be idle.
    pub(super) fn put_unseen(&self, lease: &Arc<Lease>) -> bool {
        let may = |slots: &Slots| slots.right != Right::Ours || slots.bound > 0;
        lease.is_reusable() && self.put_if(lease, Instant::now(), may)
    }

    fn put_if(&self, lease: &Arc<Lease>, now: Instant, may: impl Fn(&Slots) -> bool) -> bool {
        let mut slots = self.lock();
        if slots.right.is_over(now) || !may(&slots) || lease.is_over(now) {
            return false;
        }
        self.meter.hold.record(lease.end_tenure(now));
        slots.idle.push(lease.clone());
        slots.used = true;
        self.all_idle.fetch_add(1, Ordering::Relaxed);
        self.meter.held.decrement(1.0);
        true
    }

    /// The store has given the right, until then.
    pub(super) fn open(&self, until: Instant) {
        self.lock().right = Right::Until(until);
    }

    /// The ledger is in this process, and nobody waits.
    pub(super) fn open_here(&self) {
        self.lock().right = Right::Ours;
    }

    /// The right is over: what lies idle is to be released.
    pub(super) fn close(&self) -> Vec<Arc<Lease>> {
        let mut slots = self.lock();
        slots.right = Right::None;
        let idle = slots.idle.len();
        self.pop_many(&mut slots, idle)
    }

    /// From time to time, while it has slots: what was not needed lately is to be released.
    pub(super) fn tend(&self, now: Instant) -> Vec<Arc<Lease>> {
        let mut slots = self.lock();
        if slots.right.is_over(now) || !slots.used {
            slots.right = Right::None;
            slots.surplus = slots.idle.len();
        }
        let surplus = slots.surplus;
        let idle = self.pop_many(&mut slots, surplus);
        (slots.surplus, slots.used) = (slots.idle.len(), false);
        idle
    }

    /// Whether the right is to be asked for, for the first time or again.
    pub(super) fn wants_right(&self, now: Instant) -> bool {
        self.lock().right.is_over(now + RIGHT / 2)
    }

    pub(super) fn is_open(&self) -> bool {
        self.lock().right != Right::None
    }

    pub(super) fn idle(&self) -> usize {
        self.lock().idle.len()
    }

    pub(super) fn set_own_max(&self, own_max: Option<u32>) {
        self.lock().own_max = own_max;
    }

    pub(super) fn bind(&self) {
        self.lock().bound += 1;
    }

    pub(super) fn unbind(&self) {
        self.lock().bound -= 1;
    }

    pub(super) fn is_bound(&self) -> bool {
        self.lock().bound > 0
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<Seq> {
        self.lock().idle.iter().map(|lease| lease.seq()).collect()
    }

    fn pop(&self, slots: &mut Slots) -> Option<Arc<Lease>> {
        let lease = slots.idle.pop()?;
        slots.surplus = slots.surplus.min(slots.idle.len());
        self.all_idle.fetch_sub(1, Ordering::Relaxed);
        self.meter.held.increment(1.0);
        Some(lease)
    }

    fn pop_many(&self, slots: &mut Slots, count: usize) -> Vec<Arc<Lease>> {
        (0..count).map_while(|_| self.pop(slots)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
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
