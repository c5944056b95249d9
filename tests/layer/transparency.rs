//! Everything that the layer must leave unchanged (G9).

use std::{
    convert::Infallible,
    future::{Ready, ready},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{Limiter, Slot};

use crate::support::{ONE, Script, get, held, send, serve};

#[tokio::test]
async fn frames_trailers_and_size_hint_pass() {
    let limiter = Limiter::in_memory();
    let script = Script::of(["a", "", "b"])
        .trailers("x-sum", "2")
        .of_length(2);
    let mut body = send(&limiter.layer(ONE).layer(serve(script)), get("/"))
        .await
        .into_body();
    assert_eq!(body.size_hint().exact(), Some(2));
    assert!(!body.is_end_stream());
    for data in ["a", "", "b"] {
        assert_eq!(
            body.frame().await.unwrap().unwrap().into_data().unwrap(),
            data
        );
    }
    let trailers = body
        .frame()
        .await
        .unwrap()
        .unwrap()
        .into_trailers()
        .unwrap();
    assert_eq!(trailers["x-sum"], "2");
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn end_of_stream_passes() {
    let service = Limiter::in_memory()
        .layer(ONE)
        .layer(serve(Full::from("all")));
    let mut body = send(&service, get("/")).await.into_body();
    assert!(!body.is_end_stream());
    body.frame().await.unwrap().unwrap();
    assert!(body.is_end_stream());
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
    let mut body = send(&limiter.layer(ONE).layer(serve(hasty)), get("/"))
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
    let mut service = Limiter::in_memory().layer(ONE).layer(Fussy::default());
    for _ in 0..3 {
        service.ready().await.unwrap().call(get("/")).await.unwrap();
    }
}

#[tokio::test]
async fn readiness_takes_no_slot() {
    let limiter = Limiter::in_memory();
    let mut service = limiter.layer(ONE).layer(Fussy::default());
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

    let mut service = Limiter::in_memory().layer(ONE).layer(Broken);
    assert_eq!(service.ready().await.err(), Some(NotReady));
}
