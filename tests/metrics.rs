//! What a limiter tells a recorder of metrics, from one end to the other.
#![cfg(feature = "metrics")]

mod support;

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use support::redis_server::RedisServer;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{Limit, LimitLayer, Limiter, OnLost};

const ONE: Limit = Limit::concurrent("one", 1);

/// For this thread, and so for a test's runtime.
fn recorder() -> (PrometheusHandle, impl Drop) {
    let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    let handle = recorder.handle();
    (handle, metrics::set_default_local_recorder(recorder))
}

/// The value of a metric, written as Prometheus does.
#[track_caller]
fn value(handle: &PrometheusHandle, metric: &str) -> f64 {
    let text = handle.render();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(metric));
    let value = lines.next().and_then(|value| value.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {metric} in\n{text}"))
}

async fn response(layer: LimitLayer) -> Response<impl http_body::Body> {
    let service = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("all")))
    });
    layer
        .layer(service)
        .oneshot(Request::default())
        .await
        .expect("infallible")
}

#[tokio::test(start_paused = true)]
async fn slots_that_are_taken_back_are_counted() {
    let (told, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let second = Duration::from_secs(1);
    let mut unread = response(limiter.layer(ONE).idle(second)).await;
    sleep(2 * second).await;
    let expired = r#"turnstile_expired_total{namespace="turnstile",limit="one",bound="idle"}"#;
    let aborted = r#"turnstile_aborted_total{namespace="turnstile",limit="one",reason="idle"}"#;
    assert_eq!((value(&told, expired), value(&told, aborted)), (1.0, 0.0));
    assert!(unread.frame().await.expect("no end").is_err());
    assert_eq!((value(&told, expired), value(&told, aborted)), (1.0, 1.0));
}

#[tokio::test]
async fn responses_whose_slot_is_lost_are_counted() {
    let (told, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let mut lost = response(limiter.layer(ONE).on_lost(OnLost::Abort)).await;
    limiter.shutdown(Duration::ZERO).await;
    assert!(lost.frame().await.expect("no end").is_err());
    let aborted = r#"turnstile_aborted_total{namespace="turnstile",limit="one",reason="lost"}"#;
    assert_eq!(value(&told, aborted), 1.0);
}

#[tokio::test]
async fn exchanges_are_counted_and_timed() {
    let (told, _guard) = recorder();
    let redis = RedisServer::start();
    let limiter = Limiter::connect(&redis.url()).await.expect("a store");
    drop(
        limiter
            .semaphore(&ONE, "key")
            .acquire()
            .await
            .expect("free"),
    );
    let ok = value(
        &told,
        r#"turnstile_exchanges_total{namespace="turnstile",outcome="ok"}"#,
    );
    // One to see whether it is there, one to acquire.
    assert!(ok >= 2.0);
    let timed = value(
        &told,
        r#"turnstile_exchange_seconds_count{namespace="turnstile"}"#,
    );
    assert_eq!(timed, ok);
    assert_eq!(
        value(&told, r#"turnstile_store_up{namespace="turnstile"}"#),
        1.0
    );
}

#[tokio::test]
async fn store_that_goes_and_comes_back_is_seen() {
    let (told, _guard) = recorder();
    let mut redis = RedisServer::start();
    redis.stop();
    let limiter = Limiter::connect(&redis.url()).await.expect("no error");
    let up = r#"turnstile_store_up{namespace="turnstile"}"#;
    let opened = r#"turnstile_breaker_opened_total{namespace="turnstile",cause="outage"}"#;
    assert_eq!((value(&told, up), value(&told, opened)), (0.0, 1.0));
    redis.restart();
    let is_back = async {
        while !limiter.status().store_up {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let patience = Duration::from_secs(20);
    timeout(patience, is_back).await.expect("it is probed");
    assert_eq!((value(&told, up), value(&told, opened)), (1.0, 1.0));
}
