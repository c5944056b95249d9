//! Payments and lines of a fair limit, made finite, and the production code's form of them.
//!
//! Payments are relative to virtual time, and capped where only their order matters. Lines are in order. They also contain
//! *stale* names: a waiter that never received its ticket leaves without giving up its place.

use std::collections::BTreeMap;

use super::{
    Bounds, Id, LEASE, PROMPT, State, Steps,
    message::{Message, NOW_MS, replica, steps, time_ms},
};
use crate::ledger::{
    Dues, FIRST_TICKET, Left, MemberId, Payer, Report, TenantId, machine::inspect::SharesState,
};

/// Virtual time of each exchange, in us.
const TIME_US: u64 = 1 << 40;
/// Distance of waiters' tickets: more than the names of waiters that have left in between.
const SPACE: i64 = 100;
/// Ticket of the first waiter, below that of a newcomer.
const TICKET: i64 = FIRST_TICKET + NOW_MS as i64 * 1_000 - 100 * SPACE;

pub(super) type Tenant = u8;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Shares {
    pub(super) tenants: BTreeMap<Tenant, Payments>,
    /// In order of tenants, then of tickets.
    pub(super) lines: Vec<Id>,
    pub(super) kept_until: Steps,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Payments {
    /// Ahead of virtual time; negative: behind it.
    pub(super) ahead: i8,
    pub(super) waits: bool,
}

impl State {
    pub(super) fn tenant(&self, id: Id) -> Option<Tenant> {
        let client = self.clients.get(usize::from(id.client))?;
        client.tenant
    }

    /// Names in lines that no longer wait.
    pub(super) fn stale(&self) -> impl Iterator<Item = Id> {
        self.lines().filter(|id| !self.queue.contains(id))
    }

    pub(super) fn lines(&self) -> impl Iterator<Item = Id> {
        let lines = self.shares.iter().flat_map(|shares| &shares.lines);
        lines.copied()
    }

    pub(super) fn is_in_line(&self, id: Id) -> bool {
        self.lines().any(|other| other == id)
    }

    /// The payments and lines of the production code, in the form of the model.
    pub(super) fn shares_of(&self, state: &SharesState) -> Shares {
        let ahead = |paid_us: u64| {
            let ahead = paid_us as i64 - state.time_us as i64;
            ahead.clamp(i8::MIN.into(), i8::MAX.into()) as i8
        };
        let tenants = state.tenants.iter().map(|(tenant, &(paid_us, waits))| {
            let ahead = ahead(paid_us);
            (number_of(*tenant), Payments { ahead, waits })
        });
        Shares {
            tenants: tenants.collect(),
            lines: state.lines.iter().map(|(_, _, id)| Id::of(*id)).collect(),
            kept_until: steps(state.kept_until_ms),
        }
    }

    /// Waiters in the order of the queue, and their tickets.
    pub(super) fn tickets(&self) -> impl Iterator<Item = (i64, MemberId)> {
        let name = |id: &Id| id.name(self.weight(*id));
        let tickets = (1..).map(|place| TICKET + place * SPACE);
        tickets.zip(self.queue.iter().map(name))
    }

    pub(super) fn shares_state(&self, bounds: &Bounds) -> Option<SharesState> {
        let shares = self.shares.as_ref()?;
        let tenants = shares.tenants.iter();
        let tenants = tenants.map(|(&tenant, one)| {
            let paid_us = TIME_US.saturating_add_signed(one.ahead.into());
            (tenant_id(tenant), (paid_us, one.waits))
        });
        let of_waiters: BTreeMap<MemberId, i64> =
            self.tickets().map(|(ticket, id)| (id, ticket)).collect();
        let mut last = (None, TICKET);
        let lines = shares.lines.iter().map(|id| {
            let (tenant, name) = (self.tenant(*id), id.name(self.weight(*id)));
            if last.0 != tenant {
                last = (tenant, TICKET);
            }
            // A name that no longer waits is behind the waiter before it.
            last.1 = of_waiters.get(&name).copied().unwrap_or(last.1 + 1);
            (bounds.payer(tenant.unwrap_or_default()), last.1, name)
        });
        Some(SharesState {
            time_us: TIME_US,
            tenants: tenants.collect(),
            lines: lines.collect(),
            kept_until_ms: time_ms(shares.kept_until),
        })
    }

    /// The dues of an exchange, if its replica knows that the limit is fair.
    pub(super) fn dues(
        &self,
        message: &Message,
        shares: Option<&SharesState>,
        bounds: &Bounds,
    ) -> Option<Box<Dues>> {
        let payer = self.payer(message, bounds);
        let left = message.left.iter().filter_map(|&seq| {
            let (payer, seq) = (payer?, message.seq(seq));
            let name = MemberId {
                replica: replica(message.client),
                seq,
            };
            let mut lines = shares.into_iter().flat_map(|shares| &shares.lines);
            let place = lines.find(|(_, _, id)| *id == name);
            // Its place may have ended since.
            let ticket = place.map_or(TICKET, |(_, ticket, _)| *ticket);
            Some(Left { payer, ticket, seq })
        });
        let refund = |units: usize| Report {
            tenant: payer.unwrap_or_default().tenant,
            us: -i64::from(bounds.refund()) * units as i64,
            most_us: 0,
        };
        let settled = message.settled.len();
        message.pays.then(|| {
            Box::new(Dues {
                left: left.collect(),
                reports: Vec::new(),
                settled: (settled > 0).then(|| refund(settled)).into_iter().collect(),
                settled_units: settled as u32 * u32::from(message.weight),
            })
        })
    }

    pub(super) fn payer(&self, message: &Message, bounds: &Bounds) -> Option<Payer> {
        let client = self.clients.get(usize::from(message.client))?;
        client.tenant.map(|tenant| bounds.payer(tenant))
    }

    /// Without refunds, a release settles nothing but a place in a line.
    fn forget_dues(&mut self) {
        let mut places: Vec<Id> = self.lines().collect();
        for message in &self.network {
            let id = |seq| Id {
                client: message.client,
                seq,
            };
            places.extend(message.acquire.map(id));
        }
        for message in &mut self.network {
            let client = message.client;
            let has_place = |seq: &u8| places.contains(&Id { client, seq: *seq });
            message.left.retain(has_place);
        }
        for (number, client) in (0..).zip(&mut self.clients) {
            let has_place = |seq| {
                let client = number;
                places.contains(&Id { client, seq })
            };
            client.forget_dues(has_place);
        }
    }

    /// Merges states that differ only in payments without consequences.
    pub(super) fn bound_payments(&mut self, bounds: &Bounds) {
        if !bounds.refunds {
            self.forget_dues();
        }
        let Some(shares) = &mut self.shares else {
            return;
        };
        // An idle tenant that owes nothing is as good as a new one.
        shares.tenants.retain(|_, one| one.waits || one.ahead > 0);
        let mut order: Vec<_> = shares.tenants.values_mut().collect();
        order.sort_by_key(|one| std::cmp::Reverse(one.ahead));
        let mut above = None;
        for one in order {
            let before = one.ahead;
            one.ahead = before.clamp(-bounds.cost, bounds.cost);
            if let Some((ahead, bounded)) = above
                && before < ahead
            {
                one.ahead = one.ahead.min(bounded - 1);
            }
            above = Some((before, one.ahead));
        }
        // How long they are kept is checked in each exchange; here they may end whenever nobody waits.
        shares.kept_until = longest(bounds);
        if shares.tenants.is_empty() && shares.lines.is_empty() {
            self.shares = None;
        }
    }
}

/// How long payments and lines are kept at least after an exchange with waiters.
pub(super) fn shortest(bounds: &Bounds) -> Steps {
    LEASE + PROMPT + bounds.waiter_ttl
}

/// How long they are kept at most.
pub(super) fn longest(bounds: &Bounds) -> Steps {
    shortest(bounds) + LEASE
}

pub(super) fn tenant_id(tenant: Tenant) -> TenantId {
    TenantId::from_bits(tenant.into())
}

fn number_of(id: TenantId) -> Tenant {
    let found = (0..Tenant::MAX).find(|tenant| tenant_id(*tenant) == id);
    found.expect("the tenants of the model have small numbers")
}

impl Bounds {
    /// The refund of a prepayment by a release.
    pub(super) fn refund(&self) -> i8 {
        self.cost / 2
    }

    fn payer(&self, tenant: Tenant) -> Payer {
        Payer {
            tenant: tenant_id(tenant),
            cost_us: self.cost as u64,
        }
    }
}
