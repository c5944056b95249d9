//! A slot lost while its request is in progress.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    Limiter, LostErrorKind, OnLost, Refusal, RefusalKind, Slot, layer::LostError,
    test_util::TestStore,
};

use crate::support::{ONE, Script, get, held, send, serve, soon};

/// Marks all held permits as lost.
async fn lose_all(limiter: &Limiter) {
    limiter.shutdown(Duration::ZERO).await;
}

#[tokio::test]
async fn continue_goes_on_and_reports() {
    let limiter = Limiter::in_memory();
    let echo = service_fn(|request: Request<()>| async move {
        let mut response = Response::new(Script::of(["a", "b"]));
        let slot = request.extensions().get::<Slot>().cloned();
        response.extensions_mut().insert(slot.expect("a slot"));
        Ok::<_, Infallible>(response)
    });
    let service = limiter.layer(ONE).unwrap().layer(echo);
    let mut response = send(&service, get("/")).await;
    let slot = response.extensions().get::<Slot>().unwrap().clone();
    response.body_mut().frame().await.unwrap().unwrap();
    assert!(!slot.is_lost());
    lose_all(&limiter).await;
    slot.lost().await;
    assert!(slot.is_lost());
    assert_eq!(response.collect().await.unwrap().to_bytes(), "b");
    assert!(slot.is_lost());
}

#[tokio::test]
async fn abort_takes_no_frame_after_the_loss() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let service = layer.layer(serve(Script::of(["a", "b"]).of_length(2)));
    let mut body = send(&service, get("/")).await.into_body();
    body.frame().await.unwrap().unwrap();
    lose_all(&limiter).await;
    let error = body.frame().await.unwrap().unwrap_err();
    assert!(error.is::<LostError>());
    assert!(body.frame().await.is_none());
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert_eq!(held(&limiter), 0);
}

/// A reset of the stream would be an internal error to its client, which it does not retry.
#[tokio::test]
async fn abort_ends_a_grpc_call_with_a_status() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let service = layer.layer(serve(Script::of(["a"]).then_waits()));
    let mut call = get("/");
    let grpc = HeaderValue::from_static("application/grpc+proto");
    call.headers_mut().insert("content-type", grpc);
    let mut body = send(&service, call).await.into_body();
    body.frame().await.unwrap().unwrap();
    lose_all(&limiter).await;
    assert!(!body.is_end_stream());
    let trailers = body.frame().await.unwrap().unwrap();
    let trailers = trailers.into_trailers().expect("a status");
    let [status, kind] = ["grpc-status", "turnstile-kind"].map(|name| &trailers[name]);
    assert_eq!(
        (status, kind),
        (&"14".parse().unwrap(), &"shut_down".parse().unwrap())
    );
    assert!(
        trailers["grpc-message"]
            .to_str()
            .unwrap()
            .contains("shut down")
    );
    assert!(body.frame().await.is_none() && body.is_end_stream());
}

#[tokio::test]
async fn abort_wakes_a_body_that_waits() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let mut body = send(&service, get("/")).await.into_body();
    let mut frame = task::spawn(body.frame());
    assert_pending!(frame.poll());
    lose_all(&limiter).await;
    assert!(frame.is_woken());
    let error = assert_ready!(frame.poll()).unwrap().unwrap_err();
    assert!(error.is::<LostError>());
}

#[tokio::test]
async fn abort_leaves_a_body_alone_that_has_released() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let service = layer.layer(serve(Full::from("all")));
    let mut body = send(&service, get("/")).await.into_body();
    body.frame().await.unwrap().unwrap();
    lose_all(&limiter).await;
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn abort_drops_the_handler_and_refuses() {
    struct Watched(Arc<AtomicBool>);

    impl Drop for Watched {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    let limiter = Limiter::in_memory();
    let dropped = Arc::new(AtomicBool::new(false));
    let watched = dropped.clone();
    let hangs = service_fn(move |_: Request<()>| {
        let watched = Watched(watched.clone());
        async move {
            let _watched = watched;
            std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>().await
        }
    });
    let layer = limiter
        .layer(ONE)
        .unwrap()
        .on_lost(OnLost::Abort)
        .refuse_with(|refusal, head| {
            let mut response = Response::new(head.uri.path().to_owned());
            *response.status_mut() = refusal.status();
            response
        });
    let mut call = task::spawn(layer.layer(hangs).oneshot(get("/slow")));
    assert_pending!(call.poll());
    lose_all(&limiter).await;
    assert!(call.is_woken());
    let response = assert_ready!(call.poll()).unwrap();
    assert!(dropped.load(Ordering::SeqCst));
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let refusal = response.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind(), RefusalKind::ShutDown);
    assert_eq!(
        response.into_body().collect().await.unwrap().to_bytes(),
        "/slow"
    );
}

#[tokio::test]
async fn continue_lets_the_handler_finish() {
    let limiter = Limiter::in_memory();
    let losing = limiter.clone();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(service_fn(move |_: Request<()>| {
            let limiter = losing.clone();
            async move {
                lose_all(&limiter).await;
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
            }
        }));
    let response = send(&service, get("/")).await;
    assert_eq!(response.collect().await.unwrap().to_bytes(), "done");
}

/// Why a response ended early.
fn kind(error: &tower::BoxError) -> LostErrorKind {
    error
        .downcast_ref::<LostError>()
        .expect("a lost slot")
        .kind()
}

#[tokio::test]
async fn a_shutdown_does_as_a_loss_unless_it_is_said() {
    use OnLost::{Abort, Continue};
    for (on_lost, at_shutdown, ends) in [
        (Continue, None, false),
        (Abort, None, true),
        (Continue, Some(Abort), true),
        (Abort, Some(Continue), false),
    ] {
        let limiter = Limiter::in_memory();
        let layer = limiter.layer(ONE).unwrap().on_lost(on_lost);
        let layer = match at_shutdown {
            Some(at_shutdown) => layer.at_shutdown(at_shutdown),
            None => layer,
        };
        let service = layer.layer(serve(Script::of(["a"]).then_waits()));
        let mut body = send(&service, get("/")).await.into_body();
        limiter.shutdown(Duration::ZERO).await;
        let frame = body.frame().await.unwrap();
        assert_eq!(frame.is_err(), ends, "{on_lost:?}, {at_shutdown:?}");
        if let Err(error) = frame {
            assert_eq!(kind(&error), LostErrorKind::ShutDown);
        }
    }
}

/// An outage of the store longer than a lease.
#[tokio::test(start_paused = true)]
async fn an_outage_cuts_no_stream_that_a_shutdown_ends() {
    let store = TestStore::new();
    let limiter = Limiter::builder().connect_to(&store).await.unwrap();
    let layer = limiter
        .layer([ONE, tower_turnstile::Limit::concurrent("two", 2)])
        .unwrap();
    let layer = layer.at_shutdown(OnLost::Abort);
    let echo = service_fn(|request: Request<()>| async move {
        let mut response = Response::new(Script::of(["a"]).then_waits());
        let slot = request.extensions().get::<Slot>().cloned();
        response.extensions_mut().insert(slot.expect("a slot"));
        Ok::<_, Infallible>(response)
    });
    let response = send(&layer.layer(echo), get("/")).await;
    let slot = response.extensions().get::<Slot>().unwrap().clone();
    let mut body = response.into_body();
    store.go_down();
    soon(slot.lost()).await;
    body.frame().await.unwrap().expect("it goes on");
    let mut frame = task::spawn(body.frame());
    assert_pending!(frame.poll());
    limiter.shutdown(Duration::ZERO).await;
    let error = soon(frame).await.unwrap().expect_err("it is over");
    assert_eq!(kind(&error), LostErrorKind::ShutDown);
}
