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
//! | `recorded` | overrides as recorded by operators; `no_record` replaces it without the feature `operate` |

mod in_force;
#[cfg_attr(not(feature = "operate"), path = "no_record.rs")]
mod recorded;

#[cfg(test)]
pub(crate) use self::in_force::SettingInForce;
pub(crate) use self::in_force::{InForce, Steered};
pub use self::recorded::*;
