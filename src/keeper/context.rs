//! State that all queues of a keeper share: settings, the limits in force, the time, timers, counts, and the effects of
//! a step.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    demand::RequestId,
    effects::{Effect, Effects, LogEvent},
    ending::Ending,
    registry::Registry,
};
use crate::{
    error::{AcquireError, AcquireErrorKind, LostErrorKind},
    fallbacks::{Availability, FallbackInForce, Strict},
    key::Key,
    leases::{Lease, QueueId},
    ledger::{Batch, Exchange, ReplicaId, Seq, TenantId, weighing},
    limit::{Fallback, Limit, LimitId, LimitValue},
    part::{Part, Parts},
    returns::Returns,
    sync::{Confirmations, Inquiry},
    telemetry::{Cause, Cost, History, Measure, Reports, StoreNews, StoreState, Topic},
};

/// Moments per lease at which renewals are sent. More moments mean fewer renewals per exchange; fewer moments mean more
/// exchanges in a row.
const MOMENTS: u32 = 30;

/// Renewals per lease: one may fail.
pub(super) const RENEWALS_PER_LEASE: u32 = 3;

/// Delay beyond which this process must have stood still: the store did not miss the deadline.
pub(super) const STOOD_STILL: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub replica: ReplicaId,
    pub namespace: String,
    /// The parts of the store.
    pub parts: Parts,
    pub lease: Duration,
    pub store_timeout: Duration,
    pub poll_interval: Duration,
    pub waiter_ttl: Duration,
    pub seed: u64,
}

impl Settings {
    /// The name of a key's ledger in the store.
    pub(super) fn ledger_name(&self, key: &Key, limit_name: &str) -> String {
        if !self.parts.is_cluster() {
            return key.ledger_name(&self.namespace, limit_name);
        }
        let digest = key.digest(limit_name);
        let prefix = self.parts.of(digest).prefix(&self.namespace);
        format!("{prefix}{digest:032x}")
    }

    /// The name of a ledger in this part that belongs to no limit.
    pub(super) fn unused_ledger(&self, part: Part) -> String {
        if !self.parts.is_cluster() {
            self.ledger_name(&Key::SHARED, "")
        } else {
            part.prefix(&self.namespace) + &"0".repeat(32)
        }
    }

    /// The part of the store with a key's ledger.
    pub(super) fn part_of(&self, key: &Key, limit_name: &str) -> Part {
        if self.parts.is_cluster() {
            self.parts.of(key.digest(limit_name))
        } else {
            Part::default()
        }
    }
}

/// A queue's decision on an entry of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decided {
    pub request: RequestId,
    pub seq: Seq,
    pub decision: Decision,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Decision {
    Refused(AcquireErrorKind),
    /// The limit is no longer enforced, or is in shadow mode: the request goes on without this slot.
    Bypassed(AcquireErrorKind),
    /// The entry is held, waits, or has to be sent again.
    Changed,
}

impl Decision {
    /// Decisions on one request are followed in this order: a refusal ends it.
    pub fn rank(self) -> u8 {
        match self {
            Self::Refused(_) => 0,
            Self::Bypassed(_) => 1,
            Self::Changed => 2,
        }
    }
}

/// The state that all queues of a keeper share.
pub(super) struct Context {
    pub settings: Settings,
    /// Whether there is a store that other replicas share.
    pub shared: bool,
    pub registry: Registry,
    /// The time of the latest step. Only [`Core::begin_step`](super::core::Core::begin_step) sets it.
    pub now: Instant,
    /// Permits return to a store that has lost them, or was down, before newcomers under strict limits are admitted.
    pub returns: Returns<QueueId>,
    /// The latest answer of [`is_recovering`](Self::is_recovering) that was measured.
    was_recovering: bool,
    pub ending: Ending,
    /// A driver has taken a step since the last one was gone.
    pub driven: bool,
    pub effects: Effects,
    pub counts: Counts,
    /// By tenant, entries that hold slots or wait.
    pub tenants: HashMap<(LimitId, TenantId), usize>,
    pub reports: Reports,
    /// Releases whose confirmation a task awaits.
    pub confirmations: Confirmations,
    lost_leases: Vec<Weak<Lease>>,
    /// Number of introductions of queues that are over.
    pub introduced: u64,
    /// The last step has left due work to the next one.
    pub has_overdue: bool,
    /// Decisions on requests that the core has yet to follow.
    pub decided: Vec<Decided>,
    /// An exchange with one batch, reused for the ledgers in this process, which ignore its times.
    pub scratch: Exchange,
    epoch: Instant,
    pub rng: fastrand::Rng,
    last_seq: Seq,
    pub history: History,
    news: StoreNews,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub held: usize,
    pub waiting: usize,
    pub lost: u64,
    /// Releases that the store has confirmed so far.
    pub confirmed: u64,
}

impl Context {
    pub fn new(settings: Settings, shared: bool, now: Instant) -> Self {
        let replica = settings.replica;
        Self {
            shared,
            registry: Registry::new(replica, settings.parts, shared, now),
            now,
            returns: Returns::new(settings.parts, settings.store_timeout),
            was_recovering: false,
            ending: Ending::default(),
            driven: false,
            effects: Effects::default(),
            counts: Counts::default(),
            tenants: HashMap::new(),
            reports: Reports::default(),
            confirmations: Confirmations::default(),
            lost_leases: Vec::new(),
            introduced: 0,
            has_overdue: false,
            decided: Vec::new(),
            scratch: Exchange {
                replica,
                lease_ms: 1,
                respond_ms: 1,
                waiter_ttl_ms: 1,
                not_after_us: 0,
                batches: vec![Batch::default()],
                claims: Vec::new(),
                refunds: Vec::new(),
                generation_query: None,
                expected: None,
            },
            epoch: now,
            rng: fastrand::Rng::with_seed(settings.seed),
            last_seq: 0,
            history: History::new(replica, now),
            news: StoreNews::default(),
            settings,
        }
    }

    /// The length of the leases that this process holds, if any.
    pub fn lease_held(&self) -> Option<Duration> {
        (self.counts.held > 0).then_some(self.settings.lease)
    }

    pub fn availability(&self, part: Part) -> Availability {
        self.registry.fallbacks.availability(part)
    }

    /// Whether there is a store, and this part of it decides on requests.
    pub fn asks_store(&self, part: Part) -> bool {
        self.shared && self.availability(part) == Availability::Up
    }

    /// The fallback in force of a key in this part. `own`: the key's value, if it differs from the limit's.
    pub fn fallback(&self, limit: LimitId, part: Part, own: Option<LimitValue>) -> FallbackInForce {
        (self.registry.fallbacks).of((limit, self.registry.limit(limit)), part, own, self.now)
    }

    /// Whether the fallback of a key in this part refuses requests rather than exceed the key's limit.
    pub fn strict(&self, limit: LimitId, part: Part, own: Option<LimitValue>) -> Option<Strict> {
        let of = self.registry.limit(limit);
        let max = own.map_or(of.max(), |own| own.max);
        let strict = self.fallback(limit, part, own).strict(max);
        // A replica that does not know how many there are admits nobody, but the others divide the limit.
        match of.current_fallback() {
            Fallback::Share => strict.and(Some(Strict::Divides)),
            _ => strict,
        }
    }

    /// Whether newcomers under strict limits wait because permits return to the store. Values of single keys are not looked at.
    pub fn is_recovering(&self) -> bool {
        let waits = |part: Part, id: LimitId| {
            let strict = self.strict(id, part, None);
            // The store never learns of requests that the fallback of a rate admits, so rates do not wait.
            self.registry.limit(id).is_plain()
                && strict.is_some_and(|strict| self.returns.is_any_in(part, strict))
        };
        let has_waiting = |part| self.registry.ids().any(|id| waits(part, id));
        self.returns.is_any() && self.settings.parts.all().any(has_waiting)
    }

    /// Measures [`is_recovering`](Self::is_recovering), if permits have begun or ceased to return.
    #[inline]
    pub fn measure_returns(&mut self) {
        if self.returns.has_news() {
            let is_recovering = self.is_recovering();
            let was_recovering = mem::replace(&mut self.was_recovering, is_recovering);
            let has_changed = was_recovering != is_recovering;
            let state = has_changed.then_some(StoreState::Recovering(is_recovering));
            self.effects.push(state.map(Effect::MeasureStore));
        }
    }

    /// Measures a limit in force after a change.
    pub fn measure_limit(&mut self, id: LimitId) {
        let is_gone = self.ending.is_orphaned();
        let changes = self.registry.measure(id, is_gone, self.now);
        changes.for_each(|one| self.measure(id, one));
    }

    pub fn measure_limits(&mut self) {
        self.registry.ids().for_each(|id| self.measure_limit(id));
    }

    /// Logs that overrides do not fit a limit with these values.
    pub fn log_misfit(&mut self, updated: &Limit) {
        if let Err(error) = self.registry.overrides().misfit(updated) {
            let error = error.to_string();
            self.log(LogEvent::OverrideMisfit { error });
        }
    }

    /// A fresh name for a permit of this weight.
    pub fn next_name(&mut self, weight: u32) -> Seq {
        self.last_seq += 1;
        weighing(self.last_seq, weight)
    }

    /// A new lease, for an entry of this queue.
    pub fn new_lease(
        &mut self,
        queue: QueueId,
        weight: u32,
        pool: Option<Arc<crate::leases::Pool>>,
        is_shadow: bool,
    ) -> Arc<Lease> {
        let seq = self.next_name(weight);
        let pool = pool.map(|pool| pool as _);
        Arc::new(Lease::new(queue, seq, self.epoch, pool).in_shadow(is_shadow))
    }

    /// A lease without a request, for a name that may still reach the store.
    pub fn lease_named(&self, queue: QueueId, seq: Seq) -> Arc<Lease> {
        Arc::new(Lease::new(queue, seq, self.epoch, None))
    }

    /// The local clock, for rates without a store.
    pub fn local_us(&self) -> u64 {
        self.local_us_at(self.now)
    }

    pub fn local_us_at(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_micros() as u64
    }

    pub fn jittered(&mut self, length: Duration) -> Duration {
        jittered(length, &mut self.rng)
    }

    /// A third of the way from `sent` to the deadline, moved to the nearest moment of the grid on which renewals of many
    /// queues share exchanges, but not beyond half of the way. The short lease of a promotion is renewed soon, so that few
    /// outages end it, but after most short permits have ended.
    pub fn renew_at(&mut self, sent: Instant, until: Instant) -> Instant {
        let length = until.saturating_duration_since(sent);
        let (at, moment) = if self.is_of_promotion(length) {
            let moment = self.settings.poll_interval / 20;
            (self.now + 3 * moment, moment)
        } else {
            let moment = self.settings.lease / MOMENTS;
            let third = self.jittered(length / RENEWALS_PER_LEASE);
            (sent + third + moment / 2, moment)
        };
        let since = at.saturating_duration_since(self.epoch);
        let late = since.as_nanos() as u64 % moment.as_nanos() as u64;
        (at - Duration::from_nanos(late)).min(sent + length / 2)
    }

    /// Whether a lease of this length belongs to a promotion that has not been renewed yet, or is about to end.
    pub fn is_of_promotion(&self, length: Duration) -> bool {
        length < self.settings.lease / 2
    }

    /// Records a measurement once the lock is free.
    #[inline]
    pub fn measure(&mut self, limit: LimitId, measure: Measure) {
        if cfg!(feature = "metrics") {
            let meter = self.registry.meter(limit).clone();
            self.effects.push(Effect::Measure(meter, measure));
        }
    }

    /// Advances the request together with those on which queues have decided.
    pub fn note_changed(&mut self, request: RequestId) {
        self.decided.push(Decided {
            request,
            // The decision is on the request, not on an entry.
            seq: 0,
            decision: Decision::Changed,
        });
    }

    /// Counts a refusal that answers a request.
    pub fn note_refusal(&mut self, error: &AcquireError) {
        if let Some(limit) = self.registry.id_of(error.limit_name()) {
            self.measure(limit, Measure::Refused(error.kind()));
        }
    }

    pub fn note_cost(&mut self, limit: LimitId, kind: Cost, cost: u64) {
        if cost > 0 {
            self.measure(limit, Measure::Cost(kind, cost));
        }
    }

    /// Counts the end of a permit, by its lease. Each admitted permit ends once: here or in its pool.
    pub fn note_end(&mut self, limit: LimitId, lease: &Lease, held: Duration) {
        let reason = lease.end_reason();
        self.measure(limit, Measure::Ended(reason, held));
        let is_lost = matches!(reason, Some(LostErrorKind::Lost | LostErrorKind::ShutDown));
        self.counts.lost += u64::from(is_lost);
        if let Some(topic) = Topic::of_end(reason) {
            self.report(limit, topic, lease.queue, 1);
        }
    }

    /// Writes an event of the history, if there is a subscriber for it.
    #[inline]
    pub fn record(&mut self, event: impl FnOnce(&mut History, Instant) -> Option<String>) {
        if let Some(event) = event(&mut self.history, self.now) {
            self.effects.push(Effect::Record(event));
        }
    }

    pub fn log(&mut self, event: LogEvent) {
        self.effects.push(Effect::Log(event));
    }

    /// Logs that a part of the store is in trouble, unless this cause was already reported.
    pub fn log_trouble(&mut self, part: Part, cause: Cause, why: &str) {
        if self.news.begins(cause, why, part) {
            let error = why.to_owned();
            self.log(LogEvent::Trouble { cause, error });
        }
    }

    /// Logs that the store is back, unless another part is still in trouble.
    pub fn log_end_of_trouble(&mut self, part: Part) {
        if self.news.ends(part) {
            self.log(LogEvent::StoreBack);
        }
    }

    /// Logs what happened to permits of a key, soon and together with other keys of the limit.
    pub fn report(&mut self, limit: LimitId, topic: Topic, key: QueueId, permits: u64) {
        self.reports.add(limit, topic, key, permits, self.now);
    }

    /// Logs all pending reports.
    pub fn log_reports(&mut self) {
        for report in self.reports.take() {
            let limit = self.registry.limit(report.limit).clone();
            self.log(LogEvent::Permits { limit, report });
        }
    }

    /// Drops inquiries that will not be answered.
    pub fn drop_inquiries(&mut self, inquiries: &mut Vec<Inquiry>) {
        for inquiry in inquiries.drain(..) {
            self.effects.push(Effect::Dismiss(inquiry));
        }
    }

    /// The store has confirmed a release, and no late exchange can bring the name back.
    pub fn confirm(&mut self, seq: Seq) {
        self.counts.confirmed += 1;
        let confirmation = self.confirmations.take(seq);
        self.effects.push(confirmation.map(Effect::Confirm));
    }

    /// A part of the store, or with `None` all of it, cannot confirm releases at present.
    pub fn end_confirmations(&mut self, of: Option<Part>) {
        for confirmation in self.confirmations.take_all(of) {
            self.effects.push(Effect::GiveUpOn(confirmation));
        }
    }

    /// Remembers a lost lease while its permit exists: its response may go on until a shutdown.
    pub fn note_lost_lease(&mut self, lease: &Arc<Lease>) {
        if self.lost_leases.len() == self.lost_leases.capacity() {
            self.lost_leases.retain(|lease| lease.strong_count() > 0);
        }
        self.lost_leases.push(Arc::downgrade(lease));
    }

    /// Notifies the holders of lost leases of a shutdown.
    pub fn end_lost_leases(&mut self) {
        for lease in mem::take(&mut self.lost_leases) {
            if let Some(lease) = lease.upgrade() {
                self.end_lease(&lease, LostErrorKind::ShutDown);
            }
        }
    }

    /// Ends a lease. Its watchers are woken once the lock is free.
    pub fn end_lease(&mut self, lease: &Arc<Lease>, kind: LostErrorKind) {
        lease.end(kind);
        if lease.is_shadow() && matches!(kind, LostErrorKind::HeldTooLong | LostErrorKind::Idle) {
            self.note_lost_lease(lease);
        }
        self.effects.push(Effect::Tell(lease.clone()));
    }
}

/// Shortens a duration at random, so that replicas which started together drift apart.
pub(super) fn jittered(length: Duration, rng: &mut fastrand::Rng) -> Duration {
    length.mul_f64(0.9 + 0.1 * rng.f64())
}

pub(super) fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, None) => one,
        (None, other) => other,
    }
}
