//! The gate in front of a service: a layer's settings, and what they decide for a request.

#[cfg(feature = "config")]
use std::time::Duration;
use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use http::{HeaderMap, Response, StatusCode, request::Parts};
use http_body::Body;

use super::{
    body::ResponseBody,
    fields,
    guard::{Guard, Tie},
    layer::{OnLost, ReleaseAt},
    refusal::Refusal,
    scope::{Found, Scope},
    slot::Slot,
};
use crate::{
    error::{AcquireError, LostErrorKind},
    keeper::{Bounds, Demand, Leg, Request as Asked},
    limiter::Limiter,
    permit::Permit,
    status::Quota,
    telemetry::LimitMeter,
};

pub(super) type Refuse = dyn Fn(&Refusal, &Parts) -> Response<Bytes> + Send + Sync;

#[derive(Clone)]
pub(super) struct Gate {
    pub(super) limiter: Limiter,
    /// With the limits' numbers at the limiter.
    pub(super) scopes: Vec<(usize, Scope)>,
    /// Of the [first](first_of) of them.
    pub(super) meter: Option<Arc<LimitMeter>>,
    pub(super) on_lost: OnLost,
    pub(super) release_at: ReleaseAt,
    pub(super) bounds: Bounds,
    /// `None`: it depends on the scope.
    pub(super) limited_status: Option<StatusCode>,
    pub(super) unavailable_status: StatusCode,
    pub(super) refuse: Option<Arc<Refuse>>,
    pub(super) rate_limit_fields: bool,
}

impl Gate {
    /// Takes the stricter of both gates' settings.
    #[cfg(feature = "config")]
    pub(super) fn keep_to(&mut self, other: &Self) {
        let shorter = |one: Option<Duration>, other| one.into_iter().chain(other).min();
        self.bounds = Bounds {
            max_hold: shorter(self.bounds.max_hold, other.bounds.max_hold),
            idle: shorter(self.bounds.idle, other.bounds.idle),
        };
        if other.on_lost == OnLost::Abort {
            self.on_lost = OnLost::Abort;
        }
        if other.release_at == ReleaseAt::BodyEnd {
            self.release_at = ReleaseAt::BodyEnd;
        }
    }

    /// The scope of this limit. Refusals name one of the gate's own.
    pub(super) fn scope(&self, limit_name: &str) -> &Scope {
        let mut scopes = self.scopes.iter().map(|(_, scope)| scope);
        let named = scopes.find(|scope| scope.limit().name() == limit_name);
        named.unwrap_or(self.first_scope())
    }

    /// To be named where no limit is at fault: the first that has slots, if one has.
    pub(super) fn first_scope(&self) -> &Scope {
        &self.scopes[first_of(&self.scopes)].1
    }

    pub(super) fn turn(&self, head: &Parts) -> Turn {
        match &self.scopes[..] {
            [(number, scope)] => match scope.find(*number, head) {
                Found::Now(leg) => self.turn_of(leg.map(Demand::One)),
                Found::Later(leg) => Turn::Key(leg.map(|leg| leg.map(Demand::One)).boxed()),
            },
            scopes => self.turn_under_all(scopes, head),
        }
    }

    fn turn_under_all(&self, scopes: &[(usize, Scope)], head: &Parts) -> Turn {
        let (mut legs, mut later) = (Vec::with_capacity(scopes.len()), Vec::new());
        for (number, scope) in scopes {
            match scope.find(*number, head) {
                Found::Now(leg) => legs.extend(leg),
                Found::Later(leg) => later.push(leg),
            }
        }
        let demand = |legs: Vec<Leg>| (!legs.is_empty()).then_some(Demand::All(legs));
        if later.is_empty() {
            return self.turn_of(demand(legs));
        }
        let found = join_all(later).map(move |found| {
            legs.extend(found.into_iter().flatten());
            demand(legs)
        });
        Turn::Key(found.boxed())
    }

    fn turn_of(&self, demand: Option<Demand>) -> Turn {
        match demand {
            Some(demand) => {
                let request = self.limiter.request(demand);
                Turn::Slot(match self.rate_limit_fields {
                    true => request.telling(),
                    false => request,
                })
            }
            None => Turn::Free,
        }
    }

    /// Shows the slot to the handler, and returns what holds it, and how its limits stand. `None`: no limit applies.
    pub(super) fn admit(
        self: &Arc<Self>,
        permit: Option<Permit>,
        head: &mut Parts,
    ) -> (Guard, Vec<Quota>) {
        let Some(permit) = permit else {
            Slot::show_none(&mut head.extensions);
            return (Guard::Plain(None), Vec::new());
        };
        for (limit, kind) in permit.passed() {
            tracing::debug!(limit = limit.name(), ?kind, "would have been refused");
        }
        let (share, quotas) = permit.into_share();
        Slot::show(&share, &mut head.extensions);
        if !self.bounds.is_none() {
            share.bound(self.bounds);
        }
        let guard = match self.may_end_early() {
            true => Guard::Revocable(Tie {
                share,
                gate: self.clone(),
                ended: None,
            }),
            false => Guard::Plain(Some(share)),
        };
        (guard, quotas)
    }

    /// Whether a response may have to end with its slot.
    pub(super) fn may_end_early(&self) -> bool {
        self.on_lost == OnLost::Abort || !self.bounds.is_none()
    }

    /// Whether a response ends with a slot that is over for this reason.
    pub(super) fn ends(&self, kind: LostErrorKind) -> bool {
        self.on_lost == OnLost::Abort || kind != LostErrorKind::Lost
    }

    /// A copy of the head for a refusal that may come when the service has taken the request.
    pub(super) fn spare_head(&self, head: &Parts) -> Option<Box<Parts>> {
        let is_needed = self.refuse.is_some();
        is_needed.then(|| Box::new(head.clone()))
    }

    /// Passes the slot on to the body, or lets go of it here.
    #[inline]
    pub(super) fn hand_over<B: Body + Send + 'static>(
        &self,
        mut guard: Guard,
        quotas: &[Quota],
        mut response: Response<B>,
    ) -> Response<ResponseBody<B>> {
        self.tell(response.headers_mut(), quotas);
        if self.release_at == ReleaseAt::Head {
            guard = Guard::Plain(None);
        }
        response.map(|body| ResponseBody::new(body, guard))
    }

    pub(super) fn refuse<B>(
        &self,
        refusal: Refusal,
        grpc: bool,
        head: Option<&Parts>,
    ) -> Response<ResponseBody<B>> {
        tracing::debug!(
            limit = refusal.limit().name(),
            kind = ?refusal.kind(),
            in_use = refusal.in_use(),
            waiting = refusal.waiting(),
            waited = ?refusal.waited(),
            "refused"
        );
        let mut response = match (&self.refuse, head) {
            (Some(refuse), Some(head)) => refuse(&refusal, head),
            _ if grpc => refusal.to_grpc_response(),
            _ => refusal.to_response(),
        };
        self.tell(response.headers_mut(), refusal.quotas());
        response.extensions_mut().insert(refusal);
        response.map(ResponseBody::refusal)
    }

    /// Tells the client how its limits stand, if it is to know.
    fn tell(&self, headers: &mut HeaderMap, quotas: &[Quota]) {
        if self.rate_limit_fields {
            fields::append(headers, quotas);
        }
    }
}

/// Of these the first that has slots, if one has.
pub(super) fn first_of(scopes: &[(usize, Scope)]) -> usize {
    let has_slots = |(_, scope): &(usize, Scope)| scope.limit().period().is_none();
    scopes.iter().position(has_slots).unwrap_or(0)
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("scopes", &self.scopes)
            .field("on_lost", &self.on_lost)
            .field("release_at", &self.release_at)
            .field("rate_limit_fields", &self.rate_limit_fields)
            .finish_non_exhaustive()
    }
}

/// What a request waits for before the service is called.
pub(super) enum Turn {
    Free,
    Key(BoxFuture<'static, Option<Demand>>),
    Slot(Asked),
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
                Turn::Slot(asked) => {
                    return asked.poll(cx).map_ok(|granted| Some(Permit::new(granted)));
                }
            }
        }
    }
}
