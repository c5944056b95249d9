//! Limits: how much, how long to wait, and what to do without a store.

use std::{borrow::Cow, time::Duration};

use crate::error::{ConfigError, ConfigErrorKind};

/// The largest limit: a ledger of a million holders is still fast.
pub const MAX_LIMIT: u32 = 1_000_000;
/// The longest line.
pub const MAX_WAITERS: u32 = 100_000;
/// The longest wait.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
const MAX_NAME_LEN: usize = 128;

/// A cap on how many permits of one name and key are held at once, across all replicas.
///
/// ```
/// use std::time::Duration;
/// use tower_turnstile::Limit;
///
/// static CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(2)).max_waiters(100);
/// assert_eq!(CHAT.max(), 5);
/// ```
///
/// All replicas should use the same values. While they differ, as in a rollout, the largest limit holds. Within one
/// process two limits of one name and different values are an error; only the wait may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: Cow<'static, str>,
    max: u32,
    wait: Duration,
    max_waiters: u32,
    on_unavailable: OnUnavailable,
}

/// What a limit does while its store cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// Each process keeps to this limit by itself, with the same fair line in memory. The default, with the limit's
    /// own value. With N replicas up to N times as many permits may then be held in all.
    Local(u32),
    /// Every request is admitted.
    Allow,
    /// Every request is refused.
    Reject,
}

impl Limit {
    /// At most `max` permits at once for each key.
    ///
    /// # Panics
    ///
    /// If the name is empty or too long (128 bytes), or `max` is 0 or above [`MAX_LIMIT`]; in a `const` or `static`
    /// that is a compile error. For values from outside there is [`Limit::try_concurrent`].
    #[must_use]
    pub const fn concurrent(name: &'static str, max: u32) -> Self {
        assert!(!name.is_empty(), "a limit needs a name");
        assert!(
            name.len() <= MAX_NAME_LEN,
            "the name of a limit has at most 128 bytes"
        );
        assert!(max > 0, "a limit is at least 1");
        assert!(max <= MAX_LIMIT, "a limit is at most 1000000");
        Self::new(Cow::Borrowed(name), max)
    }

    /// As [`Limit::concurrent`], for values from a configuration.
    ///
    /// # Errors
    ///
    /// If the name is empty or too long (128 bytes), or `max` is 0 or above [`MAX_LIMIT`].
    pub fn try_concurrent(
        name: impl Into<Cow<'static, str>>,
        max: u32,
    ) -> Result<Self, ConfigError> {
        let name = name.into();
        if name.is_empty() || name.len() > MAX_NAME_LEN {
            return Err(value_error(format!(
                "the name of a limit has 1 to {MAX_NAME_LEN} bytes, not {}",
                name.len()
            )));
        }
        if max == 0 || max > MAX_LIMIT {
            return Err(value_error(format!(
                "limit `{name}` is {max}: it must be 1 to {MAX_LIMIT}"
            )));
        }
        Ok(Self::new(name, max))
    }

    const fn new(name: Cow<'static, str>, max: u32) -> Self {
        Self {
            name,
            max,
            wait: Duration::ZERO,
            max_waiters: 1_000,
            on_unavailable: OnUnavailable::Local(max),
        }
    }

    /// How long a request may wait in line for a slot. Default: zero, it is refused at once. At most [`MAX_WAIT`].
    ///
    /// Longer waits smooth bursts; waits longer than the callers' patience only fill the line.
    #[must_use]
    pub const fn wait_up_to(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// How many may wait in line for one key, across all replicas. Default: 1,000. At most [`MAX_WAITERS`].
    #[must_use]
    pub const fn max_waiters(mut self, max_waiters: u32) -> Self {
        self.max_waiters = max_waiters;
        self
    }

    /// What happens while the store is down or slower than the limiter's `store_timeout`. Default:
    /// [`OnUnavailable::Local`] with the limit's own value.
    #[must_use]
    pub const fn on_unavailable(mut self, policy: OnUnavailable) -> Self {
        self.on_unavailable = policy;
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The most permits at once.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// The longest wait.
    pub(crate) fn wait(&self) -> Duration {
        self.wait
    }

    pub(crate) fn waiters(&self) -> u32 {
        self.max_waiters
    }

    pub(crate) fn policy(&self) -> OnUnavailable {
        self.on_unavailable
    }

    /// Checks what the `const` setters could not refuse.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        if self.wait > MAX_WAIT {
            return Err(value_error(format!(
                "limit `{name}` waits {:?}: at most {MAX_WAIT:?}",
                self.wait
            )));
        }
        if self.max_waiters > MAX_WAITERS {
            return Err(value_error(format!(
                "limit `{name}` has {} waiters: at most {MAX_WAITERS}",
                self.max_waiters
            )));
        }
        match self.on_unavailable {
            OnUnavailable::Local(n) if n == 0 || n > MAX_LIMIT => Err(value_error(format!(
                "limit `{name}` is {n} without its store: it must be 1 to {MAX_LIMIT}"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether both say the same of their ledgers; how long one use of a limit waits is its own affair.
    pub(crate) fn agrees_with(&self, other: &Limit) -> bool {
        (self.max, self.max_waiters, self.on_unavailable)
            == (other.max, other.max_waiters, other.on_unavailable)
    }
}

fn value_error(message: String) -> ConfigError {
    ConfigError::new(ConfigErrorKind::Value, message)
}
