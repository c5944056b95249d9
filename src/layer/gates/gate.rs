//! The gate in front of a service: applies a layer's settings to a request.
//!
//! Tests: `tests/layer/policies.rs`, `refusals.rs`, `logs.rs`.

use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use http::{HeaderMap, Response, StatusCode, request::Parts};
use http_body::Body;
use tokio::time::Instant;

use super::labels::Labels;
#[cfg(feature = "config")]
use crate::limit::Limit;
use crate::{
    error::AcquireError,
    keeper::{Demand, KeeperHandle, Leg, PermitRequest},
    key::Key,
    layer::{
        body::ResponseBody,
        keys::{Lookup, Scope},
        refusal::{
            Form, Refusal, RefusalBody, RefusalKind, fields, sealed::Sealed, without_content,
        },
        response::{ReleaseAt, SlotGuard, Terms, Tie, TimeToHead},
        slot::{DeclaredLimits, Slot},
    },
    leases::Label,
    limit::{LimitId, Mode},
    permit::{Permit, Share},
    status::Quota,
    telemetry::LimitMeter,
};

pub(in crate::layer) type Refuse = dyn Fn(&Refusal, &Parts) -> Response<RefusalBody> + Send + Sync;

#[derive(Clone)]
pub(crate) struct Gate {
    pub(in crate::layer) keeper: Arc<KeeperHandle>,
    pub(in crate::layer) scopes: Vec<GateScope>,
    pub(in crate::layer) terms: Arc<Terms>,
    pub(in crate::layer) release_at: ReleaseAt,
    /// `None`: depends on the scope.
    pub(in crate::layer) limited_status: Option<StatusCode>,
    pub(in crate::layer) unavailable_status: StatusCode,
    pub(in crate::layer) refuse: Option<Arc<Refuse>>,
    pub(in crate::layer) rate_limit_fields: bool,
    pub(in crate::layer) labels: Labels,
    /// The limits that handlers may charge or pause.
    pub(in crate::layer) declared: Arc<DeclaredLimits>,
}

/// A scope, with the number and the meter of its limit.
#[derive(Clone)]
pub(in crate::layer) struct GateScope {
    pub limit: LimitId,
    pub meter: Arc<LimitMeter>,
    pub scope: Scope,
}

impl GateScope {
    fn has_slots(&self) -> bool {
        self.scope.limit().period().is_none()
    }

    fn find(&self, keeper: &KeeperHandle, head: &Parts) -> Lookup<Leg> {
        let is_off = || keeper.mode_of(self.limit) == Mode::Off;
        let is_paused = || keeper.is_paused(self.limit);
        let admitted = (head.extensions.get::<Slot>()).is_some_and(|slot| slot.is_held(keeper));
        (self.scope).find(self.limit, head, is_off, is_paused, admitted)
    }
}

impl fmt::Debug for GateScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.scope.fmt(f)
    }
}

impl Gate {
    /// The scope of this limit, or the first scope: a refusal always names a limit of the gate.
    fn scope(&self, limit_name: &str) -> &Scope {
        let mut scopes = self.scopes.iter().map(|of| &of.scope);
        let named = scopes.find(|scope| scope.limit().name() == limit_name);
        named.unwrap_or(self.first_scope())
    }

    /// The scope to name if no limit is at fault: the first with slots, or else the first.
    pub(in crate::layer) fn first(&self) -> Option<&GateScope> {
        let with_slots = self.scopes.iter().find(|scope| scope.has_slots());
        with_slots.or(self.scopes.first())
    }

    fn first_scope(&self) -> &Scope {
        let first = self.first().expect("only a gate with limits refuses");
        &first.scope
    }

    /// The limiter's namespace. `None`: the gate has no limits.
    fn namespace(&self) -> Option<&str> {
        let meter = self.terms.meter.as_ref();
        meter.map(|meter| meter.namespace())
    }

    /// Changes when responses end with their slots, and adds metrics for the ends that become possible.
    pub(in crate::layer) fn edit_terms(&mut self, edit: impl FnOnce(&mut Terms)) {
        let terms = Arc::make_mut(&mut self.terms);
        edit(terms);
        let limits: Vec<_> = { self.scopes.iter() }.filter(|of| of.has_slots()).collect();
        let Some(meter) = terms.meter.as_ref().filter(|_| !limits.is_empty()) else {
            return;
        };
        let ends: Vec<_> = terms.possible_ends().collect();
        ends.iter().for_each(|kind| meter.expect_aborted(*kind));
        for GateScope { meter, .. } in limits {
            ends.iter().for_each(|kind| meter.expect_expired(*kind));
        }
    }

    /// The limits of a request, each with the request's demand. `None`: the request has no key.
    #[cfg(feature = "config")]
    pub(crate) fn legs(&self, head: &Parts) -> Vec<(Limit, Option<Leg>)> {
        let leg = |scope: &GateScope| match scope.find(&self.keeper, head) {
            Lookup::Now(leg) => (scope.scope.limit().clone(), leg),
            Lookup::Later(_) => unreachable!("a configuration looks nothing up"),
        };
        self.scopes.iter().map(leg).collect()
    }

    pub(in crate::layer) fn admission(&self, head: &Parts) -> Admission {
        let label = self.labels.of(head);
        match &self.scopes[..] {
            [scope] => match scope.find(&self.keeper, head) {
                Lookup::Now(leg) => self.admission_under_one(leg, label),
                Lookup::Later(leg) => Admission::Key(leg, label),
            },
            scopes => self.admission_under_all(scopes, head, label),
        }
    }

    #[inline]
    fn admission_under_one(&self, leg: Option<Leg>, label: Label) -> Admission {
        match leg {
            leg if self.refuses(0, leg.as_ref()) => Admission::NoKey(0),
            Some(leg) => self.ask_for(Demand::One(leg), label),
            None => Admission::Unlimited,
        }
    }

    fn admission_under_all(&self, scopes: &[GateScope], head: &Parts, label: Label) -> Admission {
        let (mut legs, mut later) = (Vec::with_capacity(scopes.len()), Vec::new());
        for (index, scope) in scopes.iter().enumerate() {
            match scope.find(&self.keeper, head) {
                Lookup::Now(leg) if self.refuses(index, leg.as_ref()) => {
                    return Admission::NoKey(index);
                }
                Lookup::Now(leg) => legs.extend(leg),
                Lookup::Later(leg) => later.push(leg.map(move |leg| (index, leg))),
            }
        }
        if later.is_empty() {
            self.ask_for_all(legs, label)
        } else {
            Admission::Keys(legs, join_all(later).boxed(), label)
        }
    }

    /// The next step once the looked-up keys are known, each with the index of its scope.
    fn admission_with(
        &self,
        mut legs: Vec<Leg>,
        found: Vec<(usize, Option<Leg>)>,
        label: Label,
    ) -> Admission {
        for (index, leg) in found {
            if self.refuses(index, leg.as_ref()) {
                return Admission::NoKey(index);
            }
            legs.extend(leg);
        }
        self.ask_for_all(legs, label)
    }

    fn ask_for_all(&self, legs: Vec<Leg>, label: Label) -> Admission {
        if legs.is_empty() {
            Admission::Unlimited
        } else {
            self.ask_for(Demand::All(legs), label)
        }
    }

    fn ask_for(&self, demand: Demand, label: Label) -> Admission {
        let request = PermitRequest::new(self.keeper.clone(), demand).labelled(label);
        Admission::Slot(if self.rate_limit_fields {
            request.with_quotas()
        } else {
            request
        })
    }

    /// Whether a request is refused because it has no key for this scope, and so no leg, or no tenant. A request without a key
    /// that is not refused passes the limit, and is counted; those without a tenant are one tenant.
    #[inline]
    fn refuses(&self, index: usize, leg: Option<&Leg>) -> bool {
        let GateScope {
            limit,
            meter,
            scope,
        } = &self.scopes[index];
        let has_tenant = |leg: &Leg| leg.tenant.as_ref().is_some_and(|of| of.name != Key::SHARED);
        let is_required = match leg {
            Some(leg) => scope.requires_tenant() && !has_tenant(leg),
            None => scope.requires_key(),
        };
        let refuses = is_required && self.keeper.mode_of(*limit) == Mode::Enforce;
        if leg.is_none() && !refuses {
            tracing::debug!(
                namespace = self.namespace(),
                limit = scope.limit().name(),
                "the request has no key: it is not limited"
            );
        }
        if leg.is_none() || refuses {
            meter.note_unkeyed(refuses);
        }
        refuses
    }

    /// Makes the slot visible to the handler, and returns its guard. `None`: no limit applies.
    pub(in crate::layer) fn admit(
        &self,
        permit: Option<Permit>,
        head: &mut Parts,
    ) -> (SlotGuard, Admitted) {
        let Some(permit) = permit else {
            Slot::show(None, &self.declared, &mut head.extensions);
            return (SlotGuard::Plain(None), Admitted::default());
        };
        tracing::debug!(
            namespace = self.namespace(),
            id = permit.id().map(tracing::field::display),
            waited = ?permit.waited(),
            "admitted"
        );
        for (limit, kind) in permit.bypassed() {
            tracing::debug!(
                namespace = self.namespace(),
                limit = limit.name(),
                kind = kind.as_str(),
                "would have been refused"
            );
        }
        let (share, quotas) = permit.into_share();
        Slot::show(Some(&share), &self.declared, &mut head.extensions);
        if !self.terms.bounds.is_none() {
            share.bound(self.terms.bounds);
        }
        let guard = if self.terms.may_end_early() {
            SlotGuard::Tied(Tie {
                share,
                terms: self.terms.clone(),
                ended: None,
            })
        } else {
            SlotGuard::Plain(Some(share))
        };
        let at = self.judges().then(Instant::now);
        (guard, Admitted { quotas, at })
    }

    fn judges(&self) -> bool {
        self.scopes.iter().any(|one| one.scope.judges())
    }

    /// Moves the slot into the body, or releases it here.
    #[inline]
    pub(in crate::layer) fn hand_over<B: Body + Send + 'static>(
        &self,
        mut guard: SlotGuard,
        admitted: &mut Admitted,
        mut response: Response<B>,
        form: Form,
    ) -> Response<ResponseBody<B>> {
        let Admitted { quotas, at } = admitted;
        if let Some(share) = guard.share() {
            if self.rate_limit_fields {
                // The handler may have charged more.
                for now in share.quotas() {
                    quotas.retain(|quota| quota.limit_name != now.limit_name);
                    quotas.push(now);
                }
            }
            if let Some(at) = at {
                response = self.judge(share, at.elapsed(), response);
            }
        }
        self.append_fields(response.headers_mut(), quotas);
        if self.release_at == ReleaseAt::Head {
            guard = SlotGuard::Plain(None);
        }
        response.map(|body| ResponseBody::new(body, guard, form))
    }

    /// Judges a response for each limit. Refusals are not judged, or nested layers would pause each other.
    fn judge<B>(&self, share: &Share, took: Duration, response: Response<B>) -> Response<B> {
        let (mut head, body) = response.into_parts();
        if head.extensions.get::<Refusal>().is_none() {
            head.extensions.insert(TimeToHead(took));
            for GateScope { scope, .. } in &self.scopes {
                if let Some(outcome) = scope.outcome(&head) {
                    outcome.apply(share, scope.limit().name());
                }
            }
        }
        Response::from_parts(head, body)
    }

    /// The refusal of a request that got no permit.
    pub(in crate::layer) fn refusal_of(&self, reason: &Refused) -> Refusal {
        match reason {
            Refused::ByLimit(error) => {
                let scope = self.scope(error.limit_name());
                let refusal = self.refusal_under(scope, error.kind().into());
                refusal.because(error)
            }
            Refused::NoKey(index) => {
                let scope = &self.scopes[*index].scope;
                self.refusal_under(scope, RefusalKind::without_key(scope.limit().name()))
            }
        }
    }

    /// A refusal without a limit at fault.
    pub(in crate::layer) fn refusal(&self, kind: RefusalKind) -> Refusal {
        self.refusal_under(self.first_scope(), kind)
    }

    fn refusal_under(&self, scope: &Scope, kind: RefusalKind) -> Refusal {
        let status = match kind.status(scope.is_shared()) {
            default if kind.is_limited() => self.limited_status.unwrap_or(default),
            StatusCode::SERVICE_UNAVAILABLE => self.unavailable_status,
            of_request => of_request,
        };
        Refusal::new(scope.limit(), scope.is_shared(), kind, status)
    }

    pub(in crate::layer) fn refuse<B>(
        &self,
        refusal: Refusal,
        form: Form,
        head: Option<&Parts>,
    ) -> Response<ResponseBody<B>> {
        tracing::debug!(
            namespace = self.namespace(),
            limit = refusal.limit_name(),
            kind = refusal.kind().as_str(),
            in_use = refusal.in_use(),
            waiting = refusal.waiting(),
            waited = ?refusal.waited(),
            "refused"
        );
        let mut response = match (&self.refuse, head) {
            (Some(refuse), Some(head)) => refusal.complete(refuse(&refusal, head)),
            _ if form == Form::Grpc => refusal.to_grpc_response().into_refusal(),
            _ => refusal.to_response().into_refusal(),
        };
        if form == Form::Head {
            response = without_content(response);
        }
        self.append_fields(response.headers_mut(), refusal.quotas());
        response.extensions_mut().insert(refusal);
        response.map(ResponseBody::refusal)
    }

    fn append_fields(&self, headers: &mut HeaderMap, quotas: &[Quota]) {
        if self.rate_limit_fields {
            fields::append(headers, quotas);
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("scopes", &self.scopes)
            .finish_non_exhaustive()
    }
}

/// What a response needs to know of its request's admission.
#[derive(Default)]
pub(in crate::layer) struct Admitted {
    /// State of the request's limits, if the response reports it.
    quotas: Vec<Quota>,
    /// The time, if the response is judged.
    at: Option<Instant>,
}

/// The next step of a request before the service is called: its key, then its slot.
pub(in crate::layer) enum Admission {
    Unlimited,
    /// The key for the only scope.
    Key(BoxFuture<'static, Option<Leg>>, Label),
    /// Keys for some of several scopes, by index, and the legs of the others.
    Keys(
        Vec<Leg>,
        BoxFuture<'static, Vec<(usize, Option<Leg>)>>,
        Label,
    ),
    /// The scope at this index requires a key, or a tenant.
    NoKey(usize),
    Slot(PermitRequest),
}

/// Why a request is not admitted.
pub(in crate::layer) enum Refused {
    ByLimit(AcquireError),
    /// The request has no key, or no tenant, for the scope at this index.
    NoKey(usize),
}

impl Admission {
    /// `None`: the request is not limited.
    #[inline]
    pub(in crate::layer) fn poll(
        &mut self,
        gate: &Gate,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Permit>, Refused>> {
        loop {
            match self {
                Self::Unlimited => return Poll::Ready(Ok(None)),
                Self::NoKey(index) => return Poll::Ready(Err(Refused::NoKey(*index))),
                Self::Key(leg, label) => {
                    let leg = ready!(leg.as_mut().poll(cx));
                    *self = gate.admission_under_one(leg, mem::take(label));
                }
                Self::Keys(legs, others, label) => {
                    let found = ready!(others.as_mut().poll(cx));
                    *self = gate.admission_with(mem::take(legs), found, mem::take(label));
                }
                Self::Slot(asked) => {
                    let granted = ready!(asked.poll(cx)).map_err(Refused::ByLimit);
                    return Poll::Ready(granted.map(|granted| Some(Permit::new(granted))));
                }
            }
        }
    }
}
