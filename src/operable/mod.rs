//! The keeper's hooks for operators, on which `operate` is built.
//!
//! | file | content |
//! | --- | --- |
//! | `control` | the task that listens to operators |
//! | `identity` | how operators see a replica |
//! | `look` | a bounded look at queues and permits under the keeper's lock |
//! | `standings` | the state of rate keys |
//! | `refusals` | the last refusals of each limit |
//!
//! Without the feature `operate` nobody looks: nothing is kept, and no task is set.

mod control;
mod identity;
mod look;
mod refusals;
mod standings;

pub(crate) use self::{
    control::{Control, ControlTask},
    identity::{Identity, MAX_LABEL, SEEN},
    look::{
        Cursor, EntryLook, LOOK, LimitLook, PaceLook, PauseLook, QueueLook, RateLook, Seen,
        TenantLook, Which,
    },
    refusals::{MAX_REFUSALS, RefusalNote, Refusals},
    standings::{Standings, TenantStanding},
};
