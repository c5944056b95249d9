//! Operates services that use [`tower_turnstile`]: who holds the slots, who waits, and why a caller was refused, across all
//! replicas; and changes limits for a time. With the feature `cli`, this package is also the command `turnstile`.
//!
//! The store only knows digests of keys. Each replica knows its own permits and waiters with route and age, so an
//! [`Operator`] asks the replicas: it publishes a question, and they publish their answers. Without questions the cost
//! is one idle connection per process, and about three commands a minute.
//!
//! A replica answers if it is [operable](tower_turnstile::LimiterBuilder::operable). See [Operating](guide).
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_turnstile_operate::{KeyDigest, Operator};
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
//! use tower_turnstile_operate::{By, Operator, Order, Outcome, Target};
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
// | `beside` | a process that holds slots beside the other replicas, such as `turnstile run` |
// | `merge` | merges the answers of several replicas |
// | `answer` | the answers as operators see them |
// | `roster` | which replicas exist |
// | `order`, `changes` | orders of operators, their authors and outcomes |
// | `steer` | the record of overrides as operators use it |
// | `confirm` | which replicas have applied a change |
// | `doctor` | diagnoses a store and its replicas |
// | `error`, `kinds` | errors; kinds that have a code |
// | `ascii` | JSON that is safe for a terminal |
// | `admin` | the page and its API |
// | `hostile` | all these readers, given arbitrary bytes |
//
// Of the library it uses the public items, and `tower_turnstile::operate::seam`.

// docs.rs shows which feature each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "admin")]
pub mod admin;
mod answer;
#[doc(hidden)]
pub mod ascii;
mod ask;
#[doc(hidden)]
pub mod beside;
mod changes;
mod confirm;
mod connect;
mod doctor;
mod error;
mod explain;
#[cfg(any(test, turnstile_fuzzing))]
#[doc(hidden)]
pub mod hostile;
mod kinds;
mod ledger;
mod merge;
mod operator;
mod order;
#[cfg(test)]
#[path = "../../tests/support/redis_server.rs"]
mod redis_server;
mod roster;
mod scan;
mod steer;

/// Operating a service: the command, the page and its API, and what changes mean.
#[cfg(doc)]
#[doc = include_str!("operating.md")]
pub mod guide {}

pub use tower_turnstile::operate::seam::{
    BudgetRow, KeyRow, LimitRow, PaceRow, PauseRow, PermitRow, PermitState, RefusalRow, ReplicaRow,
    Revocation, TenantRow,
};
#[doc(hidden)]
pub use tower_turnstile::operate::seam::{Declared, Others, Registration};
pub use tower_turnstile::operate::{KeyDigest, Override, Setting, Target, TenantDigest};

pub use self::{
    answer::{Answers, Explanation, UnclaimedRow, Verdict},
    changes::{By, Edited, LogEntry, Outcome, Overrides, Revoked, What},
    connect::OperatorBuilder,
    doctor::{Check, Finding, Health},
    error::{OperateError, OperateErrorKind},
    operator::Operator,
    order::Order,
};
