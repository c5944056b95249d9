//! Errors: faults of the configuration, and reasons for refusals.
//!
//! Tests: `tests/security/errors.rs`.

use std::{borrow::Cow, error::Error, fmt, time::Duration};

use crate::{ranges::MAX_WEIGHT, reason::impl_codes, status::Quota, unit::Unit};

/// Error of a service or a body: any error that can be sent between threads.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Error for a limit, limiter or layer that cannot work as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    kind: ConfigErrorKind,
    message: String,
}

/// Reason for a [`ConfigError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// A value is out of range, or two values are inconsistent.
    Value,
    /// Two limits with the same name have different values.
    Conflict,
    /// The store's URL cannot be parsed, or its scheme is unknown.
    Url,
    /// The store refused the credentials.
    Credentials,
    /// The store's user may not use a required command, key or channel.
    Permission,
    /// The store answers but cannot be used: it is not Redis, too old, or configured differently.
    Store,
    /// The store cannot be reached, and [`require_store`](crate::LimiterBuilder::require_store) is set.
    Unreachable,
    /// There is no Tokio runtime with timers and IO, or no thread for the background task.
    Runtime,
}

impl_codes!(ConfigErrorKind {
    Value,
    Conflict = ConflictingLimits,
    Url,
    Credentials,
    Permission,
    Store,
    Unreachable = Unavailable,
    Runtime = NoRuntime,
});

impl ConfigError {
    pub(crate) fn new(kind: ConfigErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn value(message: impl Into<String>) -> Self {
        Self::new(ConfigErrorKind::Value, message)
    }

    pub(crate) fn unreachable(why: impl fmt::Display) -> Self {
        let message = format!("the store cannot be reached: {why}");
        Self::new(ConfigErrorKind::Unreachable, message)
    }

    /// Returns the reason.
    pub fn kind(&self) -> ConfigErrorKind {
        self.kind
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ConfigError {}

/// Error of a request that got no permit.
#[derive(Clone, PartialEq, Eq)]
pub struct AcquireError {
    pub(crate) kind: AcquireErrorKind,
    /// Boxed, since the error determines the size of the result of each step of a request.
    pub(crate) details: Box<AcquireErrorDetails>,
}

/// The limit that refused, and its state.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct AcquireErrorDetails {
    pub(crate) limit_name: Cow<'static, str>,
    /// Only for a rate.
    pub(crate) period: Option<Duration>,
    /// The unit of the limit.
    pub(crate) unit: Unit,
    /// Whether all callers share the limit.
    pub(crate) is_shared: bool,
    pub(crate) max: u32,
    pub(crate) weight: u32,
    pub(crate) cost: u32,
    pub(crate) in_use: u32,
    pub(crate) waiting: u32,
    pub(crate) place: Option<u32>,
    pub(crate) waited: Duration,
    pub(crate) retry_after: Option<Duration>,
    /// The limits that the request was under, as this process last knew them.
    pub(crate) quotas: Vec<Quota>,
}

/// The reason of an [`AcquireError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireErrorKind {
    /// No slot is free, and the request does not wait; or the value of the key is 0, under which nobody waits.
    Full,
    /// All slots are in use, and the queue is full.
    QueueFull,
    /// No slot became free within the wait.
    TimedOut,
    /// The rate is used up, and the next permit would come after the wait.
    TooSoon,
    /// The request needs more units than the limit has, or its weight is not 1 to 64: the same request would be refused
    /// again.
    InvalidWeight,
    /// The request costs more than the burst of the rate: the same request would be refused again.
    InvalidCost,
    /// A budget names a limit that is not a rate of its permit: a typo, or a limit that the request does not have.
    ///
    /// See [`Permit::budget`](crate::Permit::budget).
    UnknownRate,
    /// A pause names a limit that has no slots for its permit: a typo, a rate, or a limit that the request does not have.
    ///
    /// See [`Permit::pause`](crate::Permit::pause).
    UnknownLimit,
    /// The store is down or too slow, and no fallback admits the request. Or the store is back, permits are still being
    /// entered into it, and the request does not wait.
    Unavailable,
    /// The store refuses: credentials, permissions, or a key of another type. The log has the details.
    Misconfigured,
    /// The limiter is shutting down.
    ShutDown,
    /// An operator has paused this limit, or an overloaded upstream this key ([`Scope::outcome_by`](crate::Scope::outcome_by)):
    /// no request is admitted for a time.
    Paused,
    /// There is no Tokio runtime for the background task, or one without timers or IO.
    ///
    /// See [`enable_all`](tokio::runtime::Builder::enable_all).
    NoRuntime,
}

/// A release that the store has not confirmed in time. The limiter retries it in the background.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseError {
    limit_name: String,
    lease: Duration,
}

impl_codes!(AcquireErrorKind {
    Full,
    QueueFull,
    TimedOut,
    TooSoon,
    InvalidWeight,
    InvalidCost,
    UnknownRate,
    UnknownLimit,
    Unavailable,
    Misconfigured,
    ShutDown,
    Paused,
    NoRuntime,
});

impl ReleaseError {
    pub(crate) fn new(limit_name: String, lease: Duration) -> Self {
        Self { limit_name, lease }
    }

    /// Returns the name of the limit.
    pub fn limit_name(&self) -> &str {
        &self.limit_name
    }
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit_name, lease } = self;
        write!(
            f,
            "the store has not confirmed the release of a slot of limit `{limit_name}`: \
             it is retried, and the slot is free at the latest when its lease of {lease:?} ends"
        )
    }
}

impl Error for ReleaseError {}

/// Reason why a slot ended before its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostErrorKind {
    /// The lease was not renewed in time.
    Lost,
    /// The limiter was shut down, and its deadline has passed.
    ShutDown,
    /// The slot was held as long as [`LimitLayer::max_hold`](crate::LimitLayer::max_hold) allows.
    HeldTooLong,
    /// The response was unread for as long as [`LimitLayer::idle`](crate::LimitLayer::idle) allows.
    Idle,
    /// An operator has revoked the permit. The slot stays taken until the permit is dropped.
    Revoked,
}

impl_codes!(LostErrorKind {
    Lost,
    ShutDown,
    HeldTooLong,
    Idle,
    Revoked
});

impl AcquireError {
    pub(crate) fn new(kind: AcquireErrorKind, details: AcquireErrorDetails) -> Self {
        Self {
            kind,
            details: Box::new(details),
        }
    }

    /// Returns the reason.
    pub fn kind(&self) -> AcquireErrorKind {
        self.kind
    }

    /// Returns whether a limit was reached. If not, the store or the limiter is unavailable, the limit is paused, the
    /// weight or the cost is invalid, or the rate or the limit is unknown.
    pub fn is_limited(&self) -> bool {
        matches!(
            self.kind,
            AcquireErrorKind::Full
                | AcquireErrorKind::QueueFull
                | AcquireErrorKind::TimedOut
                | AcquireErrorKind::TooSoon
        )
    }

    /// Returns the name of the limit that refused.
    pub fn limit_name(&self) -> &str {
        &self.details.limit_name
    }

    /// Returns the limit's value for this key. For a cost that is too high, returns the burst; for a weight that no key
    /// accepts, which is one outside 1 to 64, the limit's own value.
    pub fn max(&self) -> u32 {
        self.details.max
    }

    /// Returns the units that the permit would have had. See [`Semaphore::acquire_many`](crate::Semaphore::acquire_many).
    pub fn weight(&self) -> u32 {
        self.details.weight
    }

    /// Returns the request's cost if the rate refused it as too high; otherwise 1.
    pub fn cost(&self) -> u32 {
        self.details.cost
    }

    /// Returns the slots in use across all replicas, in units, as last reported by the store.
    pub fn in_use(&self) -> u32 {
        self.details.in_use
    }

    /// Returns the number of queued requests across all replicas, as last reported by the store. The number may include
    /// this request.
    pub fn waiting(&self) -> u32 {
        self.details.waiting
    }

    /// Returns the last known queue position: 1 at the head. `None` if the request did not queue.
    pub fn position(&self) -> Option<u32> {
        self.details.place
    }

    /// Returns the time that the request waited.
    pub fn waited(&self) -> Duration {
        self.details.waited
    }

    /// Returns the time after which to retry: exact for a rate or a pause, an estimate for slots. `None` if unknown.
    pub fn retry_after(&self) -> Option<Duration> {
        self.details.retry_after
    }
}

/// Shows the values that its methods return: a `main` that fails with this error prints them.
impl fmt::Debug for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireError")
            .field("kind", &self.kind)
            .field("limit_name", &self.details.limit_name)
            .field("max", &self.details.max)
            .field("weight", &self.details.weight)
            .field("cost", &self.details.cost)
            .field("in_use", &self.details.in_use)
            .field("waiting", &self.details.waiting)
            .field("position", &self.details.place)
            .field("waited", &self.details.waited)
            .field("retry_after", &self.details.retry_after)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use AcquireErrorKind as Kind;
        let AcquireErrorDetails {
            limit_name: name,
            max,
            unit,
            ..
        } = &*self.details;
        match self.kind {
            Kind::Full | Kind::QueueFull | Kind::TimedOut => self.write_full(f),
            Kind::TooSoon => {
                write!(f, "rate `{name}` of {max} {unit} ")?;
                self.write_rest_of_rate(f)
            }
            Kind::InvalidWeight => match self.details.weight {
                weight @ 1..=MAX_WEIGHT => write!(
                    f,
                    "a permit of {weight} units is heavier than limit `{name}` of {max}"
                ),
                weight => write!(
                    f,
                    "a permit of limit `{name}` weighs 1 to {MAX_WEIGHT} units, not {weight}"
                ),
            },
            Kind::InvalidCost => {
                let cost = self.details.cost;
                write!(
                    f,
                    "a cost of {cost} {unit} is above the burst of {max} of rate `{name}`"
                )
            }
            Kind::UnknownRate => write!(
                f,
                "`{name}` is not among the rates of the permit: check the name, and the limits of the request"
            ),
            Kind::UnknownLimit => write!(
                f,
                "`{name}` is not among the limits with slots of the permit: check the name, and the limits of the request"
            ),
            Kind::Unavailable => write!(f, "the store of limit `{name}` is unavailable"),
            Kind::Misconfigured => {
                write!(
                    f,
                    "the store of limit `{name}` is misconfigured: see the log"
                )
            }
            Kind::ShutDown => write!(f, "the limiter of limit `{name}` is shutting down"),
            Kind::Paused => {
                write!(f, "limit `{name}` is paused")?;
                let left = self.details.retry_after;
                left.map_or(Ok(()), |left| write!(f, " for another {left:?}"))
            }
            Kind::NoRuntime => write!(
                f,
                "no Tokio runtime with timers and IO to run the limiter of limit `{name}` on"
            ),
        }
    }
}

impl AcquireError {
    fn write_rest_of_rate(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quota = self.details.quotas.first();
        match quota.map(|quota| quota.remaining).filter(|left| *left > 0) {
            Some(left) => write!(f, "has {left} left, fewer than the request costs")?,
            None => f.write_str("is used up")?,
        }
        let more = self.details.retry_after;
        more.map_or(Ok(()), |time| write!(f, ": it has more in {time:?}"))
    }

    /// Writes the known numbers of slots in use and of waiting requests.
    fn write_full(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AcquireErrorDetails {
            limit_name: name,
            max,
            in_use,
            waiting,
            waited,
            ..
        } = &*self.details;
        match self.kind {
            AcquireErrorKind::QueueFull => write!(f, "the queue of limit `{name}` is full: ")?,
            AcquireErrorKind::TimedOut => {
                write!(f, "limit `{name}` had no free slot within {waited:?}: ")?;
            }
            _ => write!(f, "limit `{name}` is full: ")?,
        }
        match self.details.weight {
            // While the store is down, or before it has answered, we only know that no slot is free.
            1 => write!(f, "{} of {max} slots in use", in_use.max(max))?,
            weight => write!(f, "{weight} slots needed, {in_use} of {max} in use")?,
        }
        match waiting {
            0 => Ok(()),
            1 => f.write_str(", 1 request waiting"),
            _ => write!(f, ", {waiting} requests waiting"),
        }
    }
}

impl Error for AcquireError {}
