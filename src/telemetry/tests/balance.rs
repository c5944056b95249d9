//! The ends of permits balance under each limit: `admitted = released + lost + revoked + expired`, once all permits are
//! gone, whatever happened meanwhile.

use std::{collections::BTreeMap, convert::Infallible, pin::pin, time::Duration};

use bytes::Bytes;
use fastrand::Rng;
use futures_util::{FutureExt, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::{
    task::{JoinHandle, yield_now},
    time::{advance, sleep},
};
use tower::{Layer, ServiceExt, service_fn};

use crate::{
    BoxError, Limit, LimitLayer, Limiter, Mode, OnLost, Permit, Semaphore, test_util::TestStore,
};

const LEASE: Duration = Duration::from_secs(10);
const WAIT: Duration = Duration::from_secs(2);
const STEPS: usize = 120;
/// Worlds in each place. With forty, the sums are in the thousands.
const SEEDS: u64 = 10;

const PLAIN: Limit = Limit::concurrent("plain", 4).wait_up_to(WAIT);
const REUSED: Limit = Limit::concurrent("reused", 3).wait_up_to(WAIT).reuse();
const WIDE: Limit = Limit::concurrent("wide", 6).wait_up_to(WAIT);
const WATCHED: Limit = Limit::concurrent("watched", 2).mode(Mode::Shadow);
const LIMITS: [&str; 4] = ["plain", "reused", "wide", "watched"];

type Body = BoxBody<Bytes, BoxError>;

/// The place of the ledgers.
#[derive(Clone, Copy, Debug)]
enum Place {
    Memory,
    Store,
    /// Like a cluster.
    Parts,
}

struct Scene {
    limiter: Limiter,
    store: TestStore,
    rng: Rng,
    semaphores: Vec<Semaphore>,
    layers: Vec<LimitLayer>,
    permits: Vec<Permit>,
    bodies: Vec<Body>,
    requests: Vec<JoinHandle<Option<Permit>>>,
}

impl Scene {
    async fn new(place: Place, seed: u64) -> Self {
        let store = TestStore::new();
        let builder = Limiter::builder().lease(LEASE);
        let limiter = match place {
            Place::Memory => builder.in_memory(),
            Place::Store => builder.connect_to(&store).await,
            Place::Parts => builder.connect_parts_to(&store).await,
        };
        let limiter = limiter.expect("valid settings");
        let mut semaphores = Vec::new();
        for key in ["a", "b", "c"] {
            for limit in [&PLAIN, &REUSED, &WIDE] {
                semaphores.push(limiter.semaphore(limit, key).unwrap());
            }
            let all = limiter
                .semaphore(&PLAIN, key)
                .unwrap()
                .and(&WIDE, "all")
                .unwrap();
            semaphores.push(all.and(&WATCHED, key).unwrap());
        }
        let bounds = [(3, 1), (30, 2), (30, 30)];
        let layers = bounds.map(|(max_hold, idle)| {
            let layer = limiter.layer(&REUSED).unwrap().on_lost(OnLost::Abort);
            let layer = layer.max_hold(Duration::from_secs(max_hold));
            layer.idle(Duration::from_secs(idle))
        });
        let plain = limiter.layer([PLAIN, WIDE]).unwrap().on_lost(OnLost::Abort);
        Self {
            limiter,
            store,
            rng: Rng::with_seed(seed),
            semaphores,
            layers: layers.into_iter().chain([plain]).collect(),
            permits: Vec::new(),
            bodies: Vec::new(),
            requests: Vec::new(),
        }
    }

    async fn step(&mut self) {
        match self.rng.u32(0..100) {
            0..30 => self.ask(),
            30..40 => self.respond().await,
            40..62 => drop(self.take_one()),
            62..68 => self.read_bodies(),
            68..74 => self.cancel(),
            74..80 => self.revoke(),
            80..84 => self.store.go_down(),
            84..90 => self.store.come_back(),
            90..92 => self.store.forget(),
            92..94 => {
                let delay = self.rng.u64(0..600);
                self.store.respond_after(Duration::from_millis(delay));
            }
            94..97 => self.stand_still().await,
            _ => self.change_limit(),
        }
        let pause = self.rng.u64(0..400);
        sleep(Duration::from_millis(pause)).await;
        self.collect().await;
    }

    fn ask(&mut self) {
        let semaphore = self.rng.choice(&self.semaphores).expect("some").clone();
        let (waits, weight) = (self.rng.bool(), self.rng.u32(1..3));
        self.requests.push(tokio::spawn(async move {
            let acquired = if waits {
                semaphore.acquire_many(weight).await
            } else {
                semaphore.try_acquire().await
            };
            acquired.ok()
        }));
    }

    /// Runs a response whose frames arrive for some seconds, if it is read.
    async fn respond(&mut self) {
        let frames = self.rng.usize(0..4);
        let service = service_fn(move |_: Request<()>| async move {
            let frame = || Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"frame")));
            let frames = stream::iter((0..frames).map(move |_| frame()));
            let frames = futures_util::StreamExt::chain(frames, stream::pending());
            Ok::<_, Infallible>(Response::new(StreamBody::new(frames)))
        });
        let layer = self.rng.choice(&self.layers).expect("some").clone();
        let response = layer.layer(service).oneshot(Request::new(()));
        let response = tokio::spawn(response).await.expect("no panic");
        let body = response.expect("infallible").into_body();
        self.bodies.push(BodyExt::boxed(body));
    }

    /// Collects the permits of finished requests.
    async fn collect(&mut self) {
        let (done, waiting) = self.requests.drain(..).partition(JoinHandle::is_finished);
        let done: Vec<JoinHandle<_>> = done;
        self.requests = waiting;
        for request in done {
            self.permits.extend(request.await.ok().flatten());
        }
    }

    fn take_one(&mut self) -> (Option<Permit>, Option<Body>) {
        let rng = &mut self.rng;
        let permit = (!self.permits.is_empty()).then(|| rng.usize(0..self.permits.len()));
        let body = (!self.bodies.is_empty()).then(|| rng.usize(0..self.bodies.len()));
        match (permit, body) {
            (Some(permit), body) if body.is_none() || self.rng.bool() => {
                (Some(self.permits.swap_remove(permit)), None)
            }
            (_, Some(body)) => (None, Some(self.bodies.swap_remove(body))),
            _ => (None, None),
        }
    }

    fn read_bodies(&mut self) {
        for body in &mut self.bodies {
            let _ = body.frame().now_or_never();
        }
    }

    fn cancel(&mut self) {
        if !self.requests.is_empty() {
            let request = self.rng.usize(0..self.requests.len());
            self.requests.swap_remove(request).abort();
        }
    }

    fn revoke(&mut self) {
        if let Some(permit) = self.rng.choice(&self.permits) {
            for lease in permit.share().leases.all() {
                lease.revoke(lease.owners().tenure());
                lease.wake_watchers();
            }
        }
    }

    /// Stops the process for longer than a lease; not all tasks notice in the same order.
    async fn stand_still(&mut self) {
        let mut stands_still = pin!(advance(LEASE * 2));
        let _ = stands_still.as_mut().now_or_never();
        if self.rng.bool() {
            self.read_bodies();
        }
        for _ in 0..self.rng.usize(0..4) {
            drop(self.take_one());
        }
        yield_now().await;
    }

    fn change_limit(&mut self) {
        let max = self.rng.u32(1..6);
        let plain = Limit::concurrent("plain", max).wait_up_to(WAIT);
        self.limiter.update(&plain).expect("it may change");
    }

    async fn end(mut self) {
        if self.rng.bool() {
            self.store.come_back();
        }
        match self.rng.u32(0..3) {
            0 => drop(self.limiter.shutdown(Duration::ZERO).await),
            1 => drop(self.limiter.shutdown(WAIT).await),
            _ => {}
        }
        let Self {
            limiter,
            semaphores,
            layers,
            permits,
            bodies,
            requests,
            mut rng,
            ..
        } = self;
        requests.iter().for_each(JoinHandle::abort);
        let limiter = rng.bool().then_some(limiter);
        sleep(WAIT).await;
        drop((permits, bodies));
        drop((semaphores, layers));
        sleep(4 * LEASE).await;
        drop(limiter);
        yield_now().await;
    }
}

fn values(snapshotter: &Snapshotter) -> BTreeMap<(String, String), f64> {
    let mut values = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let limit = key.labels().find(|label| label.key() == "limit");
        let limit = limit.map_or_else(String::new, |label| label.value().to_owned());
        let value = match value {
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(gauge) => gauge.into_inner(),
            DebugValue::Histogram(values) => values.len() as f64,
        };
        *values.entry((key.name().to_owned(), limit)).or_default() += value;
    }
    values
}

#[tokio::test(start_paused = true)]
async fn each_admitted_permit_ends_once() {
    let mut sums = BTreeMap::<&str, f64>::new();
    for place in [Place::Memory, Place::Store, Place::Parts] {
        for seed in 0..SEEDS {
            let recorder: &'static _ = Box::leak(Box::new(DebuggingRecorder::new()));
            let snapshotter = recorder.snapshotter();
            let _guard = metrics::set_default_local_recorder(recorder);
            let mut scene = Scene::new(place, seed).await;
            for _ in 0..STEPS {
                scene.step().await;
            }
            scene.end().await;
            let values = values(&snapshotter);
            for limit in LIMITS {
                let of = |name: &str| {
                    let name = (format!("turnstile_{name}"), limit.to_owned());
                    values.get(&name).copied().unwrap_or_default()
                };
                let ends = [
                    "released_total",
                    "lost_total",
                    "revoked_total",
                    "expired_total",
                ];
                let ends = ends.map(|name| (name, of(name)));
                let ended: f64 = ends.iter().map(|(_, count)| count).sum();
                let admitted = of("admitted_total");
                assert_eq!(admitted, ended, "{place:?}, seed {seed}, {limit}: {ends:?}");
                assert_eq!(of("hold_seconds"), ended, "{place:?}, seed {seed}, {limit}");
                assert_eq!(of("held"), 0.0, "{place:?}, seed {seed}, {limit}");
                for (name, count) in ends {
                    *sums.entry(name).or_default() += count;
                }
            }
        }
    }
    println!("{sums:?}");
    assert!(sums.values().all(|count| *count > 20.0), "{sums:?}");
}
