//! What operators see of a replica, and change.
//!
//! The store only knows digests of keys. Each replica knows its own permits and waiters with route and age, so operators
//! ask the replicas: they publish a question, and the replicas publish their answers. Without questions the cost is one
//! idle connection per process, and about three commands a minute. A replica answers if it is
//! [operable](crate::LimiterBuilder::operable).
//!
//! [Overrides](Override), operators' temporary decisions about limits, are one record in the store, which every
//! operable replica follows.
//!
//! Who asks and decides is the package `tower-turnstile-operate`: its type `Operator`, the page and the command
//! `turnstile`. See [Operating](crate::guide::operating).

// | file | content |
// | --- | --- |
// | `listener` | a replica's task that answers operators, and keeps it on the roster |
// | `roster`, `roster.lua` | the roster, and the values that replicas declare |
// | `desk`, `walk`, `rows` | a process's answers, how it collects them, and their rows |
// | `record`, `follow` | the record of overrides in the store, and how a replica follows it |
// | `revoke` | permits ended by their replicas |
// | `setup` | settings for operators |
// | `seam` | what the operators' package needs of this one |
// | `wire`, `names` | messages, names in the store |
// | `hostile` | all these readers, given arbitrary bytes |

pub(crate) mod desk;
mod follow;
#[cfg(any(test, turnstile_fuzzing))]
pub(crate) mod hostile;
mod listener;
pub(crate) mod names;
mod record;
mod revoke;
#[allow(missing_docs, reason = "only of the seam")]
mod roster;
pub(crate) mod rows;
#[doc(hidden)]
pub mod seam;
mod setup;
mod walk;
#[allow(missing_docs, reason = "only of the seam")]
pub(crate) mod wire;

pub(crate) use self::listener::listen;
pub use crate::overrides::{KeyDigest, Override, Setting, Target, TenantDigest};
