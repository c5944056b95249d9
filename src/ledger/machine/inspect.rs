//! Inspects and restores a ledger, for tests and fuzz targets.

#[cfg(test)]
use std::collections::BTreeMap;

#[cfg(test)]
use super::{Heartbeat, Pause, shares::Lined};
use super::{
    Ledger, Waiter,
    shares::{Shares, TenantState},
};
use crate::ledger::{MemberId, ReplicaId, TenantId};
#[cfg(test)]
use crate::ledger::{
    PaceState, Payer,
    id::more_members,
    layout::{ALIVE, FIRST_TICKET, IDLE, KEEPING, RAMP_MS},
};

impl Ledger {
    /// Whether each permit has one place, the unit count matches the holders, and each line its tenant.
    pub(crate) fn is_sound(&self) -> bool {
        use super::Place::{Holds, Waits};

        let holds = |(until_ms, id): &(u64, MemberId)| matches!(self.places.get(id), Some(Holds { until_ms: until }) if until == until_ms);
        let waits = |(ticket, waiter): (&i64, &Waiter)| matches!(self.places.get(&waiter.id), Some(Waits { ticket: at }) if at == ticket);
        self.holders.keys().all(holds)
            && self.holders.keys().map(|(_, id)| id.weight()).sum::<u32>() == self.units
            && self.queue.iter().all(waits)
            && self.shares.as_ref().is_none_or(|shares| shares.is_sound())
            && self.holders.len() + self.queue.len() == self.places.len()
    }

    pub(crate) fn waiters(&self) -> impl Iterator<Item = (i64, MemberId)> {
        self.queue
            .iter()
            .map(|(&ticket, waiter)| (ticket, waiter.id))
    }

    /// Until when a replica's waiters are not passed over, in store milliseconds, and whether it listens to wake-ups.
    pub(crate) fn heartbeat_of(&self, replica: ReplicaId) -> Option<(u64, bool)> {
        let heartbeat = self.heartbeats.get(&replica)?;
        Some((heartbeat.until_ms, heartbeat.listens))
    }
}

#[cfg(test)]
impl Ledger {
    pub(crate) fn holders(&self) -> impl Iterator<Item = (MemberId, u64)> {
        self.holders.keys().map(|&(until_ms, id)| (id, until_ms))
    }

    pub(in crate::ledger) fn heartbeats(&self) -> impl Iterator<Item = (ReplicaId, u64)> {
        self.heartbeats
            .iter()
            .map(|(&replica, heartbeat)| (replica, heartbeat.until_ms))
    }

    pub(crate) fn pause_end_ms(&self) -> Option<u64> {
        self.running_pause().map(|pause| pause.end_ms)
    }

    pub(in crate::ledger) fn set_pause(&mut self, end_ms: Option<u64>) {
        self.pause = end_ms.map(|end_ms| Pause {
            end_ms,
            was_ended: false,
            now_ms: 0,
        });
    }

    /// Rebuilds a ledger from holders, waiters at their tickets, and heartbeats. All replicas listen, and no waiter was
    /// passed over.
    pub(in crate::ledger) fn restored(
        holders: impl IntoIterator<Item = (MemberId, u64)>,
        queue: impl IntoIterator<Item = (i64, MemberId)>,
        heartbeats: impl IntoIterator<Item = (ReplicaId, u64)>,
    ) -> Self {
        let listening = |(replica, until_ms)| {
            let listens = true;
            (replica, Heartbeat { until_ms, listens })
        };
        let mut ledger = Self {
            heartbeats: heartbeats.into_iter().map(listening).collect(),
            ..Self::default()
        };
        for (id, until_ms) in holders {
            ledger.hold(id, until_ms);
        }
        for (ticket, id) in queue {
            ledger.wait_with(ticket, id, false);
        }
        ledger
    }

    /// The payments and lines of a fair ledger.
    pub(in crate::ledger) fn shares_state(&self) -> Option<SharesState> {
        self.shares.as_deref().map(SharesState::of)
    }

    pub(in crate::ledger) fn set_shares_state(&mut self, state: Option<&SharesState>) {
        self.shares = state.map(|state| Box::new(state.shares()));
    }

    /// The state of a limit that finds its own value.
    pub(crate) fn pace_of(&self) -> Option<PaceState> {
        self.pace.as_deref().copied()
    }

    /// Members and scores of the equivalent sorted set in Redis, in order.
    pub(in crate::ledger) fn content(&self) -> Vec<(String, f64)> {
        let waiters = self.queue.iter().map(|(&ticket, waiter)| {
            let half = if waiter.was_passed { 0.5 } else { 0.0 };
            (waiter.id.text(), ticket as f64 + half)
        });
        let holders = self.holders().flat_map(|(id, until_ms)| {
            let name = id.text();
            let others: Vec<_> = more_members(id.seq)
                .map(|unit| format!("{name}{}", char::from(unit)))
                .collect();
            let members = std::iter::once(name).chain(others);
            members.map(move |member| (member, until_ms as f64))
        });
        let of_replica = |sign: char, band: u64| {
            move |(replica, until_ms): (&ReplicaId, &u64)| {
                (
                    format!("{sign}{}", replica.text()),
                    (band + until_ms) as f64,
                )
            }
        };
        let ends = self.heartbeats().collect::<BTreeMap<_, _>>();
        let heartbeats = ends.iter().map(of_replica('@', ALIVE));
        let rights = self.rights.iter().map(of_replica('~', KEEPING));
        let pause = self.pause.iter().map(|pause| {
            let over_ms = (ALIVE + pause.end_ms + RAMP_MS) as f64;
            let mark = if pause.was_ended { 0.5 } else { 0.0 };
            ("!".to_owned(), over_ms + mark)
        });
        let mut others: Vec<_> = pause.chain(heartbeats).chain(rights).collect();
        others.sort_by(|one, other| one.1.total_cmp(&other.1));
        waiters.chain(holders).chain(others).collect()
    }

    /// The lines of a fair ledger, with the tickets of the places.
    pub(crate) fn lines(&self) -> impl DoubleEndedIterator<Item = (TenantId, i64, MemberId)> {
        let shares = self.shares.iter();
        let lines = shares.flat_map(|shares| &shares.lines);
        lines.map(|waiter| (waiter.tenant, waiter.ticket, waiter.id))
    }

    /// Members and scores of the equivalent sorted sets in Redis, in order: of tenants and of lines.
    pub(in crate::ledger) fn shares_content(&self) -> [Vec<(String, f64)>; 2] {
        let text = |tenant: &TenantId| tenant.text().map(char::from).iter().collect::<String>();
        let Some(shares) = &self.shares else {
            return Default::default();
        };
        let time = (String::new(), shares.time_us as f64 - IDLE as f64);
        let waiting = shares.waiting.iter();
        let waiting = waiting.map(|(paid_us, tenant)| (text(tenant), *paid_us as f64));
        let idle = shares.idle.iter();
        let idle = idle.map(|(paid_us, tenant)| (text(tenant), (IDLE + paid_us) as f64));
        let lines = shares.lines.iter().map(|waiter| {
            let place = waiter.ticket - FIRST_TICKET;
            let (tenant, id, cost_us) = (text(&waiter.tenant), waiter.id.text(), waiter.cost_us);
            (format!("{tenant}{place:016}{id}{cost_us:016}"), 0.0)
        });
        let tenants = std::iter::once(time).chain(waiting).chain(idle);
        [tenants.collect(), lines.collect()]
    }
}

impl Shares {
    /// Whether each tenant has one place in the order, a tenant with a line waits, and the lengths of the lines match.
    pub(super) fn is_sound(&self) -> bool {
        let lengths = |tenant| self.lines.iter().filter(move |one| one.tenant == tenant);
        let has_place = |(&tenant, one): (&TenantId, &TenantState)| {
            let place = (one.paid_us, tenant);
            let length = lengths(tenant).count();
            self.waiting.contains(&place) == one.waits
                && self.idle.contains(&place) != one.waits
                && one.in_line == length
                && (one.waits || length == 0)
        };
        self.tenants.iter().all(has_place)
            && self.tenants.len() == self.waiting.len() + self.idle.len()
            && self
                .lines
                .iter()
                .all(|one| self.tenants.contains_key(&one.tenant))
    }
}

/// The complete state of a ledger's shares, for the model.
#[cfg(test)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::ledger) struct SharesState {
    /// Virtual time.
    pub(in crate::ledger) time_us: u64,
    /// The payments of each tenant, and whether it waits.
    pub(in crate::ledger) tenants: BTreeMap<TenantId, (u64, bool)>,
    /// Payer, ticket and name of each waiter in a line, in order.
    pub(in crate::ledger) lines: Vec<(Payer, i64, MemberId)>,
    pub(in crate::ledger) kept_until_ms: u64,
}

#[cfg(test)]
impl SharesState {
    pub(super) fn of(shares: &Shares) -> Self {
        let tenants = shares.tenants.iter();
        let lines = shares.lines.iter().map(|waiter| {
            let Lined {
                tenant, cost_us, ..
            } = *waiter;
            (Payer { tenant, cost_us }, waiter.ticket, waiter.id)
        });
        Self {
            time_us: shares.time_us,
            tenants: tenants
                .map(|(&tenant, one)| (tenant, (one.paid_us, one.waits)))
                .collect(),
            lines: lines.collect(),
            kept_until_ms: shares.kept_until_ms,
        }
    }

    pub(super) fn shares(&self) -> Shares {
        let mut shares = Shares {
            time_us: self.time_us,
            kept_until_ms: self.kept_until_ms,
            ..Shares::default()
        };
        for (&tenant, &(paid_us, waits)) in &self.tenants {
            shares.insert(tenant, paid_us, waits);
        }
        for &(payer, ticket, id) in &self.lines {
            shares.lines.insert(Lined::new(payer, ticket, id));
            if let Some(one) = shares.tenants.get_mut(&payer.tenant) {
                one.in_line += 1;
            }
        }
        shares
    }
}
