//! The keeper's hooks for operators, on which `operate` is built.
//!
//! | file | content |
//! | --- | --- |
//! | `control` | the task that listens to operators |
//! | `look` | a bounded look at queues and permits under the keeper's lock |
//! | `standings` | the state of rate keys; `no_standings` replaces it without the feature `operate` |
//! | `refusals` | the last refusals of each limit; `no_refusals` replaces it without the feature `operate` |

mod control;
#[cfg(feature = "operate")]
mod look;
#[cfg(feature = "operate")]
mod refusals;
#[cfg(not(feature = "operate"))]
#[path = "no_refusals.rs"]
mod refusals;
#[cfg(feature = "operate")]
mod standings;
#[cfg(not(feature = "operate"))]
#[path = "no_standings.rs"]
mod standings;

pub(crate) use self::{control::Control, refusals::Refusals, standings::Standings};
#[cfg(feature = "operate")]
pub(crate) use self::{
    control::ControlTask,
    look::{
        Cursor, EntryLook, LOOK, LimitLook, PauseLook, QueueLook, RateLook, TenantLook, Visitor,
    },
    refusals::{MAX_REFUSALS, RefusalNote},
    standings::Standing,
};
