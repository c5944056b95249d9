//! Limits from a file: which requests are held to what, and how that changes while the service runs.
//!
//! A [`Config`] is plain data, made from TOML ([`Config::from_file`]), by another format of serde, or in code. A
//! [`LimitLayer`](crate::LimitLayer) made from it finds the route of each request by itself, so that it can stand before
//! any service, with or without a router. A [`LiveConfig`] takes a new configuration into use while requests come.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_turnstile::config::ConfigFileError> {
//! use tower_turnstile::config::{Config, LiveConfig};
//! # struct Router;
//! # impl Router { fn layer(self, _: tower_turnstile::LimitLayer) {} }
//! # let router = Router;
//!
//! let path = "examples/config.toml";
//! let live = LiveConfig::connect(&Config::from_file(path).await?).await?;
//! let app = router.layer(live.layer());
//!
//! // Whenever the file has changed, on SIGHUP or by a watcher:
//! let config = Config::from_file(path).await;
//! if let Err(error) = config.and_then(|config| live.reload(&config)) {
//!     eprintln!("the old limits stay:\n{error}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The file
//!
//! This is the file of the example `config`, a server on bare hyper that reads it again on SIGHUP.
//!
#![doc = "```toml"]
#![doc = include_str!("../../examples/config.toml")]
#![doc = "```"]
//!
//! Times are written as people do: `"500ms"`, `"2s"`, `"1m 30s"`, `"1h"`. A field that is not known is an error.
//!
//! | section | field | default |
//! | --- | --- | --- |
//! | at the top | `last_line`: a comment, which ends the file | any line ends it |
//! | | `unlimited`: no route has a limit | `false`: at least one has |
//! | `[store]` | `url`: a string, or `{ env = "REDIS_URL" }` | `"memory:"` |
//! | | `namespace`, `lease`, `store_timeout`, `poll_interval`, `waiter_ttl` | those of the [`LimiterBuilder`](crate::LimiterBuilder) |
//! | `[plans.<name>]` | `keys`: those of the callers | none; nobody is in two plans |
//! | `[limits.<name>]` | `concurrent`, or `rate` and `per` | none: one of them must be said |
//! | | `burst` of a rate | as many as in a period |
//! | | `key`: `"shared"`, `"route"`, `{ header = "<name>" }`, `"client-address"`, `{ client-address = { proxies = 1, header = "x-forwarded-for", ipv6_prefix = 64 } }` with that header or `"forwarded"` | `"shared"` |
//! | | `require_key`: requests without a key are refused with 400 | `false`: they share one |
//! | | `class`: `"caller"`, `"tenant"`, `"route"`, `"global"` | by the key |
//! | | `wait` | zero: refuse at once |
//! | | `max_waiters` | 1,000 a key |
//! | | `reuse`, not of a rate: see [`Limit::reuse`](crate::Limit::reuse) | `false` |
//! | | `unrouted`: no route has it, only the program uses it | `false`: at least one has it |
//! | | `mode`: `"enforce"`, `"shadow"`, `"off"` | `"enforce"` |
//! | | `fallback`: `"local"`, `{ local = 3 }`, `"allow"`, `"reject"` | `"local"`, with the limit's own value |
//! | | `plans`: values for plans | none |
//! | | `overrides`: values for single keys, which go before plans | none |
//! | `[[routes]]` | `match`: patterns | none: at least one must be said |
//! | | `limits`: names, at most 16 | none: requests pass |
//! | | `name` | the first pattern |
//! | | `on_lost`: `"continue"`, `"abort"` | `"continue"` |
//! | | `at_shutdown`: `"continue"`, `"abort"` | as `on_lost` |
//! | | `release_at`: `"body-end"`, `"head"` | `"body-end"` |
//! | | `limited_status` | 429, or 503 if all callers share the limit |
//! | | `unavailable_status` | 503 |
//! | | `max_hold`, `idle` | no bound |
//! | | `rate_limit_fields` | `false` |
//!
//! Keys of plans and overrides are as callers send them: the value of the header, or the client's address. Of a limit
//! by route they are the names of routes. A key of its own in code, or a value that is looked up, needs a layer in code:
//! see [`LiveConfig::limit`]. By `"client-address"` the peer is found as [`PeerAddress`](crate::PeerAddress), which the
//! server has to put into the extensions of requests.
//!
//! # Routes
//!
//! A pattern is a path, with a method before it or for all methods: `POST /v1/chat/{id}`. `{id}` is one segment,
//! `{*rest}`, at the end, one or more; the path before `{*rest}` is a pattern of its own. `*` is whatever no other
//! pattern matches. The syntax is that of [`matchit`] 0.9, which is that of axum. Braces are doubled (`{{`) to stand for
//! themselves.
//!
//! - Of the patterns that take the method and match the path, the most specific one counts, wherever it stands in the
//!   file: one segment after the other, a literal goes before `{id}`, and that before `{*rest}`. Of the same path with
//!   and without a method, the one with it counts. Patterns that neither order decides are an error.
//! - A pattern for `GET` takes `HEAD` too, unless there is one for `HEAD`.
//! - A request that no pattern matches passes without limits. To be sure of all requests, end with `*`.
//! - Hosts and queries do not matter.
//! - The path is that of the request as it comes to the layer. In a nested router of axum that is without the prefix of
//!   the nest: there the layer belongs on the outer router, or the patterns leave the prefix out.
//! - A pattern is written decoded: `/grün`, which `/gr%C3%BCn` is read as.
//!
//! **This does not replace the service's router, and has to agree with it.** Servers differ in what they make of
//! unusual paths, and who can spell a path so that it is found by the service and not here has no limits. So a path is
//! looked up in all its readings: as it stands; percent-decoded (with and without the slashes); without empty segments
//! (`//`); with `.` and `..` resolved; with backslashes as slashes; and whatever comes of doing these one after the
//! other. A slash at the end makes no difference. If the readings lead to several routes, the request is held to the
//! limits of all of them, with the strictest of their settings, and the statuses of the first in the file. So `/projects/a%2Fb` may be under those of
//! `/projects/{id}` and of `/projects/{id}/{*rest}`. A path with more than 100 readings, or 64 KiB of them, is refused
//! with 400 if there is a route for its method, and one whose routes have more than 16 limits together.
//!
//! Not looked at, since few servers do it: upper and lower case as the same, parameters in a path (`/chat;v=1`), other
//! encodings than UTF-8, and methods in a header (`X-HTTP-Method-Override`). If yours does, use `*`.
//!
//! # What is wrong with a file
//!
//! The first place that is not TOML, has an unknown field or a value of another type is told with its line and TOML's
//! message. When the text reads well, all other faults are told at once, each with its path:
//!
//! ```
//! # use tower_turnstile::config::Config;
//! let error = Config::from_toml("[limits.chat]\nconcurent = 5").unwrap_err();
//! assert!(error.to_string().starts_with("line 2, column 1: unknown field, expected one of `concurrent`"));
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
//!      routes[0].limits[0]: there is no limit `caht`",
//! );
//! ```
//!
//! The store's URL and the keys of callers are secrets: no message and no `Debug` output has them, even if they stand in the
//! wrong place or without quotes. So messages quote neither the line nor values or unknown names: they tell the place, and
//! what belongs there. (The parsers of other formats have messages of their own.)
//!
//! # A file that was cut short
//!
//! An editor empties a file and then writes it; a disk is full; a copy stops. What has come of the file until then may
//! read well, and limit less. To rule that out, end the file with a comment, and begin it with that comment's text:
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
//! Then a part of the file is never taken for all of it. Without it a file is refused
//!
//! - if none of its routes has a limit, as if it is empty or ends before the routes. If that is meant, it says
//!   `unlimited = true` at the top.
//! - if one of its limits has no route. If only the program uses that limit, it says `unrouted = true`.
//! - if it ends in a number without a line break, which may have had more digits.
//! - if it changes while [`Config::from_file`] reads it, within a tenth of a second. It does not help if the writer stops for
//!   longer, or for good.
//!
//! So what can still be lost are whole lines at the end: routes whose limits other routes have too, settings of the last
//! section, and a `[store]` that stands last (without it a service begins with a store in memory; a reload refuses that). To
//! change a file at once, write another one beside it and rename that.
//!
//! # A new file
//!
//! [`LiveConfig::reload`] checks all of it before it changes anything. What holds then for requests that wait and slots
//! that are held is said there. The file is read by the program, when it likes: this module does not watch it.
//!
//! # The module
//!
//! | piece | what it does |
//! | --- | --- |
//! | `sections` | the sections as plain data: `store`, `limit`, `key`, `route` |
//! | `read` | a string or a table, in serde |
//! | `error` | what is wrong, and where |
//! | `load`, `file` | reads and checks a configuration; a file that is read while it may be written |
//! | `check` | all checks, and the limits that come of it |
//! | `routes`, `paths` | the route of a request; the readings of a path |
//! | `table` | the layer of each route |
//! | `live` | the table in use, and the next one |
//!
//! [`matchit`]: https://docs.rs/matchit/0.9

mod check;
mod error;
mod file;
mod key;
mod limit;
mod live;
mod load;
mod paths;
mod read;
mod route;
mod routes;
mod sections;
mod store;
mod table;

pub use self::{
    error::{ConfigFileError, Fault},
    key::{AddressConfig, AddressHeader, CallerKey, KeyConfig},
    limit::{LimitConfig, PlanConfig},
    live::LiveConfig,
    route::RouteConfig,
    sections::Config,
    store::{StoreConfig, StoreUrl},
};
