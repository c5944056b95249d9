//! Foreign code: subscribers, log writers, recorders of metrics, wakers and closures that call every public method of
//! the limiter from within, or block. Nothing hangs, and no other task is held up. A single process, since subscribers
//! and recorders are global.

mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fmt, fs,
    future::Future,
    io,
    path::Path,
    pin::pin,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key as MetricKey, KeyName,
    Metadata, Recorder, SharedString, Unit,
};
use support::{GUARD, redis_server::RedisServer, replica::command, soon};
use tokio::{
    runtime::{Builder, Runtime},
    time::{sleep, timeout},
};
use tower::{Layer as _, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, ClientAddress, Hold, Key, Limit, LimitLayer, Limiter, LimiterBuilder, Mode,
    OnLost, Permit, Slot, layer::Outcome,
};
use tracing::{
    Event, Level, Metadata as CallSite, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::Interest,
};
use tracing_subscriber::{
    Layer,
    layer::{Context as Layered, SubscriberExt},
};

/// The limit used by foreign code.
const PROBE: Limit = Limit::concurrent("probe", 3);

/// Objects that foreign code can use.
struct Scene {
    limiters: Vec<Limiter>,
    permits: Vec<Arc<Permit>>,
    slots: Vec<Slot>,
    holds: Vec<Arc<Hold>>,
    /// How often each kind of foreign code was called.
    calls: BTreeMap<String, usize>,
}

static SCENE: Mutex<Scene> = Mutex::new(Scene {
    limiters: Vec::new(),
    permits: Vec::new(),
    slots: Vec::new(),
    holds: Vec::new(),
    calls: BTreeMap::new(),
});

fn scene() -> MutexGuard<'static, Scene> {
    SCENE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops the permits available to foreign code; outside the lock, which the drop needs.
fn let_go() {
    let permits = std::mem::take(&mut scene().permits);
    drop(permits);
}

/// Maximum number of callbacks of one kind, because each callback may cause another.
const MAX_CALLS: usize = 20;

/// Calls every method from within foreign code.
fn call_back(from: &str) {
    thread_local! {
        static INSIDE: AtomicBool = const { AtomicBool::new(false) };
    }
    if Blocked::is_on() || INSIDE.with(|inside| inside.swap(true, Ordering::Relaxed)) {
        return;
    }
    let (limiters, permits, slots, holds) = {
        let mut scene = scene();
        let calls = scene.calls.entry(from.to_owned()).or_default();
        *calls += 1;
        if *calls > MAX_CALLS {
            drop(scene);
            INSIDE.with(|inside| inside.store(false, Ordering::Relaxed));
            return;
        }
        let (limiters, permits) = (scene.limiters.clone(), scene.permits.clone());
        (limiters, permits, scene.slots.clone(), scene.holds.clone())
    };
    limiters.iter().for_each(call_limiter);
    for permit in permits {
        let _ = (
            permit.is_lost(),
            permit.deadline(),
            permit.waited(),
            permit.position(),
        );
        let _ = format!("{permit:?}");
        poll_once(permit.lost());
    }
    for slot in slots {
        let _ = (slot.is_lost(), format!("{slot:?}"));
        poll_once(slot.lost());
        drop(slot.hold());
    }
    for hold in holds {
        let _ = (hold.is_lost(), format!("{hold:?}"));
        poll_once(hold.lost());
    }
    INSIDE.with(|inside| inside.store(false, Ordering::Relaxed));
}

fn call_limiter(limiter: &Limiter) {
    let _ = (limiter.status(), format!("{limiter:?}"), limiter.clone());
    limiter.update(&PROBE).unwrap();
    static NEW: AtomicUsize = AtomicUsize::new(0);
    if NEW.fetch_add(1, Ordering::Relaxed) < 100 {
        let name = format!("new {}", NEW.load(Ordering::Relaxed));
        let new = Limit::try_concurrent(name, 1).unwrap();
        limiter.update(&new).unwrap();
        let _ = limiter.semaphore(&new, "key").unwrap();
    }
    let waits = PROBE.wait_up_to(GUARD);
    let semaphore = limiter
        .semaphore(&waits, "key")
        .unwrap()
        .and(Limit::rate("r", 9, GUARD), "key")
        .unwrap();
    for semaphore in [limiter.semaphore(&waits, "key").unwrap(), semaphore] {
        let mut acquire = semaphore.acquire();
        let _ = (acquire.position(), format!("{acquire:?} {semaphore:?}"));
        poll_once(&mut acquire);
        let _ = acquire.position();
        poll_once(semaphore.try_acquire());
        poll_once(semaphore.usage());
    }
    poll_once(request(&limiter.layer(PROBE).unwrap(), "/probe"));
}

/// Polls once. Returns whether the future is ready.
fn poll_once<F: Future>(future: F) -> bool {
    let polled = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
    matches!(polled, Poll::Ready(_))
}

async fn request(layer: &LimitLayer, path: &str) -> Response<Bytes> {
    let service = service_fn(|request: Request<()>| async move {
        if let Some(slot) = request.extensions().get::<Slot>() {
            scene().slots.push(slot.clone());
            scene().holds.extend(slot.hold().map(Arc::new));
        }
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("all")))
    });
    let request = Request::get(path).body(()).unwrap();
    let response = layer.layer(service).oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes());
    let holds = std::mem::take(&mut scene().holds);
    drop(holds);
    Response::from_parts(head, body.unwrap_or_default())
}

/// A subscriber's layer that calls back from every hook.
struct Caller;

impl<S: Subscriber> Layer<S> for Caller {
    fn register_callsite(&self, site: &'static CallSite<'static>) -> Interest {
        if is_ours(site) {
            call_back("register_callsite");
        }
        Interest::sometimes()
    }

    fn enabled(&self, site: &CallSite<'_>, _: Layered<'_, S>) -> bool {
        if is_ours(site) {
            call_back("enabled");
        }
        true
    }

    fn on_new_span(&self, _: &span::Attributes<'_>, _: &span::Id, _: Layered<'_, S>) {
        call_back("on_new_span");
    }

    fn on_enter(&self, _: &span::Id, _: Layered<'_, S>) {
        call_back("on_enter");
    }

    fn on_event(&self, event: &Event<'_>, _: Layered<'_, S>) {
        if is_ours(event.metadata()) {
            let mut message = Message(String::new());
            event.record(&mut message);
            call_back(&format!("event {}", message.0));
        }
    }
}

fn is_ours(site: &CallSite<'_>) -> bool {
    site.target().starts_with("tower_turnstile")
}

/// The text of an event.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// A writer for logs that calls back, or blocks on demand.
struct Writer;

static BLOCKED: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        call_back("write");
        // Only warnings: these are the driver's, and not from threads that drop permits.
        if bytes.windows(5).any(|part| part == b" WARN") {
            let blocked = BLOCKED.0.lock().unwrap();
            drop(BLOCKED.1.wait_while(blocked, |blocked| *blocked).unwrap());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// While this lives, foreign code blocks instead of calling back.
struct Blocked;

impl Blocked {
    fn new() -> Self {
        *BLOCKED.0.lock().unwrap() = true;
        Self
    }

    fn is_on() -> bool {
        *BLOCKED.0.lock().unwrap()
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        *BLOCKED.0.lock().unwrap() = false;
        BLOCKED.1.notify_all();
    }
}

/// A recorder whose handles call back.
struct Metrics;

struct Handle(String);

impl Recorder for Metrics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        call_back("describe");
    }

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        call_back("describe");
    }

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        call_back("describe");
    }

    fn register_counter(&self, key: &MetricKey, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(handle(key))
    }

    fn register_gauge(&self, key: &MetricKey, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(handle(key))
    }

    fn register_histogram(&self, key: &MetricKey, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(handle(key))
    }
}

fn handle(key: &MetricKey) -> Arc<Handle> {
    call_back("register");
    Arc::new(Handle(format!("metric {}", key.name())))
}

impl CounterFn for Handle {
    fn increment(&self, _: u64) {
        call_back(&self.0);
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for Handle {
    fn increment(&self, _: f64) {
        call_back(&self.0);
    }

    fn decrement(&self, _: f64) {
        call_back(&self.0);
    }

    fn set(&self, _: f64) {
        call_back(&self.0);
    }
}

impl HistogramFn for Handle {
    fn record(&self, _: f64) {
        call_back(&self.0);
    }
}

/// A waker that calls back when it wakes and when it is dropped.
struct Caught(Waker);

impl Wake for Caught {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        call_back("wake");
        self.0.wake_by_ref();
    }
}

impl Drop for Caught {
    fn drop(&mut self) {
        call_back("drop of a waker");
    }
}

/// Polls with wakers that call back, a new waker each time.
async fn caught<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| {
        let waker = Waker::from(Arc::new(Caught(cx.waker().clone())));
        future.as_mut().poll(&mut Context::from_waker(&waker))
    })
    .await
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let written = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .with_writer(|| Writer)
            .with_filter(tracing_subscriber::filter::LevelFilter::from_level(
                Level::DEBUG,
            ));
        let subscriber = tracing_subscriber::registry().with(written).with(Caller);
        tracing::subscriber::set_global_default(subscriber).unwrap();
        drop(Limiter::in_memory());
        assert!(was_called(&format!("event {WITHOUT_RECORDER}")));
        metrics::set_global_recorder(Metrics).ok().unwrap();
    });
}

/// One scenario at a time, with a time limit: a hanging one is named.
fn run(name: &str, scenario: impl FnOnce(&Runtime) + Send + 'static) {
    install();
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        scenario(&runtime);
        let mut fresh = Scene {
            limiters: Vec::new(),
            permits: Vec::new(),
            slots: Vec::new(),
            holds: Vec::new(),
            calls: std::mem::take(&mut scene().calls),
        };
        std::mem::swap(&mut *scene(), &mut fresh);
        drop(fresh);
        runtime.shutdown_timeout(Duration::from_secs(1));
        sender.send(()).unwrap();
    });
    match receiver.recv_timeout(4 * GUARD) {
        Ok(()) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name} hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().unwrap_err())
        }
    }
}

/// No stall of a busy machine is an outage.
fn lasting() -> LimiterBuilder {
    builder(10 * GUARD)
}

/// Outages are noticed, and leases end, in a second.
fn hasty() -> LimiterBuilder {
    builder(Duration::from_secs(1))
}

fn builder(lease: Duration) -> LimiterBuilder {
    Limiter::builder()
        .lease(lease)
        // An exchange that was cut may run until then, and `shutdown` waits for it.
        .store_timeout((lease / 4).min(GUARD / 4))
        .poll_interval(Duration::from_millis(100))
}

async fn connected(builder: LimiterBuilder, server: &RedisServer) -> Limiter {
    let limiter = builder.connect(&server.url()).await.unwrap();
    scene().limiters.push(limiter.clone());
    limiter
}

async fn until(what: &str, done: impl Fn() -> bool) {
    let done = async {
        while !done() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(GUARD, done).await.expect(what);
}

fn was_called(from: &str) -> bool {
    scene().calls.contains_key(from)
}

async fn until_told(message: &'static str) {
    until(message, || was_called(&format!("event {message}"))).await;
}

/// A permit that foreign code can use too.
async fn held(limiter: &Limiter, limit: &Limit) -> Arc<Permit> {
    let permit = caught(limiter.semaphore(limit, "key").unwrap().acquire()).await;
    let permit = Arc::new(permit.unwrap());
    scene().permits.push(permit.clone());
    permit
}

/// Requests and permits with every outcome, in memory and with a store.
fn requests_and_permits(runtime: &Runtime, limiter: &Limiter) {
    let one = Limit::concurrent("one", 1).wait_up_to(GUARD);
    runtime.block_on(async {
        let first = held(limiter, &one).await;
        let semaphore = limiter.semaphore(&one, "key").unwrap();
        let waiter = tokio::spawn(caught(semaphore.acquire()));
        until("it waits", || limiter.status().waiting > 0).await;
        // Cancelled, with a different waker from the first.
        let mut given_up = semaphore.acquire();
        poll_once(&mut given_up);
        poll_once(caught(&mut given_up));
        drop(given_up);
        let_go();
        drop(first);
        drop(soon(waiter).await.unwrap().unwrap());
        // Woken by a new value, by shadow mode, and by a rate.
        let _held = held(limiter, &one).await;
        let waiter = tokio::spawn(caught(semaphore.acquire()));
        until("it waits", || limiter.status().waiting > 0).await;
        limiter.update(&Limit::concurrent("one", 2)).unwrap();
        drop(soon(waiter).await.unwrap().unwrap());
        limiter.update(&Limit::concurrent("one", 1)).unwrap();
        let waiter = tokio::spawn(caught(semaphore.acquire()));
        until("it waits", || limiter.status().waiting > 0).await;
        limiter
            .update(&Limit::concurrent("one", 1).mode(Mode::Off))
            .unwrap();
        drop(soon(waiter).await.unwrap().unwrap());
        limiter.update(&Limit::concurrent("one", 1)).unwrap();
        let rate = Limit::rate("starts", 20, Duration::from_secs(1))
            .burst(1)
            .wait_up_to(GUARD);
        let both = limiter
            .semaphore(&rate, "key")
            .unwrap()
            .and(Limit::concurrent("two", 2), "key")
            .unwrap();
        for _ in 0..3 {
            let permit = caught(both.acquire()).await.unwrap();
            // A name that none of its rates has: one warning, later at debug level.
            permit.budget("unknown").unwrap_err();
        }
        let short = Limit::concurrent("one", 1).wait_up_to(Duration::from_millis(20));
        let error = caught(limiter.semaphore(&short, "key").unwrap().acquire())
            .await
            .unwrap_err();
        assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
        caught(semaphore.usage()).await.unwrap();
        semaphore.pause("one", Duration::from_millis(1)).unwrap();
    });
}

/// Layers with closures that call back.
fn layers(runtime: &Runtime, limiter: &Limiter) {
    let full = Limit::concurrent("full", 1);
    let by_key = full.clone().by_key(|_| {
        call_back("key closure");
        Some("key")
    });
    let later = Limit::concurrent("later", 5).by_key_async(|_| {
        call_back("async key closure");
        async {
            call_back("async key future");
            Some("key")
        }
    });
    let layer = limiter
        .layer([by_key, later])
        .unwrap()
        .refuse_with(|refusal, _| {
            call_back("refusal closure");
            refusal.to_response()
        });
    runtime.block_on(async {
        assert_eq!(request(&layer, "/").await.status(), 200);
        let taken = held(limiter, &full).await;
        assert_eq!(request(&layer, "/").await.status(), 429);
        until_told("refused").await;
        let shadow = full.clone().mode(Mode::Shadow);
        limiter.update(&shadow).unwrap();
        assert_eq!(request(&layer, "/").await.status(), 200);
        until_told("would have been refused").await;
        limiter.update(&full).unwrap();
        let_go();
        drop(taken);
        let without = full.clone().by_key(|_| None::<Key>);
        assert_eq!(
            request(&limiter.layer(without).unwrap(), "/")
                .await
                .status(),
            200
        );
        until_told("the request has no key: it is not limited").await;
        let by_address = full.clone().by_client_address(ClientAddress::peer());
        let by_address = limiter.layer(by_address).unwrap();
        assert_eq!(request(&by_address, "/").await.status(), 200);
        until_told(ADDRESSLESS).await;
        let adaptive = Limit::concurrent("adaptive", 5)
            .by_key(|_| Some("key"))
            .outcome_by(|_| {
                call_back("judge");
                Outcome::Overloaded
            })
            .weight_by(|head| if head.uri.path() == "/three" { 3 } else { 1 })
            .adapt(1..=9);
        let adaptive = limiter.layer(adaptive).unwrap();
        // The store is told ten times a second at most. From 5 to 2, and to 1.
        for (path, event) in [
            ("/three", "event limit was cut"),
            ("/", "event limit was cut to its floor: its upstream is down, or the target is too strict"),
        ] {
            soon(async {
                while !was_called(event) {
                    request(&adaptive, path).await;
                }
            })
            .await;
        }
        let unlayered = axum::Router::new().route("/", axum::routing::get(|_: Slot| async {}));
        let head = Request::get("/").body(axum::body::Body::empty()).unwrap();
        assert_eq!(unlayered.oneshot(head).await.unwrap().status(), 500);
        until_told("a handler extracts a slot on a route without a limit layer").await;
        // A bound ends a response in progress, and its slot.
        let bounded = limiter.layer(Limit::concurrent("bounded", 1)).unwrap();
        let bounded = bounded
            .max_hold(Duration::from_millis(50))
            .on_lost(OnLost::Abort);
        let service = service_fn(|_: Request<()>| async move {
            let stream = http_body_util::StreamBody::new(futures_util::stream::pending::<
                Result<http_body::Frame<Bytes>, Infallible>,
            >());
            Ok::<_, Infallible>(Response::new(stream))
        });
        let service = bounded.layer(service);
        loop {
            let response = service.clone().oneshot(Request::default()).await;
            // While the machine stalls, a slot may end before the response begins.
            let ended = caught(response.unwrap().into_body().collect()).await;
            if ended.is_err() {
                break;
            }
        }
        until_told("slots were taken back").await;
        until_told("a slot has ended: its response is aborted").await;
    });
}

const JOB: Limit = Limit::concurrent("job", 3);

/// The store loses its data.
async fn lost_data(server: &RedisServer, limiter: &Limiter) {
    let permit = held(limiter, &JOB).await;
    server.cli(&["FLUSHALL"]);
    // Work, before which the store is asked now and then whether it has lost its data.
    let other = limiter.semaphore(&JOB, "other").unwrap();
    const LOST: &str =
        "the store has lost its data: permits return to it before newcomers under strict limits";
    until(LOST, || {
        poll_once(other.acquire());
        was_called(&format!("event {LOST}"))
    })
    .await;
    until_told("permits that the store had lost were put back").await;
    drop(permit);
}

/// The store does not answer for longer than a lease.
async fn outage(server: &RedisServer, limiter: &Limiter) {
    let permit = held(limiter, &JOB).await;
    // A permit of the fallback has no lease to lose.
    until("it is in the store", || {
        permit.deadline().is_some() || permit.is_lost()
    })
    .await;
    server.pause();
    soon(caught(permit.lost())).await;
    until_told("permits were lost: not renewed in time").await;
    until_told("the store is down: the fallback of each limit applies").await;
    let meanwhile = held(limiter, &JOB).await;
    server.resume();
    until_told("the store is back").await;
    until_told("permits that a fallback had admitted were entered into the store").await;
    drop((permit, meanwhile));
}

/// The store refuses to work.
async fn refusals(server: &RedisServer, limiter: &Limiter) {
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let _ = caught(limiter.semaphore(&JOB, "full").unwrap().acquire()).await;
    until_told(
        "the store accepts no new permits: the fallback of each limit applies to new requests",
    )
    .await;
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    let semaphore = limiter.semaphore(&JOB, "another").unwrap();
    until("it is back", || {
        !poll_once(semaphore.acquire()) && limiter.status().store_up
    })
    .await;
    // A key of another type.
    let wrong = limiter.semaphore(&JOB, "wrong").unwrap();
    let held = wrong.acquire().await.unwrap();
    let keys = server.keys("*");
    drop(held);
    until("it is free", || server.key_count() == 0).await;
    for key in keys.lines() {
        server.cli(&["SET", key, "text"]);
    }
    assert!(caught(wrong.acquire()).await.is_err());
    until_told("a key of the limit cannot be used: its requests are refused").await;
    server.cli(&["ACL", "SETUSER", "default", "-@all", "+acl", "+ping"]);
    let refused = caught(limiter.semaphore(&JOB, "key").unwrap().acquire()).await;
    assert_eq!(refused.unwrap_err().kind(), AcquireErrorKind::Misconfigured);
    until_told("the store is misconfigured: its limits refuse all requests").await;
    server.cli(&["ACL", "SETUSER", "default", "+@all"]);
}

/// Operations of operators, and their events.
async fn steered(server: &RedisServer, limiter: &Limiter) {
    let order = async |words: &[&str]| {
        let url = server.url();
        let words = [
            &["--store", &url],
            words,
            &["--author", "ada", "--reason", "a test"],
        ]
        .concat();
        let mut command = tokio::process::Command::from(command("turnstile", &words));
        let _ = command.output().await.unwrap();
    };
    let starts = Limit::rate("starts", 5, Duration::from_secs(1));
    // Nobody knows yet that it is a rate, which cannot have this value.
    order(&["set", "starts", "0", "--key", "key", "--for", "60s"]).await;
    let _ = caught(limiter.semaphore(&starts, "key").unwrap().acquire()).await;
    until_told("an override does not apply").await;
    let permit = held(limiter, &JOB).await;
    let id = permit.id().unwrap().to_string();
    // Repeated, since a replica may not hear of it in time on a machine that stalls.
    let obeyed = async |words: &[&str], message: &str| {
        while !was_called(&format!("event {message}")) {
            order(words).await;
        }
    };
    soon(obeyed(&["revoke", &id], "an operator has revoked permits")).await;
    until_told("revoked").await;
    let paused = limiter
        .semaphore(Limit::concurrent("paused", 3), "key")
        .unwrap();
    paused.pause("paused", GUARD).unwrap();
    soon(obeyed(
        &["resume", "paused"],
        "an operator has ended pauses",
    ))
    .await;
    let ask = "local now_ms = redis.call('TIME')[1] * 1000
        local head = '{\"v\":0,\"from\":\"AAAAAAAAAAAAAAAA\",\"number\":1,\"ask\":0,\"not_after_ms\":'
        redis.call('PUBLISH', 'turnstile:control:0', head .. string.format('%.0f}', now_ms + 50000))";
    server.cli(&["EVAL", ask, "0"]);
    until_told("an operator of another version cannot ask this replica").await;
    let declares = async |max| {
        let replica = connected(lasting().operable(), server).await;
        drop(
            replica
                .semaphore(Limit::concurrent("differing", max), "")
                .unwrap(),
        );
        replica
    };
    let declared = server.keys("*:declared:*").lines().count();
    let one = declares(3).await;
    until("it has declared its limit", || {
        server.keys("*:declared:*").lines().count() > declared
    })
    .await;
    let other = declares(4).await;
    until_told("another replica declares another value of this limit: the largest applies").await;
    for replica in [one, other] {
        caught(replica.shutdown(Duration::ZERO)).await;
    }
    let_go();
    drop(permit);
    server.cli(&["DEL", "turnstile:control"]);
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    until_told(
        "overrides of operators that the store had lost were written back, even if just removed",
    )
    .await;
    server.cli(&["SET", "turnstile:control", "text"]);
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    until_told("overrides of operators cannot be read or restored").await;
}

/// A server whose connections end again and again.
fn flapping(runtime: &Runtime, server: &RedisServer, limiter: &Limiter) {
    let semaphore = limiter.semaphore(&JOB, "flapping").unwrap();
    runtime.block_on(until("connections end again and again", || {
        server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        poll_once(semaphore.acquire());
        was_called(&format!("event {WITHOUT_WAKE_UPS}"))
    }));
}

#[test]
fn all_foreign_code_may_call_back() {
    run("in memory", |runtime| {
        let limiter = lasting().in_memory().unwrap();
        scene().limiters.push(limiter.clone());
        requests_and_permits(runtime, &limiter);
        layers(runtime, &limiter);
        runtime.block_on(caught(limiter.shutdown(Duration::ZERO)));
    });
    run("with a store", |runtime| {
        let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]);
        let limiter = runtime.block_on(connected(lasting(), &server));
        requests_and_permits(runtime, &limiter);
        layers(runtime, &limiter);
        flapping(runtime, &server, &limiter);
        runtime.block_on(caught(limiter.shutdown(Duration::ZERO)));
    });
    run("with stores in trouble", |runtime| {
        let [one, two, three] = [(); 3].map(|()| RedisServer::start());
        runtime.block_on(async {
            let losing = connected(builder(Duration::from_secs(9)), &one).await;
            let hanging = connected(hasty(), &two).await;
            let refusing = connected(lasting(), &three).await;
            tokio::join!(
                lost_data(&one, &losing),
                outage(&two, &hanging),
                refusals(&three, &refusing),
            );
        });
    });
    run("with a task that does not run", |runtime| {
        let server = RedisServer::start();
        let undriven = Builder::new_current_thread().enable_all().build().unwrap();
        let limiter = undriven.block_on(hasty().connect(&server.url())).unwrap();
        scene().limiters.push(limiter.clone());
        let semaphore = limiter.semaphore(&PROBE, "late").unwrap();
        drop(undriven.block_on(caught(semaphore.acquire())).unwrap());
        drop(runtime.block_on(caught(semaphore.acquire())).unwrap());
        runtime.block_on(until_told(LATE));
        let bare = Builder::new_current_thread().build().unwrap();
        let ended = Builder::new_current_thread().enable_all().build().unwrap();
        let limiter = ended.block_on(lasting().connect(&server.url())).unwrap();
        scene().limiters.push(limiter.clone());
        let semaphore = limiter.semaphore(&PROBE, "bare").unwrap();
        drop(ended);
        drop(bare.block_on(caught(semaphore.acquire())).unwrap());
        runtime.block_on(until_told(PANICKED));
        // The runtime ends with a slot that was never released.
        let ends = Builder::new_current_thread().enable_all().build().unwrap();
        let limiter = ends.block_on(lasting().connect(&server.url())).unwrap();
        let semaphore = limiter.semaphore(&PROBE, "kept").unwrap();
        let kept = ends.block_on(caught(semaphore.acquire())).unwrap();
        drop((semaphore, limiter, ends));
        drop(kept);
        runtime.block_on(until_told(DROPPED));
    });
    run("with a store that is gone in the end", |runtime| {
        let mut server = RedisServer::start();
        let limiter = runtime.block_on(connected(hasty(), &server));
        let semaphore = limiter.semaphore(&PROBE, "kept").unwrap();
        let kept = runtime.block_on(caught(semaphore.acquire())).unwrap();
        server.stop();
        runtime.block_on(caught(limiter.shutdown(Duration::ZERO)));
        runtime.block_on(until_told(UNCONFIRMED));
        drop(kept);
    });
    run("with operators who may not ask", |runtime| {
        let server = RedisServer::start();
        server.cli(&["ACL", "SETUSER", "default", "resetchannels", "&*:wake:*"]);
        let limiter = runtime.block_on(connected(lasting().operable(), &server));
        runtime.block_on(until_told(INOPERABLE));
        runtime.block_on(caught(limiter.shutdown(Duration::ZERO)));
    });
    run("with operators", |runtime| {
        let server = RedisServer::start();
        let limiter = runtime.block_on(connected(lasting().operable(), &server));
        runtime.block_on(steered(&server, &limiter));
        runtime.block_on(caught(limiter.shutdown(Duration::ZERO)));
    });
    let scene = scene();
    let logged: BTreeSet<_> = scene
        .calls
        .keys()
        .filter_map(|from| from.strip_prefix("event "))
        .collect();
    let untold: Vec<_> = messages()
        .into_iter()
        .map(|(_, message)| message)
        .filter(|message| !logged.contains(&**message))
        .collect();
    assert_eq!(untold, [""; 0], "of {} kinds of events", messages().len());
    for from in [
        "wake",
        "drop of a waker",
        "key closure",
        "async key closure",
        "refusal closure",
        "write",
        "register",
    ] {
        assert!(scene.calls.contains_key(from), "{from} was not called");
    }
    println!(
        "{} kinds of foreign code called back: {:?}",
        scene.calls.len(),
        scene.calls
    );
}

const WITHOUT_WAKE_UPS: &str = "connections to the store end again and again after they subscribe to wake-ups: its \
                                client-output-buffer-limit pubsub may be too small; meanwhile waiters learn of \
                                their slots by polling";
const INOPERABLE: &str = "operators cannot ask this replica: its user lacks rights in the store";
const WITHOUT_RECORDER: &str = "a limiter is made before a metrics recorder is installed, so its metrics are not \
                                recorded: install the recorder first, or disable the feature `metrics`";
const LATE: &str = "the limiter's task did not run in time, since its runtime is blocked or not driven: \
                    it moves to another thread";
const PANICKED: &str = "the limiter's task panicked, perhaps since its runtime lacks timers or IO: \
                        it starts again on a thread of its own";

const ADDRESSLESS: &str = "a client has no address, and shares a key with all others like it: does the service insert \
     `PeerAddress`, and do all requests come through the proxies?";

const DROPPED: &str = "the limiter was dropped without `shutdown`, and slots may stay taken until their leases end: \
     await `Limiter::shutdown` before the process or its runtime ends";

const UNCONFIRMED: &str = "the store did not confirm all releases by the end of `shutdown`: \
     slots may stay taken until their leases end";

/// The texts of all events of the library, each with its level, from its source.
fn messages() -> BTreeSet<(&'static str, String)> {
    let mut messages = BTreeSet::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
    let mut folders = vec![root];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(path).unwrap();
                for level in ["error", "warn", "info", "debug"] {
                    for call in text.split(&format!("tracing::{level}!(")).skip(1) {
                        let lines = last_text(call).split("\\\n").map(str::trim_start);
                        messages.insert((level, lines.collect()));
                    }
                }
            }
        }
    }
    messages
}

/// The last text among the arguments of a call, whose parenthesis is open.
fn last_text(call: &str) -> &str {
    let (mut open, mut last) = (1, None);
    for (number, part) in call.split('"').enumerate() {
        if number % 2 == 1 {
            last = Some(part);
            continue;
        }
        for character in part.chars() {
            open += match character {
                '(' => 1,
                ')' => -1,
                _ => 0,
            };
            if open == 0 {
                return last.expect("a text");
            }
        }
    }
    panic!("a call without an end: {call}");
}

/// The guide has the beginning of each event, under its level, and no other.
#[test]
fn the_guide_lists_each_event() {
    let page = include_str!("../src/guide/metrics.md");
    let (_, table) = page.split_once("| level | about | events |").unwrap();
    let rows = table.lines().skip(2).take_while(|row| row.starts_with('|'));
    let mut messages = messages();
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [level, _, events] = cells[..] else {
            panic!("{row}");
        };
        if level == "trace" {
            continue;
        }
        for text in events.split('`').skip(1).step_by(2) {
            let begins = |(of, message): &(&str, String)| *of == level && message.starts_with(text);
            let found: Vec<_> = messages.iter().filter(|one| begins(one)).cloned().collect();
            assert_eq!(found.len(), 1, "{level} {text}: {found:?}");
            messages.remove(&found[0]);
        }
    }
    assert_eq!(messages, BTreeSet::new(), "not in the guide");
}

/// A blocking writer holds up only the thread that writes.
#[test]
fn a_log_writer_that_blocks_holds_up_nobody_else() {
    run("a blocked writer", |runtime| {
        let server = RedisServer::start();
        let limiter = runtime.block_on(connected(hasty(), &server));
        let permits = runtime.block_on(async {
            let semaphore = limiter.semaphore(&JOB, Key::SHARED).unwrap();
            let mut permits = Vec::new();
            for _ in 0..3 {
                permits.push(semaphore.acquire().await.unwrap());
            }
            permits
        });
        let blocked = Blocked::new();
        server.pause();
        // The driver finds the store down, and logs it.
        let waiting = runtime.spawn(limiter.semaphore(&PROBE, "key").unwrap().acquire());
        // Now the driver blocks a worker of the runtime, whose timers may stop as well.
        while limiter.status().store_up {
            thread::yield_now();
        }
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            drop(permits);
            sender.send(()).unwrap();
        });
        receiver
            .recv_timeout(GUARD)
            .expect("drops do not wait for the writer");
        drop(blocked);
        server.resume();
        drop(runtime.block_on(waiting));
    });
}
