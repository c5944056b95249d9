//! The guide: one page per question. The [crate's front page](crate) has the concepts and the guarantees.
//!
//! For everybody, before production:
//!
//! | page | answers |
//! | --- | --- |
//! | [`keys`] | Who is limited? How do several limits combine? What does a refusal look like? |
//! | [`shutdown`] | How does a process end without leaving slots behind? |
//! | [`store_failures`] | What happens when Redis is slow, down, or has lost its data? |
//!
//! For each kind of limit:
//!
//! | page | answers |
//! | --- | --- |
//! | [`number`] | Which number do I set? |
//! | [`adaptive`] | How does a limit follow an upstream whose capacity moves? |
//! | [`keep_free`] | How do I keep slots free for interactive work? How do organisations, teams and users share? |
//! | [`tenants`] | How do customers share one pool fairly, so that one customer's backlog does not delay everybody? |
//! | [`tokens`] | How do I limit a cost that is known only at the end, such as the tokens of a model? |
//! | [`streams`] | When is a slot released? How do WebSockets and gRPC work? What if a client disconnects, or stops reading? |
//! | [`clients`] | How do I limit outgoing calls? What if the upstream says when to come back? |
//! | [`not_rust`] | How do scripts, jobs and programs in other languages hold slots? |
//! | [`reuse`] | How do short requests avoid a round trip? |
//!
//! Running it:
//!
//! | page | answers |
//! | --- | --- |
//! | [`redis`] | Which Redis version, permissions, memory and failover are needed? How do I inspect a key? |
//! | [`metrics`] | What can I measure, and what should page me? |
//! | [`scaling`] | On which metric do replicas scale? How does a limit follow the capacity? |
//! | [`operating`] | Who holds slots and who waits, on which replica? Why was a caller refused? |
//! | [`config_file`] | How do limits come from a file, and change while the service runs? |
//! | [`testing`] | How do I test my service without Redis, and in an outage? |
//!
//! Reference:
//!
//! | page | answers |
//! | --- | --- |
//! | [`guarantees`] | What is promised, and where does each promise end? |
//! | [`bounds`] | Which settings, defaults and bounds are there? |
//! | [`how_it_works`] | How does it work, in short? |
//! | [`comparison`] | What do other crates and services do? |
//! | [`performance`] | How fast is it, and what does it cost? |

// Each page is a Markdown file, which can be read in the repository too. `links.md` comes first: its definitions, which
// rustdoc resolves, take precedence over the definitions at the end of a page, which link from file to file.

#[doc = include_str!("links.md")]
#[doc = include_str!("keys.md")]
pub mod keys {}

#[doc = include_str!("links.md")]
#[doc = include_str!("tenants.md")]
pub mod tenants {}

#[doc = include_str!("links.md")]
#[doc = include_str!("tokens.md")]
pub mod tokens {}

#[doc = include_str!("links.md")]
#[doc = include_str!("streams.md")]
pub mod streams {}

#[doc = include_str!("links.md")]
#[doc = include_str!("clients.md")]
pub mod clients {}

#[doc = include_str!("links.md")]
#[doc = include_str!("shutdown.md")]
pub mod shutdown {}

#[doc = include_str!("links.md")]
#[doc = include_str!("testing.md")]
pub mod testing {}

#[doc = include_str!("links.md")]
#[doc = include_str!("store_failures.md")]
pub mod store_failures {}

#[doc = include_str!("links.md")]
#[doc = include_str!("redis.md")]
pub mod redis {}

#[doc = include_str!("links.md")]
#[doc = include_str!("metrics.md")]
pub mod metrics {}

#[doc = include_str!("links.md")]
#[doc = include_str!("operating.md")]
pub mod operating {}

#[cfg(any(feature = "config", not(doctest)))]
#[doc = include_str!("links.md")]
#[doc = include_str!("config_file.md")]
pub mod config_file {}

#[doc = include_str!("links.md")]
#[doc = include_str!("not_rust.md")]
pub mod not_rust {}

#[doc = include_str!("links.md")]
#[doc = include_str!("reuse.md")]
pub mod reuse {}

#[doc = include_str!("links.md")]
#[doc = include_str!("how_it_works.md")]
pub mod how_it_works {}

#[doc = include_str!("links.md")]
#[doc = include_str!("comparison.md")]
pub mod comparison {}

#[doc = include_str!("links.md")]
#[doc = include_str!("performance.md")]
pub mod performance {}

#[doc = include_str!("links.md")]
#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("links.md")]
#[doc = include_str!("bounds.md")]
pub mod bounds {}

#[doc = include_str!("links.md")]
#[doc = include_str!("number.md")]
pub mod number {}

#[doc = include_str!("links.md")]
#[doc = include_str!("adaptive.md")]
pub mod adaptive {}

#[doc = include_str!("links.md")]
#[doc = include_str!("keep_free.md")]
pub mod keep_free {}

#[doc = include_str!("links.md")]
#[doc = include_str!("scaling.md")]
pub mod scaling {}
