//! A body that holds a permit, for clients that acquire by themselves.
//!
//! Tests: `tests/layer/permit_bodies.rs`.

use std::sync::Arc;

use http_body::Body;

use super::{
    body::ResponseBody,
    guard::{SlotGuard, Terms, Tie},
    options::OnLost,
};
use crate::permit::Permit;

impl Permit {
    /// Holds the permit until this HTTP body ends, fails or is dropped, or ends the body with it.
    ///
    /// Like [`attach`](Self::attach), with a choice of what happens if the permit is lost first. With [`OnLost::Abort`] the
    /// body is dropped at once then, whether or not it is read, and with it the call to the peer, since another request may
    /// have the slot. The reader gets a [`LostError`](super::LostError). With [`OnLost::Continue`] it goes on, over the limit.
    ///
    /// A reqwest response converts to one of the crate `http`, and back again:
    ///
    /// ```no_run
    /// use tower_turnstile::{Limit, Limiter, OnLost};
    ///
    /// const PARTNER: Limit = Limit::concurrent("partner", 20);
    ///
    /// # async fn example(limiter: Limiter) -> Result<(), Box<dyn std::error::Error>> {
    /// let permit = limiter.semaphore(&PARTNER, "partner").acquire().await?;
    /// let response = reqwest::get("http://partner.example/").await?;
    /// let response = http::Response::from(response)
    ///     .map(|body| permit.attach_body(body, OnLost::Abort))
    ///     .map(reqwest::Body::wrap);
    /// let mut response = reqwest::Response::from(response);
    /// while let Some(chunk) = response.chunk().await? {
    ///     println!("{chunk:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn attach_body<B>(self, body: B, on_lost: OnLost) -> ResponseBody<B>
    where
        B: Body + Send + 'static,
    {
        let (share, _) = self.into_share();
        let guard = match on_lost {
            OnLost::Abort => SlotGuard::Revocable(Tie {
                terms: Arc::new(Terms {
                    on_lost,
                    meter: share.meter(),
                    ..Terms::default()
                }),
                share,
                ended: None,
            }),
            OnLost::Continue => SlotGuard::Plain(Some(share)),
        };
        ResponseBody::new(body, guard)
    }
}
