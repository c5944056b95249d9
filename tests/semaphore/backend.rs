//! The stores that a test's replicas share, and conditions that tests wait for.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use std::{
    fmt::Debug,
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinHandle, yield_now},
    time::sleep,
};
#[cfg(feature = "test-util")]
use tower_turnstile::test_util::TestStore;
use tower_turnstile::{Acquire, Limit, Limiter, LimiterBuilder, Permit, Semaphore};

use crate::support::redis_cluster::RedisCluster;
use crate::support::redis_server::RedisServer;
pub(crate) use crate::support::{GUARD, soon};

/// Settings with which nothing comes free because it expires, and no stall of a busy machine is an outage.
pub(crate) fn lasting() -> LimiterBuilder {
    Limiter::builder()
        .lease(10 * GUARD)
        .store_timeout(GUARD)
        .waiter_ttl(10 * GUARD)
}

pub(crate) async fn connect(server: &RedisServer) -> Limiter {
    lasting().connect(&server.url()).await.expect("it is up")
}

pub(crate) enum Backend {
    Memory(Limiter),
    Redis(RedisServer),
    #[cfg(feature = "test-util")]
    Test(TestStore),
    Cluster(Arc<RedisCluster>, String),
}

/// The guarantees that every store keeps.
macro_rules! promises {
    ($run:ident) => {
        $run! {
            a_free_slot_is_granted_at_once,
            the_cap_holds_under_load,
            waiters_are_served_in_order_across_replicas,
            a_newcomer_never_overtakes,
            a_request_that_does_not_wait_is_refused,
            a_full_line_refuses,
            a_question_admits_nobody_above_the_keys_own_value,
            a_wait_ends_in_time,
            a_cancelled_waiter_leaves_the_line,
            a_cancelled_head_makes_way,
            a_grant_that_nobody_takes_returns,
            an_unpolled_request_costs_nothing,
            keys_do_not_share_slots,
            limits_do_not_share_slots,
            shutdown_refuses_waiters_and_takes_back_permits,
            shutdown_waits_for_holders_and_waiters,
            dropping_a_permit_outside_a_runtime_is_fine,
            a_panicking_holder_gives_its_slot_back,
            hostile_keys_work,
        }
    };
}

/// Runs each case in memory, on a separate Redis server, and in a separate namespace on a cluster.
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
        mod cluster {
            use crate::backend::Backend;
            $(#[tokio::test] async fn $case() { super::$case(Backend::cluster()).await })*
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

    #[cfg(feature = "test-util")]
    pub(crate) fn test_store() -> Self {
        Self::Test(TestStore::new())
    }

    pub(crate) fn cluster() -> Self {
        static NAMESPACES: AtomicUsize = AtomicUsize::new(0);
        let number = NAMESPACES.fetch_add(1, Ordering::Relaxed);
        Self::Cluster(RedisCluster::shared(), format!("test{number}"))
    }

    /// Another replica of the service. In memory there is only one.
    pub(crate) async fn replica(&self) -> Limiter {
        self.connect(lasting()).await
    }

    /// A replica that would notice too late anything it only learns by polling.
    pub(crate) async fn replica_that_rarely_asks(&self) -> Limiter {
        self.connect(lasting().poll_interval(2 * GUARD)).await
    }

    async fn connect(&self, builder: LimiterBuilder) -> Limiter {
        let connected = match self {
            Self::Memory(limiter) => return limiter.clone(),
            Self::Redis(server) => builder.connect(&server.url()).await,
            #[cfg(feature = "test-util")]
            Self::Test(store) => builder.connect_to(store).await,
            Self::Cluster(cluster, namespace) => {
                builder.namespace(namespace).connect(&cluster.url()).await
            }
        };
        connected.expect("the server is up")
    }

    pub(crate) async fn semaphore(&self, limit: &Limit) -> Semaphore {
        self.replica().await.semaphore(limit, "key").unwrap()
    }

    /// Whether replicas share a store.
    pub(crate) fn is_shared(&self) -> bool {
        !matches!(self, Self::Memory(_))
    }

    /// In a cluster, limits are asked one after another, and a refusal refunds or releases the earlier ones.
    pub(crate) fn is_a_cluster(&self) -> bool {
        matches!(self, Self::Cluster(..))
    }

    /// All keys of the store with their contents; in memory nothing.
    pub(crate) fn contents(&self) -> Vec<String> {
        let content = |server: &RedisServer, key: &str| match server.cli(&["TYPE", key]).as_str() {
            "zset" => server.cli(&["ZRANGE", key, "0", "-1", "WITHSCORES"]),
            _ => server.cli(&["GET", key]),
        };
        let mut contents = self.each_key("*", |server, key| {
            format!("{key}\n{}", content(server, key))
        });
        contents.sort();
        contents
    }

    /// The states of rates in the store; in memory nothing.
    pub(crate) fn rate_states(&self) -> Vec<String> {
        let mut states = self.each_key("*:rate", |server, key| server.cli(&["GET", key]));
        // Expired since they were listed.
        states.retain(|state| !state.is_empty());
        states
    }

    /// When the rates in Redis will be empty: microseconds, and the remainder.
    pub(crate) fn rate_ends(&self) -> Vec<String> {
        let end = |state: String| state.split(' ').take(2).collect::<Vec<_>>().join(" ");
        self.rate_states().into_iter().map(end).collect()
    }

    fn each_key<T>(&self, pattern: &str, look: impl Fn(&RedisServer, &str) -> T) -> Vec<T> {
        let (servers, pattern): (Vec<&RedisServer>, _) = match self {
            Self::Memory(_) => return Vec::new(),
            #[cfg(feature = "test-util")]
            Self::Test(_) => return Vec::new(),
            Self::Redis(server) => (vec![server], pattern.to_owned()),
            Self::Cluster(cluster, namespace) => {
                (cluster.nodes().collect(), format!("{namespace}:{pattern}"))
            }
        };
        let keys = servers.into_iter().flat_map(|server| {
            let keys = lines(&server.keys(&pattern));
            keys.into_iter().map(move |key| (server, key))
        });
        keys.map(|(server, key)| look(server, &key)).collect()
    }
}

/// Waits until `look` returns the earlier value again.
pub(crate) async fn until_same<T: PartialEq>(before: &T, look: impl Fn() -> T) {
    soon(async {
        while look() != *before {
            yield_now().await;
        }
    })
    .await;
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// Waits until this many requests wait in the store, so that the order of arrival is known.
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
            yield_now().await;
        }
    })
    .await;
}

/// Slots in use and number of waiters.
pub(crate) async fn usage(semaphore: &Semaphore) -> (u32, u32) {
    let usage = semaphore.usage().await.expect("the store is up");
    (usage.in_use, usage.waiting)
}

pub(crate) fn current_thread() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

pub(crate) fn multi_thread(threads: usize) -> Runtime {
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(threads).enable_all();
    builder.build().expect("a runtime")
}

/// Waits until a request of this process waits, for a slot or for its time.
pub(crate) async fn until_one_waits(limiter: &Limiter) {
    soon(async {
        while limiter.status().waiting == 0 {
            yield_now().await;
        }
    })
    .await;
}

/// Waits until the limiter has noticed that the store is up.
pub(crate) async fn until_up(limiter: &Limiter) {
    soon(async {
        while !limiter.status().store_up {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// Waits until the store counts a permit, which a fallback may have admitted while the machine stalled, or until it is lost.
pub(crate) async fn until_in_store(permit: &Permit) {
    soon(async {
        while permit.deadline().is_none() && !permit.is_lost() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// Polls a request once, so that it is in flight.
pub(crate) fn start<F: Future<Output: Debug> + Unpin>(request: &mut F) {
    let polled = pin!(request).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending), "{polled:?}");
}

/// Polls a request until `done` completes, while the request must stay pending.
pub(crate) async fn meanwhile(request: &mut Acquire, done: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        answer = request => panic!("{answer:?}"),
        () = done => {}
    }
}

/// A request that queues at this place.
pub(crate) async fn queue(semaphore: &Semaphore, place: u32) -> JoinHandle<Permit> {
    queue_under(semaphore, semaphore, place).await
}

/// A request that queues at this place of `scope`, a limit of the request.
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
