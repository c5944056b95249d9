//! Where the replicas of a test meet, and what tests wait for.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::task::JoinHandle;
use tower_turnstile::{Acquire, Limit, Limiter, Permit, Semaphore};

use crate::support::redis_server::RedisServer;

/// Longer than anything takes that a test waits for.
pub(crate) const PATIENT: Duration = Duration::from_secs(30);

pub(crate) enum Backend {
    Memory(Limiter),
    Redis(RedisServer),
}

/// Each case in memory and on a Redis server of its own.
macro_rules! conformance {
    ($($case:ident),* $(,)?) => {
        mod memory {
            use crate::backend::Backend;
            $(#[tokio::test] async fn $case() { super::$case(Backend::memory()).await })*
        }
        mod redis {
            use crate::backend::Backend;
            $(#[tokio::test] async fn $case() { super::$case(Backend::redis()).await })*
        }
    };
}

impl Backend {
    pub(crate) fn memory() -> Self {
        Self::Memory(Limiter::in_memory())
    }

    pub(crate) fn redis() -> Self {
        Self::Redis(RedisServer::start())
    }

    /// Another replica of the service. In memory there is only one.
    pub(crate) async fn replica(&self) -> Limiter {
        match self {
            Self::Memory(limiter) => limiter.clone(),
            Self::Redis(server) => Limiter::connect(&server.url())
                .await
                .expect("the server is up"),
        }
    }

    /// One that would be late for what it only learns when it asks.
    pub(crate) async fn replica_that_rarely_asks(&self) -> Limiter {
        match self {
            Self::Memory(limiter) => limiter.clone(),
            Self::Redis(server) => Limiter::builder()
                .lease(20 * PATIENT)
                .poll_interval(2 * PATIENT)
                .waiter_ttl(6 * PATIENT)
                .connect(&server.url())
                .await
                .expect("the server is up"),
        }
    }

    pub(crate) async fn semaphore(&self, limit: &Limit) -> Semaphore {
        self.replica().await.semaphore(limit, "key")
    }

    /// All keys of the store with what is in them; in memory nothing.
    pub(crate) fn contents(&self) -> Vec<String> {
        let Self::Redis(server) = self else {
            return Vec::new();
        };
        let mut keys: Vec<String> = lines(&server.cli(&["KEYS", "*"]));
        keys.sort();
        let content = |key: &String| match server.cli(&["TYPE", key]).as_str() {
            "zset" => server.cli(&["ZRANGE", key, "0", "-1", "WITHSCORES"]),
            _ => server.cli(&["GET", key]),
        };
        keys.iter()
            .map(|key| key.clone() + "\n" + &content(key))
            .collect()
    }

    /// The states of rates in the store; in memory nothing.
    pub(crate) fn rate_states(&self) -> Vec<String> {
        let Self::Redis(server) = self else {
            return Vec::new();
        };
        let keys = lines(&server.cli(&["KEYS", "*:rate"]));
        keys.iter().map(|key| server.cli(&["GET", key])).collect()
    }
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// Waits until that many wait in the store, so that the order of arrival is known.
pub(crate) async fn until_waiting(semaphore: &Semaphore, waiting: u32) {
    until(semaphore, |_, now| now == waiting).await;
}

pub(crate) async fn until_free(semaphore: &Semaphore) {
    until(semaphore, |in_use, waiting| in_use + waiting == 0).await;
}

pub(crate) async fn until(semaphore: &Semaphore, done: impl Fn(u32, u32) -> bool) {
    soon(async {
        loop {
            let usage = semaphore.usage().await.expect("the store is up");
            if done(usage.in_use, usage.waiting) {
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Slots in use, and waiters.
pub(crate) async fn usage(semaphore: &Semaphore) -> (u32, u32) {
    let usage = semaphore.usage().await.expect("the store is up");
    (usage.in_use, usage.waiting)
}

/// Fails rather than hangs.
pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENT, future)
        .await
        .expect("it comes about in time")
}

/// Polls a request once, so that it is under way.
pub(crate) fn start(request: &mut Acquire) {
    let polled = pin!(request).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending), "{polled:?}");
}

/// A request that waits at this place of the line.
pub(crate) async fn queue(semaphore: &Semaphore, place: u32) -> JoinHandle<Permit> {
    queue_under(semaphore, semaphore, place).await
}

/// A request that waits at this place of the line of `scope`, which is one of its limits.
pub(crate) async fn queue_under(
    semaphore: &Semaphore,
    scope: &Semaphore,
    place: u32,
) -> JoinHandle<Permit> {
    let request = semaphore.acquire();
    let task = tokio::spawn(async move { request.await.expect("a slot comes free") });
    until_waiting(scope, place).await;
    task
}
