//! Waits that callers shorten, on paused time.

use std::{convert::Infallible, time::Duration};

use http::{HeaderValue, Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, Key, Limit, LimitLayer, Limiter, Mode, Refusal, RefusalKind, Scope, Slot,
    test_util::TestStore,
};

use crate::support::{Script, send, serve};

const LONG: Duration = Duration::from_secs(10);
const ONE: Limit = Limit::concurrent("one", 1).wait_up_to(LONG);

/// Refusals, and how long their requests have waited.
type Outcome = Result<Duration, (RefusalKind, Duration)>;

fn plain(waits: &[&[u8]]) -> Request<()> {
    let mut request = Request::new(());
    for wait in waits {
        let wait = HeaderValue::from_bytes(wait).unwrap();
        request.headers_mut().append("x-max-wait", wait);
    }
    request
}

fn call(timeout: &str) -> Request<()> {
    let request = Request::post("/test.Test/Call").header("content-type", "application/grpc");
    request.header("grpc-timeout", timeout).body(()).unwrap()
}

async fn outcome<S, B>(service: &S, request: Request<()>) -> Outcome
where
    S: Service<Request<()>, Response = Response<B>, Error: std::fmt::Debug> + Clone,
{
    let began = Instant::now();
    let response = send(service, request).await;
    let took = began.elapsed();
    match response.extensions().get::<Refusal>() {
        Some(refusal) => Err((refusal.kind(), took)),
        None => Ok(took),
    }
}

/// A service behind a layer whose only slot is held for ever.
async fn outcome_behind(scope: impl Into<Scope>, request: Request<()>) -> Outcome {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(scope.into()).unwrap();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let held = send(&service, Request::new(())).await;
    let outcome = outcome(&service, request).await;
    drop(held);
    outcome
}

fn within(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn timed_out(ms: u64) -> Outcome {
    Err((RefusalKind::TimedOut, within(ms)))
}

fn shortened() -> Scope {
    Scope::from(ONE).wait_by_header("x-max-wait")
}

#[tokio::test(start_paused = true)]
async fn a_caller_shortens_its_wait_and_never_lengthens_it() {
    for (wait, waited_ms) in [
        ("2", 2_000),
        ("0.25", 250),
        (" 3 ", 3_000),
        ("007", 7_000),
        (".5", 500),
        ("5.", 5_000),
        ("10", 10_000),
        ("10.5", 10_000),
        ("3600", 10_000),
    ] {
        let outcome = outcome_behind(shortened(), plain(&[wait.as_bytes()])).await;
        assert_eq!(outcome, timed_out(waited_ms), "{wait}");
    }
    // Without `wait_by_header`, the header means nothing.
    let outcome = outcome_behind(ONE, plain(&[b"2"])).await;
    assert_eq!(outcome, timed_out(10_000));
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_wait_is_the_limits() {
    let unreadable: [&[u8]; 14] = [
        b"",
        b".",
        b"-1",
        b"+1",
        b"1e0",
        b"1s",
        b"1,2",
        b"1 2",
        b"0x1",
        b"inf",
        b"NaN",
        b"1.2.3",
        b"99999999999999999999999",
        b"\xff",
    ];
    for wait in unreadable {
        let outcome = outcome_behind(shortened(), plain(&[wait])).await;
        assert_eq!(outcome, timed_out(10_000), "{}", wait.escape_ascii());
    }
    for waits in [&[][..], &[&b"1"[..], b"1"]] {
        let outcome = outcome_behind(shortened(), plain(waits)).await;
        assert_eq!(outcome, timed_out(10_000), "{waits:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_of_zero_is_refused_unless_a_slot_is_free() {
    let full = Err((RefusalKind::Full, Duration::ZERO));
    for zero in ["0", "0.0", "000"] {
        let request = plain(&[zero.as_bytes()]);
        assert_eq!(outcome_behind(shortened(), request).await, full, "{zero}");
    }
    assert_eq!(outcome_behind(ONE, call("0S")).await, full);
    let layer = Limiter::in_memory().layer(shortened()).unwrap();
    let service = layer.layer(serve(Script::of([])));
    let outcome = outcome(&service, plain(&[b"0"])).await;
    assert_eq!(outcome, Ok(Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_closure_shortens_a_wait() {
    let by_path = Scope::from(ONE).wait_by(|head| match head.uri.path() {
        "/soon" => Some(Duration::from_secs(1)),
        "/late" => Some(Duration::MAX),
        _ => None,
    });
    for (path, waited_ms) in [("/soon", 1_000), ("/late", 10_000), ("/", 10_000)] {
        let request = Request::get(path).body(()).unwrap();
        let outcome = outcome_behind(by_path.clone(), request).await;
        assert_eq!(outcome, timed_out(waited_ms), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_in_shadow_mode_refuses_nobody_for_a_wait() {
    let trial = Scope::from(ONE.mode(Mode::Shadow)).wait_by_header("x-max-wait");
    for request in [plain(&[b"0"]), plain(&[b"2"]), call("2S")] {
        let outcome = outcome_behind(trial.clone(), request).await;
        assert_eq!(outcome, Ok(Duration::ZERO));
    }
}

#[tokio::test(start_paused = true)]
async fn each_limit_of_a_request_has_its_own_wait() {
    let limiter = Limiter::in_memory();
    let other = Limit::concurrent("other", 1).wait_up_to(Duration::from_secs(4));
    let layer = limiter.layer([shortened(), other.into()]).unwrap();
    let service = layer.layer(serve(Script::of([])));
    for (held, waited_ms) in [("one", 2_000), ("other", 4_000)] {
        let limit = limiter.limit(held).expect("it is known");
        let semaphore = limiter.semaphore(&limit, Key::SHARED).unwrap();
        let permit = semaphore.acquire().await.unwrap();
        let outcome = outcome(&service, plain(&[b"2"])).await;
        assert_eq!(outcome, timed_out(waited_ms), "{held}");
        drop(permit);
    }
}

#[tokio::test(start_paused = true)]
async fn a_rate_reserves_no_start_after_a_shorter_wait() {
    const SLOW: Limit = Limit::rate("slow", 1, Duration::from_secs(6)).wait_up_to(LONG);
    let scope = || Scope::from(SLOW).wait_by_header("x-max-wait");
    let too_soon = Err((RefusalKind::TooSoon, Duration::ZERO));
    for (request, expected) in [
        (plain(&[b"5.999"]), too_soon),
        (plain(&[b"6"]), Ok(within(6_000))),
        (call("5999m"), too_soon),
        (call("6S"), Ok(within(6_000))),
    ] {
        assert_eq!(outcome_behind(scope(), request).await, expected);
    }
    // The time to retry does not depend on the wait.
    let layer = Limiter::in_memory().layer(scope()).unwrap();
    let service = layer.layer(serve(Script::of([])));
    send(&service, Request::new(())).await;
    let refused = send(&service, plain(&[b"1"])).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()["retry-after"], "6");
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_no_longer_than_its_timeout() {
    for (timeout, waited_ms) in [
        ("2S", 2_000),
        ("250m", 250),
        ("3000000u", 3_000),
        ("50000000n", 50),
        ("1M", 10_000),
        ("99999999H", 10_000),
        // No timeouts.
        ("", 10_000),
        ("S", 10_000),
        ("2", 10_000),
        ("2s", 10_000),
        ("-2S", 10_000),
        ("12345678901n", 10_000),
    ] {
        let outcome = outcome_behind(ONE, call(timeout)).await;
        assert_eq!(outcome, timed_out(waited_ms), "{timeout}");
    }
    let mut no_call = call("2S");
    no_call.headers_mut().remove("content-type");
    assert_eq!(outcome_behind(ONE, no_call).await, timed_out(10_000));
    // The shorter of both counts.
    for (wait, waited_ms) in [("1", 1_000), ("3", 2_000)] {
        let mut both = call("2S");
        both.headers_mut()
            .insert("x-max-wait", wait.parse().unwrap());
        let outcome = outcome_behind(shortened(), both).await;
        assert_eq!(outcome, timed_out(waited_ms), "{wait}");
    }
}

/// Its timeout counts from its arrival, whatever it waits for.
#[tokio::test(start_paused = true)]
async fn a_call_has_one_timeout_for_all_its_waits() {
    let limiter = Limiter::in_memory();
    let first = Limit::concurrent("first", 1).wait_up_to(LONG);
    let second = Limit::concurrent("second", 2).wait_up_to(LONG);
    let layer = |scopes: Vec<Scope>| -> LimitLayer { limiter.layer(scopes).unwrap() };
    let late = second.clone().by_key_async(|_| async {
        sleep(within(1_500)).await;
        Some(Key::SHARED)
    });
    let two_layers = (
        layer(vec![first.clone().into()]),
        layer(vec![second.clone().into()]),
    );
    let two_limits = layer(vec![first.clone().into(), second.clone().into()]);
    let after_lookup = layer(vec![late]);
    let body = || serve(Script::of([]));
    let two_layers = two_layers.0.layer(two_layers.1.layer(body()));
    let two_limits = two_limits.layer(body());
    let after_lookup = after_lookup.layer(body());
    let all = limiter.semaphore(&second, Key::SHARED).unwrap();
    let _all = all.acquire_many(2).await.unwrap();
    for number in 0..3 {
        let permit = limiter.semaphore(&first, Key::SHARED).unwrap().acquire();
        let permit = permit.await.unwrap();
        tokio::spawn(async move {
            sleep(within(1_500)).await;
            drop(permit);
        });
        let outcome = match number {
            0 => outcome(&two_layers, call("2S")).await,
            1 => outcome(&two_limits, call("2S")).await,
            _ => outcome(&after_lookup, call("2S")).await,
        };
        assert_eq!(outcome, timed_out(2_000), "{number}");
    }
}

/// It may be another call, with the extensions of the first.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_forwarded_may_have_a_shorter_timeout() {
    let limiter = Limiter::in_memory();
    let one = limiter.semaphore(&ONE, Key::SHARED).unwrap();
    let _permit = one.acquire().await.unwrap();
    let outer = Limit::concurrent("outer", 1).wait_up_to(LONG);
    let outer = limiter.layer(outer).unwrap();
    let inner = limiter.layer(ONE).unwrap().layer(serve(Script::of([])));
    for (timeout, waited_ms) in [("100m", 100), ("9S", 2_000)] {
        let inner = inner.clone();
        let forward = service_fn(move |mut request: Request<()>| {
            let timeout = HeaderValue::from_static(timeout);
            request.headers_mut().insert("grpc-timeout", timeout);
            inner.clone().oneshot(request)
        });
        let outcome = outcome(&outer.layer(forward), call("2S")).await;
        assert_eq!(outcome, timed_out(waited_ms), "{timeout}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_budget_of_a_call_waits_no_longer_than_its_timeout() {
    const SLOW: Limit = Limit::rate("slow", 1, Duration::from_secs(4)).wait_up_to(LONG);
    let layer = Limiter::in_memory().layer(SLOW).unwrap();
    let service = layer.layer(service_fn(async |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().unwrap().clone();
        sleep(within(1_000)).await;
        let charged = slot.budget("slow").unwrap().charge(1).await;
        let kind = charged.map_err(|error| error.kind()).err();
        assert!(matches!(kind, None | Some(AcquireErrorKind::TooSoon)));
        let status = match kind {
            None => StatusCode::OK,
            Some(_) => StatusCode::CONFLICT,
        };
        let mut response = Response::new(Script::of([]));
        *response.status_mut() = status;
        Ok::<_, Infallible>(response)
    }));
    for (timeout, status) in [("3999m", StatusCode::CONFLICT), ("4S", StatusCode::OK)] {
        let response = service.clone().oneshot(call(timeout)).await.unwrap();
        assert_eq!(response.status(), status, "{timeout}");
        sleep(Duration::from_secs(60)).await;
    }
}

/// A grant that arrives after the timeout would be for nobody.
#[tokio::test(start_paused = true)]
async fn a_call_leaves_the_queue_a_round_trip_before_its_timeout() {
    const SLOW: Limit = Limit::rate("slow", 1, Duration::from_secs(6)).wait_up_to(LONG);
    let store = TestStore::new();
    store.respond_after(within(100));
    let limiter = Limiter::builder().connect_to(&store).await.unwrap();
    let layer = limiter.layer([Scope::from(ONE), SLOW.into()]).unwrap();
    let service = layer.layer(serve(Script::of([])));
    let permit = limiter
        .semaphore(&ONE, Key::SHARED)
        .unwrap()
        .acquire()
        .await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(outcome(&service, call("2S")).await, timed_out(1_900));
    drop(permit);
    sleep(Duration::from_secs(60)).await;
    // The store charges it half a round trip after it was sent.
    assert_eq!(outcome(&service, call("2S")).await, Ok(within(100)));
    let too_soon = Err((RefusalKind::TooSoon, within(100)));
    assert_eq!(outcome(&service, call("5950m")).await, too_soon);
}
