//! A store that loses its data. Holders restore it, each within its own deadline; until then the cap is exceeded at
//! most by the lost permits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{task::block_in_place, time::sleep};
use tower_turnstile::{AcquireErrorKind, Limit, Limiter, Permit, Semaphore};

use crate::{
    outages::assert_error,
    scene::{
        Holders, LEASE, POLL, SLACK, STORE_TIMEOUT, quick, refused, semaphore, soon, strict,
        until_empty, until_granted, until_usage,
    },
    support::{fault_proxy::FaultProxy, log::log, redis_server::RedisServer},
};

const CAP: u32 = 4;
/// Hold time of the other clients.
const SHORT: Duration = Duration::from_millis(50);
/// A third of the lease until a renewal finds its permit missing, or a probe finds the store again.
const TOLD_AGAIN: Duration = Duration::from_millis(1_300);

async fn fill(holders: &Holders, semaphore: &Semaphore, permits: u32) -> Vec<Arc<Permit>> {
    let mut held = Vec::new();
    for _ in 0..permits {
        held.push(holders.enter(soon(semaphore.acquire()).await.expect("free")));
    }
    held
}

/// Some holders keep their permits while others wait; then the store loses all data, which is restored.
async fn survives(what: &str, lose: impl AsyncFnOnce(&mut RedisServer)) {
    let mut server = RedisServer::start();
    let holders = Holders::count(CAP);
    let (one, other) = (
        semaphore(&server.url(), &strict(CAP)).await,
        semaphore(&server.url(), &strict(CAP)).await,
    );
    let held = fill(&holders, &one, CAP).await;
    let load = holders.load(&other, 6, SHORT);
    until_usage(&other, |_, waiting| waiting == 6).await;
    lose(&mut server).await;
    overshoots_at_most(what, &holders, CAP).await;
    assert!(held.iter().all(|permit| !permit.is_lost()), "{what}");
    drop(held);
    let over = holders.figures().over;
    let again = holders.load(&one, 6, SHORT);
    sleep(2 * POLL).await;
    let (done, again) = (load.finish().await, again.finish().await);
    println!("{what}: {done:?}, {again:?}");
    assert_eq!(holders.figures().over, over, "G1: {what}");
    assert!(done.admitted > 0 && again.admitted > 0);
    until_empty(&server).await;
}

/// After a loss, others get the lost permits' slots while their holders continue, but only until the permits are
/// restored.
async fn overshoots_at_most(what: &str, holders: &Holders, lost: u32) {
    sleep(TOLD_AGAIN).await;
    let figures = holders.until_kept(4 * SHORT).await;
    println!("{what}: {figures}");
    assert!(figures.peak <= (CAP + lost) as usize, "{what}: {figures}");
    assert!(figures.over < TOLD_AGAIN + SLACK, "{what}: {figures}");
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

/// G1: a replica with permits, and without anything to send, does not wait for its next renewal to put them back.
#[tokio::test]
async fn idle_holders_are_soon_back_in_a_store_that_restarts_empty() {
    let mut server = RedisServer::start();
    let holders = Holders::count(CAP);
    let idle = quick().lease(15 * LEASE).connect(&server.url()).await;
    let idle = idle.expect("it is up").semaphore(strict(CAP), "key");
    let held = fill(&holders, &idle, CAP).await;
    server.restart();
    let began = Instant::now();
    until_usage_in_store(&server, CAP as usize).await;
    let back = began.elapsed();
    println!("restart: {CAP} idle holders were back after {back:?}");
    // The next renewal is due after five leases of the others.
    assert!(back < 2 * LEASE, "{back:?}");
    drop(held);
    until_empty(&server).await;
}

/// Under `allkeys-lru` the ledger is evicted when memory is short, and a warning at the start reports this.
#[tokio::test]
async fn an_evicted_ledger_is_restored() {
    survives("allkeys-lru", async |server| {
        server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
        // Far too little memory, for a moment.
        server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
        let began = Instant::now();
        while server
            .cli(&["INFO", "stats"])
            .contains("evicted_keys:0\r\n")
        {
            assert!(began.elapsed() < LEASE, "it is not evicted");
        }
        server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    })
    .await;
}

/// Without memory newcomers are refused, but holders are renewed, and releases succeed.
#[tokio::test]
async fn without_memory_holders_hold_on_and_give_back() {
    let server = RedisServer::start();
    let one = semaphore(&server.url(), &strict(2)).await;
    let (first, second) = (
        soon(one.acquire()).await.expect("free"),
        soon(one.acquire()).await.expect("free"),
    );
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    drop(first);
    until_usage_in_store(&server, 1).await;
    // Meanwhile the policies decide on newcomers.
    let began = Instant::now();
    while began.elapsed() < LEASE + LEASE / 2 {
        let (kind, took) = refused(&one).await;
        assert_eq!(kind, AcquireErrorKind::Unavailable);
        assert!(took < STORE_TIMEOUT + SLACK, "G8: {took:?}");
        sleep(POLL).await;
    }
    assert!(!second.is_lost(), "renewed for longer than its lease");
    drop(second);
    let empty = until_empty(&server).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    let again = until_granted(&one).await;
    println!("empty {empty:?} after the last release, granted {again:?} after the end");
    assert!(
        again < Duration::from_millis(1_500) + SLACK,
        "G8: {again:?}"
    );
}

/// G2: a short lease is renewed too, although requests are refused all the time.
#[tokio::test]
async fn without_memory_short_leases_are_renewed() {
    let server = RedisServer::start();
    // Shorter than the longest pause between probes of a store that answers nobody.
    let lease = Duration::from_millis(900);
    let builder = quick().lease(lease).store_timeout(lease / 4);
    let limiter = builder.connect(&server.url()).await.expect("up");
    let semaphore = limiter.semaphore(Limit::concurrent("local", 3), "key");
    let holder = semaphore.acquire().await.expect("free");
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let begin = Instant::now();
    while begin.elapsed() < 6 * lease {
        let admitted = soon(semaphore.acquire()).await;
        drop(admitted.expect("the fallback applies"));
        sleep(Duration::from_millis(1)).await;
        assert!(!holder.is_lost(), "after {:?}", begin.elapsed());
    }
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    drop(holder);
}

/// G8: a store that does not write, but does everything else, is reported once, and asked for permits ever more rarely.
#[tokio::test]
async fn without_memory_the_store_is_reported_once_and_asked_rarely() {
    log();
    let server = RedisServer::start();
    let namespace = "without-memory";
    // Longer than a renewal may take between two probes on a busy machine.
    let (builder, url) = (quick().namespace(namespace).lease(3 * LEASE), server.url());
    let limiter = builder.connect(&url).await.expect("up");
    let semaphore = limiter.semaphore(Limit::concurrent("local", 3), "key");
    let holder = semaphore.acquire().await.expect("free");
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let before = scripts(&server);
    let (begin, mut served) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_secs(3) {
        // The fallback admits it; its release is sent nowhere.
        drop(
            soon(semaphore.acquire())
                .await
                .expect("the fallback applies"),
        );
        served += 1;
        sleep(Duration::from_millis(1)).await;
    }
    let lines = |words: &str| {
        let lines = log().lines_with(namespace);
        lines.iter().filter(|line| line.contains(words)).count()
    };
    let asked = scripts(&server) - before;
    println!("G8 without memory: {served} requests in 3 s, the store was asked {asked} times");
    assert!(served > 100, "{served} requests");
    // Probes after 50 ms, 100 ms and so on, each with one attempt; and renewals.
    assert!(asked < 40, "{asked} times");
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

/// How often the script was run.
fn scripts(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let lines = stats
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_eval"));
    let calls = lines.filter_map(|line| {
        line.split("calls=")
            .nth(1)?
            .split(',')
            .next()?
            .parse::<u64>()
            .ok()
    });
    calls.sum::<u64>()
}

async fn until_usage_in_store(server: &RedisServer, members: usize) {
    let seen = async {
        loop {
            let key = server.keys("*");
            if server.cli(&["ZCARD", &key]) == members.to_string() {
                return;
            }
            sleep(Duration::from_millis(2)).await;
        }
    };
    soon(seen).await;
}

/// A failover: unreplicated data is lost, the rest is not. The name leads to the new server before its promotion.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_that_loses_writes_overshoots_by_what_it_lost() {
    let mut primary = RedisServer::start();
    let port = primary.port().to_string();
    let standby = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    while !standby
        .cli(&["INFO", "replication"])
        .contains("master_link_status:up")
    {
        sleep(Duration::from_millis(5)).await;
    }
    let proxy = FaultProxy::start(primary.port());
    let holders = Holders::count(CAP);
    let (one, other) = (
        semaphore(&proxy.url(), &strict(CAP)).await,
        semaphore(&proxy.url(), &strict(CAP)).await,
    );
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
    assert_eq!(refused(&one).await.0, AcquireErrorKind::Unavailable);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(refused(&one).await.0, AcquireErrorKind::Unavailable);
    standby.cli(&["REPLICAOF", "NO", "ONE"]);
    overshoots_at_most("failover", &holders, CAP / 2).await;
    assert_error(&standby, "READONLY");
    assert!(held.iter().all(|permit| !permit.is_lost()));
    drop(held);
    let done = load.finish().await;
    assert!(done.admitted > 0, "{done:?}");
    until_granted(&one).await;
    until_empty(&standby).await;
}

/// No request notices the flush, and none is lost.
#[tokio::test]
async fn flushed_scripts_are_noticed_by_no_request() {
    let server = RedisServer::start();
    let holders = Holders::count(CAP);
    let loads = [
        holders.load(
            &semaphore(&server.url(), &strict(CAP)).await,
            8,
            Duration::ZERO,
        ),
        holders.load(
            &semaphore(&server.url(), &strict(CAP)).await,
            8,
            Duration::ZERO,
        ),
    ];
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1_500) {
        server.cli(&["SCRIPT", "FLUSH"]);
        sleep(Duration::from_millis(1)).await;
    }
    let stats = server.cli(&["INFO", "errorstats"]);
    let flushed = stats
        .lines()
        .find(|line| line.starts_with("errorstat_NOSCRIPT:"));
    let mut admitted = 0;
    for load in loads {
        let done = load.finish().await;
        assert!(done.refused.is_empty(), "{done:?}");
        admitted += done.admitted;
    }
    println!("{admitted} admitted; {flushed:?}; {}", holders.figures());
    assert!(flushed.is_some(), "the scripts were gone at times: {stats}");
    assert!(
        admitted > 100 && holders.figures().peak <= CAP as usize,
        "G1"
    );
    until_empty(&server).await;
}

/// A snapshot may be of a moment before slots were released. Their process releases them again, long before their leases
/// end.
#[tokio::test(flavor = "multi_thread")]
async fn slots_that_a_snapshot_brings_back_are_released_again() {
    let mut server = RedisServer::start();
    let limiter = Limiter::builder().connect(&server.url()).await;
    let limiter = limiter.expect("it is up");
    let semaphore = limiter.semaphore(strict(CAP), "key");
    let held = soon(semaphore.acquire()).await.expect("free");
    let others = soon(semaphore.acquire_many(CAP - 1)).await.expect("free");
    server.cli(&["SET", "marker", "here"]);
    server.cli(&["SAVE"]);
    drop(others);
    until_usage(&semaphore, |in_use, _| in_use == 1).await;
    server.restart();
    assert_eq!(server.cli(&["GET", "marker"]), "here");
    let begun = Instant::now();
    until_usage(&semaphore, |in_use, _| in_use == 1).await;
    let took = begun.elapsed();
    assert!(
        took < Duration::from_secs(10),
        "{took:?} of a lease of 30 s"
    );
    assert!(!held.is_lost());
}
