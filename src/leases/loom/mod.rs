//! Interleavings of threads: leases, their owners and pools are used without the keeper's lock, and loom explores the
//! orders in which their steps can happen and the values that an atomic may show. `.ci/loom` runs it.
//!
//! | file | what holds in each |
//! | --- | --- |
//! | `lease` | **G2**: once over, a lease stays over, for the reason that it has; a renewal never revives it; a watcher is woken |
//! | `owners` | counts end at zero, one owner is the last, and nobody joins after it; a tenure is followed by one other; the last one closes the accounts |
//! | `pool` | **G1**: a slot is idle or has one permit; none is lost; none goes on when its lease is over; closed is closed; counts are exact |
//!
//! Times are passed in, as constants: loom knows no clock. So these check that a lease ends at its deadline as others see
//! it, not that threads agree on the time.

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

use super::{KeeperId, Lease, Pool, QueueId};
use crate::sync;

/// Explores the interleavings with at most `LOOM_MAX_PREEMPTIONS` switches where no thread waits, or two. Prints how many
/// there were.
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
        let lease = Lease::new(KeeperId(0), QueueId(0), seq, self.0, pool);
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
