//! Interleavings of a response's owner with the end of its slot: the work ends with the slot, whichever ends first, and is
//! never taken twice.

use std::{
    sync::{Arc, Weak},
    task::{Context, Poll, Wake, Waker},
};

use super::{Cell, LostErrorKind, Tied, tests::tied};
use crate::{
    leases::loom::{explore, join, spawn},
    sync::{AtomicBool, AtomicWaker, Ordering},
};

/// A slot, and the waker that waits for its end.
struct Slot {
    is_over: AtomicBool,
    watcher: AtomicWaker,
}

impl Slot {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<LostErrorKind> {
        self.watcher.register(cx.waker());
        if self.is_over.load(Ordering::Acquire) {
            Poll::Ready(LostErrorKind::Idle)
        } else {
            Poll::Pending
        }
    }

    /// Ends the slot as the keeper does. `cell` looks in place of the task that a wake-up would spawn.
    fn end<T: Send + 'static>(&self, cell: &Arc<Cell<T>>) {
        self.is_over.store(true, Ordering::Release);
        self.watcher.wake();
        if cell.woken.load(Ordering::Acquire) {
            cell.look(&cell.clone().into());
        }
    }
}

/// Work whose drop a test can observe.
type Work = Arc<()>;

fn response() -> (Arc<Slot>, Tied<Work>, Weak<()>) {
    let slot = Arc::new(Slot {
        is_over: AtomicBool::new(false),
        watcher: AtomicWaker::new(),
    });
    let (work, watched) = (Work::new(()), slot.clone());
    let alive = Arc::downgrade(&work);
    let tied = tied(work, move |cx| watched.poll(cx));
    (slot, tied, alive)
}

fn poll(tied: &Tied<Work>, waker: &Waker) -> Poll<Result<(), LostErrorKind>> {
    tied.poll(&mut Context::from_waker(waker), |_, _| Poll::Pending)
}

/// The reader of a response: whether it was woken.
struct Reader(AtomicBool);

impl Wake for Reader {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn work_ends_with_its_slot() {
    explore("tied: watch and end", |_| {
        let (slot, tied, alive) = response();
        let cell = tied.cell.clone();
        let ending = spawn(0, move || slot.end(&cell));
        tied.watch();
        join(ending);
        assert_eq!(alive.strong_count(), 0, "no task polls it");
    });
}

#[test]
fn work_that_is_being_polled_ends_right_after() {
    explore("tied: poll and end", |_| {
        let (slot, tied, alive) = response();
        let cell = tied.cell.clone();
        let reader = Arc::new(Reader(AtomicBool::new(false)));
        let ending = spawn(0, move || slot.end(&cell));
        let polled = poll(&tied, &reader.clone().into());
        join(ending);
        assert_eq!(alive.strong_count(), 0);
        if polled.is_pending() {
            assert!(reader.0.load(Ordering::Acquire), "it would wait for ever");
            let polled = poll(&tied, Waker::noop());
            assert_eq!(polled, Poll::Ready(Err(LostErrorKind::Idle)));
        }
    });
}

#[test]
fn work_is_its_owners_or_gone() {
    explore("tied: free and end", |_| {
        let (slot, tied, alive) = response();
        tied.watch();
        let cell = tied.cell.clone();
        let ending = spawn(0, move || slot.end(&cell));
        let freed = tied.free();
        join(ending);
        assert_eq!(alive.strong_count(), usize::from(freed.is_some()));
    });
}

/// Two wake-ups, such as a loss that does not end the response, then a bound that does.
#[test]
fn wake_ups_that_meet_are_not_missed() {
    explore("tied: two wake-ups", |_| {
        let (slot, tied, alive) = response();
        tied.watch();
        let (cell, other) = (tied.cell.clone(), tied.cell.clone());
        let early = spawn(0, move || {
            other.woken.store(true, Ordering::Release);
            other.look(&other.clone().into());
        });
        let ending = spawn(1, move || slot.end(&cell));
        join(early);
        join(ending);
        assert_eq!(alive.strong_count(), 0);
    });
}
