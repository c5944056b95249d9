//! Errors: what a user configured wrongly, and why a permit was not given.

use std::{error::Error, fmt, time::Duration};

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
}

impl ConfigError {
    pub(crate) fn new(kind: ConfigErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
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
    pub(crate) in_use: u32,
    pub(crate) waiting: u32,
    pub(crate) limit: u32,
    pub(crate) waited: Duration,
}

/// The reason of an [`AcquireError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireErrorKind {
    /// All slots are taken, and the caller would not wait.
    Full,
    /// All slots are taken, and as many callers wait as may.
    LineFull,
    /// No slot came free within the wait.
    TimedOut,
    /// The store is down or too slow, and the limit's policy is to reject.
    Unavailable,
    /// The store refuses to work: credentials, permissions, or a key of another type. The log has its words.
    Misconfigured,
    /// The limiter is shutting down.
    ShutDown,
    /// There was no Tokio runtime to run the limiter's driver on.
    NoRuntime,
}

impl AcquireError {
    pub(crate) fn new(kind: AcquireErrorKind, limit: u32) -> Self {
        Self {
            kind,
            in_use: 0,
            waiting: 0,
            limit,
            waited: Duration::ZERO,
        }
    }

    /// The reason.
    pub fn kind(&self) -> AcquireErrorKind {
        self.kind
    }

    /// Whether the limit was reached: no slot, no place in the line, or none in time.
    pub fn is_limited(&self) -> bool {
        matches!(
            self.kind,
            AcquireErrorKind::Full | AcquireErrorKind::LineFull | AcquireErrorKind::TimedOut
        )
    }

    /// Slots in use across all replicas when this process last heard.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Waiters across all replicas when this process last heard.
    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The limit.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// How long the caller waited.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            AcquireErrorKind::Full => write!(f, "all {} slots are in use", self.limit),
            AcquireErrorKind::LineFull => write!(
                f,
                "all {} slots are in use and the line is full",
                self.limit
            ),
            AcquireErrorKind::TimedOut => write!(
                f,
                "no slot of {} came free in {:?}",
                self.limit, self.waited
            ),
            AcquireErrorKind::Unavailable => f.write_str("the store of the limit is unavailable"),
            AcquireErrorKind::Misconfigured => {
                f.write_str("the store of the limit is misconfigured")
            }
            AcquireErrorKind::ShutDown => f.write_str("the limiter is shutting down"),
            AcquireErrorKind::NoRuntime => f.write_str("no Tokio runtime to run the limiter on"),
        }
    }
}

impl Error for AcquireError {}
