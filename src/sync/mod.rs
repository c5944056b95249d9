//! The primitives for data that threads share without the keeper's lock (leases, tenures, pools, and the layer's
//! revocable responses): the types of std, futures and Tokio, or stand-ins while loom explores their interleavings
//! (`.ci/loom`).

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::PoisonError,
};

#[cfg(turnstile_loom)]
pub(crate) mod loom;
mod marker;
mod tasks;

#[cfg(turnstile_loom)]
pub(crate) use self::loom::*;
#[cfg(not(turnstile_loom))]
pub(crate) use self::real::*;
pub(crate) use self::{
    marker::{LockMarker, assert_unlocked},
    tasks::{Confirmation, Confirmations, Inquiry, StoredWaker},
};

/// Runs foreign code, and stops its panic after the panic hook has reported it.
pub(crate) fn shielded(run: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(run));
}

/// Locks a mutex, poisoned or not: its data are consistent even after a panic.
pub(crate) fn locked<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(not(turnstile_loom))]
mod real {
    use std::sync::atomic::AtomicUsize;
    pub(crate) use std::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };

    pub(crate) use futures_util::task::AtomicWaker;
    pub(crate) use tokio::sync::Notify;

    /// A number for the calling thread: consecutive from 0.
    pub(crate) fn thread_number() -> usize {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        // A thread may drop permits at its end, when its thread-locals are gone.
        NUMBER.try_with(|number| *number).unwrap_or(0)
    }
}
