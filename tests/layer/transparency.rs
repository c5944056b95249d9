//! Everything that the layer must leave unchanged (G9).

use std::{
    convert::Infallible,
    future::{Ready, poll_fn, ready},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio_test::{assert_pending, assert_ready_eq, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{LimitLayer, Limiter, OnLost, Slot};

use crate::support::{ONE, Script, get, held, send, serve};

/// A layer whose responses are left alone, and those that may end them.
fn layers() -> [LimitLayer; 5] {
    const HOUR: Duration = Duration::from_secs(3_600);
    let layer = || Limiter::in_memory().layer(ONE).unwrap();
    let operable = Limiter::builder().operable().in_memory();
    [
        layer(),
        layer().on_lost(OnLost::Abort),
        layer().max_hold(HOUR),
        layer().idle(HOUR),
        operable.expect("valid").layer(ONE).unwrap(),
    ]
}

#[tokio::test]
async fn frames_trailers_and_size_hint_pass() {
    for layer in layers() {
        let script = Script::of(["a", "", "b"])
            .trailers("x-sum", "2")
            .of_length(2);
        let mut body = send(&layer.layer(serve(script)), get("/"))
            .await
            .into_body();
        assert_eq!(body.size_hint().exact(), Some(2), "{layer:?}");
        assert!(!body.is_end_stream());
        for data in ["a", "", "b"] {
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), data);
        }
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_trailers().unwrap()["x-sum"], "2");
        assert!(body.frame().await.is_none());
    }
}

#[tokio::test]
async fn end_of_stream_passes() {
    for layer in layers() {
        let service = layer.layer(serve(Full::from("all")));
        let mut body = send(&service, get("/")).await.into_body();
        assert!(!body.is_end_stream());
        body.frame().await.unwrap().unwrap();
        assert!(body.is_end_stream(), "{layer:?}");
    }
}

#[tokio::test]
async fn errors_of_a_body_are_its_own() {
    for layer in layers() {
        let service = layer.layer(serve(Script::of(["a"]).then_fails()));
        let mut body = send(&service, get("/")).await.into_body();
        body.frame().await.unwrap().unwrap();
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the script fails", "{layer:?}");
    }
}

/// `Incoming` may report the end before HTTP/1 trailers.
#[tokio::test]
async fn frames_after_the_announced_end_pass() {
    #[derive(Clone)]
    struct Hasty(Script);

    impl Body for Hasty {
        type Data = Bytes;
        type Error = tower::BoxError;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
            std::pin::Pin::new(&mut self.0).poll_frame(cx)
        }

        fn is_end_stream(&self) -> bool {
            true
        }
    }

    let limiter = Limiter::in_memory();
    let hasty = Hasty(Script::of(["a"]).trailers("x-sum", "1"));
    let mut body = send(&limiter.layer(ONE).unwrap().layer(serve(hasty)), get("/"))
        .await
        .into_body();
    assert_eq!(held(&limiter), 0);
    assert!(body.frame().await.unwrap().unwrap().is_data());
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn head_and_extensions_pass() {
    let limiter = Limiter::in_memory();
    let echo = service_fn(|request: Request<Full<Bytes>>| async move {
        let (head, body) = request.into_parts();
        let mut response = Response::new(body);
        *response.headers_mut() = head.headers;
        *response.extensions_mut() = head.extensions;
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        Ok::<_, Infallible>(response)
    });
    let scopes = [
        ONE.into(),
        ONE.by_header("x-key"),
        ONE.by_key(|_| Some("key")),
        ONE.by_key_async(|_| ready(Some("key"))),
    ];
    for scope in scopes {
        let request = Request::get("/path?query")
            .header("x-key", "key")
            .extension("mine")
            .body(Full::from("body"))
            .unwrap();
        let response = limiter
            .layer(scope)
            .unwrap()
            .layer(echo)
            .oneshot(request)
            .await
            .unwrap();
        assert_eq!(response.status(), StatusCode::IM_A_TEAPOT);
        assert_eq!(response.headers()["x-key"], "key");
        assert_eq!(response.extensions().get(), Some(&"mine"));
        assert!(response.extensions().get::<Slot>().is_some());
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "body"
        );
    }
}

/// Panics if called before it is ready; its clones are not ready.
#[derive(Default)]
struct Fussy {
    ready: bool,
}

#[derive(Debug, PartialEq)]
struct NotReady;

impl Clone for Fussy {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Service<Request<()>> for Fussy {
    type Response = Response<Full<Bytes>>;
    type Error = NotReady;
    type Future = Ready<Result<Self::Response, NotReady>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), NotReady>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.ready),
            "called before it was ready"
        );
        ready(Ok(Response::default()))
    }
}

#[tokio::test]
async fn the_readied_service_is_called() {
    let mut service = Limiter::in_memory()
        .layer(ONE)
        .unwrap()
        .layer(Fussy::default());
    for _ in 0..3 {
        service.ready().await.unwrap().call(get("/")).await.unwrap();
    }
}

/// Backpressure: a service that is busy is not called.
#[tokio::test]
async fn a_service_that_is_not_ready_is_waited_for() {
    #[derive(Clone, Default)]
    struct Busy(Arc<AtomicBool>);

    impl<T> Service<Request<T>> for Busy {
        type Response = Response<Full<Bytes>>;
        type Error = NotReady;
        type Future = Ready<Result<Self::Response, NotReady>>;

        fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), NotReady>> {
            if self.0.load(Ordering::Relaxed) {
                return Poll::Ready(Ok(()));
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }

        fn call(&mut self, _: Request<T>) -> Self::Future {
            unreachable!("readiness only")
        }
    }

    async fn check<S: Service<Request<Full<Bytes>>, Error = NotReady>>(busy: Busy, mut service: S) {
        let mut ready = task::spawn(poll_fn(|cx| service.poll_ready(cx)));
        assert_pending!(ready.poll());
        assert!(ready.is_woken());
        busy.0.store(true, Ordering::Relaxed);
        assert_ready_eq!(ready.poll(), Ok(()));
    }

    for layer in layers() {
        let busy = Busy::default();
        check(busy.clone(), layer.layer(busy)).await;
    }
    let busy = Busy::default();
    let layer = Limiter::in_memory().layer(ONE).unwrap().read_ahead();
    check(busy.clone(), layer.layer(busy)).await;
}

#[tokio::test]
async fn readiness_takes_no_slot() {
    let limiter = Limiter::in_memory();
    let mut service = limiter.layer(ONE).unwrap().layer(Fussy::default());
    service.ready().await.unwrap();
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn readiness_error_is_the_services_own() {
    #[derive(Clone)]
    struct Broken;

    impl Service<Request<()>> for Broken {
        type Response = Response<Full<Bytes>>;
        type Error = NotReady;
        type Future = Ready<Result<Self::Response, NotReady>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), NotReady>> {
            Poll::Ready(Err(NotReady))
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            unreachable!("it is never ready")
        }
    }

    let mut service = Limiter::in_memory().layer(ONE).unwrap().layer(Broken);
    assert_eq!(service.ready().await.err(), Some(NotReady));
}
