//! Costs must not grow unnoticed: allocations in this process, commands in the store. Times are not measured.
//!
//! A change that reduces a cost lowers its number here. `.ci/cost` also prints the actual numbers.

#[path = "../benches/layer/contenders.rs"]
mod contenders;
#[path = "support/redis_server.rs"]
mod redis_server;

use std::{
    alloc::System,
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use contenders::Contender;
use futures_util::{StreamExt, future::join_all, stream};
use redis_server::RedisServer;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio::{
    runtime::{Builder, Runtime},
    time::{Instant, sleep, timeout},
};
use tower_turnstile::{Limit, Limiter, Permit, Semaphore};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const MANY: Limit = Limit::concurrent("many", 1_000);
const ONE: Limit = Limit::concurrent("one", 1).wait_up_to(Duration::from_secs(60));

/// Allocations are counted for the whole process, so only one test runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}

/// Allocations of one of the operations that `run` repeats. The difference of two runs excludes one-time allocations.
fn allocations_of_one(mut run: impl FnMut(usize)) -> f64 {
    const TIMES: usize = 1_000;
    let [once, twice] = [1, 2].map(|times| {
        let region = Region::new(ALLOCATOR);
        run(times * TIMES);
        let change = region.change();
        change.allocations + change.reallocations
    });
    (twice as f64 - once as f64) / TIMES as f64
}

/// Number of bytes allocated but not freed.
fn allocated_bytes() -> f64 {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as f64 - stats.bytes_deallocated as f64
}

/// Acquires and releases permits, one after another.
async fn pairs(semaphore: &Semaphore, count: usize) {
    for _ in 0..count {
        drop(semaphore.acquire().await.expect("free"));
    }
}

/// Every request: the lease, and the slot in the request's extensions (three allocations, since they are otherwise
/// empty). With limits also a key, unless it is short; and for a claim its legs and its lists.
#[test]
fn a_request_allocates_no_more_than_before() {
    let _alone = alone();
    let runtime = runtime();
    let of = |contender: Contender| {
        let one = allocations_of_one(|count| runtime.block_on(contender.run(count)));
        one.round() as i64
    };
    let bare = of(Contender::Bare);
    let added = Contender::ALL
        .iter()
        .map(|contender| (contender.name(), of(*contender) - bare));
    let known = [
        ("bare", 0),
        ("concurrency-limit", 0),
        ("shared", 4),
        ("reused", 3),
        ("by-header", 4),
        ("policy-of-two", 8),
        ("unlimited", 3),
        ("abort", 9),
        #[cfg(feature = "operate")]
        ("operable", 9),
    ];
    assert_eq!(added.collect::<Vec<_>>(), known);
}

/// Only the lease. The same for one key and for a few in turn.
#[test]
fn a_permit_in_memory_is_one_allocation() {
    let _alone = alone();
    let runtime = runtime();
    for keys in [1, 32] {
        let limiter = Limiter::in_memory();
        let semaphores = (0..keys).map(|key| limiter.semaphore(&MANY, key));
        let semaphores: Vec<Semaphore> = semaphores.collect();
        let one = allocations_of_one(|count| {
            runtime.block_on(async {
                for number in 0..count {
                    pairs(&semaphores[number % semaphores.len()], 1).await;
                }
            });
        });
        assert_eq!(one.round(), 1.0, "{keys} keys");
    }
}

#[test]
fn a_reused_permit_is_no_allocation() {
    const REUSED: Limit = Limit::concurrent("reused", 64).reuse();
    let _alone = alone();
    let runtime = runtime();
    let semaphore = Limiter::in_memory().semaphore(&REUSED, "k");
    let one = allocations_of_one(|count| runtime.block_on(pairs(&semaphore, count)));
    assert_eq!(one.round(), 0.0);
}

/// Most of them belong to the driver and to the Redis client. How often exchanges coincide varies between runs.
#[test]
fn a_permit_of_a_store_allocates_no_more_than_before() {
    const MOST: f64 = 25.0;
    let _alone = alone();
    let runtime = runtime();
    let server = RedisServer::start();
    let limiter = runtime.block_on(Limiter::connect(&server.url()));
    let semaphore = limiter.expect("up").semaphore(&MANY, "k");
    let one = allocations_of_one(|count| runtime.block_on(pairs(&semaphore, count)));
    assert!(one <= MOST, "{one} allocations, not {MOST}");
}

/// How often the server ran each command since the last reset, excluding the test's own commands.
fn calls(server: &RedisServer) -> BTreeMap<String, u64> {
    let stats = server.cli(&["INFO", "commandstats"]);
    let stats = stats.lines().filter_map(|line| line.split_once(":calls="));
    let calls = stats.map(|(name, rest)| {
        let (count, _) = rest.split_once(',').expect("more follows");
        let name = name.trim_start_matches("cmdstat_").to_owned();
        (name, count.parse().expect("a number"))
    });
    // Redis 6.2 does not count subcommands.
    let own = ["config", "config|resetstat", "info", "keys", "zlexcount"];
    calls
        .filter(|(name, _)| !own.contains(&name.as_str()))
        .collect()
}

fn times<const N: usize>(times: u64, each: [(&str, u64); N]) -> BTreeMap<String, u64> {
    each.map(|(name, count)| (name.to_owned(), times * count))
        .into()
}

async fn hold(semaphore: &Semaphore, count: usize) -> Vec<Permit> {
    let mut held = Vec::new();
    for _ in 0..count {
        held.push(semaphore.acquire().await.expect("free"));
    }
    held
}

#[test]
fn a_permit_is_two_short_exchanges() {
    const TIMES: usize = 20;
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let limiter = Limiter::connect(&server.url()).await.expect("up");
        let semaphore = limiter.semaphore(&MANY, "k");
        // Load the script and create the key first.
        let first = hold(&semaphore, 1).await;
        server.cli(&["CONFIG", "RESETSTAT"]);
        let permits = hold(&semaphore, TIMES).await;
        let acquire = [
            ("evalsha", 1),
            ("time", 1),
            ("zcard", 1),
            ("zcount", 1),
            ("zadd", 1),
            ("pttl", 1),
        ];
        assert_eq!(calls(&server), times(TIMES as u64, acquire));

        let ledger = server.keys("*}");
        let held = || server.cli(&["ZLEXCOUNT", &ledger, "-", "+"]);
        server.cli(&["CONFIG", "RESETSTAT"]);
        for (number, permit) in permits.into_iter().enumerate() {
            drop(permit);
            let left = (TIMES - number).to_string();
            while held() != left {
                tokio::task::yield_now().await;
            }
        }
        let release = [
            ("evalsha", 1),
            ("time", 1),
            ("zrem", 1),
            ("zcard", 1),
            ("zcount", 1),
        ];
        assert_eq!(calls(&server), times(TIMES as u64, release));
        drop(first);
    });
}

/// The right to reuse slots is requested by time, regardless of the number of permits.
#[test]
fn reused_permits_cost_the_store_nothing_by_themselves() {
    const REUSED: Limit = Limit::concurrent("reused", 64).reuse();
    const EVERY: Duration = Duration::from_millis(45);
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let limiter = Limiter::connect(&server.url()).await.expect("up");
        let semaphore = limiter.semaphore(&REUSED, "k");
        drop(hold(&semaphore, 64).await);
        server.cli(&["CONFIG", "RESETSTAT"]);
        let start = Instant::now();
        let tasks = (0..64).map(|_| {
            let semaphore = semaphore.clone();
            tokio::spawn(async move {
                for _ in 0..1_000 {
                    let permit = semaphore.acquire().await.expect("free");
                    tokio::task::yield_now().await;
                    drop(permit);
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.expect("no panic");
        }
        // On a busy machine a right may expire before its renewal, and then each slot is requested once.
        let most = 8 + 2 * (start.elapsed().as_micros() / EVERY.as_micros()) as u64;
        let calls = calls(&server);
        let asked = calls.get("evalsha").copied().unwrap_or_default();
        assert!(asked <= most, "more than {most} calls: {calls:?}");
        let commands: u64 = calls.values().sum();
        assert!(commands <= 12 * asked, "{calls:?}");
    });
}

/// Permits are renewed together, regardless of their number.
#[test]
fn a_hundred_permits_are_renewed_in_one_exchange() {
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let builder = Limiter::builder().lease(Duration::from_secs(3));
        let limiter = builder.connect(&server.url()).await.expect("up");
        let semaphore = limiter.semaphore(&MANY, "k");
        let held = join_all((0..100).map(|_| semaphore.acquire())).await;
        let held: Vec<Permit> = held
            .into_iter()
            .map(|permit| permit.expect("free"))
            .collect();
        server.cli(&["CONFIG", "RESETSTAT"]);
        let last = held.last().expect("some are held");
        let until = last.deadline();
        while last.deadline() == until {
            sleep(Duration::from_millis(5)).await;
        }
        let calls = calls(&server);
        // The first and the last permit may have been granted too far apart for a single exchange.
        assert!(calls["evalsha"] <= 2, "{calls:?}");
        let most = 2 * calls["evalsha"];
        assert!(calls.values().all(|count| *count <= most), "{calls:?}");
    });
}

/// Regardless of the number of keys, renewals due at about the same time share an exchange. They are still spread over
/// time.
#[test]
fn renewals_of_a_thousand_keys_share_exchanges() {
    const KEYS: usize = 1_000;
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let builder = Limiter::builder().lease(Duration::from_secs(9));
        let limiter = builder.connect(&server.url()).await.expect("up");
        let acquire = |key| limiter.semaphore(&MANY, key as u64).acquire();
        let held = join_all((0..KEYS).map(acquire)).await;
        let held: Vec<Permit> = held.into_iter().collect::<Result<_, _>>().expect("free");
        server.cli(&["CONFIG", "RESETSTAT"]);
        let before: Vec<_> = held.iter().map(Permit::deadline).collect();
        for (permit, until) in held.iter().zip(&before) {
            while permit.deadline() == *until {
                sleep(Duration::from_millis(5)).await;
            }
        }
        let calls = calls(&server);
        let exchanges = calls["evalsha"];
        assert!((10..=100).contains(&exchanges), "{calls:?}");
        // The cost of each key.
        let of_a_key: u64 = calls.values().sum::<u64>() / KEYS as u64;
        assert!(of_a_key <= 4, "{calls:?}");
    });
}

/// A key costs a queue and its place in the tables; a permit its entry and its lease. After the release nothing is
/// kept, except the capacity of two lists.
#[test]
fn keys_take_no_memory_when_they_are_left() {
    const KEYS: usize = 20_000;
    /// A permit's label for operators, and whether an operator has revoked it.
    const OPERATE: f64 = if cfg!(feature = "operate") { 64.0 } else { 0.0 };
    const MOST_HELD: [(usize, f64); 2] = [(1, 790.0 + OPERATE), (2, 520.0 + OPERATE)];
    const MOST_LEFT: f64 = 64.0;
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let limiter = Limiter::connect(&server.url()).await.expect("up");
        let semaphores = (0..KEYS).map(|key| limiter.semaphore(&MANY, key as u64));
        let semaphores: Vec<Semaphore> = semaphores.collect();
        for (of_each, most) in MOST_HELD {
            let mut held = Vec::with_capacity(of_each * KEYS);
            let before = allocated_bytes();
            let mut permits = stream::iter((0..of_each).flat_map(|_| &semaphores))
                .map(|semaphore| semaphore.acquire())
                .buffer_unordered(256);
            while let Some(permit) = permits.next().await {
                held.push(permit.expect("free"));
            }
            drop(permits);
            let of_a_permit = |bytes: f64| (bytes - before) / (of_each * KEYS) as f64;
            let bytes = of_a_permit(allocated_bytes());
            assert!(bytes <= most, "{bytes} bytes, with {of_each} of each key");
            held.clear();
            let left = async {
                while of_a_permit(allocated_bytes()) > MOST_LEFT {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            let left = timeout(Duration::from_secs(10), left).await;
            left.expect("what was held is forgotten");
        }
    });
}

/// Regardless of the number of waiters, only their keeper asks, once in a while.
#[test]
fn waiting_is_a_poll_for_all() {
    const POLL: Duration = Duration::from_millis(100);
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let holder = Limiter::connect(&server.url()).await.expect("up");
        let holder = hold(&holder.semaphore(&ONE, "k"), 1).await;
        let builder = Limiter::builder().poll_interval(POLL);
        let limiter = builder.connect(&server.url()).await.expect("up");
        let semaphore = limiter.semaphore(&ONE, "k");
        let waiters: Vec<_> = (0..100)
            .map(|_| tokio::spawn(semaphore.acquire()))
            .collect();
        while semaphore.usage().await.expect("up").waiting < 100 {
            sleep(Duration::from_millis(5)).await;
        }
        server.cli(&["CONFIG", "RESETSTAT"]);
        let start = Instant::now();
        while calls(&server).get("evalsha").is_none_or(|polls| *polls < 5) {
            sleep(Duration::from_millis(5)).await;
        }
        // Polls may be slightly early because of jitter.
        let least = POLL.mul_f64(0.9) * 4;
        assert!(start.elapsed() >= least, "{:?}", start.elapsed());
        let calls = calls(&server);
        let commands: u64 = calls.values().sum();
        assert!(commands <= 12 * calls["evalsha"], "{calls:?}");
        for waiter in waiters {
            waiter.abort();
        }
        drop(holder);
    });
}
