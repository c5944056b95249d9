//! A body that holds a permit, for clients that acquire their own permits.
//!
//! Tests: `tests/layer/permit_bodies.rs`.

use std::sync::Arc;

use http_body::Body;

use super::{
    guard::{SlotGuard, Terms, Tie},
    options::OnLost,
};
use crate::{
    layer::{body::ResponseBody, refusal::Form},
    permit::Permit,
};

impl Permit {
    /// Holds the permit until this HTTP body ends, fails or is dropped, and may end the body when the permit is lost.
    ///
    /// Like [`attach`](Self::attach) for streams, with a choice for a permit that is lost before the body ends. With [`OnLost::Abort`]
    /// the body, and with it the call to the peer, is then dropped at once, whether or not the body is being read, since
    /// another request may have the slot. The reader gets a [`LostError`](crate::layer::LostError). With [`OnLost::Continue`] the
    /// body continues over the limit.
    ///
    /// A reqwest response converts to a response of the crate `http`, and back:
    ///
    /// ```no_run
    /// use tower_turnstile::{Limit, Limiter, OnLost};
    ///
    /// const PARTNER: Limit = Limit::concurrent("partner", 20);
    ///
    /// # async fn example(limiter: Limiter) -> Result<(), Box<dyn std::error::Error>> {
    /// let permit = limiter.semaphore(&PARTNER, "partner")?.acquire().await?;
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
            OnLost::Abort => SlotGuard::Tied(Tie {
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
        ResponseBody::new(body, guard, Form::Http)
    }
}
