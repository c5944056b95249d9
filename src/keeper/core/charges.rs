//! The charges of a request: what it owes to rates, in this process or by an answer of the store, and its sleep until they let it
//! go on.

use super::{Core, Request, Stage, rates::harsher};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{context::Availability, demand::RequestId},
    leases::{Fee, Paid},
    limit::LimitId,
};

impl Core {
    /// Charges a request in this process, as the limits' fallbacks say at this availability: all that it owes, or nothing.
    pub(super) fn pay_as(&mut self, id: RequestId, availability: Availability) {
        let (mut paid, mut bypassed, mut refusal) = (Vec::new(), Vec::new(), None);
        let fees = self
            .request(id)
            .map_or_else(Vec::new, |one| one.fees().to_vec());
        let fees = fees.into_iter().enumerate();
        for (number, fee) in fees.filter(|(_, fee)| fee.paid == Paid::Not) {
            match self.charge_here(&fee, availability) {
                Ok((how, rest_us, after)) => paid.push((number, fee, how, rest_us, after)),
                Err(error) if !self.is_enforced(&fee) => bypassed.push((number, error.kind())),
                Err(error) => refusal = Some(harsher(refusal, error)),
            }
        }
        if let Some(error) = refusal {
            return self.refuse_request(id, error);
        }
        for (number, kind) in bypassed {
            self.bypass_fee(id, number, kind);
        }
        for (number, fee, how, rest_us, after) in paid {
            if let Some(after) = after {
                self.keep_rate(fee.limit_id(), fee.key, after);
            }
            self.pay(id, number, how, rest_us);
        }
        self.settle_fees(id, None);
    }

    /// The rates have refused a request, or have charged it.
    pub(super) fn settle_fees(&mut self, id: RequestId, refusal: Option<AcquireError>) {
        match refusal {
            Some(error) => self.refuse_request(id, error),
            None => {
                self.sleep(id);
                self.wake_bypassed(id);
            }
        }
    }

    /// A rate that a request sleeps for may not be enforced any more since the request was sent.
    fn wake_bypassed(&mut self, id: RequestId) {
        let Some(request) = self.request(id) else {
            return;
        };
        if let Stage::Sleeping(_) = request.stage {
            let ahead = request
                .fees()
                .iter()
                .filter(|fee| fee.begins > self.ctx.now);
            let bypassed = ahead.filter(|fee| !self.is_enforced(fee));
            let limits: Vec<_> = bypassed.map(Fee::limit_id).collect();
            for limit in limits {
                self.release_sleepers(limit);
            }
        }
    }

    /// The store cannot charge the request.
    pub(super) fn refuse_unpaid(&mut self, id: RequestId) {
        let kind = AcquireErrorKind::Misconfigured;
        let unpaid = |fee: &Fee| fee.paid == Paid::Not;
        let request = self.request(id).into_iter();
        let fees = request.flat_map(Request::fees);
        let enforced = fees
            .clone()
            .find(|fee| unpaid(fee) && self.is_enforced(fee));
        if let Some(fee) = enforced {
            let error = self.refusal(fee.limit_id(), kind);
            return self.refuse_request(id, error);
        }
        let fees = fees.enumerate().filter(|(_, fee)| unpaid(fee));
        for number in fees.map(|(number, _)| number).collect::<Vec<_>>() {
            self.bypass_fee(id, number, kind);
        }
    }

    /// A rate does not make requests wait any more: those that do go on, and are refunded. Later spending counts.
    pub(super) fn release_sleepers(&mut self, limit: LimitId) {
        let now = self.ctx.now;
        let waits = |fee: &&mut Fee| fee.limit_id() == limit && fee.begins > now;
        let mut released = Vec::new();
        // The last one first: of starts that are ahead a rate with a small burst can only undo the last.
        for (at, id) in self.sleepers.keys().rev().copied().collect::<Vec<_>>() {
            let bypassed = self.ctx.limits[limit.0].clone();
            let Some(request) = self.request_mut(id) else {
                continue;
            };
            let Some(fee) = request.fees_mut().iter_mut().find(waits) else {
                continue;
            };
            let charged = fee.clone();
            (fee.paid, fee.begins) = (Paid::Free, now);
            let kind = AcquireErrorKind::TooSoon;
            let notes = request.notes.get_or_insert_default();
            notes.bypassed.push((bypassed, kind));
            request.stage = Stage::Open;
            self.ctx.note_bypass(limit, kind);
            self.end_sleep(at, id);
            self.refund(&charged);
            released.push(id);
        }
        for id in released.into_iter().rev() {
            self.sleep(id);
            self.note_changed(id);
        }
    }

    /// Requests that their rates let go on by now.
    pub(super) fn wake_sleepers(&mut self) {
        while let Some((&(at, id), _)) = self.sleepers.first_key_value()
            && at <= self.ctx.now
        {
            self.end_sleep(at, id);
            if let Some(request) = self.request_mut(id) {
                request.stage = Stage::Open;
                self.note_changed(id);
            }
        }
    }
}
