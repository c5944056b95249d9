//! The messages of a ledger: requests of a replica, replies of the store, and wake-ups.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    id::{ReplicaId, Seq, TenantId, weight_of},
    layout::LOST,
    rate::{Charged, Rate, Tat},
};

/// Maximum number of units of one ledger's permits in an exchange: Lua limits how many values `unpack` returns.
pub(crate) const MAX_PERMITS: u32 = 3_900;

/// All operations that one replica sends to the store in one script call: a batch for each of its ledgers, then refunds
/// and claims.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    /// The calling replica, which owns all permits named in the batches and claims.
    pub(crate) replica: ReplicaId,
    /// Lease of a permit that is renewed, adopted or acquired directly, from the time of the exchange.
    pub(crate) lease_ms: u64,
    /// Time within which a live replica with waiters calls again. The waiters of a replica that is silent for longer are
    /// passed over. A replica that stops while waiting costs the queue this time, not a whole lease.
    pub(crate) respond_ms: u64,
    /// How much longer than that a silent replica's waiters keep their places.
    pub(crate) waiter_ttl_ms: u64,
    /// Store time after which the exchange does nothing, since its replica has given it up by then.
    pub(crate) not_after_us: u64,
    /// At most one batch for each ledger.
    pub(crate) batches: Vec<Batch>,
    /// Run in this order after all batches.
    pub(crate) claims: Vec<Claim>,
    /// Run before the claims. Each is sent at most once; if it is lost, the charge stands.
    pub(crate) refunds: Vec<Refund>,
    /// Only in an exchange without work.
    pub(crate) generation_query: Option<GenerationQuery>,
    /// Only in one with work: the key of the generation, and the one that this replica saw less than a lease ago. Newcomers fail in
    /// a ledger that is empty while the data have another one.
    pub(crate) expected: Option<(Arc<str>, Generation)>,
}

/// A question for the [generation](Generation) of the store's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GenerationQuery {
    /// Full name of the generation's key.
    pub(crate) key: Arc<str>,
    /// The generation that this replica saw less than a lease ago. If the store now has another one, or none, it has
    /// lost its data since.
    pub(crate) known: Option<u64>,
    /// Whether the query may go to a server other than before.
    pub(crate) may_connect: bool,
}

/// The generation of the store's data. It begins with the namespace or after a loss of data, and ends with the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation {
    /// The store time at which it began, in microseconds.
    pub(crate) id: u64,
    /// When a replica found that it had replaced another one, in store milliseconds; 0: none has.
    pub(crate) found_ms: u64,
}

impl Exchange {
    /// Whether the exchange only asks for the store's time, or for the generation of its data.
    pub(crate) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.claims.is_empty() && self.refunds.is_empty()
    }

    /// Whether it arrives too late to do anything. A replica without the store's time only says hello.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn is_late(&self, now_us: u64) -> bool {
        !self.is_empty() && now_us > self.not_after_us
    }

    /// Whether the exchange makes a connection if there is none. Nothing else is sent before its answer.
    pub(crate) fn is_hello(&self) -> bool {
        let query = self.generation_query.as_ref();
        self.is_empty() && query.is_none_or(|query| query.may_connect)
    }

    /// Lease of a promoted waiter until its replica renews it: a live replica does so within this time.
    pub(crate) fn promotion_ms(&self) -> u64 {
        self.respond_ms.min(self.lease_ms)
    }

    /// For each batch: whether any permit to renew, adopt or acquire in its ledger, including by a claim, weighs more
    /// than 1.
    pub(crate) fn weighs(&self) -> impl Iterator<Item = bool> {
        let asks = self.claims.iter().flat_map(|claim| &claim.asks);
        let heavy = asks.filter(|ask| weight_of(ask.seq) > 1);
        let claimed: BTreeSet<usize> = heavy.map(|ask| ask.batch).collect();
        let batches = self.batches.iter().enumerate();
        batches.map(move |(number, batch)| batch.weighs() || claimed.contains(&number))
    }
}

/// The operations of an exchange on one ledger.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    /// Full name of the ledger's key.
    pub(crate) key: Arc<str>,
    pub(crate) limit: u32,
    /// The limit before a pause, if this process has applied its pause to `limit`; else 0.
    pub(crate) whole: u32,
    pub(crate) max_waiters: u32,
    /// This replica has or will have waiters here.
    pub(crate) waits: bool,
    pub(crate) reuse: Reuse,
    /// Length of a pause to start, from the time of the exchange; 0 ends the present one.
    pub(crate) pause_ms: Option<u64>,
    /// The replica knows that pause already, and asks whether it goes on: unless it was ended, the store has lost it.
    pub(crate) asks_pause: bool,
    /// If a permit to adopt is missing, all replicas are told that the ledger has lost permits.
    pub(crate) tells: bool,
    /// Asks for the holders of this replica. If an older copy of the data has taken over, they may include permits that the
    /// replica has released since.
    pub(crate) asks_holders: bool,
    /// Only for a fair ledger.
    pub(crate) dues: Option<Box<Dues>>,
    /// Only for a limit that finds its own value, which begins at `limit`.
    pub(crate) results: Option<Results>,
    // No permit is named twice in one list.
    pub(crate) release: Vec<Seq>,
    /// Holders to renew, and waiters whose tickets are asked for.
    pub(crate) renew: Vec<Seq>,
    pub(crate) adopt: Vec<Seq>,
    pub(crate) acquire: Vec<Ask>,
}

impl Batch {
    /// Whether a permit to renew, adopt or acquire weighs more than 1.
    pub(crate) fn weighs(&self) -> bool {
        let asked = self.acquire.iter().map(|ask| &ask.seq);
        let mut all = self.renew.iter().chain(&self.adopt).chain(asked);
        all.any(|&seq| weight_of(seq) > 1)
    }
}

/// The bounds of a limit that finds its own value, and what its replica reports of the upstream. Each result is sent once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Results {
    /// At most the ceiling; from 1 on.
    pub(crate) floor: u32,
    pub(crate) ceiling: u32,
    /// The generation of these results; others count for nothing.
    pub(crate) generation: u64,
    pub(crate) accepted: u32,
    pub(crate) overloaded: u32,
}

/// What a limit has found: its value, and the generation of results that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pacing {
    pub(crate) limit: u32,
    pub(crate) generation: u64,
}

/// Whether replicas may keep freed slots for a while and reuse them without the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reuse {
    #[default]
    Never,
    /// Other replicas may keep slots, which are recalled if a permit of this batch waits or is refused.
    Others,
    /// Like `Others`, and this replica asks for the right to keep slots. A reply grants the right if it shows at least
    /// one holder, no more holders than the limit, and no waiters.
    Keep,
}

/// One permit to acquire, with all its units or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) seq: Seq,
    /// Enqueue the permit if no slot is free.
    pub(crate) wait: bool,
    /// Only in a fair ledger.
    pub(crate) payer: Option<Payer>,
}

/// The tenant that pays for a slot of a fair ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Payer {
    pub(crate) tenant: TenantId,
    /// The prepayment of a grant to a waiter, in us of virtual time (`machine/shares.rs`).
    pub(crate) cost_us: u64,
}

/// Debts of the tenants of a fair ledger, and waiters that leave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dues {
    /// Waiters among the permits to release.
    pub(crate) left: Vec<Left>,
    /// For slots that are still held. Each report is sent once.
    pub(crate) reports: Vec<Report>,
    /// For permits to release, including refunds of unused prepayments. They count only if this exchange has removed as many
    /// members as these permits have units, and one for each of `left`, so that a repeated exchange does not count them twice.
    pub(crate) settled: Vec<Report>,
    /// Units of the permits that `settled` is for.
    pub(crate) settled_units: u32,
}

/// The departure of a waiter: its place in the line of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) payer: Payer,
    pub(crate) ticket: i64,
    pub(crate) seq: Seq,
}

/// The use of slots by one tenant, in us of virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) tenant: TenantId,
    /// Negative: a refund.
    pub(crate) us: i64,
    /// Cost so far of the tenant's most expensive permit.
    pub(crate) most_us: u64,
}

/// Slots in several ledgers and charges to several rates, granted together.
///
/// A claim takes slots up to the first ledger where it must wait, and is later sent again from that ledger on. If any
/// part is refused, nothing is written.
///
/// Its charges have distinct keys, and its asks distinct ledgers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claim {
    pub(crate) charges: Vec<Charge>,
    /// In the order in which slots are taken, which must be the same in all replicas: otherwise claims could deadlock.
    pub(crate) asks: Vec<ClaimAsk>,
    /// The claim's first ticket, in any ledger. Later queues place the claim by it.
    pub(crate) ticket: Option<i64>,
}

/// One slot of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimAsk {
    /// Index of the ledger's batch in the exchange.
    pub(crate) batch: usize,
    pub(crate) seq: Seq,
    pub(crate) want: Want,
    /// Only in a fair ledger.
    pub(crate) payer: Option<Payer>,
}

/// How a claim handles a ledger without a free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Refuse the claim.
    Now,
    /// Enqueue the permit.
    Wait,
    /// Proceed without this slot: the limit is not enforced.
    IfFree,
}

/// A request's cost at one rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// Full name of the key of the rate's state.
    pub(crate) key: Arc<str>,
    pub(crate) rate: Rate,
    /// From 1 to the burst.
    pub(crate) cost: u32,
    /// How far ahead a start may be reserved; 0: start now or be refused.
    pub(crate) wait_us: u64,
    /// The limit is not enforced: if the rate refuses, the claim proceeds without this charge. No start is reserved
    /// ahead.
    pub(crate) shadow: bool,
}

/// Reverses the charge of a request that was refused in the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refund {
    pub(crate) key: Arc<str>,
    /// The whole charge or a part.
    pub(crate) cost: u32,
    /// The record of the charge. No charge is refunded twice.
    pub(crate) charged: Tat,
}

/// The store's answer to an [`Exchange`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Store time, read once for the whole exchange.
    pub(crate) now_us: u64,
    /// The sweep budget ran out, or a newcomer that fits queued behind others: send another exchange at once.
    pub(crate) more: bool,
    /// The exchange arrived after its `not_after_us`: nothing was done, and nothing follows.
    pub(crate) is_late: bool,
    /// In the order of the batches. An error in one ledger does not stop the others.
    pub(crate) batches: Vec<Result<BatchReply, LedgerError>>,
    /// In the order of the claims.
    pub(crate) claims: Vec<Result<ClaimReply, LedgerError>>,
    /// The answer to a [`GenerationQuery`]; `None` also if the store cannot keep one.
    pub(crate) generation: Option<Generation>,
}

impl Reply {
    pub(crate) fn late(now_us: u64) -> Self {
        Self {
            now_us,
            is_late: true,
            ..Self::default()
        }
    }
}

/// The answer to a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClaimReply {
    /// In the order of `Claim::charges`.
    pub(crate) charged: Vec<Charged>,
    /// In the order of `Claim::asks`. `Absent`: the claim did not reach this ledger, or another part of it was refused.
    pub(crate) standings: Vec<Standing>,
}

impl ClaimReply {
    /// Makes it the answer to this claim, in which nothing has happened yet.
    pub(super) fn reset(&mut self, claim: &Claim) {
        self.charged.clear();
        self.charged.resize(claim.charges.len(), Charged::Not);
        self.standings.clear();
        self.standings.resize(claim.asks.len(), Standing::Absent);
    }

    /// The ticket of a waiting claim.
    pub(crate) fn ticket(&self) -> Option<i64> {
        self.standings.iter().find_map(Standing::ticket)
    }
}

/// One ledger's answer: its state after the exchange, and the outcome for each permit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatchReply {
    /// Units in use.
    pub(crate) in_use: u32,
    /// Number of permits in the queue.
    pub(crate) waiting: u32,
    /// Ticket of the first waiter that was never passed over, if any.
    pub(crate) head: Option<i64>,
    /// When the next lease ends, in store milliseconds; present only while permits wait, and without a pause.
    pub(crate) nearest_ms: Option<u64>,
    /// End of the pause, in store milliseconds; present until its ramp is over.
    pub(crate) pause_end_ms: Option<u64>,
    /// In the order of `Batch::renew`.
    pub(crate) renewed: Vec<Standing>,
    /// Queue positions, from 1, of renewed permits that wait: the first [`MAX_PLACES`], before any permit leaves the
    /// queue.
    pub(crate) places: Vec<u32>,
    /// In the order of `Batch::adopt`.
    pub(crate) adopted: Vec<Standing>,
    /// In the order of `Batch::acquire`.
    pub(crate) acquired: Vec<Standing>,
    /// If the batch asks, the holders of the calling replica. `None` also if more units are in use than the exchange may
    /// sweep.
    pub(crate) listed: Option<Vec<Seq>>,
    /// Promoted waiters of the calling replica, in the order of the queue.
    pub(crate) promoted: Vec<Promotion>,
    /// Present if the limit finds its own value.
    pub(crate) pacing: Option<Pacing>,
}

impl BatchReply {
    /// Units that the exchange has granted to its replica.
    pub(crate) fn granted_units(&self, batch: &Batch) -> u32 {
        let acquired = batch.acquire.iter().zip(&self.acquired);
        let granted = acquired.filter(|(_, standing)| matches!(standing, Standing::Held { .. }));
        let promoted = self.promoted.iter().map(|promotion| promotion.seq);
        let names = granted.map(|(ask, _)| ask.seq).chain(promoted);
        names.map(weight_of).sum()
    }
}

/// The standing of a permit in its ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Holds a slot until this time, in store milliseconds.
    Held { until_ms: u64 },
    /// Was missing and has been restored: holds a slot until this time, in store milliseconds.
    Adopted { until_ms: u64 },
    /// Waits in the queue with this (negative) ticket; lower tickets are served first.
    Waiting { ticket: i64 },
    /// Not in the ledger.
    Absent,
    /// Refused: no slot is free, and the permit does not wait.
    Full,
    /// Refused: no slot is free, and the queue is full.
    QueueFull,
}

impl Standing {
    pub(crate) fn ticket(&self) -> Option<i64> {
        match *self {
            Self::Waiting { ticket } => Some(ticket),
            _ => None,
        }
    }
}

/// A waiter that was granted a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promotion {
    pub(crate) seq: Seq,
    pub(crate) until_ms: u64,
}

/// Why an operation on a ledger failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LedgerError {
    /// The store's own message, such as `WRONGTYPE Operation against a key ...`.
    pub(crate) message: String,
}

impl LedgerError {
    /// The ledger is empty, and the data have another generation than the replica knows: its holders may be lost.
    pub(crate) fn lost() -> Self {
        let message = LOST.to_owned();
        Self { message }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.message == LOST
    }
}

/// Published to a replica whose waiters another replica's exchange promoted, or, without permits, to a replica whose
/// kept slots are recalled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wake {
    /// The ledger's key.
    pub(crate) key: String,
    /// Store time of the exchange that published it.
    pub(crate) granted_us: u64,
    pub(crate) until_ms: u64,
    pub(crate) seqs: Vec<Seq>,
}

/// What an exchange publishes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published {
    /// Wake-ups and their receivers; those for one queue are in queue order.
    pub(crate) wakes: Vec<(ReplicaId, Wake)>,
    /// For all replicas: the keys of ledgers that have lost permits, and of generations that have replaced others.
    pub(crate) lost: Vec<String>,
}
