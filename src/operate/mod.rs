//! Operators: who holds the slots, who waits, and why a caller was refused.
//!
//! The store knows digests of keys only. Each replica knows its own permits and waiters with route and age, so an
//! [`Operator`] asks the replicas: a question is published to them, and their answers to it. While nobody asks, it costs
//! one idle connection of each process, and a command a minute.
//!
//! Replicas answer if they are made [operable](crate::LimiterBuilder::operable). See [Operating](crate::guide::operating).
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
//! Decisions of operators about limits for a time, [overrides](Override), are one record in the store, which every operable
//! replica reads:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use tower_turnstile::operate::{By, Operator, Outcome, Target};
//!
//! let operator = Operator::connect("redis://operator:secret@127.0.0.1").await?;
//! let (hour, ada) = (Duration::from_secs(3_600), By::new("ada", "launch of the new model")?);
//! let seen = operator.overrides().await?; // a change is refused if another operator was faster
//! match operator.set(&seen, &Target::limit("chat"), 20, hour, &ada).await? {
//!     Outcome::Done { replicas } => println!("in force in all {replicas} replicas"),
//!     recorded => println!("{recorded:?}"),
//! }
//! # Ok(())
//! # }
//! ```

// | file | what |
// | --- | --- |
// | `operator` | what an operator asks, of all replicas or of this process |
// | `connect` | an operator's connection to a store |
// | `ask` | a question to all replicas, and the collection of their answers |
// | `explain`, `ledger` | what a request of one caller would meet |
// | `scan` | a look at all keys of a store: who holds slots, and which namespaces there are |
// | `merge` | the answers of several replicas as one |
// | `answer`, `digest` | what operators are told |
// | `listener`, `link` | a replica's task that answers operators, and its connection |
// | `desk`, `walk` | what a process answers, and how it finds that out |
// | `roster`, `roster.lua` | which replicas there are |
// | `steer`, `changes` | what operators change: values, modes and pauses, for a time; what they say and are told |
// | `revoke` | permits that are ended by their replicas |
// | `confirm` | which replicas have put a change in force |
// | `doctor` | what is wrong with a store or with the replicas |
// | `record`, `follow` | the record of that in the store; a replica follows it |
// | `hook` | what a replica does about the record of what operators decided |
// | `identity` | what operators see a replica as |
// | `wire`, `names`, `error` | messages, names in the store, errors |
// | `hostile` | the readers of all that, given anything |

mod answer;
#[cfg(feature = "redis")]
mod ask;
mod changes;
#[cfg(feature = "redis")]
mod confirm;
#[cfg(feature = "redis")]
mod connect;
mod desk;
mod digest;
#[cfg(feature = "redis")]
mod doctor;
mod error;
mod explain;
#[cfg(feature = "redis")]
mod follow;
mod hook;
#[cfg(all(feature = "redis", any(test, fuzzing)))]
pub(crate) mod hostile;
mod identity;
#[cfg(feature = "redis")]
mod ledger;
#[cfg(feature = "redis")]
mod link;
#[cfg(feature = "redis")]
mod listener;
mod merge;
#[cfg(feature = "redis")]
mod names;
mod operator;
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
        Answers, BudgetRow, Explanation, KeyRow, LimitRow, PermitRow, PermitState, RefusalRow,
        ReplicaRow, UnclaimedRow, Verdict,
    },
    changes::{By, Edited, LogEntry, Outcome, Overrides, Revocation},
    digest::{KeyDigest, ParseKeyDigestError},
    error::{OperateError, OperateErrorKind},
    operator::Operator,
};
#[cfg(feature = "redis")]
pub use self::{
    connect::OperatorBuilder,
    doctor::{Check, Finding, Health},
};
pub use crate::overrides::{Override, Setting, Target, What};
