//! Clients that acquire permits directly, and move them into the bodies of responses. The peer is a real HTTP server.

use std::time::Duration;

use http_body_util::BodyExt;
use tower_turnstile::{Limiter, OnLost, Permit, layer::LostError};

use crate::{
    clients::peer,
    support::{Gauge, Script, Watched, freed, held, soon, take},
};

/// Sends a request, and moves the permit into its response.
async fn call(permit: Permit, url: String, on_lost: OnLost) -> reqwest::Response {
    let response = http::Response::from(soon(reqwest::get(url)).await.unwrap());
    let response = response.map(|body| permit.attach_body(body, on_lost));
    response.map(reqwest::Body::wrap).into()
}

#[tokio::test]
async fn permit_counts_until_the_response_is_read() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    for on_lost in [OnLost::Continue, OnLost::Abort] {
        let short = call(
            take(&limiter).await,
            format!("http://{peer}/short"),
            on_lost,
        )
        .await;
        assert_eq!(held(&limiter), 1);
        assert_eq!(short.text().await.unwrap(), "short");
        assert_eq!(held(&limiter), 0);
    }
}

#[tokio::test]
async fn response_that_is_dropped_releases() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    for on_lost in [OnLost::Continue, OnLost::Abort] {
        let permit = take(&limiter).await;
        let mut endless = call(permit, format!("http://{peer}/endless"), on_lost).await;
        assert_eq!(soon(endless.chunk()).await.unwrap().unwrap(), "data");
        assert_eq!(held(&limiter), 1);
        drop(endless);
        assert_eq!(held(&limiter), 0);
    }
}

#[tokio::test]
async fn lost_permit_ends_its_response() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let permit = take(&limiter).await;
    let mut endless = call(permit, format!("http://{peer}/endless"), OnLost::Abort).await;
    assert_eq!(soon(endless.chunk()).await.unwrap().unwrap(), "data");
    limiter.shutdown(Duration::ZERO).await;
    let error = soon(endless.chunk()).await.unwrap_err();
    let mut causes = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source());
    assert!(causes.any(|cause| cause.is::<LostError>()), "{error:?}");
}

/// Even if no task reads it.
#[tokio::test]
async fn lost_permit_drops_its_body() {
    for (on_lost, open) in [(OnLost::Abort, 0), (OnLost::Continue, 1)] {
        let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
        let watched = Watched {
            body: Script::of(["data"]).then_waits(),
            end: gauge.enter(),
        };
        let mut body = take(&limiter).await.attach_body(watched, on_lost);
        body.frame().await.unwrap().unwrap();
        limiter.shutdown(Duration::ZERO).await;
        gauge.until(open).await;
        if on_lost == OnLost::Abort {
            let error = soon(body.frame()).await.unwrap().unwrap_err();
            assert!(error.is::<LostError>(), "{error:?}");
        }
        drop(body);
        gauge.until(0).await;
    }
}

/// However the body ends.
#[tokio::test]
async fn body_that_ends_or_fails_releases() {
    let limiter = Limiter::in_memory();
    for on_lost in [OnLost::Continue, OnLost::Abort] {
        for script in [
            Script::of(["data"]),
            Script::of(["data"]).tells_end(),
            Script::of(["data"]).trailers("name", "value"),
            Script::of(["data"]).then_fails(),
        ] {
            let mut body = take(&limiter).await.attach_body(script, on_lost);
            assert_eq!(held(&limiter), 1);
            while let Some(Ok(_)) = body.frame().await {}
            assert_eq!(held(&limiter), 0);
        }
    }
    freed(&limiter).await;
}
