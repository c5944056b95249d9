//! Interleavings of threads: leases, their owners and pools are used without the keeper's lock. Loom explores the
//! possible orders of their steps, and the values that an atomic may return. `.ci/loom` runs it.
//!
//! | file | property in each interleaving |
//! | --- | --- |
//! | `lease` | **G2**: an ended lease stays ended, for its first reason; a renewal never revives it; a watcher is woken |
//! | `owners` | counts end at zero, exactly one owner is the last, and nobody joins afterwards; a tenure has exactly one successor; the last owner closes the accounts |
//! | `pool` | **G1**: a slot is idle or has one permit; none is lost; none is used after its lease is over; a closed pool stays closed; counts are exact |
//!
//! Times are passed in, as constants, since loom does not model clocks. So these tests check that threads agree on a
//! lease's end, not on the time.

mod lease;
mod owners;
mod pool;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ::loom::{model::Builder, thread};
use tokio::time::Instant;

use super::{Lease, Pool, QueueId};
use crate::sync;

/// Explores the interleavings with at most `LOOM_MAX_PREEMPTIONS` switches where no thread waits, by default two.
/// Prints their number.
pub(crate) fn explore(name: &str, model: impl Fn(&Clock) + Sync + Send + 'static) {
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model(&Clock(Instant::now()));
    });
    let count = count.load(Ordering::Relaxed);
    println!("{name}: {count} interleavings");
}

/// Times, in seconds from the epoch of all leases.
#[derive(Clone, Copy)]
pub(crate) struct Clock(Instant);

impl Clock {
    fn at(&self, seconds: u64) -> Instant {
        self.0 + Duration::from_secs(seconds)
    }

    /// A lease with a deadline.
    fn lease(&self, seq: u64, pool: Option<&Arc<Pool>>, until: u64) -> Arc<Lease> {
        let pool = pool.map(|pool| pool.clone() as _);
        let lease = Lease::new(QueueId(0), seq, self.0, pool);
        lease.hold(Some(self.at(until)));
        lease.set_reusable(true);
        Arc::new(lease)
    }
}

/// A thread with the shard of this number.
pub(crate) fn spawn<T: 'static>(
    shard: usize,
    run: impl FnOnce() -> T + 'static,
) -> thread::JoinHandle<T> {
    thread::spawn(move || {
        sync::set_thread_number(shard);
        run()
    })
}

pub(crate) fn join<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().expect("no panic")
}
