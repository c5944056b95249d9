//! Errors: faults of the configuration, and reasons for refusals.
//!
//! Tests: `tests/security/errors.rs`.

use std::{borrow::Cow, error::Error, fmt, time::Duration};

use crate::{ranges::MAX_WEIGHT, reason::kinds, status::Quota, unit::Unit};

/// Error of a service or a body: any error that can be sent between threads.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Error for a limit, limiter or layer that cannot work as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    kind: ConfigErrorKind,
    message: String,
}

kinds! {
    /// Reason for a [`ConfigError`].
    pub enum ConfigErrorKind {
        /// A value is out of range, or two values are inconsistent.
        Value = "value",
        /// Two limits with the same name have different values.
        Conflict = "conflicting_limits",
        /// The store's URL cannot be parsed, or its scheme is unknown.
        Url = "url",
        /// The store refused the credentials.
        Credentials = "credentials",
        /// The store's user may not use a required command, key or channel.
        Permission = "permission",
        /// The store answers but cannot be used: it is not Redis, too old, or configured differently.
        Store = "store",
        /// The store cannot be reached, and [`require_store`](crate::LimiterBuilder::require_store) is set.
        Unreachable = "unavailable",
        /// There is no Tokio runtime with timers and IO, or no thread for the background task.
        Runtime = "no_runtime",
    }
}

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcquireError {
    pub(crate) kind: AcquireErrorKind,
    /// Boxed, since the error determines the size of the result of each step of a request.
    pub(crate) details: Box<AcquireErrorDetails>,
}

/// The limit that refused, and its state.
#[derive(Clone, Debug, PartialEq, Eq)]
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

kinds! {
    /// The reason of an [`AcquireError`].
    pub enum AcquireErrorKind {
        /// No slot is free, and the request does not wait; or the value of the key is 0, under which nobody waits.
        Full = "full",
        /// All slots are in use, and the queue is full.
        QueueFull = "queue_full",
        /// No slot became free within the wait.
        TimedOut = "timed_out",
        /// The rate is used up, and the next permit would come after the wait.
        TooSoon = "too_soon",
        /// The request needs more units than the limit has, or its weight is not 1 to 64: the same request would be refused
        /// again.
        InvalidWeight = "invalid_weight",
        /// The request costs more than the burst of the rate: the same request would be refused again.
        InvalidCost = "invalid_cost",
        /// A budget names a limit that is not a rate of its permit: a typo, or a limit that the request does not have.
        ///
        /// See [`Permit::budget`](crate::Permit::budget).
        UnknownRate = "unknown_rate",
        /// A pause or a report names a limit that has no slots for its permit: a typo, a rate, or a limit that the request does not have.
        ///
        /// See [`Permit::pause`](crate::Permit::pause).
        UnknownLimit = "unknown_limit",
        /// The store is down or too slow, and no fallback admits the request. Or the store is back, permits are still being
        /// entered into it, and the request does not wait.
        Unavailable = "unavailable",
        /// The store refuses: credentials, permissions, or a key of another type. The log has the details.
        Misconfigured = "misconfigured",
        /// The limiter is shutting down.
        ShutDown = "shut_down",
        /// An operator has paused this limit, or an overloaded upstream this key ([`Scope::outcome_by`](crate::Scope::outcome_by)):
        /// no request is admitted for a time.
        Paused = "paused",
        /// There is no Tokio runtime for the background task, or one without timers or IO.
        ///
        /// See [`enable_all`](tokio::runtime::Builder::enable_all).
        NoRuntime = "no_runtime",
    }
}

/// A release that the store has not confirmed in time. The limiter retries it in the background.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseError {
    limit_name: String,
    lease: Duration,
}

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

kinds! {
    /// Reason why a slot ended before its response.
    pub enum LostErrorKind {
        /// The lease was not renewed in time.
        Lost = "lost",
        /// The limiter was shut down, and its deadline has passed.
        ShutDown = "shut_down",
        /// The slot was held as long as [`LimitLayer::max_hold`](crate::LimitLayer::max_hold) allows.
        HeldTooLong = "max_hold",
        /// The response was unread for as long as [`LimitLayer::idle`](crate::LimitLayer::idle) allows.
        Idle = "idle",
        /// An operator has revoked the permit. The slot stays taken until the permit is dropped.
        Revoked = "revoked",
    }
}

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
                let rest = self.details.rest_of_rate();
                write!(f, "rate `{name}` of {max} {unit} {rest}")?;
                let more = self.details.retry_after;
                more.map_or(Ok(()), |time| write!(f, ": it has more in {time:?}"))
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

impl AcquireErrorDetails {
    /// The slots in use, for people.
    pub(crate) fn slots(&self) -> String {
        let (max, in_use) = (self.max, self.in_use);
        match self.weight {
            // While the store is down, or before it has answered, we only know that no slot is free.
            1 => format!("{} of {max} slots in use", in_use.max(max)),
            weight => format!("{weight} slots needed, {in_use} of {max} in use"),
        }
    }

    /// The part of a rate that is left, for people.
    pub(crate) fn rest_of_rate(&self) -> String {
        let mut quotas = self.quotas.iter();
        let own = quotas.find(|quota| quota.limit_name == self.limit_name);
        match own.map_or(0, |quota| quota.remaining) {
            0 => "is used up".to_owned(),
            left => format!("has {left} left, fewer than the request costs"),
        }
    }
}

impl AcquireError {
    /// Writes the known numbers of slots in use and of waiting requests.
    fn write_full(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, waited) = (&self.details.limit_name, self.details.waited);
        match self.kind {
            AcquireErrorKind::QueueFull => write!(f, "the queue of limit `{name}` is full: ")?,
            AcquireErrorKind::TimedOut => {
                write!(f, "limit `{name}` had no free slot within {waited:?}: ")?;
            }
            _ => write!(f, "limit `{name}` is full: ")?,
        }
        f.write_str(&self.details.slots())?;
        match self.details.waiting {
            0 => Ok(()),
            1 => f.write_str(", 1 request waiting"),
            waiting => write!(f, ", {waiting} requests waiting"),
        }
    }
}

impl Error for AcquireError {}
