//! Ends of a process and of its runtimes, with slots in a real store.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use http_body_util::BodyExt;
use tokio::{
    runtime::{self, Runtime},
    time::{sleep, timeout},
};
use tower_turnstile::Limiter;

use crate::{
    scene::{LEASE, SLACK, WAITER_TTL, semaphore, soon, start, strict, until_empty},
    support::{
        alone,
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
        replica::Replica,
        watch::{Ledger, Streams},
    },
};

fn runtime() -> Runtime {
    runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Waits on a separate runtime until the store is empty.
fn empty(server: &RedisServer) -> Duration {
    runtime().block_on(until_empty(server))
}

/// A panic here would abort the process.
#[test]
fn permits_and_requests_dropped_after_their_runtime_are_back_within_the_lease() {
    let server = RedisServer::start();
    let (permit, mut requests, dead) = {
        let runtime = runtime();
        let (permit, request) = runtime.block_on(async {
            let one = semaphore(&server.url(), &strict(1)).await;
            let permit = soon(one.acquire()).await.expect("free");
            let mut waiting = one.acquire();
            start(&mut waiting);
            let unpolled = one.acquire();
            (permit, vec![waiting, unpolled])
        });
        let dead = runtime.handle().clone();
        runtime.shutdown_background();
        (permit, request, dead)
    };
    let dropped = Instant::now();
    let outside = thread::spawn(move || {
        drop(requests.pop());
        drop(permit);
        // Inside the context of the dead runtime.
        let _in_runtime = dead.enter();
        drop(requests);
    });
    outside.join().expect("no panic");
    let granted = runtime().block_on(async {
        let other = semaphore(&server.url(), &strict(1)).await;
        drop(soon(other.acquire()).await.expect("in turn"));
        dropped.elapsed()
    });
    println!("back after {granted:?}, with a lease of {LEASE:?}");
    // Its waiter was behind its permit.
    assert!(
        granted < LEASE + 2 * WAITER_TTL + SLACK,
        "G4, G5: {granted:?}"
    );
    empty(&server);
}

/// Dropped on a bare thread while the runtime is running: released at once.
#[test]
fn a_permit_dropped_by_a_panic_outside_a_runtime_is_back_at_once() {
    let server = RedisServer::start();
    let runtime = runtime();
    let permit = runtime.block_on(async {
        let one = semaphore(&server.url(), &strict(1)).await;
        soon(one.acquire()).await.expect("free")
    });
    let dropped = Instant::now();
    let outside = thread::spawn(|| {
        let panics = AssertUnwindSafe(move || {
            let _permit = permit;
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        catch_unwind(panics).expect_err("it panics");
    });
    outside.join().expect("no second panic");
    empty(&server);
    let took = dropped.elapsed();
    println!("back after {took:?}");
    assert!(took < LEASE / 2, "G5: {took:?}");
}

/// G2: a stream allowed to continue without its slot does so, and is counted.
#[test]
fn a_stopped_replica_that_goes_on_reports_its_loss() {
    alone(async {
        let server = RedisServer::start();
        let options = ["--limit", "1", "--lease", "2s", "--on-lost", "continue"];
        let replicas = [
            Replica::start(&server.url(), &options).await,
            Replica::start(&server.url(), &options).await,
        ];
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let open = |number, replica: &Replica| {
            streams.open(number, replica.get("/stream?chunks=100000&every=20"))
        };
        let _first = open(0, &replicas[0]);
        streams.until_started(0).await;
        watch.until_holders(1).await;
        let _second = open(1, &replicas[1]);
        watch.until_members(2).await;
        replicas[0].pause();
        streams.until_started(1).await;
        let before = streams.events(0);
        replicas[0].resume();
        let lost = async {
            while !metrics(&replicas[0]).await.contains(LOST) || streams.events(0) < before + 20 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(Duration::from_secs(10), lost)
            .await
            .expect("lost, and going on");
        assert!(!metrics(&replicas[1]).await.contains(LOST));
        assert_eq!(watch.finish().most_holders, 1, "G1: by the ledger");
    });
}

const LOST: &str = r#"turnstile_lost_total{namespace="demo",limit="streams"} 1"#;

async fn metrics(replica: &Replica) -> String {
    let response = replica.get("/metrics").send().await.expect("it answers").0;
    let body = response.into_body().collect().await.expect("whole");
    String::from_utf8_lossy(&body.to_bytes()).into_owned()
}

/// G5: SIGTERM with a thousand open streams and some waiting requests.
#[test]
fn a_graceful_shutdown_with_a_thousand_streams_gives_all_back() {
    const STREAMS: usize = 1_000;
    const WAITERS: usize = 20;
    alone(async {
        let server = RedisServer::start();
        let limit = STREAMS.to_string();
        let options = ["--limit", &limit, "--max-wait", "60s"];
        let mut replica = Replica::start(&server.url(), &options).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let opened = Instant::now();
        let open = |number| streams.open(number, replica.get("/stream?chunks=1000000&every=200"));
        let clients: Vec<_> = (0..STREAMS).map(open).collect();
        watch.until_holders(STREAMS).await;
        // The ledger contains them before their handlers run.
        for number in 0..STREAMS {
            streams.until_started(number).await;
        }
        let opened = opened.elapsed();
        let waiter = |_| {
            let request = replica.get("/work?ms=1");
            tokio::spawn(async move { request.status().await })
        };
        let waiters: Vec<_> = (0..WAITERS).map(waiter).collect();
        watch.until_members(STREAMS + WAITERS).await;

        let asked = Instant::now();
        replica.ask_to_end();
        for waiter in waiters {
            assert_eq!(waiter.await.expect("no panic"), 503, "refused");
        }
        let refused = asked.elapsed();
        assert_eq!(replica.terminated().await, Some(0));
        let ended = asked.elapsed();
        drop(watch);
        // Far below the lease of 10 s, and longer than a busy machine stalls.
        timeout(Duration::from_secs(5), until_empty(&server))
            .await
            .expect("G5");
        for client in clients {
            let _ = client.await.expect("no panic");
        }
        replica.until_logged("shut down", 1).await;
        let log = replica.log();
        let report = log.lines().find(|line| line.contains("shut down"));
        println!(
            "{STREAMS} streams opened in {opened:?}; waiters refused after {refused:?}, ended after {ended:?}; {report:?}"
        );
        let report = report.expect("it tells what it did");
        assert!(report.contains(&format!("refused: {WAITERS}")), "{report}");
        assert!(report.contains(&format!("lost: {STREAMS}")), "{report}");
        assert!(ended < Duration::from_secs(6), "{ended:?}");
    });
}

/// G5: releases to a distant store, which together take longer than `store_timeout`, are all awaited.
#[tokio::test]
async fn a_shutdown_over_a_distance_gives_all_back() {
    const KEYS: u64 = 3_000;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let limiter = Limiter::builder().store_timeout(Duration::from_secs(1));
    let limiter = limiter.connect(&proxy.url()).await.expect("up");
    let acquire = |key| limiter.semaphore(strict(1), key).acquire();
    let mut permits = Vec::new();
    // A few at a time, because a request that waits here for longer than `store_timeout` is refused.
    for key in (0..KEYS).step_by(200) {
        permits.extend(soon(join_all((key..key + 200).map(acquire))).await);
    }
    assert!(permits.iter().all(Result::is_ok));
    for way in [Way::Requests, Way::Replies] {
        proxy.delay(way, Duration::from_millis(50));
    }
    let began = Instant::now();
    let shutdown = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.shutdown(Duration::from_secs(60)).await }
    });
    tokio::task::yield_now().await;
    drop(permits);
    let report = shutdown.await.expect("no panic");
    println!("{report:?} after {:?}", began.elapsed());
    assert_eq!(server.key_count(), 0, "{report:?}");
    let counts = (report.released, report.lost, report.unconfirmed);
    assert_eq!(counts, (KEYS as usize, 0, 0), "{report:?}");
}
