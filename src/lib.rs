//! Limits concurrent requests, streams and WebSockets, and the rate at which they start, across all replicas of a
//! service.
//!
//! The core is a semaphore that replicas share through Redis (or Valkey): waiters are admitted first come, first
//! served, across all replicas. A [`tower`](https://docs.rs/tower) layer on top holds a slot for each request until its
//! response has been *sent*, so a stream counts until its last frame.
//!
//! # Quick start
//!
//! Five chats at a time for each API key. A sixth queues for up to two seconds, then gets a 429.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use axum::{Router, routing::post};
//! use tower_turnstile::{Limit, Limiter};
//!
//! const CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(2));
//!
//! # async fn chat() {}
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::connect("redis://127.0.0.1").await?; // or Limiter::in_memory()
//! let app: Router = Router::new()
//!     .route("/chat", post(chat))
//!     .route_layer(limiter.layer(CHAT.by_header("x-api-key"))?);
//! # Ok(())
//! # }
//! ```
//!
//! Limits also work without HTTP. A limit of 1 is a mutex:
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_turnstile::{Limit, Limiter};
//!
//! const NIGHTLY: Limit = Limit::concurrent("nightly", 1).wait_up_to(Duration::from_secs(60));
//!
//! # async fn write_report() {}
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::in_memory();
//! let permit = limiter.semaphore(&NIGHTLY, "report")?.acquire().await?;
//! tokio::select! {
//!     () = write_report() => {}
//!     _ = permit.lost() => {} // another process may write it now: better to stop
//! }
//! permit.release().await?; // confirmed by the store; dropping the permit releases it in the background
//! limiter.shutdown(Duration::from_secs(5)).await; // before the process ends, even after an error
//! # Ok(())
//! # }
//! ```
//!
//! # Concepts
//!
//! - A [`Limiter`] connects a process to its store. One per process is enough: a limiter is cheap to clone, and runs one
//!   background task with one connection, however many permits there are. [`Limiter::in_memory`] applies the same rules
//!   within the process.
//! - A [`Limit`] has a name, a value (concurrent permits, [`Limit::concurrent`], or permits per period,
//!   [`Limit::rate`]), bounds on the wait and the length of its queue, and a [`Fallback`] for outages of the store. All
//!   replicas should use the same values for one name.
//! - A [`Key`] identifies the subject of a limit: a caller, a tenant, a route, or everything ([`Key::SHARED`]). Each
//!   key has its own slots and its own queue. A [`Scope`] is a limit with the rule that finds the key of a request; a
//!   [`Policy`] is a list of scopes that apply together.
//! - A [`Semaphore`] is a limit bound to a key, for use without HTTP.
//! - A *lease* is the store's record of a permit. A lease expires unless it is renewed, so a process that dies cannot keep
//!   its slots. The limiter renews all leases in the background.
//! - A *waiter* is a request in the queue of a key. The queue is in the store, so all replicas share it. A waiter
//!   leaves the queue when it times out or its client disconnects; the waiters of a dead replica are skipped.
//!
//! Three types represent a slot in use:
//!
//! ```text
//!  without HTTP:   Semaphore::acquire().await --> Permit      owns the slot: released on drop
//!
//!  in the layer:   LimitLayer --> response body               owns the slot: released after the last frame
//!                                      ^
//!                     handler: Slot ---'                      sees it, owns nothing; in the request's extensions
//!                                |
//!                          .hold() --> Hold                   keeps it beyond the response, as for a WebSocket:
//!                                                             released once the response and all holds are gone
//! ```
//!
//! All three report the loss of the slot: [`Permit::lost`], [`Slot::lost`], [`Hold::lost`].
//!
//! # Guarantees
//!
//! - **Cap:** the live leases of a key never exceed the limit, across all replicas.
//! - **The holder knows:** a permit is reported lost before its slot can be granted to another request.
//! - **Fairness:** waiters are admitted in the order in which the store received them, across all replicas; under a
//!   [fair](Limit::fair) limit, in this order within each tenant, while tenants share the slot-seconds.
//! - **Liveness:** the call that releases a slot grants it to the next waiter, and a message wakes the waiter's process.
//! - **No leaks:** a slot is released when the body ends, and on any error, panic, drop or disconnect; after a crash,
//!   when the lease ends.
//! - **Idempotence:** lost, late and duplicate messages leave no holder and no waiter behind.
//! - **Bounds:** queues, waits, keys, messages and the store's work per call are bounded.
//! - **Outages:** no request waits longer than `store_timeout` for a store that is down or slow.
//! - **Transparency:** the service's errors, readiness, frames, trailers and size hints are unchanged.
//!
//! [Guarantees](guide::guarantees) lists the exceptions. The cap is advisory: like any lease, a permit cannot stop its
//! process from writing after the permit is lost, so data correctness must not depend on the cap alone.
//!
//! # The guide
//!
//! [The guide](guide) has one page per question. Read three of them before production:
//!
//! 1. [Keys and policies](guide::keys): who is limited, and what refusals look like.
//! 2. [Shutting down](guide::shutdown): otherwise a process's slots stay taken until their leases end.
//! 3. [When the store fails](guide::store_failures): what each limit does meanwhile.
//!
//! [Bounds and edges](guide::bounds) lists settings with their defaults.
//!
//! # Features
//!
//! | feature | default | adds |
//! | --- | --- | --- |
//! | `redis` | yes | the store in Redis 6.2 or later, or Valkey: one server, Sentinel or Cluster |
//! | `tls` | | TLS by rustls; the application installs a crypto provider |
//! | `config` | | [limits from a TOML file](guide::config_file), with hot reload: the module `config` |
//! | `metrics` | | [metrics](guide::metrics) through the `metrics` facade |
//! | `operate` | | [operators](guide::operating) see the permits and waiters of all replicas, and change limits temporarily |
//! | `axum` | | [`Slot`] as an extractor, [`Refusal`] as a response, and the matched path as a key |
//! | `test-util` | | a store that a test can take down, slow down or empty: the module `test_util` |
//!
//! Without features, only the in-memory store is available. [`LimiterBuilder::connect`] documents the URLs. Events are
//! logged through [`tracing`](https://docs.rs/tracing), never with a key or a password.

// docs.rs shows which feature each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Data for operators is always collected; only `operate` exports it.
#![cfg_attr(
    not(feature = "operate"),
    allow(dead_code, unreachable_pub, unused_imports, unused_variables)
)]
// Without a store, the part of the keeper that talks to the store is unused.
#![cfg_attr(not(feature = "redis"), allow(dead_code, unused_imports))]

mod attached;
mod builder;
mod charges;
#[cfg(feature = "config")]
pub mod config;
mod error;
mod fallbacks;
#[cfg(any(test, turnstile_fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(doc)]
pub mod guide;
mod home;
mod keeper;
mod key;
mod lane_waker;
pub mod layer;
mod leases;
mod ledger;
mod limit;
mod limiter;
mod operable;
#[cfg(feature = "operate")]
pub mod operate;
mod overrides;
mod part;
mod permit;
mod permit_id;
mod ranges;
mod reason;
#[cfg(test)]
#[path = "../tests/support/redis_server.rs"]
mod redis_server;
mod repoll;
mod returns;
mod semaphore;
mod small_map;
mod status;
mod store;
mod sync;
mod telemetry;
#[cfg(feature = "test-util")]
pub mod test_util;
mod unit;

// Entry points.
pub use builder::LimiterBuilder;
pub use limiter::Limiter;
pub use status::{ShutdownReport, Status, Usage};

// Limits and keys.
pub use key::Key;
pub use limit::{Class, Fallback, Limit, LimitValue, Limits, Mode};

// Permits.
pub use attached::Attached;
pub use charges::Budget;
pub use permit::Permit;
pub use permit_id::{ParseIdError, PermitId};
pub use semaphore::{Acquire, Semaphore};

// HTTP requests.
#[doc(inline)]
pub use layer::{
    ClientAddress, Hold, LimitLayer, OnLost, PeerAddress, Policy, ReadAheadLayer, Refusal,
    RefusalKind, ReleaseAt, Scope, Slot,
};

// Errors.
pub use error::{
    AcquireError, AcquireErrorKind, BoxError, ConfigError, ConfigErrorKind, LostErrorKind,
    ReleaseError,
};

/// The crate whose [`Client`](redis::Client) [`LimiterBuilder::connect_client`] takes.
#[cfg(feature = "redis")]
pub use redis;

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
