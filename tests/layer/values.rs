//! Values of a limit for single keys, and where they come from.

use std::{
    future::{Future, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::{runtime::Handle, sync::Semaphore, time::sleep};
use tokio_test::{assert_pending, task};
use tower::{Layer, ServiceExt};
use tower_turnstile::{ConfigErrorKind, Key, Limit, LimitValue, Limiter, Policy, Refusal, Scope};

use crate::{
    servers::until,
    support::{GUARD, ONE, Script, get, held, send, serve, soon},
};

const FRESH: Duration = Duration::from_secs(60);

fn with_key(key: &str) -> Request<()> {
    Request::get("/").header("x-key", key).body(()).unwrap()
}

fn endless() -> Script {
    Script::of([]).then_waits()
}

/// How many of ten requests with this key are admitted at once, and the limit's value reported to the others.
async fn admitted(policy: impl Into<Policy>, request: impl Fn() -> Request<()>) -> (usize, u32) {
    let service = Limiter::in_memory()
        .layer(policy)
        .unwrap()
        .layer(serve(endless()));
    let (mut responses, mut max) = (Vec::new(), 0);
    for _ in 0..10 {
        let response = send(&service, request()).await;
        match response.extensions().get::<Refusal>() {
            Some(refusal) => max = refusal.max(),
            None => responses.push(response),
        }
    }
    (responses.len(), max)
}

#[tokio::test]
async fn table_names_single_keys() {
    let scope = ONE.by_header("x-key").values([("gold", 3), ("none", 0)]);
    for (key, value) in [("gold", 3), ("none", 0), ("other", 1)] {
        let (count, max) = admitted(scope.clone(), || with_key(key)).await;
        assert_eq!((count, max), (value, value as u32), "{key}");
    }
}

#[tokio::test]
async fn closure_sees_the_key_and_the_head() {
    #[derive(Clone)]
    struct Plan(u32);

    let scope = ONE
        .by_header("x-key")
        .values_by(|head, key| match head.uri.path() {
            "/two" => Some(2),
            _ if *key == Key::from("gold") => Some(4),
            _ => Some(head.extensions.get::<Plan>()?.0),
        });
    assert_eq!(admitted(scope.clone(), || get("/two")).await.0, 2);
    assert_eq!(admitted(scope.clone(), || get("/")).await.0, 1);
    assert_eq!(admitted(scope.clone(), || with_key("gold")).await.0, 4);
    let with_plan = || {
        let mut request = get("/");
        request.extensions_mut().insert(Plan(7));
        request
    };
    assert_eq!(admitted(scope.clone(), with_plan).await, (7, 7));
    // The table takes precedence.
    let both = scope.values([("gold", 3)]);
    assert_eq!(admitted(both, || with_key("gold")).await.0, 3);
}

#[tokio::test]
async fn key_that_is_found_later_has_its_value() {
    let later = |limit: Limit| limit.by_key_async(|_| ready(Some("gold")));
    let paths = later(ONE).values_by(|head, _| head.uri.path()[1..].parse::<u32>().ok());
    assert_eq!(admitted(paths, || get("/5")).await.0, 5);
    assert_eq!(
        admitted(later(ONE).values([("gold", 2)]), || get("/"))
            .await
            .0,
        2
    );
    let looked_up = later(ONE).values_by_async(10, FRESH, |head, _| {
        ready(head.uri.path()[1..].parse::<u32>().ok())
    });
    assert_eq!(admitted(looked_up, || get("/6")).await.0, 6);
}

#[tokio::test]
async fn each_scope_of_a_policy_has_its_own() {
    let two = Limit::concurrent("two", 2);
    let scopes = || -> [Scope; 2] {
        let one = ONE
            .by_header("x-key")
            .values_by_async(10, FRESH, |_, _| ready(Some(9)));
        [one, two.clone().by_header("x-key").values([("gold", 4)])]
    };
    assert_eq!(admitted(scopes(), || with_key("gold")).await, (4, 4));
    assert_eq!(admitted(scopes(), || with_key("other")).await, (2, 2));
}

#[tokio::test]
async fn rate_has_values_too() {
    let opens = Limit::rate("opens", 2, Duration::from_secs(3600));
    let scope = opens.by_header("x-key").values([("gold", 5)]);
    let scope = scope.values_by(|_, key| (*key == Key::from("none")).then_some(0));
    assert_eq!(admitted(scope.clone(), || with_key("gold")).await, (5, 5));
    assert_eq!(admitted(scope.clone(), || with_key("other")).await, (2, 2));
    assert_eq!(admitted(scope, || with_key("none")).await, (1, 1));
}

/// A value without a burst uses the limit's burst, or itself if none is declared.
#[tokio::test]
async fn a_value_may_have_a_burst() {
    let gold = LimitValue::new(5).burst(3);
    let opens = Limit::rate("opens", 2, Duration::from_secs(3600));
    for (limit, number) in [(opens.clone(), 5), (opens.burst(1), 1)] {
        let scope = limit.by_header("x-key");
        let scope = scope.values([("gold", gold), ("number", 5.into())]);
        let scope = scope
            .values_by(|_, key| (*key == Key::from("none")).then_some(LimitValue::new(5).burst(0)));
        for (key, count) in [("gold", 3), ("number", number), ("none", 1)] {
            assert_eq!(
                admitted(scope.clone(), || with_key(key)).await,
                (count, 5),
                "{key}"
            );
        }
    }
    // Slots do not have bursts.
    let scope = ONE.by_header("x-key").values_by(move |_, _| Some(gold));
    assert_eq!(admitted(scope, || with_key("a")).await, (5, 5));
}

#[test]
fn values_out_of_range_are_errors() {
    let limiter = Limiter::in_memory();
    let rate = Limit::rate("opens", 2, Duration::from_secs(3600));
    let value = LimitValue::new;
    for (limit, value, fault) in [
        (&rate, value(0), "value of 0: it must be 1 to"),
        (&rate, value(1), ""),
        (
            &rate,
            value(u32::MAX),
            "value of 4294967295: it must be 1 to",
        ),
        (&rate, value(5).burst(0), "burst of 0: it must be 1 to"),
        (&rate, value(5).burst(1), ""),
        (
            &rate,
            value(5).burst(u32::MAX),
            "burst of 4294967295: it must be 1 to",
        ),
        (&rate, value(0).burst(1), "value of 0: it must be 1 to"),
        (&ONE, value(0), ""),
        (
            &ONE,
            value(u32::MAX),
            "value of 4294967295: it must be 0 to",
        ),
        (
            &ONE,
            value(5).burst(1),
            "burst, but the limit is not a rate",
        ),
    ] {
        let scope = limit.clone().by_header("x-key");
        let scope = scope.values([("gold", 3.into()), ("secret", value)]);
        let semaphore = limiter.semaphore(limit, "secret").unwrap().value(value);
        let errors = [limiter.layer(scope).err(), semaphore.err()];
        for error in errors {
            assert_eq!(error.is_none(), fault.is_empty(), "{value:?}: {error:?}");
            if let Some(error) = error {
                assert_eq!(error.kind(), ConfigErrorKind::Value);
                let said = error.to_string();
                assert!(
                    said.contains(limit.name()) && said.contains(fault),
                    "{said}"
                );
                assert!(!said.contains("secret"), "{said}");
            }
        }
    }
}

#[tokio::test]
async fn zero_refuses_even_requests_that_would_wait() {
    let limiter = Limiter::in_memory();
    let patient = ONE.wait_up_to(Duration::from_millis(20));
    let scope = patient.by_header("x-key").values([("none", 0)]);
    let service = limiter.layer(scope).unwrap().layer(serve(endless()));
    let response = soon(send(&service, with_key("none"))).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!((held(&limiter), limiter.status().waiting), (0, 0));
}

#[tokio::test]
async fn value_that_is_raised_by_a_request_admits_waiters() {
    let limiter = Limiter::in_memory();
    let value = Arc::new(AtomicU32::new(1));
    let latest = value.clone();
    let scope = ONE.wait_up_to(GUARD).by_header("x-key");
    let scope = scope.values_by(move |_, _| Some(latest.load(Ordering::SeqCst)));
    let service = limiter.layer(scope).unwrap().layer(serve(endless()));
    let first = send(&service, with_key("a")).await;
    let mut waiting = task::spawn(service.clone().oneshot(with_key("a")));
    assert_pending!(waiting.poll());
    value.store(3, Ordering::SeqCst);
    let mut third = task::spawn(service.clone().oneshot(with_key("a")));
    let third_response = soon(&mut third).await.unwrap();
    assert!(waiting.is_woken());
    let second = soon(&mut waiting).await.unwrap();
    assert_eq!(held(&limiter), 3);
    // A lower value revokes nothing.
    value.store(1, Ordering::SeqCst);
    let mut fourth = task::spawn(service.oneshot(with_key("a")));
    assert_pending!(fourth.poll());
    assert_eq!(held(&limiter), 3);
    drop((first, second));
    assert_pending!(fourth.poll());
    drop(third_response);
    assert_eq!(soon(fourth).await.unwrap().status(), StatusCode::OK);
}

/// Looks values up when permitted by the test, and records the keys.
#[derive(Clone)]
struct Plans {
    asked: Arc<Mutex<Vec<Key>>>,
    allowed: Arc<Semaphore>,
}

impl Plans {
    fn new(allowed: usize) -> Self {
        let asked = Arc::default();
        let allowed = Arc::new(Semaphore::new(allowed));
        Self { asked, allowed }
    }

    fn find(&self, key: &Key) -> impl Future<Output = Option<u32>> + Send + use<> {
        self.asked.lock().unwrap().push(key.clone());
        let allowed = self.allowed.clone();
        async move {
            allowed.acquire().await.unwrap().forget();
            Some(2)
        }
    }

    fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }

    fn scope(&self, capacity: usize) -> Scope {
        let plans = self.clone();
        ONE.by_header("x-key")
            .values_by_async(capacity, FRESH, move |_, key| plans.find(key))
    }
}

#[tokio::test]
async fn lookup_is_made_once_for_all_requests_that_wait_for_it() {
    let limiter = Limiter::in_memory();
    let plans = Plans::new(0);
    let service = limiter
        .layer(plans.scope(10))
        .unwrap()
        .layer(serve(endless()));
    let request = |key| task::spawn(service.clone().oneshot(with_key(key)));
    let mut calls = ["a", "a", "a", "b"].map(request);
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    soon(until(|| plans.asked() == 2)).await;
    assert_eq!(held(&limiter), 0);
    plans.allowed.add_permits(2);
    let mut admitted = Vec::new();
    for call in calls {
        let response = soon(call).await.unwrap();
        if response.status() == StatusCode::OK {
            admitted.push(response);
        }
    }
    // Two requests of `a`, a single one of `b`.
    assert_eq!((plans.asked(), admitted.len(), held(&limiter)), (2, 3, 3));
}

/// Lookups that take longer than clients wait.
#[tokio::test]
async fn lookup_goes_on_without_its_requests() {
    let plans = Plans::new(0);
    let service = Limiter::in_memory()
        .layer(plans.scope(10))
        .unwrap()
        .layer(serve(Full::<Bytes>::default()));
    let request = || task::spawn(service.clone().oneshot(with_key("a")));
    let mut first = request();
    assert_pending!(first.poll());
    soon(until(|| plans.asked() == 1)).await;
    let mut second = request();
    assert_pending!(second.poll());
    drop(first);
    tokio::task::yield_now().await;
    drop(second);
    plans.allowed.add_permits(1);
    for _ in 0..2 {
        let response = soon(send(&service, with_key("a"))).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
    assert_eq!(plans.asked(), 1);
}

/// Its response future may be one of many that are polled in turn, by a task that waits for the other.
#[tokio::test]
async fn lookup_of_a_request_that_is_not_polled_serves_others() {
    let plans = Plans::new(0);
    let service = Limiter::in_memory()
        .layer(plans.scope(10))
        .unwrap()
        .layer(serve(endless()));
    let mut first = task::spawn(service.clone().oneshot(with_key("a")));
    assert_pending!(first.poll());
    soon(until(|| plans.asked() == 1)).await;
    let mut second = task::spawn(service.clone().oneshot(with_key("a")));
    assert_pending!(second.poll());
    plans.allowed.add_permits(1);
    assert_eq!(soon(second).await.unwrap().status(), StatusCode::OK);
    assert_eq!(plans.asked(), 1);
    drop(first);
}

/// However many clients give up while the database hangs.
#[tokio::test]
async fn request_that_leaves_the_lookup_of_another_leaves_no_task() {
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let plans = Plans::new(0);
    let service = Limiter::in_memory()
        .layer(plans.scope(10))
        .unwrap()
        .layer(serve(endless()));
    let request = || task::spawn(service.clone().oneshot(with_key("a")));
    let mut first = request();
    assert_pending!(first.poll());
    soon(until(|| plans.asked() == 1)).await;
    let mut others = [(); 3].map(|()| request());
    for other in &mut others {
        assert_pending!(other.poll());
    }
    assert_eq!(tasks(), before + 4);
    drop(others);
    soon(until(|| tasks() == before + 1)).await;
    drop(first);
    plans.allowed.add_permits(1);
    soon(until(|| tasks() == before)).await;
}

#[tokio::test(start_paused = true)]
async fn answer_is_kept_for_its_time() {
    let plans = Plans::new(10);
    let layer = Limiter::in_memory().layer(plans.scope(10)).unwrap();
    let service = layer.layer(serve(Full::<Bytes>::default()));
    let ask = async || drop::<Response<_>>(send(&service, with_key("a")).await);
    for _ in 0..5 {
        ask().await;
    }
    assert_eq!(plans.asked(), 1);
    tokio::time::advance(FRESH - Duration::from_millis(1)).await;
    ask().await;
    assert_eq!(plans.asked(), 1);
    tokio::time::advance(Duration::from_millis(1)).await;
    for _ in 0..5 {
        ask().await;
    }
    assert_eq!(plans.asked(), 2);
}

#[tokio::test]
async fn kept_answers_are_bounded() {
    let plans = Plans::new(10_000);
    let layer = Limiter::in_memory().layer(plans.scope(10)).unwrap();
    let service = layer.layer(serve(Full::<Bytes>::default()));
    for _ in 0..2 {
        for number in 0..1_000 {
            send(&service, with_key(&number.to_string())).await;
        }
    }
    // At most ten of the keys are found again.
    assert!(plans.asked() >= 1_990, "{}", plans.asked());
}

/// The database behind the lookups hangs once. The key is free again in time, also if the client has left.
#[tokio::test(start_paused = true)]
async fn lookup_that_never_returns_is_dropped() {
    for leaves in [false, true] {
        let lookups = Arc::new(AtomicU32::new(0));
        let (count, hanging) = (lookups.clone(), Arc::new(()));
        let hung = Arc::downgrade(&hanging);
        let hanging = Mutex::new(Some(hanging));
        let scope = ONE
            .by_header("x-key")
            .values_by_async(10, FRESH, move |_, _| {
                count.fetch_add(1, Ordering::Relaxed);
                let hangs = hanging.lock().unwrap().take();
                async move {
                    if let Some(_kept) = hangs {
                        std::future::pending::<()>().await;
                    }
                    Some(2)
                }
            });
        let service = Limiter::in_memory()
            .layer(scope)
            .unwrap()
            .layer(serve(endless()));
        let mut first = task::spawn(service.clone().oneshot(with_key("gold")));
        assert_pending!(first.poll());
        until(|| lookups.load(Ordering::Relaxed) == 1).await;
        let first = (!leaves).then_some(first);
        sleep(Duration::from_secs(29)).await;
        assert_eq!(hung.strong_count(), 1);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(hung.strong_count(), 0);
        // Admitted by the limit's own value.
        let mut responses = Vec::new();
        if let Some(first) = first {
            responses.push(soon(first).await.unwrap());
        }
        responses.push(send(&service, with_key("gold")).await);
        assert!(
            responses
                .iter()
                .all(|response| response.status() == StatusCode::OK)
        );
        assert_eq!(lookups.load(Ordering::Relaxed), 2);
    }
}

#[test]
fn lookup_on_a_runtime_without_timers_has_no_bound() {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let scope = ONE
        .by_header("x-key")
        .values_by_async(10, FRESH, |_, _| async { Some(2) });
    let admitted = admitted(scope, || with_key("gold"));
    assert_eq!(runtime.unwrap().block_on(admitted), (2, 2));
}
