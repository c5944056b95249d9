//! Operators: who holds the slots and who waits, asked of all replicas.
//!
//! | file | what |
//! | --- | --- |
//! | `operator` | an operator's connection |
//! | `names` | names in the store |
//! | `error` | errors |

mod error;
#[cfg(feature = "redis")]
#[allow(dead_code)] // As above.
mod names;
#[cfg(feature = "redis")]
#[allow(dead_code)]
mod operator;

pub use self::error::{OperateError, OperateErrorKind};
#[cfg(feature = "redis")]
pub use self::operator::{Operator, OperatorBuilder};
