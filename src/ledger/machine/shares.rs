//! Fair shares of the slots among tenants, in slot-seconds: *pay as you hold*.
//!
//! The queue stays in order of arrival. Beside it each tenant has a *line*, its waiters in the same order, and one number:
//! the virtual time up to which it has *paid*. `promote` serves the tenant that has paid for the least. A grant is paid
//! in advance, by the usual hold; renewals report any time beyond it, and the release settles the rest. When a tenant is
//! served, the ledger's virtual time rises to the tenant's. A tenant that is new, or was away, starts from there, level
//! with the others.
//!
//! A hold costs its time x units / (share x limit): for a tenant with a share of 2 under a limit of 10, a second costs
//! 50,000 us. So virtual time never runs faster than the clock, but for prepayments: see `charge`. The keeper computes
//! this (`cost_us` in `keeper/queue/entries/entry.rs`): a ledger sees no shares.
//!
//! The rule: start-time fair queueing (Goyal, Vin, Cheng 1997), charged for the time that a slot is really held. Newcomers
//! are refused by dynamic thresholds (Choudhury, Hahne 1998).

use std::{
    cmp::{max, min},
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use super::Call;
use crate::ledger::{
    Dues, Left, MemberId, Payer, TenantId,
    layout::{LAST_US, MAX_CREDIT_US, MAX_DEBT_US, SWEEP_BUDGET},
};

#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    /// Virtual time.
    pub(super) time_us: u64,
    pub(super) tenants: BTreeMap<TenantId, TenantState>,
    /// Tenants with a line, by their payments.
    pub(super) waiting: BTreeSet<(u64, TenantId)>,
    /// The others, until virtual time has reached them.
    pub(super) idle: BTreeSet<(u64, TenantId)>,
    /// May contain permits that no longer wait: they are removed when their turn comes.
    pub(super) lines: BTreeSet<Lined>,
    /// In store milliseconds.
    pub(super) kept_until_ms: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct TenantState {
    pub(super) paid_us: u64,
    pub(super) waits: bool,
    pub(super) in_line: usize,
}

/// A waiter in the line of its tenant. Lines are in order of tickets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lined {
    pub(super) tenant: TenantId,
    pub(super) ticket: i64,
    pub(super) id: MemberId,
    pub(super) cost_us: u64,
}

/// The next waiter to serve.
pub(super) enum InTurn {
    Waiter(Lined),
    /// The line of this tenant is empty, since its waiters have left.
    Ended(TenantId),
    /// No line has a waiter that was not passed over.
    Nobody,
}

/// The last waiter of each tenant that was passed over in a batch.
pub(super) type Passed = BTreeMap<TenantId, Lined>;

impl Lined {
    pub(super) fn new(payer: Payer, ticket: i64, id: MemberId) -> Self {
        Self {
            tenant: payer.tenant,
            ticket,
            id,
            cost_us: payer.cost_us,
        }
    }
}

impl Shares {
    pub(super) fn payments_of(&self, tenant: TenantId) -> u64 {
        self.tenants.get(&tenant).map_or(0, |one| one.paid_us)
    }

    /// Length of a tenant's line, waiters that have left included.
    pub(super) fn line_length(&self, tenant: TenantId) -> usize {
        self.tenants.get(&tenant).map_or(0, |one| one.in_line)
    }

    /// As [`Ledger::settle`](super::Ledger::settle). A waiter that is in no line any more has paid for a grant, and left before it
    /// knew.
    pub(super) fn settle(&mut self, call: &Call, dues: &Dues, released: u32) {
        let is_settled = released >= dues.settled_units + dues.left.len() as u32;
        for &Left { payer, ticket, seq } in &dues.left {
            let was_in_line = self.leave(Lined::new(payer, ticket, call.own(seq)));
            if !was_in_line && is_settled {
                self.report(payer.tenant, -(payer.cost_us as i64), 0);
            }
        }
        let settled = dues.settled.iter().filter(|_| is_settled);
        for report in dues.reports.iter().chain(settled) {
            self.report(report.tenant, report.us, report.most_us);
        }
    }

    fn report(&mut self, tenant: TenantId, us: i64, most_us: u64) {
        let paid_us = self.tenants.get(&tenant).map(|one| one.paid_us);
        // A tenant that is not there owes nothing.
        if paid_us.is_some() || us > 0 {
            self.pay(tenant, paid_us.unwrap_or(self.time_us), us, most_us);
        }
    }

    fn pay(&mut self, tenant: TenantId, paid_us: u64, us: i64, most_us: u64) {
        let most = self.time_us + max(MAX_DEBT_US, most_us);
        let least = min(paid_us, self.time_us.saturating_sub(MAX_CREDIT_US));
        let paid_us = match us {
            ..0 => max(least, paid_us.saturating_sub(us.unsigned_abs())),
            _ => max(paid_us, min(paid_us + us.unsigned_abs(), most)),
        };
        let waits = self.tenants.get(&tenant).is_some_and(|one| one.waits);
        self.insert(tenant, paid_us, waits);
    }

    /// Sets a tenant's payments, and whether it waits.
    pub(super) fn insert(&mut self, tenant: TenantId, paid_us: u64, waits: bool) {
        let before = self.tenants.get(&tenant).copied();
        if let Some(before) = before {
            self.order(before.waits).remove(&(before.paid_us, tenant));
        }
        let in_line = before.map_or(0, |before| before.in_line);
        self.order(waits).insert((paid_us, tenant));
        let after = TenantState {
            paid_us,
            waits,
            in_line,
        };
        self.tenants.insert(tenant, after);
    }

    fn order(&mut self, waits: bool) -> &mut BTreeSet<(u64, TenantId)> {
        if waits {
            &mut self.waiting
        } else {
            &mut self.idle
        }
    }

    pub(super) fn join(&mut self, waiter: Lined) {
        let tenant = waiter.tenant;
        let known = self.tenants.get(&tenant).copied();
        if known.is_none_or(|one| !one.waits) {
            let before_us = known.map_or(0, |one| one.paid_us);
            self.insert(tenant, max(before_us, self.time_us), true);
            for _ in 0..SWEEP_BUDGET {
                match self.idle.first() {
                    Some(&(paid_us, other)) if paid_us <= self.time_us => {
                        self.idle.pop_first();
                        self.tenants.remove(&other);
                    }
                    _ => break,
                }
            }
            // Tenants that begin to wait at the same virtual time are served in this order.
            if before_us <= self.time_us {
                self.time_us = min(self.time_us + 1, LAST_US);
            }
        }
        if self.lines.insert(waiter)
            && let Some(one) = self.tenants.get_mut(&tenant)
        {
            one.in_line += 1;
        }
    }

    /// Returns whether it was in a line.
    pub(super) fn leave(&mut self, waiter: Lined) -> bool {
        let was_in_line = self.lines.remove(&waiter);
        if was_in_line && let Some(one) = self.tenants.get_mut(&waiter.tenant) {
            one.in_line -= 1;
        }
        was_in_line
    }

    /// The next waiter to serve, behind any that were passed over.
    pub(super) fn next(&self, passed: &Passed) -> InTurn {
        for &(_, tenant) in &self.waiting {
            let last = passed.get(&tenant);
            match self.first_behind(tenant, last) {
                Some(next) => return InTurn::Waiter(next),
                None if last.is_none() => return InTurn::Ended(tenant),
                None => {}
            }
        }
        InTurn::Nobody
    }

    fn first_behind(&self, tenant: TenantId, last: Option<&Lined>) -> Option<Lined> {
        let first = Lined {
            tenant,
            ticket: i64::MIN,
            id: MemberId::FIRST,
            cost_us: 0,
        };
        let from = last.map_or(Bound::Included(first), |last| Bound::Excluded(*last));
        let next = self.lines.range((from, Bound::Unbounded)).next();
        next.copied().filter(|next| next.tenant == tenant)
    }

    pub(super) fn stop_waiting(&mut self, tenant: TenantId) {
        if let Some(one) = self.tenants.get(&tenant) {
            self.insert(tenant, one.paid_us, false);
        }
    }

    /// `waiting`: number of waiters, with this one. If virtual time stood still, an endless stream of requests from new
    /// tenants would starve the others, so virtual time moves a little with each grant. It stops at the payments of the
    /// tenant served: otherwise it would run away from tenants that keep waiting, since prepayments are later refunded
    /// in part.
    pub(super) fn charge(&mut self, waiter: Lined, waiting: u64) {
        let (tenant, cost_us) = (waiter.tenant, waiter.cost_us);
        self.leave(waiter);
        let Some(&TenantState {
            paid_us, in_line, ..
        }) = self.tenants.get(&tenant)
        else {
            return;
        };
        self.time_us = max(self.time_us, paid_us);
        self.pay(tenant, paid_us, cost_us as i64, cost_us);
        let next_us = min(self.time_us + cost_us / (waiting + 1), LAST_US);
        self.time_us = max(self.time_us, min(next_us, self.payments_of(tenant)));
        if in_line == 0 {
            self.stop_waiting(tenant);
        }
    }
}
