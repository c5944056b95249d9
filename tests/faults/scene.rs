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

use tokio::task::JoinHandle;
use tower_turnstile::{
    Acquire, AcquireErrorKind, Fallback, Limit, Limiter, LimiterBuilder, Permit, Semaphore,
};

use crate::support::redis_server::RedisServer;
pub(crate) use crate::support::{GUARD, soon};

/// Longer than anything waits for: a lease, or a time to live, that must not end.
pub(crate) const LONG: Duration = GUARD.saturating_mul(5);

// Times of `quick`, for scenes about them.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_millis(400);
pub(crate) const POLL: Duration = Duration::from_millis(200);

/// Notices faults early. A stall of the machine is a fault too: requests may be refused, and permits lost.
pub(crate) fn quick() -> LimiterBuilder {
    Limiter::builder()
        .lease(LEASE)
        .store_timeout(STORE_TIMEOUT)
        .poll_interval(POLL)
        .waiter_ttl(6 * POLL)
}

/// For scenes about something else than these times: a stall of the machine changes nothing.
pub(crate) fn steady() -> LimiterBuilder {
    Limiter::builder()
        .lease(LONG)
        .store_timeout(Duration::from_secs(20))
        .poll_interval(POLL)
        .waiter_ttl(LONG)
}

pub(crate) async fn replica(url: &str) -> Limiter {
    quick().connect(url).await.expect("its settings are right")
}

/// A limit whose requests wait, and are refused without the store.
pub(crate) fn strict(max: u32) -> Limit {
    Limit::try_concurrent("strict", max)
        .expect("a number of slots")
        .wait_up_to(2 * GUARD)
        .fallback(Fallback::Reject)
}

pub(crate) async fn semaphore(url: &str, limit: &Limit) -> Semaphore {
    replica(url).await.semaphore(limit, "key").unwrap()
}

pub(crate) async fn steady_semaphore(url: &str, limit: &Limit) -> Semaphore {
    let limiter = steady().connect(url).await.expect("its settings are right");
    limiter.semaphore(limit, "key").unwrap()
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

/// Waits until the slots in use and the waiters satisfy `is`.
pub(crate) async fn until_usage(semaphore: &Semaphore, is: impl Fn(u32, u32) -> bool) {
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
}

/// Slots in use and number of waiters.
pub(crate) async fn usage(semaphore: &Semaphore) -> (u32, u32) {
    let usage = semaphore.usage().await.expect("the store is up");
    (usage.in_use, usage.waiting)
}

/// Waits until the store is empty.
pub(crate) async fn until_empty(server: &RedisServer) {
    soon(crate::support::watch::until_empty(server)).await;
}

/// A permit from the store. A request that was refused, as in an outage or after a stall of the machine, asks again.
pub(crate) async fn granted(semaphore: &Semaphore) -> Permit {
    soon(async {
        loop {
            match semaphore.acquire().await {
                Ok(permit) => return permit,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    })
    .await
}

/// Waits until the store grants a permit.
pub(crate) async fn until_granted(semaphore: &Semaphore) {
    drop(granted(semaphore).await);
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

    /// Clients that repeatedly acquire, hold for this long, and release. Each asks at least once.
    pub(crate) fn load(&self, semaphore: &Semaphore, clients: usize, hold: Duration) -> Load {
        let ended = Arc::new(AtomicBool::new(false));
        let client = |_| {
            let (semaphore, ended, shared) =
                (semaphore.clone(), ended.clone(), self.shared.clone());
            tokio::spawn(async move {
                let mut done = Done::default();
                loop {
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
                    if ended.load(Ordering::Relaxed) {
                        return done;
                    }
                }
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

/// The reason of a failing acquire.
pub(crate) async fn refused(semaphore: &Semaphore) -> AcquireErrorKind {
    let error = soon(semaphore.acquire()).await.expect_err("refused");
    error.kind()
}
