//! The gate in front of a service: a layer's settings, and what they decide for a request.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode, request::Parts};
use http_body::Body;

use super::{
    body::ResponseBody,
    guard::Guard,
    layer::{OnLost, ReleaseAt},
    refusal::Refusal,
    scope::{Found, Scope},
    slot::Slot,
};
use crate::{
    error::AcquireError, key::Key, limit::Limit, limiter::Limiter, permit::Permit,
    semaphore::Acquire,
};

pub(super) type Refuse = dyn Fn(&Refusal, &Parts) -> Response<Bytes> + Send + Sync;

#[derive(Clone)]
pub(super) struct Gate {
    pub(super) limiter: Limiter,
    /// The limit's, at the limiter.
    pub(super) number: usize,
    pub(super) scope: Scope,
    pub(super) on_lost: OnLost,
    pub(super) release_at: ReleaseAt,
    pub(super) limited_status: StatusCode,
    pub(super) unavailable_status: StatusCode,
    pub(super) refuse: Option<Arc<Refuse>>,
}

impl Gate {
    pub(super) fn limit(&self) -> &Limit {
        self.scope.limit()
    }

    pub(super) fn turn<Q>(&self, request: Request<Q>) -> (Turn, Request<Q>) {
        let (found, request) = self.scope.find(request);
        let turn = match found {
            Found::Now(key) => self.turn_of(key),
            Found::Later(key) => Turn::Key(key),
        };
        (turn, request)
    }

    fn turn_of(&self, key: Option<Key>) -> Turn {
        match key {
            Some(key) => {
                let request = self.limiter.request(self.number, key, self.limit().wait());
                Turn::Slot(Acquire::new(request))
            }
            None => Turn::Free,
        }
    }

    /// Shows the slot to the handler, and returns what holds it.
    pub(super) fn admit<Q>(self: &Arc<Self>, permit: Permit, request: &mut Request<Q>) -> Guard {
        let permit = Arc::new(permit);
        let extensions = request.extensions_mut();
        let outer = extensions.remove::<Slot>();
        extensions.insert(Slot::new(&permit, outer));
        let abort = (self.on_lost == OnLost::Abort).then(|| self.clone());
        Guard::new(permit, abort)
    }

    /// A copy of the head for a refusal that may come when the service has taken the request.
    pub(super) fn spare_head<Q>(&self, request: Request<Q>) -> (Option<Box<Parts>>, Request<Q>) {
        if self.on_lost != OnLost::Abort || self.refuse.is_none() {
            return (None, request);
        }
        let (head, body) = request.into_parts();
        let spare = Some(Box::new(head.clone()));
        (spare, Request::from_parts(head, body))
    }

    /// Passes the slot on to the body, or lets go of it here.
    pub(super) fn hand_over<B: Body>(
        &self,
        mut guard: Guard,
        response: Response<B>,
    ) -> Response<ResponseBody<B>> {
        if self.release_at == ReleaseAt::Head {
            guard.release();
        }
        response.map(|body| ResponseBody::new(body, guard))
    }

    pub(super) fn refuse<B>(
        &self,
        refusal: Refusal,
        head: Option<&Parts>,
    ) -> Response<ResponseBody<B>> {
        tracing::debug!(
            limit = self.limit().name(),
            kind = ?refusal.kind(),
            in_use = refusal.in_use(),
            waiting = refusal.waiting(),
            waited = ?refusal.waited(),
            "refused"
        );
        let mut response = match (&self.refuse, head) {
            (Some(refuse), Some(head)) => refuse(&refusal, head),
            _ => refusal.to_response(),
        };
        response.extensions_mut().insert(refusal);
        response.map(ResponseBody::refusal)
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("scope", &self.scope)
            .field("on_lost", &self.on_lost)
            .field("release_at", &self.release_at)
            .finish_non_exhaustive()
    }
}

/// What a request waits for before the service is called.
pub(super) enum Turn {
    Free,
    Key(BoxFuture<'static, Option<Key>>),
    Slot(Acquire),
}

impl Turn {
    /// `None`: the request is not limited.
    pub(super) fn poll(
        &mut self,
        gate: &Gate,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Permit>, AcquireError>> {
        loop {
            match self {
                Turn::Free => return Poll::Ready(Ok(None)),
                Turn::Key(key) => *self = gate.turn_of(ready!(key.as_mut().poll(cx))),
                Turn::Slot(acquire) => return Pin::new(acquire).poll(cx).map_ok(Some),
            }
        }
    }
}
