//! Operators: who holds the slots and who waits, asked of all replicas; and what operators change, for a time.
//!
//! | file | what |
//! | --- | --- |
//! | `operator` | an operator's connection |
//! | `steer` | what operators change: values, modes and pauses |
//! | `record` | the record of those changes in the store |
//! | `follow` | a replica follows it |
//! | `names` | names in the store |
//! | `error` | errors |

mod error;
#[cfg(feature = "redis")]
#[allow(dead_code)]
mod follow;
#[cfg(feature = "redis")]
#[allow(dead_code)] // As above.
mod names;
#[cfg(feature = "redis")]
#[allow(dead_code)]
mod operator;
#[cfg(feature = "redis")]
mod record;
#[cfg(feature = "redis")]
mod steer;

pub use self::error::{OperateError, OperateErrorKind};
#[cfg(feature = "redis")]
pub use self::operator::{Operator, OperatorBuilder};
#[cfg(feature = "redis")]
pub use self::steer::{By, Edited, LogEntry, Outcome, Overrides};
pub use crate::overrides::{Override, Setting, Target, What};
