//! The layer on clients, where it caps calls in progress to a peer: hyper-util, tonic and reqwest.

use std::{
    convert::Infallible,
    future::IntoFuture,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use axum::{
    Router,
    body::Body,
    response::Response,
    routing::{get, post},
};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::Frame;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::net::TcpListener;
use tonic::{Code, client::Grpc, transport::Endpoint};
use tonic_types::StatusExt;
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_turnstile::{
    Limiter, OnLost, Refusal, RefusalKind, Scope,
    layer::{Limited, ResponseBody, overload},
};

use crate::{
    stacks::Nothing,
    support::{GUARD, ONE, Script, freed, held, soon, take},
};

/// A peer with an endless response at `/endless`, a finite one at `/short`, its own refusal at `/busy`, and a gRPC call
/// of one message that never ends.
pub(crate) async fn peer() -> SocketAddr {
    let endless = async || Body::from_stream(first_then_nothing("data"));
    let grpc = async || {
        let message = first_then_nothing("\0\0\0\0\0").map(|data| data.map(Frame::data));
        let mut response = Response::new(Body::new(StreamBody::new(message)));
        let grpc = HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(header::CONTENT_TYPE, grpc);
        response
    };
    let app = Router::new()
        .route("/endless", get(endless))
        .route("/short", get(async || "short"))
        .route("/busy", get(async || StatusCode::TOO_MANY_REQUESTS))
        .route("/test.Test/Call", post(grpc));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, app).into_future());
    address
}

fn first_then_nothing(
    data: &'static str,
) -> impl stream::Stream<Item = Result<Bytes, Infallible>> + Send {
    stream::iter([Ok(Bytes::from_static(data.as_bytes()))]).chain(stream::pending())
}

/// Each way in which a call releases its slot, and the form of a refusal.
async fn caps_calls<S, Q, B>(limiter: Limiter, client: S, request: impl Fn(&str) -> Request<Q>)
where
    S: Service<Request<Q>, Response = Response<ResponseBody<B>>> + Clone,
    S::Error: std::fmt::Debug,
    ResponseBody<B>: http_body::Body<Data = Bytes, Error: std::fmt::Debug> + Unpin,
{
    let send = async |path| soon(client.clone().oneshot(request(path))).await.unwrap();

    let mut endless = send("/endless").await;
    let frame = soon(endless.body_mut().frame()).await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "data");
    assert_eq!(held(&limiter), 1);

    let refused = send("/short").await;
    let refusal = refused.extensions().get::<Refusal>().expect("a refusal");
    assert_eq!(refusal.kind(), RefusalKind::Full);
    assert_eq!(refused.status(), refusal.status());
    drop(endless);
    freed(&limiter).await;

    let short = send("/short").await;
    assert_eq!(
        short.into_body().collect().await.unwrap().to_bytes(),
        "short"
    );
    freed(&limiter).await;

    // The peer's own refusal.
    let busy = send("/busy").await;
    assert_eq!(busy.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(busy.extensions().get::<Refusal>().is_none());
    drop(busy);
    freed(&limiter).await;
}

#[tokio::test]
async fn hyper_util_client() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let client = limiter.layer(ONE).unwrap().layer(client);
    caps_calls(limiter, client, |path| {
        let request = Request::get(format!("http://{peer}{path}"));
        request.body(Empty::new()).unwrap()
    })
    .await;
}

type ReqwestService =
    BoxCloneSyncService<Request<reqwest::Body>, http::Response<reqwest::Body>, reqwest::Error>;

#[tokio::test]
async fn reqwest_client() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let client: Limited<ReqwestService> = limiter.layer(ONE).unwrap().layer(reqwest_service());
    caps_calls(limiter, client, |path| {
        let request = Request::get(format!("http://{peer}{path}"));
        request.body(reqwest::Body::default()).unwrap()
    })
    .await;
}

/// The tenant is a header of the outgoing request.
#[tokio::test]
async fn a_call_has_a_tenant() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let fair = Scope::from(ONE.wait_up_to(GUARD)).fair_by_header("x-tenant");
    let client = limiter
        .layer(fair.require_tenant())
        .unwrap()
        .layer(reqwest_service());
    let call = |tenant: &str| {
        let request = Request::get(format!("http://{peer}/short")).header("x-tenant", tenant);
        let request = request.body(reqwest::Body::default()).unwrap();
        soon(client.clone().oneshot(request))
    };
    assert_eq!(call("acme").await.unwrap().status(), StatusCode::OK);
    let refused = call("").await.unwrap();
    let refusal = refused.extensions().get::<Refusal>().expect("a refusal");
    assert_eq!(refusal.kind(), RefusalKind::NoKey);
}

/// The client cannot represent such a request: its error is passed on, and no slot is left in use.
#[tokio::test]
async fn request_that_does_not_convert_fails() {
    let limiter = Limiter::in_memory();
    let client = limiter.layer(ONE).unwrap().layer(reqwest_service());
    let request = Request::get("/no/host").body(reqwest::Body::default());
    let error = client.oneshot(request.unwrap()).await.unwrap_err();
    assert!(error.is_builder(), "{error:?}");
    assert_eq!(held(&limiter), 0);
}

fn reqwest_service() -> ReqwestService {
    let client = reqwest::Client::new();
    BoxCloneSyncService::new(service_fn(move |request: Request<reqwest::Body>| {
        let client = client.clone();
        async move { Ok(client.execute(request.try_into()?).await?.into()) }
    }))
}

/// The limited response is converted back to reqwest's type, with its slot, and a refusal is still recognizable.
#[tokio::test]
async fn reqwest_response() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let client = limiter.layer(ONE).unwrap().layer(reqwest_service());
    let get = async |path| {
        let request = Request::get(format!("http://{peer}{path}"));
        let request = request.body(reqwest::Body::default()).unwrap();
        let response = client.clone().oneshot(request).await.unwrap();
        reqwest::Response::from(response.map(reqwest::Body::wrap))
    };
    let mut endless = get("/endless").await;
    assert_eq!(endless.chunk().await.unwrap().unwrap(), "data");
    assert_eq!(held(&limiter), 1);
    let refused = get("/short").await;
    assert!(refused.extensions().get::<Refusal>().is_some());
    drop(endless);
    freed(&limiter).await;
    assert_eq!(get("/short").await.text().await.unwrap(), "short");
    freed(&limiter).await;
}

#[tokio::test]
async fn tonic_channel() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let endpoint = Endpoint::from_shared(format!("http://{peer}")).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let mut grpc = Grpc::new(limiter.layer(ONE).unwrap().layer(channel));
    let mut call = async || {
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/test.Test/Call");
        let call = grpc.server_streaming(tonic::Request::new(()), path, Nothing);
        soon(call).await
    };
    for _ in 0..2 {
        let mut messages = call().await.unwrap().into_inner();
        soon(messages.message()).await.unwrap().expect("a message");
        assert_eq!(held(&limiter), 1);
        let refused = call().await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        let retry = refused.get_details_retry_info().unwrap().retry_delay;
        assert!(retry.is_some_and(|delay| !delay.is_zero()));
        drop(messages);
        freed(&limiter).await;
    }
}

/// A peer that refuses each call for overload, and counts them.
async fn overloaded_peer() -> (SocketAddr, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let http = move || {
        count.fetch_add(1, Relaxed);
        async { (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "60")]) }
    };
    let count = calls.clone();
    let grpc = move || {
        count.fetch_add(1, Relaxed);
        let fields = [
            ("content-type", "application/grpc"),
            ("grpc-status", "8"),
            ("grpc-retry-pushback-ms", "60000"),
        ];
        async move { fields }
    };
    let app = Router::new()
        .route("/", get(http))
        .route("/test.Test/Call", post(grpc));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, app).into_future());
    (address, calls)
}

/// The second call is not sent, but refused until the end of the pause.
async fn pauses_after_a_refusal<S, Q, B>(client: S, request: impl Fn() -> Request<Q>)
where
    S: Service<Request<Q>, Response = Response<B>> + Clone,
    S::Error: std::fmt::Debug,
{
    let send = async || soon(client.clone().oneshot(request())).await.unwrap();
    let busy = send().await;
    assert_eq!(busy.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(busy.extensions().get::<Refusal>().is_none());
    let paused = send().await;
    let refusal = paused.extensions().get::<Refusal>().expect("a refusal");
    assert_eq!(refusal.kind(), RefusalKind::Paused);
    assert!((30..=60).contains(&refusal.retry_after().unwrap().as_secs()));
}

#[tokio::test]
async fn an_overloaded_peer_pauses_a_hyper_util_client() {
    let (peer, calls) = overloaded_peer().await;
    let layer = Limiter::in_memory()
        .layer(Scope::from(ONE).outcome_by(overload))
        .unwrap();
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    pauses_after_a_refusal(layer.layer(client), || {
        let request = Request::get(format!("http://{peer}/"));
        request.body(Empty::new()).unwrap()
    })
    .await;
    assert_eq!(calls.load(Relaxed), 1);
}

#[tokio::test]
async fn an_overloaded_peer_pauses_a_reqwest_client() {
    let (peer, calls) = overloaded_peer().await;
    let layer = Limiter::in_memory()
        .layer(Scope::from(ONE).outcome_by(overload))
        .unwrap();
    pauses_after_a_refusal(layer.layer(reqwest_service()), || {
        let request = Request::get(format!("http://{peer}/"));
        request.body(reqwest::Body::default()).unwrap()
    })
    .await;
    assert_eq!(calls.load(Relaxed), 1);
}

/// By the status of the call, which is in its head.
#[tokio::test]
async fn an_overloaded_peer_pauses_a_tonic_channel() {
    let (peer, calls) = overloaded_peer().await;
    let endpoint = Endpoint::from_shared(format!("http://{peer}")).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let layer = Limiter::in_memory()
        .layer(Scope::from(ONE).outcome_by(overload))
        .unwrap();
    let mut grpc = Grpc::new(layer.layer(channel));
    let mut call = async || {
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/test.Test/Call");
        let call = grpc.server_streaming(tonic::Request::new(()), path, Nothing);
        soon(call).await.unwrap_err()
    };
    assert_eq!(call().await.code(), Code::ResourceExhausted);
    let paused = call().await;
    assert_eq!(paused.code(), Code::Unavailable);
    let kind = paused.metadata().get("turnstile-kind").unwrap();
    assert_eq!(kind, RefusalKind::Paused.as_str());
    let delay = paused.get_details_retry_info().unwrap().retry_delay;
    assert!(delay.is_some_and(|delay| (30..=60).contains(&delay.as_secs())));
    assert_eq!(calls.load(Relaxed), 1);
}

/// A call waiting for its slot is not sent, and a cancelled call leaves the queue.
#[tokio::test]
async fn call_that_is_given_up_leaves_the_line() {
    let (limiter, peer) = (Limiter::in_memory(), peer().await);
    let permit = take(&limiter).await;
    let client = limiter
        .layer(ONE.wait_up_to(GUARD))
        .unwrap()
        .layer(reqwest_service());
    let request = || {
        let request = Request::get(format!("http://{peer}/short"));
        request.body(reqwest::Body::default()).unwrap()
    };
    let mut given_up = tokio_test::task::spawn(client.clone().oneshot(request()));
    let mut patient = tokio_test::task::spawn(client.oneshot(request()));
    tokio_test::assert_pending!(given_up.poll());
    tokio_test::assert_pending!(patient.poll());
    assert_eq!(limiter.status().waiting, 2);
    drop(given_up);
    assert_eq!(limiter.status().waiting, 1);
    drop(permit);
    let response = soon(patient).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
}

/// The recipe without the layer: the slot is held until the last chunk, the end or the drop.
#[tokio::test]
async fn permit_goes_with_the_stream() {
    let limiter = Limiter::in_memory();
    let mut chunks = take(&limiter).await.attach(stream::iter(["a", "b"]));
    assert_eq!(futures_util::Stream::size_hint(&chunks), (2, Some(2)));
    for chunk in ["a", "b"] {
        assert_eq!(chunks.next().await, Some(chunk));
        assert!(chunks.permit().is_some());
        assert_eq!(held(&limiter), 1);
    }
    assert_eq!(chunks.next().await, None);
    assert!(chunks.permit().is_none());
    assert_eq!(held(&limiter), 0);

    let unread = take(&limiter).await.attach(stream::iter(["a"]));
    assert_eq!(held(&limiter), 1);
    drop(unread);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn permit_goes_with_the_body() {
    let limiter = Limiter::in_memory();
    let script = Script::of(["a", "b"]);
    for (body, frames) in [
        (script.clone().tells_end(), 1),
        (script.clone(), 2),
        (script.then_fails(), 2),
    ] {
        let mut body = take(&limiter).await.attach_body(body, OnLost::Continue);
        for _ in 0..frames {
            body.frame().await.unwrap().unwrap();
            assert_eq!(held(&limiter), 1);
        }
        drop(body.frame().await);
        assert_eq!(held(&limiter), 0);
    }
}
