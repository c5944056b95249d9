//! The primitives under `lease`, `tenure` and `pool`: those of std and Tokio, or stand-ins while loom explores
//! interleavings of them (`.ci/loom`).
//!
//! Everything else in the keeper runs under its one lock.

#[cfg(not(turnstile_loom))]
pub(super) use self::real::*;
#[cfg(turnstile_loom)]
pub(super) use super::loom::sync::*;

#[cfg(not(turnstile_loom))]
mod real {
    use std::sync::atomic::AtomicUsize;
    pub(in crate::keeper) use std::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };

    pub(in crate::keeper) use tokio::sync::Notify;

    /// A number for the calling thread: consecutive, from 0 on.
    pub(in crate::keeper) fn thread_number() -> usize {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        // A thread that ends may drop permits when its own values are gone.
        NUMBER.try_with(|number| *number).unwrap_or(0)
    }
}
