//! What the layer logs, and what it must not log.

use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::BodyExt;
use tower::Layer;
use tower_turnstile::{Limit, Limiter, Mode, OnLost};

use crate::{
    log::log,
    support::{Script, get, send, serve},
};

#[tokio::test]
async fn refusal_is_logged_without_its_key() {
    let log = log();
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(Limit::concurrent("logged-refusal", 1).by_header("x-key"));
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let request = || {
        let request = Request::get("/").header("x-key", "canary");
        request.body(()).unwrap()
    };
    let _first = send(&service, request()).await;
    assert!(log.lines_with("logged-refusal").is_empty());
    let _second = send(&service, request()).await;
    let refused = log.lines_with("logged-refusal");
    assert_eq!(refused.len(), 1);
    for part in ["DEBUG", "refused", "kind=Full"] {
        assert!(refused[0].contains(part), "{refused:?}");
    }
    assert!(log.lines_with("canary").is_empty());
}

#[tokio::test]
async fn aborted_response_is_a_warning() {
    let log = log();
    let limiter = Limiter::in_memory();
    let limit = Limit::concurrent("logged-abort", 1);
    let layer = limiter.layer(limit).on_lost(OnLost::Abort);
    let service = layer.layer(serve(Script::of(["a"])));
    let response = send(&service, get("/")).await;
    limiter.shutdown(Duration::ZERO).await;
    response.collect().await.unwrap_err();
    let aborted = log.lines_with("logged-abort");
    assert_eq!(aborted.len(), 1);
    assert!(aborted[0].contains("WARN") && aborted[0].contains("aborted"));
}

#[tokio::test]
async fn shadow_tells_whom_it_would_have_refused() {
    let log = log();
    let limiter = Limiter::in_memory();
    let shadow = Limit::concurrent("logged-shadow", 1).mode(Mode::Shadow);
    let layer = limiter.layer([shadow.by_header("x-key")]);
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let request = || {
        let request = Request::get("/").header("x-key", "shadow-canary");
        request.body(()).unwrap()
    };
    let _first = send(&service, request()).await;
    assert!(log.lines_with("logged-shadow").is_empty());
    let second = send(&service, request()).await;
    assert_eq!(second.status(), StatusCode::OK);
    let told = log.lines_with("logged-shadow");
    assert_eq!(told.len(), 1);
    for part in ["DEBUG", "would have been refused", "kind=Full"] {
        assert!(told[0].contains(part), "{told:?}");
    }
    assert!(log.lines_with("shadow-canary").is_empty());
}
