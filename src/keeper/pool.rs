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
    array, iter,
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

/// Threads that would else wait for each other's lock have a shelf each.
const SHELVES: usize = 4;

/// The idle slots of one line.
pub(crate) struct Pool {
    shelves: [Shelf; SHELVES],
    meter: Arc<LimitMeter>,
}

/// In a line of the processor's cache of its own.
#[repr(align(128))]
struct Shelf(Mutex<Slots>);

/// What is said of the pool is said on each shelf.
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
    pub(super) fn new(meter: Arc<LimitMeter>) -> Self {
        let slots = || Slots {
            right: Right::None,
            idle: Vec::new(),
            surplus: 0,
            used: false,
            bound: 0,
            own_max: None,
        };
        let shelves = array::from_fn(|_| Shelf(Mutex::new(slots())));
        Self { shelves, meter }
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

    /// From the thread's own shelf, or from another one.
    fn take_if(&self, now: Instant, may: impl Fn(&Slots) -> bool) -> Option<Arc<Lease>> {
        let own = own_shelf();
        (own..own + SHELVES).find_map(|number| {
            let mut slots = self.shelves[number % SHELVES].lock();
            if slots.right.is_over(now) || !may(&slots) {
                return None;
            }
            // One that is over is the keeper's concern.
            let lease = iter::from_fn(|| self.pop(&mut slots)).find(|lease| !lease.is_over(now))?;
            slots.used = true;
            drop(slots);
            lease.begin_tenure(now);
            Some(lease)
        })
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
        let mut slots = self.shelves[own_shelf()].lock();
        if slots.right.is_over(now) || !may(&slots) || lease.is_over(now) {
            return false;
        }
        let held = lease.end_tenure(now);
        slots.idle.push(lease.clone());
        slots.used = true;
        drop(slots);
        self.meter.hold.record(held);
        self.meter.held.decrement(1.0);
        true
    }

    /// The store has given the right, until then.
    pub(super) fn open(&self, until: Instant) {
        self.each(|slots| slots.right = Right::Until(until));
    }

    /// The ledger is in this process, and nobody waits.
    pub(super) fn open_here(&self) {
        self.each(|slots| slots.right = Right::Ours);
    }

    /// The right is over: what lies idle is to be released.
    pub(super) fn close(&self) -> Vec<Arc<Lease>> {
        let mut idle = Vec::new();
        self.each(|slots| {
            slots.right = Right::None;
            idle.extend(iter::from_fn(|| self.pop(slots)));
        });
        idle
    }

    /// From time to time, while it has slots: what was not needed lately is to be released.
    pub(super) fn tend(&self, now: Instant) -> Vec<Arc<Lease>> {
        let mut used = false;
        self.each(|slots| used |= slots.used);
        if !used || self.first().right.is_over(now) {
            return self.close();
        }
        let mut idle = Vec::new();
        self.each(|slots| {
            let surplus = slots.surplus;
            idle.extend(iter::from_fn(|| self.pop(slots)).take(surplus));
            (slots.surplus, slots.used) = (slots.idle.len(), false);
        });
        idle
    }

    /// Whether the right is to be asked for, for the first time or again.
    pub(super) fn wants_right(&self, now: Instant) -> bool {
        self.first().right.is_over(now + RIGHT / 2)
    }

    pub(super) fn is_open(&self) -> bool {
        self.first().right != Right::None
    }

    pub(super) fn idle(&self) -> usize {
        let mut idle = 0;
        self.each(|slots| idle += slots.idle.len());
        idle
    }

    pub(super) fn set_own_max(&self, own_max: Option<u32>) {
        self.each(|slots| slots.own_max = own_max);
    }

    pub(super) fn bind(&self) {
        self.each(|slots| slots.bound += 1);
    }

    pub(super) fn unbind(&self) {
        self.each(|slots| slots.bound -= 1);
    }

    pub(super) fn is_bound(&self) -> bool {
        self.first().bound > 0
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<Seq> {
        let mut names = Vec::new();
        self.each(|slots| names.extend(slots.idle.iter().map(|lease| lease.seq())));
        names
    }

    fn pop(&self, slots: &mut Slots) -> Option<Arc<Lease>> {
        let lease = slots.idle.pop()?;
        slots.surplus = slots.surplus.min(slots.idle.len());
        self.meter.held.increment(1.0);
        Some(lease)
    }

    fn first(&self) -> MutexGuard<'_, Slots> {
        self.shelves[0].lock()
    }

    fn each(&self, mut visit: impl FnMut(&mut Slots)) {
        self.shelves
            .iter()
            .for_each(|shelf| visit(&mut shelf.lock()));
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The shelf of this thread.
fn own_shelf() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHELF: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHELVES;
    }
    // A thread that ends may drop permits when its own values are gone.
    SHELF.try_with(|shelf| *shelf).unwrap_or(0)
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
