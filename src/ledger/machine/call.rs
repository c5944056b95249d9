//! The state that the batches of one exchange share: the caller, the time, the sweep budget and the wake-ups.

use std::collections::BTreeSet;

use crate::ledger::{
    Batch, Exchange, MAX_LEASE_MS, MemberId, Published, ReplicaId, SWEEP_BUDGET, Seq, Wake,
};

/// State of one exchange while it runs.
#[derive(Debug)]
pub(crate) struct Call {
    /// See [`Reply::more`](crate::ledger::Reply::more).
    pub(crate) more: bool,
    pub(crate) published: Published,
    /// The caller subscribes to its wake-ups.
    pub(in crate::ledger) listens: bool,
    /// Replicas that cannot receive wake-ups now.
    pub(in crate::ledger) absent: BTreeSet<ReplicaId>,
    pub(super) replica: ReplicaId,
    pub(super) now_us: u64,
    pub(super) now_ms: u64,
    pub(super) respond_ms: u64,
    waiter_ttl_ms: u64,
    pub(in crate::ledger) budget: usize,
    lease_ms: u64,
    promotion_ms: u64,
}

impl Call {
    /// Time may stand still between calls: then no lease ends, and tickets restart whenever the queue is empty.
    pub(crate) fn new(exchange: &Exchange, now_us: u64) -> Self {
        Self {
            more: false,
            published: Published::default(),
            listens: false,
            absent: BTreeSet::new(),
            replica: exchange.replica,
            now_us,
            now_ms: now_us / 1_000,
            respond_ms: exchange.respond_ms,
            waiter_ttl_ms: exchange.waiter_ttl_ms,
            budget: SWEEP_BUDGET as usize,
            lease_ms: exchange.lease_ms,
            promotion_ms: exchange.promotion_ms(),
        }
    }

    pub(super) fn own(&self, seq: Seq) -> MemberId {
        MemberId {
            replica: self.replica,
            seq,
        }
    }

    #[cfg(any(test, feature = "test-util"))]
    pub(in crate::ledger) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// How long a generation is kept: longer than any replica relies on having seen it.
    #[cfg(any(test, feature = "test-util"))]
    pub(in crate::ledger) fn generation_ttl_us(&self) -> u64 {
        (2 * self.lease_ms + self.respond_ms + self.waiter_ttl_ms) * 1_000
    }

    /// Minimum time for which shares are kept, and the margin added whenever their expiry is set.
    pub(super) fn shares_ttl_ms(&self) -> (u64, u64) {
        let ttl_ms = self.lease_ms + self.respond_ms + self.waiter_ttl_ms;
        (ttl_ms, self.lease_ms)
    }

    pub(super) fn lease_end_ms(&self) -> u64 {
        self.now_ms + self.lease_ms
    }

    pub(super) fn promoted_end_ms(&self) -> u64 {
        self.now_ms + self.promotion_ms
    }

    /// A later deadline was set before the clock was stepped back.
    pub(super) fn latest_end_ms(&self) -> u64 {
        self.now_ms + MAX_LEASE_MS
    }

    /// A replica whose heartbeat ended before this time is dead.
    pub(super) fn oldest_heartbeat_ms(&self) -> u64 {
        self.now_ms.saturating_sub(self.waiter_ttl_ms)
    }

    /// Whether the budget allows another permit, whatever its weight. If not, notes that work remains.
    pub(super) fn may_spend(&mut self) -> bool {
        self.more |= self.budget == 0;
        self.budget > 0
    }

    pub(super) fn spend(&mut self, units: u32) {
        self.budget = self.budget.saturating_sub(units as usize);
    }

    /// Notifies a replica of a promoted waiter: one wake-up for each replica and ledger, with all permits.
    pub(super) fn wake(&mut self, batch: &Batch, id: MemberId, until_ms: u64) {
        let latest_first = self.published.wakes.iter_mut().rev();
        let mut same =
            latest_first.filter(|(to, wake)| *to == id.replica && *wake.key == *batch.key);
        if let Some((_, wake)) = same.next() {
            return wake.seqs.push(id.seq);
        }
        self.publish(batch, id.replica, until_ms, vec![id.seq]);
    }

    /// A wake-up without permits recalls the slots that a replica keeps.
    pub(super) fn publish(&mut self, batch: &Batch, to: ReplicaId, until_ms: u64, seqs: Vec<Seq>) {
        let wake = Wake {
            key: batch.key.to_string(),
            granted_us: self.now_us,
            until_ms,
            seqs,
        };
        self.published.wakes.push((to, wake));
    }
}
