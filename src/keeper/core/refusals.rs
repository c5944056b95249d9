//! Requests that are refused or dropped, and the contents of a refusal.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, Request, SlotLeg, Stage};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{demand::RequestId, effects::LogEvent},
    leases::Fee,
    ledger::Seq,
    limit::{Limit, LimitId},
    status::Quota,
    store::StoreError,
};

/// Time without a refused request after which unusable keys of a limit are news again.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(60);

impl Core {
    pub(super) fn refuse_leg(&mut self, id: RequestId, seq: Seq, kind: AcquireErrorKind) {
        let Some(request) = self.request(id) else {
            return;
        };
        if let Some(leg) = request.legs.iter().find(|leg| leg.lease.seq() == seq) {
            let error = self.leg_error(request, leg, kind);
            self.refuse_request(id, error);
        }
    }

    /// Refuses a request: releases its slots and refunds its charges.
    pub(super) fn refuse_request(&mut self, id: RequestId, mut error: AcquireError) {
        let Some(request) = self.request(id).filter(|request| !request.is_refused()) else {
            return;
        };
        let refused = error.details.limit_name.clone();
        // As they will be once the request has released its slots and places, and its charges are refunded.
        let legs = request.legs.iter();
        let slots = legs.filter_map(|leg| self.quota_of_leg(leg, Some(leg.lease.seq())));
        let rates = request
            .fees()
            .iter()
            .filter_map(|fee| self.quota_without(fee));
        let others = slots.chain(rates);
        let others = others.filter(|quota| quota.limit_name != refused);
        error.details.quotas.extend(others.collect::<Vec<_>>());
        self.keep_refusal(id, &error);
        self.let_go(id);
        if let Some(request) = self.request_mut(id) {
            request.stage = Stage::Refused(error);
            let waker = request.waker.take();
            self.ctx.effects.wake(waker);
        }
    }

    /// Records the refusal of a request that still has its legs and fees.
    fn keep_refusal(&mut self, id: RequestId, error: &AcquireError) {
        let Some(limit) = self.limit_id(error.limit_name()) else {
            return;
        };
        let (queues, requests) = (&self.queues, &self.requests);
        let about = || {
            let Some(request) = requests.get(id.slot as usize) else {
                return (None, None);
            };
            let queues = request.legs.iter().map(|leg| &queues[leg.lease.queue]);
            let mut keys = queues.filter(|queue| queue.limit_id() == limit);
            let mut fees = request.fees().iter().filter(|fee| fee.limit_id() == limit);
            let key = keys.next().map(|queue| queue.key());
            let key = key.or_else(|| fees.next().map(|fee| &fee.key));
            (key, request.legs.first().map(|leg| &*leg.lease))
        };
        self.refusals.keep(limit, error, self.ctx.now, about);
    }

    /// Releases the slots of a request, and removes it from all lists.
    fn let_go(&mut self, id: RequestId) {
        self.stop_asking(id);
        self.set_wait(id, None);
        let Some(request) = self.request_mut(id) else {
            return;
        };
        let sleeps = match request.stage {
            Stage::Sleeping(until) => Some(until),
            _ => None,
        };
        let legs = mem::take(&mut request.legs);
        let notes = request.notes.as_mut();
        let fees = notes.map_or_else(Vec::new, |notes| mem::take(&mut notes.fees));
        sleeps
            .into_iter()
            .for_each(|until| self.end_sleep(until, id));
        let now = self.ctx.now;
        for SlotLeg { lease, .. } in legs {
            // The slot may have come from the pool.
            lease.release_at(now);
            self.change(lease.queue, |queue, ctx| {
                queue.release_slot(ctx, lease.seq());
                queue.forget_fallen_back();
            });
        }
        for fee in fees {
            self.refund(&fee);
        }
    }

    pub(super) fn drop_request(&mut self, id: RequestId) {
        self.let_go(id);
        if let Some(request) = self.remove_request(id) {
            self.ctx.effects.drop_waker(request.waker);
        }
    }

    /// Refuses all requests not yet collected. Returns their number.
    pub(super) fn refuse_all(&mut self, kind: AcquireErrorKind) -> usize {
        let ids = self.requests_that(|request| !request.is_refused());
        // Newest first, so that the times that rates have reserved can be undone.
        for id in ids.iter().rev() {
            if let Some(error) = self.request(*id).map(|one| self.request_error(one, kind)) {
                self.refuse_request(*id, error);
            }
        }
        ids.len()
    }

    /// Refuses all requests, not yet collected, with a leg under this limit, which an operator has paused.
    pub(super) fn pause_requests(&mut self, limit: LimitId, until: Instant) {
        let of_limit = |leg: &SlotLeg| self.queues[leg.lease.queue].limit_id() == limit;
        let ids = self.requests_that(|request| {
            let mut fees = request.fees().iter();
            let concerned =
                request.legs.iter().any(of_limit) || fees.any(|fee| fee.limit_id() == limit);
            concerned && !request.is_refused()
        });
        for id in ids.iter().rev() {
            let mut error = self.paused_error(limit, until);
            if let Some(request) = self.request(*id) {
                error.details.waited = self.waited(request);
                let mut legs = request.legs.iter();
                let leg = legs.find(|leg| self.queues[leg.lease.queue].limit_id() == limit);
                let in_line = leg.and_then(|leg| self.in_line_of(&leg.lease));
                error.details.place = in_line.map(|in_line| in_line.position);
            }
            self.refuse_request(*id, error);
        }
    }

    /// Time waited so far.
    pub(super) fn waited(&self, request: &Request) -> Duration {
        match self.ctx.now {
            // Most requests are granted at once. A difference of times takes longer than a comparison.
            now if now == request.asked => Duration::ZERO,
            now => now.saturating_duration_since(request.asked),
        }
    }
}

/// Contents of refusals.
impl Core {
    /// The known states of a request's limits.
    pub(super) fn quotas(&self, id: RequestId) -> Vec<Quota> {
        let Some(request) = self.request(id) else {
            return Vec::new();
        };
        let legs = request.legs.iter();
        let slots = legs.filter_map(|leg| self.quota_of_leg(leg, None));
        let rates = request.fees().iter().filter_map(|fee| self.quota_of(fee));
        slots.chain(rates).collect()
    }

    fn quota_of_leg(&self, leg: &SlotLeg, without: Option<Seq>) -> Option<Quota> {
        self.queues[leg.lease.queue].quota(&self.ctx, without)
    }

    /// A refusal without a responsible limit. It names the limit being waited for, or else the first.
    fn request_error(&self, request: &Request, kind: AcquireErrorKind) -> AcquireError {
        let mut legs = request.legs.iter();
        let waits = |leg: &SlotLeg| self.in_line_of(&leg.lease).is_some();
        if let Some(leg) = legs.find(|leg| waits(leg)) {
            return self.leg_error(request, leg, kind);
        }
        let first = request.legs.first();
        let first = first.map(|leg| self.queues[leg.lease.queue].limit_id());
        let limit = first
            .or(request.fees().first().map(Fee::limit_id))
            .unwrap_or(LimitId(0));
        let mut error = self.refusal(limit, kind);
        error.details.waited = self.waited(request);
        error
    }

    fn leg_error(&self, request: &Request, leg: &SlotLeg, kind: AcquireErrorKind) -> AcquireError {
        let queue = &self.queues[leg.lease.queue];
        queue.error(&self.ctx, leg.lease.seq(), kind, self.waited(request))
    }

    /// Reports that requests of a key are refused because the key cannot be used: once while this lasts, for all keys
    /// of its limit. Outages are reported elsewhere.
    pub(super) fn complain(&mut self, limit: &Arc<Limit>, key: &Arc<str>, error: &StoreError) {
        let now = self.ctx.now;
        let is_due = |at| now >= at + COMPLAINT_PAUSE;
        let Some(id) = self.limit_id(limit.name()).filter(|_| !error.is_outage()) else {
            return;
        };
        if self.complained.insert(id, now).is_none_or(is_due) {
            let (limit, key, error) = (limit.clone(), key.clone(), error.message.clone());
            self.ctx.log(LogEvent::LedgerUnusable { limit, key, error });
        }
    }
}
