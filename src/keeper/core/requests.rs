//! Requests and permits: submitted, collected, cancelled, released; the shutdown.

use std::{slice, sync::Arc, task::Waker, time::Duration};

use tokio::time::Instant;

use super::{Bounds, Core};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    keeper::{
        demand::{Demand, Leg, LimitId, Submission, Taken},
        effects::{Effect, Report},
    },
    key::Key,
    leases::{Fee, Label, Lease, Pool, QueueId},
    limit::{Limit, MAX_WEIGHT, Mode},
    status::{Quota, Status},
    sync::{Confirmation, Inquiry, StoredWaker},
    telemetry::{LimitMeter, Measure},
};

impl Core {
    /// Asks for a permit. The request is there until [`collect`](Self::collect) has an answer, or
    /// [`cancel`](Self::cancel).
    pub(crate) fn submit(
        &mut self,
        demand: &Demand,
        now: Instant,
    ) -> Result<Submission, AcquireError> {
        self.ctx.now = now;
        if self.ctx.ending {
            return Err(self.refusal(demand.first_limit(), AcquireErrorKind::ShutDown));
        }
        if let Some(error) = self.pause_of(demand) {
            return Err(error);
        }
        let legs = match demand {
            Demand::One(leg) if self.limits[leg.limit.0].is_plain() => {
                self.check_weights(slice::from_ref(leg))?;
                return Ok(Submission::Slot(self.submit_slot(leg)));
            }
            Demand::One(leg) => slice::from_ref(leg),
            Demand::All(legs) => legs,
        };
        self.check_weights(legs)?;
        let claim = self.submit_claim(legs);
        self.advance_moved();
        Ok(Submission::Claim(claim))
    }

    /// Labels the permit to be.
    #[inline]
    pub(crate) fn label(&self, submission: &Submission, label: &Label) {
        match submission {
            Submission::Slot(lease) => lease.set_label(label.clone()),
            Submission::Claim(id) => {
                let legs = self
                    .claims
                    .get(id)
                    .into_iter()
                    .flat_map(|claim| &claim.legs);
                legs.for_each(|lease| lease.set_label(label.clone()));
            }
        }
    }

    /// Refuses weights that no permit can have, under limits that are enforced.
    #[inline]
    fn check_weights(&self, legs: &[Leg]) -> Result<(), AcquireError> {
        let enforced = |leg: &Leg| self.limits[leg.limit.0].current_mode() == Mode::Enforce;
        let is_invalid = |leg: &&Leg| !(1..=MAX_WEIGHT).contains(&leg.weight) && enforced(leg);
        let Some(leg) = legs.iter().find(is_invalid) else {
            return Ok(());
        };
        let details = AcquireErrorDetails {
            weight: leg.weight,
            ..self.limits[leg.limit.0].error_details()
        };
        let kind = AcquireErrorKind::InvalidWeight;
        Err(AcquireError::new(kind, details))
    }

    fn submit_slot(&mut self, leg: &Leg) -> Arc<Lease> {
        let index = self.queue(leg.limit, &leg.key);
        let queue = &mut self.queues[index.0].queue;
        queue.set_own_max(&mut self.ctx, leg.max);
        // A key whose limit is 0 never gets a slot.
        let wait = match queue.max() {
            0 => Duration::ZERO,
            _ => leg.wait,
        };
        let idle = match leg.weight {
            1 => queue.take_idle(&mut self.ctx),
            _ => None,
        };
        let lease = idle.unwrap_or_else(|| queue.submit(&mut self.ctx, wait, leg.weight));
        self.relist(index);
        self.advance_moved();
        lease
    }

    /// Counts a refusal that is a request's answer.
    pub(crate) fn note_refusal(&mut self, error: &AcquireError) {
        if let Some(number) = self.number_of(error.limit_name()) {
            self.ctx.measure(number, Measure::Refused(error.kind()));
        }
    }

    /// The answer to a request, once there is one. A refused one is gone then; a granted one is for the permit to
    /// release.
    pub(crate) fn collect(
        &mut self,
        submission: &Submission,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        self.ctx.now = now;
        let answer = match submission {
            Submission::Slot(lease) => self.collect_slot(lease),
            Submission::Claim(id) => self.collect_claim(*id),
        };
        self.advance_moved();
        answer
    }

    fn collect_slot(&mut self, lease: &Arc<Lease>) -> Option<Result<Taken, AcquireError>> {
        let queue = &mut self.queues.get_mut(lease.queue.0)?.queue;
        if let Some(taken) = queue.take(&mut self.ctx, lease) {
            // Nothing that the queue is listed by has changed.
            return Some(Ok(taken));
        }
        let answer = queue.collect(&mut self.ctx, lease);
        if let Some(Err(error)) = &answer {
            let about = || (Some(queue.key()), Some(&**lease));
            self.refusals
                .keep(queue.number(), error, self.ctx.now, about);
        }
        self.relist(lease.queue);
        answer
    }

    /// Whether this task is woken when a request has an answer.
    pub(crate) fn is_watched_by(&self, submission: &Submission, waker: &Waker) -> bool {
        let stored = match submission {
            Submission::Slot(lease) => {
                let member = self.queues.get(lease.queue.0);
                member.and_then(|member| member.queue.waker(lease.seq()))
            }
            Submission::Claim(id) => self.claims.get(id).and_then(|claim| claim.waker.as_ref()),
        };
        stored.is_some_and(|stored| stored.will_wake(waker))
    }

    /// This task is to be woken then, in place of another one.
    pub(crate) fn watch(&mut self, submission: &Submission, waker: StoredWaker) {
        let old = match submission {
            Submission::Slot(lease) => match self.queues.get_mut(lease.queue.0) {
                Some(member) => member.queue.set_waker(lease.seq(), waker),
                None => Some(waker),
            },
            Submission::Claim(id) => match self.claims.get_mut(id) {
                Some(claim) => claim.waker.replace(waker),
                None => Some(waker),
            },
        };
        self.ctx.effects.drop_waker(old);
    }

    pub(crate) fn drop_waker(&mut self, waker: StoredWaker) {
        self.ctx.effects.drop_waker(Some(waker));
    }

    /// How the limits of a request stand.
    pub(crate) fn quotas(&self, submission: &Submission) -> Vec<Quota> {
        match submission {
            Submission::Slot(lease) => {
                let member = self.queues.get(lease.queue.0);
                let quota = member.and_then(|member| member.queue.quota(&self.ctx));
                quota.into_iter().collect()
            }
            Submission::Claim(id) => {
                let claim = self.claims.get(id);
                claim.map_or_else(Vec::new, |claim| self.quotas_of(claim))
            }
        }
    }

    /// The place at which a waiting request has joined the queue.
    pub(crate) fn place(&self, submission: &Submission) -> Option<u32> {
        match submission {
            Submission::Slot(lease) => self.place_of(lease),
            Submission::Claim(id) => self.place_of_claim(*id),
        }
    }

    /// A request is no longer wanted.
    pub(crate) fn cancel(&mut self, submission: &Submission, now: Instant) {
        match submission {
            Submission::Slot(lease) => self.release(lease, now),
            Submission::Claim(id) => {
                self.ctx.now = now;
                self.drop_claim(*id);
                self.advance_moved();
            }
        }
    }

    /// A slot is no longer wanted.
    pub(crate) fn release(&mut self, lease: &Arc<Lease>, now: Instant) {
        self.ctx.now = now;
        self.bounded.forget(lease.seq());
        if let Some(member) = self.queues.get_mut(lease.queue.0) {
            if !member.queue.put_idle(&mut self.ctx, lease) {
                lease.return_at(now);
                member.queue.give_up(&mut self.ctx, lease.seq());
            }
            self.relist(lease.queue);
            self.advance_moved();
        } else {
            lease.return_at(now);
        }
    }

    /// A slot is no longer wanted, and its task waits until the store has confirmed that. It does not go to the pool, or
    /// nothing would be released. Returns its limit, unless there is nothing to wait for: it was lost, or only this
    /// process knows of it.
    pub(crate) fn release_confirmed(
        &mut self,
        lease: &Arc<Lease>,
        confirmation: Confirmation,
        now: Instant,
    ) -> Option<Arc<Limit>> {
        let (index, seq) = (lease.queue, lease.seq());
        self.release_one_of_several(lease, now);
        let member = self.queues.get(index.0);
        let releasing = member.filter(|member| member.queue.is_releasing(seq));
        let limit = releasing.map(|member| member.queue.limit().clone());
        match limit.is_some() && self.store_is_up() {
            true => {
                let until = now + self.ctx.settings.store_timeout;
                self.ctx.confirmations.insert(seq, until, confirmation);
            }
            false => self.ctx.effects.push(Effect::GiveUpOn(confirmation)),
        }
        limit
    }

    /// Nobody confirms releases: there is no driver.
    pub(crate) fn give_up_on_confirmations(&mut self) {
        self.ctx.give_up_on_confirmations();
    }

    /// A slot is no longer wanted that was held with others. In a cluster it was alone when it was acquired.
    pub(crate) fn release_one_of_several(&mut self, lease: &Arc<Lease>, now: Instant) {
        if let Some(member) = self.queues.get_mut(lease.queue.0) {
            member.queue.set_apart(lease.seq());
        }
        self.release(lease, now);
    }

    /// A permit that was acquired limit by limit has this slot beside another one.
    pub(in crate::keeper) fn set_companion(&mut self, lease: &Lease) {
        if let Some(member) = self.queues.get_mut(lease.queue.0) {
            member.queue.set_companion(&mut self.ctx, lease.seq());
        }
    }

    /// A slot is not used after all.
    pub(crate) fn untake(&mut self, lease: &Arc<Lease>, now: Instant) {
        self.ctx.now = now;
        self.bounded.forget(lease.seq());
        lease.return_at(now);
        if let Some(member) = self.queues.get_mut(lease.queue.0) {
            member.queue.give_up_unused(&mut self.ctx, lease.seq());
            self.relist(lease.queue);
            self.advance_moved();
        }
    }

    /// Refunds what was charged for a request that had been granted here. Returns how the rate stands then.
    pub(in crate::keeper) fn refund_at(&mut self, fee: &Fee, now: Instant) -> Option<Quota> {
        self.ctx.now = now;
        let quota = self.quota_without(fee);
        self.refund(fee);
        quota
    }

    /// Bounds a permit that its request has got. The bounds go when it is [released](Self::release).
    pub(crate) fn bound(&mut self, lease: &Arc<Lease>, bounds: Bounds, now: Instant) {
        // The keeper has to see its end.
        lease.set_reusable(false);
        self.bounded.bound(lease, bounds, now);
    }

    /// The meter of a lease's limit. `None`: it is not held any more.
    pub(crate) fn meter_of_lease(&self, lease: &Lease) -> Option<Arc<LimitMeter>> {
        let member = self.queues.get(lease.queue.0);
        // The queue of a lost lease may be gone, and its index taken by another.
        let member = member.filter(|member| member.queue.contains(lease.seq()))?;
        Some(self.ctx.meter(member.queue.number()).clone())
    }

    /// Asks what all replicas together hold under a key.
    pub(crate) fn inquire(&mut self, limit: LimitId, key: &Key, inquiry: Inquiry, now: Instant) {
        self.ctx.now = now;
        let index = self.queue(limit, key);
        self.queues[index.0].queue.inquire(&mut self.ctx, inquiry);
        self.relist(index);
        self.advance_moved();
    }

    /// The pool of a key, if its limit reuses slots. Its queue stays until it is [unbound](Self::unbind).
    pub(in crate::keeper) fn bind(
        &mut self,
        limit: LimitId,
        key: &Key,
        now: Instant,
    ) -> Option<(QueueId, Arc<Pool>)> {
        self.ctx.now = now;
        if !self.limits[limit.0].is_reused() {
            return None;
        }
        let index = self.queue(limit, key);
        let pool = self.queues[index.0].queue.pool()?.clone();
        pool.bind();
        self.relist(index);
        Some((index, pool))
    }

    pub(in crate::keeper) fn unbind(&mut self, queue: QueueId, pool: &Pool) {
        pool.unbind();
        self.relist(queue);
    }

    pub(crate) fn status(&self) -> Status {
        let queues = self.queues.iter();
        let idle: usize = queues.map(|(_, member)| member.queue.idle()).sum();
        let others = idle + self.ctx.counts.companions;
        Status {
            // One that was lost while it was idle is noticed there later.
            held: self.ctx.counts.held.saturating_sub(others),
            waiting: self.ctx.counts.waiting + self.sleepers.len(),
            store_up: self.breaker.is_well(),
        }
    }
}

/// The end.
impl Core {
    /// Refuses newcomers from now on, and all requests that wait. Returns how many waited.
    pub(crate) fn close(&mut self, now: Instant) -> usize {
        (self.ctx.now, self.ctx.ending) = (now, true);
        self.recall_all();
        let mut refused = self.refuse_claims(AcquireErrorKind::ShutDown);
        self.each_queue(|queue, ctx| {
            refused += queue.refuse_waiting(ctx, AcquireErrorKind::ShutDown);
        });
        self.advance_moved();
        refused
    }

    /// Marks what is still held as lost, and releases it. Returns how many permits that were.
    pub(crate) fn lose_all(&mut self, now: Instant) -> usize {
        self.ctx.now = now;
        self.accounts.report_all();
        let mut lost = 0;
        self.each_queue(|queue, ctx| lost += queue.lose_all(ctx));
        self.ctx.end_lost_leases();
        self.advance_moved();
        lost
    }

    /// The limiter was dropped: no more requests will come.
    pub(crate) fn orphan(&mut self) {
        self.was_shut_down = std::mem::replace(&mut self.ctx.ending, true);
        while !self.cached.is_empty() {
            self.drop_oldest_cached();
        }
        self.orphaned = true;
        self.measure_limits();
        self.recall_all();
        self.advance_moved();
    }

    /// Reports slots that nobody will release: the limiter was dropped without a shutdown, and there is no driver, or may
    /// soon be none.
    pub(crate) fn report_unreleased(&mut self) {
        if !self.orphaned || self.was_shut_down || !self.ctx.shared {
            return;
        }
        let queues = self.queues.iter();
        let count = queues.map(|(_, member)| member.queue.unreleased()).sum();
        if count > 0 {
            let lease = self.ctx.settings.lease;
            self.ctx.report(Report::Unreleased { count, lease });
        }
    }

    fn recall_all(&mut self) {
        self.each_queue(|queue, ctx| queue.recall(ctx));
    }
}
