//! The slot of a response: when it ends, and what then becomes of the response.
//!
//! | file | contents |
//! | --- | --- |
//! | `options` | when a slot is released, and how its loss affects the response |
//! | `bounds` | settings for responses that never end |
//! | `guard` | keeps the slot between the future and the body; the terms on which the slot ends the response |
//! | `tied` | drops the service's future or body when its slot ends |
//! | `outcome` | the load of an upstream, judged by its responses |
//! | `permit_body` | a body that holds a permit, without a layer |

mod bounds;
mod guard;
mod options;
mod outcome;
mod permit_body;
mod tied;

#[cfg(feature = "config")]
pub(crate) use bounds::check_bound;
pub(super) use guard::{SlotGuard, Terms, Tie};
pub use options::{OnLost, ReleaseAt};
pub(super) use outcome::TimeToHead;
pub(crate) use outcome::check_pause;
pub use outcome::{Outcome, overload, slower_than};
pub(super) use tied::Tied;
