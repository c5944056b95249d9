//! Slots revoked from responses that do not end.

use std::{
    convert::Infallible,
    future::pending,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    BoxError, Hold, Key, LimitLayer, Limiter, LostErrorKind, Mode, OnLost, Permit, Refusal,
    RefusalKind, ReleaseAt, Slot, layer::LostError,
};

use crate::support::{ONE, Script, get, held, send, serve, take};

const IDLE: Duration = Duration::from_secs(10);
const MAX: Duration = Duration::from_secs(60);

/// A limit on trial changes nothing for clients. Its slot does end, as it would if the limit were enforced.
#[tokio::test(start_paused = true)]
async fn a_slot_in_shadow_mode_ends_without_its_response() {
    let second = Duration::from_secs(1);
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE.mode(Mode::Shadow)).unwrap();
    for layer in [layer.clone().max_hold(second), layer.idle(second)] {
        let (feed, service) = fed();
        let body = send(&layer.layer(service), get("/")).await.into_body();
        assert_eq!(held(&limiter), 1);
        sleep(3 * second).await;
        assert_eq!(held(&limiter), 0);
        feed.send(Frame::data(Bytes::from("late"))).unwrap();
        drop(feed);
        let whole = body.collect().await.expect("no error").to_bytes();
        assert_eq!(whole, "late");
    }
    // Such a response ends with a shutdown.
    let shadow = limiter
        .layer(ONE.mode(Mode::Shadow))
        .unwrap()
        .max_hold(second);
    let (_feed, service) = fed();
    let service = shadow.on_lost(OnLost::Abort).layer(service);
    let body = send(&service, get("/")).await.into_body();
    sleep(3 * second).await;
    limiter.shutdown(Duration::ZERO).await;
    body.collect().await.expect_err("it is lost");
}

/// Queues for the slot, and returns the wait.
async fn admitted(limiter: &Limiter) -> (Permit, Duration) {
    let patient = ONE.wait_up_to(2 * MAX);
    let started = Instant::now();
    let acquire = limiter.semaphore(&patient, Key::SHARED).unwrap();
    let permit = timeout(2 * MAX, acquire.acquire()).await.expect("in time");
    (permit.expect("the slot comes free"), started.elapsed())
}

/// Timers are rounded up to the next millisecond.
#[track_caller]
fn assert_at(passed: Duration, expected: Duration) {
    let late = passed.checked_sub(expected);
    let on_time = late.is_some_and(|late| late <= Duration::from_millis(2));
    assert!(on_time, "{passed:?} rather than {expected:?}");
}

#[track_caller]
fn assert_ended<T>(frame: Option<Result<T, BoxError>>, kind: LostErrorKind) {
    let error = frame.expect("no end").err().expect("no frame");
    let lost = error.downcast_ref::<LostError>().expect("ours");
    assert_eq!(lost.kind(), kind);
}

type Feed = mpsc::UnboundedSender<Frame<Bytes>>;

/// A service with one response, whose frames the test supplies.
fn fed() -> (
    Feed,
    impl Service<
        Request<()>,
        Response = Response<impl Body<Data = Bytes, Error = Infallible>>,
        Error = Infallible,
        Future: Send,
    > + Clone,
) {
    let (feed, frames) = mpsc::unbounded_channel();
    let frames = Arc::new(Mutex::new(Some(frames)));
    let service = service_fn(move |_: Request<()>| {
        let mut frames = frames.lock().unwrap().take().expect("one response");
        let frames = stream::poll_fn(move |cx| frames.poll_recv(cx).map(|frame| frame.map(Ok)));
        std::future::ready(Ok(Response::new(StreamBody::new(frames))))
    });
    (feed, service)
}

fn frame() -> Frame<Bytes> {
    Frame::data(Bytes::from_static(b"frame"))
}

#[tokio::test(start_paused = true)]
async fn unread_head_makes_room() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .idle(IDLE)
        .layer(serve(Script::of(["a"])));
    let mut response = send(&service, get("/")).await;
    let (_permit, waited) = admitted(&limiter).await;
    assert_at(waited, IDLE);
    assert_ended(response.frame().await, LostErrorKind::Idle);
    assert!(response.frame().await.is_none());
    assert_eq!(held(&limiter), 1);
}

#[tokio::test(start_paused = true)]
async fn unread_frame_makes_room() {
    let limiter = Limiter::in_memory();
    let frames = Script::of(["a", "b", "c", "d"]);
    let service = limiter.layer(ONE).unwrap().idle(IDLE).layer(serve(frames));
    let mut response = send(&service, get("/")).await;
    for _ in 0..3 {
        sleep(IDLE - Duration::from_millis(10)).await;
        response.frame().await.unwrap().unwrap();
        assert_eq!(held(&limiter), 1);
    }
    let (_permit, waited) = admitted(&limiter).await;
    assert_at(waited, IDLE);
    assert_ended(response.frame().await, LostErrorKind::Idle);
}

/// The service is working: the reader is not idle.
#[tokio::test(start_paused = true)]
async fn body_that_waits_is_not_idle() {
    let limiter = Limiter::in_memory();
    let (feed, service) = fed();
    let service = limiter.layer(ONE).unwrap().idle(IDLE).layer(service);
    let mut response = send(&service, get("/")).await;
    let mut reading = task::spawn(response.frame());
    assert_pending!(reading.poll());
    sleep(20 * IDLE + IDLE / 2).await;
    assert_eq!(held(&limiter), 1);
    feed.send(frame()).unwrap();
    assert!(reading.is_woken());
    assert_ready!(reading.poll()).unwrap().unwrap();
    drop(reading);
    let (_permit, waited) = admitted(&limiter).await;
    assert_at(waited, IDLE);
    assert_ended(response.frame().await, LostErrorKind::Idle);
}

#[tokio::test(start_paused = true)]
async fn service_that_does_not_answer_is_not_idle() {
    let limiter = Limiter::in_memory();
    let hangs = service_fn(|_| pending::<Result<Response<Full<Bytes>>, Infallible>>());
    let service = limiter.layer(ONE).unwrap().idle(IDLE).layer(hangs);
    let mut call = task::spawn(service.oneshot(get("/")));
    assert_pending!(call.poll());
    sleep(20 * IDLE).await;
    assert!(!call.is_woken());
    assert_eq!(held(&limiter), 1);
}

#[tokio::test(start_paused = true)]
async fn max_hold_wakes_a_body_that_waits() {
    let limiter = Limiter::in_memory();
    let service = limiter.layer(ONE).unwrap().max_hold(MAX);
    let service = service.layer(serve(Script::of(["a"]).then_waits()));
    let mut response = send(&service, get("/")).await;
    response.frame().await.unwrap().unwrap();
    let mut reading = task::spawn(response.frame());
    assert_pending!(reading.poll());
    let (_permit, waited) = admitted(&limiter).await;
    assert_at(waited, MAX);
    assert!(reading.is_woken());
    assert_ended(assert_ready!(reading.poll()), LostErrorKind::HeldTooLong);
    assert_eq!(held(&limiter), 1);
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_a_stream_that_flows() {
    let limiter = Limiter::in_memory();
    let (feed, service) = fed();
    let layer = limiter.layer(ONE).unwrap().max_hold(MAX).idle(IDLE);
    let mut response = send(&layer.layer(service), get("/")).await;
    for _ in 0..9 {
        feed.send(frame()).unwrap();
        response.frame().await.unwrap().unwrap();
        sleep(Duration::from_secs(7)).await;
    }
    assert_eq!(held(&limiter), 0);
    assert!(feed.is_closed());
    assert_ended(response.frame().await, LostErrorKind::HeldTooLong);
}

#[tokio::test(start_paused = true)]
async fn the_nearer_bound_counts() {
    let short = IDLE / 2;
    for (max_hold, idle, kind) in [
        (short, IDLE, LostErrorKind::HeldTooLong),
        (MAX, short, LostErrorKind::Idle),
    ] {
        let limiter = Limiter::in_memory();
        let layer = limiter.layer(ONE).unwrap().max_hold(max_hold).idle(idle);
        let mut response = send(&layer.layer(serve(Script::of(["a"]))), get("/")).await;
        let (_permit, waited) = admitted(&limiter).await;
        assert_at(waited, short);
        assert_ended(response.frame().await, kind);
    }
}

#[tokio::test(start_paused = true)]
async fn max_hold_before_the_head_refuses() {
    let limiter = Limiter::in_memory();
    let watch = Arc::new(());
    let dropped = Arc::downgrade(&watch);
    let hangs = service_fn(move |_: Request<()>| {
        let watch = watch.clone();
        async move {
            let _watch = watch;
            pending::<Result<Response<Full<Bytes>>, Infallible>>().await
        }
    });
    let layer = limiter
        .layer(ONE)
        .unwrap()
        .max_hold(MAX)
        .refuse_with(|refusal, head| {
            let mut response = Response::new(head.uri.path().to_owned());
            *response.status_mut() = refusal.status();
            response
        });
    let call = layer.layer(hangs).oneshot(get("/slow"));
    let response = timeout(2 * MAX, call).await.expect("in time").unwrap();
    // A single clone is left in the service.
    assert_eq!(dropped.strong_count(), 0);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let refusal = response.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind(), RefusalKind::HeldTooLong);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!((body.as_ref(), held(&limiter)), (&b"/slow"[..], 0));
}

/// A service that leaves a hold on its slot in the response, with this body.
fn holds(
    text: &'static str,
) -> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone
{
    service_fn(move |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().expect("a slot");
        let hold = Arc::new(slot.hold().expect("in progress"));
        let mut response = Response::new(Full::from(text));
        response.extensions_mut().insert(hold);
        std::future::ready(Ok(response))
    })
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_a_hold() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(ONE)
        .unwrap()
        .max_hold(MAX)
        .layer(holds("all"));
    let (parts, body) = send(&service, get("/")).await.into_parts();
    drop(body);
    let hold = parts.extensions.get::<Arc<Hold>>();
    let hold = hold.expect("a hold");
    let lost = timeout(2 * MAX, hold.lost());
    let ((_permit, waited), lost) = tokio::join!(admitted(&limiter), lost);
    lost.expect("it is reported");
    assert_at(waited, MAX);
    assert!(hold.is_lost());
}

/// G1: whether the body was read, dropped, never existed (as after an upgrade), or does not use the slot.
#[tokio::test(start_paused = true)]
async fn hold_without_a_response_is_not_idle() {
    for (text, is_read, release_at) in [
        ("all", false, ReleaseAt::BodyEnd),
        ("all", true, ReleaseAt::BodyEnd),
        ("", false, ReleaseAt::BodyEnd),
        ("all", false, ReleaseAt::Head),
    ] {
        let limiter = Limiter::in_memory();
        let layer = limiter
            .layer(ONE)
            .unwrap()
            .idle(IDLE)
            .release_at(release_at);
        let service = layer.layer(holds(text));
        let (parts, mut body) = send(&service, get("/")).await.into_parts();
        if is_read {
            body.frame().await.unwrap().unwrap();
        } else if release_at == ReleaseAt::BodyEnd {
            drop(body);
        }
        sleep(20 * IDLE).await;
        assert_eq!(held(&limiter), 1, "{text:?} {release_at:?}");
        drop(parts);
        assert_eq!(held(&limiter), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn lost_slot_that_goes_on_still_has_its_bounds() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().max_hold(MAX);
    let service = layer.layer(serve(Script::of(["a"]).then_waits()));
    let mut response = send(&service, get("/")).await;
    let started = Instant::now();
    limiter.shutdown(Duration::ZERO).await;
    response.frame().await.unwrap().unwrap();
    let end = timeout(2 * MAX, response.frame()).await.expect("in time");
    assert_ended(end, LostErrorKind::HeldTooLong);
    assert_at(started.elapsed(), MAX);
}

#[tokio::test(start_paused = true)]
async fn slot_that_was_given_back_has_no_bounds() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().max_hold(MAX).idle(IDLE);
    let frames = Script::of(["a", "b"]);
    let service = layer.release_at(ReleaseAt::Head).layer(serve(frames));
    let mut response = send(&service, get("/")).await;
    let permit = take(&limiter).await;
    sleep(2 * MAX).await;
    response.frame().await.unwrap().unwrap();
    sleep(2 * MAX).await;
    assert_eq!(response.collect().await.unwrap().to_bytes(), "b");
    assert!(!permit.is_lost());
}

#[test]
fn bounds_out_of_range_are_refused() {
    let limiter = Limiter::in_memory();
    type Setter = fn(LimitLayer, Duration) -> LimitLayer;
    for setter in [LimitLayer::max_hold as Setter, LimitLayer::idle] {
        let set = |bound| {
            let layer = limiter.layer(ONE).unwrap();
            std::panic::catch_unwind(AssertUnwindSafe(|| setter(layer, bound))).is_ok()
        };
        let (shortest, tick) = (Duration::from_millis(1), Duration::from_nanos(1));
        assert!(!set(Duration::ZERO) && !set(shortest - tick) && !set(LimitLayer::MAX_HOLD + tick));
        assert!(set(shortest) && set(LimitLayer::MAX_HOLD));
    }
}
