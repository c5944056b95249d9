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
use futures_util::{StreamExt, stream};
use redis_server::RedisServer;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio::{
    runtime::{Builder, Runtime},
    time::{Instant, sleep},
};
use tower_turnstile::{Key, Limit, Limiter, LimiterBuilder, Permit, Semaphore};

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

/// No stall of a busy machine costs anything.
fn lasting() -> LimiterBuilder {
    const LONG: Duration = Duration::from_secs(60);
    Limiter::builder()
        .lease(10 * LONG)
        .store_timeout(LONG)
        .waiter_ttl(10 * LONG)
}

async fn connect(server: &RedisServer) -> Limiter {
    lasting().connect(&server.url()).await.expect("up")
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
        let semaphores = (0..keys).map(|key| limiter.semaphore(&MANY, key).unwrap());
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
    let semaphore = Limiter::in_memory().semaphore(&REUSED, "k").unwrap();
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
    let semaphore = runtime
        .block_on(connect(&server))
        .semaphore(&MANY, "k")
        .unwrap();
    let one = allocations_of_one(|count| runtime.block_on(pairs(&semaphore, count)));
    assert!(one <= MOST, "{one} allocations, not {MOST}");
}

/// How often the server ran each command since the last reset, excluding the test's own commands, and the count of replicas
/// every ten seconds.
fn calls(server: &RedisServer) -> BTreeMap<String, u64> {
    let stats = server.cli(&["INFO", "commandstats"]);
    let stats = stats.lines().filter_map(|line| line.split_once(":calls="));
    let calls = stats.map(|(name, rest)| {
        let (count, _) = rest.split_once(',').expect("more follows");
        let name = name.trim_start_matches("cmdstat_").to_owned();
        (name, count.parse().expect("a number"))
    });
    // Redis 6.2 does not count subcommands.
    let other = [
        "config",
        "config|resetstat",
        "info",
        "keys",
        "zlexcount",
        "pubsub",
        "pubsub|numsub",
    ];
    calls
        .filter(|(name, _)| !other.contains(&name.as_str()))
        .collect()
}

async fn hold(semaphore: &Semaphore, count: usize) -> Vec<Permit> {
    let mut held = Vec::new();
    for _ in 0..count {
        held.push(semaphore.acquire().await.expect("free"));
    }
    held
}

/// Commands of the admission and of the release of a permit.
async fn assert_commands<const N: usize, const M: usize>(
    server: &RedisServer,
    semaphore: &Semaphore,
    admission: [(&str, u64); N],
    release: [(&str, u64); M],
) {
    const TIMES: u64 = 20;
    let assert = |each: &[(&str, u64)]| {
        let each = each.iter();
        let all = each.map(|(name, count)| ((*name).to_owned(), TIMES * count));
        assert_eq!(calls(server), all.collect());
    };
    // Load the script and create the keys first.
    let _first = hold(semaphore, 1).await;
    let ledgers = server.keys("*}");
    let held = || {
        let members = |key| server.cli(&["ZLEXCOUNT", key, "-", "+"]);
        let held = ledgers.lines().map(members);
        held.collect::<Vec<_>>()
    };
    let mut before = Vec::new();
    server.cli(&["CONFIG", "RESETSTAT"]);
    let mut permits = Vec::new();
    for _ in 0..TIMES {
        before.push(held());
        permits.extend(hold(semaphore, 1).await);
    }
    assert(&admission);
    server.cli(&["CONFIG", "RESETSTAT"]);
    for (permit, before) in permits.into_iter().zip(before).rev() {
        drop(permit);
        while held() != before {
            tokio::task::yield_now().await;
        }
    }
    assert(&release);
}

#[test]
fn a_permit_is_two_short_exchanges() {
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let semaphore = connect(&server).await.semaphore(&MANY, "k").unwrap();
        let admission = [
            ("evalsha", 1),
            ("time", 1),
            ("zcard", 1),
            ("zcount", 1),
            ("zadd", 1),
            ("pttl", 1),
        ];
        let release = [
            ("evalsha", 1),
            ("time", 1),
            ("zrem", 1),
            ("zcard", 1),
            ("zcount", 1),
        ];
        assert_commands(&server, &semaphore, admission, release).await;
    });
}

/// Slots under two limits and a start at a rate cost one exchange, and the release of the slots another.
#[test]
fn an_admission_under_three_limits_is_one_exchange() {
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let limiter = connect(&server).await;
        let [caller, all] = ["caller", "all"].map(|name| Limit::concurrent(name, 100));
        let opens = Limit::rate("opens", 1_000, Duration::from_secs(86_400));
        let jobs = limiter.semaphore([&caller, &opens], "a").unwrap();
        let jobs = jobs.and(&all, Key::SHARED).unwrap();
        let admission = [
            ("evalsha", 1),
            ("time", 1),
            // For each ledger: its state, its slot, and the key's expiry.
            ("zcard", 2),
            ("zcount", 2),
            ("zadd", 2),
            ("pttl", 2),
            // The commands of the rate.
            ("get", 1),
            ("set", 1),
        ];
        let release = [
            ("evalsha", 1),
            ("time", 1),
            ("zrem", 2),
            ("zcard", 2),
            ("zcount", 2),
        ];
        assert_commands(&server, &jobs, admission, release).await;
    });
}

/// The right to reuse slots is requested by time, regardless of the number of permits.
#[test]
fn reused_permits_cost_the_store_nothing_by_themselves() {
    const REUSED: Limit = Limit::concurrent("reused", 64).reuse();
    const EVERY: Duration = Duration::from_millis(135);
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let semaphore = connect(&server).await.semaphore(&REUSED, "k").unwrap();
        drop(hold(&semaphore, 64).await);
        server.cli(&["CONFIG", "RESETSTAT"]);
        let start = Instant::now();
        let tasks = (0..64).map(|_| {
            let semaphore = semaphore.clone();
            tokio::spawn(async move {
                for _ in 0..300 {
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
        let second = Duration::from_secs(1);
        let builder = Limiter::builder()
            .lease(9 * second)
            .store_timeout(2 * second);
        let limiter = builder.connect(&server.url()).await.expect("up");
        let held = hold(&limiter.semaphore(&MANY, "k").unwrap(), 100).await;
        let last = held.last().expect("some are held");
        // A machine that stalls may cause more exchanges, but not each time.
        for is_last in [false, false, true] {
            server.cli(&["CONFIG", "RESETSTAT"]);
            let until = last.deadline();
            while last.deadline() == until {
                assert!(!last.is_lost(), "its lease is renewed");
                sleep(Duration::from_millis(5)).await;
            }
            let calls = calls(&server);
            // The first and the last permit may have been granted too far apart for a single exchange.
            let most = 2 * calls["evalsha"];
            if calls["evalsha"] <= 2 && calls.values().all(|count| *count <= most) {
                break;
            }
            assert!(!is_last, "{calls:?}");
        }
    });
}

/// A key costs a queue and its place in the tables; a permit its entry and its lease. After the release nothing is
/// kept, except the capacity of two lists.
#[test]
fn keys_take_no_memory_when_they_are_left() {
    const KEYS: usize = 20_000;
    /// A permit's label for operators, and whether an operator has revoked it.
    const OPERATE: f64 = if cfg!(feature = "operate") { 64.0 } else { 0.0 };
    const MOST_HELD: [(usize, f64); 2] = [(1, 830.0 + OPERATE), (2, 540.0 + OPERATE)];
    const MOST_LEFT: f64 = 64.0;
    let _alone = alone();
    let server = RedisServer::start();
    runtime().block_on(async {
        let limiter = connect(&server).await;
        let semaphores = (0..KEYS).map(|key| limiter.semaphore(&MANY, key as u64).unwrap());
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
            // What was held is forgotten.
            while of_a_permit(allocated_bytes()) > MOST_LEFT {
                sleep(Duration::from_millis(5)).await;
            }
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
        let holder = hold(&connect(&server).await.semaphore(&ONE, "k").unwrap(), 1).await;
        let builder = lasting().poll_interval(POLL);
        let limiter = builder.connect(&server.url()).await.expect("up");
        let semaphore = limiter.semaphore(&ONE, "k").unwrap();
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
