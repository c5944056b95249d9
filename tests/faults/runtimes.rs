//! G1, G8: the runtime on which a limiter was connected ends or is no longer driven. The store still decides at once on
//! requests from another runtime: the connection belongs to the limiter's task and that task's runtime.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::{Builder, Runtime};
use tower_turnstile::{AcquireErrorKind, Fallback, Limit, Limiter, LimiterBuilder};

use crate::{
    scene::{GUARD, LONG, soon, steady, until_empty},
    support::redis_server::RedisServer,
};

/// A fallback without the store would admit one request.
const LIMIT: Limit = Limit::concurrent("one", 1).fallback(Fallback::Local(1));

/// A request that had to wait for a timeout of the store would fail.
fn builder() -> LimiterBuilder {
    steady().store_timeout(LONG).lease(4 * LONG)
}

fn current_thread() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

fn multi_thread() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(1).enable_all();
    builder.build().expect("a runtime")
}

fn connect(runtime: &Runtime, builder: LimiterBuilder, server: &RedisServer) -> Limiter {
    let limiter = runtime.block_on(builder.connect(&server.url()));
    limiter.expect("it is up")
}

/// Connections subscribed to wake-ups.
fn subscribers(server: &RedisServer) -> usize {
    server
        .cli(&["CLIENT", "LIST", "TYPE", "pubsub"])
        .lines()
        .filter(|line| line.contains("id="))
        .count()
}

fn until_subscribers(server: &RedisServer, count: usize) {
    let began = Instant::now();
    while subscribers(server) != count {
        assert!(began.elapsed() < GUARD, "{}", subscribers(server));
        thread::sleep(Duration::from_millis(1));
    }
}

/// The only slot is taken by another replica and then freed: the store reports both at once.
fn is_served(limiter: &Limiter, serving: &Runtime, server: &RedisServer) {
    let other = connect(serving, builder(), server)
        .semaphore(&LIMIT, "key")
        .unwrap();
    let semaphore = limiter.semaphore(&LIMIT, "key").unwrap();
    serving.block_on(async {
        let held = soon(other.acquire()).await.expect("free");
        let refused = soon(semaphore.acquire()).await;
        assert!(limiter.status().store_up, "G8");
        let refused = refused.expect_err("G1: it is taken");
        assert_eq!(refused.kind(), AcquireErrorKind::Full);
        drop(held);
        until_empty(server).await;

        drop(soon(semaphore.acquire()).await.expect("free"));
        until_empty(server).await;
        assert!(limiter.status().store_up, "G8");
    });
}

#[test]
fn a_runtime_that_is_not_driven_any_more_is_no_outage() {
    let server = RedisServer::start();
    let left = current_thread();
    let limiter = connect(&left, builder(), &server);
    is_served(&limiter, &multi_thread(), &server);
    drop(left);
}

#[test]
fn neither_is_it_with_a_runtime_of_its_own() {
    let server = RedisServer::start();
    let (left, serving) = (current_thread(), multi_thread());
    let builder = builder().runtime(serving.handle().clone());
    let limiter = connect(&left, builder, &server);
    // The first connection is useless, and closed although nobody drives its runtime.
    until_subscribers(&server, 0);
    is_served(&limiter, &serving, &server);
    drop(left);
}

#[test]
fn a_thread_that_works_on_without_its_runtime_is_no_outage() {
    let server = RedisServer::start();
    let (give, take) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let url = server.url();
    let busy = thread::spawn(move || {
        current_thread().block_on(async {
            let limiter = builder().connect(&url).await;
            give.send(limiter.expect("it is up")).expect("a receiver");
            // Blocks the thread in the middle of a task.
            assert!(ended.recv().is_err());
        });
    });
    let limiter = take.recv().expect("a limiter");
    is_served(&limiter, &multi_thread(), &server);
    drop(end);
    busy.join().expect("no panic");
}

#[test]
fn a_runtime_that_was_dropped_is_no_outage() {
    let server = RedisServer::start();
    let limiter = connect(&current_thread(), builder(), &server);
    is_served(&limiter, &multi_thread(), &server);
}

#[test]
fn each_runtime_in_turn_has_a_connection_and_takes_it_with_it() {
    let server = RedisServer::start();
    let limiter = connect(&current_thread(), builder(), &server);
    let semaphore = limiter.semaphore(&LIMIT, "key").unwrap();
    for _ in 0..3 {
        let runtime = multi_thread();
        runtime.block_on(async {
            drop(soon(semaphore.acquire()).await.expect("free"));
            until_empty(&server).await;
        });
        until_subscribers(&server, 1);
        drop(runtime);
        until_subscribers(&server, 0);
    }
}

/// Connected and served on the same runtime: a single connection.
#[test]
fn what_connects_serves() {
    let server = RedisServer::start();
    let accepted = || {
        let stats = server.cli(&["INFO", "stats"]);
        let mut lines = stats.lines();
        let count = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
        count.and_then(|count| count.parse::<u32>().ok())
    };
    for runtime in [current_thread(), multi_thread()] {
        let before = accepted().expect("a count");
        let limiter = connect(&runtime, builder(), &server);
        let semaphore = limiter.semaphore(&LIMIT, "key").unwrap();
        for _ in 0..3 {
            let permit = runtime.block_on(semaphore.acquire()).expect("free");
            assert_eq!(subscribers(&server), 1);
            drop(permit);
            runtime.block_on(async { while semaphore.usage().await.expect("up").in_use > 0 {} });
        }
        // The limiter's connection, three queries for subscribers, and the last query for the count.
        assert_eq!(accepted().expect("a count") - before, 1 + 3 + 1);
    }
}

#[test]
fn a_limiter_that_was_never_used_closes_its_connection() {
    let server = RedisServer::start();
    let left = current_thread();
    let limiter = connect(&left, builder(), &server);
    assert_eq!(subscribers(&server), 1);
    drop(limiter);
    until_subscribers(&server, 0);
    drop(left);
}

/// Between connecting and the first request nobody reads from the connection.
#[test]
fn a_connection_that_ended_before_it_was_used_is_no_outage() {
    for runtime in [current_thread(), multi_thread()] {
        let server = RedisServer::start();
        let limiter = connect(&runtime, builder(), &server);
        server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        is_served(&limiter, &runtime, &server);
    }
}
