//! Ends of a process and of its runtimes, with slots in a real store.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

use http_body_util::BodyExt;
use tokio::{
    runtime::{self, Runtime},
    time::sleep,
};

use crate::{
    scene::{granted, semaphore, soon, start, steady_semaphore, strict, until_empty},
    support::{
        alone,
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

/// A panic here would abort the process.
#[test]
fn permits_and_requests_dropped_after_their_runtime_are_back_within_the_lease() {
    let server = RedisServer::start();
    let (permit, mut requests, dead) = {
        let runtime = runtime();
        let (permit, request) = runtime.block_on(async {
            let one = semaphore(&server.url(), &strict(1)).await;
            let permit = granted(&one).await;
            let mut waiting = one.acquire();
            start(&mut waiting);
            let unpolled = one.acquire();
            (permit, vec![waiting, unpolled])
        });
        let dead = runtime.handle().clone();
        runtime.shutdown_background();
        (permit, request, dead)
    };
    let outside = thread::spawn(move || {
        drop(requests.pop());
        drop(permit);
        // Inside the context of the dead runtime.
        let _in_runtime = dead.enter();
        drop(requests);
    });
    outside.join().expect("no panic");
    runtime().block_on(async {
        let other = semaphore(&server.url(), &strict(1)).await;
        drop(granted(&other).await);
        // The dead waiter goes with its ledger.
        until_empty(&server).await;
    });
}

/// Dropped on a bare thread while the runtime is running: released at once.
#[test]
fn a_permit_dropped_by_a_panic_outside_a_runtime_is_back_at_once() {
    let server = RedisServer::start();
    let runtime = runtime();
    let permit = runtime.block_on(async {
        // A lease that is longer than the test.
        let one = steady_semaphore(&server.url(), &strict(1)).await;
        soon(one.acquire()).await.expect("free")
    });
    let outside = thread::spawn(|| {
        let panics = AssertUnwindSafe(move || {
            let _permit = permit;
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        catch_unwind(panics).expect_err("it panics");
    });
    outside.join().expect("no second panic");
    self::runtime().block_on(until_empty(&server));
}

/// G2: a stream allowed to continue without its slot does so, and is counted.
#[test]
fn a_stopped_replica_that_goes_on_reports_its_loss() {
    alone(async {
        let server = RedisServer::start();
        let options = ["--limit", "1", "--on-lost", "continue", "--lease"];
        let steady = ["300s", "--store-timeout", "20s"];
        let replicas = [
            Replica::start(&server.url(), &[&options[..], &["2s"]].concat()).await,
            Replica::start(&server.url(), &[&options[..], &steady].concat()).await,
        ];
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let open = |number, replica: &Replica| {
            streams.open(number, replica.get("/stream?chunks=100000&every=20"))
        };
        let _first = open(0, &replicas[0]);
        soon(streams.until_started(0)).await;
        // If a stall of the machine was an outage, its slot is entered later.
        soon(watch.until_holders(1)).await;
        let _second = open(1, &replicas[1]);
        replicas[0].pause();
        soon(streams.until_started(1)).await;
        let before = streams.events(0);
        replicas[0].resume();
        let lost = async {
            while !metrics(&replicas[0]).await.contains(LOST) || streams.events(0) < before + 20 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        soon(lost).await;
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
        let options = ["--limit", &limit, "--max-wait", "120s"];
        let steady = ["--lease", "300s", "--store-timeout", "20s"];
        let options = [options, steady].concat();
        let mut replica = Replica::start(&server.url(), &options).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let open = |number| streams.open(number, replica.get("/stream?chunks=1000000&every=200"));
        let mut clients = Vec::new();
        // A few at a time: the server's socket keeps no more connections that it has not accepted.
        for first in (0..STREAMS).step_by(100) {
            clients.extend((first..first + 100).map(&open));
            for number in first..first + 100 {
                soon(streams.until_started(number)).await;
            }
        }
        let waiter = |_| {
            let request = replica.get("/work?ms=1");
            tokio::spawn(async move { request.status().await })
        };
        let waiters: Vec<_> = (0..WAITERS).map(waiter).collect();
        soon(watch.until_members(STREAMS + WAITERS)).await;

        replica.ask_to_end();
        for waiter in waiters {
            assert_eq!(soon(waiter).await.expect("no panic"), 503, "refused");
        }
        assert_eq!(soon(replica.terminated()).await, Some(0));
        drop(watch);
        until_empty(&server).await;
        for client in clients {
            let _ = soon(client).await.expect("no panic");
        }
        soon(replica.until_logged("shut down", 1)).await;
        let log = replica.log();
        let report = log.lines().find(|line| line.contains("shut down"));
        let report = report.expect("it tells what it did");
        assert!(report.contains(&format!("refused: {WAITERS}")), "{report}");
        assert!(report.contains(&format!("lost: {STREAMS}")), "{report}");
    });
}
