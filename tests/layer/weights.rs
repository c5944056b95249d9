//! Requests that take several units of a limit.

use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tower::Layer;
use tower_turnstile::{Key, Limit, LimitLayer, Limiter, Refusal, RefusalKind, Scope, Slot};

use crate::support::{Script, get, send, serve};

const TEN: Limit = Limit::concurrent("ten", 10);

/// The weight is in a header.
fn weighed(limiter: &Limiter) -> LimitLayer {
    limiter
        .layer(Scope::from(TEN).weight_by_header("x-weight"))
        .unwrap()
}

fn of_weight(weight: u32) -> Request<()> {
    let request = Request::get("/").header("x-weight", weight);
    request.body(()).unwrap()
}

#[tokio::test]
async fn a_request_takes_as_many_units_as_it_weighs() {
    let limiter = Limiter::in_memory();
    let service = weighed(&limiter).layer(serve(Script::of([]).then_waits()));
    let semaphore = limiter.semaphore(&TEN, Key::SHARED).unwrap();
    let in_use = async || semaphore.usage().await.unwrap().in_use;
    let heavy = send(&service, of_weight(7)).await;
    let light = send(&service, get("/")).await;
    assert_eq!(
        (heavy.status(), light.status()),
        (StatusCode::OK, StatusCode::OK)
    );
    assert_eq!(in_use().await, 8);
    let refused = send(&service, of_weight(3)).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!((refusal.kind(), refusal.weight()), (RefusalKind::Full, 3));
    drop(heavy);
    assert_eq!(in_use().await, 1);
    drop(light);
    assert_eq!(in_use().await, 0);
}

/// If it had a weight of 1, the heaviest request would be the lightest.
#[tokio::test]
async fn a_header_that_is_no_weight_is_refused() {
    let limiter = Limiter::in_memory();
    let service = weighed(&limiter).layer(serve(Script::of([]).then_waits()));
    let weights: [&[&[u8]]; 12] = [
        &[b""],
        &[b"heavy"],
        &[b"0"],
        &[b"-1"],
        &[b"+1"],
        &[b"1.5"],
        &[b"1e1"],
        &[b"65"],
        &[b"4294967297"],
        &[b"\xff"],
        &[b"1", b"1"],
        &[b"1, 1"],
    ];
    for weight in weights {
        let mut request = get("/");
        for value in weight {
            let value = http::HeaderValue::from_bytes(value).unwrap();
            request.headers_mut().append("x-weight", value);
        }
        let refused = send(&service, request).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{weight:?}");
        let refusal = refused.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.kind(), RefusalKind::InvalidWeight, "{weight:?}");
    }
    let semaphore = limiter.semaphore(&TEN, Key::SHARED).unwrap();
    assert_eq!(semaphore.usage().await.unwrap().in_use, 0);
    let heaviest = send(&service, of_weight(10)).await;
    assert_eq!(heaviest.status(), StatusCode::OK);
}

#[test]
fn a_number_by_a_bad_header_name_panics() {
    let scopes: [fn() -> Scope; 2] = [
        || Scope::from(TEN).weight_by_header("not a name"),
        || Scope::from(TEN).cost_by_header("not a name"),
    ];
    for scope in scopes {
        assert!(std::panic::catch_unwind(scope).is_err());
    }
}

#[tokio::test]
async fn a_handler_sees_the_weight_of_its_slot() {
    let service = tower::service_fn(|request: Request<()>| async move {
        let slot = request.extensions().get::<Slot>().unwrap();
        let weight = slot.weight().to_string();
        Ok::<_, std::convert::Infallible>(http::Response::new(Full::from(weight)))
    });
    let service = weighed(&Limiter::in_memory()).layer(service);
    for weight in [1, 4] {
        let answer = send(&service, of_weight(weight)).await;
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, weight.to_string());
    }
}

#[tokio::test]
async fn a_refusal_names_the_weight() {
    let limiter = Limiter::in_memory();
    let service = weighed(&limiter).layer(serve(Full::from("served")));
    let semaphore = limiter.semaphore(&TEN, Key::SHARED).unwrap();
    let _held = semaphore.acquire_many(6).await.unwrap();
    let answer = send(&service, of_weight(5)).await;
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem["detail"], "5 slots needed, 6 of 10 in use");
    assert_eq!(
        (&problem["weight"], &problem["in_use"]),
        (&json!(5), &json!(6))
    );
}

#[tokio::test]
async fn a_weight_that_no_request_can_have_is_400_and_not_worth_a_retry() {
    let service = weighed(&Limiter::in_memory()).layer(serve(Full::from("served")));
    for (weight, detail) in [
        (11, "the request takes 11 slots, and there are 10"),
        (0, "a request takes 1 to 64 slots, not 0"),
        (65, "a request takes 1 to 64 slots, not 65"),
    ] {
        let answer = send(&service, of_weight(weight)).await;
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
        assert!(!answer.headers().contains_key(header::RETRY_AFTER));
        let refusal = answer.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.kind(), RefusalKind::InvalidWeight);
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let expected = json!({
            "type": "about:blank", "title": "Bad Request", "status": 400,
            "kind": "invalid_weight", "detail": detail, "limit": 10, "weight": weight,
        });
        assert_eq!(problem, expected);
    }
    let grpc = Request::post("/").header("x-weight", 11);
    let grpc = grpc.header("content-type", "application/grpc");
    let answer = send(&service, grpc.body(()).unwrap()).await;
    assert_eq!(answer.headers()["grpc-status"], "3");
}
