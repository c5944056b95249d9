//! G8: a store that is silent, or refuses for a while. No request waits for it longer than `store_timeout`; then each
//! limit's policy decides; and everything recovers automatically.

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_turnstile::{AcquireErrorKind, Fallback, Limit, Limiter};

use crate::{
    requests::{debuggable, put_to_sleep},
    scene::{
        Holders, LEASE, PATIENT, POLL, SLACK, STORE_TIMEOUT, quick, refused, replica, semaphore,
        soon, strict, until_empty, until_granted, until_usage,
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::{RedisServer, free_port},
    },
};

/// Maximum pause between two probes, including jitter.
const PROBE: Duration = Duration::from_millis(1_500);

const OPEN: Limit = Limit::concurrent("open", 1)
    .wait_up_to(PATIENT)
    .fallback(Fallback::Allow);
const LOCAL: Limit = Limit::concurrent("local", 2)
    .wait_up_to(STORE_TIMEOUT)
    .fallback(Fallback::Local(2));

/// While the fault lasts, each policy decides in time. Holders keep their permits.
async fn is_decided_by_policy(fault: &str, limiter: &Limiter) {
    let bound = STORE_TIMEOUT + SLACK;
    let (kind, first) = refused(&limiter.semaphore(strict(1), "key")).await;
    assert_eq!(kind, AcquireErrorKind::Unavailable, "{fault}");
    let (_, second) = refused(&limiter.semaphore(strict(1), "key")).await;
    assert!(
        first < bound && second < bound,
        "G8: {fault}: {first:?}, {second:?}"
    );
    let began = Instant::now();
    let open = limiter.semaphore(&OPEN, "key");
    let permits = [soon(open.acquire()).await, soon(open.acquire()).await];
    assert!(permits.iter().all(Result::is_ok), "G8: {fault}");
    let local = limiter.semaphore(&LOCAL, "key");
    let permits = [soon(local.acquire()).await, soon(local.acquire()).await];
    assert!(permits.iter().all(Result::is_ok), "G8: {fault}");
    // If the store answers probes but does no work, the request may ask it for the last time at the end of its wait.
    let kind = refused(&local).await.0;
    assert_eq!(kind, AcquireErrorKind::TimedOut, "G1: {fault}");
    let took = began.elapsed();
    assert!(took < 3 * bound, "G8: {fault}: {took:?}");
    println!("{fault}: refused after {first:?} and {second:?}");
}

/// Waits for full recovery. Returns how long it took.
async fn recovers(fault: &str, limiter: &Limiter, server: &RedisServer) {
    let took = until_granted(&limiter.semaphore(strict(1), "key")).await;
    let empty = until_empty(server).await;
    println!("{fault}: granted again after {took:?}, empty {empty:?} later");
    assert!(
        took < PROBE + STORE_TIMEOUT + SLACK,
        "G8: {fault}: {took:?}"
    );
    assert!(empty < LEASE, "G6: {fault}: {empty:?}");
}

#[tokio::test]
async fn a_paused_server_is_an_outage() {
    let server = RedisServer::start();
    let limiter = replica(&server.url()).await;
    for mode in ["WRITE", "ALL"] {
        until_granted(&limiter.semaphore(strict(1), "key")).await;
        // The pause must expire: a paused client cannot end it.
        server.cli(&["CLIENT", "PAUSE", "2500", mode]);
        is_decided_by_policy(mode, &limiter).await;
        recovers(mode, &limiter, &server).await;
    }
}

#[tokio::test]
async fn a_sleeping_server_is_an_outage() {
    let server = debuggable(&[]);
    let limiter = replica(&server.url()).await;
    until_granted(&limiter.semaphore(strict(1), "key")).await;
    let _asleep = put_to_sleep(&server, "2.5");
    is_decided_by_policy("DEBUG SLEEP", &limiter).await;
    recovers("DEBUG SLEEP", &limiter, &server).await;
}

type Switch = fn(&FaultProxy, bool);

#[tokio::test]
async fn a_broken_network_is_an_outage() {
    let faults: [(&str, Switch); 6] = [
        ("half-open", |proxy, on| proxy.half_open(on)),
        ("replies are lost", |proxy, on| proxy.drop_replies(on)),
        ("requests stand still", |proxy, on| match on {
            true => proxy.hold_all(Way::Requests),
            false => proxy.release(Way::Requests),
        }),
        ("replies stand still", |proxy, on| match on {
            true => proxy.hold_all(Way::Replies),
            false => proxy.release(Way::Replies),
        }),
        ("refused and cut", |proxy, on| {
            proxy.refuse(on);
            proxy.cut_all();
            // One may be accepted in this moment.
            while on && proxy.seen().open() > 0 {
                proxy.cut_all();
            }
        }),
        ("throttled", |proxy, on| proxy.throttle(on.then_some(20))),
    ];
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let limiter = replica(&proxy.url()).await;
    for (fault, switch) in faults {
        until_granted(&limiter.semaphore(strict(1), "key")).await;
        switch(&proxy, true);
        is_decided_by_policy(fault, &limiter).await;
        switch(&proxy, false);
        recovers(fault, &limiter, &server).await;
    }
    let seen = proxy.seen();
    println!("{} connections, {} open", seen.accepted(), seen.open());
}

/// A connection forgotten by the network: it neither ends nor delivers anything. A new connection would work.
#[tokio::test]
async fn a_half_open_connection_is_left_for_a_new_one() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let one = semaphore(&proxy.url(), &strict(1)).await;
    for number in 0..3 {
        until_granted(&one).await;
        until_empty(&server).await;
        assert_eq!(proxy.seen().accepted(), number + 1);
        for way in [Way::Requests, Way::Replies] {
            proxy.hold(way, number);
        }
        let (kind, took) = refused(&one).await;
        assert_eq!(kind, AcquireErrorKind::Unavailable);
        assert!(took < STORE_TIMEOUT + SLACK, "G8: {took:?}");
        let again = until_granted(&one).await;
        println!("refused after {took:?}, granted on a new connection {again:?} later");
        assert!(again < PROBE + SLACK, "G8: {again:?}");
    }
}

/// G1 and G2 in a partition: a disconnected replica loses its permits before others get the slots.
#[tokio::test]
async fn a_partition_gives_no_slot_twice() {
    const CAP: u32 = 3;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(CAP);
    let cut_off = semaphore(&proxy.url(), &strict(CAP)).await;
    let connected = semaphore(&server.url(), &strict(CAP)).await;
    let mut held = Vec::new();
    for _ in 0..CAP {
        held.push(holders.enter(soon(cut_off.acquire()).await.expect("free")));
    }
    proxy.half_open(true);
    let began = Instant::now();
    let mut next = Vec::new();
    for _ in 0..CAP {
        next.push(holders.enter(soon(connected.acquire()).await.expect("in turn")));
    }
    let took = began.elapsed();
    println!("the slots went on after {took:?}; {}", holders.figures());
    assert!(held.iter().all(|permit| permit.is_lost()), "G2");
    assert_eq!(holders.figures().peak, CAP as usize, "G1");
    assert!(took < LEASE + SLACK, "G5: {took:?}");
    proxy.half_open(false);
    drop((held, next));
    until_granted(&cut_off).await;
    let empty = until_empty(&server).await;
    assert!(empty < LEASE, "G6: {empty:?}");
}

/// A fault shorter than the lease costs holders nothing.
#[tokio::test]
async fn holders_survive_a_short_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    // Long enough for a late renewal, an outage and a probe.
    let limiter = quick().lease(3 * LEASE).connect(&proxy.url()).await;
    let one = limiter.expect("it is up").semaphore(strict(1), "key");
    let permit = soon(one.acquire()).await.expect("free");
    for _ in 0..3 {
        proxy.refuse(true);
        proxy.cut_all();
        // A renewal falls due meanwhile.
        sleep(LEASE + POLL).await;
        let before = permit.deadline();
        proxy.refuse(false);
        soon(async {
            while permit.deadline() == before && !permit.is_lost() {
                sleep(POLL / 10).await;
            }
        })
        .await;
        assert!(!permit.is_lost(), "G2: it was renewed");
    }
    until_usage(&one, |in_use, _| in_use == 1).await;
    drop(permit);
    until_empty(&server).await;
}

/// What this process admits by itself is not the usage of all replicas.
#[tokio::test]
async fn a_fallback_does_not_tell_the_usage() {
    let mut server = RedisServer::start();
    let limit = strict(2).fallback(Fallback::Local(1));
    let one = semaphore(&server.url(), &limit).await;
    drop(soon(one.acquire()).await.expect("free"));
    server.stop();
    let _admitted = soon(one.acquire()).await.expect("by the fallback");
    let error = soon(one.usage()).await.expect_err("unknown");
    assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
}

type Command<'a> = &'a [&'a str];

/// Errors of real servers that are temporarily unavailable. (`TRYAGAIN` needs a cluster. The table in
/// `store/redis/tests.rs` contains it, with the others.)
#[tokio::test]
async fn passing_trouble_of_a_server_is_an_outage() {
    let nobody = free_port().to_string();
    let cases: [(&str, &[&str], Command, Command); 4] = [
        (
            "READONLY",
            &[],
            &["REPLICAOF", "127.0.0.1", &nobody],
            &["REPLICAOF", "NO", "ONE"],
        ),
        (
            "MASTERDOWN",
            &["--replica-serve-stale-data", "no"],
            &["REPLICAOF", "127.0.0.1", &nobody],
            &["REPLICAOF", "NO", "ONE"],
        ),
        (
            "NOREPLICAS",
            &[],
            &["CONFIG", "SET", "min-replicas-to-write", "1"],
            &["CONFIG", "SET", "min-replicas-to-write", "0"],
        ),
        (
            "OOM",
            &[],
            &["CONFIG", "SET", "maxmemory", "1"],
            &["CONFIG", "SET", "maxmemory", "0"],
        ),
    ];
    for (says, options, begin, end) in cases {
        let server = RedisServer::start_with(options);
        let limiter = replica(&server.url()).await;
        until_granted(&limiter.semaphore(strict(1), "key")).await;
        // A request sent together with a release gets the memory it frees.
        until_empty(&server).await;
        server.cli(&["CONFIG", "RESETSTAT"]);
        server.cli(begin);
        is_decided_by_policy(says, &limiter).await;
        assert_error(&server, says);
        server.cli(end);
        recovers(says, &limiter, &server).await;
    }
}

/// Checks that the fault was the intended one. Redis 6 does not count all script errors by code.
pub(crate) fn assert_error(server: &RedisServer, says: &str) {
    let stats = server.cli(&["INFO", "errorstats"]);
    let is_old = server.cli(&["INFO", "server"]).contains("redis_version:6.");
    let said = stats.contains(&format!("errorstat_{says}:"));
    assert!(said || is_old, "{says}: {stats}");
}

/// A cluster that lacks a node. (With several limits the client for a single server would be wrong there.)
#[tokio::test]
async fn a_slot_without_a_node_is_an_outage() {
    let server = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let limiter = replica(&server.url()).await;
    for _ in 0..2 {
        let (kind, took) = refused(&limiter.semaphore(strict(1), "key")).await;
        assert_eq!(kind, AcquireErrorKind::Unavailable);
        assert!(took < STORE_TIMEOUT + SLACK, "G8: {took:?}");
    }
    assert_error(&server, "CLUSTERDOWN");
    let slots = ["CLUSTER", "ADDSLOTS"].map(str::to_owned).into_iter();
    let slots: Vec<_> = slots
        .chain((0..16_384).map(|slot| slot.to_string()))
        .collect();
    server.cli(&slots.iter().map(String::as_str).collect::<Vec<_>>());
    while !server
        .cli(&["CLUSTER", "INFO"])
        .contains("cluster_state:ok")
    {
        sleep(Duration::from_millis(5)).await;
    }
    recovers("CLUSTERDOWN", &limiter, &server).await;
}

/// A script of another client that runs until it is killed.
#[tokio::test]
async fn a_busy_server_is_an_outage() {
    let server = RedisServer::start_with(&["--lua-time-limit", "20"]);
    let limiter = replica(&server.url()).await;
    until_granted(&limiter.semaphore(strict(1), "key")).await;
    let port = server.port();
    let busy = std::thread::spawn(move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
        let mut connection = client.get_connection().expect("it listens");
        let mut endless = redis::cmd("EVAL");
        endless.arg("while true do end").arg(0);
        endless.query::<()>(&mut connection).expect_err("killed");
    });
    while !is_busy(port) {
        sleep(Duration::from_millis(5)).await;
    }
    is_decided_by_policy("BUSY", &limiter).await;
    server.cli(&["SCRIPT", "KILL"]);
    busy.join().expect("no panic");
    assert_error(&server, "BUSY");
    recovers("BUSY", &limiter, &server).await;
}

fn is_busy(port: u16) -> bool {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    let asked = client
        .get_connection()
        .and_then(|mut connection| redis::cmd("GET").arg("a").query::<()>(&mut connection));
    asked.is_err_and(|error| error.code() == Some("BUSY"))
}

/// A server that is still loading its data, and reports this to every client.
#[tokio::test]
async fn a_loading_server_is_an_outage() {
    let server = debuggable(&["--loading-process-events-interval-bytes", "1024"]);
    let limiter = replica(&server.url()).await;
    until_granted(&limiter.semaphore(strict(1), "key")).await;
    server.cli(&["DEBUG", "POPULATE", "30000"]);
    server.cli(&["CONFIG", "SET", "key-load-delay", "100"]);
    let port = server.port();
    let reload = std::thread::spawn(move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
        let mut connection = client.get_connection().expect("it listens");
        redis::cmd("DEBUG")
            .arg("RELOAD")
            .query::<()>(&mut connection)
            .expect("reloaded");
    });
    while !is_loading(&server) {
        sleep(Duration::from_millis(5)).await;
    }
    is_decided_by_policy("LOADING", &limiter).await;
    assert!(is_loading(&server), "the fault lasted");
    server.cli(&["CONFIG", "SET", "key-load-delay", "0"]);
    reload.join().expect("no panic");
    assert_error(&server, "LOADING");
    server.cli(&["FLUSHALL"]);
    recovers("LOADING", &limiter, &server).await;
}

fn is_loading(server: &RedisServer) -> bool {
    server
        .cli(&["INFO", "persistence"])
        .contains("loading:1\r\n")
}
