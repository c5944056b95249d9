//! Requests and permits: submitted, collected, cancelled, released; the shutdown.

use std::{sync::Arc, task::Waker};

use tokio::time::Instant;

use super::{Core, Progress, SlotLeg, Stage, accounting::Level, link::Link};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{
        demand::{Demand, RequestId, Taken},
        effects::{Effect, LogEvent},
        queue::{Queue, Use},
    },
    key::Key,
    leases::{Account, Bounds, Fee, Label, Lease, Leases, Pool, QueueId, Tenure},
    ledger::weight_of,
    limit::{Limit, LimitId, LimitValue, MAX_WEIGHT, Mode},
    status::{InLine, Quota, Status},
    sync::{Confirmation, Inquiry, StoredWaker},
    telemetry::{Cost, LimitMeter, Measure},
};

impl Core {
    /// Submits a request for a permit with this label. The request exists until [`collect`](Self::collect) returns an
    /// answer, or [`cancel`](Self::cancel) removes it.
    #[inline]
    pub fn submit(&mut self, demand: &Demand, label: &Label) -> Result<RequestId, AcquireError> {
        let checked = self.check(demand);
        checked.inspect_err(|error| self.ctx.note_refusal(error))?;
        let request = self.submit_legs(demand, label);
        self.follow_decisions();
        Ok(request)
    }

    /// Refuses a demand that is not to be submitted.
    #[inline]
    fn check(&mut self, demand: &Demand) -> Result<(), AcquireError> {
        let is_newcomer = || !demand.legs().iter().any(|leg| leg.admitted);
        if self.ctx.ending.refuses(is_newcomer) {
            let (limit, kind) = (demand.first_limit(), AcquireErrorKind::ShutDown);
            return Err(self.ctx.registry.limit(limit).acquire_error(kind));
        }
        self.check_pauses(demand.legs())?;
        // Weights that no permit can have are refused under enforced limits.
        for leg in demand.legs() {
            let limit = self.ctx.registry.limit(leg.limit);
            if !(1..=MAX_WEIGHT).contains(&leg.weight) && limit.current_mode() == Mode::Enforce {
                let mut error = limit.acquire_error(AcquireErrorKind::InvalidWeight);
                error.details.weight = leg.weight;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Counts and returns the refusal of a request that is not, or no longer, submitted.
    pub fn refuse(&mut self, limit: LimitId, kind: AcquireErrorKind) -> AcquireError {
        let error = self.ctx.registry.limit(limit).acquire_error(kind);
        self.ctx.note_refusal(&error);
        error
    }

    /// The answer to a request, if there is one; with quotas if `wants_quotas`. A refused request is then gone; a
    /// granted one is the permit's to release.
    pub fn collect(
        &mut self,
        id: RequestId,
        wants_quotas: bool,
    ) -> Option<Result<Taken, AcquireError>> {
        // A request is gone once collected.
        let request = self.requests.get(id).filter(|_| wants_quotas);
        let quotas = request.map(|request| self.quotas(request, false).collect());
        let mut answer = self.collect_request(id);
        self.follow_decisions();
        match (&mut answer, quotas) {
            (Some(Ok(taken)), Some(quotas)) => taken.notes.get_or_insert_default().quotas = quotas,
            (Some(Err(error)), _) => self.ctx.note_refusal(error),
            _ => {}
        }
        answer
    }

    /// The answer, if there is one. A refused request is then gone; the slots of a granted one belong to the permit.
    fn collect_request(&mut self, id: RequestId) -> Option<Result<Taken, AcquireError>> {
        match self.requests.get(id)?.stage() {
            Stage::Granted => {}
            Stage::Refused(_) => return self.requests.remove(id)?.into_refusal().map(Err),
            _ => return None,
        }
        if let Some(taken) = self.take(id) {
            return Some(Ok(taken));
        }
        // Not collected in time: a slot was lost.
        self.requests.open(id);
        self.advance(id);
        self.follow_decisions();
        self.collect_request(id)
    }

    /// Turns a granted request into a permit, if none of its slots was lost.
    #[inline]
    fn take(&mut self, id: RequestId) -> Option<Taken> {
        let request = self.requests.get(id)?;
        let waited = request.waited(self.ctx.now);
        // A request alone finds out when it takes its slot.
        if !request.alone {
            let Progress::Complete = request.progress(&self.queues, self.ctx.now) else {
                return None;
            };
        }
        let mut place = 0;
        for SlotLeg { lease, .. } in &request.legs {
            // Does not affect the queue's listing.
            let queue = self.queues.without_listing(lease.queue);
            place = place.max(queue.take(&mut self.ctx, lease, waited, request.alone)?);
        }
        let mut request = self.requests.remove(id)?;
        let waker = request.waker.take();
        self.ctx.effects.push(waker.map(Effect::Drop));
        for fee in request.fees() {
            let limit = fee.limit_id();
            self.ctx.measure(limit, Measure::Admitted(waited));
            (self.ctx).note_cost(limit, Cost::Charged, fee.paid_cost().into());
        }
        let mut leases = request.legs.into_iter().map(|leg| leg.lease);
        let leases = match leases.next() {
            Some(lease) if request.alone => Leases::One(Tenure::of(lease)),
            first => Leases::many(first.into_iter().chain(leases).collect()),
        };
        Some(Taken {
            leases,
            waited,
            place,
            notes: request.notes,
        })
    }

    /// Whether this task is woken when the request is answered.
    pub fn is_watched_by(&self, id: RequestId, waker: &Waker) -> bool {
        let stored = (self.requests.get(id)).and_then(|request| request.waker.as_ref());
        stored.is_some_and(|stored| stored.will_wake(waker))
    }

    /// As [`collect`](Self::collect). If there is no answer yet, this task will be woken for it, in place of any other.
    pub fn collect_or_watch(
        &mut self,
        id: RequestId,
        wants_quotas: bool,
        waker: StoredWaker,
    ) -> Option<Result<Taken, AcquireError>> {
        let answer = self.collect(id, wants_quotas);
        let unused = match self.requests.get_mut(id) {
            Some(request) if answer.is_none() => request.waker.replace(waker),
            _ => Some(waker),
        };
        self.ctx.effects.push(unused.map(Effect::Drop));
        answer
    }

    /// The place of a request in its queue.
    pub fn in_line(&self, id: RequestId) -> Option<InLine> {
        let mut legs = self.requests.get(id)?.legs.iter();
        legs.find_map(|leg| leg.in_line(&self.queues))
    }

    pub fn cancel(&mut self, id: RequestId) {
        self.let_go(id);
        let request = self.requests.remove(id);
        let waker = request.and_then(|request| request.waker);
        self.ctx.effects.push(waker.map(Effect::Drop));
        self.follow_decisions();
    }

    /// Releases the slots of a permit. The slots of a permit that may have several bypass the pool, which serves only
    /// requests for a single slot.
    pub fn release(&mut self, leases: &Leases) {
        let has_one = matches!(leases, Leases::One(_));
        let leases = leases.all().iter();
        leases.for_each(|lease| self.release_to(lease, has_one, Use::Held));
    }

    fn release_to(&mut self, lease: &Arc<Lease>, may_pool: bool, use_of_slot: Use) {
        self.bounded.forget(lease.seq());
        if !self.queues.has(lease.queue) {
            return lease.release_at(self.ctx.now);
        }
        self.change(lease.queue, |queue, ctx| {
            if !(may_pool && queue.keep_released(ctx, lease)) {
                lease.release_at(ctx.now);
                queue.release(ctx, lease.seq(), use_of_slot);
            }
        });
        self.follow_decisions();
    }

    /// Releases a slot for a task that waits until the store has confirmed the release. The slot bypasses the pool, or
    /// nothing would be released. Returns the limit, unless there is nothing to wait for: the slot was lost, or only
    /// this process knows of it.
    pub fn release_confirmed(
        &mut self,
        lease: &Arc<Lease>,
        confirmation: Confirmation,
    ) -> Option<Arc<Limit>> {
        let seq = lease.seq();
        self.release_to(lease, false, Use::Held);
        let queue = self.queues.get(lease.queue);
        let queue = queue.filter(|queue| queue.is_releasing(seq));
        let terms = queue.map(Queue::terms);
        match terms.map(|terms| terms.part) {
            Some(part) if self.ctx.asks_store(part) => {
                let until = self.ctx.now + self.ctx.settings.store_timeout;
                let confirmations = &mut self.ctx.confirmations;
                confirmations.insert(seq, part, until, confirmation);
            }
            _ => self.ctx.effects.push(Effect::GiveUpOn(confirmation)),
        }
        terms.map(|terms| terms.limit().clone())
    }

    /// Releases the slots of a request that was granted here, and refunds its charges. Returns the state of its rates
    /// afterwards.
    pub fn cancel_granted(&mut self, taken: Taken) -> Vec<Quota> {
        for lease in taken.leases.all() {
            self.release_to(lease, false, Use::Unused);
        }
        let fees = taken.notes.map(|notes| notes.fees);
        // Newest charge first: a rate can only undo its latest charge.
        let fees = fees.into_iter().flatten().rev();
        fees.filter_map(|fee| {
            let level = Level::of(&fee, &self.ctx, &self.links);
            (self.accounting).refund(&fee, &self.ctx, &mut self.links);
            Some(level?.quota_without(&fee))
        })
        .collect()
    }

    /// Bounds a permit that was collected. The bounds end when it is [released](Self::release).
    pub fn bound(&mut self, lease: &Arc<Lease>, bounds: Bounds) {
        // The keeper has to see the permit's end.
        lease.set_reusable(false);
        self.bounded.bound(lease, bounds, self.ctx.now);
    }

    /// The meter of a lease's limit. `None`: no longer held.
    pub fn meter_of_lease(&self, lease: &Lease) -> Option<Arc<LimitMeter>> {
        let queue = self.queues.get(lease.queue);
        // The queue of a lost lease may be gone, and its id reused.
        let queue = queue.filter(|queue| queue.entry(lease.seq()).is_some())?;
        Some(self.ctx.registry.meter(queue.terms().limit_id).clone())
    }

    /// Asks for the total usage of a key with this value of its own, over all replicas. The question grants free slots, up to
    /// the value.
    pub fn inquire(
        &mut self,
        limit: LimitId,
        (key, own_value): (&Key, Option<LimitValue>),
        inquiry: Inquiry,
    ) {
        let queue = self.queues.find_or_make(&mut self.ctx, limit, key);
        self.change(queue, |queue, ctx| {
            if own_value.is_some() {
                queue.set_own_value(ctx, own_value);
            }
            queue.inquire(ctx, inquiry);
        });
        self.follow_decisions();
    }

    /// The pool of a key, if its limit reuses slots. The queue stays until it is [unbound](Self::unbind).
    pub fn bind(&mut self, limit: LimitId, key: &Key) -> Option<(QueueId, Arc<Pool>)> {
        if !self.ctx.registry.limit(limit).is_reused() {
            return None;
        }
        let id = self.queues.find_or_make(&mut self.ctx, limit, key);
        self.change(id, |queue, _| {
            let pool = queue.kept.pool()?;
            pool.bind();
            Some((id, pool.clone()))
        })
    }

    pub fn unbind(&mut self, queue: QueueId, pool: &Pool) {
        self.change(queue, |_, _| pool.unbind());
    }

    pub fn status(&self) -> Status {
        // There may be very many queues.
        let mut limits = self.ctx.registry.limits().iter();
        let reuses = limits.any(|limit| limit.is_reused());
        let queues = self.queues.iter().filter(|_| reuses);
        let idle: usize = queues.map(|queue| queue.kept.idle()).sum();
        Status {
            // A slot lost while idle is noticed later.
            held: self.ctx.counts.held.saturating_sub(idle),
            waiting: self.ctx.counts.waiting + self.requests.sleepers().len(),
            store_up: self.links.iter().all(|link| link.breaker.is_well()),
        }
    }
}

/// Accounts.
impl Core {
    /// Changes the account of a permit: it spends, is charged, is settled or ends. `change` returns a cost to measure.
    pub fn change_account(
        &mut self,
        fee: &Fee,
        change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>,
    ) {
        if let Some((kind, cost)) = change(self.accounting.accounts.account_of(fee)) {
            self.ctx.note_cost(fee.limit_id(), kind, cost);
        }
        (self.accounting).follow(fee.id, &mut self.ctx, &mut self.links);
    }

    /// The state of a rate after this permit's latest charge, including its spending since.
    pub fn account_quota(&self, fee: &Fee) -> Option<Quota> {
        (self.accounting).quota(fee, &self.ctx, &self.links)
    }
}

/// Shutdown.
impl Core {
    /// Refuses newcomers from now on. Waiting requests and permits have this much time: the latest call counts.
    pub fn close(&mut self, grace_ends_at: Instant) {
        self.ctx.ending.begin(grace_ends_at);
        self.each_queue(None, |queue, ctx| queue.empty_pool(ctx));
        self.follow_decisions();
    }

    /// Refuses all requests not yet collected, and all others from now on, and loses all slots. Returns the number of
    /// requests that were refused.
    pub fn end_grace(&mut self) -> usize {
        self.ctx.ending.end_grace();
        let kind = AcquireErrorKind::ShutDown;
        let ids = self.requests.those(|request| !request.is_refused());
        // Newest first, so that the times that rates have reserved can be undone.
        for id in ids.iter().rev() {
            let request = self.requests.get(*id);
            if let Some(error) = request.map(|one| one.error(kind, &self.queues, &self.ctx)) {
                self.refuse_request(*id, error);
            }
        }
        self.follow_decisions();
        self.lose_all();
        ids.len()
    }

    /// Whether nothing is left to send to the store, or to expect from it, now or later. A store that is down is owed
    /// only releases.
    pub fn is_quiet(&self) -> bool {
        let is_idle = |link: &Link| {
            if link.is_up() {
                link.in_flight.is_empty() && !link.has_work(self)
            } else {
                link.names_released().next().is_none()
            }
        };
        let owes = |queue: &Queue| {
            if self.links[queue.terms().part].is_up() {
                queue.releases.repeats()
            } else {
                queue.names_in_store().next().is_some()
            }
        };
        // The queues of many keys are looked at only once all links are idle.
        self.links.iter().all(is_idle) && !self.queues.iter().any(owes)
    }

    /// Whether no request is left, and no permit has a slot or an unsettled account.
    pub fn is_served(&self) -> bool {
        self.requests.is_empty() && self.holds_nothing()
    }

    /// Whether no permit has a slot or an unsettled account.
    pub fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0 && self.accounting.accounts.is_empty()
    }

    /// Marks all held slots as lost, and releases them.
    pub fn lose_all(&mut self) {
        self.accounting.accounts.report_all();
        let held = self.held_by_permits();
        self.ctx.ending.lose(held);
        self.each_queue(None, |queue, ctx| queue.lose_all(ctx));
        self.ctx.end_lost_leases();
        self.follow_decisions();
        self.ctx.log_reports();
    }

    /// The limiter was dropped: no more requests will come.
    pub fn orphan(&mut self) {
        self.ctx.ending.orphan();
        self.queues.stop_caching(&mut self.ctx);
        self.ctx.measure_limits();
        self.each_queue(None, |queue, ctx| queue.empty_pool(ctx));
        self.follow_decisions();
        self.ctx.log_reports();
    }

    /// Reports slots that will never be released: the limiter was dropped without a shutdown, and there is no driver,
    /// or may soon be none.
    pub fn log_unreleased(&mut self) {
        self.ctx.log_reports();
        if !self.ctx.ending.is_abrupt() || !self.ctx.shared {
            return;
        }
        // What the store may still count once this process is gone.
        let names = self.queues.iter().flat_map(Queue::names_in_store);
        let count = names.map(|seq| weight_of(seq) as usize).sum();
        if count > 0 {
            let lease = self.ctx.settings.lease;
            self.ctx.log(LogEvent::Unreleased { count, lease });
        }
    }

    /// Reports slots whose release was not confirmed by the end of a shutdown.
    pub fn log_unconfirmed(&mut self, count: usize) {
        let lease = self.ctx.settings.lease;
        self.ctx.log(LogEvent::Unconfirmed { count, lease });
    }
}
