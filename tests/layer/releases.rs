//! Each way in which a response releases its slot, in process.

use std::{convert::Infallible, panic::AssertUnwindSafe, pin::pin};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use tokio_test::{assert_pending, task};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{Limiter, ReleaseAt};

use crate::support::{GUARD, ONE, Script, freed, get, held, send, serve, take};

#[tokio::test]
async fn body_end_releases() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Script::of(["a", "b"])));
    let mut body = send(&service, get("/")).await.into_body();
    for _ in 0..2 {
        body.frame().await.unwrap().unwrap();
        assert_eq!(held(&limiter), 1);
    }
    assert!(body.frame().await.is_none());
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn trailers_release_when_they_end_the_body() {
    let limiter = Limiter::in_memory();
    let script = Script::of(["a"]).trailers("x-sum", "1").tells_end();
    let service = limiter.layer(ONE).unwrap().layer(serve(script));
    let mut body = send(&service, get("/")).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 1);
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn last_frame_releases_when_it_is_announced() {
    let limiter = Limiter::in_memory();
    let service = limiter.layer(ONE).unwrap().layer(serve(Full::from("all")));
    let mut body = send(&service, get("/")).await.into_body();
    assert_eq!(held(&limiter), 1);
    body.frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn error_releases() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Script::of(["a"]).then_fails()));
    let mut body = send(&service, get("/")).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 1);
    body.frame().await.unwrap().unwrap_err();
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn drop_releases() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Script::of(["a"]).then_waits()));
    let mut response = send(&service, get("/")).await;
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 1);
    drop(response);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn body_that_has_ended_at_construction_releases() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Empty::<Bytes>::new()));
    let response = send(&service, get("/")).await;
    assert_eq!(held(&limiter), 0);
    drop(response);
}

#[tokio::test]
async fn end_releases_once() {
    let limiter = Limiter::in_memory();
    let service = limiter.layer(ONE).unwrap().layer(serve(Script::of(["a"])));
    let mut ended = send(&service, get("/")).await.into_body();
    while ended.frame().await.is_some() {}
    let second = send(&service, get("/")).await;
    assert!(ended.frame().await.is_none());
    drop(ended);
    assert_eq!(held(&limiter), 1);
    let refused = send(&service, get("/")).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(second);
}

#[tokio::test]
async fn response_head_releases_if_so_set() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().release_at(ReleaseAt::Head);
    let service = layer.layer(serve(Script::of(["a"]).then_waits()));
    let mut response = send(&service, get("/")).await;
    assert_eq!(held(&limiter), 0);
    let frame = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "a");
}

#[tokio::test]
async fn service_error_releases() {
    let limiter = Limiter::in_memory();
    let fails = service_fn(|_: Request<()>| async move { Err::<Response<Full<Bytes>>, _>("no") });
    let service = limiter.layer(ONE).unwrap().layer(fails);
    let mut call = pin!(service.oneshot(get("/")));
    assert_eq!(call.as_mut().await.unwrap_err(), "no");
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn panic_in_handler_releases() {
    let limiter = Limiter::in_memory();
    async fn panics(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
        panic!("a handler's bug")
    }
    let service = limiter.layer(ONE).unwrap().layer(service_fn(panics));
    let call = AssertUnwindSafe(service.oneshot(get("/"))).catch_unwind();
    assert!(call.await.is_err());
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn panic_in_call_releases() {
    let limiter = Limiter::in_memory();
    let panics = service_fn(
        |_: Request<()>| -> std::future::Ready<Result<Response<Full<Bytes>>, BoxError>> {
            panic!("a service's bug")
        },
    );
    let service = limiter.layer(ONE).unwrap().layer(panics);
    let call = AssertUnwindSafe(service.oneshot(get("/"))).catch_unwind();
    assert!(call.await.is_err());
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn cancelled_before_it_is_polled_takes_nothing() {
    let limiter = Limiter::in_memory();
    let mut service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Full::<Bytes>::default()));
    drop(service.ready().await.unwrap().call(get("/")));
    assert_eq!(limiter.status().held + limiter.status().waiting, 0);
}

#[tokio::test]
async fn cancelled_while_waiting_leaves_the_line() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    let layer = limiter.layer(ONE.wait_up_to(GUARD)).unwrap();
    let mut waiting = task::spawn(
        layer
            .layer(serve(Full::<Bytes>::default()))
            .oneshot(get("/")),
    );
    assert_pending!(waiting.poll());
    assert_eq!(limiter.status().waiting, 1);
    drop(waiting);
    assert_eq!(limiter.status().waiting, 0);
    drop(permit);
    freed(&limiter).await;
}

#[tokio::test]
async fn cancelled_when_just_granted_releases() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    let layer = limiter.layer(ONE.wait_up_to(GUARD)).unwrap();
    let mut waiting = task::spawn(
        layer
            .layer(serve(Full::<Bytes>::default()))
            .oneshot(get("/")),
    );
    assert_pending!(waiting.poll());
    drop(permit);
    assert!(waiting.is_woken());
    drop(waiting);
    freed(&limiter).await;
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn cancelled_while_the_handler_runs_releases() {
    let limiter = Limiter::in_memory();
    let hangs = service_fn(|_: Request<()>| {
        std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let mut running = task::spawn(limiter.layer(ONE).unwrap().layer(hangs).oneshot(get("/")));
    assert_pending!(running.poll());
    assert_eq!(held(&limiter), 1);
    drop(running);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn drop_outside_a_runtime_releases() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Script::of(["a"]).then_waits()));
    let response = send(&service, get("/")).await;
    let dropped = std::thread::spawn(move || drop(response)).join();
    assert!(dropped.is_ok());
    freed(&limiter).await;
}
