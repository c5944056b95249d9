//! Inspects and restores a ledger, for tests and fuzz targets.

#[cfg(test)]
use std::collections::BTreeMap;

#[cfg(test)]
use super::{Heartbeat, Pause, shares::SharesState};
use super::{Ledger, Waiter};
use crate::ledger::{MemberId, ReplicaId};
#[cfg(test)]
use crate::ledger::{RAMP_MS, id::more_members};

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

    /// Members and scores of the equivalent sorted set in Redis, in order.
    pub(in crate::ledger) fn content(&self) -> Vec<(String, f64)> {
        const ALIVE: u64 = 1 << 51;
        const KEEPING: u64 = 1 << 52;
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
}
