//! An exchange in flight, and the mapping from the model's times and names to the ledger's.

use std::sync::Arc;

use super::{Bounds, Id, LEASE, PAUSE, PROMPT, Steps};
use crate::ledger::{
    self, Ask, Batch, Dues, Exchange, MemberId, Payer, ReplicaId, Reuse, Seq, number_of, weighing,
};

const STEP_MS: u64 = 1_000;
pub(super) const NOW_MS: u64 = 1_000 * STEP_MS;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Message {
    pub(super) client: u8,
    /// Weight of each permit that it names.
    pub(super) weight: u8,
    /// Its replica knows that the limit is fair.
    pub(super) pays: bool,
    /// Waiters among the names to release.
    pub(super) left: Vec<u8>,
    /// Permits among them that get a part of their prepayment back.
    pub(super) settled: Vec<u8>,
    pub(super) age: Steps,
    pub(super) release: Vec<u8>,
    pub(super) renew: Option<u8>,
    pub(super) acquire: Option<u8>,
    pub(super) waits: bool,
    pub(super) pauses: bool,
    pub(super) copies: u8,
    /// Its client still waits for the answer.
    pub(super) awaited: bool,
}

impl Message {
    /// An exchange of an idle replica.
    pub(super) fn of_anybody(bounds: &Bounds) -> Self {
        Self {
            client: bounds.clients,
            weight: 1,
            pays: bounds.is_fair(),
            left: Vec::new(),
            settled: Vec::new(),
            age: 0,
            release: Vec::new(),
            renew: None,
            acquire: None,
            waits: false,
            pauses: false,
            copies: 0,
            awaited: false,
        }
    }

    pub(super) fn pausing(self) -> Self {
        Self {
            pauses: true,
            ..self
        }
    }

    pub(super) fn names_mut(&mut self) -> impl Iterator<Item = &mut u8> {
        let one = self.renew.iter_mut().chain(&mut self.acquire);
        let due = self.left.iter_mut().chain(&mut self.settled);
        self.release.iter_mut().chain(one).chain(due)
    }

    pub(super) fn seq(&self, number: u8) -> Seq {
        weighing(number.into(), self.weight.into())
    }

    /// `payer` pays for the permits to acquire.
    pub(super) fn exchange(
        &self,
        bounds: &Bounds,
        payer: Option<Payer>,
        dues: Option<Box<Dues>>,
    ) -> Exchange {
        let seqs = |seqs: &[u8]| seqs.iter().map(|seq| self.seq(*seq)).collect();
        let ask = |number: &u8| Ask {
            seq: self.seq(*number),
            wait: true,
            payer,
        };
        let batch = Batch {
            key: Arc::from("model"),
            limit: bounds.limit,
            whole: 0,
            max_waiters: bounds.max_waiters,
            waits: self.waits,
            reuse: Reuse::Never,
            tells: false,
            asks_holders: false,
            dues,
            results: None,
            asks_pause: false,
            pause_ms: self.pauses.then_some(PAUSE as u64 * STEP_MS),
            release: seqs(&self.release),
            renew: seqs(self.renew.as_slice()),
            adopt: Vec::new(),
            acquire: self.acquire.iter().map(ask).collect(),
        };
        Exchange {
            replica: replica(self.client),
            lease_ms: LEASE as u64 * STEP_MS,
            // The heartbeats of listening replicas are odd.
            respond_ms: PROMPT as u64 * STEP_MS + 1,
            waiter_ttl_ms: bounds.waiter_ttl as u64 * STEP_MS,
            not_after_us: time_ms(bounds.not_after - self.age) * 1_000,
            batches: vec![batch],
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
        }
    }
}

impl Id {
    pub(super) fn name(self, weight: u32) -> MemberId {
        MemberId {
            replica: replica(self.client),
            seq: weighing(self.seq.into(), weight),
        }
    }

    pub(super) fn of(id: MemberId) -> Self {
        Self {
            client: id.replica.bits() as u8,
            seq: number_of(id.seq) as u8,
        }
    }
}

pub(super) fn replica(client: u8) -> ReplicaId {
    ReplicaId::from_bits(client.into())
}

/// The limit in force now, during a pause with this end and its ramp.
pub(super) fn ramped(limit: u32, end: Steps) -> u32 {
    ledger::ramped(limit, time_ms(end), NOW_MS)
}

pub(super) fn time_ms(from_now: Steps) -> u64 {
    NOW_MS.saturating_add_signed(i64::from(from_now) * STEP_MS as i64)
}

pub(super) fn steps(time_ms: u64) -> Steps {
    ((time_ms as i64 - NOW_MS as i64) / STEP_MS as i64) as Steps
}
