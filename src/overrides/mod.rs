//! Overrides: what operators have decided about limits, for a time.
//!
//! The record of all overrides is one hash in the store: replicas read it whole, lay it over the limits that they declare, and
//! write back what the store has lost of it. A key's override goes before its limit's, and that before what is declared, in code or by
//! the configuration file. Each ends by itself, on every replica, whether the store is there or not.
//!
//! | file | what |
//! | --- | --- |
//! | `in_force` | overrides as this process applies them |
//! | `setting` | an override as operators see it |
//! | `entry` | an override as a field of the record |
//! | `record` | the whole record, as it is read |
//! | `change` | a change of it, and what comes of that |
//! | `script` | changes in Redis: `record.lua` |
//! | `memory` | changes in this process: the same steps |

#[cfg(feature = "operate")]
mod change;
#[cfg(feature = "operate")]
mod entry;
mod in_force;
#[cfg(feature = "operate")]
mod memory;
#[cfg(feature = "operate")]
mod record;
#[cfg(all(feature = "operate", feature = "redis"))]
mod script;
#[cfg(feature = "operate")]
mod setting;
#[cfg(all(test, feature = "operate", feature = "redis"))]
mod tests;

#[cfg(test)]
pub(crate) use self::in_force::Decision;
pub(crate) use self::in_force::{InForce, Steered};
#[cfg(all(feature = "operate", feature = "redis"))]
pub(crate) use self::script::{RECORD_LUA, arguments, logged, reply};
#[cfg(feature = "operate")]
pub use self::{
    change::What,
    setting::{Override, Setting, Target},
};
#[cfg(feature = "operate")]
pub(crate) use self::{
    change::{Change, ChangeNote, Changed, Logged, MAX_LOGGED},
    entry::MAX_LENGTH_MS,
    memory::LocalRecord,
    record::{MAX_ENTRIES, Outlasting, Record},
    setting::{MAX_AUTHOR, MAX_REASON, Token},
};
