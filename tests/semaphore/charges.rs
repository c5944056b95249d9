//! Charges at a rate while a permit is held: at admission and later, spending, and the settlement at the end.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use http::{Request, Response};
use http_body_util::Empty;
use tokio::{sync::Mutex, time::Instant};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, Budget, Hold, Key, Limit, Limiter, Permit, Scope, Semaphore, Slot,
};

use crate::{
    backend::{Backend, GUARD, connect, soon, start, until_one_waits, until_waiting},
    support::redis_server::RedisServer,
};

const DAY: Duration = Duration::from_secs(86_400);
/// 50 at once, then one per quarter of an hour: nothing drains during a test.
const TOKENS: Limit = Limit::rate("tokens", 100, DAY).burst(50);
const SPACING: Duration = Duration::from_secs(864);

conformance! {
    a_charge_is_decided_like_a_newcomer,
    a_charge_waits_for_its_time,
    a_dear_charge_waits_for_its_time,
    a_charge_that_is_given_up_is_refunded,
    spending_may_run_into_debt,
    spending_is_reported_while_the_permit_is_held,
    a_settlement_makes_up_the_difference,
    a_settlement_returns_what_was_too_much,
    a_prompt_is_returned_after_many_tokens,
    a_settlement_returns_all_of_it_though_others_were_charged_since,
    waiters_that_leave_in_any_order_are_all_refunded,
    a_shutdown_waits_for_a_settlement,
    only_the_first_settlement_counts,
    what_is_charged_after_the_settlement_is_refunded,
    without_a_settlement_what_was_spent_stands,
    more_than_the_burst_is_charged_in_full,
    a_rate_that_is_not_of_the_permit_is_an_error,
    a_request_settles_by_its_slot,
}

/// How much the rate would admit at once; in debt, the debt as a negative number. Changes nothing.
async fn standing(semaphore: &Semaphore) -> i64 {
    match semaphore.try_acquire().await {
        Ok(permit) => {
            let left = permit.budget(semaphore.limit()).unwrap().remaining();
            permit.budget(semaphore.limit()).unwrap().settle(0);
            i64::from(left.expect("it was charged")) + 1
        }
        Err(error) => {
            assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
            let rest = error.retry_after().expect("exact").as_secs_f64();
            1 - (rest / SPACING.as_secs_f64()).ceil() as i64
        }
    }
}

/// Waits until the rate has this standing.
async fn until_standing(semaphore: &Semaphore, expected: i64) {
    until_within(semaphore, expected..=expected).await;
}

async fn until_within(semaphore: &Semaphore, expected: RangeInclusive<i64>) {
    soon(async {
        while !expected.contains(&standing(semaphore).await) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

fn budget(permit: &Permit) -> Budget {
    permit.budget(&TOKENS).expect("its rate")
}

/// Waits until the effect of `act` has reached the store.
async fn until_reported(backend: &Backend, act: impl FnOnce()) {
    let before = backend.rate_states();
    act();
    soon(async {
        while backend.is_shared() && backend.rate_states() == before {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

async fn a_charge_is_decided_like_a_newcomer(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    let charged = budget(&permit).charge(40).await;
    assert_eq!(charged.expect("within the burst"), 40);
    assert_eq!(budget(&permit).remaining(), Some(9));
    let error = budget(&permit).charge(20).await.expect_err("too much");
    assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
    assert!(error.is_limited());
    let rest = error.retry_after().expect("exact");
    assert!(10 * SPACING < rest && rest <= 11 * SPACING, "{rest:?}");
    let error = permit
        .budget("tokens")
        .unwrap()
        .charge(51)
        .await
        .expect_err("never");
    assert_eq!(
        (error.kind(), error.cost()),
        (AcquireErrorKind::InvalidCost, 51)
    );
    assert!(error.retry_after().is_none());
    // Refusals cost nothing, and dropping a permit refunds nothing.
    drop(permit);
    assert_eq!(standing(&tokens).await, 9);
    assert_eq!(
        standing(&limiter.semaphore(&TOKENS, "b").unwrap()).await,
        50
    );
}

async fn a_charge_waits_for_its_time(backend: Backend) {
    let limiter = backend.replica().await;
    let quick = Limit::rate("quick", 10, Duration::from_secs(1))
        .burst(5)
        .wait_up_to(GUARD);
    let permit = limiter
        .semaphore(&quick, "a")
        .unwrap()
        .acquire()
        .await
        .expect("free");
    let began = Instant::now();
    for cost in [5, 1] {
        let charged = permit.budget(&quick).unwrap().charge(cost).await;
        charged.expect("its time comes");
    }
    assert!(began.elapsed() >= Duration::from_millis(100));
}

/// The longest wait is that of a queue of such requests, and not of single units.
async fn a_dear_charge_waits_for_its_time(backend: Backend) {
    let limiter = backend.replica().await;
    let minute = Duration::from_secs(60);
    let tokens = Limit::rate("dear", 1_000_000, minute).burst(100_000);
    let tokens = tokens.wait_up_to(GUARD);
    let permit = limiter.semaphore(&tokens, "a").unwrap().acquire().await;
    let permit = permit.expect("free");
    let budget = permit.budget(&tokens).unwrap();
    let began = Instant::now();
    budget.charge(99_999).await.expect("within the burst");
    budget.charge(5_000).await.expect("its time comes");
    assert!(began.elapsed() >= Duration::from_millis(250));
}

async fn a_charge_that_is_given_up_is_refunded(backend: Backend) {
    let limiter = backend.replica().await;
    let patient = TOKENS.wait_up_to(DAY);
    let tokens = limiter.semaphore(&patient, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).charge(45).await.expect("within the burst");
    let mut waiting = budget(&permit).charge(10);
    start(&mut waiting);
    until_one_waits(&limiter).await;
    drop(waiting);
    until_standing(&tokens, 4).await;
}

async fn spending_may_run_into_debt(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    for _ in 0..80 {
        budget(&permit).spend(1);
    }
    until_reported(&backend, || drop(permit)).await;
    until_standing(&tokens, 50 - 81).await;
}

async fn spending_is_reported_while_the_permit_is_held(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).spend(30);
    assert_eq!(budget(&permit).remaining(), Some(19));
    until_standing(&tokens, 19).await;
    budget(&permit).spend(10);
    until_standing(&tokens, 9).await;
    drop(permit);
    assert_eq!(standing(&tokens).await, 9);
}

async fn a_settlement_makes_up_the_difference(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).charge(10).await.expect("within the burst");
    budget(&permit).spend(5);
    budget(&permit).settle(30);
    // While the permit is held.
    until_standing(&tokens, 20).await;
    drop(permit);
    assert_eq!(standing(&tokens).await, 20);
}

async fn a_settlement_returns_what_was_too_much(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).charge(25).await.expect("within the burst");
    budget(&permit).spend(10);
    until_standing(&tokens, 14).await;
    budget(&permit).spend(10);
    // More than the latest spending: the refund also includes a part of the charge.
    budget(&permit).settle(12);
    drop(permit);
    until_standing(&tokens, 38).await;
}

/// More charges than are remembered.
async fn a_prompt_is_returned_after_many_tokens(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).charge(15).await.expect("within the burst");
    for _ in 0..33 {
        budget(&permit).spend(1);
    }
    budget(&permit).settle(5);
    drop(permit);
    until_standing(&tokens, 45).await;
}

/// Nothing drains in the meantime.
async fn a_settlement_returns_all_of_it_though_others_were_charged_since(backend: Backend) {
    let limiter = backend.replica().await;
    let daily = Limit::rate("daily", 25_000, DAY);
    let tokens = limiter.semaphore(&daily, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    for _ in 0..2 {
        let charged = permit.budget(&daily).unwrap().charge(10_000).await;
        charged.expect("within");
    }
    let other = tokens.acquire().await.expect("within the burst");
    let left = other.budget(&daily).unwrap().remaining();
    // During the test itself some tokens may drain.
    assert!(
        (4_998..5_100).contains(&left.expect("it was charged")),
        "{left:?}"
    );
    permit.budget(&daily).unwrap().settle(1);
    drop(permit);
    until_within(&tokens, 24_997..=25_000).await;
}

/// 100 requests that have started at the rate and wait for a slot.
async fn waiters_that_leave_in_any_order_are_all_refunded(backend: Backend) {
    let limiter = backend.replica().await;
    let starts = Limit::rate("starts", 1_000, DAY);
    let slots = Limit::concurrent("slots", 1).wait_up_to(GUARD);
    let (starts, slots) = (
        limiter.semaphore(&starts, "a").unwrap(),
        limiter.semaphore(&slots, Key::SHARED).unwrap(),
    );
    let both = starts.clone().and(slots.limit(), Key::SHARED).unwrap();
    let _holder = both.acquire().await.expect("free");
    let waiters = (0..100).map(|_| tokio::spawn(both.acquire()));
    let mut waiters: Vec<_> = waiters.collect();
    until_waiting(&slots, 100).await;
    fastrand::Rng::with_seed(7).shuffle(&mut waiters);
    for (number, waiter) in waiters.into_iter().enumerate() {
        waiter.abort();
        if number % 10 == 0 {
            tokio::task::yield_now().await;
        }
    }
    until_waiting(&slots, 0).await;
    until_within(&starts, 998..=999).await;
}

/// For a permit without a slot.
async fn a_shutdown_waits_for_a_settlement(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).spend(5);
    let mut shutdown = tokio_test::task::spawn(limiter.shutdown(GUARD));
    tokio_test::assert_pending!(shutdown.poll());
    budget(&permit).spend(10);
    budget(&permit).settle(30);
    tokio_test::assert_pending!(shutdown.poll());
    drop(permit);
    soon(shutdown).await;
    let other = backend.replica().await.semaphore(&TOKENS, "a").unwrap();
    if backend.is_shared() {
        assert_eq!(standing(&other).await, 20);
    }
}

async fn only_the_first_settlement_counts(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).settle(7);
    budget(&permit).settle(40);
    budget(&permit).spend(40);
    drop(permit);
    until_standing(&tokens, 43).await;
    assert_eq!(standing(&tokens).await, 43);
}

async fn what_is_charged_after_the_settlement_is_refunded(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).settle(1);
    budget(&permit).charge(30).await.expect("within the burst");
    until_standing(&tokens, 49).await;
    drop(permit);
    assert_eq!(standing(&tokens).await, 49);
}

async fn without_a_settlement_what_was_spent_stands(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).charge(3).await.expect("within the burst");
    budget(&permit).spend(4);
    drop(permit);
    until_standing(&tokens, 42).await;
}

/// The debt is reported in parts that drain in a day each.
async fn more_than_the_burst_is_charged_in_full(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).spend(149);
    until_reported(&backend, || drop(permit)).await;
    // The maximum debt of the rate.
    until_standing(&tokens, 50 - 150).await;
}

/// A typo, a limit other than a rate, and a rate of another permit. Otherwise the charge would be lost, and the limit
/// ineffective.
async fn a_rate_that_is_not_of_the_permit_is_an_error(backend: Backend) {
    let limiter = backend.replica().await;
    let slots = Limit::concurrent("slots", 5);
    let other = Limit::rate("other", 1, Duration::from_secs(60));
    let _known = limiter.semaphore(&other, "a").unwrap();
    let permit = limiter
        .semaphore([TOKENS, slots.clone()], "a")
        .unwrap()
        .acquire();
    let permit = permit.await.expect("within the burst");
    let long = "x".repeat(1_000);
    for name in ["tokns", "other", "slots", "Tokens", "tokens ", "", &long] {
        let error = permit.budget(name).expect_err("not its rate");
        assert_eq!(error.kind().as_str(), "unknown_rate", "{name}");
        assert!(!error.is_limited());
        assert_eq!(error.retry_after(), None);
    }
    // A permit of a single slot can do this too.
    let plain = limiter.semaphore(&slots, "a").unwrap().acquire().await;
    let error = plain.expect("a slot").budget(&TOKENS);
    let error = error.expect_err("not its rate");
    assert_eq!(error.limit_name(), "tokens");
    drop(permit);
    assert_eq!(
        standing(&limiter.semaphore(&TOKENS, "a").unwrap()).await,
        49
    );
}

/// The handler charges the prompt and spends; a task that outlives the response settles through its hold.
async fn a_request_settles_by_its_slot(backend: Backend) {
    let limiter = backend.replica().await;
    let kept: Arc<Mutex<Option<(Slot, Hold)>>> = Arc::default();
    let handler = kept.clone();
    let serve = service_fn(move |request: Request<()>| {
        let kept = handler.clone();
        async move {
            let slot = request.extensions().get::<Slot>().expect("a layer").clone();
            let budget = slot.budget(&TOKENS)?;
            budget.charge(20).await?;
            budget.spend(5);
            let hold = slot.hold().expect("it is held");
            *kept.lock().await = Some((slot, hold));
            Ok::<_, tower_turnstile::AcquireError>(Response::new(Empty::<bytes::Bytes>::new()))
        }
    });
    let slots = Limit::concurrent("slots", 5);
    let policy = [Scope::from(TOKENS).cost_by(|_| 0), slots.into()];
    let service = limiter
        .layer(policy)
        .unwrap()
        .rate_limit_fields()
        .layer(serve);
    let response = service.oneshot(Request::new(())).await.expect("in time");
    // The fields include the handler's charges.
    let field = response.headers()["ratelimit"].to_str().expect("text");
    assert!(field.contains("\"tokens\";r=25"), "{field}");
    drop(response);
    let (slot, hold) = kept.lock().await.take().expect("it was called");
    assert_eq!(slot.budget(&TOKENS).unwrap().remaining(), Some(25));
    hold.budget(&TOKENS).unwrap().spend(2);
    hold.budget(&TOKENS).unwrap().settle(22);
    drop(hold);
    let tokens = limiter.semaphore(&TOKENS, Key::SHARED).unwrap();
    until_standing(&tokens, 28).await;
    // The slot is released, so these calls do nothing.
    let budget = slot.budget(&TOKENS).expect("its rate");
    budget.spend(10);
    budget.settle(10);
    assert_eq!(budget.charge(10).await.expect("nothing happens"), 0);
    assert_eq!((budget.remaining(), standing(&tokens).await), (None, 28));
}

/// Like any future: a loop that polls it again does not take a refusal for a success.
#[tokio::test]
#[should_panic(expected = "resumed after completion")]
async fn a_refused_charge_stays_refused() {
    let tokens = Limiter::in_memory()
        .semaphore(&TOKENS, Key::SHARED)
        .unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    let mut charge = budget(&permit).charge(50);
    let refused = (&mut charge).await.expect_err("49 are left");
    assert_eq!(refused.kind(), AcquireErrorKind::TooSoon);
    let _ = charge.await;
}

#[tokio::test]
async fn a_cost_above_the_burst_is_refused_at_the_door() {
    let limiter = Limiter::in_memory();
    let serve = service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new(Empty::<bytes::Bytes>::new()))
    });
    let service = limiter
        .layer(Scope::from(TOKENS).cost_by(|_| 51))
        .unwrap()
        .layer(serve);
    let response = service.oneshot(Request::new(())).await.expect("infallible");
    assert_eq!(response.status(), 400);
    assert!(!response.headers().contains_key("retry-after"));
    let service = limiter
        .layer(Scope::from(TOKENS).cost_by(|_| 51).clamp_cost())
        .unwrap()
        .layer(serve);
    let response = service.oneshot(Request::new(())).await.expect("infallible");
    assert_eq!(response.status(), 200);
    assert_eq!(
        standing(&limiter.semaphore(&TOKENS, Key::SHARED).unwrap()).await,
        0
    );
}

/// During an outage the fallback is charged, and earlier charges of the store are not refunded.
#[tokio::test]
async fn an_outage_is_charged_to_the_fallback() {
    let mut server = RedisServer::start();
    let limiter = connect(&server).await;
    let tokens = limiter.semaphore(&TOKENS, "a").unwrap();
    let permit = tokens.acquire().await.expect("within the burst");
    budget(&permit).charge(20).await.expect("within the burst");
    server.stop();
    // From now on this process counts alone, with a separate burst.
    budget(&permit).charge(6).await.expect("within the burst");
    assert!(!limiter.status().store_up);
    assert_eq!(budget(&permit).remaining(), Some(44));
    budget(&permit).spend(4);
    assert_eq!(budget(&permit).remaining(), Some(40));
    budget(&permit).settle(23);
    drop(permit);
    assert_eq!(standing(&tokens).await, 48);
}
