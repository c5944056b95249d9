//! Checks the tenants of a fair limit in one exchange: the order of their grants, their lines, and what they pay.

use super::{
    Broken, Id,
    check::Check,
    message::{NOW_MS, steps},
    tenants::{Tenant, longest, shortest, tenant_id},
};
use crate::ledger::machine::inspect::SharesState;

/// Whose turn comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Arrival,
    /// The tenant that has paid least; within a tenant by arrival. A waiter in no line is last: it is hidden by a name
    /// in a line that has left.
    Payments,
}

pub(super) struct FairCheck<'a> {
    check: &'a Check<'a>,
    before: Option<SharesState>,
    after: Option<SharesState>,
    order: Order,
}

impl<'a> FairCheck<'a> {
    pub(super) fn new(
        check: &'a Check<'a>,
        before: Option<&SharesState>,
        after: Option<SharesState>,
    ) -> Self {
        let kept = |shares: &&SharesState| shares.kept_until_ms > NOW_MS;
        let mut this = Self {
            check,
            before: before.filter(kept).cloned(),
            after,
            order: Order::Arrival,
        };
        let stays = |id: &&Id| !check.released(**id);
        let waiting = check.before.queue.iter().filter(stays).count();
        let is_over =
            |id: &Id| id.client == check.message.client && check.message.left.contains(&id.seq);
        let lines = check
            .before
            .lines()
            .filter(|id| this.was_in_line(*id) && !is_over(id));
        if check.message.pays && lines.count() >= waiting {
            this.order = Order::Payments;
        }
        this
    }

    /// Whether one waiter stays while another one, which came later or whose tenant has paid more, is granted a slot.
    pub(super) fn is_overtaken(&self, waiter: Id, granted: Id) -> Option<&'static str> {
        let before = self.check.before;
        let place = |id: Id| before.arrivals.iter().position(|other| *other == id);
        let is_later = place(granted) > place(waiter);
        let (its, other) = (before.tenant(waiter), before.tenant(granted));
        let in_line = (self.was_in_line(waiter), self.was_in_line(granted));
        match (self.order, in_line, its.zip(other)) {
            (Order::Payments, (false, true), _) => None,
            (Order::Payments, (true, false), _) => Some("a line was overtaken by a waiter in none"),
            (Order::Payments, (true, true), Some((its, other))) if its != other => {
                // The payments at which the last one was served, and at which this one was not.
                let served = self.expected_us(other, self.granted_of(other) - 1);
                let passed = self.expected_us(its, self.granted_of(its));
                let is_less = (passed, its) < (served, other);
                is_less.then_some("a tenant was overtaken by one that has paid more")
            }
            _ if its == other => {
                is_later.then_some("a waiter was overtaken by another of its tenant")
            }
            _ => is_later.then_some("a waiter was overtaken by another"),
        }
    }

    /// The next of these waiters, after the exchange. `None` also if the next one came with this exchange, behind a waiter
    /// that needs more units than are free: the next exchange serves it.
    pub(super) fn next_of(&self, waiters: &[Id], fits: impl Fn(Id) -> bool) -> Option<Id> {
        let first = waiters.first().copied();
        let state = self.check.after;
        let Some(shares) = self.after.as_ref().filter(|_| self.check.message.pays) else {
            return first;
        };
        if state.lines().count() < state.queue.len() {
            return first;
        }
        let paid = |id: &&Id| {
            let tenant = tenant_id(state.tenant(**id).unwrap_or_default());
            let paid = shares.tenants.get(&tenant);
            (
                !state.is_in_line(**id),
                paid.map(|(paid_us, _)| *paid_us),
                tenant,
            )
        };
        let next = waiters.iter().min_by_key(paid).copied()?;
        let is_new = |id: &Id| !self.check.before.queue.contains(id);
        let mut earlier = waiters.iter().filter(|id| !is_new(id));
        let is_behind = is_new(&next) && earlier.any(|id| !fits(*id));
        (!is_behind).then_some(next)
    }

    /// A waiter of a replica that knows tenants stands in its line, until it is granted a slot or leaves.
    pub(super) fn of_lines(&self) -> Broken {
        let Check {
            before,
            after,
            message,
            ..
        } = self.check;
        let fault = |id: &Id| {
            let was = self.was_in_line(*id);
            let is_new = !before.queue.contains(id);
            let is_in_line = after.is_in_line(*id);
            if after.queue.contains(id) {
                let joins = is_new && message.pays || was && self.check.lives(*id);
                return (joins && !is_in_line).then_some("a waiter stands in no line");
            }
            let by_line =
                was && message.pays && self.is_granted(*id) && self.order == Order::Payments;
            let has_left = id.client == message.client && message.left.contains(&id.seq);
            let is_over = is_in_line && (by_line || has_left);
            is_over.then_some("a place in a line outlasts its waiter")
        };
        let mut all = before.queue.iter().chain(&after.queue);
        let found = all.find_map(fault);
        let stale = || before.lines().find_map(|id| fault(&id));
        found.or_else(stale).map(|how| ("G3", how))
    }

    /// Each grant from a line is charged once, each refund counts once, and nothing else changes payments.
    pub(super) fn of_payments(&self) -> Broken {
        if let Some(after) = &self.after
            && self.check.message.pays
            && !self.check.after.queue.is_empty()
        {
            let kept = steps(after.kept_until_ms);
            let bounds = self.check.bounds;
            if !(shortest(bounds)..=longest(bounds)).contains(&kept) {
                return Some(("G5", "payments are kept for too short or too long"));
            }
        }
        let Some(before) = &self.before else {
            return None;
        };
        let Some(after) = &self.after else {
            return Some(("G3", "payments were forgotten"));
        };
        if after.time_us < before.time_us {
            return Some(("G3", "virtual time went back"));
        }
        let fault = |tenant: Tenant| {
            let id = tenant_id(tenant);
            before.tenants.get(&id)?;
            let granted = self.granted_of(tenant);
            let expected = self.expected_us(tenant, granted);
            if granted > 0 && after.time_us < self.expected_us(tenant, granted - 1) {
                return Some("virtual time is behind a tenant that was served");
            }
            let Some(&(paid_us, _)) = after.tenants.get(&id) else {
                return (expected > after.time_us).then_some("a debt was forgotten");
            };
            let joined = self.has_newcomer(tenant) && paid_us <= after.time_us;
            let is_due = paid_us == expected || joined && paid_us >= expected;
            (!is_due).then_some("a tenant has not paid what it was charged")
        };
        let tenants = self.check.bounds.all_tenants();
        tenants.filter_map(fault).next().map(|how| ("G3", how))
    }

    fn was_in_line(&self, id: Id) -> bool {
        self.before.is_some() && self.check.before.is_in_line(id)
    }

    fn is_granted(&self, id: Id) -> bool {
        let holds = |(held, _): &(Id, _)| *held == id;
        self.check.before.queue.contains(&id) && self.check.after.holders.iter().any(holds)
    }

    /// Number of grants to the line of a tenant.
    fn granted_of(&self, tenant: Tenant) -> u64 {
        let of_line = |id: &&Id| {
            self.check.before.tenant(**id) == Some(tenant)
                && self.is_granted(**id)
                && self.was_in_line(**id)
        };
        match self.order {
            Order::Payments => self.check.before.queue.iter().filter(of_line).count() as u64,
            Order::Arrival => 0,
        }
    }

    /// A tenant's payments after this many grants.
    fn expected_us(&self, tenant: Tenant, granted: u64) -> u64 {
        let shares = self.before.as_ref();
        let paid = shares.and_then(|shares| shares.tenants.get(&tenant_id(tenant)));
        let paid_us = paid.map_or(0, |(paid_us, _)| *paid_us);
        let refund_us = self.refund_us(tenant);
        paid_us - refund_us.min(paid_us) + granted * self.check.bounds.cost as u64
    }

    fn has_newcomer(&self, tenant: Tenant) -> bool {
        let mut new = self.check.after.queue.iter();
        new.any(|id| {
            self.check.before.tenant(*id) == Some(tenant) && !self.check.before.queue.contains(id)
        })
    }

    /// A tenant's refund. It counts once: only if the exchange removes as many permits as its dues are for.
    fn refund_us(&self, tenant: Tenant) -> u64 {
        let message = self.check.message;
        let id = |seq: &u8| Id {
            client: message.client,
            seq: *seq,
        };
        let removed = message.release.iter().map(id);
        let removed = removed.filter(|id| self.check.before.stands(*id)).count();
        let counts = removed >= message.settled.len() + message.left.len();
        let is_payer = self.check.before.tenant(id(&0)) == Some(tenant);
        if !counts || !is_payer {
            return 0;
        }
        let left = message.left.iter().map(id);
        let granted = left.filter(|id| !self.was_in_line(*id)).count() as u64;
        let bounds = &self.check.bounds;
        message.settled.len() as u64 * bounds.refund() as u64 + granted * bounds.cost as u64
    }
}
