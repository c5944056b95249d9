//! Choices of a limit: its class, its mode, and its fallback without a store.

/// States how many callers share one key of a limit.
///
/// A request under several limits acquires its slots in this order, narrow before wide: while it waits for its own caller's
/// slot, it holds no shared slot. All replicas have to agree on the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    cfg_attr(test, derive(schemars::JsonSchema)),
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
    /// All callers share one key.
    Global,
}

/// States whether a limit is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    any(feature = "config", feature = "operate"),
    derive(serde::Deserialize),
    cfg_attr(test, derive(schemars::JsonSchema)),
    serde(rename_all = "kebab-case")
)]
#[cfg_attr(feature = "operate", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Mode {
    /// The limit is enforced.
    #[default]
    Enforce,
    /// The limit is evaluated, logged and counted, but admits every request.
    ///
    /// A request that the limit would have refused or queued takes none of its slots. Use it to try a limit on real
    /// traffic.
    Shadow,
    /// The limit is not evaluated.
    Off,
}

impl Mode {
    /// Returns the mode in a word, such as `enforce`: the same as in a configuration file and in the answers for operators.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
            Self::Off => "off",
        }
    }
}

/// Decides about requests while the store cannot be reached.
///
/// See [When the store fails](crate::guide::store_failures).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Each process enforces this value separately, with a fair queue in memory.
    ///
    /// The default, with the limit's own value. With N replicas, up to N times as many permits may then be held in total.
    Local(u32),
    /// Every request is admitted.
    Allow,
    /// Every request is refused.
    Reject,
}
