//! Slots that end while no task polls the response: the service's work ends with them.

use std::{
    convert::Infallible,
    future::pending,
    pin::Pin,
    sync::{Arc, Mutex, mpsc},
    task::{Context, Poll, ready},
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use tokio::{runtime, sync::oneshot};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_turnstile::{
    Hold, LimitLayer, Limiter, LostErrorKind, OnLost, Refusal, RefusalKind, ShutdownReport, Slot,
    layer::{LostError, ResponseBody},
};

use crate::support::{
    Gauge, ONE, Open, Script, Watched, get, held, send, serve_watched, soon, take,
};

const BOUND: Duration = Duration::from_secs(5);

type Setting = fn(LimitLayer) -> LimitLayer;

/// Ways in which a slot ends early, and the resulting error of the response.
const ENDS: [(Setting, LostErrorKind); 3] = [
    (|layer| layer.idle(BOUND), LostErrorKind::Idle),
    (|layer| layer.max_hold(BOUND), LostErrorKind::HeldTooLong),
    (
        |layer| layer.on_lost(OnLost::Abort),
        LostErrorKind::ShutDown,
    ),
];

/// Ends the slot, unless its bound does so.
async fn end(limiter: &Limiter, kind: LostErrorKind) {
    if kind == LostErrorKind::ShutDown {
        limiter.shutdown(Duration::ZERO).await;
    }
}

fn lost_kind<T>(frame: Option<Result<T, BoxError>>) -> LostErrorKind {
    let error = frame.expect("no end").err().expect("no frame");
    error.downcast_ref::<LostError>().expect("ours").kind()
}

#[tokio::test(start_paused = true)]
async fn unread_body_is_dropped() {
    for (setting, kind) in ENDS {
        for frames_read in 0..2 {
            let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
            let counted = gauge.clone();
            let script = Script::of(["a", "b"]).of_length(2);
            let service = serve_watched(script, move || counted.enter());
            let mut body = send(
                &setting(limiter.layer(ONE).unwrap()).layer(service),
                get("/"),
            )
            .await
            .into_body();
            for _ in 0..frames_read {
                body.frame().await.unwrap().unwrap();
            }
            assert_eq!((gauge.open(), held(&limiter)), (1, 1));
            end(&limiter, kind).await;
            gauge.until(0).await;
            assert_eq!(held(&limiter), 0);
            // The client must not mistake it for complete.
            assert!(!body.is_end_stream());
            assert_eq!(body.size_hint().exact(), None);
            assert_eq!(lost_kind(body.frame().await), kind);
            assert!(body.is_end_stream());
            assert!(body.frame().await.is_none());
        }
    }
}

/// A future in a set or in a branch of a `select!` may not be polled for a long time.
#[tokio::test(start_paused = true)]
async fn call_that_nobody_polls_is_dropped() {
    for (setting, kind, refusal_kind) in [
        (ENDS[1].0, ENDS[1].1, RefusalKind::HeldTooLong),
        (ENDS[2].0, ENDS[2].1, RefusalKind::ShutDown),
    ] {
        let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
        let counted = gauge.clone();
        let hangs = service_fn(move |_: Request<()>| {
            let open = counted.enter();
            async move {
                let _open = open;
                pending::<Result<Response<Full<Bytes>>, Infallible>>().await
            }
        });
        let service = setting(limiter.layer(ONE).unwrap()).layer(hangs.clone());
        let mut call = task::spawn(service.oneshot(get("/")));
        assert_pending!(call.poll());
        assert_eq!(gauge.open(), 1);
        end(&limiter, kind).await;
        // The call is dropped, although nobody polls it.
        gauge.until(0).await;
        assert!(call.is_woken());
        let response = assert_ready!(call.poll()).unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let refusal = response.extensions().get::<Refusal>().expect("a refusal");
        assert_eq!(refusal.kind(), refusal_kind);
    }
}

/// Work that ends with the outer slot releases the inner one.
#[tokio::test(start_paused = true)]
async fn inner_slot_is_given_back() {
    let (outer, inner) = (Limiter::in_memory(), Limiter::in_memory());
    let gauge = Gauge::default();
    let counted = gauge.clone();
    let service = serve_watched(Script::of(["a"]), move || counted.enter());
    let service = outer
        .layer(ONE)
        .unwrap()
        .max_hold(BOUND)
        .layer(inner.layer(ONE).unwrap().layer(service));
    let _response = send(&service, get("/")).await;
    assert_eq!(held(&inner), 1);
    gauge.until(0).await;
    assert_eq!(held(&inner), 0);
}

/// The next request finds that all earlier work has ended.
#[tokio::test(start_paused = true)]
async fn waiters_start_when_the_work_has_ended() {
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let counted = gauge.clone();
    let service = serve_watched(Script::of(["a"]), move || counted.enter());
    let service = limiter
        .layer(ONE.wait_up_to(100 * BOUND))
        .unwrap()
        .max_hold(BOUND)
        .layer(service);
    let calls = (0..20).map(|_| send(&service, get("/")));
    let unread = futures_util::future::join_all(calls).await;
    assert_eq!(gauge.most(), 1);
    gauge.until(0).await;
    drop(unread);
}

/// Ends its own slot while it is polled, then yields a frame or waits for ever.
struct EndsItsSlot {
    end: BoxFuture<'static, ShutdownReport>,
    has_frame: bool,
    _open: Open,
}

impl Body for EndsItsSlot {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        ready!(self.end.as_mut().poll(cx));
        self.end = pending().boxed();
        if self.has_frame {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"last")))))
        } else {
            Poll::Pending
        }
    }
}

#[tokio::test]
async fn body_may_end_its_own_slot() {
    for has_frame in [true, false] {
        let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
        let (ending, counted) = (limiter.clone(), gauge.clone());
        let service = service_fn(move |_: Request<()>| {
            let ending = ending.clone();
            let body = EndsItsSlot {
                end: async move { ending.shutdown(Duration::ZERO).await }.boxed(),
                has_frame,
                _open: counted.enter(),
            };
            std::future::ready(Ok::<_, Infallible>(Response::new(body)))
        });
        let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
        let mut body = send(&layer.layer(service), get("/")).await.into_body();
        if has_frame {
            let frame = soon(body.frame()).await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), "last");
            gauge.until(0).await;
        }
        assert_eq!(lost_kind(soon(body.frame()).await), LostErrorKind::ShutDown);
        assert_eq!(gauge.open(), 0);
    }
}

/// Blocks its thread until the test unblocks it.
struct Gate {
    entered: Option<oneshot::Sender<()>>,
    go_on: mpsc::Receiver<()>,
}

impl Gate {
    fn new() -> (Self, oneshot::Receiver<()>, mpsc::Sender<()>) {
        let (entered, enters) = oneshot::channel();
        let (let_go, go_on) = mpsc::channel();
        let entered = Some(entered);
        (Self { entered, go_on }, enters, let_go)
    }

    fn pass(&mut self) {
        if let Some(entered) = self.entered.take() {
            entered.send(()).unwrap();
        }
        self.go_on.recv().unwrap();
    }
}

/// Blocks in a poll, then yields a frame.
struct Blocks {
    gate: Gate,
    _open: Open,
}

impl Body for Blocks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.gate.pass();
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"last")))))
    }
}

/// The thread that polled it drops it, without another poll.
#[tokio::test]
async fn slot_that_ends_while_a_body_is_polled() {
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let (gate, enters, let_go) = Gate::new();
    let open = gauge.enter();
    let body = Arc::new(Mutex::new(Some(Blocks { gate, _open: open })));
    let service = service_fn(move |_: Request<()>| {
        let body = body.lock().unwrap().take().expect("one response");
        std::future::ready(Ok::<_, Infallible>(Response::new(body)))
    });
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let mut body = send(&layer.layer(service), get("/")).await.into_body();
    let reader = thread::spawn(move || {
        let frame = body.frame().now_or_never().expect("it does not wait");
        (body, frame)
    });
    soon(enters).await.unwrap();
    limiter.shutdown(Duration::ZERO).await;
    tokio::task::yield_now().await;
    assert_eq!(gauge.open(), 1);
    let_go.send(()).unwrap();
    gauge.until(0).await;
    let (mut body, frame) = reader.join().unwrap();
    let last = frame.unwrap().unwrap().into_data().unwrap();
    assert_eq!(last, "last");
    assert_eq!(lost_kind(body.frame().await), LostErrorKind::ShutDown);
}

/// The response arrives too late.
#[tokio::test]
async fn slot_that_ends_while_a_call_is_polled() {
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let (gate, enters, let_go) = Gate::new();
    let (gate, counted) = (Arc::new(Mutex::new(gate)), gauge.clone());
    let service = service_fn(move |_: Request<()>| {
        let (gate, end) = (gate.clone(), counted.enter());
        async move {
            gate.lock().unwrap().pass();
            let body = Script::of(["a"]);
            Ok::<_, Infallible>(Response::new(Watched { body, end }))
        }
    });
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let call = layer.layer(service).oneshot(get("/"));
    let caller = thread::spawn(move || call.now_or_never().expect("it does not wait"));
    soon(enters).await.unwrap();
    limiter.shutdown(Duration::ZERO).await;
    tokio::task::yield_now().await;
    assert_eq!(gauge.open(), 1);
    let_go.send(()).unwrap();
    gauge.until(0).await;
    let refused = caller.join().unwrap().unwrap();
    let refusal = refused.extensions().get::<Refusal>().expect("a refusal");
    assert_eq!(refusal.kind(), RefusalKind::ShutDown);
}

/// A reader on one thread, and the end of the slot on another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_and_end_in_a_race() {
    for _ in 0..300 {
        let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
        let counted = gauge.clone();
        let endless = service_fn(move |_: Request<()>| {
            let frame = || Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"frame")));
            let body = http_body_util::StreamBody::new(futures_util::stream::repeat_with(frame));
            let end = counted.enter();
            std::future::ready(Ok::<_, Infallible>(Response::new(Watched { body, end })))
        });
        let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
        let mut body = send(&layer.layer(endless), get("/")).await.into_body();
        let (started, reading) = oneshot::channel();
        let reader = tokio::spawn(async move {
            let mut started = Some(started);
            loop {
                match body.frame().await {
                    Some(Ok(_)) => {}
                    end => return lost_kind(end),
                }
                if let Some(started) = started.take() {
                    started.send(()).unwrap();
                }
                tokio::task::yield_now().await;
            }
        });
        soon(reading).await.unwrap();
        limiter.shutdown(Duration::ZERO).await;
        assert_eq!(soon(reader).await.unwrap(), LostErrorKind::ShutDown);
        gauge.until(0).await;
    }
}

/// Runs a closure when dropped, unless the test has failed.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if !thread::panicking() {
            (self.0)();
        }
    }
}

/// A response whose body runs a closure when dropped.
async fn with_drop<F>(layer: LimitLayer, on_drop: F) -> Response<impl Body>
where
    F: FnMut() + Clone + Send + Sync + Unpin + 'static,
{
    let service = serve_watched(Script::of(["a"]), move || OnDrop(on_drop.clone()));
    send(&layer.layer(service), get("/")).await
}

const TWO: tower_turnstile::Limit = tower_turnstile::Limit::concurrent("two", 2);

/// The next slots end normally.
#[tokio::test(start_paused = true)]
async fn drop_may_panic() {
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let layer = limiter.layer(TWO).unwrap().max_hold(BOUND);
    let _first = with_drop(layer.clone(), || panic!("a body's bug")).await;
    let counted = gauge.clone();
    let service = serve_watched(Script::of(["a"]), move || counted.enter());
    let _second = send(&layer.layer(service.clone()), get("/")).await;
    gauge.until(0).await;
    let _third = send(&layer.layer(service), get("/")).await;
    gauge.until(0).await;
    assert_eq!(held(&limiter), 0);
}

/// Neither the keeper nor other responses wait for the drop.
#[test]
fn drop_may_block() {
    let bound = Duration::from_millis(50);
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    // The limiter has a single thread, which must not be blocked.
    let own = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let limiter = Limiter::builder().runtime(own.handle().clone());
    let limiter = limiter.in_memory().unwrap();
    let (let_go, blocked) = mpsc::channel::<()>();
    runtime.block_on(async {
        let layer = limiter.layer(TWO).unwrap().max_hold(bound);
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let blocked = Arc::new(Mutex::new(blocked));
        let _first = with_drop(layer.clone(), move || {
            begun.send(()).unwrap();
            let _ = blocked.lock().unwrap().recv();
        })
        .await;
        soon(begins.recv()).await.unwrap();
        for _ in 0..3 {
            let gauge = Gauge::default();
            let counted = gauge.clone();
            let service = serve_watched(Script::of(["a"]), move || counted.enter());
            let _next = send(&layer.layer(service), get("/")).await;
            gauge.until(0).await;
        }
        let_go.send(()).unwrap();
    });
}

#[tokio::test(start_paused = true)]
async fn drop_may_call_the_limiter() {
    let limiter = Limiter::in_memory();
    let (held_in_drop, mut dropped) = tokio::sync::mpsc::unbounded_channel();
    let asked = limiter.clone();
    let semaphore = limiter.semaphore(&TWO, "another").unwrap();
    let other = Arc::new(Mutex::new(Some(semaphore.acquire().await.unwrap())));
    let service = limiter
        .layer(ONE)
        .unwrap()
        .max_hold(BOUND)
        .layer(service_fn({
            move |request: Request<()>| {
                let slot = request.extensions().get::<Slot>().expect("a slot");
                // Dropped while the body is being dropped.
                let hold: Option<Hold> = slot.hold();
                let (asked, other) = (asked.clone(), other.clone());
                let held_in_drop = held_in_drop.clone();
                let end = OnDrop(move || {
                    drop(other.lock().unwrap().take());
                    held_in_drop.send(asked.status().held).unwrap();
                });
                let body = Watched {
                    body: Script::of(["a"]),
                    end: (end, hold),
                };
                std::future::ready(Ok::<_, Infallible>(Response::new(body)))
            }
        }));
    let _response = send(&service, get("/")).await;
    assert_eq!(soon(dropped.recv()).await, Some(0));
    drop(take(&limiter).await);
}

/// The limiter's runtime drops it.
#[test]
fn response_outside_a_runtime_is_dropped() {
    let own = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let limiter = Limiter::builder().runtime(own.handle().clone());
    let limiter = limiter.in_memory().unwrap();
    let gauge = Gauge::default();
    let counted = gauge.clone();
    let service = serve_watched(Script::of(["a"]), move || counted.enter());
    let layer = limiter
        .layer(ONE)
        .unwrap()
        .max_hold(Duration::from_millis(50));
    let mut call = task::spawn(layer.layer(service).oneshot(get("/")));
    let mut response = assert_ready!(call.poll()).unwrap();
    own.block_on(gauge.until(0));
    let end = response.frame().now_or_never().expect("it does not wait");
    assert_eq!(lost_kind(end), LostErrorKind::HeldTooLong);
}

/// A loss does not end the response, and the bound still applies.
#[tokio::test(start_paused = true)]
async fn lost_slot_that_goes_on_is_revoked_at_its_bound() {
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let counted = gauge.clone();
    let service = serve_watched(Script::of(["a"]), move || counted.enter());
    let layer = limiter.layer(ONE).unwrap().max_hold(BOUND);
    let mut response = send(&layer.layer(service), get("/")).await;
    limiter.shutdown(Duration::ZERO).await;
    tokio::task::yield_now().await;
    assert_eq!(gauge.open(), 1);
    gauge.until(0).await;
    let end = response.frame().await;
    assert_eq!(lost_kind(end), LostErrorKind::HeldTooLong);
}

/// The driver runs on the runtime where the limiter was first used.
#[test]
fn end_of_the_drivers_runtime_is_survived() {
    let runtime = || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let counted = gauge.clone();
    let service = serve_watched(Script::of(["a"]), move || counted.enter());
    let layer = limiter
        .layer(TWO)
        .unwrap()
        .max_hold(Duration::from_millis(50));
    let service = layer.layer(service);
    let _unread = first.block_on(send(&service, get("/")));
    let _unread_too = second.block_on(send(&service, get("/")));
    drop(first);
    second.block_on(gauge.until(1));
}

/// A body that has reported its end is left alone, though trailers may follow.
#[tokio::test]
async fn body_that_has_ended_is_left_alone() {
    let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
    let counted = gauge.clone();
    let script = Script::of(["a"]).tells_end();
    let service = serve_watched(script, move || counted.enter());
    let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
    let mut body: ResponseBody<_> = send(&layer.layer(service), get("/")).await.into_body();
    body.frame().await.unwrap().unwrap();
    limiter.shutdown(Duration::ZERO).await;
    tokio::task::yield_now().await;
    assert_eq!(gauge.open(), 1);
    assert!(body.is_end_stream());
    assert!(body.frame().await.is_none());
}

/// G1 holds for the work behind the layer: the next request starts after the work has ended.
#[tokio::test]
async fn slot_is_given_back_after_its_work() {
    let plain: Setting = |layer| layer;
    for setting in ENDS.map(|(setting, _)| setting).into_iter().chain([plain]) {
        let limiter = Limiter::in_memory();
        let (seen, held_at_drop) = mpsc::channel();
        let watched = limiter.clone();
        let on_drop = move || seen.send(held(&watched)).unwrap();
        // A body.
        let response = with_drop(setting(limiter.layer(ONE).unwrap()), on_drop.clone()).await;
        drop(response);
        assert_eq!(held_at_drop.recv(), Ok(1));
        assert_eq!(held(&limiter), 0);
        // A call.
        let service = service_fn(move |_: Request<()>| {
            let work = OnDrop(on_drop.clone());
            async move {
                let _work = work;
                pending::<Result<Response<Full<Bytes>>, Infallible>>().await
            }
        });
        let mut call = task::spawn(
            setting(limiter.layer(ONE).unwrap())
                .layer(service)
                .oneshot(get("/")),
        );
        assert_pending!(call.poll());
        drop(call);
        assert_eq!(held_at_drop.recv(), Ok(1));
        assert_eq!(held(&limiter), 0);
    }
}
