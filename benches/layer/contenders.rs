//! Layers in front of an empty handler: none, tower's limit, and ours in memory.

use std::{
    convert::Infallible,
    fmt::Debug,
    future::{Ready, ready},
    pin::pin,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Empty, Full};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimitLayer, service_fn};
use tower_turnstile::{Key, Limit, LimitLayer, Limiter, OnLost, Policy};

/// More than the requests in flight, so that none has to wait.
const EACH: Limit = Limit::concurrent("each", 100);
const ALL: Limit = Limit::concurrent("all", 100);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Contender {
    Bare,
    ConcurrencyLimit,
    /// All requests share one key.
    Shared,
    /// All requests share one key, and slots are reused.
    Reused,
    ByHeader,
    /// A limit by header, and a shared limit.
    PolicyOfTwo,
    /// No limit applies to the request.
    Unlimited,
    /// The response ends if its slot is lost.
    Abort,
    /// Operators may end the response.
    #[cfg(feature = "operate")]
    Operable,
}

impl Contender {
    pub(crate) const ALL: &[Self] = &[
        Self::Bare,
        Self::ConcurrencyLimit,
        Self::Shared,
        Self::Reused,
        Self::ByHeader,
        Self::PolicyOfTwo,
        Self::Unlimited,
        Self::Abort,
        #[cfg(feature = "operate")]
        Self::Operable,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::ConcurrencyLimit => "concurrency-limit",
            Self::Shared => "shared",
            Self::Reused => "reused",
            Self::ByHeader => "by-header",
            Self::PolicyOfTwo => "policy-of-two",
            Self::Unlimited => "unlimited",
            Self::Abort => "abort",
            #[cfg(feature = "operate")]
            Self::Operable => "operable",
        }
    }

    /// Runs `count` requests, one after the other, each until the end of its response.
    pub(crate) async fn run(self, count: usize) {
        let handler = service_fn(handler);
        let by_header = || EACH.by_header("x-api-key");
        match self {
            Self::Bare => requests(handler, count).await,
            Self::ConcurrencyLimit => {
                let layer = ConcurrencyLimitLayer::new(EACH.max() as usize);
                requests(layer.layer(handler), count).await;
            }
            Self::Shared => requests(layer(ALL).layer(handler), count).await,
            Self::Reused => requests(layer(ALL.reuse()).layer(handler), count).await,
            Self::ByHeader => requests(layer(by_header()).layer(handler), count).await,
            Self::PolicyOfTwo => {
                let policy = [by_header(), ALL.into()];
                requests(layer(policy).layer(handler), count).await;
            }
            Self::Unlimited => {
                let nobody = ALL.by_key(|_| None::<Key>);
                requests(layer(nobody).layer(handler), count).await;
            }
            Self::Abort => {
                let layer = layer(ALL).on_lost(OnLost::Abort);
                requests(layer.layer(handler), count).await;
            }
            #[cfg(feature = "operate")]
            Self::Operable => {
                let limiter = Limiter::builder().operable().in_memory();
                let layer = limiter.expect("the defaults").layer(ALL).unwrap();
                requests(layer.layer(handler), count).await;
            }
        }
    }
}

fn layer(policy: impl Into<Policy>) -> LimitLayer {
    Limiter::in_memory().layer(policy).unwrap()
}

fn handler(_: Request<Empty<Bytes>>) -> Ready<Result<Response<Full<Bytes>>, Infallible>> {
    ready(Ok(Response::new(Full::from("done"))))
}

async fn requests<S, B>(mut service: S, count: usize)
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error = Infallible>,
    B: Body<Error: Debug>,
{
    for _ in 0..count {
        let request = Request::builder().header("x-api-key", "somebody");
        let request = request.body(Empty::new()).expect("a request");
        let service = service.ready().await.expect("infallible");
        let response = service.call(request).await.expect("infallible");
        let mut body = pin!(response.into_body());
        while let Some(frame) = body.frame().await {
            frame.expect("no limit is in the way");
        }
    }
}
