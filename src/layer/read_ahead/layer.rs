//! The layer: a limit around a service that takes the replayed body.
//!
//! Tests: `tests/layer/read_ahead.rs`.

use tower_layer::Layer;

use super::ReadAhead;
use crate::layer::LimitLayer;

/// A [`LimitLayer`] that reads ahead in the bodies of waiting requests.
///
/// The layer notices HTTP/1 clients that disconnect while they queue. Created by [`LimitLayer::read_ahead`].
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct ReadAheadLayer {
    layer: LimitLayer,
    bound: usize,
}

impl LimitLayer {
    /// Reads ahead in the bodies of waiting requests, to notice disconnected HTTP/1 clients.
    ///
    /// Call this method last: the settings made so far are kept, but the returned type has no methods to change them.
    ///
    /// hyper's HTTP/1 server notices a disconnect only when it reads, and stops reading while the body is not consumed.
    /// With this layer a request that has waited for 20 ms reads the first 64 KiB ([`ReadAheadLayer::DEFAULT`]) of its body, and replays
    /// them once it has its slot: the service gets the data, the trailers and the rest of the body in order. A request that
    /// gets its slot earlier does not read ahead. If the store is 20 ms away or more, all requests do.
    ///
    /// When the client disconnects, the request leaves the queue at once if all data sent so far was read ahead: a whole
    /// body of up to 64 KiB, or the first part of a longer body, with a length or chunked. Otherwise hyper stops reading,
    /// as without this layer, and the request keeps its position until it is admitted or its wait is over;
    /// [`up_to`](ReadAheadLayer::up_to) raises the bound. A client that has already sent the start of its next request
    /// (pipelining) is not noticed either. Over HTTP/2 every disconnect is noticed, with or without this layer.
    ///
    /// A refused HTTP/1 request gets its response once the rest of its body has been read and discarded: at most 8 MiB (or
    /// the number of [`up_to`](ReadAheadLayer::up_to), if larger), for at most a second. Otherwise hyper would close the
    /// connection, and a client that sends its whole body before it reads would see a reset connection instead of the
    /// refusal. A request without a body, with a longer `Content-Length`, or with an `Expect: 100-continue` that is not answered
    /// yet is refused at once.
    ///
    /// Other effects:
    ///
    /// - The service gets another type of body, [`ReadAheadBody`](super::ReadAheadBody). axum and other services that are generic over the body
    ///   accept this type. The request's body has to be [`Unpin`], like hyper's and axum's.
    /// - The data that was read ahead arrives as one frame.
    /// - A client that sent `Expect: 100-continue` gets `100 Continue` while it waits.
    /// - If the body fails while the request waits, as when the client disconnects in the middle of the body, the request
    ///   is refused: [`RefusalKind::BodyFailed`], with 400 and no body. The service is not called. A layer that limits the
    ///   length of bodies also makes them fail: put such a layer inside this one, so that it can send its own response.
    /// - Each waiting request takes additional memory: up to 64 KiB, plus one frame (up to about 400 KiB in hyper).
    ///   [`Limit::max_waiters`](crate::Limit::max_waiters) bounds the queue of a key.
    ///
    /// The Tokio runtime that polls the requests needs timers.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use axum::{Router, routing::post};
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// static CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(30));
    ///
    /// let limiter = Limiter::in_memory();
    /// let app: Router = Router::new()
    ///     .route("/chat", post(async |prompt: String| prompt))
    ///     .route_layer(limiter.layer(CHAT.clone().by_header("x-api-key"))?.read_ahead());
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// [`RefusalKind::BodyFailed`]: crate::RefusalKind::BodyFailed
    pub fn read_ahead(self) -> ReadAheadLayer {
        ReadAheadLayer {
            layer: self,
            bound: ReadAheadLayer::DEFAULT,
        }
    }
}

impl ReadAheadLayer {
    /// Default number of bytes read of a waiting request's body: 64 KiB.
    pub const DEFAULT: usize = 64 * 1024;
    /// Maximum number of bytes read ahead: 16 MiB.
    pub const MAX: usize = 16 * 1024 * 1024;

    /// Sets the number of bytes of a body to read ahead. Default: 64 KiB ([`ReadAheadLayer::DEFAULT`]).
    ///
    /// If the number exceeds the longest body, every disconnect over HTTP/1 is noticed. Each waiting request may take this
    /// much memory.
    ///
    /// # Panics
    ///
    /// If the number is 0, or more than 16 MiB ([`ReadAheadLayer::MAX`]).
    #[track_caller]
    pub fn up_to(mut self, bytes: usize) -> Self {
        assert!(
            (1..=Self::MAX).contains(&bytes),
            "cannot read {bytes} bytes ahead: 1 to {} can be",
            Self::MAX
        );
        self.bound = bytes;
        self
    }
}

impl<S> Layer<S> for ReadAheadLayer {
    type Service = ReadAhead<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ReadAhead::new(self.layer.layer(inner), self.bound)
    }
}
