//! Choices of a limit: how wide it is, whether it is enforced, and what it does without a store.

/// How many callers share one key of a limit.
///
/// A request that needs slots under several limits takes them in this order, the narrow ones first, so that one which
/// has to wait for its own caller's slot does not keep others from slots that all share. All replicas have to agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Class {
    /// A key is one caller.
    Caller,
    /// A key is a group of callers: a customer, a plan.
    Tenant,
    /// A key is a route, or a group of routes.
    Route,
    /// All share one key.
    Global,
}

/// Whether a limit is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Mode {
    /// It is.
    #[default]
    Enforce,
    /// It only looks on: it decides, counts and tells, and admits whoever it would have refused or made wait. These
    /// take no slot, as if they had been refused. For trying a limit on real traffic.
    Shadow,
    /// It is not asked.
    Off,
}

/// What a limit does while its store cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Each process keeps to this limit by itself, with the same fair line in memory. The default, with the limit's
    /// own value. With N replicas up to N times as many permits may then be held in all.
    Local(u32),
    /// Every request is admitted.
    Allow,
    /// Every request is refused.
    Reject,
}
