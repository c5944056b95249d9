//! Choices of a limit: its class, its mode, and its fallback without a store.

/// States how many callers share one key of a limit.
///
/// A request under several limits acquires its slots in this order, narrow before wide: while it waits for its own caller's
/// slot, it holds no shared slot. Limits of one class are ordered by value, the smaller first, then by name. All replicas have to
/// agree on the class.
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
    derive(serde::Deserialize, serde::Serialize),
    cfg_attr(test, derive(schemars::JsonSchema)),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Mode {
    /// The limit is enforced.
    #[default]
    Enforce,
    /// The limit is evaluated, counted and, by layers, logged, but admits every request, unless an operator has paused
    /// it or the limiter is shutting down. Nobody waits for it: requests that would have queued count as refused. Requests
    /// that the enforced limit would refuse as invalid (400) do not.
    ///
    /// A request that the limit would have refused or queued takes none of its slots. A slot that a request does take
    /// never ends the request: if the slot is lost, or reaches a bound of its layer
    /// ([`max_hold`](crate::LimitLayer::max_hold), [`idle`](crate::LimitLayer::idle)), the slot alone ends, and is counted
    /// so. Keys and values are looked up as under an enforced limit. Use it to try a limit on real traffic.
    Shadow,
    /// The limit is not evaluated, and no keys or values are looked up for it ([`by_key_async`](crate::Limit::by_key_async),
    /// [`values_by_async`](crate::Scope::values_by_async)). It still refuses while an operator has paused it, and once the
    /// limiter is shutting down.
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
    /// Each process enforces this value separately, with a queue in memory.
    ///
    /// The default, with the limit's own value. A key with its own value has that value in each process, unless the
    /// fallback's value is below the limit: then the fallback's value caps every key. With N replicas, up to N times as
    /// many permits may then be held in total. With a lower value, newcomers wait after an outage, as under
    /// [`Share`](Self::Share).
    Local(u32),
    /// Each process enforces its share of the limit, with a queue in memory.
    ///
    /// The share is the value of the key, divided by the number of replicas that were connected to the namespace when
    /// the store was last seen, rounded up: of 40 slots each of three replicas has 14. A rate's burst is divided too. Like
    /// [`Local`](Self::Local), it counts the permits that the process already holds. Use it if the limit should still hold
    /// in an outage: the limit is exceeded by at most one permit for each replica, plus whatever a replica held above its
    /// share when the outage began.
    ///
    /// The number of replicas is read from the store every ten seconds, so a replica that has left counts for that
    /// long. A replica connects once it has a limit with this fallback. One that connected less than ten seconds before
    /// an outage admits no request in it, since the others may not have counted it. The same applies if the store does
    /// not permit `PUBSUB NUMSUB`. If only one replica is cut off from the store, it admits its share on top of what
    /// the store grants to the others; see
    /// [`Limit::fallback_for`](crate::Limit::fallback_for). After an outage newcomers wait until all replicas have recorded
    /// in the store what they have admitted: for two [`store_timeout`](crate::LimiterBuilder::store_timeout)s, or one and
    /// 500 ms if that is longer. In a cluster each of its parts counts the replicas.
    Share,
    /// Every request is admitted.
    Allow,
    /// Every request is refused.
    Reject,
}
