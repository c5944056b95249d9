//! A fair semaphore that the replicas of a service share through Redis.

// Without a store the half of the keeper that talks to one is not used.
#![cfg_attr(not(feature = "redis"), allow(dead_code, unused_imports))]

mod builder;
mod error;
mod keeper;
mod key;
mod ledger;
mod limit;
mod limiter;
mod permit;
#[cfg(test)]
#[path = "../tests/support/redis_server.rs"]
mod redis_server;
mod semaphore;
mod status;
mod store;

// To begin with.
pub use builder::LimiterBuilder;
pub use limiter::Limiter;
pub use status::{ShutdownReport, Status, Usage};

// What is limited, and for whom.
pub use key::Key;
pub use limit::{Limit, MAX_LIMIT, MAX_WAIT, MAX_WAITERS, OnUnavailable};

// One slot of it.
pub use permit::Permit;
pub use semaphore::{Acquire, Semaphore};

// What goes wrong.
pub use error::{AcquireError, AcquireErrorKind, BoxError, ConfigError, ConfigErrorKind};
