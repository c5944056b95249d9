//! Real time, for the tests in modules called `timed`. All others assert events and counts, and never a time.
//!
//! A stall meter notes how late a sleeping thread of this process wakes: about as late as everything else that the test
//! waits for. Bounds grow by it.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Sleep of the meter's thread.
const NAP: Duration = Duration::from_millis(2);
/// How late a timer is on an idle machine.
const JITTER: Duration = Duration::from_micros(500);
/// Allowance on any machine.
const SLACK: Duration = Duration::from_millis(500);
/// Waits on the way of one result, in this process, in the server and in other processes, each of which may be as late as the
/// meter.
const WAITS: u32 = 4;

pub(crate) struct Stopwatch {
    began: Instant,
    late_before: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self {
            began: Instant::now(),
            late_before: late(),
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Fails if more time has passed than this, and than the machine's stalls explain. Returns the time, and prints both.
    #[track_caller]
    pub(crate) fn within(&self, bound: Duration, what: &str) -> Duration {
        let took = self.elapsed();
        let late = late() - self.late_before;
        println!("{what}: {took:?}, at most {bound:?}; the machine was late by {late:?}");
        assert!(
            took < bound + SLACK + WAITS * late,
            "{what}: {took:?}, at most {bound:?}; the machine was late by {late:?}"
        );
        took
    }
}

/// How late the meter's thread has woken since it was started, in sum.
fn late() -> Duration {
    static LATE_US: OnceLock<&'static AtomicU64> = OnceLock::new();
    let late_us = LATE_US.get_or_init(|| {
        let late_us: &AtomicU64 = Box::leak(Box::default());
        thread::spawn(move || {
            loop {
                let began = Instant::now();
                thread::sleep(NAP);
                let late = began.elapsed().saturating_sub(NAP + JITTER);
                late_us.fetch_add(late.as_micros() as u64, Ordering::Relaxed);
            }
        });
        late_us
    });
    Duration::from_micros(late_us.load(Ordering::Relaxed))
}
