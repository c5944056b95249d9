//! The keeper: stands between permits and the store, and keeps every promise that is made to either.
//!
//! It is a state machine without IO ([`Core`]: the time is passed in, so a simulation can drive it step by step), one
//! mutex around it ([`Shared`]), and one task that sends, receives and sleeps (`driver`).
//!
//! | file | what |
//! | --- | --- |
//! | `request` | a request for a permit, as a future |
//! | `keepers` | the one keeper of a limiter; in a cluster one for each part of it |
//! | `step` | what a request asks of one keeper |
//! | `shared` | the lock: requests and permits call in here, and wake the driver when there is work |
//! | `effects` | what a step leaves to be done once the lock is free: wakers, logs and metrics are foreign code |
//! | `core`, `ctx`, `index` | the state machine: lines, and where to find the one that needs something |
//! | `limits` | the limits, and the values that they have now |
//! | `demand`, `turn` | a request's way through it: asked for, collected, cancelled |
//! | `claim`, `progress`, `verdict` | a request for slots under several limits, all or nothing; from leg to leg; as the store answers |
//! | `rates` | what a claim is charged |
//! | `entry`, `line` | a permit; and a ledger as this process knows it, with an entry for each of its own permits |
//! | `work` | what a line has to tell its ledger, and who waits there |
//! | `change` | what can happen to an entry: granted, refused, given up, lost |
//! | `draft`, `send` | collect the work of many lines, and claims, into one exchange (group commit) |
//! | `receive`, `answer`, `silence` | replies, wake-ups and failures, and what they mean to a line |
//! | `reconnect` | connections that come and go |
//! | `timers` | renewals, polls, ends of waits: one sleep for all |
//! | `bounds` | permits that are held too long, or whose response nobody reads |
//! | `breaker`, `outage` | the circuit breaker; what the fallback of a limit means, and the way back |
//! | `pool`, `reuse` | slots that are used again without the store |
//! | `clock`, `lease`, `tenure` | conservative local deadlines; the permits that a lease serves, and their owners |
//! | `loom` | for tests: interleavings of threads in these, and in the pools, which work without the lock |
//! | `driver`, `under_way`, `again` | the task; exchanges that are not answered, and the timer; a task that does not wait for itself |
//! | `lifecycle`, `home`, `watchdog` | when there is a driver, and where; what happens if it does not run |
//! | `greeting` | the session that a limiter was connected with, until its driver starts |
//! | `audit`, `sim`, `tests` | for tests: whether its books agree; the simulation; single promises |
//!
//! A name (`Seq`) is in at most one unanswered exchange that may put it into the ledger. When such an exchange fails
//! its fate is unknown: the name is released until a release was acknowledged at a store time after the exchange's
//! `not_after`, and the request goes on under a new name.

mod again;
mod answer;
#[cfg(test)]
mod audit;
mod bounds;
mod breaker;
mod change;
mod claim;
mod clock;
mod core;
mod ctx;
mod demand;
mod draft;
mod driver;
mod effects;
mod entry;
mod greeting;
mod home;
mod index;
mod keepers;
mod lease;
mod lifecycle;
mod limits;
mod line;
#[cfg(all(test, turnstile_loom))]
pub(crate) mod loom;
mod outage;
mod pool;
mod progress;
mod rates;
mod receive;
mod reconnect;
mod request;
mod reuse;
mod send;
mod shared;
mod silence;
#[cfg(test)]
mod sim;
mod step;
mod tenure;
#[cfg(test)]
mod tests;
mod timers;
mod turn;
mod under_way;
mod verdict;
mod watchdog;
mod work;

use std::time::Duration;

pub(crate) use self::{
    bounds::Bounds,
    demand::{Demand, Leases, Leg, Notes, Taken},
    home::{Home, Place},
    keepers::Keepers,
    lease::Lease,
    request::{Granted, Request},
    reuse::BoundPool,
    shared::{ConnectError, Shared},
};
use self::{core::Core, ctx::Ctx, pool::Pool};
use crate::{
    key::Key,
    ledger::{MAX_PERMITS, ReplicaId},
    part::Part,
};

/// Two may be on their way while the next one fills.
const MAX_IN_FLIGHT: usize = 2;
/// In a cluster each is about one ledger, or one rate.
const MAX_OF_ONE_KEY_IN_FLIGHT: usize = 8;
/// Names in one exchange: about two milliseconds of the store's time.
const MAX_NAMES: usize = 1_000;
// The last claim may go over it by its legs.
const _: () = assert!(2 * MAX_NAMES <= MAX_PERMITS as usize);
/// Refunds in one exchange: about a millisecond.
const MAX_REFUNDS: usize = 200;
/// Ledgers in one exchange: about a millisecond.
const MAX_BATCHES: usize = 64;
/// Lines of this process's own ledgers that are kept although they are idle: about 2 KiB each.
const MAX_SPARED: usize = 64;

/// What a keeper is told once.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) replica: ReplicaId,
    pub(crate) namespace: String,
    /// Which part of a cluster it keeps, if the store is one.
    pub(crate) part: Option<Part>,
    pub(crate) lease: Duration,
    pub(crate) store_timeout: Duration,
    pub(crate) poll_interval: Duration,
    pub(crate) waiter_ttl: Duration,
    /// For jitter.
    pub(crate) seed: u64,
}

impl Settings {
    /// The name of a key's ledger in the store.
    fn ledger_name(&self, key: &Key, limit_name: &str) -> String {
        match self.part {
            None => key.ledger_name(&self.namespace, limit_name),
            Some(part) => {
                let prefix = part.prefix(&self.namespace);
                format!("{prefix}{:032x}", key.digest(limit_name))
            }
        }
    }

    /// The name of a key's state at a rate.
    fn rate_name(&self, key: &Key, limit_name: &str) -> String {
        self.ledger_name(key, limit_name) + ":rate"
    }
}
