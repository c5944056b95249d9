//! Stand-ins for the primitives of std and Tokio: see [`sync`](super).

use std::{
    cell::Cell,
    future::Future,
    mem,
    pin::Pin,
    sync::PoisonError,
    task::{Context, Poll, Waker},
};

use ::loom::sync::atomic;
pub(crate) use ::loom::sync::{Mutex, MutexGuard, atomic::Ordering};

/// An atomic whose accesses loom explores in every order. Loom remembers only the last access to an object. So on its
/// own it would not try a write by one thread before a read by another if the first thread also read before writing, as
/// every compare-and-swap loop does. Each read-modify-write concerns the previous one; relaxed, it orders nothing else.
macro_rules! atomic {
    ($name:ident, $value:ty) => {
        pub(crate) struct $name {
            value: atomic::$name,
            accesses: atomic::AtomicU64,
        }

        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                let (value, accesses) = (atomic::$name::new(value), atomic::AtomicU64::new(0));
                Self { value, accesses }
            }

            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.accessed().load(order)
            }

            pub(crate) fn store(&self, value: $value, order: Ordering) {
                self.accessed().store(value, order);
            }

            fn accessed(&self) -> &atomic::$name {
                self.accesses.fetch_add(1, Ordering::Relaxed);
                &self.value
            }
        }
    };
}

atomic!(AtomicBool, bool);
atomic!(AtomicU64, u64);

impl AtomicBool {
    pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
        self.accessed().swap(value, order)
    }
}

impl AtomicU64 {
    pub(crate) fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        let value = self.accessed();
        value.compare_exchange(current, new, success, failure)
    }

    pub(crate) fn fetch_update(
        &self,
        set_order: Ordering,
        fetch_order: Ordering,
        mut update: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        let mut now = self.load(fetch_order);
        while let Some(new) = update(now) {
            match self.compare_exchange(now, new, set_order, fetch_order) {
                Err(other) => now = other,
                done => return done,
            }
        }
        Err(now)
    }

    pub(crate) fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.accessed().fetch_sub(value, order)
    }
}

::loom::thread_local! {
    static NUMBER: Cell<usize> = Cell::new(0);
}

/// The model assigns the number, so that loom need not try all values.
pub(crate) fn set_thread_number(number: usize) {
    NUMBER.with(|own| own.set(number));
}

pub(crate) fn thread_number() -> usize {
    NUMBER.with(Cell::get)
}

/// The part of [`tokio::sync::Notify`] that a lease needs; Tokio checks it with loom itself. `notify_waiters` completes
/// all futures created earlier, and everything before the call happens before they complete.
pub(crate) struct Notify(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    calls: u64,
    wakers: Vec<Waker>,
}

impl Notify {
    pub(crate) fn new() -> Self {
        Self(Mutex::default())
    }

    pub(crate) fn notify_waiters(&self) {
        let mut waiting = self.lock();
        waiting.calls += 1;
        let wakers = mem::take(&mut waiting.wakers);
        drop(waiting);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        let calls = self.lock().calls;
        Notified { of: self, calls }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Notified<'a> {
    of: &'a Notify,
    calls: u64,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.of.lock();
        if waiting.calls > self.calls {
            return Poll::Ready(());
        }
        waiting.wakers.push(cx.waker().clone());
        Poll::Pending
    }
}

/// Like [`futures_util::task::AtomicWaker`]: `wake` wakes the last registered task. Everything before the wake happens
/// before the work of a task that registers later.
pub(crate) struct AtomicWaker(Mutex<Option<Waker>>);

impl AtomicWaker {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn register(&self, waker: &Waker) {
        *self.lock() = Some(waker.clone());
    }

    pub(crate) fn wake(&self) {
        let waker = self.lock().take();
        waker.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Waker>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
