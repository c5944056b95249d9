//! Fair limits in a layer: their settings, and requests without a tenant. What a scope finds for a request:
//! `src/layer/fair_by.rs`.

use std::{panic::catch_unwind, time::Duration};

use http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::Value;
use tokio_test::{assert_pending, task};
use tonic::{Code, Status};
use tower::{Layer, ServiceExt};
use tower_turnstile::{
    ConfigErrorKind, Key, Limit, Limiter, Mode, Policy, Refusal, RefusalKind, Scope,
};

use crate::support::{GUARD, Script, get, held, send, serve, soon};

const GPU: Limit = Limit::concurrent("gpu", 1).wait_up_to(GUARD);

fn of_tenant(tenant: &str) -> Request<()> {
    let request = Request::get("/").header("x-tenant", tenant);
    request.body(()).unwrap()
}

fn fault(policy: impl Into<Policy>) -> String {
    let error = Limiter::in_memory().layer(policy).unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Value);
    error.to_string()
}

#[test]
fn a_limit_that_cannot_be_fair_is_an_error() {
    let rate = Limit::rate("gpu", 1, Duration::from_secs(1)).wait_up_to(GUARD);
    let hasty = Limit::concurrent("gpu", 1);
    for (scope, words) in [
        (
            Scope::from(rate).fair_by_header("x-tenant"),
            "a rate has no slots",
        ),
        (
            Scope::from(GPU.reuse()).fair_by_header("x-tenant"),
            "a reused slot",
        ),
        (GPU.fair().reuse().into(), "a reused slot"),
        (
            Scope::from(hasty.clone()).fair_by_header("x-tenant"),
            "set a wait",
        ),
        (hasty.fair().into(), "set a wait"),
    ] {
        let fault = fault(scope);
        assert!(fault.starts_with("limit `gpu` is fair: "), "{fault}");
        assert!(fault.contains(words), "{fault}");
    }
}

#[test]
fn a_rate_cannot_be_declared_fair() {
    let rate = || Limit::rate("gpu", 1, Duration::from_secs(1)).fair();
    assert!(catch_unwind(rate).is_err());
}

#[test]
fn a_tenant_by_a_bad_header_name_panics() {
    assert!(catch_unwind(|| Scope::from(GPU).fair_by_header("not a name")).is_err());
}

#[test]
fn a_share_out_of_range_is_an_error_in_a_table() {
    for share in [0, 1_001, u32::MAX] {
        let shares = [("one", 1), ("most", Limit::MAX_SHARE), ("secret", share)];
        let fault = fault(Scope::from(GPU).fair_by_header("x-tenant").shares(shares));
        let expected =
            format!("a tenant of limit `gpu` has a share of {share}: it must be 1 to 1000");
        assert_eq!(fault, expected);
    }
    let of_none = fault(
        Scope::from(GPU)
            .fair_by_header("x-tenant")
            .shares([("", 2)]),
    );
    assert!(of_none.contains("an empty tenant"), "{of_none}");
}

/// All requests of these limits are one tenant, so the settings would have no effect, or refuse everybody.
#[test]
fn settings_of_tenants_need_a_source_of_tenants() {
    let each: [fn(Scope) -> Scope; 3] = [
        |scope| scope.shares([("acme", 3)]),
        |scope| scope.shares_by(|_, _| Some(3)),
        Scope::require_tenant,
    ];
    for set in each {
        for scope in [Scope::from(GPU), GPU.by_header("x-key"), GPU.fair().into()] {
            let fault = fault(set(scope));
            assert!(
                fault.contains("`gpu`") && fault.contains("`fair_by_header`"),
                "{fault}"
            );
        }
        // In any order.
        let scope = set(GPU.into()).fair_by_header("x-tenant");
        assert!(Limiter::in_memory().layer(scope).is_ok());
    }
}

#[test]
fn a_limit_is_fair_everywhere_or_nowhere() {
    let (plain, fair) = (
        || Scope::from(GPU),
        || Scope::from(GPU).fair_by_header("x-tenant"),
    );
    for (first, second) in [(plain(), fair()), (fair(), plain())] {
        let limiter = Limiter::in_memory();
        let _first = limiter.layer(first).unwrap();
        let error = limiter.layer(second).unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::Conflict);
        let text = error.to_string();
        assert!(text.contains("`gpu`") && text.contains("fair "), "{text}");
    }
    // Each place may have its own tenants, and none needs any.
    let limiter = Limiter::in_memory();
    for scope in [
        fair(),
        Scope::from(GPU)
            .fair_by_key(|head| head.uri.host().map(Key::from))
            .shares([("acme", 3)]),
        GPU.by_header("x-key").fair_by_header("x-tenant"),
        GPU.fair().into(),
    ] {
        let _layer = limiter.layer(scope).unwrap();
    }
    limiter.semaphore(GPU.fair(), Key::SHARED).unwrap();
}

#[test]
fn fairness_cannot_change_while_the_limit_is_in_use() {
    let limiter = Limiter::in_memory();
    let _layer = limiter
        .layer(Scope::from(GPU).fair_by_header("x-tenant"))
        .unwrap();
    let error = limiter.update(&GPU).unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Conflict);
    assert_eq!(
        error.to_string(),
        "the fairness of limit `gpu` cannot change while it is in use"
    );
    limiter.update(&GPU.fair().max_waiters(5)).unwrap();
}

/// The limiter has checked the wait of the limit that it returns, so a layer that refuses at once may use it too.
#[tokio::test]
async fn a_layer_need_not_wait_if_the_limit_does() {
    let limiter = Limiter::in_memory();
    let patient = limiter
        .layer(Scope::from(GPU).fair_by_header("x-tenant"))
        .unwrap();
    limiter.update(&GPU.fair().max_waiters(5)).unwrap();
    let gpu = limiter.limit("gpu").expect("the layer has it");
    let hasty = Scope::from(gpu.wait_up_to(Duration::ZERO)).fair_by_header("x-other");
    let hasty = limiter
        .layer(hasty)
        .unwrap()
        .layer(serve(Script::of([]).then_waits()));
    let patient = patient.layer(serve(Script::of([]).then_waits()));
    let first = send(&hasty, get("/")).await;
    let refused = send(&hasty, get("/")).await;
    let refusal = refused.extensions().get::<Refusal>().expect("no wait");
    assert_eq!(refusal.kind(), RefusalKind::Full);
    let mut second = task::spawn(patient.oneshot(of_tenant("acme")));
    assert_pending!(second.poll());
    drop(first);
    assert_eq!(soon(second).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn requests_of_all_tenants_and_of_none_share_the_limit() {
    let limiter = Limiter::in_memory();
    let scope = Scope::from(GPU)
        .fair_by_header("x-tenant")
        .shares([("acme", 3)]);
    let service = limiter
        .layer(scope)
        .unwrap()
        .layer(serve(Script::of([]).then_waits()));
    let mut response = send(&service, of_tenant("acme")).await;
    for request in [of_tenant("acme"), of_tenant("other"), get("/"), get("/")] {
        let mut waiting = task::spawn(service.clone().oneshot(request));
        assert_pending!(waiting.poll());
        assert_eq!((held(&limiter), limiter.status().waiting), (1, 1));
        drop(response);
        response = soon(waiting).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_tenant_is_served_in_order() {
    let limiter = Limiter::in_memory();
    let scope = Scope::from(GPU).fair_by_header("x-tenant");
    let service = limiter
        .layer(scope)
        .unwrap()
        .layer(serve(Script::of([]).then_waits()));
    let mut response = send(&service, of_tenant("acme")).await;
    let mut waiting: Vec<_> = (0..5)
        .map(|_| task::spawn(service.clone().oneshot(of_tenant("acme"))))
        .collect();
    for call in &mut waiting {
        assert_pending!(call.poll());
    }
    while !waiting.is_empty() {
        drop(response);
        let first = waiting.remove(0);
        response = soon(first).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert!(waiting.iter_mut().all(|call| call.poll().is_pending()));
    }
}

/// Rules for tenants, each with a request that has a tenant and requests without.
fn rules() -> Vec<(Scope, Request<()>, Vec<Request<()>>)> {
    #[derive(Clone)]
    struct Account(String);

    let mut known = get("/");
    known.extensions_mut().insert(Account("acme".to_owned()));
    let mut nameless = get("/");
    nameless.extensions_mut().insert(Account(String::new()));
    let by_account =
        Scope::from(GPU).fair_by_key(|head| Some(Key::from(&head.extensions.get::<Account>()?.0)));
    let by_key =
        Scope::from(GPU).fair_by_key(|head| Some(head.extensions.get::<Account>()?.0.clone()));
    vec![
        (
            Scope::from(GPU).fair_by_header("x-tenant"),
            of_tenant("acme"),
            vec![get("/"), of_tenant("")],
        ),
        (
            GPU.by_key_async(|_| std::future::ready(Some("key")))
                .fair_by_header("x-tenant"),
            of_tenant("acme"),
            vec![get("/"), of_tenant("")],
        ),
        (by_account, known.clone(), vec![get("/"), nameless.clone()]),
        (by_key, known, vec![get("/"), nameless]),
    ]
}

#[tokio::test]
async fn a_required_tenant_is_required() {
    for (scope, named, others) in rules() {
        // Alone, and beside another limit.
        let all = Limit::concurrent("all", 5);
        let scope = scope.require_tenant();
        for policy in [
            Policy::from(&scope),
            (all.clone(), &scope).into(),
            (&scope, all).into(),
        ] {
            let limiter = Limiter::in_memory();
            let layer = limiter.layer(policy).unwrap();
            let service = layer.layer(serve(Script::of([]).then_waits()));
            for request in others.clone() {
                let response = send(&service, request).await;
                assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{scope:?}");
                let refusal = response.extensions().get::<Refusal>().expect("a refusal");
                assert_eq!(
                    (refusal.kind(), refusal.limit_name()),
                    (RefusalKind::NoKey, "gpu")
                );
                assert_eq!(response.headers().get(header::RETRY_AFTER), None);
                assert_eq!(held(&limiter), 0);
                let body = response.into_body().collect().await.unwrap().to_bytes();
                let problem: Value = serde_json::from_slice(&body).unwrap();
                assert_eq!(
                    problem["detail"],
                    "the request has no key or no tenant for this limit"
                );
            }
            let response = send(&service, named.clone()).await;
            assert_eq!(response.status(), StatusCode::OK, "{scope:?}");
        }
    }
}

#[tokio::test]
async fn a_grpc_client_without_a_tenant_is_told_that_its_request_is_invalid() {
    let layer = Limiter::in_memory()
        .layer(Scope::from(GPU).fair_by_header("x-tenant").require_tenant())
        .unwrap();
    let service = layer.layer(serve(Script::of([])));
    let call = || Request::post("/").header("content-type", "application/grpc");
    let response = send(&service, call().body(()).unwrap()).await;
    let status = Status::from_header_map(response.headers()).expect("a status");
    assert_eq!(status.code(), Code::InvalidArgument);
    // Metadata are headers.
    let named = call().header("x-tenant", "acme").body(()).unwrap();
    assert!(Status::from_header_map(send(&service, named).await.headers()).is_none());
}

#[tokio::test]
async fn a_limit_that_is_not_enforced_requires_no_tenant() {
    for mode in [Mode::Shadow, Mode::Off] {
        let limiter = Limiter::in_memory();
        let scope = Scope::from(GPU.mode(mode))
            .fair_by_header("x-tenant")
            .require_tenant();
        let service = limiter.layer(scope).unwrap().layer(serve(Script::of([])));
        assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
        limiter.update(&GPU.fair()).unwrap();
        let response = send(&service, get("/")).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    }
}

/// A required tenant does not imply a required key: without a key the request is not under the limit at all.
#[tokio::test]
async fn a_request_without_a_key_needs_no_tenant() {
    let scope = GPU
        .by_key(|_| None::<Key>)
        .fair_by_header("x-tenant")
        .require_tenant();
    let limiter = Limiter::in_memory();
    let service = limiter.layer(scope).unwrap().layer(serve(Script::of([])));
    assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
    assert_eq!(held(&limiter), 0);
}
