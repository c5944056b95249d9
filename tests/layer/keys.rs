//! Requests without a key: refused if one is required, and never silently unlimited.

use std::{future::ready, net::SocketAddr};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tonic::{Code, Status};
use tower::Layer;
use tower_turnstile::{
    ClientAddress, Key, Limit, Limiter, Mode, PeerAddress, Refusal, RefusalKind, Scope,
};

use crate::{
    log::log,
    support::{ONE, Script, get, held, send, serve},
};

/// Inserted by an authentication layer.
#[derive(Clone)]
struct Tenant(String);

fn tenant(name: &str) -> Request<()> {
    let mut request = get("/");
    request.extensions_mut().insert(Tenant(name.to_owned()));
    request
}

fn with_header(value: &str) -> Request<()> {
    Request::get("/").header("x-key", value).body(()).unwrap()
}

fn from_peer() -> Request<()> {
    let mut request = get("/");
    let peer = SocketAddr::from(([192, 0, 2, 7], 80));
    request.extensions_mut().insert(PeerAddress(peer));
    request
}

fn by_tenant() -> Scope {
    ONE.by_key(|head| Some(Key::from(&head.extensions.get::<Tenant>()?.0)))
}

fn by_tenant_later() -> Scope {
    ONE.by_key_async(|head| {
        let tenant = head.extensions.get::<Tenant>().cloned();
        ready(tenant.map(|tenant| tenant.0))
    })
}

/// Rules for keys, each with a request that has a key and requests without.
fn rules() -> Vec<(Scope, Request<()>, Vec<Request<()>>)> {
    let by_address = ONE.by_client_address(ClientAddress::peer());
    vec![
        (by_tenant(), tenant("acme"), vec![get("/")]),
        (by_tenant_later(), tenant("acme"), vec![get("/")]),
        (
            ONE.by_header("x-key"),
            with_header("acme"),
            vec![get("/"), with_header("")],
        ),
        (by_address, from_peer(), vec![get("/")]),
    ]
}

#[tokio::test]
async fn a_required_key_is_required() {
    for (scope, keyed, unkeyed) in rules() {
        let limiter = Limiter::in_memory();
        let rule = format!("{scope:?}");
        let layer = limiter.layer(scope.require_key()).unwrap();
        let service = layer.layer(serve(Script::of([]).then_waits()));
        for request in unkeyed {
            let response = send(&service, request).await;
            assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{rule}");
            let refusal = response.extensions().get::<Refusal>().expect("a refusal");
            assert_eq!(refusal.kind(), RefusalKind::NoKey, "{rule}");
            assert_eq!(refusal.limit_name(), "one", "{rule}");
            assert!(!refusal.kind().is_limited());
            assert_eq!(response.headers().get(header::RETRY_AFTER), None);
            assert_eq!(held(&limiter), 0, "{rule}");
        }
        let response = send(&service, keyed).await;
        assert_eq!(response.status(), StatusCode::OK, "{rule}");
        assert_eq!(held(&limiter), 1, "{rule}");
    }
}

#[tokio::test]
async fn the_problem_is_the_request_and_not_a_quota() {
    let layer = Limiter::in_memory()
        .layer(by_tenant().require_key())
        .unwrap();
    let service = layer.layer(serve(Script::of([])));
    let response = send(&service, get("/")).await;
    let media_type = response.headers()[header::CONTENT_TYPE].clone();
    assert_eq!(media_type, "application/problem+json");
    let body = response.collect().await.unwrap().to_bytes();
    let expected = json!({
        "type": "about:blank",
        "title": "Bad Request",
        "status": 400,
        "kind": "no_key",
        "detail": "the request has no key for this limit",
    });
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
}

#[tokio::test]
async fn a_grpc_client_is_told_that_its_request_is_invalid() {
    let layer = Limiter::in_memory()
        .layer(by_tenant().require_key())
        .unwrap();
    let service = layer.layer(serve(Script::of([])));
    let request = Request::post("/").header("content-type", "application/grpc");
    let response = send(&service, request.body(()).unwrap()).await;
    let status = Status::from_header_map(response.headers()).expect("a status");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(tonic_types::StatusExt::get_details_retry_info(&status).is_none());
}

#[tokio::test]
async fn the_hook_may_answer_otherwise() {
    let layer = Limiter::in_memory()
        .layer(by_tenant().require_key())
        .unwrap();
    let layer = layer.refuse_with(|refusal, _| {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = match refusal.kind() {
            RefusalKind::NoKey => StatusCode::UNAUTHORIZED,
            _ => refusal.status(),
        };
        response
    });
    let response = send(&layer.layer(serve(Script::of([]))), get("/")).await;
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
}

/// The other limits are not used, wherever the limit without a key stands.
#[tokio::test]
async fn one_key_that_is_missing_is_enough() {
    let all = || Scope::from(Limit::concurrent("all", 1));
    for strict in [by_tenant().require_key(), by_tenant_later().require_key()] {
        for scopes in [[strict.clone(), all()], [all(), strict]] {
            let limiter = Limiter::in_memory();
            let service = limiter
                .layer(scopes)
                .unwrap()
                .layer(serve(Script::of([]).then_waits()));
            for _ in 0..2 {
                let response = send(&service, get("/")).await;
                assert_eq!(response.status(), StatusCode::BAD_REQUEST);
            }
            assert_eq!(held(&limiter), 0);
            let response = send(&service, tenant("acme")).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(held(&limiter), 2);
        }
    }
}

#[tokio::test]
async fn a_limit_that_is_not_enforced_requires_nothing() {
    for mode in [Mode::Shadow, Mode::Off] {
        let limit = Limit::concurrent("tried", 1).mode(mode);
        let limiter = Limiter::in_memory();
        let scope = limit.clone().by_header("x-key").require_key();
        let service = limiter.layer(scope).unwrap().layer(serve(Script::of([])));
        assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
        limiter.update(&limit.mode(Mode::Enforce)).unwrap();
        let response = send(&service, get("/")).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    }
}

/// A service that forgets to pass the addresses on would have one limit for all.
#[tokio::test]
async fn a_client_without_an_address_is_reported_once() {
    let log = log();
    let limit = Limit::concurrent("logged-addressless", 1);
    let layer = Limiter::in_memory()
        .layer(limit.by_client_address(ClientAddress::peer()))
        .unwrap();
    let service = layer.layer(serve(Script::of([])));
    for _ in 0..2 {
        assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
    }
    let lines = log.lines_with("a client has no address");
    let lines = lines
        .iter()
        .filter(|line| line.contains("logged-addressless"));
    assert_eq!(lines.count(), 1);
}

#[tokio::test]
async fn a_request_without_a_key_is_in_the_log() {
    let log = log();
    let limit = Limit::concurrent("logged-unkeyed", 1);
    let layer = Limiter::in_memory()
        .layer(limit.by_key(|_| None::<String>))
        .unwrap();
    let service = layer.layer(serve(Script::of([])));
    assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
    let lines = log.lines_with("logged-unkeyed");
    assert_eq!(lines.len(), 1);
    assert!(
        lines[0].contains("DEBUG") && lines[0].contains("no key"),
        "{lines:?}"
    );
}
