//! G8: a store that is silent, or refuses for a while. Requests do not wait for it: each limit's policy decides, and
//! everything recovers by itself. (How long a request waits, in exact times: `tests/semaphore/test_store.rs`.)

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_turnstile::{AcquireErrorKind, Fallback, Limit, Limiter};

use crate::{
    scene::{
        GUARD, Holders, LEASE, LONG, POLL, granted, quick, refused, semaphore, soon,
        steady_semaphore, strict, until_empty, until_granted, until_usage,
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::{RedisServer, free_port},
    },
};

const OPEN: Limit = Limit::concurrent("open", 1)
    .wait_up_to(GUARD.saturating_mul(2))
    .fallback(Fallback::Allow);
const LOCAL: Limit = Limit::concurrent("local", 2)
    .wait_up_to(GUARD.saturating_mul(2))
    .fallback(Fallback::Local(2));

/// Notices an outage early. What it leaves in the store does not go away by itself.
async fn replica(url: &str) -> Limiter {
    let limiter = quick().lease(LONG).waiter_ttl(LONG).connect(url);
    limiter.await.expect("its settings are right")
}

/// While the fault lasts, each policy decides.
async fn is_decided_by_policy(fault: &str, limiter: &Limiter) {
    println!("{fault}");
    for _ in 0..2 {
        let kind = refused(&limiter.semaphore(strict(1), "key").unwrap()).await;
        assert_eq!(kind, AcquireErrorKind::Unavailable, "{fault}");
    }
    let open = limiter.semaphore(&OPEN, "key").unwrap();
    let permits = [soon(open.acquire()).await, soon(open.acquire()).await];
    assert!(permits.iter().all(Result::is_ok), "G8: {fault}");
    let local = limiter.semaphore(&LOCAL, "key").unwrap();
    let permits = [soon(local.acquire()).await, soon(local.acquire()).await];
    assert!(permits.iter().all(Result::is_ok), "G8: {fault}");
    let third = soon(local.try_acquire()).await.expect_err("G1");
    assert_eq!(third.kind(), AcquireErrorKind::Full, "G1: {fault}");
}

/// Waits for full recovery.
async fn recovers(limiter: &Limiter, server: &RedisServer) {
    until_granted(&limiter.semaphore(strict(1), "key").unwrap()).await;
    until_empty(server).await;
}

type Switch = fn(&FaultProxy, bool);

#[tokio::test]
async fn a_broken_network_is_an_outage() {
    let faults: [(&str, Switch); 6] = [
        ("half-open", |proxy, on| proxy.half_open(on)),
        ("replies are lost", |proxy, on| proxy.drop_replies(on)),
        ("requests stand still", |proxy, on| {
            if on {
                proxy.hold_all(Way::Requests)
            } else {
                proxy.release(Way::Requests)
            }
        }),
        ("replies stand still", |proxy, on| {
            if on {
                proxy.hold_all(Way::Replies)
            } else {
                proxy.release(Way::Replies)
            }
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
        recovers(&limiter, &server).await;
        switch(&proxy, true);
        is_decided_by_policy(fault, &limiter).await;
        switch(&proxy, false);
        recovers(&limiter, &server).await;
    }
    let seen = proxy.seen();
    println!("{} connections, {} open", seen.accepted(), seen.open());
}

/// A connection forgotten by the network: it neither ends nor delivers anything. A new connection would work.
#[tokio::test]
async fn a_half_open_connection_is_left_for_a_new_one() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let limiter = replica(&proxy.url()).await;
    let one = limiter.semaphore(strict(1), "key").unwrap();
    for _ in 0..3 {
        recovers(&limiter, &server).await;
        // Nothing is in flight, so the connection stays.
        until_usage(&one, |in_use, _| in_use == 0).await;
        let next = proxy.seen().accepted();
        for way in [Way::Requests, Way::Replies] {
            proxy.hold(way, next - 1);
        }
        assert_eq!(refused(&one).await, AcquireErrorKind::Unavailable);
        until_granted(&one).await;
        assert!(proxy.seen().accepted() > next, "G8");
    }
}

/// G1 and G2 in a partition: a disconnected replica loses its permits before others get the slots.
#[tokio::test]
async fn a_partition_gives_no_slot_twice() {
    const CAP: u32 = 3;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(CAP);
    // Only the leases of this one end.
    let cut_off = semaphore(&proxy.url(), &strict(CAP)).await;
    let connected = steady_semaphore(&server.url(), &strict(CAP)).await;
    let mut held = Vec::new();
    for _ in 0..CAP {
        held.push(holders.enter(granted(&cut_off).await));
    }
    proxy.half_open(true);
    let mut next = Vec::new();
    for _ in 0..CAP {
        next.push(holders.enter(soon(connected.acquire()).await.expect("G5: in turn")));
    }
    assert!(held.iter().all(|permit| permit.is_lost()), "G2");
    assert_eq!(holders.figures().peak, CAP as usize, "G1");
    proxy.half_open(false);
    drop((held, next));
    until_granted(&cut_off).await;
    until_empty(&server).await;
}

/// A fault shorter than the lease costs holders nothing.
#[tokio::test]
async fn holders_survive_a_short_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    // Long enough for a late renewal, an outage and a probe.
    let limiter = quick().lease(3 * LEASE).connect(&proxy.url()).await;
    let one = limiter
        .expect("it is up")
        .semaphore(strict(1), "key")
        .unwrap();
    let survived = async {
        loop {
            let permit = granted(&one).await;
            proxy.refuse(true);
            proxy.cut_all();
            // A renewal falls due meanwhile.
            sleep(LEASE + POLL).await;
            let before = permit.deadline();
            proxy.refuse(false);
            while permit.deadline() == before && !permit.is_lost() {
                sleep(POLL / 10).await;
            }
            // Together with a stall of the machine it may have outlasted the lease.
            if !permit.is_lost() {
                return permit;
            }
        }
    };
    let permit = soon(survived).await;
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

type Fault = fn(&RedisServer, bool);

/// Servers that stand still, and errors of servers that are temporarily unavailable. (`TRYAGAIN` needs a cluster. The table
/// in `store/redis/tests.rs` contains it, with the others.)
#[tokio::test]
async fn passing_trouble_of_a_server_is_an_outage() {
    fn set(server: &RedisServer, name: &str, value: &str) {
        server.cli(&["CONFIG", "SET", name, value]);
    }
    fn replicate(server: &RedisServer, on: bool) {
        let nobody = free_port().to_string();
        let [host, port] = if on {
            ["127.0.0.1", &nobody]
        } else {
            ["NO", "ONE"]
        };
        server.cli(&["REPLICAOF", host, port]);
    }
    let cases: [(Option<&str>, Fault); 6] = [
        (None, |server, on| {
            server.cli(if on {
                &["CLIENT", "PAUSE", "600000", "WRITE"]
            } else {
                &["CLIENT", "UNPAUSE"]
            });
        }),
        (
            None,
            |server, on| if on { server.pause() } else { server.resume() },
        ),
        (Some("READONLY"), replicate),
        (Some("NOREPLICAS"), |server, on| {
            set(server, "min-replicas-to-write", if on { "1" } else { "0" });
        }),
        (Some("OOM"), |server, on| {
            set(server, "maxmemory", if on { "1" } else { "0" });
        }),
        (Some("MASTERDOWN"), |server, on| {
            let serves = if on { "no" } else { "yes" };
            set(server, "replica-serve-stale-data", serves);
            replicate(server, on);
        }),
    ];
    let server = RedisServer::start();
    let limiter = replica(&server.url()).await;
    for (says, switch) in cases {
        let fault = says.unwrap_or("it stands still");
        // A request sent together with a release gets the memory it frees.
        recovers(&limiter, &server).await;
        server.cli(&["CONFIG", "RESETSTAT"]);
        switch(&server, true);
        is_decided_by_policy(fault, &limiter).await;
        if let Some(says) = says {
            assert_error(&server, says);
        }
        switch(&server, false);
        recovers(&limiter, &server).await;
    }
}

async fn until(is_so: impl Fn() -> bool) {
    soon(async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
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
    is_decided_by_policy("CLUSTERDOWN", &limiter).await;
    assert_error(&server, "CLUSTERDOWN");
    let slots = ["CLUSTER", "ADDSLOTS"].map(str::to_owned).into_iter();
    let slots: Vec<_> = slots
        .chain((0..16_384).map(|slot| slot.to_string()))
        .collect();
    server.cli(&slots.iter().map(String::as_str).collect::<Vec<_>>());
    let info = || server.cli(&["CLUSTER", "INFO"]);
    until(|| info().contains("cluster_state:ok")).await;
    recovers(&limiter, &server).await;
}

/// A script of another client that runs until it is killed.
#[tokio::test]
async fn a_busy_server_is_an_outage() {
    let server = RedisServer::start_with(&["--lua-time-limit", "20"]);
    // Any other database than 0 is selected, which a busy server refuses.
    let urls = ["", "/1"].map(|database| server.url() + database);
    let limiters = join_all(urls.iter().map(|url| replica(url))).await;
    for limiter in &limiters {
        recovers(limiter, &server).await;
    }
    let port = server.port();
    let busy = std::thread::spawn(move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
        let mut connection = client.get_connection().expect("it listens");
        let mut endless = redis::cmd("EVAL");
        endless.arg("while true do end").arg(0);
        endless.query::<()>(&mut connection).expect_err("killed");
    });
    until(|| is_busy(port)).await;
    for (limiter, url) in limiters.iter().zip(&urls) {
        is_decided_by_policy(&format!("BUSY: {url}"), limiter).await;
        is_decided_by_policy("BUSY at the start", &replica(url).await).await;
    }
    server.cli(&["SCRIPT", "KILL"]);
    busy.join().expect("no panic");
    assert_error(&server, "BUSY");
    for limiter in &limiters {
        recovers(limiter, &server).await;
    }
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
    let events = ["--loading-process-events-interval-bytes", "1024"];
    let mut server = RedisServer::start_with(&events);
    // Redis 6 always allows `DEBUG`.
    let setting = server.cli(&["CONFIG", "GET", "enable-debug-command"]);
    if !setting.is_empty() {
        let debug = ["--enable-debug-command", "yes"];
        server = RedisServer::start_with(&[events, debug].concat());
    }
    let limiter = replica(&server.url()).await;
    recovers(&limiter, &server).await;
    server.cli(&["DEBUG", "POPULATE", "30000"]);
    // Half a minute in total, unless it is told to hurry.
    server.cli(&["CONFIG", "SET", "key-load-delay", "1000"]);
    let port = server.port();
    let reload = std::thread::spawn(move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
        let mut connection = client.get_connection().expect("it listens");
        redis::cmd("DEBUG")
            .arg("RELOAD")
            .query::<()>(&mut connection)
            .expect("reloaded");
    });
    until(|| is_loading(&server)).await;
    is_decided_by_policy("LOADING", &limiter).await;
    assert!(is_loading(&server), "the fault lasted");
    server.cli(&["CONFIG", "SET", "key-load-delay", "0"]);
    reload.join().expect("no panic");
    assert_error(&server, "LOADING");
    server.cli(&["FLUSHALL"]);
    recovers(&limiter, &server).await;
}

fn is_loading(server: &RedisServer) -> bool {
    server
        .cli(&["INFO", "persistence"])
        .contains("loading:1\r\n")
}
