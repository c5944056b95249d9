//! Overrides: what operators have decided about limits, for a time.
//!
//! | file | what |
//! | --- | --- |
//! | `in_force` | overrides as this process applies them |

mod in_force;

pub(crate) use self::in_force::{Decision, InForce, Steered};
