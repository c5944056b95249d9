//! A lease: what a permit and its keeper both know of it, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::{sync::Notify, time::Instant};

use crate::ledger::Seq;

/// The deadline of a lease that ended.
const LOST: u64 = 0;
/// The deadline of a lease that needs no renewal.
const FOREVER: u64 = u64::MAX;

/// A local, conservative deadline. It only ever moves forward, until it is over; then it stays over.
pub(crate) struct Lease {
    /// The index of its line in the keeper.
    pub(super) line: usize,
    /// Its name in the ledger. It changes while the request waits: a name whose fate is unknown is never used again.
    seq: AtomicU64,
    epoch: Instant,
    /// Microseconds after `epoch`, or `LOST`, or `FOREVER`.
    until_us: AtomicU64,
    over: Notify,
}

impl Lease {
    pub(super) fn new(line: usize, seq: Seq, epoch: Instant) -> Self {
        Self {
            line,
            seq: AtomicU64::new(seq),
            epoch,
            until_us: AtomicU64::new(FOREVER),
            over: Notify::new(),
        }
    }

    /// Read and written under the keeper's lock only.
    pub(super) fn seq(&self) -> Seq {
        self.seq.load(Ordering::Relaxed)
    }

    pub(super) fn rename(&self, seq: Seq) {
        self.seq.store(seq, Ordering::Relaxed);
    }

    /// Sets the deadline of a permit that had none; `None` for one that needs no renewal.
    pub(super) fn hold(&self, until: Option<Instant>) {
        self.until_us.store(
            until.map_or(FOREVER, |until| self.us(until)),
            Ordering::Release,
        );
    }

    /// Moves the deadline forward, unless it is over by `now`. Returns whether the permit is still held.
    pub(super) fn extend(&self, until: Instant, now: Instant) -> bool {
        let (until, now) = (self.us(until), self.us(now));
        let moved =
            self.until_us
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| match old {
                    LOST => None,
                    FOREVER => Some(until),
                    old if now >= old => None,
                    old => Some(until.max(old)),
                });
        moved.is_ok()
    }

    /// Makes whoever waits for the loss look again.
    pub(super) fn stir(&self) {
        self.over.notify_waiters();
    }

    /// Ends it, whatever the deadline.
    pub(super) fn lose(&self) {
        self.until_us.store(LOST, Ordering::Release);
        self.over.notify_waiters();
    }

    /// It is given back: unless it was over by then, it is never lost any more.
    pub(super) fn return_at(&self, now: Instant) {
        let now = self.us(now);
        let returned = |until| match until {
            LOST => None,
            FOREVER => Some(FOREVER),
            until if now >= until => Some(LOST),
            _ => Some(FOREVER),
        };
        // `None` leaves it as it is: lost.
        let _ = self
            .until_us
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, returned);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_over(Instant::now())
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        let mut until = self.until_us.load(Ordering::Acquire);
        loop {
            match until {
                LOST => return true,
                FOREVER => return false,
                _ if self.us(now) < until => return false,
                // Whoever sees that it is over makes it so: a renewal that comes too late must not bring it back.
                _ => match self.until_us.compare_exchange(
                    until,
                    LOST,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(_) => return true,
                    Err(renewed) => until = renewed,
                },
            }
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.until_us.load(Ordering::Acquire) {
            LOST | FOREVER => None,
            us => Some(self.epoch + std::time::Duration::from_micros(us)),
        }
    }

    /// Completes when it is over. `attend` sees to it that somebody will tell: the keeper's driver may have gone with
    /// its runtime.
    pub(crate) async fn lost(&self, attend: impl Fn()) {
        loop {
            let over = self.over.notified();
            if self.is_lost() {
                return;
            }
            attend();
            over.await;
        }
    }

    /// At least 1, so that no deadline is taken for `LOST`.
    fn us(&self, at: Instant) -> u64 {
        (at.saturating_duration_since(self.epoch).as_micros() as u64).max(1)
    }
}
