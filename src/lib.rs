//! Caps how many requests, streams and WebSockets are in progress at once, and how many begin in a time, across all
//! replicas of a service.
//!
//! Underneath is a fair semaphore that the replicas share through Redis (or Valkey): whoever came first is let in
//! first, on whichever replica. On top is a [`tower`](https://docs.rs/tower) layer that holds a slot for each request
//! until its response has been *sent*, not only begun, so that a stream counts until its last frame.
//!
//! # Quick start
//!
//! At most five chats at a time for each API key; a sixth waits for up to two seconds, then it gets a 429.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use axum::{Router, routing::post};
//! use tower_turnstile::{Limit, Limiter};
//!
//! static CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(2));
//!
//! # async fn chat() {}
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::connect("redis://127.0.0.1").await?; // or Limiter::in_memory()
//! let app: Router = Router::new()
//!     .route("/chat", post(chat))
//!     .route_layer(limiter.layer(CHAT.clone().by_header("x-api-key")));
//! # Ok(())
//! # }
//! ```
//!
//! A whole policy, decided on in one round trip: 200 streams in all, 5 for each API key, 20 for some, and no key opens
//! more than 60 a minute. A request that is refused by one limit is not counted by the others.
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_turnstile::{Limit, Limiter};
//!
//! static ALL: Limit = Limit::concurrent("chat-all", 200);
//! static EACH: Limit = Limit::concurrent("chat-each", 5).wait_up_to(Duration::from_secs(2));
//! /// 40 a minute and 20 at once: never more than 60 in any minute.
//! static OPENS: Limit = Limit::rate("chat-opens", 40, Duration::from_secs(60)).burst(20);
//!
//! # let limiter = Limiter::in_memory();
//! let layer = limiter.layer([
//!     EACH.clone().by_header("x-api-key").values([("gold-1", 20), ("gold-2", 20)]),
//!     OPENS.clone().by_header("x-api-key"),
//!     ALL.clone().into(),
//! ]);
//! ```
//!
//! The same limits work without HTTP. A mutex is a limit of 1:
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_turnstile::{Limit, Limiter};
//!
//! static NIGHTLY: Limit = Limit::concurrent("nightly", 1).wait_up_to(Duration::from_secs(60));
//!
//! # async fn write_report() {}
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::in_memory();
//! let permit = limiter.semaphore(&NIGHTLY, "report").acquire().await?;
//! tokio::select! {
//!     () = write_report() => {}
//!     () = permit.lost() => {} // somebody else may write it now: better to stop
//! }
//! drop(permit); // the slot is free
//!
//! limiter.shutdown(Duration::from_secs(5)).await; // before the process ends
//! # Ok(())
//! # }
//! ```
//!
//! # Concepts
//!
//! - A [`Limiter`] is the process's way to the store. One for each process is enough: it is cheap to clone, and runs
//!   one task with one connection, however many permits there are. Without a store ([`Limiter::in_memory`]) the same
//!   rules hold within the process.
//! - A [`Limit`] has a name and says how much: so many at once ([`Limit::concurrent`]), or so many in a time
//!   ([`Limit::rate`]); how long to wait, how long the line may be, and what to do without a store. All replicas should
//!   use the same values for one name.
//! - A [`Key`] says who is counted: each key has its own slots and its own line. It may be a caller, a tenant, a
//!   route, or [`Key::SHARED`] for all. A limit together with the rule that finds the key of a request is a [`Scope`],
//!   and the scopes that a request is under together are its [`Policy`].
//! - A [`Semaphore`] is a limit bound to a key, and a [`Permit`] is one slot of it. Dropping the permit gives the slot
//!   back. In the layer the permit belongs to the response, and a handler sees it as a [`Slot`].
//! - A *lease* is how the store knows a permit: it ends by itself unless it is renewed, so that a process which dies
//!   cannot keep its slots. The limiter renews the leases of all permits in the background.
//! - A *waiter* stands in the line of a key. The line is kept in the store, so it is one line for all replicas. A
//!   waiter that gives up, or whose client leaves, is taken out of it; the waiters of a replica that died are passed
//!   over.
//!
//! # Choosing values
//!
//! **The limit** is what the thing behind it can do at once: connections, GPU slots, what one customer has paid for.
//! It does not grow with the number of replicas.
//!
//! **The wait** ([`Limit::wait_up_to`]) smooths bursts. Less than a client's patience is right: a client that gives up
//! first has taken a place for nothing. With no wait, which is the default, a request is refused at once when all
//! slots are taken. **The line** ([`Limit::max_waiters`]) need not be longer than what can be served within the wait:
//! with 5 slots and requests of one second, about 10 waiters are served in two seconds.
//!
//! **The lease** ([`LimiterBuilder::lease`]) is how long the slots of a crashed replica stay taken, and how long a
//! held permit survives when the store is gone. It has nothing to do with how long a request takes. **The waiter TTL**
//! ([`LimiterBuilder::waiter_ttl`]) is the same for places in line.
//!
//! **The store timeout** ([`LimiterBuilder::store_timeout`]) is the most that a sick store can delay a request. It
//! should be far longer than a round trip; a pause of the store that exceeds it counts as an outage.
//!
//! **Several limits on one request**, such as one for each caller and one for all, are a list in one layer
//! ([`Policy`]), or a semaphore [`and`](Semaphore::and) another. They are taken together: a request that one of them
//! refuses leaves nothing in the others. Who has to wait takes a slot of its own before one of those that all share:
//! see [`Class`]. With two layers in place of a list that would depend on their order.
//!
//! **A rate** ([`Limit::rate`]) counts beginnings, and holds nothing. Over any time `t` it gives at most
//! `count x t / period +` [`burst`](Limit::burst). Without a wait the refusal tells exactly when to come back; with one,
//! the request reserves the next free time, waits for it without a slot, and goes on then. A request is charged when it
//! comes, not when it gets its slots, and what it was charged is given back if another limit refuses it, or if it leaves
//! before it was let in (unless that would let somebody go on too early). If the store's answer is lost the request is
//! charged again. A store that has lost its data begins anew, and in an outage under `Local` each process counts by
//! itself.
//!
//! **Values for single keys**, such as customers who have paid for more: from a table, a closure that sees the request,
//! or a lookup whose answers are kept ([`Scope::values`], [`Scope::values_by`], [`Scope::values_by_async`]).
//!
//! **Short requests** that rarely reach their limit need not pay a round trip each: under [`Limit::reuse`] a slot that
//! comes free serves the next request of its process without the store, for as long as nobody waits for it elsewhere.
//! The cap stays exact; who waits in another process may be overtaken for a moment.
//!
//! **A new limit** is best tried in [`Mode::Shadow`] first: it decides, logs and counts, and admits all the same.
//! [`Limiter::update`] changes values and modes while the service runs.
//!
//! **Keys** come from callers, so look at who can choose them. A header that nobody has checked is a new key with each
//! new value. See [`Limit::by_header`] and [`Limit::by_key`], and [where the layer belongs in a stack](layer#where-it-belongs-in-a-stack).
//!
//! # When the store fails
//!
//! A request waits for the store no longer than [`store_timeout`](LimiterBuilder::store_timeout). Then the limit's own
//! policy ([`Limit::fallback`]) decides on it, and on all who wait in line:
//!
//! | policy | what happens | choose it if |
//! | --- | --- | --- |
//! | [`Local(n)`](Fallback::Local), the default with n = the limit | each process keeps to n by itself, with a line of its own | some limit is better than none, and N replicas with n each are bearable |
//! | [`Allow`](Fallback::Allow) | everybody is let in | the limit is a courtesy |
//! | [`Reject`](Fallback::Reject) | everybody is refused, with 503 in the layer | too many at once do real harm |
//!
//! Meanwhile the store is probed, at first after 50 ms and in the end once a second, and requests do not wait for it.
//! Permits that are held stay held until their lease ends. When the store is back they are renewed; what it has lost,
//! and what was admitted without it, is put back (*adopted*), so that it counts again. Until these end, more than the
//! limit may be in progress: by no more than what was held or admitted meanwhile. Who still waits joins the store's
//! line again, at its end.
//!
//! An error that only people can mend is no outage: wrong credentials, a missing permission, a key of another type.
//! It is logged as an error, and requests are refused ([`AcquireErrorKind::Misconfigured`]) whatever the policy, for a
//! gate must not open by a typing error. [`Limiter::connect`] fails if it meets one, which it does for credentials and
//! a namespace that is not permitted. It does not fail if the store cannot be reached: a service can start while its
//! store is down.
//!
//! # Lost leases
//!
//! A permit is *lost* when its lease could not be renewed in time: the store was gone, or this process stood still,
//! for most of a lease. One failed renewal is no loss. The deadline is counted on the local monotonic clock, and on
//! the safe side, so that a permit is lost here before its slot can be given to somebody else.
//!
//! A permit tells by [`Permit::lost`], a handler's slot by [`Slot::lost`]. What becomes of the response is for
//! [`LimitLayer::on_lost`] to say: it goes on, over the limit ([`OnLost::Continue`], the default), or ends in an error
//! in place of its next frame, and the service's work ends with the slot ([`OnLost::Abort`]).
//!
//! # Guarantees
//!
//! | | what holds | and what is excused |
//! | --- | --- | --- |
//! | **G1** cap | The leases of a key that are alive are at most the limit. So are the calls behind the layer, if responses end with their slots ([`OnLost::Abort`], [`max_hold`](LimitLayer::max_hold), [`idle`](LimitLayer::idle)), but for the moment that a runtime takes to drop them. | Replicas that disagree on the limit, as in a rollout: then the largest holds. Data that the store has lost. A store whose clock is stepped forward, or that stands still for longer than a lease. An outage under `Local` or `Allow`. Responses that go on after their slot was lost (`Continue`). |
//! | **G2** the holder knows | A permit counts as held only while its lease is certainly alive. Under `Abort` no frame is taken from a body after that, whatever happened to the process, and the service's work is dropped, though its reader has stopped. | What the server had taken before may still be sent. Lost data, clock steps and long stalls of the store, as above. A machine that was suspended: its monotonic clock stood still too. |
//! | **G3** fair | Waiters are let in in the order in which the store received them, over all replicas, under each limit. Nobody overtakes a waiter that is alive. | A replica that the store has not heard of for a waiter TTL may lose its places. Waiters that an outage moved. Under [`reuse`](Limit::reuse), the time that a message takes to another process; 100 ms if it is lost. |
//! | **G4** live | A free slot with a waiter is given within one round trip; if the wake-up was lost, within the poll interval. One that a process keeps under [`reuse`](Limit::reuse) is free when that hears of the waiter. A crashed replica delays the line by at most twice the waiter TTL, beyond the slots that it held. | A store whose clock is stepped back, by that length. |
//! | **G5** no leak | A slot is given back at once at the end of the body, and on any drop: error, panic, reset stream, client gone, future cancelled, shutdown. After the death of the process, within the lease. | Servers notice some clients late: see [the layer](layer#clients-that-leave). A store whose clock is stepped back keeps the slots of a dead process longer by that length, at most for an hour from when the limit is next reached. |
//! | **G6** no ghosts | A message that is late or lost or repeated leaves no holder or waiter behind that its process does not know of. | |
//! | **G7** bounded | Lines, waits, key lengths, messages, the store's work in one call: everything has a limit. All keys in the store expire. | How long a response takes is not limited by default: see [`max_hold`](LimitLayer::max_hold) and [`idle`](LimitLayer::idle). |
//! | **G8** outage | Nobody waits for a store that is down or slow for longer than `store_timeout`. | |
//! | **G9** transparent | The service's errors, readiness, frames, trailers and size hints are unchanged. | The error type of bodies is [`BoxError`]. |
//!
//! The cap is advisory. Like any lease it cannot stop a process that has lost it from writing somewhere: do not let
//! the correctness of data hang on it alone.
//!
//! # Defaults
//!
//! | setting | on | default | relations |
//! | --- | --- | --- | --- |
//! | [`lease`](LimiterBuilder::lease) | limiter | 30 s | more than 3 x `store_timeout`, at most 1 h; renewed every third of it |
//! | [`store_timeout`](LimiterBuilder::store_timeout) | limiter | 500 ms | less than `lease` / 3 |
//! | [`poll_interval`](LimiterBuilder::poll_interval) | limiter | 1 s | at most `waiter_ttl` / 3 |
//! | [`waiter_ttl`](LimiterBuilder::waiter_ttl) | limiter | 5 s | at least 3 x `poll_interval`, at most 1 h |
//! | [`namespace`](LimiterBuilder::namespace) | limiter | `turnstile` | the same for all replicas of a service |
//! | [`runtime`](LimiterBuilder::runtime), [`dedicated_thread`](LimiterBuilder::dedicated_thread) | limiter | the runtime that uses it first | |
//! | [`concurrent`](Limit::concurrent) | limit | none: it must be said | 1 to 1,000,000 |
//! | [`rate`](Limit::rate) | limit | none: it must be said | 1 to 1,000,000 in 1 ms to 24 h |
//! | [`burst`](Limit::burst) | limit, of a rate | as many as in a period | 1 to 1,000,000; less with a long period |
//! | [`mode`](Limit::mode) | limit | `Enforce` | |
//! | [`class`](Limit::class) | limit | `Caller`; `Global` for [`Key::SHARED`] | the same for all replicas |
//! | [`wait_up_to`](Limit::wait_up_to) | limit | zero: refuse at once | at most 24 h |
//! | [`max_waiters`](Limit::max_waiters) | limit | 1,000 a key | at most 100,000; without a wait there is no line |
//! | [`fallback`](Limit::fallback) | limit | `Local(limit)` | |
//! | [`reuse`](Limit::reuse) | limit, of slots | no | the right to keep slots lasts for 100 ms at a time, or a lease if that is less; those that lie idle go back after 50 to 100 ms |
//! | key | scope | [`Key::SHARED`] | [`by_header`](Limit::by_header), [`by_client_address`](Limit::by_client_address), [`by_key`](Limit::by_key), [`by_key_async`](Limit::by_key_async) |
//! | [`values`](Scope::values) | scope | the limit's own | 0 refuses a key always; of a rate at least 1 |
//! | [`cost`](Scope::cost) | scope, of a rate | 1 | at most the burst |
//! | scopes | policy | | 1 to 16, each limit once |
//! | [`on_lost`](LimitLayer::on_lost) | layer | `Continue` | |
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
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `redis` | yes | the store in Redis 6.2 or later, or Valkey: `redis://`, `valkey://`, `unix://` |
//! | `config` | | limits from a TOML file, which can change at run time: the module `config` |
//! | `tls` | | and with TLS, `rediss://` or `valkeys://`, by rustls; the application installs a crypto provider |
//! | `sentinel` | | and by Redis Sentinel, `redis+sentinel://` or `valkey+sentinel://`, with TLS `rediss+sentinel://`: see [`LimiterBuilder::connect`] |
//! | `cluster` | | and in a Redis Cluster, `redis+cluster://`, with TLS `rediss+cluster://`: see [`LimiterBuilder::connect`] |
//! | `metrics` | | [metrics](#metrics), through the facade of that name |
//!
//! Without features there is the store in memory. Events are told through [`tracing`](https://docs.rs/tracing):
//! refusals at debug level, also those that a limit in shadow mode would make; losses and outages as warnings;
//! misconfigurations as errors; never with a key or a password.
//!
//! # Metrics
//!
//! With the feature `metrics`, for whatever recorder the application installs, such as `metrics-exporter-prometheus`.
//! Install it first: handles are made with the limiter and its limits, and those that are made without a recorder
//! stay silent. Every metric is of this process alone, and has the label `namespace`.
//!
//! | metric | kind | labels | what it says |
//! | --- | --- | --- | --- |
//! | `turnstile_held` | gauge | `limit` | permits that are held; slots that are kept to be reused are not counted |
//! | `turnstile_waiting` | gauge | `limit` | requests that wait |
//! | `turnstile_admitted_total` | counter | `limit` | requests that got their permits |
//! | `turnstile_wait_seconds` | histogram, seconds | `limit` | from the request to its permit |
//! | `turnstile_hold_seconds` | histogram, seconds | `limit` | from the permit to its return or loss |
//! | `turnstile_refusals_total` | counter | `limit`, `reason` | requests that were refused, by [`AcquireErrorKind`]: `full`, `queue_full`, `timed_out`, `too_soon`, `unavailable`, `misconfigured`, `shut_down`, `no_runtime` |
//! | `turnstile_shadow_refusals_total` | counter | `limit`, `reason` | requests that a limit in [shadow mode](Mode::Shadow) let in |
//! | `turnstile_lost_total` | counter | `limit` | permits that were lost |
//! | `turnstile_adopted_total` | counter | `limit` | permits that the store did not have and that were put back |
//! | `turnstile_expired_total` | counter | `limit`, `bound` | slots that were taken back: `max_hold`, `idle` |
//! | `turnstile_aborted_total` | counter | `limit`, `reason` | responses that ended with their slot, or were refused before their head: `lost`, `max_hold`, `idle` |
//! | `turnstile_exchanges_total` | counter | `outcome` | messages to the store: `ok`, `failed`, `timed_out`, `refused` |
//! | `turnstile_exchange_seconds` | histogram, seconds | | from a message to its answer, or its end without one |
//! | `turnstile_store_up` | gauge | | 1 if the store answers, 0 if the policies apply; of a cluster the share that answers |
//! | `turnstile_breaker_opened_total` | counter | `cause` | how often the store went down: `outage`, `refused` |
//!
//! Labels have few values: never a key. The last four are not there in memory.
//!
//! # Where to go from here
//!
//! The [`layer`] module has keys of one's own, WebSockets, gRPC, the order of layers, and refusals. The
//! [`LimiterBuilder`] has the settings in full. The README has the commands to try it, what a Redis user may need to
//! do, and measurements.

// Without a store the half of the keeper that talks to one is not used.
#![cfg_attr(not(feature = "redis"), allow(dead_code, unused_imports))]

mod builder;
#[cfg(feature = "config")]
pub mod config;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod home;
mod keeper;
mod key;
pub mod layer;
mod leases;
mod ledger;
mod limit;
mod limiter;
mod part;
mod permit;
mod ranges;
#[cfg(test)]
#[path = "../tests/support/redis_server.rs"]
mod redis_server;
mod repoll;
mod semaphore;
mod small_map;
mod status;
mod store;
mod sync;
mod telemetry;
#[cfg(feature = "test-util")]
pub mod test_util;

// To begin with.
pub use builder::LimiterBuilder;
pub use limiter::Limiter;
pub use status::{ShutdownReport, Status, Usage};

// What is limited, and for whom.
pub use key::Key;
pub use limit::{
    Class, Fallback, Limit, MAX_LIMIT, MAX_PERIOD, MAX_SCOPES, MAX_WAIT, MAX_WAITERS, Mode,
};

// One slot of it.
pub use permit::Permit;
pub use semaphore::{Acquire, Semaphore};

// The same for requests.
pub use layer::{
    ClientAddress, Hold, LimitLayer, MAX_HOLD, OnLost, PeerAddress, Policy, ReadAheadLayer,
    Refusal, RefusalKind, ReleaseAt, Scope, Slot,
};

// What goes wrong.
pub use error::{
    AcquireError, AcquireErrorKind, BoxError, ConfigError, ConfigErrorKind, ReleaseError,
};

/// The examples of the README run too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
