//! The ledger: who holds and who waits, one sorted set per limit key.
//!
//! A ledger is changed by an [`Exchange`] only, and answers with a [`Reply`]. The rules stand here twice, side by
//! side: `machine.rs` runs them in this process, `exchange.lua` runs them in Redis. Both have the same steps, with
//! the same names, in the same order, and a property test holds them equal. A batch for one ledger runs these:
//!
//! | step | what it does |
//! | --- | --- |
//! | `release` | permits that are no longer wanted leave, holders and waiters alike |
//! | `renew` | leases are extended, never shortened; waiting permits tell their place |
//! | `adopt` | holders that the store has lost come back |
//! | `reap` | holders whose lease has ended leave |
//! | `promote` | free slots go to the head of the line |
//! | `acquire` | newcomers get a slot, a place in the line, or a refusal |
//!
//! Then, over all ledgers and *rates*, whose arithmetic is in `rate.rs` and whose steps are in `ledgers.rs`:
//!
//! | step | what it does |
//! | --- | --- |
//! | `refund` | what was charged for nothing is taken back |
//! | `claim` | newcomers that want several slots, or times at rates, get all that they can, or a refusal |
//!
//! And for each ledger at the end:
//!
//! | step | what it does |
//! | --- | --- |
//! | `alive` | a replica that has waiters here is marked alive for a while |
//! | `recall` | somebody waits or was refused: replicas that keep idle slots are told to give them back |
//! | `keep` | nobody waits: the replica that asks may keep idle slots for a while |
//!
//! The script has a short way besides, for a ledger that nobody waits in and whose leases all go on: `release`, `renew`,
//! and `acquire` if there is room for all.
//!
//! A ledger grew out of the counting semaphore of *Redis in Action* (6.3.1: a sorted set of lease timestamps; 6.3.2:
//! arrival order; 6.3.3: refresh; 11.2.3: one script in place of locks).

#[cfg(all(test, feature = "redis"))]
mod claim_rules;
mod id;
#[cfg(test)]
mod ledgers;
mod machine;
#[cfg(test)]
mod model;
mod rate;
#[cfg(test)]
mod rate_tests;
#[cfg(all(test, feature = "redis"))]
mod reuse_rules;
#[cfg(all(test, feature = "redis"))]
mod rules;
#[cfg(all(test, feature = "redis"))]
mod twins;

use std::sync::Arc;

#[cfg(feature = "redis")]
pub(crate) use id::{ID_CHARS, SEQ_CHARS, parse_seq, seq_text};
pub(crate) use id::{PermitId, ReplicaId, Seq};
#[cfg(test)]
pub(crate) use ledgers::Ledgers;
pub(crate) use machine::{Call, Ledger, One};
pub(crate) use rate::{Rate, Tat};

/// No lease is longer, so a deadline further ahead can only mean that the store's clock was stepped back.
pub(crate) const MAX_LEASE_MS: u64 = 3_600_000;
/// Holders reaped, waiters promoted and dead waiters dropped in one exchange, over all its ledgers.
pub(crate) const SWEEP_BUDGET: u32 = 1_000;
/// So long may a replica keep slots that came free, unless it is told to give them back.
pub(crate) const RIGHT_MS: u64 = 100;
/// Permits of one ledger in an exchange, at most: the script's language has a limit for the length of a list.
pub(crate) const MAX_PERMITS: u32 = 3_900;
/// The source of the script that runs an exchange in Redis.
#[cfg(feature = "redis")]
pub(crate) const EXCHANGE_LUA: &str = include_str!("exchange.lua");

/// What one replica asks of the store in one message: a batch for each of one or more ledgers.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    /// The replica that asks; all permits named in the batches are its own.
    pub(crate) replica: ReplicaId,
    /// A renewed, adopted or directly granted permit is held until this long after the exchange.
    pub(crate) lease_ms: u64,
    /// A promoted waiter is held for no longer than this, until its owner renews it: an owner that crashed while it
    /// waited costs the line this much, not a whole lease.
    pub(crate) promote_ms: u64,
    /// Waiters of this replica count as alive until this long after the exchange.
    pub(crate) alive_ms: u64,
    /// Store time after which nothing is acquired or adopted: the asker has given up by then.
    pub(crate) not_after_us: u64,
    /// At most one batch for a ledger.
    pub(crate) batches: Vec<Batch>,
    /// After all batches, in this order.
    pub(crate) claims: Vec<Claim>,
    /// Before the claims. Sent at most once: one that is lost leaves the charge as it is.
    pub(crate) refunds: Vec<Refund>,
}

/// What is asked of one ledger.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    /// The whole name of the key that holds the ledger.
    pub(crate) key: Arc<str>,
    pub(crate) limit: u32,
    pub(crate) max_waiters: u32,
    /// This replica has waiters here, or is about to.
    pub(crate) waits: bool,
    pub(crate) reuse: Reuse,
    // No permit is named twice in one list.
    pub(crate) release: Vec<Seq>,
    pub(crate) renew: Vec<Seq>,
    pub(crate) adopt: Vec<Seq>,
    pub(crate) acquire: Vec<Ask>,
}

/// Whether slots that come free may be kept for a while, to be used again without the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reuse {
    #[default]
    Never,
    /// Other replicas may: if somebody waits or is refused, they are told.
    Others,
    /// The same, and this replica asks for the right. By the reply it has it if somebody holds, no more than the limit,
    /// and nobody waits.
    Keep,
}

/// One permit to acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) seq: Seq,
    /// Queue if no slot is free.
    pub(crate) wait: bool,
}

/// Slots in several ledgers and times at rates, all or nothing. It takes what it can get up to the first ledger that
/// makes it wait, and is then asked for again from there on. If anything refuses, nothing is written.
///
/// No two of its charges are at one key, and no two of its asks in one ledger.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claim {
    pub(crate) charges: Vec<Charge>,
    /// In the order in which slots are taken: the same for all replicas, or claims could wait for each other.
    pub(crate) asks: Vec<ClaimAsk>,
}

/// One slot of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClaimAsk {
    /// The place of the ledger's batch in the exchange.
    pub(crate) batch: usize,
    pub(crate) seq: Seq,
    pub(crate) want: Want,
}

/// What is to be done if there is no free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Refuse the claim.
    Now,
    /// Stand in line.
    Wait,
    /// Go on without it: the limit only looks on.
    IfFree,
}

/// One time at a rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// The whole name of the key that holds the rate's state.
    pub(crate) key: Arc<str>,
    pub(crate) rate: Rate,
    /// At least 1, at most the burst.
    pub(crate) cost: u32,
    /// How far ahead a time may be reserved; 0: now or not at all.
    pub(crate) wait_us: u64,
    /// If it refuses, the claim goes on without it: the limit only looks on. It never waits.
    pub(crate) shadow: bool,
}

/// Takes back what was charged for a request that was refused after all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refund {
    pub(crate) key: Arc<str>,
    pub(crate) rate: Rate,
    pub(crate) cost: u32,
    /// As the charge left it. It is not taken back twice.
    pub(crate) charged: Tat,
}

/// The store's answer to an [`Exchange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Store time, read once for the whole exchange.
    pub(crate) now_us: u64,
    /// The budget ran out before the work did: send again at once.
    pub(crate) more: bool,
    /// In the order of the batches. One ledger's error does not stop the others.
    pub(crate) batches: Vec<Result<BatchReply, LedgerError>>,
    /// In the order of the claims.
    pub(crate) claims: Vec<Result<ClaimReply, LedgerError>>,
}

/// A claim's answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClaimReply {
    /// In the order of `Claim::charges`.
    pub(crate) charged: Vec<Charged>,
    /// In the order of `Claim::asks`. `Absent`: it was not its turn, or something else refused.
    pub(crate) standings: Vec<Standing>,
}

/// What became of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charged {
    /// Charged. The request may go on from `start_us` on; if that is ahead, no slot was taken yet.
    Until { tat: Tat, start_us: u64 },
    /// Not charged: the rate would allow it from `start_us` on. Told of all that refuse, whatever else did.
    TooSoon { start_us: u64 },
    /// Not charged, because something else refused.
    Not,
}

/// One ledger's answer, as it is after the exchange.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatchReply {
    pub(crate) in_use: u32,
    pub(crate) waiting: u32,
    /// The ticket of the waiter at the head of the line.
    pub(crate) head: Option<i64>,
    /// When the next lease ends, in store milliseconds; told only while somebody waits.
    pub(crate) nearest_ms: Option<u64>,
    /// In the order of `Batch::renew`.
    pub(crate) renewed: Vec<Standing>,
    /// In the order of `Batch::adopt`.
    pub(crate) adopted: Vec<Standing>,
    /// In the order of `Batch::acquire`.
    pub(crate) acquired: Vec<Standing>,
    /// Waiters of the calling replica that were promoted, in the order of the line.
    pub(crate) promoted: Vec<Promotion>,
}

/// Where a permit stands in its ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Holds a slot until then, in store milliseconds.
    Held { until_ms: u64 },
    /// Was not there, and was put back: holds a slot until then, in store milliseconds.
    Adopted { until_ms: u64 },
    /// Waits with this (negative) ticket; lower tickets go first.
    Waiting { ticket: i64 },
    /// Not in the ledger.
    Absent,
    /// Was not let in: no slot is free, and it would not wait.
    Full,
    /// Was not let in: no slot is free, and the line has no room.
    LineFull,
    /// Was not let in: the exchange ran after its `not_after_us`.
    Stale,
}

/// A waiter that was given a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promotion {
    pub(crate) seq: Seq,
    pub(crate) until_ms: u64,
}

/// Why a ledger could not be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LedgerError {
    /// The store's own words, such as `WRONGTYPE Operation against a key ...`.
    pub(crate) message: String,
}

/// Told to a replica when another one's exchange has promoted waiters of its own; or, without permits, when somebody
/// wants the slots that it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wake {
    /// The ledger's key.
    pub(crate) key: String,
    /// Store time of the exchange that tells.
    pub(crate) granted_us: u64,
    pub(crate) until_ms: u64,
    pub(crate) seqs: Vec<Seq>,
}
