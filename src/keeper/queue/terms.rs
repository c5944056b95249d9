//! What a queue is for: a key, its ledger, and the values of the limit in force there.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::pace::KeyPace;
use crate::{
    error::AcquireErrorKind,
    fallbacks::FallbackInForce,
    keeper::context::Context,
    key::Key,
    leases::QueueId,
    ledger::{Dues, Results},
    limit::{Adapt, Limit, LimitId, LimitValue},
    operable::PaceLook,
    overrides::Steered,
    part::Part,
};

pub(in crate::keeper) struct KeyTerms {
    pub id: QueueId,
    pub limit_id: LimitId,
    pub key: Key,
    /// The part of the store with its ledger.
    pub part: Part,
    /// The name of its ledger in the store.
    pub ledger: Arc<str>,
    limit: Arc<Limit>,
    /// The limit's value for this key, if the latest request brought one; slots have no burst.
    own_max: Option<u32>,
    /// Operators' override for this key. Boxed, since it is rare.
    steered: Option<Box<Steered>>,
    /// The value that the limit has found.
    pub(super) pace: KeyPace,
}

impl KeyTerms {
    pub fn new(
        id: QueueId,
        (limit_id, key): (LimitId, Key),
        (part, ledger): (Part, Arc<str>),
        limit: Arc<Limit>,
    ) -> Self {
        Self {
            id,
            limit_id,
            key,
            part,
            ledger,
            limit,
            own_max: None,
            steered: None,
            pace: KeyPace::default(),
        }
    }

    pub fn limit(&self) -> &Arc<Limit> {
        &self.limit
    }

    pub fn own_value(&self) -> Option<LimitValue> {
        self.own_max.map(LimitValue::new)
    }

    pub fn max(&self) -> u32 {
        self.value().map_or(self.limit.max(), |own| own.max)
    }

    /// The value of this key, if it differs from the limit's.
    fn value(&self) -> Option<LimitValue> {
        let Some(Adapt { floor, ceiling }) = self.adapt() else {
            return self.declared_value();
        };
        let found = self.pace.pacing().map(|pacing| pacing.limit);
        let value = found.unwrap_or(self.start());
        Some(value.min(ceiling).max(floor).into())
    }

    /// The value that is declared or ordered for this key, if it differs from the limit's.
    fn declared_value(&self) -> Option<LimitValue> {
        match &self.steered {
            Some(steered) => steered.own_value(self.own_value()),
            None => self.own_value(),
        }
    }

    /// The value with which a limit begins that finds its own.
    pub fn start(&self) -> u32 {
        self.declared_value()
            .map_or(self.limit.max(), |own| own.max)
    }

    /// The bounds within which the limit finds its own value: not if operators have set one, nor for a blocked key.
    pub fn adapt(&self) -> Option<Adapt> {
        let adapt = self.limit.adapt()?;
        let is_set = self.steered.as_ref().is_some_and(|one| one.has_value());
        (!is_set && self.start() > 0).then_some(adapt)
    }

    /// For operators, even if one of them has set the value.
    pub fn look_at_pace(&self, now_ms: u64) -> Option<PaceLook> {
        let bounds = self.limit.adapt()?;
        let declared = self.own_max.unwrap_or(self.limit.max());
        Some(self.pace.look(bounds, declared, now_ms))
    }

    /// The bounds within which the store finds the value. While permits return, it admits nobody.
    pub fn paces(&self, ctx: &Context) -> Option<Adapt> {
        self.adapt().filter(|_| !self.is_returning(ctx))
    }

    /// What a batch says of a limit that finds its own value.
    pub fn take_results(&mut self, ctx: &Context) -> Option<Results> {
        let adapt = self.paces(ctx)?;
        Some(self.pace.take_results(adapt, ctx.now))
    }

    /// Whether the limit would have to be raised for a permit of this weight. A limit of 0 is merely full.
    pub fn is_too_heavy(&self, weight: u32) -> bool {
        weight > 1 && (1..weight).contains(&self.start())
    }

    /// Until when operators have paused the limit for this key.
    pub fn paused_until(&self) -> Option<Instant> {
        self.steered.as_ref()?.paused_until
    }

    /// Whether that changes anything.
    pub fn set_own_value(&mut self, own_value: Option<LimitValue>) -> bool {
        let own_max = own_value.map(|own| own.max);
        mem::replace(&mut self.own_max, own_max) != own_max
    }

    /// Adopts values of the limit, and operators' override for this key. Returns whether that changes anything.
    pub fn change(&mut self, limit: Arc<Limit>, steered: Steered) -> bool {
        let before = self.steered.as_deref().copied().unwrap_or_default();
        if limit == self.limit && steered == before {
            return false;
        }
        self.limit = limit;
        self.steered = steered.is_some().then(|| Box::new(steered));
        true
    }

    /// The fallback in force.
    pub fn fallback(&self, ctx: &Context) -> FallbackInForce {
        ctx.fallback(self.limit_id, self.part, self.value())
    }

    pub fn is_strict(&self, ctx: &Context) -> bool {
        ctx.strict(self.limit_id, self.part, self.value()).is_some()
    }

    /// How long newcomers wait because permits return to a store that has lost its data, or was down.
    pub fn return_left(&self, ctx: &Context) -> Option<Duration> {
        if !ctx.returns.is_any() || !ctx.asks_store(self.part) {
            return None;
        }
        let strict = ctx.strict(self.limit_id, self.part, self.value())?;
        (ctx.returns).wait(self.part, self.id, strict, ctx.now)
    }

    pub fn is_returning(&self, ctx: &Context) -> bool {
        self.return_left(ctx).is_some()
    }

    /// The dues of a batch, without entries; a batch without dues is of a limit that is not fair.
    pub fn empty_dues(&self) -> Option<Box<Dues>> {
        self.limit.is_fair().then(Box::default)
    }

    /// The limit by which the store decides on newcomers; holders return regardless of it.
    pub fn max_in_store(&self, ctx: &Context) -> u32 {
        match self.return_left(ctx) {
            Some(_) => 0,
            None => self.max(),
        }
    }

    /// The limit by which this process decides, apart from a pause.
    pub fn max_here(&self, ctx: &Context) -> u32 {
        if !ctx.shared {
            return self.max();
        }
        match self.fallback(ctx) {
            FallbackInForce::Local(value) => value.max,
            FallbackInForce::Allow => self.max(),
            // Its time has just ended.
            FallbackInForce::Reject => 0,
        }
    }

    /// Why a request that does not wait is refused, unless the key is paused.
    pub fn full_kind(&self, ctx: &Context) -> AcquireErrorKind {
        match self.return_left(ctx) {
            Some(_) => AcquireErrorKind::Unavailable,
            None => AcquireErrorKind::Full,
        }
    }
}
