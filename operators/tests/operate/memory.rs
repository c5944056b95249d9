//! In memory the process itself answers the same questions.

use std::time::Duration;

use tokio::time::timeout;
use tower_turnstile::{Limit, Limiter};
use tower_turnstile_operate::{KeyDigest, OperateErrorKind, Operator, PermitState, Verdict};

use crate::{
    scene::{HOUR, Patient, replicas},
    support::{queue::wait_in_line, redis_server::RedisServer},
};

const JOBS: Limit = Limit::concurrent("jobs", 2).wait_up_to(HOUR);

#[tokio::test]
async fn holders_waiters_keys_and_refusals() {
    let limiter = Limiter::in_memory();
    let operator = Operator::of(&limiter);
    let error = operator.permits("jobs", None).await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::UnknownLimit);

    let jobs = limiter.semaphore(JOBS, "acme").unwrap();
    let held = [jobs.acquire().await.unwrap(), jobs.acquire().await.unwrap()];
    let waiter = wait_in_line(&jobs).await;
    jobs.try_acquire().await.unwrap_err();
    let other = limiter
        .semaphore(JOBS, "other")
        .unwrap()
        .acquire()
        .await
        .unwrap();

    let acme = KeyDigest::of("jobs", "acme");
    let permits = operator.permits("jobs", Some(acme)).await.unwrap().rows;
    let states: Vec<_> = permits.iter().map(|row| row.state).collect();
    assert_eq!(
        states,
        [PermitState::Held, PermitState::Held, PermitState::Waiting]
    );
    let mut ids: Vec<_> = held.iter().filter_map(|permit| permit.id()).collect();
    ids.sort();
    let mut rows: Vec<_> = permits[..2].iter().map(|row| row.id).collect();
    rows.sort();
    assert_eq!(rows, ids);
    assert_eq!(permits[2].place, 1);
    assert!(
        permits
            .iter()
            .all(|row| row.key == acme && row.key_text.is_none())
    );

    let limits = operator.limits().await.unwrap().rows;
    let limit = &limits[0];
    let numbers = (limit.max, limit.held, limit.waiting, limit.keys);
    assert_eq!(
        (limits.len(), numbers, &*limit.mode),
        (1, (2, 3, 1, 2), "enforce")
    );

    let keys = operator.keys("jobs", None).await.unwrap().rows;
    let numbers: Vec<_> = keys
        .iter()
        .map(|row| (row.held, row.waiting, row.max))
        .collect();
    assert_eq!((keys[0].key, numbers), (acme, vec![(2, 1, 2), (1, 0, 2)]));

    let refusals = operator.refusals("jobs", None).await.unwrap().rows;
    let refusal = &refusals[0];
    let numbers = (refusal.max, refusal.in_use, refusal.waiting);
    assert_eq!(
        (refusals.len(), &*refusal.reason, numbers),
        (1, "full", (2, 2, 1))
    );
    assert_eq!(refusal.key, Some(acme));
    drop((held, waiter, other));
    assert!(
        operator
            .permits("jobs", None)
            .await
            .unwrap()
            .rows
            .is_empty()
    );
}

/// More permits than an answer has room for.
#[tokio::test]
async fn many_permits_of_a_key_are_explained() {
    let limiter = Limiter::in_memory();
    let many = Limit::concurrent("many", 200);
    let many = limiter.semaphore(many, "acme").unwrap();
    let held = (0..200).map(|_| many.acquire());
    let held = futures_util::future::try_join_all(held).await.unwrap();
    let key = KeyDigest::of("many", "acme");
    let why = Operator::of(&limiter).explain("many", key).await.unwrap();
    assert!(why.permits.left_out > 0);
    assert_eq!((why.in_use, why.verdict), (200, Some(Verdict::Full)));
    drop(held);
}

#[tokio::test]
async fn the_last_refusals_are_kept() {
    let limiter = Limiter::in_memory();
    let jobs = limiter
        .semaphore(Limit::concurrent("jobs", 1), "acme")
        .unwrap();
    let held = jobs.acquire().await.unwrap();
    for _ in 0..50 {
        jobs.acquire().await.unwrap_err();
    }
    let refusals = Operator::of(&limiter).refusals("jobs", None).await.unwrap();
    assert_eq!((refusals.rows.len(), refusals.left_out), (20, 0));
    drop(held);
}

/// Rates hold nothing, but delay requests.
#[tokio::test]
async fn a_rate_has_its_delayed_requests_and_its_refusals() {
    let limiter = Limiter::in_memory();
    let starts = limiter
        .semaphore(Limit::rate("starts", 1, HOUR).wait_up_to(2 * HOUR), "acme")
        .unwrap();
    let permit = starts.acquire().await.unwrap();
    let mut delayed = starts.acquire();
    assert!(
        timeout(Duration::from_millis(1), &mut delayed)
            .await
            .is_err()
    );
    starts.try_acquire().await.unwrap_err();
    let operator = Operator::of(&limiter);
    let limits = operator.limits().await.unwrap().rows;
    assert_eq!((limits[0].held, limits[0].waiting), (0, 1));
    assert_eq!(limits[0].period_ms, Some(3_600_000));
    let refusals = operator.refusals("starts", None).await.unwrap().rows;
    assert_eq!(refusals[0].reason, "too_soon");
    assert_eq!(refusals[0].key, Some(KeyDigest::of("starts", "acme")));
    drop((permit, delayed));
}

/// Keys are digests, unless the application shows them; then any bytes are converted to text.
#[tokio::test]
async fn keys_are_shown_only_if_the_application_says_so() {
    for shows in [false, true] {
        let builder = Limiter::builder();
        let builder = if shows { builder.show_keys() } else { builder };
        let limiter = builder.in_memory().unwrap();
        let keys: [&[u8]; 3] = [b"acme", b"\xff\x1b[31m", b""];
        let mut held = Vec::new();
        for key in keys {
            held.push(
                limiter
                    .semaphore(JOBS, key)
                    .unwrap()
                    .acquire()
                    .await
                    .unwrap(),
            );
        }
        let rows = Operator::of(&limiter)
            .permits("jobs", None)
            .await
            .unwrap()
            .rows;
        let text = |key: &[u8]| {
            let digest = KeyDigest::of("jobs", key);
            let mut rows = rows.iter();
            let row = rows.find(|row| row.key == digest).expect("a row");
            row.key_text.clone()
        };
        assert_eq!(text(b"acme"), shows.then(|| "acme".to_owned()));
        assert_eq!(
            text(b"\xff\x1b[31m"),
            shows.then(|| "\\xff\\x1b[31m".to_owned())
        );
        assert_eq!(text(b""), Some(String::new()), "all callers share it");
        drop(held);
    }
}

#[tokio::test]
async fn a_limiter_that_was_dropped_answers_nothing() {
    let limiter = Limiter::in_memory();
    let operator = Operator::of(&limiter);
    drop(limiter);
    let error = operator.limits().await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::Unavailable);
}

/// A permit may have several slots.
#[tokio::test]
async fn heavy_permits_count_as_many_slots() {
    let server = RedisServer::start();
    let (limiters, remote) = replicas(&server, 1).await;
    let in_memory = Limiter::in_memory();
    let here = Patient(Operator::of(&in_memory));
    for (limiter, operator) in [(&in_memory, here), (&limiters[0], remote)] {
        let jobs = limiter
            .semaphore(Limit::concurrent("jobs", 8), "acme")
            .unwrap();
        let heavy = jobs.acquire_many(5).await.unwrap();
        let light = jobs.acquire().await.unwrap();
        let rows = operator.permits("jobs", None).await.unwrap().rows;
        let weights: Vec<_> = rows.iter().map(|row| (row.id, row.weight)).collect();
        assert_eq!(
            weights,
            [(heavy.id().unwrap(), 5), (light.id().unwrap(), 1)]
        );
        assert_eq!(operator.limits().await.unwrap().rows[0].held, 6);
        assert_eq!(operator.keys("jobs", None).await.unwrap().rows[0].held, 6);
        let why = operator
            .explain("jobs", KeyDigest::of("jobs", "acme"))
            .await
            .unwrap();
        assert_eq!((why.in_use, why.unclaimed.len()), (6, 0));
        drop((heavy, light));
    }
}
