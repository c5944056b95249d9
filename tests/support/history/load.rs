//! The load of a process: random requests of all kinds.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{Fallback, Key, Limit, Limiter, Permit, Semaphore};

use super::process::Orders;

const SECOND: Duration = Duration::from_secs(1);

/// A small limit with a long queue.
static HOT: Limit = Limit::concurrent("hot", 2)
    .wait_up_to(SECOND)
    .max_waiters(40)
    .fallback(Fallback::Reject);
/// A policy: a limit for each of a few callers, and one for all.
static EACH: Limit = Limit::concurrent("each", 3).wait_up_to(SECOND);
static ALL: Limit = Limit::concurrent("all", 8).wait_up_to(SECOND);
static OPENS: Limit = Limit::rate("opens", 20, SECOND)
    .burst(5)
    .wait_up_to(Duration::from_millis(300));
/// Streams, through the layer, on reused slots.
static STREAMS: Limit = Limit::concurrent("streams", 6)
    .fallback(Fallback::Allow)
    .reuse();
/// Short requests, likewise.
static SHORT: Limit = Limit::concurrent("short", 6)
    .wait_up_to(SECOND)
    .fallback(Fallback::Reject)
    .reuse();

/// Permits of every weight.
static UNITS: Limit = units(MOST_UNITS);
static FEWER_UNITS: Limit = units(6);
const MOST_UNITS: u32 = 10;

const fn units(max: u32) -> Limit {
    Limit::concurrent("units", max)
        .wait_up_to(Duration::from_secs(3))
        .fallback(Fallback::Reject)
}

struct Client {
    rng: fastrand::Rng,
    limiter: Limiter,
    hot: Semaphore,
    units: Semaphore,
    short: Semaphore,
    long_holds: u32,
    lease: Duration,
    only_units: bool,
}

/// Runs until `over`; then each client finishes its work.
pub(super) async fn run(limiter: &Limiter, orders: &Orders, over: watch::Receiver<bool>) {
    let mut clients = JoinSet::new();
    for number in 0..orders.clients {
        let mut client = Client {
            rng: fastrand::Rng::with_seed(orders.seed ^ (number as u64) << 32),
            hot: limiter.semaphore(&HOT, Key::SHARED).unwrap(),
            units: limiter.semaphore(&UNITS, Key::SHARED).unwrap(),
            short: limiter.semaphore(&SHORT, Key::SHARED).unwrap(),
            limiter: limiter.clone(),
            long_holds: orders.long_holds,
            lease: Duration::from_millis(orders.lease_ms),
            only_units: orders.units_lowered_ms.is_some(),
        };
        let over = over.clone();
        clients.spawn(async move {
            while !*over.borrow() {
                client.request().await;
            }
        });
    }
    if let Some(after) = orders.units_lowered_ms {
        let (limiter, mut over) = (limiter.clone(), over);
        clients.spawn(async move {
            tokio::select! {
                () = sleep(Duration::from_millis(after)) => {
                    limiter.update(&FEWER_UNITS).expect("it may become that");
                }
                _ = over.wait_for(|over| *over) => {}
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.expect("no panic");
    }
}

impl Client {
    async fn request(&mut self) {
        let kind = if self.only_units {
            2
        } else {
            self.rng.u32(0..10)
        };
        match kind {
            0..2 => self.hold(self.hot.clone()).await,
            2 => self.hold(self.units.clone()).await,
            3 => {
                for _ in 0..self.rng.u32(1..40) {
                    self.hold_shortly().await;
                }
            }
            4..7 => {
                let caller = format!("caller {}", self.rng.u32(0..3));
                let each = self.limiter.semaphore(&EACH, caller).unwrap();
                self.hold(each.and(&ALL, Key::SHARED).unwrap()).await;
            }
            7 => {
                let opens = self.limiter.semaphore(&OPENS, Key::SHARED).unwrap();
                self.hold(opens.and(&ALL, Key::SHARED).unwrap()).await;
            }
            _ => self.stream().await,
        }
        self.pause(30).await;
    }

    /// Some requests are cancelled before they have a permit.
    async fn hold(&mut self, semaphore: Semaphore) {
        let patience = match self.rng.u32(0..5) {
            0 => Duration::from_micros(self.rng.u64(1..30_000)),
            _ => 30 * SECOND,
        };
        let units = if semaphore.limit().name() == UNITS.name() {
            self.rng.u32(1..=MOST_UNITS)
        } else {
            1
        };
        let acquired = match self.rng.u32(0..10) {
            0 => timeout(patience, semaphore.try_acquire_many(units)).await,
            _ => timeout(patience, semaphore.acquire_many(units)).await,
        };
        if let Ok(Ok(permit)) = acquired {
            self.keep(&permit).await;
        }
    }

    async fn hold_shortly(&mut self) {
        if let Ok(permit) = self.short.acquire().await
            && self.rng.bool()
        {
            let length = Duration::from_micros(self.rng.u64(1..3_000));
            tokio::select! {
                _ = permit.lost() => {}
                () = sleep(length) => {}
            }
        }
    }

    async fn keep(&mut self, permit: &Permit) {
        let long = self.long_holds > 0 && self.rng.u32(0..self.long_holds) == 0;
        let most = if long { 2 * self.lease } else { SECOND / 20 };
        let length = most.mul_f64(self.rng.f64());
        tokio::select! {
            _ = permit.lost() => {}
            () = sleep(length) => {}
        }
    }

    /// A response of some frames, whose reader may not take all of them.
    async fn stream(&mut self) {
        let frames = self.rng.usize(0..6);
        let service = service_fn(move |_: Request<()>| async move {
            let frame = |_| Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"frame")));
            let frames = stream::iter((0..frames).map(frame));
            Ok::<_, Infallible>(Response::new(StreamBody::new(frames)))
        });
        let mut service = self.limiter.layer(STREAMS.clone()).unwrap().layer(service);
        let ready = service.ready().await.expect("infallible");
        let mut response = ready.call(Request::new(())).await.expect("infallible");
        for _ in 0..self.rng.u32(0..8) {
            if response.body_mut().frame().await.is_none() {
                break;
            }
            self.pause(20).await;
        }
    }

    async fn pause(&mut self, most_ms: u64) {
        sleep(Duration::from_micros(self.rng.u64(0..most_ms * 1_000))).await;
    }
}
