//! The guide: one page per topic, for services in production or on the way there.
//!
//! Start with [`keys`] and [`shutdown`]; the other pages are for when you need them. The [crate's front page](crate) has
//! the concepts, guarantees and defaults.
//!
//! | page | answers |
//! | --- | --- |
//! | [`keys`] | Who is limited? How do several limits combine? Which values are right? What does a refusal look like? |
//! | [`tenants`] | How do customers share one pool fairly, so that nobody's backlog stands in front of everybody? |
//! | [`tokens`] | How do I limit a cost that is known only at the end, such as the tokens of a model? |
//! | [`streams`] | When is a slot released? How do WebSockets and gRPC work? What if a client disconnects, or stops reading? |
//! | [`clients`] | How do I limit outgoing calls? What if the upstream says when to come back? |
//! | [`shutdown`] | How does a process end without leaving slots behind? |
//! | [`testing`] | How do I test my service without Redis, and its behaviour in an outage? |
//! | [`store_failures`] | What happens when Redis is slow, down, or has lost its data? |
//! | [`redis`] | Which version, permissions, memory and failover does Redis need? How do I look into a key? |
//! | [`metrics`] | What can I measure, and what should page me? |
//! | [`operating`] | Who holds slots and who waits, on which replica? Why was a caller refused? |
//! | [`config_file`] | How do limits come from a file, and change while the service runs? |
//! | [`not_rust`] | How do scripts, jobs and programs in other languages hold slots? |
//! | [`reuse`] | How do short requests avoid a round trip? |
//! | [`how_it_works`] | How does it work, in two pages? |
//! | [`comparison`] | What do other crates do? |
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
