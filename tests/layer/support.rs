//! Bodies, services and requests for the tests.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future::ready,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::{sync::watch, time::timeout};
use tower::{BoxError, Service, ServiceExt, service_fn};
use tower_turnstile::{Key, Limit, Limiter, Permit};

use crate::common::redis_server::RedisServer;
pub(crate) use crate::common::{GUARD, soon};

pub(crate) const ONE: Limit = Limit::concurrent("one", 1);

/// Yields its frames, then waits for ever, fails or ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    frames: VecDeque<Result<Bytes, HeaderMap>>,
    then: Then,
    /// Whether the end is reported as soon as it is reached, instead of at the next poll.
    tells_end: bool,
    length: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Then {
    #[default]
    End,
    Fail,
    Wait,
}

impl Script {
    pub(crate) fn of<const N: usize>(frames: [&'static str; N]) -> Self {
        let frames = frames.map(|frame| Ok(Bytes::from_static(frame.as_bytes())));
        Self {
            frames: frames.into(),
            ..Self::default()
        }
    }

    pub(crate) fn trailers(mut self, name: &'static str, value: &'static str) -> Self {
        let trailers = HeaderMap::from_iter([(
            http::HeaderName::from_static(name),
            http::HeaderValue::from_static(value),
        )]);
        self.frames.push_back(Err(trailers));
        self
    }

    pub(crate) fn then_fails(mut self) -> Self {
        self.then = Then::Fail;
        self
    }

    pub(crate) fn then_waits(mut self) -> Self {
        self.then = Then::Wait;
        self
    }

    pub(crate) fn tells_end(mut self) -> Self {
        self.tells_end = true;
        self
    }

    pub(crate) fn of_length(mut self, length: u64) -> Self {
        self.length = Some(length);
        self
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match (self.frames.pop_front(), self.then) {
            (Some(Ok(data)), _) => Poll::Ready(Some(Ok(Frame::data(data)))),
            (Some(Err(trailers)), _) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            (None, Then::End) => Poll::Ready(None),
            (None, Then::Fail) => Poll::Ready(Some(Err("the script fails".into()))),
            (None, Then::Wait) => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.tells_end && self.then == Then::End && self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map(SizeHint::with_exact).unwrap_or_default()
    }
}

/// A service that always returns this body.
pub(crate) fn serve<Q, B: Clone + Send>(
    body: B,
) -> impl Service<Request<Q>, Response = Response<B>, Error = Infallible, Future: Send> + Clone {
    service_fn(move |_| ready(Ok(Response::new(body.clone()))))
}

/// The response to one request.
pub(crate) async fn send<S>(service: &S, request: Request<()>) -> S::Response
where
    S: Service<Request<()>, Error: std::fmt::Debug> + Clone,
{
    service.clone().oneshot(request).await.unwrap()
}

pub(crate) fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

pub(crate) fn held(limiter: &Limiter) -> usize {
    limiter.status().held
}

pub(crate) async fn take(limiter: &Limiter) -> Permit {
    limiter
        .semaphore(&ONE, Key::SHARED)
        .unwrap()
        .acquire()
        .await
        .unwrap()
}

/// Waits until the only slot is free.
pub(crate) async fn freed(limiter: &Limiter) {
    let patient = ONE.wait_up_to(GUARD);
    let permit = limiter
        .semaphore(&patient, Key::SHARED)
        .unwrap()
        .acquire()
        .await;
    drop(permit.expect("the slot comes free"));
}

/// A limiter on this server, for which no stall of the machine is an outage.
pub(crate) async fn on_redis(server: &RedisServer) -> Limiter {
    let builder = Limiter::builder().lease(Duration::from_secs(600));
    let builder = builder.store_timeout(Duration::from_secs(20));
    builder.connect(&server.url()).await.expect("it is up")
}

/// Counts open calls, and their maximum.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauge(Arc<watch::Sender<Count>>);

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    open: usize,
    most: usize,
}

/// Counts as open until dropped.
#[derive(Debug)]
pub(crate) struct Open(Gauge);

impl Gauge {
    pub(crate) fn enter(&self) -> Open {
        self.0.send_modify(|count| {
            count.open += 1;
            count.most = count.most.max(count.open);
        });
        Open(self.clone())
    }

    pub(crate) fn open(&self) -> usize {
        self.0.borrow().open
    }

    pub(crate) fn most(&self) -> usize {
        self.0.borrow().most
    }

    /// Waits until this many are open.
    pub(crate) async fn until(&self, open: usize) {
        let mut counts = self.0.subscribe();
        let reached = counts.wait_for(|count| count.open == open);
        let reached = timeout(GUARD, reached).await;
        let most = self.most();
        reached
            .unwrap_or_else(|_| panic!("{} are open, not {open}; at most {most}", self.open()))
            .expect("the gauge is there");
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| count.open -= 1);
    }
}

/// A body with a value that acts when dropped: counts, blocks or panics.
#[derive(Debug)]
pub(crate) struct Watched<B, D> {
    pub(crate) body: B,
    /// Dropped with the body.
    #[expect(dead_code)]
    pub(crate) end: D,
}

impl<B: Body + Unpin, D: Unpin> Body for Watched<B, D> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A service that always returns this body, with the value that `end` creates.
pub(crate) fn serve_watched<Q, B, D>(
    body: B,
    end: impl Fn() -> D + Clone + Send + Sync + 'static,
) -> impl Service<Request<Q>, Response = Response<Watched<B, D>>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ Sync
where
    B: Clone + Send + Sync,
    D: Send,
{
    service_fn(move |_| {
        let (body, end) = (body.clone(), end());
        ready(Ok(Response::new(Watched { body, end })))
    })
}
