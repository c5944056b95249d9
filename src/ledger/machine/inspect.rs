//! What tests and fuzz targets see of a ledger, and how they restore one.

use super::Ledger;
use crate::ledger::PermitId;
#[cfg(test)]
use crate::ledger::ReplicaId;

impl Ledger {
    /// Whether each permit has one place.
    pub(crate) fn is_sound(&self) -> bool {
        use super::Place::{Holds, Waits};

        let holds = |(until_ms, id): &(u64, PermitId)| matches!(self.places.get(id), Some(Holds { until_ms: until }) if until == until_ms);
        let waits = |(ticket, id): (&i64, &PermitId)| matches!(self.places.get(id), Some(Waits { ticket: at }) if at == ticket);
        self.holders.keys().all(holds)
            && self.queue.iter().all(waits)
            && self.holders.len() + self.queue.len() == self.places.len()
    }
}

#[cfg(test)]
impl Ledger {
    pub(crate) fn holders(&self) -> impl Iterator<Item = (PermitId, u64)> {
        self.holders.keys().map(|&(until_ms, id)| (id, until_ms))
    }

    pub(crate) fn waiters(&self) -> impl Iterator<Item = (i64, PermitId)> {
        self.queue.iter().map(|(&ticket, &id)| (ticket, id))
    }

    pub(in crate::ledger) fn heartbeats(&self) -> impl Iterator<Item = (ReplicaId, u64)> {
        self.heartbeats
            .iter()
            .map(|(&replica, &until_ms)| (replica, until_ms))
    }

    /// Until when a replica's waiters count as alive, in store milliseconds.
    pub(crate) fn marked_until(&self, replica: ReplicaId) -> Option<u64> {
        self.heartbeats.get(&replica).copied()
    }

    /// Rebuilds a ledger from what the three iterators above returned. Tickets begin at that of the call's time.
    pub(in crate::ledger) fn restored(
        holders: impl IntoIterator<Item = (PermitId, u64)>,
        queue: impl IntoIterator<Item = PermitId>,
        heartbeats: impl IntoIterator<Item = (ReplicaId, u64)>,
        call: &super::Call,
    ) -> Self {
        let mut ledger = Self {
            heartbeats: heartbeats.into_iter().collect(),
            ..Self::default()
        };
        for (id, until_ms) in holders {
            ledger.hold(id, until_ms);
        }
        for id in queue {
            ledger.enqueue(call, id);
        }
        ledger
    }

    /// Members and scores of the sorted set that Redis would have, in its order.
    pub(in crate::ledger) fn content(&self) -> Vec<(String, f64)> {
        const ALIVE: u64 = 1 << 51;
        const KEEPING: u64 = 1 << 52;
        let waiters = self
            .waiters()
            .map(|(ticket, id)| (id.text(), ticket as f64));
        let holders = self
            .holders()
            .map(|(id, until_ms)| (id.text(), until_ms as f64));
        let of_replica = |sign: char, band: u64| {
            move |(replica, until_ms): (&ReplicaId, &u64)| {
                (
                    format!("{sign}{}", replica.text()),
                    (band + until_ms) as f64,
                )
            }
        };
        let heartbeats = self.heartbeats.iter().map(of_replica('@', ALIVE));
        let rights = self.rights.iter().map(of_replica('~', KEEPING));
        let mut replicas: Vec<_> = heartbeats.chain(rights).collect();
        replicas.sort_by(|one, other| one.1.total_cmp(&other.1));
        waiters.chain(holders).chain(replicas).collect()
    }
}
