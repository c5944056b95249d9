//! The layer's log events, and data that must never be logged.

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
    let layer = limiter
        .layer(Limit::concurrent("logged-refusal", 1).by_header("x-key"))
        .unwrap();
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
    for part in [
        "DEBUG",
        "refused",
        "namespace=\"turnstile\"",
        "kind=\"full\"",
    ] {
        assert!(refused[0].contains(part), "{refused:?}");
    }
    assert!(log.lines_with("canary").is_empty());
}

#[tokio::test]
async fn aborted_response_is_logged() {
    let log = log();
    let limiter = Limiter::in_memory();
    let limit = Limit::concurrent("logged-abort", 1);
    let layer = limiter.layer(limit).unwrap().on_lost(OnLost::Abort);
    let service = layer.layer(serve(Script::of(["a"])));
    let response = send(&service, get("/")).await;
    limiter.shutdown(Duration::ZERO).await;
    response.collect().await.unwrap_err();
    let aborted = log.lines_with("logged-abort");
    assert_eq!(aborted.len(), 1);
    for part in [
        "DEBUG",
        "aborted",
        "namespace=\"turnstile\"",
        "kind=\"shut_down\"",
    ] {
        assert!(aborted[0].contains(part), "{aborted:?}");
    }
}

/// An event for each of thousands of responses would hide all others, so each is told at debug level alone. Time is paused.
#[tokio::test(start_paused = true)]
async fn slots_that_end_together_are_one_event() {
    let log = log();
    let limiter = Limiter::in_memory();
    let layer = limiter
        .layer(Limit::concurrent("logged-aborts", 50))
        .unwrap();
    let service = layer
        .on_lost(OnLost::Abort)
        .max_hold(Duration::from_secs(5))
        .layer(serve(Script::of([]).then_waits()));
    let mut responses = Vec::new();
    for _ in 0..50 {
        responses.push(send(&service, get("/")).await);
    }
    tokio::time::sleep(Duration::from_secs(7)).await;
    let logged = log.lines_with("logged-aborts").into_iter();
    let (aborted, others): (Vec<_>, Vec<_>) = logged.partition(|line| line.contains("aborted"));
    assert_eq!(aborted.len(), 50, "{aborted:?}");
    assert!(aborted.iter().all(|line| line.contains("DEBUG")));
    let [ended] = &others[..] else {
        panic!("{others:?}");
    };
    for part in [
        "INFO",
        "slots were taken back",
        "keys=1",
        "count=50",
        "max_hold",
    ] {
        assert!(ended.contains(part), "{ended}");
    }
    drop(responses);
}

/// With one limit, or the first of several.
#[tokio::test]
async fn aborted_body_of_a_client_names_its_limit() {
    const PARTNER: Limit = Limit::concurrent("logged-partner", 2);
    const MODEL: Limit = Limit::concurrent("logged-model", 2);
    let log = log();
    for limits in [vec![&PARTNER], vec![&MODEL, &PARTNER]] {
        let limiter = Limiter::in_memory();
        let permit = limiter
            .semaphore(limits, "acme")
            .unwrap()
            .acquire()
            .await
            .unwrap();
        let body = permit.attach_body(Script::of([]).then_waits(), OnLost::Abort);
        limiter.shutdown(Duration::ZERO).await;
        body.collect().await.unwrap_err();
    }
    for name in ["logged-partner", "logged-model"] {
        let aborted = log.lines_with(name);
        assert_eq!(aborted.len(), 1, "{name}: {aborted:?}");
        assert!(aborted[0].contains("aborted"), "{aborted:?}");
    }
}

#[tokio::test]
async fn shadow_logs_what_it_would_have_refused() {
    let log = log();
    let limiter = Limiter::in_memory();
    let shadow = Limit::concurrent("logged-shadow", 1).mode(Mode::Shadow);
    let layer = limiter.layer([shadow.by_header("x-key")]).unwrap();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let request = || {
        let request = Request::get("/").header("x-key", "shadow-canary");
        request.body(()).unwrap()
    };
    let _first = send(&service, request()).await;
    assert!(log.lines_with("logged-shadow").is_empty());
    let second = send(&service, request()).await;
    assert_eq!(second.status(), StatusCode::OK);
    let logged = log.lines_with("logged-shadow");
    assert_eq!(logged.len(), 1);
    for part in ["DEBUG", "would have been refused", "kind=\"full\""] {
        assert!(logged[0].contains(part), "{logged:?}");
    }
    assert!(log.lines_with("shadow-canary").is_empty());
}
