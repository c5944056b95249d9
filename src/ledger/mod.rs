//! The ledger: holders and waiters of one limit key, in one sorted set.
//!
//! Only an [`Exchange`] changes a ledger, which answers with a [`Reply`]: `message.rs` has both. The rules exist twice,
//! in `machine/` in Rust for this process and in `script/` in Lua for Redis. Both run the same steps under the same
//! names in the same order (but for `expire` and `settle`, which do not affect each other), and a property test
//! (`tests/twins.rs`) compares them. A batch for one ledger runs these steps:
//!
//! | step | effect | machine | script |
//! | --- | --- | --- | --- |
//! | `release` | removes released permits, both holders and waiters | `leases.rs` | `short_way.lua` |
//! | `pace` | counts what replicas report of the upstream, for a limit that finds its own value | `pace.rs` | `pace.lua` |
//! | `pause` | starts or ends a pause: until its end nobody gets a slot, then the limit rises from 0 | `pause.rs` | `rare.lua` |
//! | `renew` | extends leases, never shortens them; reports the tickets of waiters | `leases.rs` | mostly `short_way.lua` or `steps.lua`; `rare.lua` |
//! | `adopt` | restores holders that the store has lost | `leases.rs` | `rare.lua` |
//! | `list` | names the holders of the calling replica, if it asks | `leases.rs` | `rare.lua` |
//! | `expire` | removes holders whose lease has ended | `leases.rs` | `rare.lua` |
//! | `settle` | charges tenants of a fair ledger for what they hold, and refunds what they did not use | `tenants.rs`, `shares.rs` | `shares.lua` |
//! | `promote` | grants free slots to the head of the queue, in a fair ledger to the tenant that has paid least, which pays in advance; passes over waiters whose replica is silent or has no connection | `queue.rs` | `steps.lua` |
//! | `bring_forward` | shortens deadlines that a stepped clock has put too far ahead, if the ledger is full | `leases.rs` | `rare.lua` |
//! | `acquire` | gives newcomers a slot, a place in the queue, or a refusal | `queue.rs` | mostly `short_way.lua`; `queue.lua` |
//!
//! Next, over all ledgers and *rates*, whose arithmetic is in `rate.rs` and `rates.lua`:
//!
//! | step | effect | machine | script |
//! | --- | --- | --- | --- |
//! | `refund` | reverses charges that rates made for refused requests | `ledgers.rs` | `rates.lua` |
//! | `claim` | grants newcomers slots in several ledgers and starts at rates, up to the first wait, or refuses them | `claims.rs` | `claims.lua`, `claim_slots.lua` |
//!
//! Finally, for each ledger:
//!
//! | step | effect | machine | script |
//! | --- | --- | --- | --- |
//! | `heartbeat` | marks a replica that has waiters here as alive for a while | `queue.rs` | `close.lua` |
//! | `recall` | asks other replicas to release kept slots, if a permit waits or was refused | `reuse.rs` | `rare.lua` |
//! | `keep` | lets the calling replica keep freed slots for a while, if the queue is empty | `reuse.rs` | `close.lua` |
//! | `keep_shares` | keeps the payments of tenants for a while after the last waiter | `tenants.rs` | `close.lua` |
//!
//! A slot is granted by `promote`, `acquire` and `claim`: in the machine by `grant` and `acquire_one` (`queue.rs`) and in
//! `claims.rs`; in the script in `steps.lua`, `queue.lua` and `claim_slots.lua`, and on the short ways of `short_way.lua`
//! and `claims.lua`.
//!
//! A permit weighs one unit or more, encoded in its name (`id.rs`). It holds all its units or none, and the store has
//! one member for each unit, so that counting stays a single command. The queue stays in order of arrival: a waiter
//! that needs more units than are free blocks the waiters behind it and is not overtaken by newcomers. A permit heavier
//! than the limit, which was lowered in the meantime, enters when nothing is held.
//!
//! The ledger derives from the counting semaphore in *Redis in Action* (6.3.1: a sorted set of lease timestamps; 6.3.2:
//! arrival order; 6.3.3: refresh; 11.2.3: one script instead of locks).
//!
//! Tests are in `tests/`: the rules one by one, on both sides. `model/` explores them exhaustively.

mod id;
pub mod layout;
#[cfg(any(test, feature = "test-util"))]
mod ledgers;
mod machine;
mod message;
#[cfg(test)]
mod model;
mod pace;
mod ramp;
mod rate;
#[cfg(feature = "redis")]
pub(crate) mod script;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use id::number_of;
pub(crate) use id::{MemberId, ReplicaId, Seq, TenantId, weighing, weight_of};
#[cfg(feature = "redis")]
pub(crate) use id::{more_members, parse_seq, seq_text};
#[cfg(any(test, feature = "redis"))]
pub(crate) use layout::FIRST_TICKET;
pub(crate) use layout::{
    ID_CHARS, MAX_LEASE_MS, OVERLOAD, RAMP_MS, RIGHT_MS, SEQ_CHARS, SWEEP_BUDGET, TRIP,
    WAIT_FOREVER_US, ramped,
};
#[cfg(any(test, feature = "test-util"))]
pub(crate) use ledgers::{Audience, Ledgers};
pub(crate) use machine::{
    Call, Ledger, Operation,
    claims::{ClaimedLedger, Stock},
};
pub(crate) use message::{
    Ask, Batch, BatchReply, Charge, Claim, ClaimAsk, ClaimReply, Dues, Exchange, Generation,
    GenerationQuery, LedgerError, Left, MAX_PERMITS, Pacing, Payer, Promotion, Published, Refund,
    Reply, Report, Results, Reuse, Standing, Wake, Want,
};
pub(crate) use pace::{PacePast, PaceState};
pub(crate) use ramp::next_rise_ms;
pub(crate) use rate::{Charged, Rate, RateState, Tat};
#[cfg(feature = "redis")]
pub(crate) use script::{EXCHANGE_LUA, HELLO_LUA};
