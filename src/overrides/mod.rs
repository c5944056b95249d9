//! Overrides: temporary decisions of operators about limits.
//!
//! The record of all overrides is one hash in the store. Replicas read the whole record, lay it over their declared
//! limits, and restore any part that the store has lost. A key's override wins over its limit's override, which wins
//! over everything declared, in code or in the configuration file. Each override expires on its own, on every replica,
//! even without the store.
//!
//! | file | content |
//! | --- | --- |
//! | `in_force` | overrides as applied by this process |
//! | `setting` | an override as seen by operators |
//! | `digest` | how operators name a key or a tenant |
//! | `entry` | an override as a field of the record |
//! | `record` | the whole record, as read by replicas |
//! | `change` | a change of the record, and its result |
//! | `script` | changes in Redis: `record.lua` |
//! | `memory` | changes in this process: the same steps |

#[cfg(feature = "operate")]
mod change;
#[cfg(feature = "operate")]
mod digest;
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
    digest::{KeyDigest, TenantDigest},
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
