//! Refusals of gRPC calls, as read by tonic's client.

use std::{convert::Infallible, future::pending, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use tokio_test::{assert_pending, task};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_health::{
    pb::{HealthCheckRequest, health_client::HealthClient},
    server::health_reporter,
};
use tonic_types::StatusExt;
use tower::{Layer, service_fn};
use tower_turnstile::{Key, Limit, LimitLayer, Limiter, OnLost, Refusal, RefusalKind};

use crate::support::{ONE, freed, held, send, serve, take};

type Served = Result<Response<Full<Bytes>>, Infallible>;

/// tonic's health service behind the layer, on a separate port, until the test's runtime ends.
async fn health(layer: LimitLayer) -> HealthClient<Channel> {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let (_, service) = health_reporter();
    let server = Server::builder().layer(layer).add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    HealthClient::new(endpoint.connect().await.unwrap())
}

async fn check(client: &mut HealthClient<Channel>) -> Result<(), Status> {
    let answer = client.check(HealthCheckRequest::default()).await;
    answer.map(|_| ())
}

fn call(content_type: &'static str) -> Request<()> {
    let request = Request::post("/test.Test/Call").header("content-type", content_type);
    request.body(()).unwrap()
}

fn retry(status: &Status) -> Duration {
    let info = status.get_details_retry_info().expect("a time to retry");
    info.retry_delay.expect("a delay")
}

#[tokio::test]
async fn full_is_resource_exhausted_until_the_stream_ends() {
    let limiter = Limiter::in_memory();
    let mut client = health(limiter.layer(ONE).unwrap()).await;
    let stream = client.watch(HealthCheckRequest::default()).await.unwrap();
    for _ in 0..2 {
        let unary = check(&mut client).await.unwrap_err();
        let streaming = client.watch(HealthCheckRequest::default()).await;
        for status in [unary, streaming.unwrap_err()] {
            assert_eq!(status.code(), Code::ResourceExhausted);
            assert_eq!(status.message(), "one: 1 of 1 slots in use");
            assert_eq!(retry(&status), Duration::from_secs(1));
            let quota = status.get_details_quota_failure().unwrap();
            assert_eq!(quota.violations.len(), 1);
            assert_eq!(quota.violations[0].subject, "limit:one");
            assert_eq!(quota.violations[0].description, "1 of 1 slots in use");
        }
    }
    drop(stream);
    freed(&limiter).await;
    check(&mut client).await.unwrap();
}

#[tokio::test]
async fn shutdown_is_unavailable() {
    let limiter = Limiter::in_memory();
    let mut client = health(limiter.layer(ONE.by_header("x-key")).unwrap()).await;
    limiter.shutdown(Duration::ZERO).await;
    let status = check(&mut client).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "the service is shutting down");
    assert_eq!(retry(&status), Duration::from_secs(1));
    assert!(status.get_details_quota_failure().is_none());
}

/// By then the service has the request.
#[tokio::test]
async fn loss_before_the_answer_is_unavailable() {
    let limiter = Limiter::in_memory();
    let silent =
        service_fn(|_: Request<tonic::body::Body>| async move { pending::<Served>().await });
    let service = limiter
        .layer(ONE)
        .unwrap()
        .on_lost(OnLost::Abort)
        .layer(silent);
    let mut client = HealthClient::new(service);
    let mut answer = task::spawn(client.check(HealthCheckRequest::default()));
    assert_pending!(answer.poll());
    assert_eq!(held(&limiter), 1);
    limiter.shutdown(Duration::ZERO).await;
    let status = answer.await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(retry(&status), Duration::from_secs(1));
}

#[tokio::test]
async fn a_layer_on_the_client_refuses_alike() {
    let limiter = Limiter::in_memory();
    async fn unsent(_: Request<tonic::body::Body>) -> Served {
        panic!("the request is not sent")
    }
    let mut client = HealthClient::new(limiter.layer(ONE).unwrap().layer(service_fn(unsent)));
    let _permit = take(&limiter).await;
    let status = client.check(HealthCheckRequest::default()).await;
    assert_eq!(status.unwrap_err().code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn a_hostile_name_comes_through() {
    let limiter = Limiter::in_memory();
    let name = "größe\r\n100%25\u{1}\u{1f600}";
    let hostile = Limit::try_concurrent(name, 1).unwrap();
    let mut client = health(limiter.layer(&hostile).unwrap().rate_limit_fields()).await;
    let semaphore = limiter.semaphore(&hostile, Key::SHARED).unwrap();
    let _permit = semaphore.acquire().await.unwrap();
    let status = check(&mut client).await.unwrap_err();
    let message = format!("{name}: 1 of 1 slots in use");
    assert_eq!(status.message(), message);
    let quota = status.get_details_quota_failure().unwrap();
    assert_eq!(quota.violations[0].subject, format!("limit:{name}"));
    assert!(status.metadata().get("ratelimit").is_some());
}

#[tokio::test]
async fn there_is_a_head_and_nothing_else() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Full::<Bytes>::from("served")));
    for content_type in ["application/grpc", "application/grpc+proto"] {
        let refused = send(&service, call(content_type)).await;
        assert_eq!(refused.status(), StatusCode::OK);
        assert_eq!(refused.headers()["content-type"], "application/grpc");
        assert_eq!(refused.headers()["grpc-status"], "8");
        assert!(refused.body().is_end_stream());
        let refusal = refused.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.kind(), RefusalKind::Full);
    }
}

#[tokio::test]
async fn grpc_web_gets_a_status_of_http() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let service = limiter
        .layer(ONE)
        .unwrap()
        .layer(serve(Full::<Bytes>::from("served")));
    for content_type in ["application/grpc-web+proto", "application/grpc-web-text"] {
        let refused = send(&service, call(content_type)).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.headers().get("grpc-status"), None);
    }
}

#[tokio::test]
async fn a_closure_builds_the_response_and_can_start_from_the_default() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().refuse_with(|refusal, _| {
        let mut response = refusal.to_grpc_response();
        response.headers_mut().insert("x-busy", 1.into());
        response
    });
    let mut client = health(layer).await;
    let _permit = take(&limiter).await;
    let status = check(&mut client).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.metadata().get("x-busy").unwrap(), "1");
}
