//! Errors: what a user configured wrongly, and why a permit was not given.
//!
//! Tests: `tests/security/errors.rs`.

use std::{borrow::Cow, error::Error, fmt, time::Duration};

use crate::status::Quota;

/// What a service or body may fail with.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// A limit, limiter or layer that cannot work as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    kind: ConfigErrorKind,
    message: String,
}

/// What is wrong with a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// A value is out of its range, or two values do not go together.
    Value,
    /// Two limits of one name differ.
    Conflict,
    /// The store's URL cannot be read, or its scheme is not known.
    Url,
    /// The store refused the credentials.
    Credentials,
    /// The store does not permit a command, key or channel that is needed.
    Permission,
    /// The store answers, and cannot be used: it is no Redis, or one that is too old or set up otherwise.
    Store,
    /// There is no Tokio runtime with timers and IO to connect on, or no thread for the limiter's task.
    Runtime,
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

    /// What is wrong.
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

/// Why a permit was not given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcquireError {
    pub(crate) kind: AcquireErrorKind,
    pub(crate) limit_name: Cow<'static, str>,
    /// Of a rate.
    pub(crate) period: Option<Duration>,
    /// All callers share the limit: it is not the caller's own.
    pub(crate) is_shared: bool,
    pub(crate) max: u32,
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
    /// All slots are taken, and the caller would not wait.
    Full,
    /// All slots are taken, and as many callers wait as may.
    QueueFull,
    /// No slot came free within the wait.
    TimedOut,
    /// The rate has given as many as it may, and would give the next one only after the wait.
    TooSoon,
    /// The store is down or too slow, and the limit's policy is to reject.
    Unavailable,
    /// The store refuses to work: credentials, permissions, or a key of another type. The log says which.
    Misconfigured,
    /// The limiter is shutting down.
    ShutDown,
    /// There was no Tokio runtime to run the limiter's task on, or one without timers or IO: see
    /// [`enable_all`](tokio::runtime::Builder::enable_all).
    NoRuntime,
}

/// A release that the store has not confirmed in time. It is retried in the background.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseError {
    limit_name: String,
    lease: Duration,
}

impl ReleaseError {
    pub(crate) fn new(limit_name: String, lease: Duration) -> Self {
        Self { limit_name, lease }
    }

    /// The name of the limit.
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

/// Why a slot was over before its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostErrorKind {
    /// It was lost: its lease was not renewed in time, or the limiter was shut down.
    Lost,
    /// It was held for as long as [`LimitLayer::max_hold`](crate::LimitLayer::max_hold) allows.
    HeldTooLong,
    /// Nobody read the response for as long as [`LimitLayer::idle`](crate::LimitLayer::idle) allows.
    Idle,
}

impl AcquireError {
    /// The reason.
    pub fn kind(&self) -> AcquireErrorKind {
        self.kind
    }

    /// Whether the limit was reached: no slot, no place in the line, none in time, or too soon for the rate.
    pub fn is_limited(&self) -> bool {
        matches!(
            self.kind,
            AcquireErrorKind::Full
                | AcquireErrorKind::QueueFull
                | AcquireErrorKind::TimedOut
                | AcquireErrorKind::TooSoon
        )
    }

    /// The name of the limit that refused.
    pub fn limit_name(&self) -> &str {
        &self.limit_name
    }

    /// The limit's value for this key.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// Slots in use across all replicas when this process last heard.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Waiters across all replicas when this process last heard.
    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The place in the line when the wait ended, as far as this process had heard: 1 at the head. `None` if the
    /// caller was not in line.
    pub fn place(&self) -> Option<u32> {
        self.place
    }

    /// How long the caller waited.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// When it is worth to try again: exact for a rate, an estimate for slots. `None` if nobody knows.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            AcquireErrorKind::Full => write!(f, "all {} slots are in use", self.max),
            AcquireErrorKind::QueueFull => {
                write!(f, "all {} slots are in use and the queue is full", self.max)
            }
            AcquireErrorKind::TimedOut => {
                write!(f, "no slot of {} came free in {:?}", self.max, self.waited)
            }
            AcquireErrorKind::TooSoon => write!(f, "the rate `{}` is used up", self.limit_name),
            AcquireErrorKind::Unavailable => f.write_str("the store of the limit is unavailable"),
            AcquireErrorKind::Misconfigured => {
                f.write_str("the store of the limit is misconfigured")
            }
            AcquireErrorKind::ShutDown => f.write_str("the limiter is shutting down"),
            AcquireErrorKind::NoRuntime => {
                f.write_str("no Tokio runtime with timers and IO to run the limiter on")
            }
        }
    }
}

impl Error for AcquireError {}
