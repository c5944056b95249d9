//! The feature `axum`: extractors, responses, and keys by route.
#![cfg(feature = "axum")]

use axum::{Router, body::Body, response::IntoResponse, routing::get};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;
use tower_turnstile::{Limit, Limiter, Mode, Refusal, RefusalKind, Slot};

use crate::support::{ONE, held, take};

fn asking(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

async fn text(response: Response<Body>) -> String {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn a_handler_extracts_its_slot() {
    let limiter = Limiter::in_memory();
    let holds = async |slot: Slot| {
        let hold = slot.hold();
        format!("{} {}", hold.is_some(), slot.is_lost())
    };
    let app: Router = Router::new()
        .route("/", get(holds))
        .layer(limiter.layer(ONE).unwrap());
    let response = app.oneshot(asking("/")).await.unwrap();
    assert_eq!(held(&limiter), 1);
    assert_eq!(text(response).await, "true false");
}

#[tokio::test]
async fn a_route_without_the_layer_has_no_slot() {
    let app: Router = Router::new()
        .route("/must", get(async |_: Slot| "a slot"))
        .route(
            "/may",
            get(async |slot: Option<Slot>| slot.is_some().to_string()),
        );
    let response = app.clone().oneshot(asking("/must")).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let response = app.clone().oneshot(asking("/may")).await.unwrap();
    assert_eq!(text(response).await, "false");
    let limited = app.layer(Limiter::in_memory().layer(ONE).unwrap());
    let response = limited.oneshot(asking("/may")).await.unwrap();
    assert_eq!(text(response).await, "true");
}

#[tokio::test]
async fn a_refusal_is_a_response() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let layer = limiter
        .layer(ONE)
        .unwrap()
        .refuse_with(|refusal, _| refusal.clone().into_response());
    let app: Router = Router::new()
        .route("/", get(async || "served"))
        .layer(layer);
    let response = app.oneshot(asking("/")).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let refusal = response.extensions().get::<Refusal>().unwrap().clone();
    assert_eq!(refusal.kind(), RefusalKind::Full);
    let expected = refusal.to_response();
    for (name, value) in expected.headers() {
        assert_eq!(response.headers()[name], value);
    }
    assert_eq!(text(response).await.as_bytes(), expected.body());
    let response = refusal.into_response();
    assert!(response.extensions().get::<Refusal>().is_some());
}

#[tokio::test]
async fn routes_are_counted_apart() {
    let limiter = Limiter::in_memory();
    let scope = ONE.by_matched_path().require_key();
    let app: Router = Router::new()
        .route("/users/{id}", get(async || "a user"))
        .route("/posts/{id}", get(async || "a post"))
        .layer(limiter.layer(scope).unwrap());
    let first = app.clone().oneshot(asking("/users/1")).await.unwrap();
    for (path, expected) in [
        ("/users/2", StatusCode::TOO_MANY_REQUESTS),
        ("/posts/1", StatusCode::OK),
        ("/nowhere", StatusCode::BAD_REQUEST),
    ] {
        let response = app.clone().oneshot(asking(path)).await.unwrap();
        assert_eq!(response.status(), expected, "{path}");
    }
    drop(first);
    // While in use, a limit cannot change its class: this one belongs to a route.
    let by_caller = Limit::concurrent("one", 1).mode(Mode::Shadow);
    limiter.update(&by_caller).expect_err("another class");
    limiter
        .update(&by_caller.class(tower_turnstile::Class::Route))
        .unwrap();
}
