//! The keeper: stands between permits and the store. It acquires, renews and releases slots.
//!
//! A request is submitted to the core, a state machine without IO behind one mutex. The core finds the queue of its
//! key, batches the pending work of all queues into one exchange, and hands it to the driver, the one task that sends,
//! receives and sleeps. The answer takes the same way back. External effects of a step (wakers, logs, metrics) run once
//! the lock is free. One process makes some 500,000 pairs of acquire and release a second. A cluster has the same core
//! and driver, with one connection for each part.
//!
//! | module | content |
//! | --- | --- |
//! | `request` | a request for a permit, as a future |
//! | `handle` | the interface to limiters, semaphores, permits and operators |
//! | `shutdown` | how long a shutdown waits for requests and permits, and for the store to confirm releases |
//! | `driver` | the task, where it is started, its exchanges in flight, its log at TRACE, and the watchdogs that check that it runs |
//! | `lock` | a keeper: its core behind a lock, decisions about the driver, and the effects of a step |
//! | `core` | the state machine: many queues, one connection for each part of the store |
//! | `queue` | this process's view of one ledger, with its permits and requests |
//! | `context` | state that all queues share: settings, the limits in force, the time, timers, counts, effects |
//! | `registry` | the limits as registered, updated and in force, with overrides and fallbacks |
//! | `ending` | a shutdown, or the end of the limiter, as the core sees it |
//! | `effects` | work that a step leaves until the lock is free |
//! | `demand` | demands of requests, and their results |
//! | `sim`, `tests`, each `audit` | tests: the simulation; single guarantees; whether counts and lists agree. `driver` has its own |
//!
//! Each module calls only modules below it. Leases and pools, which work without the lock, are in [`leases`](crate::leases).
//!
//! No type of the keeper is public, so a `pub` method is visible as far as its type. `Queue` is `pub(super)`, for the
//! keeper: its `pub` methods are for the core, its `pub(super)` methods for its own files. For types visible to the whole
//! crate, such as [`Keeper`] and [`KeeperHandle`], `pub(super)` methods are for the keeper.

#![allow(unreachable_pub, reason = "methods are seen as far as their types")]

mod context;
mod core;
mod demand;
mod driver;
mod effects;
mod ending;
mod handle;
mod lock;
mod queue;
mod registry;
mod request;
mod shutdown;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    context::Settings,
    demand::{Demand, Leg, Notes, Taken, Tenant},
    handle::{BoundPool, ConnectError, Granted, KeeperHandle},
    lock::Keeper,
    request::PermitRequest,
};
