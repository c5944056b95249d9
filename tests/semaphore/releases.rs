//! Awaited releases, and log events about slots that nobody releases.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::runtime;
use tower_turnstile::{Key, Limit, Limiter, Permit};

use crate::{
    backend::{
        Backend, GUARD, connect, current_thread, lasting, soon, until_free, until_in_store, usage,
    },
    support::{log::log, redis_server::RedisServer},
};

const ONE: Limit = Limit::concurrent("one", 1);
const KEPT: Limit = Limit::concurrent("kept", 1).reuse();

conformance! {
    a_released_slot_is_free_for_every_replica,
    a_slot_that_would_be_kept_is_released_too,
    all_slots_of_a_permit_are_released,
    a_release_that_is_not_awaited_to_the_end_releases,
    a_lost_permit_has_nothing_to_release,
}

async fn a_released_slot_is_free_for_every_replica(backend: Backend) {
    let (here, there) = (backend.semaphore(&ONE).await, backend.semaphore(&ONE).await);
    for _ in 0..20 {
        let permit = here.try_acquire().await.expect("free");
        soon(permit.release()).await.expect("confirmed");
        let permit = there.try_acquire().await.expect("free at once");
        soon(permit.release()).await.expect("confirmed");
    }
}

async fn a_slot_that_would_be_kept_is_released_too(backend: Backend) {
    let (here, there) = (
        backend.semaphore(&KEPT).await,
        backend.semaphore(&KEPT).await,
    );
    for _ in 0..20 {
        // The second permit would have the same slot.
        drop(here.try_acquire().await.expect("free"));
        let permit = here.try_acquire().await.expect("kept");
        soon(permit.release()).await.expect("confirmed");
        let permit = there.try_acquire().await.expect("free at once");
        soon(permit.release()).await.expect("confirmed");
    }
}

async fn all_slots_of_a_permit_are_released(backend: Backend) {
    let limits = ["a", "b", "c"].map(|name| Limit::concurrent(name, 1));
    let (here, there) = (backend.replica().await, backend.replica().await);
    let both = |limiter: &Limiter| {
        let [a, b, c] = &limits;
        limiter
            .semaphore(a, "key")
            .unwrap()
            .and(b, "key")
            .unwrap()
            .and(c, Key::SHARED)
            .unwrap()
    };
    let (here, there) = (both(&here), both(&there));
    for _ in 0..5 {
        for semaphore in [&here, &there] {
            let permit = semaphore.try_acquire().await.expect("free at once");
            soon(permit.release()).await.expect("confirmed");
        }
    }
}

async fn a_release_that_is_not_awaited_to_the_end_releases(backend: Backend) {
    let semaphore = backend.semaphore(&ONE).await;
    let unpolled = semaphore.acquire().await.expect("free").release();
    assert_eq!(usage(&semaphore).await.0, 1);
    drop(unpolled);
    until_free(&semaphore).await;
    let permit = semaphore.acquire().await.expect("free");
    let _ = poll_once(permit.release());
    until_free(&semaphore).await;
}

async fn a_lost_permit_has_nothing_to_release(backend: Backend) {
    let limiter = backend.replica().await;
    let permit = acquired(&limiter.semaphore(&ONE, "key").unwrap()).await;
    assert_eq!(limiter.shutdown(Duration::ZERO).await.lost, 1);
    let released = permit.release().now_or_never().expect("at once");
    released.expect("nothing to confirm");
}

fn poll_once<F: Future>(future: F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// A short job that ends right after the answer leaves no slot taken.
#[test]
fn a_process_that_ends_after_a_release_leaves_nothing() {
    let server = RedisServer::start();
    for _ in 0..5 {
        current_thread().block_on(async {
            let limiter = connect(&server).await;
            let permit = limiter.semaphore(&ONE, "key").unwrap().try_acquire().await;
            let permit = permit.expect("the process before has released it");
            permit.release().await.expect("confirmed");
        });
    }
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_not_waited_for() {
    let server = RedisServer::start();
    let builder = lasting().store_timeout(Duration::from_millis(300));
    let limiter = builder.connect(&server.url()).await.expect("up");
    let semaphore = limiter
        .semaphore(Limit::concurrent("two", 2), "key")
        .unwrap();
    let (one, other) = (acquired(&semaphore).await, acquired(&semaphore).await);
    until_in_store(&one).await;
    until_in_store(&other).await;
    server.pause();
    // Long before its lease ends.
    let error = soon(one.release()).await.expect_err("no answer");
    assert_eq!(error.limit_name(), "two");
    let text = error.to_string();
    assert!(text.contains("`two`") && text.contains("600s"), "{text}");
    soon(async {
        while limiter.status().store_up {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // The store is known to be down, so waiting is pointless.
    let error = other.release().now_or_never().expect("at once");
    assert!(error.is_err());
    server.resume();
    // The unconfirmed release is retried.
    soon(async {
        while !semaphore.usage().await.is_ok_and(|usage| usage.in_use == 0) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

async fn acquired(semaphore: &tower_turnstile::Semaphore) -> Permit {
    semaphore.acquire().await.expect("free")
}

#[test]
fn without_a_runtime_a_release_is_not_confirmed() {
    let server = RedisServer::start();
    let runtime = current_thread();
    let limiter = runtime.block_on(connect(&server));
    let permit = runtime.block_on(limiter.semaphore(&ONE, "key").unwrap().acquire());
    drop(runtime);
    let Poll::Ready(released) = poll_once(permit.expect("free").release()) else {
        panic!("there is nobody to wait for");
    };
    assert!(released.is_err());
}

const DROPPED: &str = "without `shutdown`";

/// Acquires a permit in a separate namespace, and runs `end` with it at the end of the runtime.
fn run(server: &RedisServer, namespace: &str, end: impl AsyncFnOnce(Limiter, Permit)) {
    let runtime = current_thread();
    runtime.block_on(async {
        let builder = lasting().namespace(namespace);
        let limiter = builder.connect(&server.url()).await.expect("up");
        let permit = acquired(&limiter.semaphore(&ONE, "key").unwrap()).await;
        end(limiter, permit).await;
    });
}

#[test]
fn slots_that_are_left_behind_are_in_the_log() {
    let (server, log) = (RedisServer::start(), log());
    run(&server, "drops-all", async |limiter, permit| {
        drop((permit, limiter));
    });
    run(&server, "outlives-its-driver", async |limiter, permit| {
        let handle = runtime::Handle::current();
        // Dropped with the runtime, possibly after the driver.
        handle.spawn(async move {
            let _kept = (permit, limiter);
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
    });
    run(&server, "shuts-down", async |limiter, permit| {
        drop(permit);
        limiter.shutdown(GUARD).await;
    });
    run(&server, "releases", async |_limiter, permit| {
        soon(permit.release()).await.expect("confirmed");
    });
    let warned: Vec<_> = log
        .lines_with(DROPPED)
        .into_iter()
        .filter(|line| line.contains("WARN") && line.contains("lease=600s"))
        .collect();
    let count = |namespace: &str| {
        let namespace = format!("namespace=\"{namespace}\"");
        warned
            .iter()
            .filter(|line| line.contains(&namespace))
            .count()
    };
    let counts = ["drops-all", "outlives-its-driver", "shuts-down", "releases"].map(count);
    assert_eq!(counts, [1, 1, 0, 0], "{warned:?}");
}
