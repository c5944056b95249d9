//! The primitives under what threads share without the keeper's lock (its leases, tenures and pools, and the revocable
//! responses of the layer): those of std, futures and Tokio, or stand-ins while loom explores interleavings of them
//! (`.ci/loom`).

#[cfg(turnstile_loom)]
pub(crate) mod loom;

#[cfg(turnstile_loom)]
pub(crate) use self::loom::*;
pub(crate) use self::marker::{LockMarker, assert_unlocked};
#[cfg(not(turnstile_loom))]
pub(crate) use self::real::*;

#[cfg(not(turnstile_loom))]
mod real {
    use std::sync::atomic::AtomicUsize;
    pub(crate) use std::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };

    pub(crate) use futures_util::task::AtomicWaker;
    pub(crate) use tokio::sync::Notify;

    /// A number for the calling thread: consecutive, from 0 on.
    pub(crate) fn thread_number() -> usize {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        // A thread that ends may drop permits when its own values are gone.
        NUMBER.try_with(|number| *number).unwrap_or(0)
    }
}

/// In debug builds each thread knows whether it holds a lock under which no foreign code may run.
#[cfg(debug_assertions)]
mod marker {
    use std::{cell::Cell, thread};

    thread_local! {
        /// How many locks it holds.
        static LOCKED: Cell<u32> = const { Cell::new(0) };
    }

    /// As long as it lives, this thread runs no foreign code.
    pub(crate) struct LockMarker(());

    impl LockMarker {
        pub(crate) fn new() -> Self {
            change(|locked| locked + 1);
            Self(())
        }
    }

    impl Drop for LockMarker {
        fn drop(&mut self) {
            change(|locked| locked - 1);
        }
    }

    /// A thread that ends may drop permits when its own values are gone.
    fn change(by: impl FnOnce(u32) -> u32) {
        let _ = LOCKED.try_with(|cell| cell.set(by(cell.get())));
    }

    #[track_caller]
    pub(crate) fn assert_unlocked() {
        let locked = LOCKED.try_with(Cell::get).unwrap_or(0);
        assert!(
            locked == 0 || thread::panicking(),
            "foreign code under the lock of a keeper"
        );
    }
}

#[cfg(not(debug_assertions))]
mod marker {
    pub(crate) struct LockMarker(());

    impl LockMarker {
        pub(crate) fn new() -> Self {
            Self(())
        }
    }

    pub(crate) fn assert_unlocked() {}
}
