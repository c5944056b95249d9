//! The ledger: holders and waiters of one limit key, in one sorted set.
//!
//! A ledger is changed by an [`Exchange`] only, and answers with a [`Reply`]: `message.rs` has both. The rules are
//! written twice, `machine/` in Rust for this process and `script/` in Lua for Redis. Both run the same steps under the
//! same names in the same order, and a property test (`tests/twins.rs`) proves them equal. A batch for one ledger runs
//! these:
//!
//! | step | what it does | machine | script |
//! | --- | --- | --- | --- |
//! | `release` | removes permits that are no longer wanted, holders and waiters alike | `leases.rs` | `short_way.lua` |
//! | `renew` | extends leases, never shortens them; reports the tickets of waiters | `leases.rs` | `steps.lua` |
//! | `adopt` | restores holders that the store has lost | `leases.rs` | `steps.lua` |
//! | `expire` | removes holders whose lease has ended | `leases.rs` | `steps.lua` |
//! | `promote` | grants free slots to the head of the queue; passes over waiters whose replica has no connection | `queue.rs` | `steps.lua` |
//! | `acquire` | gives newcomers a slot, a place in the queue, or a refusal | `queue.rs` | `queue.lua` |
//!
//! Then, over all ledgers and *rates*, whose arithmetic is in `rate.rs` and `rates.lua`:
//!
//! | step | what it does | machine | script |
//! | --- | --- | --- | --- |
//! | `refund` | takes back charges of requests that were refused | `ledgers.rs` | `rates.lua` |
//! | `claim` | gives newcomers slots in several ledgers and starts at rates, as far as they go, or a refusal | `ledgers.rs` | `claims.lua` |
//!
//! And for each ledger at the end:
//!
//! | step | what it does | machine | script |
//! | --- | --- | --- | --- |
//! | `heartbeat` | marks a replica that has waiters here as alive for a while | `queue.rs` | `close.lua` |
//! | `recall` | tells other replicas to give back kept slots, if a permit waits or was refused | `reuse.rs` | `close.lua` |
//! | `keep` | lets the calling replica keep freed slots for a while, if there are no waiters | `reuse.rs` | `close.lua` |
//!
//! A permit weighs one unit or more, which its name says (`id.rs`). It holds all of them or none, and in the store it is as
//! many members as it has units, so that counting stays one command. The queue stays in order of arrival: a waiter that
//! needs more than what is free blocks those behind it, and is not passed by newcomers. One that weighs more than the
//! limit, which was lowered then, enters when nothing is held.
//!
//! A ledger grew out of the counting semaphore of *Redis in Action* (6.3.1: a sorted set of lease timestamps; 6.3.2:
//! arrival order; 6.3.3: refresh; 11.2.3: one script in place of locks).
//!
//! Tests are in `tests/`: the rules one by one, on both sides. `model/` explores them to the end.

mod id;
#[cfg(any(test, feature = "test-util"))]
mod ledgers;
mod machine;
mod message;
#[cfg(test)]
mod model;
mod rate;
#[cfg(feature = "redis")]
pub(crate) mod script;
#[cfg(test)]
mod tests;

#[cfg(all(feature = "operate", feature = "redis"))]
pub(crate) use id::REPLICA_CHARS;
pub(crate) use id::{ID_CHARS, MemberId, ReplicaId, Seq, number_of, weighing, weight_of};
#[cfg(feature = "redis")]
pub(crate) use id::{SEQ_CHARS, more_members, parse_seq, seq_text};
#[cfg(any(test, feature = "test-util"))]
pub(crate) use ledgers::{Audience, Ledgers};
#[cfg(test)]
pub(crate) use machine::SWEEP_BUDGET;
pub(crate) use machine::{Call, Ledger, MAX_LEASE_MS, Operation};
pub(crate) use message::{
    Ask, Batch, BatchReply, Charge, Claim, ClaimAsk, ClaimReply, Exchange, LedgerError,
    MAX_PERMITS, MAX_PLACES, Promotion, RIGHT_MS, Refund, Reply, Reuse, Standing, Wake, Want,
};
pub(crate) use rate::{Charged, Rate, RateState, Tat, WAIT_FOREVER_US};
#[cfg(feature = "redis")]
pub(crate) use script::EXCHANGE_LUA;
