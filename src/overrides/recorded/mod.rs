//! Overrides as recorded by operators.
//!
//! | file | content |
//! | --- | --- |
//! | `setting` | an override as seen by operators |
//! | `digest` | how operators name a key or a tenant |
//! | `entry` | an override as a field of the record |
//! | `record` | the whole record, as read by replicas |
//! | `change` | a change of the record, and its result |
//! | `script` | changes in Redis: `record.lua` |
//! | `memory` | the overrides of a limiter without a store |

mod change;
mod digest;
mod entry;
mod memory;
mod record;
mod script;
mod setting;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    change::MAX_LOGGED,
    memory::LocalRecord,
    record::MAX_ENTRIES,
    script::{RECORD_LUA, arguments, logged, reply},
};
pub use self::{
    change::{Change, Changed, Logged, Signed},
    digest::{KeyDigest, TenantDigest},
    record::Record,
    setting::{Override, Setting, Target},
};
