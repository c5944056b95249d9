//! Leases: shared by permits and their keeper without the keeper's lock, but for `account` and `bounded`.
//!
//! | file | what |
//! | --- | --- |
//! | `lease` | the deadline of a slot, and why it ended |
//! | `owners` | how many own the current permit of a lease |
//! | `account` | what a permit was charged at a rate, and what it owes in the end |
//! | `bounded` | permits that end by themselves |
//! | `tenure` | the permits that a lease serves one after the other; the leases of one permit |
//! | `pool` | idle slots, for the next requests of this process |
//! | `label` | what a permit is for, as operators see it; `no_label` in its place without the feature `operate` |
//! | `clock` | deadlines by two clocks that are never compared |
//! | `loom` | tests: interleavings of threads in these |

mod account;
mod bounded;
mod clock;
#[cfg(feature = "operate")]
mod label;
#[cfg(not(feature = "operate"))]
#[path = "no_label.rs"]
mod label;
mod lease;
#[cfg(all(test, turnstile_loom))]
pub(crate) mod loom;
mod owners;
mod pool;
mod tenure;

pub(crate) use self::{
    account::{Account, AccountId, Accounts, Fee, Paid, PaidBack, ReportOutcome, Settled},
    bounded::{BoundedPermits, Bounds},
    clock::{StoreClock, local_deadline},
    label::Label,
    lease::{KeeperId, Lease, QueueId},
    pool::{Pool, RIGHT},
    tenure::{Leases, Tenure},
};
