//! Rates: admissions, waits for a start, and charges that are refunded.

use std::{
    convert::Infallible,
    future::ready,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, Fallback, Key, Limit, LimitValue, Limiter, Mode, Permit, Policy, Refusal,
    Semaphore,
};

use crate::{
    backend::{
        Backend, GUARD, connect, meanwhile, soon, start, until, until_free, until_one_waits,
        until_same, until_up, until_waiting, usage,
    },
    support::redis_server::RedisServer,
};

const DAY: Duration = Duration::from_secs(86_400);
/// Three at once, then one per quarter of an hour: longer than any test takes.
const SLOW: Limit = Limit::rate("slow", 96, DAY).burst(3);
const SPACING: Duration = Duration::from_secs(900);
/// One per 100 ms.
const QUICK: Limit = Limit::rate("quick", 10, Duration::from_secs(1)).burst(1);
const ALL: Limit = Limit::concurrent("all", 1);

conformance! {
    a_burst_is_given_and_then_the_exact_time,
    a_request_waits_for_its_time_and_holds_nothing,
    waiters_are_admitted_in_order,
    a_wait_longer_than_the_line_is_refused,
    a_request_that_another_limit_refuses_is_not_charged,
    a_waiter_that_gives_up_is_refunded,
    a_wait_that_ends_is_refunded,
    a_wait_for_the_time_that_is_given_up_is_refunded,
    a_shutdown_refunds_those_who_wait,
    keys_do_not_share_a_rate,
    a_request_costs_what_the_closure_says,
    a_permit_costs_what_its_semaphore_says,
}

/// Takes everything that the rate admits at once.
async fn take_all(semaphore: &Semaphore) -> u32 {
    let mut taken = 0;
    loop {
        match semaphore.try_acquire().await {
            Ok(_) => taken += 1,
            Err(error) => {
                assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
                return taken;
            }
        }
    }
}

async fn a_burst_is_given_and_then_the_exact_time(backend: Backend) {
    let (one, other) = (backend.replica().await, backend.replica().await);
    let replicas = [
        one.semaphore(&SLOW, "a").unwrap(),
        other.semaphore(&SLOW, "a").unwrap(),
    ];
    let began = Instant::now();
    for number in 0..3 {
        // Dropping a permit refunds nothing.
        drop(
            replicas[number % 2]
                .acquire()
                .await
                .expect("within the burst"),
        );
    }
    let error = replicas[1].acquire().await.expect_err("used up");
    assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
    assert!(error.is_limited());
    assert_eq!((error.limit_name(), error.max()), ("slow", 96));
    assert_eq!(
        (error.in_use(), error.waiting(), error.position()),
        (0, 0, None)
    );
    // The first was charged after `began`, and the next start is one spacing later.
    let rest = error.retry_after().expect("exact");
    assert!(
        rest <= SPACING && rest >= SPACING - began.elapsed(),
        "{rest:?}"
    );
    assert_eq!(one.status().held, 0);
}

async fn a_request_waits_for_its_time_and_holds_nothing(backend: Backend) {
    let limiter = backend.replica().await;
    let slots = limiter.semaphore(&ALL, Key::SHARED).unwrap();
    let slow = SLOW.burst(1).wait_up_to(DAY);
    let jobs = limiter
        .semaphore(&slow, "a")
        .unwrap()
        .and(&ALL, Key::SHARED)
        .unwrap();
    drop(jobs.acquire().await.expect("within the burst"));
    until_free(&slots).await;
    let mut waiter = jobs.acquire();
    start(&mut waiter);
    until_one_waits(&limiter).await;
    // Meanwhile another request gets the slot.
    let holder = slots.try_acquire().await.expect("nobody holds it");
    assert_eq!(usage(&slots).await, (1, 0));
    drop(holder);
    until_free(&slots).await;
    // As if its time had come.
    let off = slow.mode(Mode::Off);
    limiter.update(&off).expect("it may become that");
    let permit = soon(waiter).await.expect("not enforced");
    assert_eq!(usage(&slots).await, (1, 0));
    assert!(permit.waited() > Duration::ZERO);
    assert_eq!(permit.position(), None);
}

async fn waiters_are_admitted_in_order(backend: Backend) {
    let replicas = [backend.replica().await, backend.replica().await];
    let began = Instant::now();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..5 {
        let semaphore = replicas[number % 2]
            .semaphore(QUICK.wait_up_to(GUARD), "a")
            .unwrap();
        let before = backend.rate_states();
        let (order, request) = (order.clone(), semaphore.acquire());
        tasks.push(tokio::spawn(async move {
            let _permit = request.await.expect("its time comes");
            order
                .lock()
                .expect("no panic")
                .push((number, Instant::now()));
        }));
        // The request has its start once there is another state; the one before may expire.
        while backend.is_shared() && [before.clone(), Vec::new()].contains(&backend.rate_states()) {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
    }
    for task in tasks {
        soon(task).await.expect("no panic");
    }
    let order = order.lock().expect("no panic");
    for (number, at) in order.iter() {
        let earliest = Duration::from_millis(100) * *number as u32;
        let after = *at - began;
        assert!(after >= earliest, "{number} came after {after:?}");
    }
    // A process that stood still wakes all requests of one replica that are due, and then those of the other.
    for replica in 0..2 {
        let numbers = order.iter().map(|(number, _)| *number);
        let own = numbers.filter(|number| number % 2 == replica);
        assert!(own.is_sorted(), "{order:?}");
    }
}

async fn a_wait_longer_than_the_line_is_refused(backend: Backend) {
    let limiter = backend.replica().await;
    let of_two = SLOW.burst(1).wait_up_to(DAY).max_waiters(2);
    let semaphore = limiter.semaphore(&of_two, "a").unwrap();
    let began = Instant::now();
    let _first = semaphore.acquire().await.expect("in time");
    let mut waiters = [semaphore.acquire(), semaphore.acquire()];
    waiters.iter_mut().for_each(start);
    let error = semaphore.acquire().await.expect_err("no room");
    assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
    let rest = error.retry_after().expect("exact");
    assert!(
        rest <= 3 * SPACING && rest >= 3 * SPACING - began.elapsed(),
        "{rest:?}"
    );
    // Nor can a request wait longer than the limit allows.
    let short = of_two.clone().wait_up_to(SPACING / 2);
    let error = limiter
        .semaphore(&short, "a")
        .unwrap()
        .acquire()
        .await
        .expect_err("too long");
    assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
    assert_eq!(limiter.status().waiting, 2);
}

async fn a_request_that_another_limit_refuses_is_not_charged(backend: Backend) {
    let limiter = backend.replica().await;
    let (rate, slots) = (
        limiter.semaphore(&SLOW, "a").unwrap(),
        limiter.semaphore(&ALL, Key::SHARED).unwrap(),
    );
    let other_rate = Limit::rate("other", 1, DAY);
    let holder = slots.acquire().await.expect("free");
    let _used_up = limiter
        .semaphore(&other_rate, "a")
        .unwrap()
        .acquire()
        .await
        .expect("in time");
    let before = backend.rate_states();
    for refusing in [(&ALL, Key::SHARED), (&other_rate, Key::from("a"))] {
        for _ in 0..20 {
            let jobs = rate.clone().and(refusing.0, refusing.1.clone()).unwrap();
            let error = jobs.acquire().await.expect_err("refused by the other one");
            assert_eq!(error.limit_name(), refusing.0.name());
        }
    }
    if !backend.is_a_cluster() {
        assert_eq!(backend.rate_states(), before);
    }
    until_same(&before, || backend.rate_states()).await;
    assert_eq!(take_all(&rate).await, 3);
    drop(holder);
}

/// Charges a third of the rate. Returns when the rate in Redis will be empty.
async fn charge_one(backend: &Backend, semaphore: &Semaphore) -> Vec<String> {
    drop(semaphore.acquire().await.expect("in time"));
    backend.rate_ends()
}

/// Waits until the rate's state is as before, which takes a separate exchange.
async fn until_refunded(backend: &Backend, before: &[String], semaphore: &Semaphore) {
    until_same(&before.to_vec(), || backend.rate_ends()).await;
    assert_eq!(take_all(semaphore).await, 2);
}

async fn a_waiter_that_gives_up_is_refunded(backend: Backend) {
    let limiter = backend.replica().await;
    let (rate, slots) = (
        limiter.semaphore(&SLOW, "a").unwrap(),
        limiter.semaphore(&ALL, Key::SHARED).unwrap(),
    );
    let patient = ALL.wait_up_to(GUARD);
    let _holder = slots.acquire().await.expect("free");
    let before = charge_one(&backend, &rate).await;
    let mut waiter = rate.clone().and(&patient, Key::SHARED).unwrap().acquire();
    meanwhile(&mut waiter, until_waiting(&slots, 1)).await;
    drop(waiter);
    until_waiting(&slots, 0).await;
    until_refunded(&backend, &before, &rate).await;
}

async fn a_wait_that_ends_is_refunded(backend: Backend) {
    let limiter = backend.replica().await;
    let (rate, slots) = (
        limiter.semaphore(&SLOW, "a").unwrap(),
        limiter.semaphore(&ALL, Key::SHARED).unwrap(),
    );
    let short = ALL.wait_up_to(Duration::from_millis(30));
    let _holder = slots.acquire().await.expect("free");
    let before = charge_one(&backend, &rate).await;
    let error = rate
        .clone()
        .and(&short, Key::SHARED)
        .unwrap()
        .acquire()
        .await;
    assert_eq!(error.expect_err("taken").kind(), AcquireErrorKind::TimedOut);
    until_refunded(&backend, &before, &rate).await;
}

async fn a_wait_for_the_time_that_is_given_up_is_refunded(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter
        .semaphore(SLOW.burst(1).wait_up_to(DAY), "a")
        .unwrap();
    let began = Instant::now();
    drop(semaphore.acquire().await.expect("in time"));
    for _ in 0..10 {
        let mut waiter = semaphore.acquire();
        start(&mut waiter);
        until_one_waits(&limiter).await;
        drop(waiter);
        assert_eq!(limiter.status().waiting, 0);
    }
    // All ten reservations were refunded: the next start is the first one after the burst.
    soon(async {
        loop {
            let error = semaphore.try_acquire().await.expect_err("used up");
            let rest = error.retry_after().expect("exact");
            if rest <= SPACING {
                assert!(rest >= SPACING - began.elapsed(), "{rest:?}");
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
}

async fn a_shutdown_refunds_those_who_wait(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter
        .semaphore(SLOW.burst(1).wait_up_to(DAY), "a")
        .unwrap();
    drop(semaphore.acquire().await.expect("in time"));
    let end = |states: &[String]| Some(states.first()?.split_once(' ')?.0.to_owned());
    let before = end(&backend.rate_states());
    let mut waiter = semaphore.acquire();
    start(&mut waiter);
    until_one_waits(&limiter).await;
    assert_eq!(limiter.shutdown(Duration::ZERO).await.refused, 1);
    // The store received the refund before the shutdown finished.
    assert_eq!(end(&backend.rate_states()), before);
    let error = waiter.await.expect_err("closed");
    assert_eq!(error.kind(), AcquireErrorKind::ShutDown);
}

async fn keys_do_not_share_a_rate(backend: Backend) {
    let limiter = backend.replica().await;
    for key in ["", "a", "b"] {
        assert_eq!(take_all(&limiter.semaphore(&SLOW, key).unwrap()).await, 3);
    }
    let other = Limit::rate("another", 5, DAY);
    assert_eq!(take_all(&limiter.semaphore(&other, "a").unwrap()).await, 5);
}

/// The response to a request for this path.
async fn send(limiter: &Limiter, policy: impl Into<Policy>, path: &str) -> Response<()> {
    let serve = service_fn(|_| ready(Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))));
    let service = limiter.layer(policy).unwrap().layer(serve);
    let request = Request::get(path).body(()).expect("a request");
    service
        .oneshot(request)
        .await
        .expect("infallible")
        .map(drop)
}

async fn a_request_costs_what_the_closure_says(backend: Backend) {
    let limiter = backend.replica().await;
    let ten = Limit::rate("ten", 10, 10 * SPACING);
    let cost = |path: &str| path[1..].parse().expect("a number");
    let scope = Policy::from(
        ten.clone()
            .by_header("x-key")
            .cost_by(move |head| cost(head.uri.path())),
    );
    let alone = limiter.semaphore(&ten, Key::SHARED).unwrap();
    assert_eq!(send(&limiter, scope.clone(), "/7").await.status(), 200);
    let response = send(&limiter, scope.clone(), "/4").await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = response.extensions().get::<Refusal>().expect("it says why");
    // One more unit must drain.
    let rest = refusal.retry_after().expect("a rate");
    assert!(rest <= SPACING && rest > SPACING / 2, "{rest:?}");
    assert_eq!(take_all(&alone).await, 3);
    // Free of charge, although nothing is left.
    assert_eq!(send(&limiter, scope.clone(), "/0").await.status(), 200);
    assert_eq!(send(&limiter, scope, "/1").await.status(), 429);

    // A cost above the burst costs exactly the burst.
    let other = Limit::rate("other", 10, 10 * SPACING);
    let dear = Policy::from(
        other
            .clone()
            .by_header("x-key")
            .cost_by(|_| 1_000_000)
            .clamp_cost(),
    );
    assert_eq!(send(&limiter, dear.clone(), "/").await.status(), 200);
    assert_eq!(
        take_all(&limiter.semaphore(&other, Key::SHARED).unwrap()).await,
        0
    );
    assert_eq!(send(&limiter, dear, "/").await.status(), 429);
}

async fn a_permit_costs_what_its_semaphore_says(backend: Backend) {
    let limiter = backend.replica().await;
    let ten = Limit::rate("ten", 10, 10 * SPACING);
    let semaphore = limiter.semaphore(&ten, Key::SHARED).unwrap();
    let seven = semaphore.clone().cost(7).unwrap();
    let _permit = seven.acquire().await.unwrap();
    let refused = seven.try_acquire().await.unwrap_err();
    assert_eq!(refused.kind(), AcquireErrorKind::TooSoon);
    assert_eq!(take_all(&semaphore).await, 3);
    let dear = semaphore.cost(11).unwrap().try_acquire().await.unwrap_err();
    let expected = (AcquireErrorKind::InvalidCost, 11, 10);
    assert_eq!((dear.kind(), dear.cost(), dear.max()), expected);
    let of_slots = limiter.semaphore(&ALL, Key::SHARED).unwrap().cost(2);
    let message = "limit `all` is not a rate, so its requests have no cost";
    assert_eq!(of_slots.unwrap_err().to_string(), message);
}

#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn two_replicas_share_a_rate() {
    let backend = Backend::test_store();
    let replicas = [backend.replica().await, backend.replica().await];
    share_a_rate(&replicas, Duration::from_secs(10)).await;
}

/// Three replicas for a minute: `cargo test -p tests --test semaphore rates::over_a_minute -- --ignored`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute"]
async fn over_a_minute_three_replicas_use_a_rate_and_no_more() {
    let backend = Backend::redis();
    let replicas = [
        backend.replica().await,
        backend.replica().await,
        backend.replica().await,
    ];
    share_a_rate(&replicas, Duration::from_secs(60)).await;
}

/// Never above `rate x time + burst`, and at least 99 % used.
async fn share_a_rate(replicas: &[Limiter], length: Duration) {
    const COUNT: f64 = 200.0;
    const BURST: f64 = 20.0;
    let rate = Limit::rate("shared", COUNT as u32, Duration::from_secs(1));
    let rate = rate.burst(BURST as u32).wait_up_to(GUARD);
    let began = Instant::now();
    let mut tasks = Vec::new();
    for limiter in replicas {
        // Enough to queue for longer than a busy machine may stall.
        for _ in 0..256 {
            let semaphore = limiter.semaphore(&rate, "a").unwrap();
            tasks.push(tokio::spawn(async move {
                let mut times = Vec::new();
                while began.elapsed() < length {
                    drop(semaphore.acquire().await.expect("its time comes"));
                    times.push(began.elapsed());
                }
                times
            }));
        }
    }
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.expect("no panic"));
    }
    times.sort();
    // Each time is recorded after the admission, so this check is at least as strict as the rate.
    let mut used = 0.0_f64;
    for (before, time) in times.iter().enumerate() {
        // Rounding may cost a little of the last one.
        let (given, most) = (before as f64 + 1.0, COUNT * time.as_secs_f64() + BURST);
        assert!(
            given <= most + 1e-6,
            "{given} in {time:?}, more than {most}"
        );
        // Unused capacity is lost for good, so the best value near the end represents the whole run. It counts from the
        // first admission, because tasks and connections take time to start.
        if *time > length * 9 / 10 {
            let since_first = (*time - times[0]).as_secs_f64();
            used = used.max(given / (COUNT * since_first + BURST));
        }
    }
    println!("{} in {length:?}: {:.2} % used", times.len(), used * 100.0);
    assert!(used >= 0.99, "only {used} of it was used");
}

/// In paused time nothing comes between a request and the clock: all times are exact.
#[tokio::test(start_paused = true)]
async fn times_are_exact_to_the_microsecond() {
    let limiter = Limiter::in_memory();
    // 3 per second: a third of a second is not a whole number of microseconds.
    let third = Limit::rate("third", 3, Duration::from_secs(1)).burst(2);
    let semaphore = limiter.semaphore(&third, "a").unwrap();
    assert_eq!(take_all(&semaphore).await, 2);
    let rest = async || {
        semaphore
            .try_acquire()
            .await
            .map_err(|error| error.retry_after())
    };
    let third_of_a_second = Duration::from_micros(333_334);
    assert_eq!(rest().await.expect_err("used up"), Some(third_of_a_second));
    tokio::time::advance(Duration::from_micros(333_333)).await;
    assert_eq!(
        rest().await.expect_err("not yet"),
        Some(Duration::from_micros(1))
    );
    tokio::time::advance(Duration::from_micros(1)).await;
    assert_eq!(take_all(&semaphore).await, 1);
}

#[tokio::test(start_paused = true)]
async fn waits_are_exact_too() {
    let limiter = Limiter::in_memory();
    let patient = limiter.semaphore(QUICK.wait_up_to(GUARD), "a").unwrap();
    let patient = patient
        .and(Limit::concurrent("four", 4), Key::SHARED)
        .unwrap();
    let began = Instant::now();
    let permits: Vec<Permit> =
        futures_util::future::try_join_all((0..4).map(|_| patient.acquire()))
            .await
            .expect("their times come");
    assert_eq!(began.elapsed(), Duration::from_millis(300));
    let waited = permits.iter().map(|permit| permit.waited().as_millis());
    assert_eq!(waited.collect::<Vec<_>>(), [0, 100, 200, 300]);
}

#[tokio::test]
async fn without_its_store_a_rate_has_its_fallback() {
    let mut server = RedisServer::start();
    let limiter = connect(&server).await;
    let local = SLOW;
    let [other, allow, reject] =
        ["other", "allow", "reject"].map(|name| Limit::rate(name, 96, DAY).burst(3));
    let other = other.fallback(Fallback::Local(1));
    let allow = allow.fallback(Fallback::Allow);
    let reject = reject.fallback(Fallback::Reject);
    server.stop();
    let down = Limit::concurrent("down", 1);
    drop(
        limiter
            .semaphore(&down, "a")
            .unwrap()
            .acquire()
            .await
            .expect("admitted locally"),
    );
    assert!(!limiter.status().store_up);
    assert_eq!(take_all(&limiter.semaphore(&local, "a").unwrap()).await, 3);
    let error = limiter
        .semaphore(&local, "a")
        .unwrap()
        .acquire()
        .await
        .expect_err("used up");
    assert!(error.retry_after().expect("exact") <= SPACING);
    // A key with a value of its own keeps it: twice as many, whose lowest terms are not those of the limit.
    let rich = limiter
        .semaphore(&local, "rich")
        .unwrap()
        .value(LimitValue::new(192).burst(3))
        .unwrap();
    assert_eq!(take_all(&rich).await, 3);
    let error = rich.acquire().await.expect_err("used up");
    assert!(error.retry_after().expect("exact") <= SPACING / 2);
    // As many in a period, with the same burst: one per day.
    assert_eq!(take_all(&limiter.semaphore(&other, "a").unwrap()).await, 3);
    let error = limiter
        .semaphore(&other, "a")
        .unwrap()
        .acquire()
        .await
        .expect_err("used up");
    assert!(error.retry_after().expect("exact") > DAY / 2);
    for _ in 0..20 {
        drop(
            limiter
                .semaphore(&allow, "a")
                .unwrap()
                .acquire()
                .await
                .expect("allowed"),
        );
        let error = limiter
            .semaphore(&reject, "a")
            .unwrap()
            .acquire()
            .await
            .expect_err("rejected");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
        assert_eq!(error.limit_name(), "reject");
    }
    // A rate that rejects has no effect on the others.
    let jobs = limiter
        .semaphore(&down, "a")
        .unwrap()
        .and(&reject, "a")
        .unwrap();
    jobs.acquire().await.expect_err("rejected");
    drop(
        limiter
            .semaphore(&down, "a")
            .unwrap()
            .acquire()
            .await
            .expect("free"),
    );

    server.restart();
    until_up(&limiter).await;
    // Meanwhile the store has received nothing.
    assert_eq!(take_all(&limiter.semaphore(&local, "a").unwrap()).await, 3);
}

/// Another type, and a text that is not a state.
#[tokio::test]
async fn a_key_of_another_type_refuses_and_opens_no_gate() {
    let server = RedisServer::start();
    let limiter = connect(&server).await;
    let rate = SLOW.fallback(Fallback::Allow);
    let semaphore = limiter.semaphore(&rate, "a").unwrap();
    drop(semaphore.acquire().await.expect("in time"));
    let key = server.keys("*:rate");
    let slots = limiter.semaphore(&ALL, Key::SHARED).unwrap();
    for command in ["SADD", "SET"] {
        server.cli(&["DEL", &key]);
        server.cli(&[command, &key, "nonsense"]);
        for jobs in [
            semaphore.clone(),
            semaphore.clone().and(&ALL, Key::SHARED).unwrap(),
        ] {
            for _ in 0..5 {
                let error = jobs.acquire().await.expect_err("never open");
                assert_eq!(error.kind(), AcquireErrorKind::Misconfigured, "{command}");
            }
        }
        let error = semaphore.acquire().await.expect_err("never open");
        assert_eq!(error.limit_name(), "slow");
        // This is not an outage, and affects no other key.
        assert!(limiter.status().store_up);
        assert_eq!(usage(&slots).await, (0, 0));
        drop(slots.acquire().await.expect("free"));
        until(&slots, |in_use, _| in_use == 0).await;
        drop(
            limiter
                .semaphore(&rate, "b")
                .unwrap()
                .acquire()
                .await
                .expect("in time"),
        );
    }
    server.cli(&["DEL", &key]);
    drop(semaphore.acquire().await.expect("mended"));
}

#[test]
fn a_unit_is_checked() {
    let rate = || Limit::rate("r", 1, Duration::from_secs(1));
    for good in ["tokens", "T", "input-tokens", "GPU_s.2", &"a".repeat(32)] {
        assert_ne!(rate().unit(good), rate());
    }
    assert_eq!(rate().unit("requests"), rate());
    let long = "a".repeat(33);
    for bad in [
        "", " ", "1k", "-a", "a b", "a\"", "a\\", "a;", "a,", "\u{e4}", "a\n", &long,
    ] {
        assert!(
            std::panic::catch_unwind(|| rate().unit(bad)).is_err(),
            "{bad:?}"
        );
    }
    let slots = Limit::concurrent("s", 1);
    assert!(std::panic::catch_unwind(|| slots.unit("tokens")).is_err());
}

/// Like its other values.
#[test]
fn two_limits_of_one_name_have_one_unit() {
    const TOKENS: Limit = Limit::rate("tokens", 1, Duration::from_secs(1)).unit("tokens");
    let limiter = Limiter::in_memory();
    let _semaphore = limiter.semaphore(&TOKENS, "a").unwrap();
    let error = limiter.semaphore(TOKENS.unit("bytes"), "a").unwrap_err();
    assert!(error.to_string().contains("\"tokens\""), "{error}");
    // Nor does a limit that the limiter has returned.
    let returned = limiter.limit("tokens").expect("it is in use");
    limiter.semaphore(returned.unit("words"), "a").unwrap_err();
    limiter.update(&TOKENS.unit("bytes")).unwrap();
    limiter.semaphore(TOKENS.unit("bytes"), "a").unwrap();
}
