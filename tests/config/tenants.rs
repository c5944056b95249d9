//! Fair limits of a file: their tenants and shares. What is faulty: `faults.rs`.

use std::time::Duration;

use http::{Request, StatusCode};
use tower::Layer;
use tower_turnstile::{
    AcquireErrorKind, Key, Limit, Limiter, PeerAddress, Refusal, RefusalKind, Scope,
    config::{Config, LiveConfig},
};

use crate::support::{Script, get, send, serve};

const ROUTE: &str = "routes = [{ match = ['*'], limits = ['gpu'] }]";

fn config(fields: &str) -> Config {
    let text = format!(
        "plans.gold.keys = ['gold-1', 'gold-2', '10.0.0.1']
        limits.gpu = {{ concurrent = 1, wait = '1s', {fields} }}
        {ROUTE}"
    );
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The source of tenants.
fn fair(value: &str) -> Option<String> {
    let config = config(&format!("fair = {value}"));
    config.limits["gpu"].tenant_source()
}

fn live(config: &Config) -> LiveConfig {
    LiveConfig::new(config, &Limiter::in_memory()).expect("valid")
}

fn request(headers: &[(&str, &str)]) -> Request<()> {
    let add = |request: http::request::Builder, (name, value): &(&str, &str)| {
        request.header(*name, *value)
    };
    let request = headers.iter().fold(Request::get("/"), add);
    let mut request = request.body(()).unwrap();
    let peer = PeerAddress(([10, 0, 0, 1], 9).into());
    request.extensions_mut().insert(peer);
    request
}

/// The tenant of a request, and its share.
fn tenant(config: &Config, headers: &[(&str, &str)]) -> (String, Option<u32>) {
    let (head, ()) = request(headers).into_parts();
    let preview = config.preview(&head).expect("valid");
    let limit = &preview.limits[0];
    let tenant = limit.tenant.as_ref().map_or("-", |tenant| tenant.as_str());
    (tenant.to_owned(), limit.share)
}

#[test]
fn a_word_and_a_table_read_as_they_say() {
    assert_eq!(fair("false"), None);
    assert_eq!(fair("true").as_deref(), Some("(tenants in code)"));
    let table = "{ by = { header = 'x-tenant' }, shares = { acme = 3 }, plans = { gold = 1_000 } }";
    assert_eq!(fair(table).as_deref(), Some("x-tenant"));
    let bearer = fair("{ by = { any_of = [{ bearer = 'authorization' }] } }");
    assert_eq!(bearer.as_deref(), Some("authorization (bearer)"));
    let limit = &config("require_key = false").limits["gpu"];
    assert_eq!((limit.tenant_source(), limit.require_tenant), (None, false));
}

#[test]
fn a_request_has_its_tenant_and_its_share() {
    let shares = "shares = { acme = 3, gold-1 = 7 }, plans = { gold = 5 }";
    let file = |by: &str| config(&format!("fair = {{ by = {by}, {shares} }}"));
    let header = file("{ header = 'x-tenant' }");
    for (value, share) in [("acme", 3), ("gold-1", 7), ("gold-2", 5), ("other", 1)] {
        let found = tenant(&header, &[("x-tenant", value)]);
        assert_eq!(found, (value.to_owned(), Some(share)));
    }
    let none = ("-".to_owned(), Some(1));
    assert_eq!(tenant(&header, &[]), none);
    assert_eq!(tenant(&header, &[("x-tenant", "")]), none);
    let first = tenant(&header, &[("x-tenant", "acme"), ("x-tenant", "gold-1")]);
    assert_eq!(first, ("acme".to_owned(), Some(3)));

    let acme = ("acme".to_owned(), Some(3));
    let bearer = file("{ bearer = 'authorization' }");
    assert_eq!(tenant(&bearer, &[("authorization", "bearer acme")]), acme);
    assert_eq!(tenant(&bearer, &[("authorization", "acme")]), none);
    let either = file("{ any_of = [{ bearer = 'authorization' }, { header = 'x-api-key' }] }");
    assert_eq!(tenant(&either, &[("x-api-key", "acme")]), acme);
    let both = [("x-api-key", "gold-2"), ("authorization", "Bearer acme")];
    assert_eq!(tenant(&either, &both), acme);

    let by_peer = "fair = { by = 'client-address', shares = { '10.0.0.1' = 4 } }";
    assert_eq!(
        tenant(&config(by_peer), &[]),
        ("10.0.0.1".to_owned(), Some(4))
    );
    let of_plan =
        "fair = { by = 'client-address', plans = { gold = 4 } }, key = { header = 'x-key' }";
    let text = format!(
        "plans.gold.keys = ['10.0.0.1']\nlimits.gpu = {{ concurrent = 1, wait = '1s', {of_plan} }}\n{ROUTE}"
    );
    let of_plan = Config::from_toml(&text).unwrap();
    assert_eq!(tenant(&of_plan, &[]), ("10.0.0.1".to_owned(), Some(4)));

    assert_eq!(
        tenant(&config("fair = true"), &[("x-tenant", "acme")]),
        none
    );
    let plain = config("fair = false");
    assert_eq!(
        tenant(&plain, &[("x-tenant", "acme")]),
        ("-".to_owned(), None)
    );
}

#[tokio::test]
async fn a_required_tenant_is_required() {
    let text = "fair = { by = { header = 'x-tenant' } }, require_tenant = ";
    let status = async |fields: &str, headers: &[(&str, &str)]| {
        let config = config(fields);
        let (head, ()) = request(headers).into_parts();
        let preview = config.preview(&head).unwrap().limits[0].refusal;
        let service = live(&config).layer().layer(serve(Script::of([])));
        let response = send(&service, request(headers)).await;
        let refusal = response.extensions().get::<Refusal>();
        assert_eq!(preview, refusal.map(Refusal::kind));
        response.status()
    };
    let strict = format!("{text} true");
    assert_eq!(status(&strict, &[]).await, StatusCode::BAD_REQUEST);
    assert_eq!(
        status(&strict, &[("x-tenant", "")]).await,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(status(&strict, &[("x-tenant", "a")]).await, StatusCode::OK);
    assert_eq!(status(&format!("{text} false"), &[]).await, StatusCode::OK);
    let tried = format!("{strict}, mode = 'shadow'");
    assert_eq!(status(&tried, &[]).await, StatusCode::OK);
}

#[tokio::test]
async fn a_job_has_a_tenant_and_its_share() {
    let fields = "fair = { by = { header = 'x-tenant' }, shares = { acme = 3 } }";
    let live = live(&config(fields));
    let gpu = live.limit("gpu").unwrap();
    for tenant in ["acme", "other", ""] {
        let job = live.tenant_semaphore(&gpu, "", tenant).unwrap();
        drop(job.acquire().await.unwrap());
    }
    // A limit of the file may be used without a wait, and by tenants of code.
    let hasty = gpu.clone().wait_up_to(Duration::ZERO);
    let job = live.tenant_semaphore(&hasty, "", "acme").unwrap();
    let _permit = job.acquire().await.unwrap();
    let again = live
        .semaphore(&hasty, "")
        .unwrap()
        .tenant("own")
        .unwrap()
        .share(5)
        .unwrap();
    let error = again.acquire().await.unwrap_err();
    assert_eq!(error.kind(), AcquireErrorKind::Full);
    let in_code = live
        .limiter()
        .layer(
            Scope::from(hasty)
                .fair_by_header("x-other")
                .shares([("a", 2)]),
        )
        .unwrap();
    let refused = send(&in_code.layer(serve(Script::of([]))), get("/")).await;
    let refusal = refused.extensions().get::<Refusal>().expect("a refusal");
    assert_eq!(refusal.kind(), RefusalKind::Full);
}

#[tokio::test]
async fn a_tenant_that_the_limit_cannot_have_is_a_fault() {
    let by = |by: &str| format!("fair = {{ by = {by} }}");
    let strict = format!("{}, require_tenant = true", by("{ header = 'x-tenant' }"));
    for (fields, tenant, fault) in [
        ("mode = 'enforce'", "acme", "limits.gpu.fair: is not set"),
        (&strict, "", "limits.gpu.fair: requires a tenant"),
        (
            &by("'client-address'"),
            "acme",
            "limits.gpu.fair: is no IP address",
        ),
        (&strict, "acme", ""),
        (&by("'client-address'"), "10.0.0.1", ""),
        ("fair = true", "acme", ""),
    ] {
        let live = live(&config(fields));
        let gpu = live.limit("gpu").unwrap();
        let outcome = live.tenant_semaphore(&gpu, "", tenant).err();
        let text = outcome.map_or_else(String::new, |error| error.to_string());
        assert!(
            text.starts_with(fault) && fault.is_empty() == text.is_empty(),
            "{text}"
        );
    }
    let live = live(&config("fair = true"));
    let other = Limit::concurrent("other", 1);
    let error = live.tenant_semaphore(&other, "", "acme").unwrap_err();
    assert_eq!(error.to_string(), "limits.other: there is no such limit");
}

#[tokio::test]
async fn a_reload_changes_tenants_and_shares() {
    let by = |header: &str, more: &str| {
        config(&format!(
            "fair = {{ by = {{ header = '{header}' }}, shares = {{ acme = 3 }} }}{more}"
        ))
    };
    let live = live(&by("x-tenant", ""));
    let service = live.layer().layer(serve(Script::of([])));
    let status = async |headers: &[(&str, &str)]| send(&service, request(headers)).await.status();
    assert_eq!(status(&[]).await, StatusCode::OK);
    live.reload(&by("x-tenant", ", require_tenant = true"))
        .unwrap();
    assert_eq!(status(&[]).await, StatusCode::BAD_REQUEST);
    assert_eq!(status(&[("x-tenant", "acme")]).await, StatusCode::OK);
    live.reload(&by("x-account", ", require_tenant = true"))
        .unwrap();
    assert_eq!(
        status(&[("x-tenant", "acme")]).await,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(status(&[("x-account", "acme")]).await, StatusCode::OK);
    live.reload(&config("fair = true")).unwrap();
    assert_eq!(status(&[]).await, StatusCode::OK);
    // A limit in code of the same name follows.
    let semaphore = live
        .limiter()
        .semaphore(live.limit("gpu").unwrap(), Key::SHARED)
        .unwrap();
    drop(semaphore.tenant("acme").unwrap().acquire().await.unwrap());
}

#[test]
fn a_reload_cannot_change_fairness() {
    let (plain, fair) = (config("fair = false"), config("fair = true"));
    for (before, after) in [(&plain, &fair), (&fair, &plain)] {
        let live = live(before);
        let error = live.reload(after).unwrap_err();
        assert_eq!(
            error.to_string(),
            "limits.gpu: the fairness of limit `gpu` cannot change while it is in use"
        );
        live.reload(before).unwrap();
    }
}

#[test]
fn tenants_are_not_shown() {
    let fields = "fair = { by = { header = 'x-tenant' }, shares = { s3cret = 3 } }";
    let config = config(fields);
    assert!(!format!("{config:?}").contains("s3cret"));
    let live = live(&config);
    assert!(!format!("{live:?} {:?}", live.layer()).contains("s3cret"));
}
