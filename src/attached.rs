//! A stream that holds a permit until it ends.
//!
//! Tests: `tests/layer/clients.rs`.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::Stream;
use pin_project_lite::pin_project;

use crate::permit::Permit;

pin_project! {
    /// A stream that holds a [`Permit`] until it ends or is dropped.
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
    /// Holds the permit until this stream ends or is dropped.
    ///
    /// For clients that limit their calls to a peer: acquire a permit before sending the request, and the slot is held
    /// until the last byte of the response has been read. Unlike with a layer around the client, a refusal is an
    /// [`AcquireError`], not a response that looks like the peer's. [`attach_body`](Self::attach_body) takes an HTTP body. See
    /// [Clients](crate::guide::clients).
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
    /// let permit = limiter.semaphore(PARTNER, "partner")?.acquire().await?;
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
