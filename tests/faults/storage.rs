//! A store that loses its data. Holders restore it; until then the cap is exceeded at most by the lost permits.

use std::{sync::Arc, time::Duration};

use tokio::{
    task::{JoinHandle, block_in_place},
    time::sleep,
};
use tower_turnstile::{AcquireErrorKind, Limit, Permit, Semaphore};

use crate::{
    outages::assert_error,
    scene::{
        Holders, LONG, POLL, granted, quick, refused, scripts, soon, steady, steady_semaphore,
        strict, until_empty, until_granted, until_usage,
    },
    support::{clock::time_of, fault_proxy::FaultProxy, log::log, redis_server::RedisServer},
};

pub(crate) const CAP: u32 = 4;
/// Hold time of the other clients.
const SHORT: Duration = Duration::from_millis(50);

/// Of a replica whose requests wait for the return of lost permits, for twice its store timeout, and are refused in a stall.
pub(crate) async fn newcomers(url: &str) -> Semaphore {
    let limiter = quick().lease(LONG).waiter_ttl(LONG).connect(url).await;
    limiter
        .expect("it is up")
        .semaphore(strict(CAP), "key")
        .unwrap()
}

pub(crate) async fn fill(
    holders: &Holders,
    semaphore: &Semaphore,
    permits: u32,
) -> Vec<Arc<Permit>> {
    let mut held = Vec::new();
    for _ in 0..permits {
        held.push(holders.enter(soon(semaphore.acquire()).await.expect("free")));
    }
    held
}

/// A client that waits in the store's queue, and asks again if it is refused.
pub(crate) async fn wait(semaphore: &Semaphore) -> JoinHandle<Permit> {
    let waits = semaphore.clone();
    let client = tokio::spawn(async move { granted(&waits).await });
    until_usage(semaphore, |_, waiting| waiting == 1).await;
    client
}

/// Waits until the store has a lease of each of these permits.
pub(crate) async fn until_in_store(server: &RedisServer, held: &[Arc<Permit>]) {
    let is_there = |permit: &Arc<Permit>| {
        let (ledger, name) = (server.keys("*"), permit.id().expect("a slot").to_string());
        let score = server.cli(&["ZSCORE", &ledger, &name]).parse::<f64>();
        score.is_ok_and(|until_ms| until_ms > time_of(server) as f64 * 1_000.0)
    };
    soon(async {
        while !held.iter().all(is_there) {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Some holders keep their permits while others wait; then the store loses all data, which is restored.
async fn survives(what: &str, lose: impl AsyncFnOnce(&mut RedisServer)) {
    let mut server = RedisServer::start();
    let holders = Holders::count(CAP);
    let one = steady_semaphore(&server.url(), &strict(CAP)).await;
    let other = newcomers(&server.url()).await;
    let held = fill(&holders, &one, CAP).await;
    let load = holders.load(&other, 6, SHORT);
    until_usage(&other, |_, waiting| waiting == 6).await;
    lose(&mut server).await;
    until_in_store(&server, &held).await;
    overshoots_at_most(what, &holders, CAP).await;
    assert!(held.iter().all(|permit| !permit.is_lost()), "{what}");
    let over = holders.figures().over;
    drop(held);
    let third = newcomers(&server.url()).await;
    let again = holders.load(&third, 6, SHORT);
    sleep(2 * POLL).await;
    let (done, again) = (load.finish().await, again.finish().await);
    println!("{what}: {done:?}, {again:?}");
    assert_eq!(holders.figures().over, over, "G1: {what}");
    until_granted(&other).await;
    until_empty(&server).await;
}

/// After a loss, others may have the lost permits' slots while their holders continue, but only until these are restored.
async fn overshoots_at_most(what: &str, holders: &Holders, lost: u32) {
    let figures = holders.until_kept(4 * SHORT).await;
    println!("{what}: {figures}");
    assert!(figures.peak <= (CAP + lost) as usize, "{what}: {figures}");
}

#[tokio::test]
async fn a_flushed_store_is_restored() {
    survives("FLUSHALL", async |server| {
        server.cli(&["FLUSHALL"]);
    })
    .await;
}

#[tokio::test]
async fn a_store_that_restarts_empty_is_restored() {
    survives("restart", async |server| server.restart()).await;
}

/// G1: a replica with permits, and without anything to send, does not wait for its next renewal to put them back, nor do
/// waiters overtake it.
#[tokio::test]
async fn idle_holders_are_back_before_newcomers() {
    for lose in [RedisServer::restart, |server: &mut RedisServer| {
        server.cli(&["FLUSHALL"]);
    }] {
        let mut server = RedisServer::start();
        let holders = Holders::count(CAP);
        let idle = steady_semaphore(&server.url(), &strict(CAP)).await;
        let other = steady_semaphore(&server.url(), &strict(CAP)).await;
        let held = fill(&holders, &idle, CAP).await;
        let waiter = wait(&other).await;
        lose(&mut server);
        until_in_store(&server, &held).await;
        sleep(2 * POLL).await;
        assert!(!waiter.is_finished(), "G1");
        waiter.abort();
        drop(held);
        until_empty(&server).await;
    }
}

/// Under `allkeys-lru` the ledger is evicted when memory is short, and a warning at the start reports this.
#[tokio::test]
async fn an_evicted_ledger_is_restored() {
    survives("allkeys-lru", async |server| {
        server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
        // Far too little memory, for a moment.
        server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
        soon(async {
            while server
                .cli(&["INFO", "stats"])
                .contains("evicted_keys:0\r\n")
            {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    })
    .await;
}

/// Without memory newcomers are refused, but releases succeed.
#[tokio::test]
async fn without_memory_holders_hold_on_and_give_back() {
    let server = RedisServer::start();
    let one = steady_semaphore(&server.url(), &strict(2)).await;
    let holders = Holders::count(2);
    let mut held = fill(&holders, &one, 2).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    held.pop();
    soon(async {
        while server.cli(&["ZCARD", &server.keys("*")]) != "1" {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    // Meanwhile the policies decide on newcomers.
    for _ in 0..5 {
        assert_eq!(refused(&one).await, AcquireErrorKind::Unavailable);
        sleep(SHORT).await;
    }
    assert!(!held[0].is_lost());
    held.pop();
    until_empty(&server).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    until_granted(&one).await;
}

/// G2: a short lease is renewed too, although requests are refused all the time.
#[tokio::test]
async fn without_memory_short_leases_are_renewed() {
    let server = RedisServer::start();
    // Far shorter than the longest pause between probes of a store that answers nobody.
    let lease = Duration::from_millis(450);
    let builder = quick().lease(lease).store_timeout(lease / 4);
    let limiter = builder.connect(&server.url()).await.expect("up");
    let semaphore = limiter
        .semaphore(Limit::concurrent("local", 3), "key")
        .unwrap();
    // Once more if the machine has stood still for a lease.
    let is_renewed = async || {
        server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
        let holder = soon(semaphore.acquire()).await;
        let holder = holder.expect("the fallback applies");
        let (mut renewals, mut deadline) = (0, holder.deadline());
        server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
        while renewals < 15 && deadline.is_some() && !holder.is_lost() {
            let admitted = soon(semaphore.acquire()).await;
            drop(admitted.expect("the fallback applies"));
            sleep(Duration::from_millis(1)).await;
            let renewed = std::mem::replace(&mut deadline, holder.deadline()) != deadline;
            renewals += u32::from(renewed);
        }
        renewals == 15
    };
    soon(async {
        while !is_renewed().await {
            sleep(POLL).await;
        }
    })
    .await;
}

/// G8: a store that does not write, but does everything else, is reported once, and asked for permits ever more rarely.
#[tokio::test]
async fn without_memory_the_store_is_reported_once_and_asked_rarely() {
    log();
    let server = RedisServer::start();
    let namespace = "without-memory";
    let limiter = steady().namespace(namespace).connect(&server.url()).await;
    let limiter = limiter.expect("up");
    let semaphore = limiter
        .semaphore(Limit::concurrent("local", 3), "key")
        .unwrap();
    let holder = semaphore.acquire().await.expect("free");
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let before = scripts(&server);
    for _ in 0..500 {
        // The fallback admits it; its release is sent nowhere.
        let admitted = soon(semaphore.acquire()).await;
        drop(admitted.expect("the fallback applies"));
        sleep(Duration::from_millis(1)).await;
    }
    let lines = |words: &str| {
        let lines = log().lines_with(namespace);
        lines.iter().filter(|line| line.contains(words)).count()
    };
    let asked = scripts(&server) - before;
    println!("G8 without memory: 500 requests, the store was asked {asked} times");
    // Probes after 50 ms, 100 ms and so on to a second, each with one attempt.
    assert!(asked < 100, "{asked} times");
    assert_eq!(lines("the store accepts no new permits"), 1);
    assert_eq!((lines("ERROR"), lines("the store is back")), (0, 0));
    assert!(!limiter.status().store_up);
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    soon(async {
        while !limiter.status().store_up {
            drop(semaphore.acquire().await.expect("free"));
            sleep(POLL / 10).await;
        }
    })
    .await;
    soon(log().until(&["the store is back", namespace])).await;
    assert_eq!(lines("the store is back"), 1);
    assert!(!holder.is_lost());
    drop(holder);
    until_empty(&server).await;
}

/// A failover: unreplicated data is lost, the rest is not. The name leads to the new server before its promotion.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_that_loses_writes_overshoots_by_what_it_lost() {
    // Otherwise it would wait five seconds for more replicas before it sends its data.
    let mut primary = RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]);
    let port = primary.port().to_string();
    let standby = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    let is_linked = || {
        let about = standby.cli(&["INFO", "replication"]);
        about.contains("master_link_status:up")
    };
    soon(async {
        while !is_linked() {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let proxy = FaultProxy::start(primary.port());
    let holders = Holders::count(CAP);
    let one = steady_semaphore(&proxy.url(), &strict(CAP)).await;
    let other = newcomers(&proxy.url()).await;
    let mut held = fill(&holders, &one, CAP / 2).await;
    block_in_place(|| primary.until_copied([&standby]));
    standby.pause();
    primary.cli(&["CLIENT", "KILL", "TYPE", "replica"]);
    held.extend(fill(&holders, &one, CAP / 2).await);
    let about = primary.cli(&["INFO", "replication"]);
    assert!(about.contains("connected_slaves:0"), "the writes are lost");
    let load = holders.load(&other, 6, SHORT);
    until_usage(&other, |_, waiting| waiting == 6).await;

    primary.stop();
    standby.resume();
    proxy.lead_to(standby.port());
    // READONLY for a while.
    assert_eq!(refused(&one).await, AcquireErrorKind::Unavailable);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(refused(&one).await, AcquireErrorKind::Unavailable);
    standby.cli(&["REPLICAOF", "NO", "ONE"]);
    until_in_store(&standby, &held).await;
    overshoots_at_most("failover", &holders, CAP / 2).await;
    assert_error(&standby, "READONLY");
    assert!(held.iter().all(|permit| !permit.is_lost()));
    drop(held);
    load.finish().await;
    until_granted(&one).await;
    until_empty(&standby).await;
}

/// No request notices the flush, and none is lost.
#[tokio::test]
async fn flushed_scripts_are_noticed_by_no_request() {
    let server = RedisServer::start();
    let holders = Holders::count(CAP);
    let mut loads = Vec::new();
    for _ in 0..2 {
        let semaphore = steady_semaphore(&server.url(), &strict(CAP)).await;
        loads.push(holders.load(&semaphore, 8, Duration::ZERO));
    }
    let were_gone = || {
        let stats = server.cli(&["INFO", "errorstats"]);
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix("errorstat_NOSCRIPT:count="));
        line.map_or(0, |count| count.parse().expect("a number"))
    };
    soon(async {
        while were_gone() < 50 {
            server.cli(&["SCRIPT", "FLUSH"]);
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    for load in loads {
        let done = load.finish().await;
        assert!(done.refused.is_empty() && done.admitted > 0, "{done:?}");
    }
    assert!(holders.figures().peak <= CAP as usize, "G1");
    until_empty(&server).await;
}

/// A snapshot may be of a moment before slots were released. Their process releases them again, long before their leases
/// end.
#[tokio::test(flavor = "multi_thread")]
async fn slots_that_a_snapshot_brings_back_are_released_again() {
    let mut server = RedisServer::start();
    let semaphore = steady_semaphore(&server.url(), &strict(CAP)).await;
    let held = soon(semaphore.acquire()).await.expect("free");
    let others = soon(semaphore.acquire_many(CAP - 1)).await.expect("free");
    server.cli(&["SET", "marker", "here"]);
    server.cli(&["SAVE"]);
    drop(others);
    until_usage(&semaphore, |in_use, _| in_use == 1).await;
    server.restart();
    assert_eq!(server.cli(&["GET", "marker"]), "here");
    until_usage(&semaphore, |in_use, _| in_use == 1).await;
    assert!(!held.is_lost());
}
