//! Limits, routes and the store from a file, reloaded while the service runs.
//!
//! A [`Config`] is plain data, from TOML ([`Config::from_file`]) or another format of serde; code can change its settings. A
//! [`LimitLayer`](crate::LimitLayer) made from a configuration matches the route of each request itself, so it works in
//! front of any service, with or without a router. A [`LiveConfig`] can be reloaded while the service runs.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_turnstile::config::ConfigFileError> {
//! use tower_turnstile::config::{Config, LiveConfig};
//! # struct Router;
//! # impl Router { fn layer(self, _: tower_turnstile::LimitLayer) {} }
//! # let router = Router;
//! # std::env::set_current_dir("..").unwrap();
//!
//! let path = "examples/config.toml";
//! let live = LiveConfig::connect(&Config::from_file(path).await?).await?;
//! let app = router.layer(live.layer());
//!
//! // Whenever the file has changed, on SIGHUP or by a watcher:
//! let config = Config::from_file(path).await;
//! if let Err(error) = config.and_then(|config| live.reload(&config)) {
//!     eprintln!("the old limits stay in force:\n{error}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The file
//!
//! This file belongs to the example `config`, a server on bare hyper that reloads the file on SIGHUP.
//!
#![doc = "```toml"]
#![doc = include_str!("../../examples/config.toml")]
#![doc = "```"]
//!
//! Durations are written like `"500ms"`, `"2s"`, `"1m 30s"` and `"1h"`. An unknown field is an error.
//!
//! | section | field | default |
//! | --- | --- | --- |
//! | at the top | `last_line`: a comment, which ends the file | any line |
//! | | `unlimited`: no route has a limit | `false`: at least one has |
//! | `[store]` | `url`: a string, or `{ env = "REDIS_URL" }` | `"memory:"` |
//! | | `namespace`, `lease`, `store_timeout`, `poll_interval`, `waiter_ttl`, `operable`, `replica_label`, `show_keys` | as in the [`LimiterBuilder`](crate::LimiterBuilder) |
//! | `[plans.<name>]` | `keys`: the callers' keys | none; a key is in one plan at most |
//! | `[limits.<name>]` | `concurrent`, or `rate` and `per` | none: one of them is required |
//! | | `burst` of a rate | the rate |
//! | | `unit` of a rate, such as `"tokens"`, for refusals, fields and operators | `"requests"` |
//! | | `cost` of a request at a rate: a number, or `{ header = "x-prompt-tokens" }`, which refuses a value that is not a number with 400 (see [`Scope::cost_by_header`](crate::Scope::cost_by_header)); only code can spend later: see [Token budgets](crate::guide::tokens) | 1 |
//! | | `clamp_cost`: a cost above the burst counts as the burst | `false`: the request is refused with 400 |
//! | | `key`: `"shared"`, `"route"`, `{ header = "<name>" }`, `{ bearer = "<name>" }` for the token in `Bearer <token>`, `{ any_of = [{ bearer = "authorization" }, { header = "x-api-key" }] }` for the first key that a request has, `"client-address"`, `{ client-address = { proxies = 1, header = "x-forwarded-for", ipv6_prefix = 64 } }` with that header or `"forwarded"` | `"shared"` |
//! | | `require_key`: requests without a key are refused with 400 | `true` for `bearer` and `any_of`; otherwise `false`: they share one key |
//! | | `class`: `"caller"`, `"tenant"`, `"route"`, `"global"` | by the key |
//! | | `wait`, or `{ at_most = "30s", header = "x-max-wait" }`, in which a caller may ask for a shorter one in seconds: see [`Scope::wait_by_header`](crate::Scope::wait_by_header) | zero: refuse at once |
//! | | `max_waiters` | 1,000 per key |
//! | | `reuse`, not for a rate: see [`Limit::reuse`](crate::Limit::reuse) | `false` |
//! | | `fair`, not for a rate: `true`, or `{ by = { header = "x-tenant" }, shares = { acme = 3 }, plans = { gold = 3 } }`, where `by` has the form of a `key` by headers or address: see [Tenants](crate::guide::tenants) | `false`: first come, first served |
//! | | `require_tenant`: requests without a tenant are refused with 400 | `false`: all of them are one tenant |
//! | | `unrouted`: no route has the limit, only code uses it | `false`: at least one route has the limit |
//! | | `outcome`, not for a rate: `"overload"` pauses the limit for the key of a response that asks for it: see [`Scope::outcome_by`](crate::Scope::outcome_by); `{ slower_than = "2s" }` also judges a later head as overloaded, for `adapt` | none |
//! | | `adapt`, not for a rate: `{ floor = 5, ceiling = 400 }`, within which the limit finds its own value: see [Adaptive limits](crate::guide::adaptive) | the value is fixed |
//! | | `pause_at_most`, up to 1 hour | `"60s"` |
//! | | `mode`: `"enforce"`, `"shadow"`, `"off"` | `"enforce"` |
//! | | `fallback`: `"local"`, `{ local = 3 }`, `"share"`, `"allow"`, `"reject"` | `"local"`, with the limit's own value |
//! | | `fallback_for`: for how long the fallback may decide in all | as long as the store is down |
//! | | `plans`: values for plans: numbers, or for a rate `{ rate = 100, burst = 20 }`; a number has the limit's `burst` | none |
//! | | `overrides`: values for single keys, in the same form, which take precedence over plans | none |
//! | `[[routes]]` | `match`: patterns | none: at least one is required |
//! | | `limits`: names, at most 16 | none: requests pass |
//! | | `name` | the first pattern |
//! | | `escaped_slashes`: paths may have [escaped slashes](#ambiguous-paths) in a segment | `false`: the request is refused with 400 |
//! | | `weight`: units, 1 to 64, that a request takes of each concurrent limit: see [`Scope::weight_by`](crate::Scope::weight_by) | 1 |
//! | | `on_lost`: `"continue"`, `"abort"` | `"continue"` |
//! | | `at_shutdown`: `"continue"`, `"abort"` | as `on_lost` |
//! | | `release_at`: `"body-end"`, `"head"` | `"body-end"` |
//! | | `limited_status` | 429 with a `key`, else 503 |
//! | | `unavailable_status` | 503 |
//! | | `max_hold`, `idle` | no bound |
//! | | `rate_limit_fields` | `false` |
//!
//! Keys of plans and overrides are written as callers send them: the value of the header, or the client's address. For a
//! limit by route, the keys are the names of routes. Keys and values that are computed in code need a layer in code: see
//! [`LiveConfig::limit`]. For `"client-address"` the server has to put [`PeerAddress`](crate::PeerAddress) into the
//! extensions of requests.
//!
//! # Routes
//!
//! A pattern is a path, optionally with a method: `POST /v1/chat/{id}`. `{id}` matches one segment, or the rest of one after
//! a text (`/img-{id}`); `{*rest}` at the end matches one or more; the path before `{*rest}` needs its own pattern. `*`
//! matches requests that no other pattern matches. The syntax comes from [`matchit`] 0.9, as in axum, but without a text
//! after a parameter (`{name}.zip`); literal braces are doubled (`{{`).
//!
//! - The most specific pattern wins, wherever it is in the file: segment by segment, a literal before `{id}` before
//!   `{*rest}`; for the same path, a pattern with a method before a pattern without. Two patterns that match the same
//!   requests without such an order are an error.
//! - A pattern for `GET` also matches `HEAD`, unless there is a pattern for `HEAD`.
//! - A request that no pattern matches is not limited. To cover all requests, end with `*`.
//! - Host and query are ignored.
//! - Patterns match the path that the layer sees. In a nested axum router this path lacks the prefix of the nest: put the
//!   layer on the outer router, or leave the prefix out of the patterns.
//! - Patterns are written decoded: `/grün` matches `/gr%C3%BCn`.
//!
//! # Ambiguous paths
//!
//! **The patterns do not replace the service's router, and have to agree with it.** Servers read unusual paths
//! differently, and a caller who finds a spelling that reaches the service but matches no pattern would have no limit. So
//! the layer looks up the canonical form of a path: percent-decoded, without empty segments (`//`), with `.` and `..`
//! resolved. A slash at the end makes no difference. A request is refused with 400 if there is a route for its method, and
//!
//! - the raw path, or the path only decoded or only resolved, leads to another route: with the patterns `/chat/{*rest}` and
//!   `/free`, the path `/chat/../free` may reach either. A form that matches no pattern does not count.
//! - the path has an escaped slash or dot segment, a backslash, an escape of an escape (`%2541`), or empty segments
//!   beside dot segments: proxies and routers disagree where its segments end. If the service's router does not decode
//!   slashes before it matches a path, as in axum, set `escaped_slashes = true` for the routes that need them:
//!   `/projects/a%2Fb` is then on the route of `/projects/{id}`. `/projects/..%2Fb` is still refused.
//!
//! Logs and metrics show these refusals as the limit `ambiguous-path`, with the reason `ambiguous_path`. No limit of a
//! file may have this name.
//!
//! The canonical form does not cover case-insensitive paths, path parameters (`/chat;v=1`), encodings other than UTF-8,
//! and methods in a header (`X-HTTP-Method-Override`), which few servers support. If your server does, use `*`.
//!
//! # Errors in a file
//!
//! Places that are not TOML are reported at once, with their lines and TOML's messages; then unknown fields and values of
//! the wrong type, with their lines; then all other errors, each with its path:
//!
//! ```
//! # use tower_turnstile::config::Config;
//! let error = Config::from_toml("[limits.chat]\nconcurent = 5\nwait = 2").unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "line 2, column 1: there is no field `concurent`: did you mean `concurrent`?\n\
//!      line 3, column 8: invalid type: integer, expected a duration or a table",
//! );
//!
//! let error = Config::from_toml(
//!     "
//!     limits.chat.concurrent = 0
//!     routes = [{ match = ['/chat'], limits = ['caht'] }]
//!     ",
//! )
//! .unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "limits.chat.concurrent: limit `chat` is 0: it must be 1 to 1000000\n\
//!      routes[0].limits[0]: there is no limit `caht`: did you mean `chat`?",
//! );
//! ```
//!
//! The store's URL and the keys of callers are secrets: no message and no `Debug` output contains them, even if they are in
//! the wrong place or lack quotes. So messages quote neither lines nor values, and an unknown name only if it resembles a
//! known one: they give the location and the expected value. (The parsers of other formats have their own messages.)
//!
//! # A file that was cut short
//!
//! An editor truncates a file before it writes it; a disk is full; a copy stops. The written part may parse, and limit
//! less. To rule this out, end the file with a comment, and begin it with the comment's text:
//!
//! ```toml
//! last_line = "# end"
//!
//! [limits.chat]
//! # ...
//!
//! # end
//! ```
//!
//! A part of the file is then never taken for the whole. With or without it, a file is refused
//!
//! - if none of its routes has a limit, for example because the file is empty or ends before the routes. If you want no
//!   limits, set `unlimited = true` at the top.
//! - if one of its limits has no route. If only code uses this limit, set `unrouted = true`.
//! - if it ends in a number without a line break, which may have had more digits.
//! - if it changes while [`Config::from_file`] reads it, within a tenth of a second. This check does not catch a writer
//!   that pauses for longer, or stops for good.
//!
//! Without `last_line`, only whole lines at the end can be lost: routes whose limits other routes have too, settings of
//! the last section, and a `[store]` at the end (without which a service starts with a store in memory; a reload
//! refuses this change). To replace a file atomically, write another file beside it and rename it.
//!
//! # Reloading
//!
//! [`LiveConfig::reload`] checks the whole configuration before it changes anything, and documents what happens to queued
//! requests and held slots. The application decides when to read the file: this module does not watch it.
//!
//! [`matchit`]: https://docs.rs/matchit/0.9

// | module | contents |
// | --- | --- |
// | `sections` | the sections as plain data: `store`, `limit`, `key`, `fair`, `plan`, `route` |
// | `word_or_table` | a word, number or boolean, or else a table; secrets, in serde |
// | `optional` | optional fields as settings |
// | `error` | faults, with their locations |
// | `load`, `toml_faults`, `file` | reads and checks a configuration; finds all faults of a text; reads a file that may be written meanwhile |
// | `schema` | tests: generates `schema.json` from the sections' types |
// | `checked` | all checks, and the resulting limits |
// | `routes`, `paths` | the route of a request; the canonical form of a path |
// | `layers` | the layer of each route |
// | `live` | the layers in use, and the next ones |
// | `preview` | previews the limits of a request |

mod checked;
mod cost;
mod error;
mod fair;
mod file;
mod key;
mod layers;
mod limit;
mod live;
mod load;
mod optional;
mod paths;
mod plan;
mod preview;
mod route;
mod routes;
#[cfg(test)]
mod schema;
mod sections;
mod store;
mod toml_faults;
mod word_or_table;

pub use self::{
    error::{ConfigFileError, Fault},
    key::CallerKey,
    limit::LimitConfig,
    live::LiveConfig,
    preview::{LimitPreview, RequestPreview},
    route::RouteConfig,
    sections::Config,
    store::{StoreConfig, StoreUrl},
};
