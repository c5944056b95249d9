//! The responses to refused requests.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tokio::time::sleep;
use tokio_test::{assert_pending, task};
use tower::{Layer, ServiceExt};
use tower_turnstile::{Key, Limit, LimitLayer, Limiter, Refusal, RefusalKind};

use crate::support::{GUARD, ONE, Script, get, send, serve, take};

type Answer = Response<tower_turnstile::layer::ResponseBody<Full<Bytes>>>;

async fn answer(layer: LimitLayer) -> Answer {
    send(&layer.layer(serve(Full::from("served"))), get("/path")).await
}

fn kind(answer: &Answer) -> RefusalKind {
    answer
        .extensions()
        .get::<Refusal>()
        .expect("a refusal")
        .kind()
}

async fn problem(answer: Answer) -> serde_json::Value {
    assert_eq!(answer.headers()["content-type"], "application/problem+json");
    let retry_after = answer.headers()["retry-after"].to_str().unwrap();
    assert!(retry_after.parse::<u64>().unwrap() >= 1);
    let status = answer.status();
    let json = answer.into_body().collect().await.unwrap().to_bytes();
    let problem = serde_json::from_slice::<serde_json::Value>(&json).unwrap();
    assert_eq!(problem["status"], status.as_u16());
    assert!(problem["title"].is_string() && problem["detail"].is_string());
    problem
}

#[tokio::test]
async fn a_callers_own_limit_is_429() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let answer = answer(limiter.layer(ONE.by_header("x-key")).unwrap()).await;
    assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(kind(&answer), RefusalKind::Full);
    let problem = problem(answer).await;
    let kind = "https://iana.org/assignments/http-problem-types#quota-exceeded";
    assert_eq!(problem["type"], kind);
    assert_eq!(problem["violated-policies"], serde_json::json!(["one"]));
    assert_eq!(
        (&problem["limit"], &problem["in_use"]),
        (&1.into(), &1.into())
    );
}

#[tokio::test]
async fn a_shared_limit_is_503() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let answer = answer(limiter.layer(ONE).unwrap()).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
    assert_eq!(problem(answer).await["type"], kind);
}

#[tokio::test]
async fn shutdown_is_503_even_for_a_callers_own_limit() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE.by_header("x-key")).unwrap();
    limiter.shutdown(Duration::ZERO).await;
    let answer = answer(layer).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(kind(&answer), RefusalKind::ShutDown);
    problem(answer).await;
}

#[tokio::test]
async fn shutdown_refuses_waiters() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let layer = limiter.layer(ONE.wait_up_to(GUARD)).unwrap();
    let mut waiting = task::spawn(layer.layer(serve(Full::from("served"))).oneshot(get("/")));
    assert_pending!(waiting.poll());
    limiter.shutdown(Duration::ZERO).await;
    assert!(waiting.is_woken());
    assert_eq!(kind(&waiting.await.unwrap()), RefusalKind::ShutDown);
}

/// G4: a request that an outer layer has admitted is no newcomer to an inner one.
#[tokio::test]
async fn a_shutdown_lets_a_waiter_through_all_layers() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    let inner = limiter.layer(Limit::concurrent("inner", 1)).unwrap();
    let both = (limiter.layer(ONE.wait_up_to(GUARD)).unwrap(), inner);
    let mut waiting = task::spawn(both.layer(serve(Full::from("served"))).oneshot(get("/")));
    assert_pending!(waiting.poll());
    let mut shutdown = task::spawn(limiter.shutdown(GUARD));
    assert_pending!(shutdown.poll());
    assert_eq!(
        kind(&answer(limiter.layer(ONE).unwrap()).await),
        RefusalKind::ShutDown
    );
    drop(permit);
    assert_eq!(waiting.await.unwrap().status(), StatusCode::OK);
    assert_eq!(shutdown.await.refused, 0);
}

/// G4: whoever comes is a newcomer to a limiter, although a layer of another one has admitted it.
#[tokio::test]
async fn a_shutdown_refuses_those_that_another_limiter_has_admitted() {
    let (limiter, other) = (Limiter::in_memory(), Limiter::in_memory());
    let permit = take(&limiter).await;
    let outer = other.layer(Limit::concurrent("outer", 1)).unwrap();
    let both = (outer, limiter.layer(Limit::concurrent("two", 2)).unwrap());
    let mut shutdown = task::spawn(limiter.shutdown(GUARD));
    assert_pending!(shutdown.poll());
    let response = both.layer(serve(Full::from("served"))).oneshot(get("/"));
    let response = response.await.unwrap();
    let refusal = response.extensions().get::<Refusal>();
    assert_eq!(refusal.unwrap().kind(), RefusalKind::ShutDown);
    drop(permit);
    shutdown.await;
}

/// How long slots are held says nothing about the end of a shutdown, or of an outage.
#[tokio::test(start_paused = true)]
async fn only_a_limit_that_was_reached_delays_the_retry() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    sleep(Duration::from_secs(60)).await;
    drop(permit);
    let _permit = take(&limiter).await;
    let served = |limit: Limit| {
        limiter
            .layer(limit)
            .unwrap()
            .layer(serve(Full::from("served")))
    };
    let full = send(&served(ONE), get("/")).await;
    let refusal = full.extensions().get::<Refusal>().unwrap();
    assert!(refusal.retry_after() >= Some(Duration::from_secs(60)));
    let mut waiting = task::spawn(served(ONE.wait_up_to(GUARD)).oneshot(get("/")));
    assert_pending!(waiting.poll());
    limiter.shutdown(Duration::ZERO).await;
    let ended = waiting.await.unwrap();
    assert_eq!(kind(&ended), RefusalKind::ShutDown);
    assert_eq!(ended.headers()["retry-after"], "1");
}

/// The retry would not queue behind the refused request.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_timed_out_is_not_told_to_wait_for_itself() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    sleep(Duration::from_secs(60)).await;
    drop(permit);
    let _permit = take(&limiter).await;
    let layer = limiter
        .layer(ONE.wait_up_to(Duration::from_millis(50)))
        .unwrap();
    let answer = answer(layer).await;
    assert_eq!(kind(&answer), RefusalKind::TimedOut);
    let refusal = answer.extensions().get::<Refusal>().unwrap();
    // With jitter of up to a quarter.
    let seconds = refusal.retry_after().unwrap().as_secs();
    assert!((60..=75).contains(&seconds), "{seconds}");
}

/// Over HTTP/2 a client takes content of such a response for a fault of the protocol.
#[tokio::test]
async fn a_head_request_is_refused_without_content() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    for layer in [
        limiter.layer(ONE).unwrap(),
        limiter
            .layer(ONE)
            .unwrap()
            .refuse_with(|refusal, _| Response::new(refusal.to_string())),
    ] {
        let service = layer.layer(serve(Full::from("served")));
        let content = send(&service, get("/")).await.into_body();
        let length = content.collect().await.unwrap().to_bytes().len();
        let head = send(&service, Request::head("/").body(()).unwrap()).await;
        assert_eq!(
            head.headers()["content-length"],
            length.to_string().as_str()
        );
        assert!(length > 0 && head.body().is_end_stream());
        assert!(head.into_body().frame().await.is_none());
    }
}

#[tokio::test]
async fn a_refusal_has_the_rate_in_force() {
    let limiter = Limiter::in_memory();
    let minute = Duration::from_secs(60);
    let layer = limiter.layer(Limit::rate("opens", 1, minute)).unwrap();
    let hour = Limit::rate("opens", 2, 60 * minute).unit("pages");
    limiter.update(&hour).unwrap();
    let service = layer.layer(serve(Full::from("served")));
    for _ in 0..2 {
        assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
    }
    let answer = send(&service, get("/")).await;
    let refusal = answer.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.period(), Some(60 * minute));
    let problem = problem(answer).await;
    assert_eq!(
        (&problem["limit"], &problem["period"]),
        (&2.into(), &3_600.into())
    );
    assert_eq!(problem["detail"], "the rate of 2 pages in 3600s is used up");
}

#[tokio::test(start_paused = true)]
async fn a_timed_out_wait_is_reported() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let wait = Duration::from_millis(1_500);
    let answer = answer(
        limiter
            .layer(ONE.wait_up_to(wait).by_header("x-key"))
            .unwrap(),
    )
    .await;
    assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = answer.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind(), RefusalKind::TimedOut);
    assert!(refusal.waited() >= wait);
    assert_eq!((refusal.in_use(), refusal.limit_name()), (1, "one"));
    let problem = problem(answer).await;
    assert_eq!(
        problem["detail"],
        "no slot became free within 1.5s: 1 of 1 slots in use"
    );
    assert_eq!(problem["waited"], 1.5);
}

#[tokio::test]
async fn a_full_queue_is_reported() {
    let limiter = Limiter::in_memory();
    let short = Limit::concurrent("short", 1)
        .wait_up_to(GUARD)
        .max_waiters(1);
    let semaphore = limiter.semaphore(&short, Key::SHARED).unwrap();
    let _permit = semaphore.acquire().await.unwrap();
    let mut waiting = task::spawn(semaphore.acquire());
    assert_pending!(waiting.poll());
    let answer = answer(limiter.layer(short).unwrap()).await;
    assert_eq!(kind(&answer), RefusalKind::QueueFull);
    assert_eq!(answer.extensions().get::<Refusal>().unwrap().waiting(), 1);
    problem(answer).await;
}

#[tokio::test]
async fn statuses_can_be_set() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    let layer = limiter
        .layer(ONE)
        .unwrap()
        .limited_status(StatusCode::TOO_MANY_REQUESTS)
        .unavailable_status(StatusCode::BAD_GATEWAY);
    let full = answer(layer.clone()).await;
    assert_eq!(full.status(), StatusCode::TOO_MANY_REQUESTS);
    problem(full).await;
    drop(permit);
    limiter.shutdown(Duration::ZERO).await;
    let shut = answer(layer).await;
    assert_eq!(shut.status(), StatusCode::BAD_GATEWAY);
    problem(shut).await;
}

#[test]
#[should_panic(expected = "200 OK is not a status for a refusal")]
fn a_status_that_refuses_nothing_panics() {
    let _ = Limiter::in_memory()
        .layer(ONE)
        .unwrap()
        .limited_status(StatusCode::OK);
}

#[tokio::test]
async fn a_closure_builds_the_response() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let layer = limiter.layer(ONE).unwrap().refuse_with(|refusal, head| {
        let mut response = refusal
            .to_response()
            .map(|_| format!("{} is busy", head.uri));
        response
            .headers_mut()
            .insert("x-busy", refusal.max().into());
        response
    });
    let answer = answer(layer).await;
    assert_eq!(answer.headers()["x-busy"], "1");
    assert_eq!(kind(&answer), RefusalKind::Full);
    assert_eq!(
        answer.into_body().collect().await.unwrap().to_bytes(),
        "/path is busy"
    );
}

/// A framework's response, with its own body type.
#[tokio::test]
async fn a_closure_returns_any_response() {
    use axum::response::IntoResponse;

    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let busy = |status: StatusCode| (status, axum::Json(json!({ "error": "busy" })));
    let layer = limiter
        .layer(ONE.by_header("x-key"))
        .unwrap()
        .rate_limit_fields()
        .refuse_with(move |refusal, _| busy(refusal.status()).into_response());
    let answer = answer(layer).await;
    assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.headers()["content-type"], "application/json");
    // The layer adds missing fields only.
    let retry_after = answer.headers()["retry-after"].to_str().unwrap();
    assert!(retry_after.parse::<u64>().unwrap() >= 1);
    assert!(answer.headers().contains_key("ratelimit-policy"));
    assert!(answer.headers().contains_key("ratelimit"));
    assert_eq!(kind(&answer), RefusalKind::Full);
    let size = answer.body().size_hint().exact();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, r#"{"error":"busy"}"#);
    assert_eq!(size, Some(body.len() as u64));
}

#[tokio::test]
async fn a_refusal_has_a_code_and_a_text() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let describe = |refusal: &Refusal| format!("{} ({refusal})", refusal.kind().as_str());
    for (layer, expected) in [
        (
            limiter.layer(ONE).unwrap(),
            "full (one: 1 of 1 slots in use)",
        ),
        (
            limiter
                .layer(ONE.by_key(|_| None::<Key>).require_key())
                .unwrap(),
            "no_key (one: the request has no key for this limit)",
        ),
    ] {
        let layer = layer.refuse_with(move |refusal, _| Response::new(describe(refusal)));
        let body = answer(layer).await.into_body().collect().await.unwrap();
        assert_eq!(body.to_bytes(), expected);
    }
}

#[tokio::test]
async fn retry_after_of_a_closure_stays() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let with = |name: &'static str, value: &'static str| {
        let layer = limiter
            .layer(ONE.by_header("x-key"))
            .unwrap()
            .rate_limit_fields();
        layer.refuse_with(move |refusal, _| {
            let response = Response::builder().status(refusal.status());
            response.header(name, value).body("").unwrap()
        })
    };
    let answered = answer(with("retry-after", "7")).await;
    let values: Vec<_> = answered.headers().get_all("retry-after").iter().collect();
    assert_eq!(values, ["7"]);
    assert!(answered.body().is_end_stream());
    // A gRPC status has its own field for the retry.
    let layer = limiter.layer(ONE).unwrap();
    let layer = layer.refuse_with(|refusal, _| refusal.to_grpc_response());
    assert!(!answer(layer).await.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn a_stream_may_refuse_too() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let layer = limiter
        .layer(ONE)
        .unwrap()
        .refuse_with(|_, _| Response::new(Script::of(["a", "b"]).trailers("x", "y")));
    let body = answer(layer).await.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x"], "y");
    assert_eq!(body.to_bytes(), "ab");
    let layer = limiter.layer(ONE).unwrap();
    let layer = layer.refuse_with(|_, _| Response::new(Script::of(["a"]).then_fails()));
    let failed = answer(layer).await.into_body().collect().await;
    assert_eq!(failed.unwrap_err().to_string(), "the script fails");
}

#[tokio::test]
async fn a_hostile_name_stays_json() {
    let limiter = Limiter::in_memory();
    let hostile = Limit::try_concurrent("a\"b\\c\n\u{1}ü", 1).unwrap();
    let _permit = limiter
        .semaphore(&hostile, Key::SHARED)
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let problem = problem(answer(limiter.layer(&hostile).unwrap()).await).await;
    // The same form as in `RateLimit`.
    let name = "a\"b\\c%0A%01%C3%BC";
    assert_eq!(problem["violated-policies"][0], name);
}

#[test]
fn a_limit_out_of_range_is_an_error() {
    let limiter = Limiter::in_memory();
    let endless = ONE.wait_up_to(Duration::MAX);
    assert!(limiter.layer(endless).is_err());
}
