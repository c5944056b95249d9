//! Pauses that an overloaded upstream asks for.

use std::{convert::Infallible, time::Duration};

use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tower::{Layer, Service, service_fn};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Key, Limit, LimitLayer, Limiter, Mode, Refusal, RefusalKind,
    Scope, Slot,
    layer::{Outcome, overload},
};

use crate::support::{get, send};

const PARTNER: Limit = Limit::concurrent("partner", 10);
const SECOND: Duration = Duration::from_secs(1);

/// Refuses with this status and this time.
fn overloaded(
    status: u16,
    retry_after: &'static str,
) -> impl Service<Request<()>, Response = Response<String>, Error = Infallible, Future: Send> + Clone
{
    service_fn(move |_| async move {
        let response = Response::builder().status(status);
        let response = response.header("retry-after", retry_after);
        Ok(response.body(String::new()).expect("valid"))
    })
}

fn by_account() -> Scope {
    PARTNER.by_header("x-account").outcome_by(overload)
}

fn of(account: &str) -> Request<()> {
    let request = Request::get("/").header("x-account", account);
    request.body(()).expect("valid")
}

/// The kind of the refusal, and the seconds after which it says to come back.
fn refused<B>(response: &Response<B>) -> Option<(RefusalKind, u64)> {
    let kind = response.extensions().get::<Refusal>()?.kind();
    let seconds = response.headers().get("retry-after")?.to_str().ok()?;
    Some((kind, seconds.parse().ok()?))
}

#[tokio::test(start_paused = true)]
async fn a_response_pauses_its_key() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(by_account())
        .unwrap()
        .layer(overloaded(429, "20"));
    assert_eq!(refused(&send(&service, of("acme")).await), None);
    let response = send(&service, of("acme")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let (kind, seconds) = refused(&response).expect("a refusal");
    assert_eq!(kind, RefusalKind::Paused);
    assert_eq!(seconds, 20);
    // Other callers are not to blame.
    assert_eq!(refused(&send(&service, of("globex")).await), None);
    tokio::time::sleep(20 * SECOND + Duration::from_millis(1)).await;
    assert_eq!(refused(&send(&service, of("acme")).await), None);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_is_served_after_the_pause() {
    let limiter = Limiter::in_memory();
    let patient = PARTNER.wait_up_to(60 * SECOND).by_header("x-account");
    let service = limiter.layer(patient.outcome_by(overload)).unwrap();
    let (busy, idle) = (overloaded(503, "20"), overloaded(200, ""));
    send(&service.layer(busy), of("acme")).await;
    let (start, service) = (Instant::now(), service.layer(idle));
    let mut ends: Vec<_> = join_all((0..20).map(async |_| {
        let response = send(&service, of("acme")).await;
        assert_eq!(refused(&response), None);
        start.elapsed()
    }))
    .await;
    ends.sort();
    assert!(ends[0] > 20 * SECOND, "{ends:?}");
    assert!(
        ends[0] < 20 * SECOND + Duration::from_millis(50),
        "{ends:?}"
    );
    // The limit rises within five seconds.
    assert!(ends[19] < 26 * SECOND, "{ends:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pause_is_bounded() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(by_account().pause_at_most(5 * SECOND))
        .unwrap();
    let service = service.layer(overloaded(429, "31536000"));
    send(&service, of("acme")).await;
    let (_, seconds) = refused(&send(&service, of("acme")).await).expect("a refusal");
    assert_eq!(seconds, 5);
}

/// What a layer refuses says nothing about the upstream of the layers around it.
#[tokio::test]
async fn refusals_are_not_judged() {
    let limiter = Limiter::in_memory();
    let inner = Limit::concurrent("inner", 1);
    let permit = limiter
        .semaphore(&inner, Key::SHARED)
        .unwrap()
        .acquire()
        .await;
    let inside = limiter.layer(&inner).unwrap().layer(overloaded(200, ""));
    let service = limiter.layer(by_account()).unwrap().layer(inside);
    for _ in 0..2 {
        let response = send(&service, of("acme")).await;
        assert_eq!(refused(&response).expect("a refusal").0, RefusalKind::Full);
    }
    drop(permit);
}

#[tokio::test(start_paused = true)]
async fn a_closure_judges_as_it_likes() {
    let limiter = Limiter::in_memory();
    let scope = Scope::from(PARTNER).outcome_by(|head| match head.headers.get("x-overload") {
        Some(_) => Outcome::Pause(9 * SECOND),
        None => Outcome::Other,
    });
    let service = limiter.layer(scope).unwrap();
    let busy = service_fn(async |_: Request<()>| {
        let response = Response::builder().header("x-overload", "1");
        Ok::<_, Infallible>(response.body(String::new()).expect("valid"))
    });
    send(&service.layer(overloaded(429, "20")), get("/")).await;
    send(&service.layer(busy), get("/")).await;
    let (kind, seconds) = refused(&send(&service.layer(busy), get("/")).await).expect("refused");
    assert_eq!(kind, RefusalKind::Paused);
    assert_eq!(seconds, 9);
}

/// By the limit's name, as far as the request has a slot of it.
#[tokio::test(start_paused = true)]
async fn handlers_and_permits_pause_too() {
    let limiter = Limiter::in_memory();
    let rate = Limit::rate("opens", 60, 60 * SECOND);
    let service = service_fn(async |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().expect("a slot").clone();
        let hold = slot.hold().expect("held");
        for unknown in [slot.pause("another", SECOND), hold.pause("", SECOND)] {
            assert_eq!(
                unknown.expect_err("a typo").kind(),
                AcquireErrorKind::UnknownLimit
            );
        }
        hold.pause(&PARTNER, 20 * SECOND).expect("it has a slot");
        Ok::<_, Infallible>(Response::new(String::new()))
    });
    send(&limiter.layer(&PARTNER).unwrap().layer(service), get("/")).await;
    let shared = limiter.semaphore(&PARTNER, Key::SHARED).unwrap();
    let error = shared.acquire().await.expect_err("paused");
    assert_eq!(error.kind(), AcquireErrorKind::Paused);
    assert!(error.retry_after() <= Some(20 * SECOND) && error.retry_after() > Some(19 * SECOND));

    let acme = limiter
        .semaphore(&PARTNER, "acme")
        .unwrap()
        .and(&rate, "acme")
        .unwrap();
    let permit = acme.acquire().await.expect("another key");
    for unknown in [permit.pause(&rate, SECOND), acme.pause("another", SECOND)] {
        let error = unknown.expect_err("it has no such slots");
        assert_eq!(error.kind(), AcquireErrorKind::UnknownLimit);
        let status = Refusal::from(&error).status();
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    acme.pause(&PARTNER, SECOND).expect("it has slots");
    let day = 24 * 60 * 60 * SECOND;
    permit.pause(&PARTNER, day).expect("it has a slot");
    let error = acme.try_acquire().await.expect_err("paused");
    assert!(error.retry_after() <= Some(Limit::MAX_PAUSE), "{error}");
}

/// A limit that is off, or in shadow mode, or that lacks a key, is none that the handler has mistyped.
#[tokio::test]
async fn a_limit_that_does_not_apply_is_paused_in_vain() {
    let limiter = Limiter::in_memory();
    let off = Limit::concurrent("off", 1).mode(Mode::Off);
    let shadow = Limit::concurrent("shadow", 1).mode(Mode::Shadow);
    let semaphore = limiter
        .semaphore([off.clone(), shadow.clone()], Key::SHARED)
        .unwrap();
    let _first = semaphore.acquire().await.expect("admitted");
    let second = semaphore.acquire().await.expect("not enforced");
    for limit in [&off, &shadow] {
        second.pause(limit, SECOND).expect("it is known");
    }
    let error = second.pause("of", SECOND).expect_err("a typo");
    assert!(
        error
            .to_string()
            .starts_with("`of` is not among the limits"),
        "{error}"
    );
    let keyless = PARTNER.by_key(|_| None::<Key>);
    let service = service_fn(async |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().expect("a slot").clone();
        slot.pause(&PARTNER, SECOND).expect("it is known");
        slot.pause("partners", SECOND).expect_err("a typo");
        Ok::<_, Infallible>(Response::new(String::new()))
    });
    let response = send(&limiter.layer(keyless).unwrap().layer(service), get("/")).await;
    assert_eq!(response.status(), StatusCode::OK);
}

/// Its `RateLimit` field says the same, whatever the recent hold times.
#[tokio::test(start_paused = true)]
async fn the_retry_after_a_pause_is_exact() {
    let limiter = Limiter::in_memory();
    let slow = limiter.semaphore(&PARTNER, Key::SHARED).unwrap();
    for _ in 0..10 {
        let permit = slow.acquire().await.expect("a free slot");
        tokio::time::sleep(600 * SECOND).await;
        drop(permit);
    }
    slow.pause(&PARTNER, Duration::from_millis(7_001))
        .expect("it has slots");
    let layer = limiter.layer(&PARTNER).unwrap().rate_limit_fields();
    let response = send(&layer.layer(overloaded(200, "")), get("/")).await;
    assert_eq!(refused(&response), Some((RefusalKind::Paused, 8)));
    let field = response.headers()["ratelimit"].to_str().expect("text");
    assert_eq!(field, r#""partner";r=0;t=8"#);
}

#[test]
fn what_cannot_be_paused_is_an_error() {
    let limiter = Limiter::in_memory();
    let fault = |scope: Scope| {
        let layer: Result<LimitLayer, _> = limiter.layer(scope);
        layer.expect_err("a fault")
    };
    let rate = Limit::rate("opens", 60, 60 * SECOND);
    for (scope, message) in [
        (Scope::from(rate).outcome_by(overload), "`opens` is a rate"),
        (by_account().pause_at_most(Duration::ZERO), "1ms to 3600s"),
        (
            by_account().pause_at_most(2 * Limit::MAX_PAUSE),
            "1ms to 3600s",
        ),
    ] {
        let error = fault(scope);
        assert_eq!(error.kind(), ConfigErrorKind::Value);
        assert!(error.to_string().contains(message), "{error}");
    }
}
