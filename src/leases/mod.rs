//! Leases: shared by permits and their keeper without the keeper's lock, except `account` and `bounded`.
//!
//! | file | content |
//! | --- | --- |
//! | `lease` | the deadline of a slot, and why it ended |
//! | `owners` | the number of owners of a lease's current permit |
//! | `account` | a permit's charges at a rate, and its final settlement |
//! | `bounded` | permits that end at a bound |
//! | `tenure` | the permits that a lease serves one after the other; the leases of one permit |
//! | `pool` | idle slots, for the next requests of this process |
//! | `label` | the purpose of a permit, for operators; `no_label` replaces it without the feature `operate` |
//! | `clock` | deadlines by two clocks that are never compared |
//! | `loom` | tests: interleavings of threads |

mod account;
mod bounded;
mod clock;
#[cfg_attr(not(feature = "operate"), path = "no_label.rs")]
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
    clock::StoreMoment,
    label::Label,
    lease::{Lease, QueueId},
    pool::{Pool, RIGHT},
    tenure::{Leases, Tenure},
};
