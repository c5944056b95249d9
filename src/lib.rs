//! Limits concurrent requests, streams and WebSockets, and the rate at which they start, across all replicas of a
//! service.
//!
//! The core is a semaphore that replicas share through Redis (or Valkey): waiters are admitted first come, first served,
//! across all replicas. A [`tower`](https://docs.rs/tower) layer on top holds a slot for each request until its
//! response has been *sent*, so that a stream counts until its last frame.
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
//! permit.release().await?; // confirmed by the store; dropping it releases it in the background
//! limiter.shutdown(Duration::from_secs(5)).await; // before the process ends, also after an error
//! # Ok(())
//! # }
//! ```
//!
//! # The guide
//!
//! | | |
//! | --- | --- |
//! | [Keys and policies](guide::keys) | the tenant from authentication, several limits, rates, values, refusals |
//! | [Tenants](guide::tenants) | fair shares of one limit among customers |
//! | [Token budgets](guide::tokens) | costs that are known only at the end, such as the tokens of a language model |
//! | [Streams, WebSockets and gRPC](guide::streams) | when a slot is released; clients that disconnect, or stop reading |
//! | [Clients](guide::clients) | limits on outgoing calls |
//! | [Shutting down](guide::shutdown) | ending a process without leaving slots behind |
//! | [Testing](guide::testing) | limits in your tests, without Redis |
//! | [When the store fails](guide::store_failures) | fallbacks, the circuit breaker, lost leases |
//! | [Running Redis](guide::redis) | permissions, TLS, Sentinel, Cluster, memory, inspecting keys |
//! | [Metrics and logs](guide::metrics) | all metrics, log events and alerts |
//! | [Operating](guide::operating) | who holds slots and who waits, across all replicas; changing limits for a time |
//! | [Not Rust](guide::not_rust) | slots for scripts, jobs and programs in other languages |
//! | [Limits from a file](guide::config_file) | TOML with hot reload |
//! | [Reuse](guide::reuse) | admission without a round trip |
//! | [How it works](guide::how_it_works) | the design, in two pages |
//! | [Comparison](guide::comparison), [performance](guide::performance) | other crates, and the cost of this one |
//!
//! # Concepts
//!
//! - A [`Limiter`] connects a process to its store. One per process is enough: a limiter is cheap to clone, and runs one
//!   background task with one connection, however many permits there are. [`Limiter::in_memory`] applies the same rules
//!   within the process.
//! - A [`Limit`] has a name, a value (concurrent permits, [`Limit::concurrent`], or permits per period, [`Limit::rate`]),
//!   the time that a request may queue, the length of the queue, and a [`Fallback`] for outages of the store. All replicas
//!   should use the same values for one name.
//! - A [`Key`] identifies the subject of a limit: a caller, a tenant, a route, or everything ([`Key::SHARED`]). Each key
//!   has its own slots and its own queue. A [`Scope`] is a limit together with the rule that finds the key of a request,
//!   and a [`Policy`] is the list of scopes that apply to a request together.
//! - A [`Semaphore`] is a limit bound to a key, for use without HTTP.
//! - A *lease* is the store's record of a permit. A lease expires unless it is renewed, so a process that dies cannot keep
//!   its slots. The limiter renews all leases in the background.
//! - A *waiter* is a request in the queue of a key. The queue is in the store, so all replicas share one queue. A waiter
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
//! All three report when the slot was lost: [`Permit::lost`], [`Slot::lost`], [`Hold::lost`].
//!
//! # Guarantees
//!
//! | | guarantee | exceptions |
//! | --- | --- | --- |
//! | **G1** cap | The live leases of a key never exceed the limit. The calls behind the layer do not exceed it either, if responses end with their slots ([`OnLost::Abort`], [`max_hold`](LimitLayer::max_hold), [`idle`](LimitLayer::idle)), except for the moment that a runtime takes to drop them. | Replicas that disagree on the limit, as in a rollout: the largest value applies; each charges a rate by its own. Data lost by the store: see the table in [the guide](guide::store_failures#held-permits). A store whose clock jumps forward, or that stalls for longer than a lease. An outage under `Local` or `Allow`; under `Share`, by one permit for each replica and by what a replica held above its share. Responses that continue after losing their slot (`Continue`). |
//! | **G2** the holder knows | A permit counts as held only while its lease is certainly alive. Under `Abort` no frame is taken from a body afterwards, whatever happened to the process, and the service's work is dropped even if its client has stopped reading. | Frames that the server had already taken may still be sent. Lost data, clock jumps and long stalls of the store, as above. A machine that was suspended: its monotonic clock stood still too. |
//! | **G3** fairness | Waiters are admitted in the order in which the store received them, across all replicas, under each limit. No request overtakes a live waiter. Under a [fair](Limit::fair) limit both hold among the requests of one tenant, and the tenants that wait [share the slot-seconds](guide::tenants#the-rule). A request under several limits that waited for one limit joins the next queue by the time at which it was first queued. | A replica without a connection to the store, or one that has sent it nothing for `poll_interval` + `store_timeout`, as after a stall or a step of the store's clock: later waiters may pass its waiters, which keep their positions for a waiter TTL. Requests that queued in their process during an outage join the store's queue at its end. While a request moves from one queue to the next (a wake-up and a round trip), a later request that reaches the next limit and finds a free slot passes it. In a cluster, and without a store, a request joins the next queue at the end. Under [`reuse`](Limit::reuse), a request in another process may be overtaken until a message arrives, or for 100 ms if the message is lost. |
//! | **G4** liveness | The call that releases a slot grants it to the next waiter, and a message wakes the waiter's process; if the message is lost, a poll finds the grant within the poll interval. While permits are being entered into the store (for a second or so after a loss, or after an outage under `Share`), grants wait for the end of this time. A slot kept under [`reuse`](Limit::reuse) is released once its process learns of the waiter. A crashed replica delays the queue only by the slots that it held. A replica that stops, or dies behind an open connection, also delays the queue once by `poll_interval` + `store_timeout`, or longer if calls have to wait for their turn at the store. | A store whose clock jumps back, by the length of the jump. |
//! | **G5** no leaks | A slot is released at once when the body ends, and on any drop: error, panic, stream reset, disconnect, cancelled future, shutdown. After the process dies, within the lease. | Servers notice some disconnects late: see [clients that leave](guide::streams#clients-that-leave). A store whose clock jumps back keeps the slots of a dead process longer by the length of the jump, at most for an hour after the limit is next reached. |
//! | **G6** idempotence | No late, lost or duplicate message leaves a holder or a waiter in the store that no process knows of. | |
//! | **G7** bounds | Queues, waits, key lengths, messages and the store's work per call are all bounded. All keys in the store expire. | The length of a response is not bounded by default: see [`max_hold`](LimitLayer::max_hold) and [`idle`](LimitLayer::idle). |
//! | **G8** outages | No request waits longer than `store_timeout` for a store that is down or slow, or for its turn to be sent, except a request that may queue and finds no slot under `Local` either. Waiting in this process never opens the circuit breaker: a call that the store has not answered within the full `store_timeout` does, as does a second failed connection in a row, a refusal by the store, or a store that is out of memory. | A process that stands still. |
//! | **G9** transparency | The service's errors, readiness, frames, trailers and size hints are unchanged. | The error type of bodies is [`BoxError`]. |
//!
//! The cap is advisory. Like any lease, a permit cannot stop its process from writing after the permit is lost: do not let
//! the correctness of data depend on the cap alone.
//!
//! # Defaults
//!
//! | setting | of | default | bounds and relations |
//! | --- | --- | --- | --- |
//! | [`lease`](LimiterBuilder::lease) | limiter | 30 s | more than 3 x `store_timeout`, at most 1 h; renewed every third of it |
//! | [`store_timeout`](LimiterBuilder::store_timeout) | limiter | 500 ms | less than `lease` / 3 |
//! | [`poll_interval`](LimiterBuilder::poll_interval) | limiter | 1 s | at most `waiter_ttl` / 3 |
//! | [`waiter_ttl`](LimiterBuilder::waiter_ttl) | limiter | 5 s | at least 3 x `poll_interval`, at most 1 h |
//! | [`namespace`](LimiterBuilder::namespace) | limiter | `turnstile` | the same for all replicas of a service |
//! | [`runtime`](LimiterBuilder::runtime), [`dedicated_thread`](LimiterBuilder::dedicated_thread) | limiter | the runtime that first uses the limiter | |
//! | [`concurrent`](Limit::concurrent) | limit | none: required | 1 to 1,000,000 |
//! | [`rate`](Limit::rate) | limit | none: required | 1 to 1,000,000 in 1 ms to 24 h |
//! | [`burst`](Limit::burst) | limit, of a rate | the count | 1 to 1,000,000; less with a long period |
//! | [`unit`](Limit::unit) | limit, of a rate | `requests` | 1 to 32 characters |
//! | [`mode`](Limit::mode) | limit | `Enforce` | |
//! | [`class`](Limit::class) | limit | `Caller`; `Global` for [`Key::SHARED`] | the same for all replicas |
//! | [`wait_up_to`](Limit::wait_up_to) | limit | zero: refuse at once | at most 24 h |
//! | [`max_waiters`](Limit::max_waiters) | limit | 1,000 per key | at most 100,000; without a wait there is no queue |
//! | [`fallback`](Limit::fallback) | limit | `Local(limit)` | |
//! | [`fallback_for`](Limit::fallback_for) | limit | as long as the store is down | up to 24 h |
//! | [`reuse`](Limit::reuse) | limit, of slots | off | slots are kept for 100 ms at a time, or for a lease if it is shorter; idle slots are released after 50 to 100 ms |
//! | [`fair`](Limit::fair) | limit, of slots | off: first come, first served | needs a wait; excludes `reuse` |
//! | key | scope | [`Key::SHARED`] | [`by_header`](Limit::by_header), [`by_client_address`](Limit::by_client_address), [`by_key`](Limit::by_key), [`by_key_async`](Limit::by_key_async) |
//! | [`values`](Scope::values) | scope | the limit's own | 0 refuses every request; for a rate at least 1, with its own [burst](LimitValue) or the limit's |
//! | tenant | scope, of a fair limit | none: all requests are one tenant | [`fair_by_header`](Scope::fair_by_header), [`fair_by_key`](Scope::fair_by_key) |
//! | [`shares`](Scope::shares) | scope, of a fair limit | 1 | 1 to 1,000 |
//! | [`cost_by`](Scope::cost_by) | scope, of a rate | 1 | at most the burst, or [clamped](Scope::clamp_cost) to it |
//! | scopes | policy | | 1 to 16, each limit once |
//! | [`on_lost`](LimitLayer::on_lost) | layer | `Continue` | |
//! | [`at_shutdown`](LimitLayer::at_shutdown) | layer | as `on_lost` | |
//! | [`release_at`](LimitLayer::release_at) | layer | `BodyEnd` | |
//! | [`max_hold`](LimitLayer::max_hold) | layer | none | 1 ms to 30 days |
//! | [`idle`](LimitLayer::idle) | layer | none | 1 ms to 30 days |
//! | [`rate_limit_fields`](LimitLayer::rate_limit_fields) | layer | not sent | |
//! | [`limited_status`](LimitLayer::limited_status) | layer | 429 with keys, 503 without | |
//! | [`unavailable_status`](LimitLayer::unavailable_status) | layer | 503 | |
//! | [`refuse_with`](LimitLayer::refuse_with) | layer | problem details in JSON | |
//! | [`read_ahead`](LimitLayer::read_ahead) | layer | off; if on, 64 KiB | at most 16 MiB, in memory for each waiting request |
//! | [`ipv6_prefix`](ClientAddress::ipv6_prefix) | client address | 64 bits | |
//!
//! # Features
//!
//! | feature | default | adds |
//! | --- | --- | --- |
//! | `redis` | yes | the store in Redis 6.2 or later, or Valkey: `redis://`, `valkey://`, `unix://` |
//! | `tls` | | TLS by rustls: `rediss://`, `valkeys://`; the application installs a crypto provider |
//! | `sentinel` | | Redis Sentinel: `redis+sentinel://`, `valkey+sentinel://`, with TLS `rediss+sentinel://` |
//! | `cluster` | | Redis Cluster: `redis+cluster://`, with TLS `rediss+cluster://` |
//! | `config` | | [limits from a TOML file](guide::config_file), with hot reload: the module `config` |
//! | `metrics` | | [metrics](guide::metrics) through the facade of that name |
//! | `operate` | | [operators](guide::operating) see the permits and waiters of all replicas, and change limits for a time |
//! | `axum` | | [`Slot`] as an extractor, [`Refusal`] as a response, and the matched path as a key |
//! | `test-util` | | a store that a test can take down, slow down or empty: the module `test_util` |
//!
//! Without features only the in-memory store is available. [`LimiterBuilder::connect`] documents the URLs. Events are
//! logged through [`tracing`](https://docs.rs/tracing), never with a key or a password.

// docs.rs shows which feature each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// What operators see is collected always, and exported by the seam.
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
