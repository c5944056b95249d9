//! The keeper: stands between permits and the store, renews what was granted, and releases what was given back.
//!
//! A request is submitted to the core, a state machine without IO behind one mutex. The core finds the queue of its key,
//! batches what all queues have to send into one exchange, and hands it to the driver, the one task that sends, receives
//! and sleeps. The answer goes the same way back, and what it leads to outside (wakers, logs, metrics) is done once the
//! lock is free.
//!
//! | module | what |
//! | --- | --- |
//! | `request` | a request for a permit, as a future |
//! | `keepers` | what limiters, semaphores, permits and operators call: the one keeper of a limiter, or one for each part of a cluster |
//! | `shutdown` | how long a shutdown waits for permits, and for the store to confirm their releases |
//! | `driver` | the task, where it is started, what it has in flight, and watchdogs that see to it that it runs |
//! | `lock` | a keeper: its core behind a lock, what is decided about the driver there, and the effects of a step |
//! | `core` | the state machine: many queues, one connection |
//! | `queue` | one ledger as this process knows it, with its own permits and requests |
//! | `context` | what all queues share: settings, the limits in force, the time, timers, counts, effects |
//! | `effects` | what a step leaves to be done once the lock is free |
//! | `demand` | what a request asks for, and what it gets |
//! | `sim`, `tests`, each `audit` | tests: the simulation; single promises; whether counts and lists agree. `driver` has its own |
//!
//! Each module calls those below it. Leases and pools, which work without the lock, are in [`leases`](crate::leases).
//!
//! No type of the keeper is public. A type says how far it is seen, and a method that is `pub` is seen as far. `Queue` is
//! `pub(super)`, for the keeper: its `pub` methods are for the core, its `pub(super)` ones for its own files. Of a type that
//! the whole crate sees, such as [`Keeper`] and [`Keepers`], `pub(super)` methods are for the keeper.

#![allow(unreachable_pub, reason = "methods are seen as far as their types")]

mod context;
mod core;
mod demand;
mod driver;
mod effects;
mod keepers;
mod lock;
mod queue;
mod request;
mod shutdown;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    context::Settings,
    demand::{Demand, Leg, Notes, Taken},
    driver::ConnectError,
    keepers::{BoundPool, Granted, Keepers},
    lock::Keeper,
    request::Request,
};
