//! Handlers that acquire permits directly, and answer like the layer would.

use std::time::Duration;

use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::Layer;
use tower_turnstile::{Key, Limit, LimitLayer, Limiter, Refusal, RefusalKind, Semaphore};

use crate::support::{ONE, get, send, serve};

const OPENS: Limit = Limit::rate("opens", 1, Duration::from_secs(3_600));

/// The content of a refusal, except the retry time, which varies slightly.
fn shown<B: AsRef<[u8]>>(response: &Response<B>) -> (StatusCode, HeaderValue, Value) {
    let mut problem: Value = serde_json::from_slice(response.body().as_ref()).unwrap();
    let retry = problem["retry_after"].take();
    assert_eq!(response.headers()[header::RETRY_AFTER], retry.to_string());
    let content_type = response.headers()[header::CONTENT_TYPE].clone();
    (response.status(), content_type, problem)
}

async fn by_layer(layer: LimitLayer) -> (Refusal, Response<Vec<u8>>) {
    let service = layer.layer(serve(http_body_util::Full::from("served")));
    let response = send(&service, get("/")).await;
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    let refusal = head.extensions.get::<Refusal>().unwrap().clone();
    (refusal, Response::from_parts(head, body))
}

async fn by_hand(semaphore: &Semaphore) -> Refusal {
    Refusal::from(&semaphore.acquire().await.unwrap_err())
}

#[tokio::test]
async fn an_error_is_refused_as_the_layer_would() {
    for (limit, status) in [
        (ONE, StatusCode::TOO_MANY_REQUESTS),
        (OPENS, StatusCode::TOO_MANY_REQUESTS),
        (ONE, StatusCode::SERVICE_UNAVAILABLE),
        (OPENS, StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let limiter = Limiter::in_memory();
        let is_shared = status == StatusCode::SERVICE_UNAVAILABLE;
        let (key, layer) = if is_shared {
            (Key::SHARED, limiter.layer(limit.clone()).unwrap())
        } else {
            (
                Key::from("me"),
                limiter.layer(limit.clone().by_key(|_| Some("me"))).unwrap(),
            )
        };
        let semaphore = limiter.semaphore(&limit, key).unwrap();
        let _permit = semaphore.acquire().await.unwrap();
        let (refusal, expected) = by_layer(layer).await;
        let found = by_hand(&semaphore).await;
        assert_eq!(shown(&found.to_response()), shown(&expected));
        assert_eq!((found.status(), found.kind()), (status, refusal.kind()));
        assert_eq!(found.limit_name(), limit.name());
        assert_eq!(found.period(), limit.period());
        assert!(found.retry_after() > Some(Duration::ZERO));
    }
}

/// The limit that refused determines the owner.
#[tokio::test]
async fn each_of_several_limits_is_shared_or_the_callers_own() {
    const ALL: Limit = Limit::concurrent("all", 1);
    let limiter = Limiter::in_memory();
    let all = limiter.semaphore(&ALL, Key::SHARED).unwrap();
    let own = limiter.semaphore(&ONE, "me").unwrap();
    let both = limiter
        .semaphore(&ONE, "me")
        .unwrap()
        .and(&ALL, Key::SHARED)
        .unwrap();
    for (taken, name, status) in [
        (&all, "all", StatusCode::SERVICE_UNAVAILABLE),
        (&own, "one", StatusCode::TOO_MANY_REQUESTS),
    ] {
        let permit = taken.acquire().await.unwrap();
        let refusal = by_hand(&both).await;
        assert_eq!((refusal.limit_name(), refusal.status()), (name, status));
        drop(permit);
    }
}

#[tokio::test]
async fn an_error_without_a_limit_at_fault_is_503() {
    let limiter = Limiter::in_memory();
    let semaphore = limiter.semaphore(&ONE, "me").unwrap();
    // The key has no slots at all.
    let none = by_hand(&semaphore.clone().value(0).unwrap()).await;
    assert_eq!(
        (none.status(), none.max()),
        (StatusCode::TOO_MANY_REQUESTS, 0)
    );
    limiter.shutdown(Duration::ZERO).await;
    let refusal = by_hand(&semaphore).await;
    assert_eq!(refusal.kind(), RefusalKind::ShutDown);
    assert_eq!(refusal.status(), StatusCode::SERVICE_UNAVAILABLE);
    let (_, _, problem) = shown(&refusal.to_response());
    assert_eq!(problem["violated-policies"], serde_json::json!([]));
}

#[tokio::test]
async fn an_error_of_a_request_that_could_never_be_admitted_is_400() {
    const OPENS: Limit = Limit::rate("opens", 5, Duration::from_secs(3_600));
    let limiter = Limiter::in_memory();
    let heavy = limiter.semaphore(&ONE, "me").unwrap().acquire_many(2).await;
    let costly = limiter
        .semaphore(&OPENS, "me")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let costly = costly.budget(&OPENS).unwrap().charge(6).await;
    for (error, kind) in [
        (heavy.unwrap_err(), RefusalKind::InvalidWeight),
        (costly.unwrap_err(), RefusalKind::InvalidCost),
    ] {
        let refusal = Refusal::from(&error);
        assert_eq!(refusal.kind(), kind);
        let response = refusal.to_response();
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        assert!(!response.headers().contains_key(header::RETRY_AFTER));
    }
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn an_axum_handler_returns_the_error() {
    use axum::{Router, body::Body, extract::State, routing::get};
    use tower::ServiceExt;
    use tower_turnstile::AcquireError;

    async fn handler(State(semaphore): State<Semaphore>) -> Result<&'static str, AcquireError> {
        let _permit = semaphore.acquire().await?;
        Ok("served")
    }

    let semaphore = Limiter::in_memory().semaphore(&ONE, "me").unwrap();
    let app = Router::new()
        .route("/", get(handler))
        .with_state(semaphore.clone());
    let call = async || {
        let request = http::Request::get("/").body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        let (head, body) = response.into_parts();
        Response::from_parts(head, body.collect().await.unwrap().to_bytes())
    };
    assert_eq!(call().await.body(), "served");
    let _permit = semaphore.acquire().await.unwrap();
    let refused = call().await;
    let expected = by_hand(&semaphore).await;
    assert_eq!(shown(&refused), shown(&expected.to_response()));
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind(), RefusalKind::Full);
}
