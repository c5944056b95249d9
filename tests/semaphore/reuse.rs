//! Slots that are reused without the store.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::{FutureExt, future::join_all};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Key, Limit, Limiter, Mode, Permit, Semaphore,
};

use crate::backend::{Backend, GUARD, queue, soon, until, until_free, usage};

const ONE: Limit = Limit::concurrent("one", 1).wait_up_to(GUARD).reuse();
const FEW: Limit = Limit::concurrent("few", 3).wait_up_to(GUARD).reuse();

conformance! {
    a_slot_is_used_again_at_once,
    a_kept_slot_returns_by_itself,
    a_kept_slot_goes_to_who_waits_elsewhere,
    a_refusal_calls_back_what_is_kept,
    the_cap_holds_with_reuse,
    waiters_of_one_process_are_served_in_order,
    a_lowered_limit_is_reached,
    a_lowered_value_is_reached,
    nothing_is_kept_for_a_limit_that_is_not_enforced,
    nothing_is_kept_after_a_shutdown,
    nothing_is_kept_for_nobody,
    several_limits_take_what_is_kept,
    several_limits_are_not_refused_for_an_idle_slot,
    several_limits_get_their_share_beside_single_requests,
}

/// The permit, if it is available without asking or waiting.
fn at_once(semaphore: &Semaphore) -> Option<Permit> {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(semaphore.acquire()).poll(&mut context) {
        Poll::Ready(permit) => Some(permit.expect("a slot")),
        Poll::Pending => None,
    }
}

/// Polled again, the future does not take a second slot.
#[tokio::test]
#[should_panic(expected = "`Acquire` polled after completion")]
async fn an_idle_slot_is_taken_once() {
    let semaphore = Limiter::in_memory().semaphore(&FEW, Key::SHARED).unwrap();
    keep(&semaphore).await;
    let mut acquire = semaphore.acquire();
    let _permit = (&mut acquire)
        .now_or_never()
        .expect("idle")
        .expect("a slot");
    let _ = acquire.await;
}

/// Waits for an idle slot in the pool, and leaves it there, where it stays for a moment.
async fn keep(semaphore: &Semaphore) {
    drop(take_idle(semaphore).await);
}

/// Takes an idle slot. The right to keep one takes an exchange or two.
async fn take_idle(semaphore: &Semaphore) -> Permit {
    soon(async {
        loop {
            drop(semaphore.acquire().await.expect("a slot"));
            if let Some(permit) = at_once(semaphore) {
                return permit;
            }
        }
    })
    .await
}

async fn a_slot_is_used_again_at_once(backend: Backend) {
    let semaphore = backend.semaphore(&ONE).await;
    let permit = take_idle(&semaphore).await;
    assert_eq!((permit.position(), permit.waited()), (None, Duration::ZERO));
    assert!(!permit.is_lost());
    assert_eq!(permit.deadline().is_some(), backend.is_shared());
    assert_eq!(
        semaphore
            .try_acquire()
            .await
            .expect_err("it is in use")
            .kind(),
        AcquireErrorKind::Full
    );
}

async fn a_kept_slot_returns_by_itself(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&ONE, "key").unwrap();
    keep(&semaphore).await;
    assert_eq!(limiter.status().held, 0);
    until_free(&semaphore).await;
}

async fn a_kept_slot_goes_to_who_waits_elsewhere(backend: Backend) {
    let (one, other) = (backend.semaphore(&ONE).await, backend.semaphore(&ONE).await);
    for _ in 0..5 {
        keep(&one).await;
        drop(soon(other.acquire()).await.expect("its turn"));
        let holder = one.acquire().await.expect("its turn");
        let waiter = queue(&other, 1).await;
        drop(holder);
        drop(soon(waiter).await.expect("no panic"));
    }
}

async fn a_refusal_calls_back_what_is_kept(backend: Backend) {
    let (one, other) = (backend.semaphore(&FEW).await, backend.semaphore(&FEW).await);
    let all = [&one, &one, &one].map(|semaphore| semaphore.acquire());
    drop(join_all(all).await);
    // One slot is always in use, so that the others are kept for longer than a request for them takes.
    let busy = tokio::spawn(async move {
        loop {
            drop(one.acquire().await);
            tokio::task::yield_now().await;
        }
    });
    soon(async {
        while let Err(error) = other.try_acquire().await {
            assert_eq!(error.kind(), AcquireErrorKind::Full);
        }
    })
    .await;
    busy.abort();
}

async fn the_cap_holds_with_reuse(backend: Backend) {
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for replica in 0..3 {
        let semaphore = backend.semaphore(&FEW).await;
        // First fewer tasks than slots, then more.
        for _ in 0..=replica {
            let (semaphore, inside) = (semaphore.clone(), inside.clone());
            tasks.push(tokio::spawn(async move {
                for round in 0..200 {
                    let permit = semaphore.acquire().await.expect("a slot comes free");
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} are inside");
                    if round % 3 == 0 {
                        tokio::task::yield_now().await;
                    }
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                }
            }));
        }
    }
    for task in tasks {
        soon(task).await.expect("no panic");
    }
    until_free(&backend.semaphore(&FEW).await).await;
}

async fn waiters_of_one_process_are_served_in_order(backend: Backend) {
    let semaphore = backend.semaphore(&ONE).await;
    keep(&semaphore).await;
    let mut holder = semaphore.acquire().await.expect("free");
    let mut waiters = Vec::new();
    for place in 1..=5 {
        waiters.push(queue(&semaphore, place).await);
    }
    for (waiter, place) in waiters.into_iter().zip(1..) {
        drop(holder);
        assert!(at_once(&semaphore).is_none());
        holder = soon(waiter).await.expect("no panic");
        assert_eq!(holder.position(), Some(place));
    }
}

async fn a_lowered_limit_is_reached(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&FEW, "key").unwrap();
    keep(&semaphore).await;
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(semaphore.acquire().await.expect("free"));
    }
    let lowered = Limit::concurrent("few", 1).wait_up_to(GUARD).reuse();
    limiter.update(&lowered).expect("it may become that");
    // If slots were still reused, more of them than the limit would stay in use.
    while all.len() > 1 {
        all.pop();
        assert!(at_once(&semaphore).is_none());
    }
    until(&semaphore, |in_use, _| in_use == 1).await;
    drop(all);
    let permit = take_idle(&semaphore).await;
    let error = semaphore.try_acquire().await.expect_err("it is in use");
    assert_eq!(error.kind(), AcquireErrorKind::Full);
    drop(permit);
}

/// A request carries its own value, so with a different value it does not take a kept slot without asking.
async fn a_lowered_value_is_reached(backend: Backend) {
    let limiter = backend.replica().await;
    let few = limiter.semaphore(&FEW, "key").unwrap();
    let (two, one) = (few.clone().value(2).unwrap(), few.value(1).unwrap());
    let permit = two.acquire().await.expect("free");
    keep(&two).await;
    let error = one.try_acquire().await.expect_err("one is in use");
    assert_eq!(error.kind(), AcquireErrorKind::Full);
    drop(permit);
}

async fn nothing_is_kept_for_a_limit_that_is_not_enforced(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&ONE, "key").unwrap();
    for mode in [Mode::Shadow, Mode::Off] {
        keep(&semaphore).await;
        limiter.update(&ONE.mode(mode)).expect("it may become that");
        until_free(&semaphore).await;
        drop(semaphore.acquire().await.expect("it looks on"));
        until_free(&semaphore).await;
        limiter.update(&ONE).expect("it may become that");
    }
}

async fn nothing_is_kept_after_a_shutdown(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&ONE, "key").unwrap();
    keep(&semaphore).await;
    let held = semaphore.acquire().await.expect("free");
    let shutdown = limiter.shutdown(GUARD);
    let give_back = async { drop(held) };
    let (report, ()) = tokio::join!(shutdown, give_back);
    assert_eq!((report.refused, report.released, report.lost), (0, 1, 0));
    let error = semaphore.acquire().await.expect_err("it is shut down");
    assert_eq!(error.kind(), AcquireErrorKind::ShutDown);
    assert!(backend.contents().is_empty());
}

async fn nothing_is_kept_for_nobody(backend: Backend) {
    let semaphore = backend.semaphore(&ONE).await;
    let permit = take_idle(&semaphore).await;
    drop(semaphore);
    drop(permit);
    let other = backend.semaphore(&ONE).await;
    until_free(&other).await;
    drop(at_once(&other));
    drop(soon(other.acquire()).await.expect("free"));
}

/// A request of this kind neither takes from the pool nor waits for it.
async fn several_limits_take_what_is_kept(backend: Backend) {
    const WIDE: Limit = Limit::concurrent("wide", 2).wait_up_to(GUARD).reuse();
    let limiter = backend.replica().await;
    let one = limiter.semaphore(&ONE, "key").unwrap();
    let both = one.clone().and(&WIDE, Key::SHARED).unwrap();
    for _ in 0..5 {
        keep(&one).await;
        let permit = soon(both.acquire()).await.expect("both");
        assert_eq!(usage(&one).await.0, 1);
        drop(permit);
    }
}

/// Without waiting: under either of two limits with reuse, and under both.
async fn several_limits_are_not_refused_for_an_idle_slot(backend: Backend) {
    const WIDE: Limit = Limit::concurrent("wide", 1).wait_up_to(GUARD).reuse();
    let limiter = backend.replica().await;
    let one = limiter.semaphore(&ONE, "key").unwrap();
    let wide = limiter.semaphore(&WIDE, Key::SHARED).unwrap();
    let both = one.clone().and(&WIDE, Key::SHARED).unwrap();
    for idle in [&[&one][..], &[&wide], &[&one, &wide]] {
        for _ in 0..10 {
            for semaphore in idle {
                keep(semaphore).await;
            }
            let permit = soon(both.try_acquire()).await.expect("its slots lie idle");
            drop(permit);
            for semaphore in [&one, &wide] {
                until_free(semaphore).await;
            }
        }
    }
}

async fn several_limits_get_their_share_beside_single_requests(backend: Backend) {
    let limiter = backend.replica().await;
    let one = limiter.semaphore(&ONE, "key").unwrap();
    let both = one.clone().and(&FEW, "key").unwrap();
    // This task holds the slot for a small part of the time.
    let busy = tokio::spawn(async move {
        loop {
            drop(one.acquire().await);
            tokio::task::yield_now().await;
        }
    });
    let (mut admitted, mut refused) = (0, 0);
    while admitted < 25 {
        match soon(both.try_acquire()).await {
            Ok(_) => admitted += 1,
            Err(error) if error.kind() == AcquireErrorKind::Full => refused += 1,
            Err(error) => panic!("{error}"),
        }
        // About as many arrive while the slot passes to a single request that waited for the previous one.
        assert!(refused < 1_000, "only {admitted} were admitted");
    }
    busy.abort();
}

/// Each thread takes the idle slot from where another thread put it, while the slot is counted.
#[test]
fn a_slot_that_changes_hands_is_counted_once() {
    const THREADS: usize = 4_000;
    let limiter = Limiter::in_memory();
    let semaphore = limiter
        .semaphore(Limit::concurrent("two", 2).reuse(), "key")
        .unwrap();
    let counts = || {
        let usage = semaphore.usage().now_or_never();
        let usage = usage.expect("it is in memory").expect("it is in memory");
        (usage.in_use, limiter.status().held)
    };
    let held = at_once(&semaphore).expect("free");
    std::thread::scope(|scope| {
        let hands = scope.spawn(|| {
            for _ in 0..THREADS {
                let take_and_put = || drop(at_once(&semaphore).expect("free"));
                std::thread::scope(|scope| scope.spawn(take_and_put).join()).expect("no panic");
            }
        });
        while !hands.is_finished() {
            let counts = counts();
            assert!(
                [(1, 1), (1, 2), (2, 1), (2, 2)].contains(&counts),
                "{counts:?}"
            );
        }
    });
    assert_eq!(counts(), (1, 1));
    drop(held);
    assert_eq!(counts(), (0, 0));
    assert!(at_once(&semaphore).is_some(), "the key is not stranded");
}

#[test]
fn a_rate_has_nothing_to_reuse() {
    let rate = || Limit::rate("opens", 1, Duration::from_secs(1)).reuse();
    assert!(std::panic::catch_unwind(rate).is_err());
}

#[tokio::test]
async fn one_limit_is_reused_or_not() {
    let limiter = Limiter::in_memory();
    let _reused = limiter.semaphore(&ONE, "key").unwrap();
    let error = limiter.semaphore(Limit::concurrent("one", 1), "key");
    assert_eq!(
        error.expect_err("they differ").kind(),
        ConfigErrorKind::Conflict
    );
}
