//! A stream or body that holds a permit until it ends.
//!
//! Tests: `tests/layer/clients.rs`.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::Stream;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::permit::Permit;

pin_project! {
    /// A stream or HTTP body that holds a [`Permit`] until it ends or is dropped.
    ///
    /// Created by [`Permit::attach`].
    #[derive(Debug)]
    #[must_use = "dropping it releases the permit"]
    pub struct Attached<S> {
        #[pin]
        inner: S,
        permit: Option<Permit>,
    }
}

impl Permit {
    /// Holds the permit until this stream or HTTP body ends or is dropped.
    ///
    /// For clients that limit their calls to a peer: acquire a permit before sending the request, and the slot is held
    /// until the last byte of the response has been read. Unlike with a layer around the client, a refusal is an
    /// [`AcquireError`], not a response that looks like the peer's. See [Clients](crate::guide::clients).
    ///
    /// ```
    /// use futures_util::{StreamExt, stream};
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const PARTNER: Limit = Limit::concurrent("partner", 20);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let limiter = Limiter::in_memory();
    /// let permit = limiter.semaphore(PARTNER, "partner").acquire().await?;
    /// // With reqwest: `client.get(url).send().await?.bytes_stream()`
    /// let chunks = stream::iter(["a", "b"]);
    /// let mut chunks = permit.attach(chunks);
    /// while let Some(chunk) = chunks.next().await {
    ///     println!("{chunk}");
    /// }
    /// assert_eq!(limiter.status().held, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`AcquireError`]: crate::AcquireError
    pub fn attach<S>(self, inner: S) -> Attached<S> {
        Attached {
            inner,
            permit: Some(self),
        }
    }
}

impl<S> Attached<S> {
    /// Returns the permit; `None` once the stream has ended.
    pub fn permit(&self) -> Option<&Permit> {
        self.permit.as_ref()
    }
}

impl<S: Stream> Stream for Attached<S> {
    type Item = S::Item;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let this = self.project();
        let item = ready!(this.inner.poll_next(cx));
        if item.is_none() {
            *this.permit = None;
        }
        Poll::Ready(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<B: Body> Body for Attached<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.inner.as_mut().poll_frame(cx));
        // A reader that knows the length does not poll for the end.
        if !matches!(frame, Some(Ok(_))) || this.inner.is_end_stream() {
            *this.permit = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
