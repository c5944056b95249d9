//! Requests and permits: submitted, collected, cancelled, released; timers; the shutdown.

use std::{sync::Arc, task::Waker};

use tokio::time::Instant;

use super::{Core, SlotLeg, Stage, acquire::Progress, link::Link};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    keeper::{
        context::{Context, earliest},
        demand::{Demand, Leg, RequestId, Taken},
        effects::{Effect, LogEvent},
        queue::Queue,
    },
    key::Key,
    leases::{Bounds, Label, Lease, Leases, Pool, QueueId},
    ledger::Seq,
    limit::{Limit, LimitId, LimitValue, MAX_WEIGHT, Mode},
    status::{InLine, Quota, Status},
    sync::{Confirmation, Inquiry, StoredWaker},
    telemetry::{LimitMeter, Measure},
};

/// Units of due work in one step, which take about a millisecond: timers, and entries that queues look at for them.
const MAX_DUE: usize = 1_000;

impl Core {
    /// Submits a request for a permit with this label. The request exists until [`collect`](Self::collect) returns an
    /// answer, or [`cancel`](Self::cancel) removes it.
    pub fn submit(
        &mut self,
        demand: &Demand,
        label: &Label,
        now: Instant,
    ) -> Result<RequestId, AcquireError> {
        self.ctx.now = now;
        let submitted = self.try_submit(demand, label);
        submitted.inspect_err(|error| self.note_refusal(error))
    }

    #[inline]
    fn try_submit(&mut self, demand: &Demand, label: &Label) -> Result<RequestId, AcquireError> {
        let is_newcomer = || !demand.legs().iter().any(|leg| leg.admitted);
        if self.closed || self.ctx.ending && is_newcomer() {
            return Err(self.refusal(demand.first_limit(), AcquireErrorKind::ShutDown));
        }
        if let Some(error) = self.pause_of(demand) {
            return Err(error);
        }
        self.check_weights(demand.legs())?;
        let request = match demand {
            Demand::One(leg) if self.ctx.limits[leg.limit.0].is_plain() && !leg.exempt => {
                self.submit_slot(leg, label)
            }
            demand => self.submit_all(demand.legs(), label),
        };
        self.follow_decisions();
        Ok(request)
    }

    /// Counts and returns the refusal of a request that is not, or no longer, submitted.
    pub fn refuse(&mut self, limit: LimitId, kind: AcquireErrorKind) -> AcquireError {
        let error = self.refusal(limit, kind);
        self.note_refusal(&error);
        error
    }

    /// Counts a refusal that answers a request.
    fn note_refusal(&mut self, error: &AcquireError) {
        if let Some(limit) = self.limit_id(error.limit_name()) {
            self.ctx.measure(limit, Measure::Refused(error.kind()));
        }
    }

    /// Refuses weights that no permit can have, under enforced limits.
    #[inline]
    fn check_weights(&self, legs: &[Leg]) -> Result<(), AcquireError> {
        let enforced = |leg: &Leg| self.ctx.limits[leg.limit.0].current_mode() == Mode::Enforce;
        let is_invalid = |leg: &&Leg| !(1..=MAX_WEIGHT).contains(&leg.weight) && enforced(leg);
        let Some(leg) = legs.iter().find(is_invalid) else {
            return Ok(());
        };
        let details = AcquireErrorDetails {
            weight: leg.weight,
            ..self.ctx.limits[leg.limit.0].error_details()
        };
        let kind = AcquireErrorKind::InvalidWeight;
        Err(AcquireError::new(kind, details))
    }

    /// The answer to a request, if there is one; with quotas if `wants_quotas`. A refused request is then gone; a
    /// granted one is the permit's to release.
    pub fn collect(
        &mut self,
        id: RequestId,
        wants_quotas: bool,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        self.ctx.now = now;
        // A request is gone once collected.
        let quotas = wants_quotas.then(|| self.quotas(id));
        let mut answer = self.collect_request(id);
        self.follow_decisions();
        match (&mut answer, quotas) {
            (Some(Ok(taken)), Some(quotas)) => taken.notes.get_or_insert_default().quotas = quotas,
            (Some(Err(error)), _) => self.note_refusal(error),
            _ => {}
        }
        answer
    }

    /// The answer, if there is one. A refused request is then gone; the slots of a granted one belong to the permit.
    fn collect_request(&mut self, id: RequestId) -> Option<Result<Taken, AcquireError>> {
        match self.request(id)?.stage {
            Stage::Granted => {}
            Stage::Refused(_) => {
                let Stage::Refused(error) = self.remove_request(id)?.stage else {
                    return None;
                };
                return Some(Err(error));
            }
            _ => return None,
        }
        if let Some(taken) = self.take(id) {
            return Some(Ok(taken));
        }
        // Not collected in time: a slot was lost.
        self.request_mut(id)?.stage = Stage::Open;
        self.advance(id);
        self.follow_decisions();
        self.collect_request(id)
    }

    /// Turns a granted request into a permit, if none of its slots was lost.
    #[inline]
    fn take(&mut self, id: RequestId) -> Option<Taken> {
        let request = self.request(id)?;
        let waited = self.waited(request);
        if request.plain
            && let [leg] = &request.legs[..]
        {
            let lease = leg.lease.clone();
            // Does not affect the queue's listing.
            let queue = self.queues.without_listing(lease.queue);
            let taken = queue.take(&mut self.ctx, &lease, waited)?;
            let request = self.remove_request(id)?;
            self.ctx.effects.drop_waker(request.waker);
            return Some(taken);
        }
        if !matches!(self.progress(request), Progress::Complete) {
            return None;
        }
        let request = self.remove_request(id)?;
        self.ctx.effects.drop_waker(request.waker);
        let notes = request.notes;
        let fees = notes.as_ref().map_or(&[][..], |notes| &notes.fees);
        fees.iter().for_each(|fee| self.note_charge(fee, waited));
        let mut place = 0;
        for SlotLeg { lease, .. } in &request.legs {
            let queue = self.queues.without_listing(lease.queue);
            self.ctx.note_admission(queue.limit_id(), waited);
            place = place.max(queue.take_as_leg(&mut self.ctx, lease));
        }
        let leases = request.legs.into_iter().map(|leg| leg.lease);
        Some(Taken {
            leases: Leases::many(leases.collect()),
            waited,
            place,
            notes,
        })
    }

    /// Whether this task is woken when the request is answered.
    pub fn is_watched_by(&self, id: RequestId, waker: &Waker) -> bool {
        let stored = self.request(id).and_then(|request| request.waker.as_ref());
        stored.is_some_and(|stored| stored.will_wake(waker))
    }

    /// As [`collect`](Self::collect). If there is no answer yet, this task will be woken for it, in place of any other.
    pub fn collect_or_watch(
        &mut self,
        id: RequestId,
        wants_quotas: bool,
        waker: StoredWaker,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        let answer = self.collect(id, wants_quotas, now);
        let unused = match self.request_mut(id) {
            Some(request) if answer.is_none() => request.waker.replace(waker),
            _ => Some(waker),
        };
        self.ctx.effects.drop_waker(unused);
        answer
    }

    /// The place of a request in its queue.
    pub fn in_line(&self, id: RequestId) -> Option<InLine> {
        let mut legs = self.request(id)?.legs.iter();
        legs.find_map(|leg| self.in_line_of(&leg.lease))
    }

    pub fn cancel(&mut self, id: RequestId, now: Instant) {
        self.ctx.now = now;
        self.drop_request(id);
        self.follow_decisions();
    }

    /// Releases the slots of a permit. The slots of a permit that may have several bypass the pool, which serves only
    /// requests for a single slot.
    pub fn release(&mut self, leases: &Leases, now: Instant) {
        let has_one = matches!(leases, Leases::One(_));
        let leases = leases.all().iter();
        leases.for_each(|lease| self.release_to(lease, has_one, now));
    }

    fn release_to(&mut self, lease: &Arc<Lease>, may_pool: bool, now: Instant) {
        self.ctx.now = now;
        self.bounded.forget(lease.seq());
        if !self.queues.has(lease.queue) {
            return lease.release_at(now);
        }
        self.change(lease.queue, |queue, ctx| {
            if !(may_pool && queue.keep_released(ctx, lease)) {
                lease.release_at(now);
                queue.release_slot(ctx, lease.seq());
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
        now: Instant,
    ) -> Option<Arc<Limit>> {
        let seq = lease.seq();
        self.release_to(lease, false, now);
        let queue = self.queues.get(lease.queue);
        let releasing = queue.filter(|queue| queue.is_releasing(seq));
        let part = releasing.map(Queue::part);
        let limit = releasing.map(|queue| queue.limit().clone());
        match part.filter(|part| self.ctx.asks_store(*part)) {
            Some(part) => {
                let until = now + self.ctx.settings.store_timeout;
                let confirmations = &mut self.ctx.confirmations;
                confirmations.insert(seq, part, until, confirmation);
            }
            None => self.ctx.effects.push(Effect::GiveUpOn(confirmation)),
        }
        limit
    }

    /// Without a driver no release is confirmed.
    pub fn end_confirmations(&mut self) {
        self.ctx.end_confirmations(None);
    }

    /// Releases a slot that was never used.
    fn cancel_taken(&mut self, lease: &Arc<Lease>, now: Instant) {
        self.ctx.now = now;
        self.bounded.forget(lease.seq());
        lease.release_at(now);
        if self.queues.has(lease.queue) {
            self.change(lease.queue, |queue, ctx| {
                queue.cancel_slot(ctx, lease.seq());
            });
        }
        self.follow_decisions();
    }

    /// Releases the slots of a request that was granted here, and refunds its charges. Returns the state of its rates
    /// afterwards.
    pub fn cancel_granted(&mut self, taken: Taken, now: Instant) -> Vec<Quota> {
        let leases = taken.leases.all().iter();
        leases.for_each(|lease| self.cancel_taken(lease, now));
        self.ctx.now = now;
        let fees = taken.notes.map(|notes| notes.fees);
        // Newest charge first: a rate can only undo its latest charge.
        let fees = fees.into_iter().flatten().rev();
        fees.filter_map(|fee| {
            let quota = self.quota_without(&fee);
            self.refund(&fee);
            quota
        })
        .collect()
    }

    /// Bounds a permit that was collected. The bounds end when it is [released](Self::release).
    pub fn bound(&mut self, lease: &Arc<Lease>, bounds: Bounds, now: Instant) {
        // The keeper has to see the permit's end.
        lease.set_reusable(false);
        self.bounded.bound(lease, bounds, now);
    }

    /// The meter of a lease's limit. `None`: no longer held.
    pub fn meter_of_lease(&self, lease: &Lease) -> Option<Arc<LimitMeter>> {
        let queue = self.queues.get(lease.queue);
        // The queue of a lost lease may be gone, and its id reused.
        let queue = queue.filter(|queue| queue.contains(lease.seq()))?;
        Some(self.ctx.meter(queue.limit_id()).clone())
    }

    /// Asks for the total usage of a key with this value of its own, over all replicas. The question grants free slots, up to
    /// the value.
    pub fn inquire(
        &mut self,
        limit: LimitId,
        (key, own_value): (&Key, Option<LimitValue>),
        inquiry: Inquiry,
        now: Instant,
    ) {
        self.ctx.now = now;
        let queue = self.queues.find_or_make(&mut self.ctx, limit, key);
        self.change(queue, |queue, ctx| {
            queue.learn_own_value(ctx, own_value);
            queue.inquire(ctx, inquiry);
        });
        self.follow_decisions();
    }

    /// The pool of a key, if its limit reuses slots. The queue stays until it is [unbound](Self::unbind).
    pub fn bind(
        &mut self,
        limit: LimitId,
        key: &Key,
        now: Instant,
    ) -> Option<(QueueId, Arc<Pool>)> {
        self.ctx.now = now;
        if !self.ctx.limits[limit.0].is_reused() {
            return None;
        }
        let id = self.queues.find_or_make(&mut self.ctx, limit, key);
        let bind =
            |queue: &mut Queue, _: &mut Context| queue.pool().inspect(|pool| pool.bind()).cloned();
        let pool = self.change(id, bind)?;
        Some((id, pool))
    }

    pub fn unbind(&mut self, queue: QueueId, pool: &Pool) {
        self.change(queue, |_, _| pool.unbind());
    }

    pub fn status(&self) -> Status {
        // There may be very many queues.
        let reuses = self.ctx.limits.iter().any(|limit| limit.is_reused());
        let queues = self.queues.iter().filter(|_| reuses);
        let idle: usize = queues.map(Queue::idle).sum();
        Status {
            // A slot lost while idle is noticed later.
            held: self.ctx.counts.held.saturating_sub(idle),
            waiting: self.ctx.counts.waiting + self.sleepers.len(),
            store_up: self.links.iter().all(|link| link.breaker.is_well()),
        }
    }
}

/// Timers. A single sleep of the driver serves all of them.
impl Core {
    /// When to call [`on_time`](Self::on_time) next.
    pub fn next_due(&self) -> Option<Instant> {
        let due = [
            self.queues.next_due(),
            self.waits.first().map(|(at, _)| *at),
            self.sleepers.first_key_value().map(|((at, _), _)| *at),
            self.bounded.next_due(),
            self.accounts.next_due(),
            self.ctx.overrides.next_end(),
            self.ctx.reports.next_due(),
            self.alarm,
        ];
        let due = due.into_iter().flatten().min();
        if !self.ctx.shared {
            return due;
        }
        let of_store = [
            self.next_end_of_asking(),
            self.ctx.confirmations.next_due(),
            self.ctx.fallback_ends_at(),
            self.ctx.returns.next_end(),
        ];
        let due = of_store.into_iter().fold(due, earliest);
        let links = self.links.iter().map(|link| self.next_due_on(link));
        links.fold(due, earliest)
    }

    /// Timers of a link: probes, pacing, reconnection.
    fn next_due_on(&self, link: &Link) -> Option<Instant> {
        let probe = link.breaker.probe_at();
        let due = [
            link.breaker.ends_at(),
            probe.filter(|_| link.in_flight.is_empty()),
            self.paced_until(link),
            link.connection.reconnect_at,
        ];
        due.into_iter().fold(None, earliest)
    }

    /// Does what is due. Returns whether it may be too much for one step: then [`next_due`](Self::next_due) has still
    /// passed, and the next step continues.
    pub fn on_time(&mut self, now: Instant) -> bool {
        (self.ctx.now, self.ctx.driven) = (now, true);
        self.alarm.take_if(|at| *at <= now);
        self.end_trouble();
        self.end_overrides();
        self.end_fallbacks();
        self.check_returns();
        self.reconnect();
        let mut left = MAX_DUE;
        while left > 0
            && let Some(units) = self.follow_timer()
        {
            left = left.saturating_sub(units);
        }
        self.follow_decisions();
        if self.ctx.reports.next_due().is_some_and(|due| due <= now) {
            self.ctx.log_reports();
        }
        self.ctx.is_behind = left == 0;
        left == 0
    }

    /// Does the next work that is due, and returns its units.
    fn follow_timer(&mut self) -> Option<usize> {
        let now = self.ctx.now;
        if let Some(overdue) = self.ctx.confirmations.take_overdue(now) {
            self.ctx.effects.push(Effect::GiveUpOn(overdue));
            return Some(1);
        }
        if self.wake_sleeper() || self.accounts.on_time(now) {
            return Some(1);
        }
        if self.time_out() || self.end_asking() || self.end_bounded() {
            // A request that has waited long enough releases its slots to others before their waits end.
            self.follow_decisions();
            return Some(1);
        }
        let queue = self.queues.overdue(now)?;
        Some(self.change(queue, |queue, ctx| queue.on_time(ctx)))
    }

    /// A connection has ended, and no exchange has reconnected since. Waiters and holders need a connection, and so does the
    /// count of the replicas, which divide a limit among themselves: a hello establishes it.
    fn reconnect(&mut self) {
        let now = self.ctx.now;
        let limits = &self.ctx.limits;
        let counts = || limits.iter().any(|limit| limit.is_divided());
        for link in &mut self.links {
            let is_due = |at: &mut Instant| *at <= now;
            let is_due = link.connection.reconnect_at.take_if(is_due).is_some();
            let has_queues = || self.queues.iter().any(|queue| queue.part() == link.part);
            if is_due && link.is_up() && (counts() || has_queues()) {
                link.connection.is_wanted = true;
            }
        }
    }

    /// Revokes the first permit to be checked, if it has reached a bound.
    fn end_bounded(&mut self) -> bool {
        let Some(checked) = self.bounded.check_next(self.ctx.now) else {
            return false;
        };
        let Some((lease, kind)) = checked else {
            return true;
        };
        let (seq, was_lost) = (lease.seq(), lease.is_over(self.ctx.now));
        let queue = self.queues.get(lease.queue);
        let is_held = queue.is_some_and(|queue| queue.contains(seq));
        // If the slot was lost before, unnoticed, only the response remains to be ended.
        if is_held && was_lost {
            self.change(lease.queue, |queue, ctx| queue.lose(ctx, seq));
        }
        self.ctx.end_lease(&lease, kind);
        if is_held && !was_lost {
            self.change(lease.queue, |queue, ctx| queue.release_slot(ctx, seq));
        }
        true
    }
}

/// Shutdown.
impl Core {
    /// Whether a driver has taken a step since the last one was gone.
    pub fn is_driven(&self) -> bool {
        self.ctx.driven
    }

    /// Refuses newcomers from now on. Waiting requests and permits have this much time: the latest call counts.
    pub fn close(&mut self, grace_ends_at: Instant, now: Instant) {
        (self.ctx.now, self.ctx.ending) = (now, true);
        self.grace_ends_at = Some(grace_ends_at);
        self.empty_pools();
        self.follow_decisions();
    }

    /// Refuses waiting requests, and all others from now on, and loses all slots. Returns the number of requests that
    /// waited.
    pub fn end_grace(&mut self, now: Instant) -> usize {
        (self.ctx.now, self.closed) = (now, true);
        let refused = self.refuse_all(AcquireErrorKind::ShutDown);
        self.follow_decisions();
        self.lose_all(now);
        refused
    }

    /// Whether nothing is left to send to the store, or to expect from it, now or later. A store that is down is owed
    /// only releases.
    pub fn is_quiet(&self) -> bool {
        // The queues of many keys are looked at only once all links are idle.
        let is_idle =
            |link: &Link| !link.is_up() || link.in_flight.is_empty() && !self.has_work(link);
        self.links.iter().all(is_idle) && self.links.iter().all(|link| self.is_quiet_on(link))
    }

    fn is_quiet_on(&self, link: &Link) -> bool {
        let queues = self.queues.iter();
        let mut queues = queues.filter(|queue| queue.part() == link.part);
        if !link.is_up() {
            let mut in_flight = link.names_released();
            return in_flight.next().is_none()
                && queues.all(|queue| queue.names_in_store().next().is_none());
        }
        !queues.any(Queue::repeats_releases)
    }

    /// Whether no request is left, and no permit has a slot or an unsettled account.
    pub fn is_served(&self) -> bool {
        self.requests.is_empty() && self.holds_nothing()
    }

    /// Whether no permit has a slot or an unsettled account.
    pub fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0 && self.accounts.is_empty()
    }

    /// Until when requests and permits have time in a shutdown.
    pub fn grace_ends_at(&self) -> Option<Instant> {
        self.grace_ends_at
    }

    pub fn alarm(&self) -> Option<Instant> {
        self.alarm
    }

    /// Whether a shutdown has lost this name.
    pub fn has_lost(&self, name: Seq) -> bool {
        self.lost_names.contains(&name)
    }

    /// Marks all held slots as lost, and releases them.
    pub fn lose_all(&mut self, now: Instant) {
        self.ctx.now = now;
        self.accounts.report_all();
        let held = self.held_by_permits();
        self.lost_names.extend(held);
        self.each_queue(|queue, ctx| queue.lose_all(ctx));
        self.ctx.end_lost_leases();
        self.follow_decisions();
        self.ctx.log_reports();
    }

    /// The limiter was dropped: no more requests will come.
    pub fn orphan(&mut self) {
        self.ctx.ending = true;
        self.queues.stop_caching(&mut self.ctx);
        self.orphaned = true;
        self.measure_limits();
        self.empty_pools();
        self.follow_decisions();
        self.ctx.log_reports();
    }

    /// Reports slots that will never be released: the limiter was dropped without a shutdown, and there is no driver,
    /// or may soon be none.
    pub fn log_unreleased(&mut self) {
        self.ctx.log_reports();
        if !self.orphaned || self.grace_ends_at.is_some() || !self.ctx.shared {
            return;
        }
        let count = self.queues.iter().map(Queue::unreleased).sum();
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

    fn empty_pools(&mut self) {
        self.each_queue(|queue, ctx| queue.empty_pool(ctx));
    }
}
