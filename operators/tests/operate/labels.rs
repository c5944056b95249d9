//! The purpose of a permit, as shown to operators.

use axum::{Router, body::Body, routing::post};
use http::Request;
use tower::ServiceExt;
use tower_turnstile::{ConfigErrorKind, Limit, LimitLayer, Limiter};
use tower_turnstile_operate::Operator;
use tower_turnstile_operate::PermitRow;

use crate::{
    scene::{HOUR, open},
    support::queue::wait_in_line,
};

const CHAT: Limit = Limit::concurrent("chat", 2);

async fn rows(limiter: &Limiter) -> Vec<PermitRow> {
    let answers = Operator::of(limiter).permits("chat", None).await.unwrap();
    assert!(answers.is_complete());
    answers.rows
}

async fn label(limiter: &Limiter, layer: &LimitLayer, request: Request<()>) -> String {
    let stream = open(layer, request).await;
    let rows = rows(limiter).await;
    drop(stream);
    rows[0].label.clone()
}

#[tokio::test]
async fn a_label_is_the_method_or_what_the_application_says() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(CHAT).unwrap();
    let request = || {
        Request::post("/users/canary?token=canary")
            .body(())
            .unwrap()
    };
    assert_eq!(label(&limiter, &layer, request()).await, "POST");
    let layer = limiter
        .layer(CHAT)
        .unwrap()
        .label_by(|head| format!("v{}", head.uri.path().len()));
    assert_eq!(label(&limiter, &layer, request()).await, "v13");
    let layer = limiter.layer(CHAT).unwrap().label_by(|_| "ingest");
    assert_eq!(label(&limiter, &layer, request()).await, "ingest");
    let layer = limiter.layer(CHAT).unwrap().label_by(|_| "x".repeat(1_000));
    assert_eq!(label(&limiter, &layer, request()).await.len(), 128);
}

/// The pattern, never the path, which may contain a secret.
#[tokio::test]
async fn in_a_router_the_route_is_part_of_the_label() {
    let limiter = Limiter::in_memory();
    let app: Router = Router::new()
        .route("/users/{id}", post(async || "stream"))
        .route_layer(limiter.layer(CHAT).unwrap());
    let request = Request::post("/users/canary").body(Body::empty()).unwrap();
    let response = app.oneshot(request).await.unwrap();
    assert_eq!(rows(&limiter).await[0].label, "POST /users/{id}");
    drop(response);
}

/// A slot that goes through the pool has the label of its current request.
#[tokio::test]
async fn a_reused_slot_has_the_label_of_its_request() {
    let limiter = Limiter::in_memory();
    let chat = CHAT.reuse();
    let layer = |label: &'static str| {
        limiter
            .layer(chat.clone())
            .unwrap()
            .label_by(move |_| label)
    };
    let (one, other) = (layer("one"), layer("other"));
    for _ in 0..3 {
        assert_eq!(label(&limiter, &one, Request::new(())).await, "one");
        assert_eq!(label(&limiter, &other, Request::new(())).await, "other");
    }
    let permit = limiter
        .semaphore(chat.clone(), tower_turnstile::Key::SHARED)
        .unwrap()
        .acquire()
        .await
        .unwrap();
    assert_eq!(rows(&limiter).await[0].label, "");
    drop(permit);
    assert!(rows(&limiter).await.is_empty(), "an idle slot is nobody's");
}

/// Holders, waiters, refusals, and slots that go through the pool.
#[tokio::test]
async fn a_semaphore_has_the_label_that_the_application_says() {
    let limiter = Limiter::in_memory();
    let chat = Limit::concurrent("chat", 1).reuse().wait_up_to(HOUR);
    let job = |name: &'static str| limiter.semaphore(&chat, "acme").unwrap().label(name);
    for name in ["one", "other"] {
        let permit = job(name).acquire().await.unwrap();
        assert_eq!(rows(&limiter).await[0].label, name);
        let waiter = wait_in_line(&job("waiter")).await;
        assert_eq!(rows(&limiter).await[1].label, "waiter");
        drop(waiter);
        job("refused").try_acquire().await.unwrap_err();
        let refusals = Operator::of(&limiter).refusals("chat", None).await.unwrap();
        assert_eq!(refusals.rows[0].label, "refused");
        drop(permit);
    }
    let permit = job("x").label("y".repeat(1_000)).acquire().await.unwrap();
    assert_eq!(rows(&limiter).await[0].label, "y".repeat(128));
    drop(permit);
}

#[tokio::test]
async fn the_label_of_a_replica_is_checked() {
    for label in ["", "a\nb", "\u{1b}[31m", &"x".repeat(65)] {
        let error = Limiter::builder()
            .replica_label(label)
            .in_memory()
            .unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::Value);
        assert!(!error.to_string().contains('\u{1b}'));
    }
    let limiter = Limiter::builder()
        .replica_label("web-1")
        .in_memory()
        .unwrap();
    let replicas = Operator::of(&limiter).replicas().await.unwrap();
    assert_eq!(replicas.rows[0].label, "web-1");
    let by_host = Operator::of(&Limiter::in_memory())
        .replicas()
        .await
        .unwrap();
    assert!(!by_host.rows[0].label.is_empty());
}
