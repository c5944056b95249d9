//! Shared by the tests: limiters that notice faults early, a count of permits that holders believe in, load, and waits.

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use tokio::{task::JoinHandle, time::timeout};
use tower_turnstile::{
    Acquire, AcquireErrorKind, Fallback, Limit, Limiter, LimiterBuilder, Permit, Semaphore,
};

use crate::support::redis_server::RedisServer;

pub(crate) const LEASE: Duration = Duration::from_secs(2);
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_millis(400);
pub(crate) const POLL: Duration = Duration::from_millis(200);
pub(crate) const WAITER_TTL: Duration = Duration::from_millis(1_200);
/// Allowance for a busy machine.
pub(crate) const SLACK: Duration = Duration::from_millis(700);
/// Longer than anything a test waits for.
pub(crate) const PATIENT: Duration = Duration::from_secs(20);

pub(crate) fn quick() -> LimiterBuilder {
    Limiter::builder()
        .lease(LEASE)
        .store_timeout(STORE_TIMEOUT)
        .poll_interval(POLL)
        .waiter_ttl(WAITER_TTL)
}

pub(crate) async fn replica(url: &str) -> Limiter {
    quick().connect(url).await.expect("its settings are right")
}

/// A limit whose requests wait, and are refused without the store.
pub(crate) fn strict(max: u32) -> Limit {
    Limit::try_concurrent("strict", max)
        .expect("a number of slots")
        .wait_up_to(PATIENT)
        .fallback(Fallback::Reject)
}

pub(crate) async fn semaphore(url: &str, limit: &Limit) -> Semaphore {
    replica(url).await.semaphore(limit, "key")
}

/// Fails instead of hanging.
pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    timeout(PATIENT, future).await.expect("in time")
}

/// Polls a request once, so that it is in flight.
pub(crate) fn start(request: &mut Acquire) {
    let polled = pin!(request).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending), "{polled:?}");
}

/// A request that queues in the store at this place.
pub(crate) async fn queue(semaphore: &Semaphore, place: u32) -> JoinHandle<Permit> {
    let request = semaphore.acquire();
    let task = tokio::spawn(async move { request.await.expect("a slot comes free") });
    until_usage(semaphore, |_, waiting| waiting == place).await;
    task
}

/// Waits until the slots in use and the waiters satisfy `is`. Returns how long it took.
pub(crate) async fn until_usage(semaphore: &Semaphore, is: impl Fn(u32, u32) -> bool) -> Duration {
    let began = Instant::now();
    let seen = async {
        loop {
            if let Ok(usage) = semaphore.usage().await
                && is(usage.in_use, usage.waiting)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    soon(seen).await;
    began.elapsed()
}

/// Slots in use and number of waiters.
pub(crate) async fn usage(semaphore: &Semaphore) -> (u32, u32) {
    let usage = semaphore.usage().await.expect("the store is up");
    (usage.in_use, usage.waiting)
}

/// Waits until the store is empty. Returns how long it took.
pub(crate) async fn until_empty(server: &RedisServer) -> Duration {
    let began = Instant::now();
    soon(crate::support::watch::until_empty(server)).await;
    began.elapsed()
}

/// Asks repeatedly until the store grants a permit. Returns how long it took.
pub(crate) async fn until_granted(semaphore: &Semaphore) -> Duration {
    let began = Instant::now();
    let granted = async {
        while semaphore.try_acquire().await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(granted).await;
    began.elapsed()
}

/// How often the server has run a command, including by scripts.
pub(crate) fn calls(server: &RedisServer, command: &str) -> usize {
    let stats = server.cli(&["INFO", "commandstats"]);
    let prefix = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
    let calls = line.and_then(|line| line.split(',').next());
    calls.map_or(0, |calls| calls.parse().expect("a number"))
}

/// Number of scripts that the server has run, by text or by digest.
pub(crate) fn scripts(server: &RedisServer) -> usize {
    calls(server, "eval") + calls(server, "evalsha")
}

/// All permits of a test that their holders believe in, over all replicas: counted at each new permit, and
/// continuously.
pub(crate) struct Holders {
    shared: Arc<Counted>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Default)]
struct Counted {
    cap: usize,
    held: Mutex<Vec<Weak<Permit>>>,
    peak: AtomicUsize,
    over: Mutex<Duration>,
    is_over: AtomicBool,
}

/// The cap, and the excess over it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    pub(crate) cap: usize,
    pub(crate) peak: usize,
    /// How long the cap was exceeded.
    pub(crate) over: Duration,
}

impl Holders {
    pub(crate) fn count(cap: u32) -> Self {
        let shared = Arc::new(Counted {
            cap: cap as usize,
            ..Counted::default()
        });
        let counted = shared.clone();
        let thread = thread::spawn(move || {
            let mut last = Instant::now();
            while !counted.is_over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
                let passed = last.elapsed();
                last += passed;
                if counted.now() > counted.cap {
                    *counted.over.lock().expect("no panic") += passed;
                }
            }
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Counts the permit from now on until it is dropped or lost.
    pub(crate) fn enter(&self, permit: Permit) -> Arc<Permit> {
        self.shared.enter(permit)
    }

    /// The figures so far.
    pub(crate) fn figures(&self) -> Figures {
        Figures {
            cap: self.shared.cap,
            peak: self.shared.peak.load(Ordering::Relaxed),
            over: *self.shared.over.lock().expect("no panic"),
        }
    }

    /// Waits until the cap has not been exceeded for this long. Returns the figures so far.
    pub(crate) async fn until_kept(&self, length: Duration) -> Figures {
        let kept = async {
            let mut before = self.figures();
            loop {
                tokio::time::sleep(length).await;
                let now = self.figures();
                if now.over == before.over {
                    return now;
                }
                before = now;
            }
        };
        soon(kept).await
    }

    /// Clients that repeatedly acquire, hold for this long, and release.
    pub(crate) fn load(&self, semaphore: &Semaphore, clients: usize, hold: Duration) -> Load {
        let ended = Arc::new(AtomicBool::new(false));
        let client = |_| {
            let (semaphore, ended, shared) =
                (semaphore.clone(), ended.clone(), self.shared.clone());
            tokio::spawn(async move {
                let mut done = Done::default();
                while !ended.load(Ordering::Relaxed) {
                    match semaphore.acquire().await {
                        Ok(permit) => {
                            let _held = shared.enter(permit);
                            done.admitted += 1;
                            tokio::time::sleep(hold).await;
                        }
                        Err(error) => {
                            *done
                                .refused
                                .entry(format!("{:?}", error.kind()))
                                .or_default() += 1;
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                    }
                }
                done
            })
        };
        let clients = (0..clients).map(client).collect();
        Load { ended, clients }
    }
}

impl Counted {
    fn enter(&self, permit: Permit) -> Arc<Permit> {
        let permit = Arc::new(permit);
        self.held
            .lock()
            .expect("no panic")
            .push(Arc::downgrade(&permit));
        self.peak.fetch_max(self.now(), Ordering::Relaxed);
        permit
    }

    fn now(&self) -> usize {
        let mut held = self.held.lock().expect("no panic");
        held.retain(|permit| permit.strong_count() > 0);
        let upgraded: Vec<_> = held.iter().filter_map(Weak::upgrade).collect();
        // The last owner of a permit releases it, which must not happen under this lock.
        drop(held);
        upgraded.iter().filter(|permit| !permit.is_lost()).count()
    }
}

impl Drop for Holders {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cap, peak, over } = self;
        write!(f, "peak {peak} of {cap}, over the cap for {over:?}")
    }
}

/// Clients that run until the load ends.
pub(crate) struct Load {
    ended: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Done>>,
}

#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) admitted: usize,
    /// By the name of the kind.
    pub(crate) refused: BTreeMap<String, usize>,
}

impl Load {
    pub(crate) async fn finish(self) -> Done {
        self.ended.store(true, Ordering::Relaxed);
        let mut all = Done::default();
        for client in self.clients {
            let done = soon(client).await.expect("no panic");
            all.admitted += done.admitted;
            for (kind, times) in done.refused {
                *all.refused.entry(kind).or_default() += times;
            }
        }
        all
    }
}

/// A failing acquire: the reason, and the time it took.
pub(crate) async fn refused(semaphore: &Semaphore) -> (AcquireErrorKind, Duration) {
    let began = Instant::now();
    let error = soon(semaphore.acquire()).await.expect_err("refused");
    (error.kind(), began.elapsed())
}
