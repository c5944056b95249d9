//! Corner cases: paths that may lead to two routes, several faults at once, changes that fail.

use std::time::Duration;

use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt};
use tower_turnstile::{
    Key, Limit, Limiter,
    config::{Config, LiveConfig},
    layer::Limited,
};

use crate::support::{Script, get, held, send, serve};

fn config(text: &str) -> Config {
    Config::from_toml(text).unwrap()
}

fn live(config: &Config) -> LiveConfig {
    LiveConfig::new(config, &Limiter::in_memory()).unwrap()
}

fn serving(
    live: &LiveConfig,
) -> Limited<
    impl Service<Request<()>, Response = Response<Script>, Error: std::fmt::Debug, Future: Send>
    + Clone
    + use<>,
> {
    live.layer().layer(serve(Script::of([]).then_waits()))
}

#[tokio::test]
async fn no_spelling_leads_to_a_cheaper_route() {
    let live = live(&config(
        "
        limits.r = { concurrent = 1, key = 'route', overrides = { cheap = 1000 } }
        [[routes]]
        name = 'cheap'
        match = ['/cheap/{*rest}']
        limits = ['r']
        [[routes]]
        name = 'costly'
        match = ['/costly']
        limits = ['r']
        ",
    ));
    let service = serving(&live);
    let _first = send(&service, get("/costly")).await;
    assert_ne!(
        send(&service, get("/costly")).await.status(),
        StatusCode::OK
    );
    for path in [
        "/cheap/../costly",
        "/cheap/%2e%2e/costly",
        "/cheap/..%2Fcostly",
    ] {
        let status = send(&service, get(path)).await.status();
        assert_ne!(status, StatusCode::OK, "{path}");
    }
}

/// Under `at_shutdown` a response ends at a shutdown, regardless of its behaviour on a lost slot.
#[tokio::test]
async fn a_shutdown_ends_the_responses_of_a_route_that_says_so() {
    for (settings, ends) in [
        ("", false),
        ("at_shutdown = 'abort'", true),
        ("on_lost = 'abort'", true),
        ("on_lost = 'abort'\nat_shutdown = 'continue'", false),
    ] {
        let limiter = Limiter::in_memory();
        let text = format!(
            "
            limits.a = {{ concurrent = 1 }}
            [[routes]]
            match = ['/']
            limits = ['a']
            {settings}
            "
        );
        let live = LiveConfig::new(&config(&text), &limiter).unwrap();
        let service = live.layer().layer(serve(Script::of(["a"]).then_waits()));
        let mut body = send(&service, get("/")).await.into_body();
        limiter.shutdown(Duration::ZERO).await;
        let frame = body.frame().await.expect("a frame");
        assert_eq!(frame.is_err(), ends, "{settings}");
    }
}

/// An encoded pattern would be compared verbatim, and `/gr%c3%bcn` would bypass it.
#[test]
fn an_encoded_pattern_is_a_fault() {
    for pattern in ["/gr%C3%BCn", "/a\\b", "/chat?stream=true", "/chat#top"] {
        let text = format!(
            "limits.a.concurrent = 1\nroutes = [{{ match = ['{pattern}'], limits = ['a'] }}]"
        );
        assert!(Config::from_toml(&text).is_err(), "{pattern}");
    }
    let live = live(&config(
        "limits.a.concurrent = 1\nroutes = [{ match = ['/grün'], limits = ['a'] }]",
    ));
    let service = serving(&live);
    let _held = send(&service, get("/gr%C3%BCn")).now_or_never().unwrap();
    for path in ["/gr%C3%BCn", "/gr%c3%bcn", "/%67r%C3%BCn"] {
        let status = send(&service, get(path)).now_or_never().unwrap().status();
        assert_ne!(status, StatusCode::OK, "{path}");
    }
}

#[test]
fn all_faults_of_a_limit_are_reported() {
    let error =
        Config::from_toml("limits.a = { concurrent = 0, wait = '48h', max_waiters = 1000000000 }")
            .unwrap_err();
    assert_eq!(error.faults().len(), 3, "{error}");
}

#[test]
fn faults_are_reported_where_they_are() {
    let error = Config::from_toml(
        "limits.a = { rate = 5, per = '0s', burst = 3, overrides = { k = 3 }, key.header='x' }",
    )
    .unwrap_err();
    assert!(error.to_string().starts_with("limits.a.per: "), "{error}");
    let error = Config::from_toml("limits.a = { rate = 0, per = '1s', burst = 3 }").unwrap_err();
    assert!(error.to_string().starts_with("limits.a.rate: "), "{error}");
}

#[tokio::test]
async fn a_change_that_fails_admits_no_request() {
    let text =
        "limits.a = { concurrent = 1, wait = '10s' }\nroutes = [{ match = ['/'], limits = ['a'] }]";
    let live = live(&config(text));
    let mut service = serving(&live);
    let _first = send(&service, get("/")).await;
    let mut second = task::spawn(service.ready().await.unwrap().call(get("/")));
    assert_pending!(second.poll());
    let _theirs = live
        .limiter()
        .semaphore(Limit::concurrent("b", 1), Key::SHARED)
        .unwrap();
    let text = "
        limits = { a = { concurrent = 2, wait = '10s' }, b.concurrent = 2 }
        routes = [{ match = ['/'], limits = ['a', 'b'] }]
    ";
    live.reload(&config(text)).unwrap_err();
    assert!(!second.is_woken());
    assert_eq!(held(live.limiter()), 1);
}

#[tokio::test]
async fn a_limit_taken_before_a_reload_serves_after_it() {
    let text = "unlimited = true\nlimits.a = { concurrent = 1, unrouted = true }";
    let live = live(&config(text));
    let limit = live.limit("a").unwrap();
    live.reload(&config(&text.replace('1', "2"))).unwrap();
    live.limiter().semaphore(&limit, "tenant").unwrap();
}

#[test]
fn no_caller_is_in_two_plans_by_another_spelling() {
    let text = "
        [plans.gold]
        keys = ['2001:db8::1']
        [plans.silver]
        keys = ['2001:db8::2']
        [limits.a]
        concurrent = 1
        key = 'client-address'
        plans = { gold = 20, silver = 10 }
    ";
    Config::from_toml(text).unwrap_err();
}

#[test]
fn routes_of_one_name_are_a_fault() {
    let text = "
        limits.a = { concurrent = 1, key = 'route' }
        [[routes]]
        name = '/b'
        match = ['/a']
        limits = ['a']
        [[routes]]
        match = ['/b']
        limits = ['a']
    ";
    Config::from_toml(text).unwrap_err();
}
