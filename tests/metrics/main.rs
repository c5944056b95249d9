//! Metrics as received by a recorder, end to end.
#![cfg(feature = "metrics")]

mod operations;
#[path = "../support/mod.rs"]
mod support;

use std::{
    collections::BTreeSet,
    convert::Infallible,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use support::{GUARD, queue::wait_in_line, redis_server::RedisServer, soon};
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireError, Fallback, Limit, LimitLayer, Limiter, Mode, OnLost, Permit, Semaphore,
    test_util::TestStore,
};
use tracing_subscriber::layer::SubscriberExt;

const ONE: Limit = Limit::concurrent("one", 1);

/// A recorder for this thread, and so for a test's runtime.
fn recorder() -> (PrometheusHandle, impl Drop) {
    let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    let handle = recorder.handle();
    (handle, metrics::set_default_local_recorder(recorder))
}

/// The value of a metric in Prometheus's notation.
#[track_caller]
fn value(handle: &PrometheusHandle, metric: &str) -> f64 {
    let text = handle.render();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(metric));
    let value = lines.next().and_then(|value| value.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {metric} in\n{text}"))
}

/// A limiter on this server, for which no stall of the machine is an outage.
async fn on_redis(redis: &RedisServer) -> Limiter {
    let builder = Limiter::builder().lease(Duration::from_secs(600));
    let builder = builder.store_timeout(Duration::from_secs(20));
    builder.connect(&redis.url()).await.expect("a store")
}

async fn response(layer: LimitLayer) -> Response<impl http_body::Body> {
    let service = service_fn(|_: Request<()>| async move {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("all")))
    });
    layer
        .layer(service)
        .oneshot(Request::default())
        .await
        .expect("infallible")
}

/// The name of a metric in Prometheus's notation, with the labels of a limit.
fn of(metric: &str, limit: &str, reason: Option<&str>) -> String {
    let reason = reason.map_or(String::new(), |reason| format!(r#",reason="{reason}""#));
    format!(r#"turnstile_{metric}{{namespace="turnstile",limit="{limit}"{reason}}}"#)
}

#[tokio::test(start_paused = true)]
async fn requests_are_counted_from_the_queue_to_the_release() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let patient = ONE.wait_up_to(Duration::from_secs(60)).max_waiters(1);
    let one = limiter.semaphore(&patient, "key").unwrap();
    let held = one.acquire().await.expect("free");
    let mut waiter = tokio_test::task::spawn(one.acquire());
    tokio_test::assert_pending!(waiter.poll());
    let queue_full = of("refusals_total", "one", Some("queue_full"));
    let full = of("refusals_total", "one", Some("full"));
    assert!(one.acquire().await.is_err());
    assert!(one.try_acquire().await.is_err());
    assert_eq!(
        (value(&recorded, &queue_full), value(&recorded, &full)),
        (1.0, 1.0)
    );
    let (holds, waits) = (of("held", "one", None), of("waiting", "one", None));
    assert_eq!(
        (value(&recorded, &holds), value(&recorded, &waits)),
        (1.0, 1.0)
    );

    sleep(Duration::from_secs(7)).await;
    drop(held);
    drop(waiter.await.expect("its turn"));
    assert_eq!(
        (value(&recorded, &holds), value(&recorded, &waits)),
        (0.0, 0.0)
    );
    assert_eq!(value(&recorded, &of("admitted_total", "one", None)), 2.0);
    for (metric, seconds) in [("wait_seconds", 7.0), ("hold_seconds", 7.0)] {
        assert_eq!(
            value(&recorded, &of(&format!("{metric}_sum"), "one", None)),
            seconds
        );
        assert_eq!(
            value(&recorded, &of(&format!("{metric}_count"), "one", None)),
            2.0
        );
    }
}

#[tokio::test(start_paused = true)]
async fn the_value_of_a_fallback_is_that_in_force() {
    let (recorded, _guard) = recorder();
    let store = TestStore::new();
    let limiter = Limiter::builder().connect_to(&store).await.unwrap();
    let limit = Limit::concurrent("ten", 10)
        .fallback(Fallback::Share)
        .fallback_for(Duration::from_secs(30));
    let ten = limiter.semaphore(&limit, "key").unwrap();
    drop(ten.acquire().await.unwrap());
    let fallback = of("fallback_limit", "ten", None);
    assert_eq!(value(&recorded, &fallback), 0.0, "not counted yet");
    sleep(Duration::from_secs(15)).await;
    assert_eq!(value(&recorded, &fallback), 10.0);
    store.go_down();
    drop(ten.acquire().await.unwrap());
    assert_eq!(value(&recorded, &fallback), 10.0);
    sleep(Duration::from_secs(31)).await;
    assert_eq!(value(&recorded, &fallback), 0.0, "its time is over");
    store.come_back();
    sleep(Duration::from_secs(5)).await;
    assert_eq!(value(&recorded, &fallback), 10.0);
}

#[tokio::test(start_paused = true)]
async fn costs_of_a_rate_are_counted_by_kind() {
    const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(86_400)).burst(50);
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let permit = limiter
        .semaphore(&TOKENS, "a")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    permit.budget(&TOKENS).unwrap().charge(40).await.unwrap();
    permit.budget(&TOKENS).unwrap().spend(20);
    permit.budget(&TOKENS).unwrap().settle(70);
    let other = limiter
        .semaphore(&TOKENS, "b")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    other.budget(&TOKENS).unwrap().spend(5);
    other.budget(&TOKENS).unwrap().settle(2);
    for (kind, cost) in [
        ("charged", 42.0),
        ("spent", 25.0),
        ("settled_up", 9.0),
        ("settled_down", 4.0),
        // Key `a` costs 61, then 70; the burst covers 50.
        ("debt", 11.0 + 9.0),
    ] {
        let metric = format!(
            r#"turnstile_cost_total{{namespace="turnstile",limit="tokens",kind="{kind}"}}"#
        );
        assert_eq!(value(&recorded, &metric), cost, "{kind}");
    }
}

/// Without a label by tenant, because their number is unlimited.
#[tokio::test]
async fn tenants_of_fair_limits_are_counted() {
    const GPU: Limit = Limit::concurrent("gpu", 1)
        .wait_up_to(Duration::from_secs(60))
        .fair();
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let tenants = of("fair_tenants", "gpu", None);
    let count = || value(&recorded, &tenants);
    let [acme, globex] = ["acme", "globex"].map(|name| {
        let gpu = limiter.semaphore(GPU, "a").unwrap();
        gpu.tenant(name).unwrap()
    });
    let _one = limiter
        .semaphore(&ONE, "a")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let other = of("fair_tenants", "one", None);
    assert!(!recorded.render().contains(&other), "it is not fair");
    assert_eq!(count(), 0.0);
    let held = acme.acquire().await.unwrap();
    assert_eq!(count(), 1.0);
    let waiter = wait_in_line(&globex).await;
    let second = wait_in_line(&globex).await;
    assert_eq!(count(), 2.0);
    // Under another key, and for nobody in particular.
    let anywhere = limiter
        .semaphore(GPU, "b")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    assert_eq!(count(), 3.0);
    drop((anywhere, waiter));
    assert_eq!(count(), 2.0);
    drop(held);
    let held = second.await.unwrap();
    assert_eq!(count(), 1.0);
    let again = limiter
        .semaphore(GPU, "b")
        .unwrap()
        .tenant("globex")
        .unwrap();
    let again = again.acquire().await.unwrap();
    assert_eq!(count(), 1.0, "one tenant under two keys");
    drop((held, again));
    assert_eq!(count(), 0.0);
}

/// Not by name, because the number of names is unlimited.
#[tokio::test]
async fn budgets_at_unknown_rates_are_counted() {
    const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(60));
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let unknown = r#"turnstile_unknown_rate_total{namespace="turnstile"}"#;
    let _slots = limiter.semaphore(&ONE, "a").unwrap();
    assert!(!recorded.render().contains(unknown), "there is no rate");
    let permit = limiter
        .semaphore(&TOKENS, "a")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    assert_eq!(value(&recorded, unknown), 0.0);
    permit.budget(&TOKENS).unwrap().charge(1).await.unwrap();
    assert_eq!(value(&recorded, unknown), 0.0);
    for name in ["tokns", "one", "", "tokns"] {
        permit.budget(name).unwrap_err();
    }
    assert_eq!(value(&recorded, unknown), 4.0);
}

/// Not even for the limit that refuses paths which cannot be looked up.
#[cfg(feature = "config")]
#[tokio::test]
async fn a_configuration_without_routes_has_the_series_of_its_own_limits_only() {
    use tower_turnstile::config::{Config, LiveConfig};

    let (recorded, _guard) = recorder();
    let text = "unlimited = true\nlimits.chat = { concurrent = 1, unrouted = true }";
    let live = LiveConfig::new(&Config::from_toml(text).unwrap(), &Limiter::in_memory()).unwrap();
    let series = recorded.render();
    assert!(series.contains(r#"limit="chat""#), "{series}");
    assert!(!series.contains("ambiguous-path"), "{series}");

    let text = "limits.chat.concurrent = 1\nroutes = [{ match = ['/chat'], limits = ['chat'] }]";
    live.reload(&Config::from_toml(text).unwrap()).unwrap();
    let refused = of("refusals_total", "ambiguous-path", Some("ambiguous_path"));
    assert_eq!(value(&recorded, &refused), 0.0);
}

#[tokio::test]
async fn requests_without_a_key_are_counted() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let open = Limit::concurrent("open", 1).by_key(|_| None::<u64>);
    let strict = Limit::concurrent("strict", 1)
        .by_header("x-key")
        .require_key();
    let (passed, refused) = (
        of("unkeyed_total", "open", None),
        of("refusals_total", "strict", Some("no_key")),
    );
    let (open, strict) = (limiter.layer(open).unwrap(), limiter.layer(strict).unwrap());
    assert_eq!(
        (value(&recorded, &passed), value(&recorded, &refused)),
        (0.0, 0.0)
    );
    assert_eq!(response(open).await.status(), 200);
    assert_eq!(response(strict).await.status(), 400);
    assert_eq!(
        (value(&recorded, &passed), value(&recorded, &refused)),
        (1.0, 1.0)
    );
    // If no request can lack a key, the series does not exist.
    drop(limiter.layer(ONE).unwrap());
    assert!(
        !recorded
            .render()
            .contains(&of("unkeyed_total", "one", None))
    );
}

/// Possible series exist from the beginning, and series enabled by a new value from then on.
#[tokio::test]
async fn series_begin_when_they_can_occur() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap();
    // All series except histograms, which have many lines.
    let series = || {
        let text = recorded.render();
        let names = text.lines().filter(|line| line.starts_with("turnstile_"));
        let names = names.filter(|line| !line.contains("_seconds"));
        let names = names.filter_map(|line| line.split(' ').next().map(str::to_owned));
        names.collect::<BTreeSet<_>>()
    };
    let refused = |reason| of("refusals_total", "one", Some(reason));
    let operators = ["limit_overridden", "revoked_total"].into_iter();
    let operators = operators.filter(|_| cfg!(feature = "operate"));
    let first = [
        "admitted_total",
        "held",
        "limit_max",
        "lost_total",
        "released_total",
    ]
    .into_iter();
    let first = first.chain(operators).map(|metric| of(metric, "one", None));
    let first = BTreeSet::from_iter(first.chain(["full", "shut_down"].map(refused)));
    assert_eq!(series(), first);
    let expired = r#"turnstile_expired_total{namespace="turnstile",limit="one",bound="idle"}"#;
    let aborted = |reason| of("aborted_total", "one", Some(reason));
    let added = |before: &BTreeSet<String>| Vec::from_iter(&series() - before);
    let _layer = layer.idle(Duration::from_secs(60));
    assert_eq!(added(&first), [aborted("idle"), expired.to_owned()]);
    let second = series();
    limiter
        .update(&ONE.wait_up_to(Duration::from_secs(1)))
        .expect("it may change");
    let third = [refused("queue_full"), refused("timed_out")];
    assert_eq!(
        added(&second),
        [&third[..], &[of("waiting", "one", None)]].concat()
    );
}

/// The sum over all limiters of this process, without dropped ones.
#[tokio::test(start_paused = true)]
async fn the_value_in_force_is_seen() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let max = || value(&recorded, &of("limit_max", "one", None));
    // By a layer, without any request.
    let layer = limiter.layer(ONE).unwrap();
    assert_eq!(max(), 1.0);
    let one = limiter.semaphore(&ONE, "key").unwrap();
    assert_eq!(max(), 1.0);
    limiter
        .update(&Limit::concurrent("one", 4))
        .expect("it may change");
    assert_eq!(max(), 4.0);
    #[cfg(feature = "operate")]
    {
        use tower_turnstile::{
            operate::seam::{Change, Desk, Signed},
            operate::{Setting, Target},
        };
        let overridden = || value(&recorded, &of("limit_overridden", "one", None));
        assert_eq!(overridden(), 0.0);
        let (desk, minute) = (Desk::of(&limiter), Duration::from_secs(60));
        let set = |setting| {
            let signed = Signed::new("set", "ada".into(), "a test".into()).expect("randomness");
            let record = desk.record().expect("in memory");
            let change = Change::set(&record, &Target::limit("one"), setting, 60_000, signed);
            desk.change(&change.expect("a limit's"));
        };
        set(Setting::Value(9.into()));
        assert_eq!((max(), overridden()), (9.0, 1.0));
        // The override ends on its own.
        sleep(2 * minute).await;
        assert_eq!((max(), overridden()), (4.0, 0.0));
        set(Setting::Pause);
        assert_eq!((max(), overridden()), (4.0, 1.0));
    }
    drop((limiter, layer, one));
    assert_eq!(max(), 0.0);
}

/// Counts the warnings of a missing recorder.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if event.metadata().target() == "tower_turnstile::telemetry" {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// All other limiters of this process have a recorder.
#[test]
fn a_limiter_without_a_recorder_warns_once() {
    let warnings = Warnings::default();
    let subscriber = tracing_subscriber::registry().with(warnings.clone());
    let _guard = tracing::subscriber::set_default(subscriber);
    let warned = || warnings.0.load(Ordering::Relaxed);
    let (_, recorder) = recorder();
    drop(Limiter::in_memory());
    assert_eq!(warned(), 0);
    drop(recorder);
    drop(Limiter::in_memory());
    assert_eq!(warned(), 1);
    drop(Limiter::in_memory());
    assert_eq!(warned(), 1);
}

#[tokio::test]
async fn every_limit_of_a_request_is_counted() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let rate = Limit::rate("rate", 1, Duration::from_secs(3_600));
    let watched = Limit::concurrent("watched", 1).mode(Mode::Shadow);
    let all = limiter
        .semaphore(Limit::concurrent("wide", 2), "key")
        .unwrap();
    let all = all.and(&rate, "key").unwrap().and(&watched, "key").unwrap();
    let shadow = limiter.semaphore(&watched, "key").unwrap();
    let held = shadow.acquire().await.expect("free");
    let both = all.acquire().await.expect("free");
    assert!(all.acquire().await.is_err());
    for (limit, admitted) in [("wide", 1.0), ("rate", 1.0), ("watched", 1.0)] {
        assert_eq!(
            value(&recorded, &of("admitted_total", limit, None)),
            admitted,
            "{limit}"
        );
    }
    assert_eq!(
        value(&recorded, &of("refusals_total", "rate", Some("too_soon"))),
        1.0
    );
    let watched = of("shadow_refusals_total", "watched", Some("full"));
    assert_eq!(value(&recorded, &watched), 1.0);
    drop((held, both));
    assert_eq!(value(&recorded, &of("held", "wide", None)), 0.0);
}

#[tokio::test(start_paused = true)]
async fn permits_that_are_lost_are_counted() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let held = limiter
        .semaphore(&ONE, "key")
        .unwrap()
        .acquire()
        .await
        .expect("free");
    limiter.shutdown(Duration::ZERO).await;
    assert!(held.is_lost());
    assert_eq!(value(&recorded, &of("lost_total", "one", None)), 1.0);
    assert_eq!(value(&recorded, &of("held", "one", None)), 0.0);
    assert!(
        limiter
            .semaphore(&ONE, "key")
            .unwrap()
            .acquire()
            .await
            .is_err()
    );
    assert_eq!(
        value(&recorded, &of("refusals_total", "one", Some("shut_down"))),
        1.0
    );
}

#[tokio::test(start_paused = true)]
async fn slots_that_are_taken_back_are_counted() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let second = Duration::from_secs(1);
    let mut unread = response(limiter.layer(ONE).unwrap().idle(second)).await;
    sleep(2 * second).await;
    let expired = r#"turnstile_expired_total{namespace="turnstile",limit="one",bound="idle"}"#;
    let aborted = r#"turnstile_aborted_total{namespace="turnstile",limit="one",reason="idle"}"#;
    // Nobody needs to read the response for that.
    assert_eq!(
        (value(&recorded, expired), value(&recorded, aborted)),
        (1.0, 1.0)
    );
    assert!(unread.frame().await.expect("no end").is_err());
    assert_eq!(
        (value(&recorded, expired), value(&recorded, aborted)),
        (1.0, 1.0)
    );
}

#[tokio::test]
async fn responses_whose_slot_is_lost_are_counted() {
    let (recorded, _guard) = recorder();
    let limiter = Limiter::in_memory();
    let mut lost = response(limiter.layer(ONE).unwrap().on_lost(OnLost::Abort)).await;
    limiter.shutdown(Duration::ZERO).await;
    assert!(lost.frame().await.expect("no end").is_err());
    let aborted =
        r#"turnstile_aborted_total{namespace="turnstile",limit="one",reason="shut_down"}"#;
    assert_eq!(value(&recorded, aborted), 1.0);

    // The same applies to bodies of clients that acquire permits directly.
    let limiter = Limiter::in_memory();
    let permit = limiter.semaphore(&ONE, "key").unwrap().acquire().await;
    let body = permit
        .expect("free")
        .attach_body(Full::<Bytes>::from("unread"), OnLost::Abort);
    limiter.shutdown(Duration::ZERO).await;
    assert!(body.collect().await.is_err());
    assert_eq!(value(&recorded, aborted), 2.0);
}

#[tokio::test]
async fn exchanges_are_counted_and_timed() {
    let (recorded, _guard) = recorder();
    let redis = RedisServer::start();
    let limiter = on_redis(&redis).await;
    drop(
        limiter
            .semaphore(&ONE, "key")
            .unwrap()
            .acquire()
            .await
            .expect("free"),
    );
    let ok = value(
        &recorded,
        r#"turnstile_exchanges_total{namespace="turnstile",outcome="ok"}"#,
    );
    // One exchange to check that the store is reachable, and one to acquire.
    assert!(ok >= 2.0);
    let timed = value(
        &recorded,
        r#"turnstile_exchange_seconds_count{namespace="turnstile"}"#,
    );
    assert_eq!(timed, ok);
    assert_eq!(
        value(&recorded, r#"turnstile_store_up{namespace="turnstile"}"#),
        1.0
    );
}

#[tokio::test(start_paused = true)]
async fn store_that_goes_and_comes_back_is_seen() {
    let (recorded, _guard) = recorder();
    let store = TestStore::new();
    store.go_down();
    let limiter = Limiter::builder().connect_to(&store).await.unwrap();
    let up = r#"turnstile_store_up{namespace="turnstile"}"#;
    let opened = r#"turnstile_breaker_opened_total{namespace="turnstile",cause="outage"}"#;
    assert_eq!((value(&recorded, up), value(&recorded, opened)), (0.0, 1.0));
    store.come_back();
    soon(async {
        while !limiter.status().store_up {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!((value(&recorded, up), value(&recorded, opened)), (1.0, 1.0));
}

#[tokio::test(start_paused = true)]
async fn permits_that_the_store_has_lost_are_counted() {
    let (recorded, _guard) = recorder();
    let store = TestStore::new();
    let limiter = Limiter::builder().connect_to(&store).await.unwrap();
    let held = limiter.semaphore(&ONE, "key").unwrap().acquire().await;
    store.forget();
    let adopted = of("adopted_total", "one", Some("lost"));
    let entered = of("adopted_total", "one", Some("fallback"));
    // It is renewed once in ten seconds.
    sleep(Duration::from_secs(11)).await;
    assert_eq!(value(&recorded, &adopted), 1.0);
    assert_eq!(value(&recorded, &entered), 0.0);
    assert!(!held.expect("free").is_lost());
}

/// Newcomers under a limit that is not strict do not wait.
#[tokio::test(start_paused = true)]
async fn newcomers_that_wait_for_permits_to_return_are_seen() {
    for fallback in [Fallback::Reject, Fallback::Allow] {
        let (recorded, _guard) = recorder();
        let store = TestStore::new();
        let limiter = Limiter::builder().connect_to(&store).await.unwrap();
        let limit = Limit::concurrent("two", 2).fallback(fallback);
        let semaphore = limiter.semaphore(&limit, "key").unwrap();
        let _held = semaphore.acquire().await.expect("free");
        store.forget();
        let recovering = r#"turnstile_recovering{namespace="turnstile"}"#;
        let lost = r#"turnstile_data_losses_total{namespace="turnstile"}"#;
        let (mut waits, mut ends) = (false, false);
        while value(&recorded, lost) == 0.0 || !ends {
            // Newcomers find the loss.
            drop(semaphore.acquire().await);
            sleep(Duration::from_millis(100)).await;
            let is_recovering = value(&recorded, recovering) == 1.0;
            ends = !is_recovering;
            waits |= is_recovering;
        }
        assert_eq!(waits, fallback == Fallback::Reject);
    }
}

/// Runs foreign code whenever a slot of `turnstile_held` is taken or released.
#[derive(Clone, Default)]
struct OnHeld(Arc<Mutex<Option<Foreign>>>);

type Foreign = Box<dyn Fn() + Send>;

impl OnHeld {
    fn set(&self, run: impl Fn() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(run));
    }

    /// Does not run recursively.
    fn run(&self) {
        let run = self.0.lock().unwrap().take();
        if let Some(run) = run {
            let ran = catch_unwind(AssertUnwindSafe(&run));
            self.0.lock().unwrap().get_or_insert(run);
            ran.unwrap_or_else(|panic| resume_unwind(panic));
        }
    }
}

impl GaugeFn for OnHeld {
    fn increment(&self, _: f64) {
        self.run();
    }

    fn decrement(&self, _: f64) {
        self.run();
    }

    fn set(&self, _: f64) {}
}

impl Recorder for OnHeld {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &metrics::Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, key: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        match key.name() {
            "turnstile_held" => Gauge::from_arc(Arc::new(self.clone())),
            _ => Gauge::noop(),
        }
    }

    fn register_histogram(&self, _: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// A semaphore whose metrics go to this recorder.
fn recorded(on_held: &OnHeld, make: impl FnOnce(&Limiter) -> Semaphore) -> (Limiter, Semaphore) {
    metrics::with_local_recorder(on_held, || {
        let limiter = Limiter::in_memory();
        let semaphore = make(&limiter);
        (limiter, semaphore)
    })
}

fn acquire_now(semaphore: &Semaphore) -> Result<Permit, AcquireError> {
    let acquired = semaphore.try_acquire().now_or_never();
    acquired.expect("it is in memory")
}

/// A recorder is foreign code: it may use the limits that it measures.
#[test]
fn a_recorder_may_use_reused_slots() {
    let on_held = OnHeld::default();
    let (_limiter, semaphore) = recorded(&on_held, |limiter| {
        limiter.semaphore(ONE.reuse(), "a").unwrap()
    });
    drop(acquire_now(&semaphore).expect("free"));
    let (tell, called) = mpsc::channel();
    let inner = semaphore.clone();
    on_held.set(move || tell.send(acquire_now(&inner).is_ok()).unwrap());
    thread::spawn(move || acquire_now(&semaphore).map(drop));
    // The slot is taken, then idle again.
    for free in [false, true] {
        let free_then = called.recv_timeout(GUARD);
        assert_eq!(free_then.expect("it does not wait for itself"), free);
    }
}

/// G5: a recorder may panic each time, but strands no slot: new, reused, or of several limits; not even during another
/// panic, when a second one would abort the process.
#[test]
fn a_recorder_that_panics_strands_no_slot() {
    type Make = fn(&Limiter) -> Semaphore;
    let kinds: [(Make, usize); 3] = [
        (|limiter| limiter.semaphore(ONE, "a").unwrap(), 1),
        (|limiter| limiter.semaphore(ONE.reuse(), "a").unwrap(), 1),
        (
            |limiter| {
                let other = Limit::concurrent("other", 1);
                limiter
                    .semaphore(ONE, "a")
                    .unwrap()
                    .and(other, "a")
                    .unwrap()
            },
            2,
        ),
    ];
    for (make, slots) in kinds {
        let on_held = OnHeld::default();
        let (limiter, semaphore) = recorded(&on_held, make);
        drop(acquire_now(&semaphore).expect("free"));
        on_held.set(|| panic!("a recorder panics"));
        for round in 0..3 {
            let permit = acquire_now(&semaphore).expect("it is free again");
            assert_eq!(limiter.status().held, slots, "round {round}");
            match round {
                0 => drop(permit),
                1 => {
                    let panics = move || {
                        let _permit = permit;
                        panic!("a handler panics");
                    };
                    assert!(thread::spawn(panics).join().is_err());
                }
                _ => {
                    let released = permit.release().now_or_never();
                    assert!(released.is_some(), "it is in memory");
                }
            }
            assert_eq!(limiter.status().held, 0, "round {round}");
        }
    }
}

/// Once enabled, every counter, gauge and histogram panics.
#[derive(Clone, Default)]
struct Panics(Arc<AtomicBool>);

impl Panics {
    fn panic(&self) {
        assert!(!self.0.load(Ordering::Relaxed), "a recorder panics");
    }
}

impl CounterFn for Panics {
    fn increment(&self, _: u64) {
        self.panic();
    }

    fn absolute(&self, _: u64) {
        self.panic();
    }
}

impl GaugeFn for Panics {
    fn increment(&self, _: f64) {
        self.panic();
    }

    fn decrement(&self, _: f64) {
        self.panic();
    }

    fn set(&self, _: f64) {
        self.panic();
    }
}

impl HistogramFn for Panics {
    fn record(&self, _: f64) {
        self.panic();
    }
}

impl Recorder for Panics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &metrics::Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(self.clone()))
    }

    fn register_gauge(&self, _: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(self.clone()))
    }

    fn register_histogram(&self, _: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(self.clone()))
    }
}

/// G5, G8: the panics do not end the driver either.
#[tokio::test]
async fn a_recorder_that_always_panics_costs_no_request() {
    let recorder = Panics::default();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let redis = RedisServer::start();
    let limiter = on_redis(&redis).await;
    let semaphore = limiter.semaphore(&ONE, "key").unwrap();
    recorder.0.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let permit = semaphore.acquire().await.expect("free");
        assert_eq!(semaphore.usage().await.expect("up").in_use, 1);
        assert!(permit.release().await.is_ok(), "the store has confirmed it");
    }
}

/// A stopped process: the response notices the lost slot before the driver does, and ends.
#[tokio::test(start_paused = true)]
async fn permits_whose_responses_see_the_loss_first_are_counted() {
    const LEASE: Duration = Duration::from_secs(30);
    let (recorded, _guard) = recorder();
    let store = TestStore::new();
    let limiter = Limiter::builder().lease(LEASE).connect_to(&store).await;
    let limiter = limiter.expect("valid settings");
    let layer = limiter
        .layer(Limit::concurrent("one", 8))
        .unwrap()
        .on_lost(OnLost::Abort);
    let mut responses = Vec::new();
    for _ in 0..8 {
        responses.push(pending_response(&layer).await);
    }
    // Time passes at the first poll, and the driver has not run by the time the responses are read.
    let mut stands_still = std::pin::pin!(tokio::time::advance(2 * LEASE));
    assert!(stands_still.as_mut().now_or_never().is_none());
    for mut response in responses {
        let frame = response.frame().now_or_never().expect("at once");
        assert!(frame.expect("no end").is_err());
    }
    stands_still.await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(value(&recorded, &of("lost_total", "one", None)), 8.0);
    assert_eq!(value(&recorded, &of("held", "one", None)), 0.0);
}

/// A response that never ends on its own.
async fn pending_response(
    layer: &LimitLayer,
) -> Response<impl http_body::Body<Data = Bytes> + Unpin> {
    let service = service_fn(|_: Request<()>| async move {
        let frames = futures_util::stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
        Ok::<_, Infallible>(Response::new(http_body_util::StreamBody::new(frames)))
    });
    let response = layer.layer(service).oneshot(Request::default()).await;
    response.expect("infallible")
}
