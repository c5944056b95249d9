//! The layer in the places where it is used: axum, hyper, tonic, and their clients.

use std::{convert::Infallible, future::IntoFuture};

use axum::{
    Extension, Router,
    extract::MatchedPath,
    response::{Sse, sse::Event},
    routing::get,
};
use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::net::TcpListener;
use tonic::{
    Code, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    service::Routes,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tower::{ServiceBuilder, ServiceExt};
use tower_turnstile::{LimitLayer, Limiter, Refusal, Slot};

use crate::support::{ONE, freed, held, take};

fn request(path: &str) -> Request<axum::body::Body> {
    Request::get(path).body(axum::body::Body::empty()).unwrap()
}

#[tokio::test]
async fn axum_layer_and_route_layer() {
    let limiter = Limiter::in_memory();
    let events = async |Extension(slot): Extension<Slot>| {
        assert!(!slot.is_lost());
        Sse::new(stream::iter([Ok::<_, Infallible>(
            Event::default().data("1"),
        )]))
    };
    let per_route =
        ONE.by_key(|head| Some(head.extensions.get::<MatchedPath>()?.as_str().to_owned()));
    let limited = Router::new().route("/events/{id}", get(events));
    let apps = [
        limited
            .clone()
            .route_layer(limiter.layer(per_route.clone())),
        limited.layer(limiter.layer(per_route)),
    ];
    for app in apps {
        let first = app.clone().oneshot(request("/events/1")).await.unwrap();
        let second = app.clone().oneshot(request("/events/2")).await.unwrap();
        assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
        let body = first.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "data: 1\n\n");
        assert_eq!(held(&limiter), 0);
    }
}

#[tokio::test]
async fn axum_limit_is_shared_by_its_routes_and_clones() {
    let limiter = Limiter::in_memory();
    let app: Router = Router::new()
        .route("/a", get(async || "a"))
        .route("/b", get(async || "b"))
        .route_layer(limiter.layer(ONE))
        .route("/free", get(async || "free"));
    let a = app.clone().oneshot(request("/a")).await.unwrap();
    let b = app.clone().oneshot(request("/b")).await.unwrap();
    assert_eq!(
        (a.status(), b.status()),
        (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE)
    );
    let free = app.oneshot(request("/free")).await.unwrap();
    assert_eq!(free.status(), StatusCode::OK);
}

#[tokio::test]
async fn hyper_util_client() {
    let limiter = Limiter::in_memory();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().route("/", get(async || "from the peer"));
    tokio::spawn(axum::serve(listener, app).into_future());

    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let client = ServiceBuilder::new()
        .layer(limiter.layer(ONE))
        .service(client);
    let request = || {
        Request::get(format!("http://{address}/"))
            .body(Empty::new())
            .unwrap()
    };
    let first = client.clone().oneshot(request()).await.unwrap();
    let second = client.clone().oneshot(request()).await.unwrap();
    assert!(second.extensions().get::<Refusal>().is_some());
    assert_eq!(
        first.into_body().collect().await.unwrap().to_bytes(),
        "from the peer"
    );
    freed(&limiter).await;
}

/// Messages of no bytes.
#[derive(Default)]
pub(crate) struct Nothing;

impl Codec for Nothing {
    type Encode = ();
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Nothing {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for Nothing {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(Some(()))
    }
}

/// The limit, with refusals that gRPC clients understand.
fn grpc_layer(limiter: &Limiter) -> LimitLayer {
    let status = |refusal: &Refusal, _: &_| {
        Status::resource_exhausted(refusal.limit_name()).into_http::<Bytes>()
    };
    limiter.layer(ONE).refuse_with(status)
}

/// A gRPC server without services: whatever gets through is unimplemented.
async fn tonic_channel(limiter: &Limiter) -> Channel {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = Server::builder()
        .layer(grpc_layer(limiter))
        .add_routes(Routes::default());
    tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

#[tokio::test]
async fn tonic_server_and_channel() {
    let (server, client) = (Limiter::in_memory(), Limiter::in_memory());
    let channel = tonic_channel(&server).await;
    let channel = ServiceBuilder::new()
        .layer(grpc_layer(&client))
        .service(channel);
    let mut grpc = Grpc::new(channel);
    let call = async |grpc: &mut Grpc<_>| {
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/test.Test/Call");
        let answer = grpc.unary(tonic::Request::new(()), path, Nothing).await;
        answer.expect_err("there are no services").code()
    };
    assert_eq!(call(&mut grpc).await, Code::Unimplemented);
    freed(&server).await;
    freed(&client).await;
    for limiter in [&server, &client] {
        let permit = take(limiter).await;
        assert_eq!(call(&mut grpc).await, Code::ResourceExhausted);
        drop(permit);
    }
}
