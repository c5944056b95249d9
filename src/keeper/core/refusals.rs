//! Requests that are refused or dropped, and the contents of a refusal.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Complaints, Core, Request, SlotLeg, accounting::Level};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{
        context::Context,
        demand::RequestId,
        effects::{Effect, LogEvent},
        queue::Use,
    },
    ledger::Seq,
    limit::{Limit, LimitId},
    status::Quota,
    store::StoreError,
};

/// Time without a refused request after which unusable keys of a limit are news again.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(60);

impl Complaints {
    /// Reports that requests of a key are refused because the key cannot be used: once while this lasts, for all keys of
    /// its limit. Outages are reported elsewhere.
    pub fn report(
        &mut self,
        limit: &Arc<Limit>,
        key: &Arc<str>,
        error: &StoreError,
        ctx: &mut Context,
    ) {
        let is_due = |at| ctx.now >= at + COMPLAINT_PAUSE;
        if !error.is_outage()
            && let Some(id) = ctx.registry.id_of(limit.name())
            && self.0.insert(id, ctx.now).is_none_or(is_due)
        {
            let (limit, key, error) = (limit.clone(), key.clone(), error.message.clone());
            ctx.log(LogEvent::LedgerUnusable { limit, key, error });
        }
    }
}

impl Core {
    pub(super) fn refuse_leg(&mut self, id: RequestId, seq: Seq, kind: AcquireErrorKind) {
        let Some(request) = self.requests.get(id) else {
            return;
        };
        if let Some(leg) = request.legs.iter().find(|leg| leg.lease.seq() == seq) {
            let error = request.error_at(leg, kind, &self.queues, &self.ctx);
            self.refuse_request(id, error);
        }
    }

    /// Refuses a request: releases its slots and refunds its charges.
    pub(super) fn refuse_request(&mut self, id: RequestId, mut error: AcquireError) {
        let request = self.requests.get(id);
        let Some(request) = request.filter(|request| !request.is_refused()) else {
            return;
        };
        let (queues, ctx) = (&self.queues, &self.ctx);
        let refused = error.details.limit_name.clone();
        let others = self.quotas(request, true);
        let others = others.filter(|quota| quota.limit_name != refused);
        error.details.quotas.extend(others);
        if let Some(limit) = ctx.registry.id_of(error.limit_name()) {
            let about = || {
                let mut legs = request.legs.iter().map(|leg| &*leg.lease);
                let mut fees = request.fees().iter().filter(|fee| fee.limit_id() == limit);
                let lease = legs.find(|lease| queues[lease.queue].terms().limit_id == limit);
                let key = lease.map(|lease| &queues[lease.queue].terms().key);
                let key = key.or_else(|| fees.next().map(|fee| &fee.key));
                let entry = lease.and_then(|lease| queues[lease.queue].entry(lease.seq()));
                let tenant = entry.and_then(|entry| Some(entry.paying()?.look()));
                let lease = lease.or(request.legs.first().map(|leg| &*leg.lease));
                (key, lease, tenant)
            };
            self.refusals.keep(limit, &error, ctx.now, about);
        }
        self.let_go(id);
        let waker = self.requests.refuse(id, error);
        self.ctx.effects.push(waker.map(Effect::Wake));
    }

    /// Releases the slots of a request, and removes it from all lists.
    pub(super) fn let_go(&mut self, id: RequestId) {
        self.requests.stop_asking(id);
        self.requests.wait(id, None);
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        let legs = mem::take(&mut request.legs);
        let notes = request.notes.as_mut();
        let fees = notes.map_or_else(Vec::new, |notes| mem::take(&mut notes.fees));
        self.end_sleep(id);
        let now = self.ctx.now;
        for SlotLeg { lease, .. } in legs {
            // The slot may have come from the pool.
            lease.release_at(now);
            self.change(lease.queue, |queue, ctx| {
                queue.release(ctx, lease.seq(), Use::Held);
                queue.forget_fallen_back();
            });
        }
        for fee in fees {
            (self.accounting).refund(&fee, &self.ctx, &mut self.links);
        }
    }

    /// Refuses all requests, not yet collected, with a leg under this limit, which an operator has paused; also if it was off
    /// for them.
    pub(super) fn pause_requests(&mut self, limit: LimitId, until: Instant) {
        let of_limit = |leg: &SlotLeg| self.queues[leg.lease.queue].terms().limit_id == limit;
        let name = self.ctx.registry.limit(limit).name();
        let ids = self.requests.those(|request| {
            let (mut legs, mut fees) = (request.legs.iter(), request.fees().iter());
            let is_under = legs.any(of_limit) || fees.any(|fee| fee.limit_id() == limit);
            let mut exempt = request.notes.iter().flat_map(|notes| &notes.exempt);
            let is_under = is_under || exempt.any(|limit| limit.name() == name);
            is_under && !request.is_refused()
        });
        for id in ids.iter().rev() {
            let mut error = self.ctx.registry.paused_error(limit, until, self.ctx.now);
            if let Some(request) = self.requests.get(*id) {
                error.details.waited = request.waited(self.ctx.now);
                let mut legs = request.legs.iter();
                let leg = legs.find(|leg| self.queues[leg.lease.queue].terms().limit_id == limit);
                let in_line = leg.and_then(|leg| leg.in_line(&self.queues));
                error.details.place = in_line.map(|in_line| in_line.position);
            }
            self.refuse_request(*id, error);
        }
    }

    /// The known states of a request's limits: now, or as they will be once a refused request has released its slots and
    /// places, and its charges are refunded.
    pub(super) fn quotas(
        &self,
        request: &Request,
        is_refused: bool,
    ) -> impl Iterator<Item = Quota> {
        let (ctx, legs) = (&self.ctx, request.legs.iter());
        let slots = legs.filter_map(move |SlotLeg { lease, .. }| {
            let without = is_refused.then(|| lease.seq());
            self.queues[lease.queue].quota(ctx, without)
        });
        let rates = request.fees().iter().filter_map(move |fee| {
            let level = Level::of(fee, ctx, &self.links)?;
            Some(if is_refused {
                level.quota_without(fee)
            } else {
                level.quota(fee)
            })
        });
        slots.chain(rates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{keeper::tests::settings, store::StoreErrorKind, telemetry::LimitMeter};

    #[test]
    fn each_limit_complains_once_until_it_has_been_quiet_for_a_while() {
        let (mut complaints, now) = (Complaints::default(), Instant::now());
        let mut ctx = Context::new(settings(0), true, now);
        let limits = ["a", "b"].map(|name| {
            let limit = Limit::concurrent(name, 1);
            let meter = Arc::new(LimitMeter::new("test", name));
            ctx.registry.add(&limit, meter, now);
            Arc::new(limit)
        });
        let (unusable, down) = (StoreErrorKind::Misconfigured, StoreErrorKind::Outage);
        for (after_s, limit, kind, count) in [
            (0, 0, down, 0),
            (0, 0, unusable, 1),
            (59, 0, unusable, 1),
            (59, 1, unusable, 2),
            (60 + 58, 0, unusable, 2),
            (60 + 58 + 60, 0, unusable, 3),
        ] {
            ctx.now = now + Duration::from_secs(after_s);
            let message = "WRONGTYPE".to_owned();
            let error = StoreError { kind, message };
            complaints.report(&limits[limit], &"key".into(), &error, &mut ctx);
            assert_eq!(ctx.effects.logged().count(), count, "after {after_s} s");
        }
    }
}
