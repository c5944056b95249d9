//! Operators: who holds the slots, who waits, and why a caller was refused.
//!
//! The store only knows digests of keys. Each replica knows its own permits and waiters with route and age, so an
//! [`Operator`] asks the replicas: it publishes a question, and they publish their answers. Without questions the cost
//! is one idle connection per process, and about three commands a minute.
//!
//! A replica answers if it is [operable](crate::LimiterBuilder::operable). See [Operating](crate::guide::operating).
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_turnstile::operate::{KeyDigest, Operator};
//!
//! let operator = Operator::connect("redis://operator:secret@127.0.0.1").await?;
//! let permits = operator.permits("chat", Some(KeyDigest::of("chat", "acme"))).await?;
//! for permit in &permits.rows {
//!     println!("{} {:?} for {} ms on {}", permit.label, permit.state, permit.age_ms, permit.replica_label);
//! }
//! println!("{} of {} replicas answered", permits.answered, permits.replicas);
//! # Ok(())
//! # }
//! ```
//!
//! [Overrides](Override), operators' temporary decisions about limits, are one record in the store, which every
//! operable replica reads:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use tower_turnstile::operate::{By, Operator, Order, Outcome, Target};
//!
//! let operator = Operator::connect("redis://operator:secret@127.0.0.1").await?;
//! let ada = By::new("ada", "launch of the new model")?;
//! let target = Target::limit("chat");
//! let seen = operator.overrides().await?.tokens(&target); // refused if another operator was faster
//! let order = Order::Set {
//!     target,
//!     value: 20,
//!     burst: None,
//!     length: Duration::from_secs(3_600),
//!     seen: Some(seen),
//! };
//! match operator.order(&order, &ada).await? {
//!     Outcome::Done { replicas } => println!("in force in all {replicas} replicas"),
//!     recorded => println!("{recorded:?}"),
//! }
//! # Ok(())
//! # }
//! ```

// | file | content |
// | --- | --- |
// | `operator` | an operator's questions, to all replicas or to this process |
// | `connect` | an operator's connection to a store |
// | `ask` | a question to all replicas, and the collection of their answers |
// | `explain`, `ledger` | the prospects of a caller's next request |
// | `scan` | a scan of a store's keys: who holds slots, and which namespaces exist |
// | `merge` | merges the answers of several replicas |
// | `answer` | the answers as operators see them |
// | `listener` | a replica's task that answers operators |
// | `desk`, `walk` | a process's answers, and how it collects them |
// | `roster`, `roster.lua` | which replicas exist |
// | `order`, `changes` | orders of operators, their authors and outcomes |
// | `steer` | the record of overrides as operators use it |
// | `revoke` | permits ended by their replicas |
// | `confirm` | which replicas have applied a change |
// | `doctor` | diagnoses a store and its replicas |
// | `record`, `follow` | the record of overrides in the store, and how a replica follows it |
// | `identity` | how operators see a replica |
// | `wire`, `names`, `error` | messages, names in the store, errors |
// | `hostile` | all these readers, given arbitrary bytes |

mod answer;
#[cfg(feature = "redis")]
mod ask;
mod changes;
#[cfg(feature = "redis")]
mod confirm;
#[cfg(feature = "redis")]
mod connect;
mod desk;
#[cfg(feature = "redis")]
mod doctor;
mod error;
mod explain;
#[cfg(feature = "redis")]
mod follow;
#[cfg(all(feature = "redis", any(test, turnstile_fuzzing)))]
pub(crate) mod hostile;
mod identity;
#[cfg(feature = "redis")]
mod ledger;
#[cfg(feature = "redis")]
mod listener;
mod merge;
#[cfg(feature = "redis")]
mod names;
mod operator;
mod order;
#[cfg(feature = "redis")]
mod record;
mod revoke;
#[cfg(feature = "redis")]
mod roster;
#[cfg(feature = "redis")]
mod scan;
mod steer;
mod walk;
mod wire;

pub(crate) use self::identity::Identity;
#[cfg(feature = "redis")]
pub(crate) use self::listener::listen;
pub use self::{
    answer::{
        Answers, BudgetRow, Explanation, KeyRow, LimitRow, PauseRow, PermitRow, PermitState,
        RefusalRow, ReplicaRow, TenantRow, UnclaimedRow, Verdict,
    },
    changes::{By, Edited, LogEntry, Outcome, Overrides, Revocation, Revoked},
    error::{OperateError, OperateErrorKind},
    operator::Operator,
    order::Order,
};
#[cfg(feature = "redis")]
pub use self::{
    connect::OperatorBuilder,
    doctor::{Check, Finding, Health},
};
pub use crate::overrides::{KeyDigest, Override, Setting, Target, TenantDigest, What};
