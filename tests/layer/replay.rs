//! How the service receives a body that was read ahead, and when the body is read, in process.

use std::{
    collections::VecDeque,
    convert::Infallible,
    panic::catch_unwind,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{Limiter, ReadAheadLayer, Refusal, RefusalKind};

use crate::{
    read_ahead::busy,
    support::{GUARD, ONE, take},
};

/// Yields its frames, then fails, or ends with or without trailers; counts the frames taken.
struct Upload {
    frames: VecDeque<&'static str>,
    fails: bool,
    trailers: bool,
    ended: bool,
    over: bool,
    taken: Arc<AtomicUsize>,
}

impl Upload {
    fn of(frames: impl IntoIterator<Item = &'static str>) -> (Self, Arc<AtomicUsize>) {
        let taken = Arc::new(AtomicUsize::new(0));
        let upload = Self {
            frames: frames.into_iter().collect(),
            fails: false,
            trailers: true,
            ended: false,
            over: false,
            taken: taken.clone(),
        };
        (upload, taken)
    }

    fn fails(mut self) -> Self {
        self.fails = true;
        self
    }

    fn without_trailers(mut self) -> Self {
        self.trailers = false;
        self
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.taken.fetch_add(1, Ordering::Relaxed);
        assert!(!self.over, "polled after its end");
        if let Some(data) = self.frames.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data.into()))));
        }
        if self.ended || !(self.fails || self.trailers) {
            (self.ended, self.over) = (true, true);
            return Poll::Ready(None);
        }
        self.ended = true;
        if self.fails {
            return Poll::Ready(Some(Err("the client left".into())));
        }
        let trailers = HeaderMap::from_iter([(
            HeaderName::from_static("x-sum"),
            HeaderValue::from_static("1"),
        )]);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.frames.iter().map(|data| data.len() as u64).sum())
    }
}

/// The frames as received by the service, each with the length and end reported by the body beforehand.
async fn replay<B>(request: Request<B>) -> Result<Response<Full<Bytes>>, Infallible>
where
    B: Body<Data = Bytes, Error = BoxError> + Unpin,
{
    let (mut body, mut replay) = (request.into_body(), String::new());
    loop {
        let (length, ended) = (body.size_hint().exact().unwrap(), body.is_end_stream());
        replay += &format!("{length}{}", if ended { " end" } else { " " });
        replay += &match body.frame().await {
            None => break,
            Some(Err(error)) => error.to_string() + ", ",
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => format!("{data:?}, "),
                Err(frame) => format!("{}, ", frame.into_trailers().unwrap().len()),
            },
        };
    }
    Ok(Response::new(Full::from(replay)))
}

const BEFORE: Duration = Duration::from_millis(19);
const AFTER: Duration = Duration::from_millis(21);

#[tokio::test(start_paused = true)]
async fn service_gets_what_was_read_and_the_rest_in_order() {
    let cases = [
        (1, r#"5 b"ab", 3 b"", 3 b"c", 2 b"de", 0 1, 0 end"#, 1),
        (3, r#"5 b"abc", 2 b"de", 0 1, 0 end"#, 3),
        (4, r#"5 b"abcde", 0 1, 0 end"#, 4),
        (100, r#"5 b"abcde", 0 1, 0 end"#, 5),
    ];
    for (bound, seen, ahead) in cases {
        let (_limiter, permit, layer) = busy().await;
        let (upload, taken) = Upload::of(["ab", "", "c", "de"]);
        let service = layer.up_to(bound).layer(service_fn(replay));
        let mut call = task::spawn(service.oneshot(Request::new(upload)));
        assert_pending!(call.poll());
        tokio::time::advance(AFTER).await;
        assert_pending!(call.poll());
        assert_eq!(taken.load(Ordering::Relaxed), ahead, "up to {bound}");
        drop(permit);
        let body = call.await.unwrap().into_body();
        assert_eq!(body.collect().await.unwrap().to_bytes(), seen);
    }
}

#[tokio::test(start_paused = true)]
async fn body_that_was_read_to_its_end_has_not_ended_before_its_data() {
    let (_limiter, permit, layer) = busy().await;
    let (upload, _) = Upload::of(["a", "b"]);
    let service = layer.layer(service_fn(replay));
    let mut call = task::spawn(service.oneshot(Request::new(upload.without_trailers())));
    assert_pending!(call.poll());
    tokio::time::advance(AFTER).await;
    assert_pending!(call.poll());
    drop(permit);
    let body = call.await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), r#"2 b"ab", 0 end"#);
}

#[tokio::test(start_paused = true)]
async fn failure_behind_what_is_read_ahead_is_the_services() {
    let (_limiter, permit, layer) = busy().await;
    let (upload, _) = Upload::of(["a", "b"]);
    let service = layer.up_to(1).layer(service_fn(replay));
    let mut call = task::spawn(service.oneshot(Request::new(upload.fails())));
    assert_pending!(call.poll());
    tokio::time::advance(AFTER).await;
    assert_pending!(call.poll());
    drop(permit);
    let body = call.await.unwrap().into_body().collect().await.unwrap();
    let seen = r#"2 b"a", 1 b"b", 0 the client left, 0 end"#;
    assert_eq!(body.to_bytes(), seen);
}

#[tokio::test(start_paused = true)]
async fn failure_of_what_is_read_ahead_gives_up_the_position() {
    let (limiter, _permit, layer) = busy().await;
    let (upload, _) = Upload::of(["a"]);
    let mut service = layer.layer(service_fn(replay));
    service.ready().await.unwrap();
    let mut call = task::spawn(service.call(Request::new(upload.fails())));
    assert_pending!(call.poll());
    assert_eq!(limiter.status().waiting, 1);
    tokio::time::advance(AFTER).await;
    let response = assert_ready!(call.poll()).unwrap();
    assert_eq!(limiter.status().waiting, 0);
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let refusal = response.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind(), RefusalKind::BodyFailed);
    assert!(!refusal.kind().is_limited());
    assert!(response.headers().is_empty());
    assert!(response.into_body().is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_read_ahead_before_a_wait() {
    let (limiter, permit, layer) = busy().await;
    let service = layer.layer(service_fn(replay));
    let (upload, taken) = Upload::of(["a"]);
    let mut call = task::spawn(service.clone().oneshot(Request::new(upload)));
    assert_pending!(call.poll());
    tokio::time::advance(BEFORE).await;
    assert_pending!(call.poll());
    drop(call);
    assert_eq!(taken.load(Ordering::Relaxed), 0);

    drop(permit);
    let deaf =
        service_fn(
            |_: Request<_>| async move { Ok::<_, Infallible>(Response::new(String::new())) },
        );
    let service = limiter.layer(ONE).unwrap().read_ahead().layer(deaf);
    let (upload, taken) = Upload::of(["a"]);
    let mut call = task::spawn(service.oneshot(Request::new(upload)));
    assert_ready!(call.poll()).unwrap();
    assert_eq!(taken.load(Ordering::Relaxed), 0);
}

/// Clients can send empty frames for ever, but other tasks must run too.
#[tokio::test(start_paused = true)]
async fn empty_frames_do_not_hold_the_runtime_up() {
    let (_limiter, _permit, layer) = busy().await;
    let (upload, taken) = Upload::of(vec![""; 1_000]);
    let service = layer.layer(service_fn(replay));
    let mut call = task::spawn(service.oneshot(Request::new(upload)));
    assert_pending!(call.poll());
    tokio::time::advance(AFTER).await;
    for _ in 0..10 {
        assert!(call.is_woken());
        assert_pending!(call.poll());
    }
    assert!(taken.load(Ordering::Relaxed) < 1_000);
}

/// The limiter has a runtime, but its callers do not.
#[test]
fn without_a_runtime_it_reads_at_once() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let limiter = Limiter::builder().runtime(runtime.handle().clone());
    let limiter = limiter.in_memory().unwrap();
    let _permit = runtime.block_on(take(&limiter));
    let layer = limiter.layer(ONE.wait_up_to(GUARD)).unwrap().read_ahead();
    let (upload, taken) = Upload::of(["a"]);
    let service = layer.layer(service_fn(replay));
    let mut call = task::spawn(service.oneshot(Request::new(upload)));
    assert_pending!(call.poll());
    assert_eq!(taken.load(Ordering::Relaxed), 2);
}

#[test]
fn bounds_that_make_no_sense_are_refused() {
    for bytes in [0, ReadAheadLayer::MAX + 1] {
        let layer = || Limiter::in_memory().layer(ONE).unwrap().read_ahead();
        let built = catch_unwind(|| layer().up_to(bytes));
        assert!(built.is_err(), "{bytes}");
    }
    for bytes in [1, ReadAheadLayer::DEFAULT, ReadAheadLayer::MAX] {
        let _ = Limiter::in_memory()
            .layer(ONE)
            .unwrap()
            .read_ahead()
            .up_to(bytes);
    }
}
