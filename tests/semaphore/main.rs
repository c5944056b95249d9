//! The semaphore's public API: one conformance suite over memory and real Redis, then the specifics of each.

#[path = "../support/mod.rs"]
mod support;

#[macro_use]
mod backend;
#[cfg(feature = "test-util")]
mod budgets;
mod bursts;
mod charges;
#[cfg(feature = "test-util")]
mod edges;
mod live;
#[cfg(feature = "test-util")]
mod losses;
mod rates;
mod releases;
mod reuse;
#[cfg(feature = "test-util")]
mod runtimes;
mod tenants;
#[cfg(feature = "test-util")]
mod test_store;
mod together;
mod weights;

use std::{
    future::Future,
    pin::pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::FutureExt;

use backend::{
    Backend, GUARD, connect, current_thread, lasting, multi_thread, queue, soon, start, until,
    until_free, until_in_store, until_up, until_waiting,
};
use support::redis_server::RedisServer;
use tower_turnstile::{AcquireErrorKind, ConfigErrorKind, Fallback, Limit, Limiter, Permit};

promises!(conformance);

async fn a_free_slot_is_granted_at_once(backend: Backend) {
    let semaphore = backend.semaphore(&Limit::concurrent("a", 2)).await;
    let one = semaphore.acquire().await.expect("free");
    let two = semaphore.try_acquire().await.expect("free");
    assert_eq!((one.position(), two.position()), (None, None));
    assert!(!one.is_lost());
    let usage = semaphore.usage().await.expect("up");
    assert_eq!((usage.in_use, usage.waiting, usage.max), (2, 0, 2));
    drop((one, two));
    until_free(&semaphore).await;
}

async fn the_cap_holds_under_load(backend: Backend) {
    let limit = Limit::concurrent("a", 3).wait_up_to(GUARD);
    let inside = &*Box::leak(Box::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let semaphore = backend.semaphore(&limit).await;
        for _ in 0..20 {
            let semaphore = semaphore.clone();
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let permit = semaphore.acquire().await.expect("a slot comes free");
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} are inside");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                }
            }));
        }
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    until_free(&backend.semaphore(&limit).await).await;
}

async fn waiters_are_served_in_order_across_replicas(backend: Backend) {
    let limit = Limit::concurrent("a", 1).wait_up_to(GUARD);
    let replicas = [
        backend.semaphore(&limit).await,
        backend.semaphore(&limit).await,
        backend.semaphore(&limit).await,
    ];
    let mut holder = replicas[0].acquire().await.expect("free");
    let mut waiters = Vec::new();
    for number in 0..12 {
        waiters.push(queue(&replicas[number * 7 % 3], number as u32 + 1).await);
    }
    for (number, waiter) in waiters.into_iter().enumerate() {
        drop(holder);
        holder = soon(waiter).await.expect("no panic");
        assert_eq!(holder.position(), Some(number as u32 + 1));
        let usage = replicas[0].usage().await.expect("up");
        assert_eq!((usage.in_use, usage.waiting), (1, 11 - number as u32));
    }
}

/// G1: a replica without a request of the key asks for its usage, or pauses it.
async fn a_question_admits_nobody_above_the_keys_own_value(backend: Backend) {
    let limit = Limit::concurrent("a", 100).wait_up_to(GUARD);
    let [one, other, third] = [
        backend.semaphore(&limit).await.value(1).unwrap(),
        backend.semaphore(&limit).await.value(1).unwrap(),
        backend.semaphore(&limit).await.value(1).unwrap(),
    ];
    let held = one.acquire().await.expect("free");
    let waiters = [queue(&other, 1).await, queue(&other, 2).await];
    for _ in 0..2 {
        let usage = third.usage().await.expect("up");
        assert_eq!((usage.max, usage.in_use, usage.waiting), (1, 1, 2));
    }
    drop(held);
    for waiter in waiters {
        drop(waiter.await.expect("no panic"));
    }
}

async fn a_newcomer_never_overtakes(backend: Backend) {
    let limit = Limit::concurrent("a", 1).wait_up_to(GUARD);
    let (one, other) = (
        backend.semaphore(&limit).await,
        backend.semaphore(&limit).await,
    );
    let holder = one.acquire().await.expect("free");
    let waiter = queue(&one, 1).await;
    drop(holder);
    // Whether the newcomer arrives before or after the handover, the slot belongs to the waiter.
    let newcomer = other.try_acquire().await.expect_err("the slot is promised");
    assert_eq!(newcomer.kind(), AcquireErrorKind::Full);
    drop(waiter.await.expect("no panic"));
    until_free(&one).await;
    drop(other.try_acquire().await.expect("free again"));
}

async fn a_request_that_does_not_wait_is_refused(backend: Backend) {
    let semaphore = backend.semaphore(&Limit::concurrent("a", 1)).await;
    let _holder = semaphore.acquire().await.expect("free");
    let error = semaphore.acquire().await.expect_err("taken");
    assert_eq!(error.kind(), AcquireErrorKind::Full);
    assert!(error.is_limited());
    assert_eq!((error.max(), error.in_use(), error.waiting()), (1, 1, 0));
}

async fn a_full_line_refuses(backend: Backend) {
    let semaphore = backend
        .semaphore(&Limit::concurrent("a", 1).wait_up_to(GUARD).max_waiters(2))
        .await;
    let _holder = semaphore.acquire().await.expect("free");
    let _one = queue(&semaphore, 1).await;
    let _two = queue(&semaphore, 2).await;
    let error = semaphore.acquire().await.expect_err("no room");
    assert_eq!(
        (error.kind(), error.waiting()),
        (AcquireErrorKind::QueueFull, 2)
    );
}

async fn a_wait_ends_in_time(backend: Backend) {
    let semaphore = backend
        .semaphore(&Limit::concurrent("a", 1).wait_up_to(Duration::from_millis(50)))
        .await;
    let _holder = semaphore.acquire().await.expect("free");
    let error = semaphore.acquire().await.expect_err("taken for longer");
    assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
    assert!(error.waited() >= Duration::from_millis(50));
    until_waiting(&semaphore, 0).await;
}

async fn a_cancelled_waiter_leaves_the_line(backend: Backend) {
    let semaphore = backend
        .semaphore(&Limit::concurrent("a", 1).wait_up_to(GUARD))
        .await;
    let _holder = semaphore.acquire().await.expect("free");
    let waiter = queue(&semaphore, 1).await;
    waiter.abort();
    until_waiting(&semaphore, 0).await;
    // Dropped after its first poll, before any answer.
    let mut request = semaphore.acquire();
    start(&mut request);
    drop(request);
    until(&semaphore, |in_use, waiting| (in_use, waiting) == (1, 0)).await;
}

async fn a_cancelled_head_makes_way(backend: Backend) {
    let limit = Limit::concurrent("a", 1).wait_up_to(GUARD);
    let (one, other) = (
        backend.semaphore(&limit).await,
        backend.semaphore(&limit).await,
    );
    let holder = one.acquire().await.expect("free");
    let head = queue(&one, 1).await;
    let next = queue(&other, 2).await;
    head.abort();
    until_waiting(&one, 1).await;
    drop(holder);
    drop(next.await.expect("no panic"));
    until_free(&one).await;
}

async fn a_grant_that_nobody_takes_returns(backend: Backend) {
    let semaphore = backend
        .semaphore(&Limit::concurrent("a", 1).wait_up_to(GUARD))
        .await;
    let holder = semaphore.acquire().await.expect("free");
    let mut request = semaphore.acquire();
    start(&mut request);
    until_waiting(&semaphore, 1).await;
    drop(holder);
    until(&semaphore, |in_use, waiting| (in_use, waiting) == (1, 0)).await;
    drop(request);
    until_free(&semaphore).await;
}

async fn an_unpolled_request_costs_nothing(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "key").unwrap();
    let request = semaphore.acquire();
    assert_eq!(request.position(), None);
    assert_eq!((limiter.status().held, limiter.status().waiting), (0, 0));
    drop(semaphore.try_acquire().await.expect("free"));
    drop(request);
}

async fn keys_do_not_share_slots(backend: Backend) {
    let limiter = backend.replica().await;
    let limit = Limit::concurrent("a", 1);
    let permits: Vec<Permit> = {
        let mut permits = Vec::new();
        for key in ["", "a", "b"] {
            permits.push(
                limiter
                    .semaphore(&limit, key)
                    .unwrap()
                    .try_acquire()
                    .await
                    .expect("a slot of its own"),
            );
        }
        permits
    };
    assert_eq!(limiter.status().held, 3);
    limiter
        .semaphore(&limit, "a")
        .unwrap()
        .try_acquire()
        .await
        .expect_err("taken");
    drop(permits);
}

async fn limits_do_not_share_slots(backend: Backend) {
    let limiter = backend.replica().await;
    let _one = limiter
        .semaphore(Limit::concurrent("a", 1), "key")
        .unwrap()
        .try_acquire()
        .await
        .expect("free");
    let _other = limiter
        .semaphore(Limit::concurrent("b", 1), "key")
        .unwrap()
        .try_acquire()
        .await
        .expect("free");
    let conflict = limiter
        .semaphore(Limit::concurrent("a", 2), "key")
        .expect_err("there is another `a`");
    assert_eq!(conflict.kind(), ConfigErrorKind::Conflict);
}

async fn shutdown_refuses_waiters_and_takes_back_permits(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter
        .semaphore(Limit::concurrent("a", 1).wait_up_to(GUARD), "key")
        .unwrap();
    let holder = semaphore.acquire().await.expect("free");
    let mut waiter = semaphore.acquire();
    start(&mut waiter);
    until_waiting(&semaphore, 1).await;
    let report = limiter.shutdown(Duration::ZERO).await;
    assert_eq!((report.refused, report.released, report.lost), (1, 0, 1));
    assert_eq!(report.unconfirmed, 0);
    assert_eq!(
        waiter.await.expect_err("closed").kind(),
        AcquireErrorKind::ShutDown
    );
    assert_eq!(
        semaphore.acquire().await.expect_err("closed").kind(),
        AcquireErrorKind::ShutDown
    );
    holder.lost().await;
    assert!(holder.is_lost());
    if backend.is_shared() {
        let other = backend.semaphore(semaphore.limit()).await;
        drop(other.try_acquire().await.expect("released"));
    }
}

/// G4: who waits when a shutdown begins is served in turn.
async fn shutdown_waits_for_holders_and_waiters(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter
        .semaphore(Limit::concurrent("a", 1).wait_up_to(GUARD), "key")
        .unwrap();
    let holder = semaphore.acquire().await.expect("free");
    let mut waiter = semaphore.acquire();
    start(&mut waiter);
    until_waiting(&semaphore, 1).await;
    let shutdown = tokio::spawn(async move { limiter.shutdown(GUARD).await });
    let closed = async {
        while semaphore.try_acquire().await.expect_err("taken").kind() != AcquireErrorKind::ShutDown
        {
            tokio::task::yield_now().await;
        }
    };
    closed.await;
    assert!(!holder.is_lost());
    drop(holder);
    drop(waiter.await.expect("its turn"));
    let report = shutdown.await.expect("no panic");
    assert_eq!((report.refused, report.released), (0, 1));
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
}

async fn dropping_a_permit_outside_a_runtime_is_fine(backend: Backend) {
    let semaphore = backend.semaphore(&Limit::concurrent("a", 1)).await;
    let permit = semaphore.acquire().await.expect("free");
    std::thread::spawn(move || drop(permit))
        .join()
        .expect("no panic");
    until_free(&semaphore).await;
}

async fn a_panicking_holder_gives_its_slot_back(backend: Backend) {
    let semaphore = backend.semaphore(&Limit::concurrent("a", 1)).await;
    let permit = semaphore.acquire().await.expect("free");
    let task = tokio::spawn(async move {
        let _permit = permit;
        panic!("on purpose");
    });
    assert!(task.await.expect_err("it panicked").is_panic());
    until_free(&semaphore).await;
}

async fn hostile_keys_work(backend: Backend) {
    let limiter = backend.replica().await;
    let limit = Limit::concurrent("a", 1);
    let long = "x".repeat(1 << 16);
    for key in ["}", "{", "{}", "x}{y", "a\0b", "a\r\nb", "*", &long] {
        let semaphore = limiter.semaphore(&limit, key).unwrap();
        let permit = semaphore.try_acquire().await.expect("free");
        semaphore.try_acquire().await.expect_err("taken");
        drop(permit);
        until_free(&semaphore).await;
    }
    assert_eq!(
        backend.contents(),
        Vec::<String>::new(),
        "nothing stays behind"
    );
}

/// Two runtimes at once, each with waiters: when the runtime of the limiter's task ends, the other takes over.
#[test]
fn waiters_of_another_runtime_survive_the_one_with_the_task() {
    let server = RedisServer::start();
    let limit = Limit::concurrent("a", 1).wait_up_to(GUARD);
    let (first, second) = (multi_thread(1), multi_thread(1));
    let semaphore = first
        .block_on(connect(&server))
        .semaphore(&limit, "key")
        .unwrap();
    let holder = first.block_on(semaphore.acquire()).expect("free");
    let waiter = second.spawn(semaphore.acquire());
    first.block_on(until_waiting(&semaphore, 1));
    first.shutdown_background();
    drop(holder);
    drop(
        second
            .block_on(waiter)
            .expect("no panic")
            .expect("the slot was passed on"),
    );
}

/// An unsent question ends with the runtime that was to send it.
#[test]
fn a_question_does_not_outlive_the_runtime_with_the_task() {
    let server = RedisServer::start();
    let (first, second) = (current_thread(), current_thread());
    let limiter = first.block_on(connect(&server));
    let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "key").unwrap();
    drop(first.block_on(semaphore.acquire()).expect("free"));
    let ask = || semaphore.usage();
    let mut unsent = Box::pin(ask());
    second.block_on(async { assert!(unsent.as_mut().now_or_never().is_none()) });
    drop(first);
    second.block_on(async {
        let error = soon(unsent).await.expect_err("not sent");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
        assert_eq!(ask().await.expect("another task").in_use, 0);
    });
}

/// A runtime may end before the limiter's task was polled even once.
#[test]
fn a_runtime_that_ends_at_once_leaves_the_limiter_usable() {
    let server = RedisServer::start();
    let limit = Limit::concurrent("a", 1).wait_up_to(GUARD);
    let first = current_thread();
    let semaphore = first
        .block_on(connect(&server))
        .semaphore(&limit, "key")
        .unwrap();
    first.block_on(async { start(&mut semaphore.acquire()) });
    drop(first);
    let second = current_thread();
    drop(second.block_on(semaphore.acquire()).expect("free"));
    second.block_on(until_free(&semaphore));
}

/// A runtime that was shut down cannot run the limiter's task, which is an immediate error.
#[test]
fn a_runtime_that_is_gone_is_an_error() {
    let server = RedisServer::start();
    let gone = current_thread();
    let handle = gone.handle().clone();
    drop(gone);
    current_thread().block_on(async {
        let limiter = lasting().runtime(handle).connect(&server.url()).await;
        let limiter = limiter.expect("up");
        let semaphore = limiter.semaphore(Limit::concurrent("a", 3), "key").unwrap();
        let error = semaphore.acquire().now_or_never().expect("at once");
        let error = error.expect_err("gone");
        assert_eq!(
            (error.kind(), error.max()),
            (AcquireErrorKind::NoRuntime, 3)
        );
    });
}

/// The runtime of the limiter's task has ended, but a shutdown on another one still reaches the store.
#[test]
fn a_shutdown_on_another_runtime_gives_everything_back() {
    let server = RedisServer::start();
    let (first, second) = (current_thread(), current_thread());
    let limiter = first.block_on(connect(&server));
    let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "key").unwrap();
    let permit = first.block_on(semaphore.acquire()).expect("free");
    drop(first);
    drop(permit);
    let report = second.block_on(limiter.shutdown(Duration::MAX));
    assert_eq!(report.lost, 0);
    assert_eq!(server.key_count(), 0);
}

/// A permit reports its loss although the runtime that renewed it has ended.
#[test]
fn a_loss_is_told_on_another_runtime() {
    let mut server = RedisServer::start();
    let (first, second) = (current_thread(), current_thread());
    let lease = Duration::from_millis(400);
    let builder = Limiter::builder().lease(lease).store_timeout(lease / 4);
    let limiter = first.block_on(builder.connect(&server.url())).expect("up");
    let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "key").unwrap();
    let permit = first.block_on(semaphore.acquire()).expect("free");
    // A permit of the fallback has no lease to lose.
    first.block_on(until_in_store(&permit));
    drop(first);
    server.stop();
    second.block_on(soon(permit.lost()));
    assert!(permit.is_lost());
}

/// A limiter that starts without its store notices when the store is up.
#[tokio::test]
async fn a_limiter_that_starts_first_finds_its_store() {
    let mut server = RedisServer::start();
    server.stop();
    let limiter = Limiter::connect(&server.url())
        .await
        .expect("that is no error");
    assert!(!limiter.status().store_up);
    server.restart();
    until_up(&limiter).await;
}

#[tokio::test]
async fn a_required_store_has_to_be_there() {
    let mut server = RedisServer::start();
    let builder = lasting().require_store();
    let limiter = builder.clone().connect(server.url()).await.expect("up");
    assert!(limiter.status().store_up);
    builder.clone().connect("memory:").await.expect("here");
    drop(limiter);
    server.stop();
    let error = builder.connect(&server.url()).await;
    let error = error.expect_err("it is down");
    assert_eq!(error.kind(), ConfigErrorKind::Unreachable, "{error}");
    assert!(
        error
            .to_string()
            .starts_with("the store cannot be reached: "),
        "{error}"
    );
    // Nothing goes on looking out for the store.
    let tasks = tokio::runtime::Handle::current().metrics();
    soon(async {
        while tasks.num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_error_names_its_limit_and_its_numbers() {
    let limiter = Limiter::in_memory();
    let short = Duration::from_millis(5);
    let limit = Limit::concurrent("chat", 2)
        .wait_up_to(short)
        .max_waiters(1);
    let semaphore = limiter.semaphore(&limit, "key").unwrap();
    let _permits = [semaphore.acquire().await, semaphore.acquire().await];
    let error = semaphore.try_acquire().await.expect_err("full").to_string();
    assert_eq!(error, "limit `chat` is full: 2 of 2 slots in use");
    let mut waiter = semaphore.acquire();
    start(&mut waiter);
    let error = semaphore.acquire().await.expect_err("full").to_string();
    let expected = "the queue of limit `chat` is full: 2 of 2 slots in use, 1 request waiting";
    assert_eq!(error, expected);
    let error = waiter.await.expect_err("full").to_string();
    assert!(
        error.starts_with("limit `chat` had no free slot within "),
        "{error}"
    );
    let other = Limit::concurrent("chat", 3)
        .wait_up_to(short)
        .max_waiters(1);
    let error = limiter.semaphore(&other, "key").expect_err("a conflict");
    assert_eq!(error.kind(), ConfigErrorKind::Conflict);
    let text = error.to_string();
    assert!(
        text.ends_with("different values: value 2 and 3, fallback Local(2) and Local(3)"),
        "{text}"
    );
}

#[test]
fn without_a_runtime_there_is_an_error_and_no_panic() {
    let server = RedisServer::start();
    let limiter = current_thread().block_on(connect(&server));
    let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "key").unwrap();
    let polled = pin!(semaphore.acquire()).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Err(error)) = polled else {
        panic!("{polled:?}")
    };
    assert_eq!(error.kind(), AcquireErrorKind::NoRuntime);
}

#[tokio::test]
async fn bad_values_are_refused_with_a_reason() {
    let value = |error: tower_turnstile::ConfigError| {
        assert_eq!(error.kind(), ConfigErrorKind::Value, "{error}")
    };
    value(Limit::try_concurrent("a", 0).expect_err("0"));
    value(Limit::try_concurrent("", 1).expect_err("no name"));
    value(Limit::try_concurrent("a", u32::MAX).expect_err("too large"));
    let limiter = Limiter::in_memory();
    value(
        limiter
            .semaphore(Limit::concurrent("a", 1).max_waiters(u32::MAX), "k")
            .expect_err("too many"),
    );
    value(
        limiter
            .semaphore(Limit::concurrent("a", 1).wait_up_to(Duration::MAX), "k")
            .expect_err("too long"),
    );
    let nothing = Limit::concurrent("a", 1).fallback(Fallback::Local(0));
    value(limiter.semaphore(&nothing, "k").expect_err("0"));
    let second = Duration::from_secs(1);
    value(
        Limiter::builder()
            .lease(Duration::ZERO)
            .in_memory()
            .expect_err("no lease"),
    );
    value(
        Limiter::builder()
            .lease(second)
            .store_timeout(second)
            .in_memory()
            .expect_err("too slow"),
    );
    value(
        Limiter::builder()
            .waiter_ttl(second)
            .poll_interval(second)
            .in_memory()
            .expect_err("too rare"),
    );
    value(
        Limiter::builder()
            .namespace("a{b}")
            .in_memory()
            .expect_err("braces"),
    );
    for url in [
        "",
        "redis",
        "http://127.0.0.1",
        "redis://127.0.0.1:notaport",
        "memory://",
    ] {
        let error = Limiter::connect(url).await.expect_err(url);
        assert_eq!(error.kind(), ConfigErrorKind::Url, "{url}: {error}");
    }
}

#[tokio::test]
async fn a_wrong_password_is_refused_and_not_repeated() {
    let server = RedisServer::start();
    server.cli(&["CONFIG", "SET", "requirepass", "right"]);
    let url = server.url().replace("redis://", "redis://:canary-7f3a@");
    let error = lasting().connect(&url).await.expect_err("wrong");
    assert_eq!(error.kind(), ConfigErrorKind::Credentials, "{error}");
    assert!(!format!("{error} {error:?}").contains("canary-7f3a"));
}

#[tokio::test]
async fn a_socket_file_leads_to_the_store() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let path = folder.path().join("redis.sock");
    let path = path.to_str().expect("a name");
    let server = RedisServer::start_with(&["--unixsocket", path]);
    let limiter = lasting().connect(&format!("unix://{path}")).await;
    let limiter = limiter.expect("it is up");
    let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "key").unwrap();
    let permit = semaphore.acquire().await.expect("free");
    assert_eq!(server.key_count(), 1);
    permit.release().await.expect("up");
    assert_eq!(server.key_count(), 0);
}
