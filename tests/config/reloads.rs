//! The effects of a reload, and the state that it preserves.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    thread,
    time::Duration,
};

use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt};
use tower_turnstile::{
    Class, ConfigErrorKind, Fallback, Key, Limit, Limiter, Mode,
    config::{Config, LiveConfig},
    layer::Limited,
};

use crate::support::{Script, get, held, send, serve};

const SECOND: Duration = Duration::from_secs(1);

fn config(text: &str) -> Config {
    Config::from_toml(text).unwrap()
}

/// One limit `a`, with a wait, on `/`.
fn of(max: u32) -> Config {
    config(&format!(
        "limits.a = {{ concurrent = {max}, wait = '10s' }}
        routes = [{{ match = ['/'], limits = ['a'] }}]"
    ))
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
async fn a_higher_limit_lets_waiters_in_at_once() {
    let live = live(&of(1));
    let mut service = serving(&live);
    let _first = send(&service, get("/")).await;
    let mut second = task::spawn(service.ready().await.unwrap().call(get("/")));
    assert_pending!(second.poll());
    live.reload(&of(2)).unwrap();
    assert!(second.is_woken());
    let second = assert_ready!(second.poll()).unwrap();
    assert_eq!(second.status(), StatusCode::OK);
    assert_eq!(held(live.limiter()), 2);
}

#[tokio::test]
async fn a_lower_limit_takes_no_slot_away() {
    let live = live(&of(2));
    let mut service = serving(&live);
    let first = send(&service, get("/")).await;
    let second = send(&service, get("/")).await;
    live.reload(&of(1)).unwrap();
    assert_eq!(held(live.limiter()), 2);
    let mut third = task::spawn(service.ready().await.unwrap().call(get("/")));
    drop(first);
    assert_pending!(third.poll());
    drop(second);
    assert_ready!(third.poll()).unwrap();
}

#[tokio::test]
async fn held_slots_count_under_the_new_routes() {
    let text = "limits.a.concurrent = 1\nroutes = [{ match = ['/old'], limits = ['a'] }]";
    let live = live(&config(text));
    let service = serving(&live);
    let old = send(&service, get("/old")).await;
    assert_eq!(send(&service, get("/new")).await.status(), StatusCode::OK);
    live.reload(&config(&text.replace("/old", "/new"))).unwrap();
    assert_eq!(
        send(&service, get("/new")).await.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(send(&service, get("/old")).await.status(), StatusCode::OK);
    drop(old);
    assert_eq!(send(&service, get("/new")).await.status(), StatusCode::OK);
}

/// One limit by header, on one route.
fn with_overrides(max: u32, overrides: &str) -> Config {
    config(&format!(
        "limits.a = {{ concurrent = {max}, key.header = 'x', wait = '10s', overrides = {{ {overrides} }} }}
        routes = [{{ match = ['/'], limits = ['a'] }}]"
    ))
}

/// Neither the old nor the new configuration admits more than two of them.
#[tokio::test]
async fn a_limit_that_grows_does_not_let_in_waiters_of_a_key_that_gets_less() {
    let live = live(&with_overrides(2, ""));
    let mut service = serving(&live);
    let request = || Request::get("/").header("x", "k").body(()).unwrap();
    let _held = (
        send(&service, request()).await,
        send(&service, request()).await,
    );
    let mut third = task::spawn(service.ready().await.unwrap().call(request()));
    assert_pending!(third.poll());
    live.reload(&with_overrides(50, "k = 1")).unwrap();
    assert_pending!(third.poll());
    assert_eq!(held(live.limiter()), 2);
    // After a reload that fails, its old value is in force.
    let shares_its_name = Limit::concurrent("b", 1);
    live.limiter().semaphore(&shares_its_name, "").unwrap();
    let other = format!("{}limits.b = {{ rate = 1, per = '1s' }}", of_b());
    live.reload(&config(&other)).unwrap_err();
    assert_pending!(third.poll());
    live.reload(&with_overrides(50, "")).unwrap();
    assert_ready!(third.poll()).unwrap();
}

/// The other way round: neither configuration admits more than two of them.
#[tokio::test]
async fn a_limit_that_shrinks_does_not_let_in_waiters_of_a_key_that_had_less() {
    let live = live(&with_overrides(50, "k = 2"));
    let mut service = serving(&live);
    let request = || Request::get("/").header("x", "k").body(()).unwrap();
    let _held = (
        send(&service, request()).await,
        send(&service, request()).await,
    );
    let mut third = task::spawn(service.ready().await.unwrap().call(request()));
    assert_pending!(third.poll());
    live.reload(&with_overrides(2, "")).unwrap();
    assert_pending!(third.poll());
    assert_eq!(held(live.limiter()), 2);
    live.reload(&with_overrides(3, "")).unwrap();
    assert_ready!(third.poll()).unwrap();
}

/// As above, with a value of `k` that would admit the third request, and a limit `b` on another route.
fn of_b() -> String {
    "limits.a = { concurrent = 50, key.header = 'x', wait = '10s', overrides = { k = 9 } }
    routes = [{ match = ['/'], limits = ['a'] }, { match = ['/b'], limits = ['b'] }]
    "
    .to_owned()
}

#[tokio::test]
async fn waiters_of_a_key_without_slots_are_refused() {
    let live = live(&with_overrides(1, "k = 1"));
    let mut service = serving(&live);
    let request = |key| Request::get("/").header("x", key).body(()).unwrap();
    let held = (
        send(&service, request("k")).await,
        send(&service, request("other")).await,
    );
    let mut one = task::spawn(service.ready().await.unwrap().call(request("k")));
    let mut other = task::spawn(service.ready().await.unwrap().call(request("other")));
    assert_pending!(one.poll());
    assert_pending!(other.poll());
    live.reload(&with_overrides(1, "k = 0")).unwrap();
    assert!(one.is_woken() && !other.is_woken());
    let refused = assert_ready!(one.poll()).unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_pending!(other.poll());
    // A held slot is not lost.
    assert_eq!(self::held(live.limiter()), 2);
    drop(held);
}

#[tokio::test]
async fn one_callers_new_value_acts_at_once() {
    let text = "
        limits.a = { concurrent = 1, key.header = 'x', overrides = { k = 1 }, wait = '10s' }
        routes = [{ match = ['/'], limits = ['a'] }]
    ";
    let live = live(&config(text));
    let mut service = serving(&live);
    let request = |key| Request::get("/").header("x", key).body(()).unwrap();
    let _held = (
        send(&service, request("k")).await,
        send(&service, request("other")).await,
    );
    let mut one = task::spawn(service.ready().await.unwrap().call(request("k")));
    let mut other = task::spawn(service.ready().await.unwrap().call(request("other")));
    assert_pending!(one.poll());
    assert_pending!(other.poll());
    live.reload(&config(&text.replace("k = 1", "k = 2")))
        .unwrap();
    assert!(one.is_woken() && !other.is_woken());
    assert_eq!(assert_ready!(one.poll()).unwrap().status(), StatusCode::OK);
    // A removed override falls back to the limit's value.
    let without = text
        .replace("overrides = { k = 1 }, ", "")
        .replace("concurrent = 1", "concurrent = 3");
    live.reload(&config(&without)).unwrap();
    assert_eq!(
        assert_ready!(other.poll()).unwrap().status(),
        StatusCode::OK
    );
    assert_eq!(send(&service, request("k")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_limit_can_be_tried_and_then_enforced() {
    let text = "
        limits.a = { concurrent = 1, mode = 'shadow' }
        routes = [{ match = ['/'], limits = ['a'] }]
    ";
    let live = live(&config(text));
    let service = serving(&live);
    let _first = send(&service, get("/")).await;
    assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
    live.reload(&config(&text.replace("shadow", "enforce")))
        .unwrap();
    assert_eq!(
        send(&service, get("/")).await.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
}

#[tokio::test]
async fn a_limit_can_go_and_come_back_otherwise() {
    let live = live(&of(1));
    let service = serving(&live);
    let _first = send(&service, get("/")).await;
    live.reload(&config("unlimited = true")).unwrap();
    assert_eq!(live.limit("a"), None);
    assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
    live.reload(&of(2)).unwrap();
    let _second = send(&service, get("/")).await;
    assert_eq!(held(live.limiter()), 2);
    assert!(service.clone().oneshot(get("/")).now_or_never().is_none());
}

#[tokio::test]
async fn a_forbidden_change_is_reported_and_nothing_changes() {
    let live = live(&of(1));
    let service = serving(&live);
    let _first = send(&service, get("/")).await;
    for (text, faults) in [
        (
            "store.lease = '10s'\nlimits.a = { rate = 2, per = '1s' }\nroutes = [{ match = ['*'], limits = ['a'] }]",
            "store: cannot change while it is in use: start the service anew
limits.a: limit `a` cannot change between concurrent and rate while it is in use",
        ),
        (
            "limits.a = { concurrent = 2, class = 'tenant' }\nroutes = [{ match = ['*'], limits = ['a'] }]",
            "limits.a: the class of limit `a` cannot change while it is in use",
        ),
        (
            "limits.a.concurrent = 2\nroutes = [{ match = ['*'], limits = ['b'] }]",
            "routes[0].limits[0]: there is no limit `b`",
        ),
    ] {
        // `from_toml` would find some of these faults earlier.
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(live.reload(&config).unwrap_err().to_string(), faults);
        assert_eq!(live.limit("a").unwrap().max(), 1);
        assert!(service.clone().oneshot(get("/")).now_or_never().is_none());
    }
}

#[test]
fn a_key_by_route_is_of_a_class_of_its_own() {
    let of = |key: &str| {
        let route = "routes = [{ match = ['/'], limits = ['a'] }]";
        config(&format!("limits.a = {{ concurrent = 1, {key} }}\n{route}"))
    };
    let live = live(&of("key = 'route'"));
    let error = live.reload(&of("key.header = 'x'")).unwrap_err();
    assert!(error.to_string().contains("the class of limit"), "{error}");
    live.reload(&of("key.header = 'x', class = 'route'"))
        .unwrap();
}

/// The limiter refuses the second limit after the first already has its new value.
#[tokio::test]
async fn a_change_that_fails_half_way_is_taken_back() {
    let live = live(&of(1));
    let service = serving(&live);
    let _first = send(&service, get("/")).await;
    let _theirs = live
        .limiter()
        .semaphore(Limit::concurrent("b", 1), Key::SHARED)
        .unwrap();
    let text = "
        limits = { a = { concurrent = 2, wait = '10s' }, b.concurrent = 2 }
        routes = [{ match = ['/'], limits = ['a', 'b'] }]
    ";
    let error = live.reload(&config(text)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "limits.b: two limits are named `b` and have different values: \
         value 1 and 2, fallback Local(1) and Local(2)"
    );
    assert_eq!(live.limit("a").unwrap().max(), 1);
    assert!(service.clone().oneshot(get("/")).now_or_never().is_none());
    live.reload(&of(2)).unwrap();
    assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn what_the_program_has_set_stays() {
    let live = live(&config("unlimited = true"));
    let layer = live.layer().limited_status(StatusCode::IM_A_TEAPOT);
    let service = layer.layer(serve(Script::of([]).then_waits()));
    live.reload(&config(
        "limits.a.concurrent = 1\nroutes = [{ match = ['*'], limits = ['a'] }]",
    ))
    .unwrap();
    let _first = send(&service, get("/")).await;
    assert_eq!(
        send(&service, get("/")).await.status(),
        StatusCode::IM_A_TEAPOT
    );
    let other = serving(&live);
    assert_eq!(
        send(&other, get("/")).await.status(),
        StatusCode::IM_A_TEAPOT
    );
}

#[tokio::test]
async fn the_named_limit_serves_without_http() {
    let live = live(&of(1));
    let permit = live
        .limiter()
        .semaphore(live.limit("a").unwrap(), Key::SHARED)
        .unwrap()
        .acquire()
        .await;
    let service = serving(&live);
    assert!(service.clone().oneshot(get("/")).now_or_never().is_none());
    drop(permit);
    assert_eq!(send(&service, get("/")).await.status(), StatusCode::OK);
}

/// Taken before two reloads: neither the first values of the limit nor its last.
#[tokio::test]
async fn a_limit_that_was_taken_stays_valid_over_reloads() {
    let live = live(&of(1));
    live.reload(&of(2)).unwrap();
    let taken = live.limit("a").unwrap();
    assert_eq!(taken.max(), 2);
    live.reload(&of(3)).unwrap();
    let limiter = live.limiter();
    let semaphore = limiter.semaphore(&taken, Key::SHARED).unwrap();
    let layer = limiter.layer(taken.wait_up_to(SECOND)).unwrap();
    // Both semaphores follow the latest values.
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(semaphore.acquire().await.unwrap());
    }
    let service = layer.layer(serve(Script::of([])));
    assert!(service.oneshot(get("/")).now_or_never().is_none());
    // A semaphore's limit is valid for another semaphore, too.
    live.reload(&of(4)).unwrap();
    limiter.semaphore(semaphore.limit(), "other").unwrap();
}

/// A handler takes a limit and registers it, as shown in the guide, at any moment of a reload.
#[test]
fn limits_are_taken_and_registered_while_reloads_run() {
    const RELOADS: u32 = 2_000;
    let live = live(&of(1));
    let (ended, calls) = (AtomicBool::new(false), AtomicU32::new(0));
    let register = || {
        while !ended.load(Relaxed) {
            let limit = live.limit("a").unwrap();
            let semaphore = live.limiter().semaphore(&limit, Key::SHARED);
            let layer = live.limiter().layer(limit);
            semaphore.map(drop).and(layer.map(drop)).unwrap();
            calls.fetch_add(1, Relaxed);
        }
    };
    thread::scope(|scope| {
        let handlers = [scope.spawn(register), scope.spawn(register)];
        for number in 0..RELOADS {
            live.reload(&of(number % 97 + 2)).unwrap();
            // Each handler gets some turns.
            while calls.load(Relaxed) <= number && !handlers.iter().any(|one| one.is_finished()) {
                thread::yield_now();
            }
        }
        ended.store(true, Relaxed);
    });
    assert!(calls.load(Relaxed) >= RELOADS);
}

/// A reload does not touch values of single keys set by code.
#[tokio::test]
async fn a_reload_leaves_the_programs_own_values_alone() {
    let text = "
        unlimited = true
        limits.a = { concurrent = 1, unrouted = true }
        limits.b = { concurrent = 1, unrouted = true }
    ";
    let live = live(&config(text));
    let limit = live.limit("a").unwrap().wait_up_to(SECOND);
    let semaphore = live
        .limiter()
        .semaphore(limit, "k")
        .unwrap()
        .value(2)
        .unwrap();
    let (one, _two) = (semaphore.acquire().await, semaphore.acquire().await);
    let mut third = task::spawn(semaphore.acquire());
    assert_pending!(third.poll());
    live.reload(&config(
        &text.replace("b = { concurrent = 1", "b = { concurrent = 2"),
    ))
    .unwrap();
    drop(one);
    let _third = assert_ready!(third.poll()).unwrap();
}

/// Two limits that change together, observed by one reader.
#[test]
fn limits_are_taken_from_one_configuration() {
    const RELOADS: u32 = 2_000;
    let of = |max: u32| {
        config(&format!(
            "unlimited = true
            limits.a = {{ concurrent = {max}, unrouted = true }}
            limits.b = {{ concurrent = {max}, unrouted = true }}"
        ))
    };
    let live = live(&of(1));
    assert_eq!(live.limits(["a", "c"]), None);
    let (ended, calls) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !ended.load(Relaxed) {
                let [a, b] = live.limits(["a", "b"]).unwrap();
                assert_eq!(a.max(), b.max());
                calls.fetch_add(1, Relaxed);
            }
        });
        for number in 0..RELOADS {
            live.reload(&of(number % 97 + 2)).unwrap();
            while calls.load(Relaxed) <= number && !reader.is_finished() {
                thread::yield_now();
            }
        }
        ended.store(true, Relaxed);
    });
    assert!(calls.load(Relaxed) >= RELOADS);
}

/// A limit derived in code is independent, and so is a limit at another limiter.
#[test]
fn a_limit_that_code_has_changed_is_compared() {
    let text = "
        unlimited = true
        limits.a = { concurrent = 1, unrouted = true }
        limits.rate = { rate = 1, per = '1s', unrouted = true }
    ";
    let live = live(&config(text));
    let limit = live.limit("a").unwrap();
    for changed in [
        live.limit("rate").unwrap().burst(7),
        limit.clone().max_waiters(7),
        limit.clone().mode(Mode::Off),
        limit.clone().fallback(Fallback::Allow),
        limit.clone().fallback_for(SECOND),
        limit.clone().reuse(),
        limit.clone().class(Class::Tenant),
    ] {
        let error = live.limiter().semaphore(changed, "k").unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::Conflict);
    }
    let other = Limiter::in_memory();
    let _theirs = other.semaphore(Limit::concurrent("a", 5), "k").unwrap();
    let error = other.semaphore(&limit, "k").unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Conflict);
    let error = live
        .limiter()
        .semaphore(limit.wait_up_to(Limit::MAX_WAIT + SECOND), "k")
        .unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Value);
}

/// A file that does not fit has no effect.
#[test]
fn a_file_meets_the_limits_of_code() {
    let limiter = Limiter::in_memory();
    let _jobs = limiter.semaphore(Limit::concurrent("jobs", 5), "").unwrap();
    let file = |jobs: u32, other: u32| {
        config(&format!(
            "unlimited = true
            limits.a = {{ concurrent = {other}, unrouted = true }}
            limits.jobs = {{ concurrent = {jobs}, unrouted = true }}"
        ))
    };
    LiveConfig::new(&file(6, 1), &limiter).unwrap_err();
    let live = LiveConfig::new(&file(5, 2), &limiter).unwrap();
    assert_eq!(live.limit("a").unwrap().max(), 2);
}
