//! A limit and its settings.
//!
//! Tests: `tests/semaphore/main.rs`, `rates.rs`.

use std::{borrow::Cow, time::Duration};

use super::kinds::{Class, Fallback, Mode};
use crate::{
    error::{AcquireError, AcquireErrorKind, ConfigError},
    key::Key,
    ledger::Rate,
    ranges::{MAX_LIMIT, MAX_PERIOD},
    status::Quota,
};

const MAX_NAME_LEN: usize = 128;

/// A cap on how many permits of one name and key are held at once, or given in a period, across all replicas.
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
///
/// # Rates
///
/// [`Limit::rate`] counts beginnings: so many in a period, and a [burst](Limit::burst) of them at once. It holds
/// nothing. With a wait, a request that comes too soon reserves the next free time and goes on then.
///
/// ```
/// # use std::time::Duration;
/// # use tower_turnstile::Limit;
/// static OPENS: Limit = Limit::rate("opens", 60, Duration::from_secs(60)).burst(10);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub(super) name: Cow<'static, str>,
    pub(super) max: u32,
    /// Of a rate.
    pub(super) refill: Option<Refill>,
    pub(super) wait: Duration,
    pub(super) max_waiters: u32,
    pub(super) fallback: Fallback,
    pub(super) mode: Mode,
    pub(super) class: Option<Class>,
    pub(super) reuse: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refill {
    period: Duration,
    /// `None`: as much as in a period.
    burst: Option<u32>,
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
            return Err(ConfigError::value(format!(
                "the name of a limit has 1 to {MAX_NAME_LEN} bytes, not {}",
                name.len()
            )));
        }
        if max == 0 || max > MAX_LIMIT {
            return Err(ConfigError::value(format!(
                "limit `{name}` is {max}: it must be 1 to {MAX_LIMIT}"
            )));
        }
        Ok(Self::new(name, max))
    }

    /// At most `count` permits in each `period` for each key, and a [burst](Self::burst) of as many at once.
    ///
    /// The algorithm is GCRA (a leaky bucket as a meter): over any time `t` at most `count x t / period + burst` are
    /// given, on the store's clock, exact to the microsecond.
    ///
    /// # Panics
    ///
    /// If the name is empty or too long (128 bytes), `count` is 0 or above [`MAX_LIMIT`], or the period is shorter
    /// than 1 ms or longer than [`MAX_PERIOD`]; in a `const` or `static` that is a compile error. For values from
    /// outside there is [`Limit::try_rate`].
    #[must_use]
    pub const fn rate(name: &'static str, count: u32, period: Duration) -> Self {
        assert!(
            period.as_micros() >= 1_000,
            "the period of a rate is at least 1 ms"
        );
        assert!(
            period.as_micros() <= MAX_PERIOD.as_micros(),
            "the period of a rate is at most 24 h"
        );
        let mut limit = Self::concurrent(name, count);
        limit.refill = Some(Refill {
            period,
            burst: None,
        });
        limit
    }

    /// As [`Limit::rate`], for values from a configuration.
    ///
    /// # Errors
    ///
    /// If the name is empty or too long (128 bytes), or a value is out of range.
    pub fn try_rate(
        name: impl Into<Cow<'static, str>>,
        count: u32,
        period: Duration,
    ) -> Result<Self, ConfigError> {
        let mut limit = Self::try_concurrent(name, count)?;
        if period < Duration::from_millis(1) || period > MAX_PERIOD {
            let name = limit.name;
            return Err(ConfigError::value(format!(
                "the period of rate `{name}` is {period:?}: it must be 1 ms to {MAX_PERIOD:?}"
            )));
        }
        limit.refill = Some(Refill {
            period,
            burst: None,
        });
        Ok(limit)
    }

    const fn new(name: Cow<'static, str>, max: u32) -> Self {
        Self {
            name,
            max,
            refill: None,
            wait: Duration::ZERO,
            max_waiters: 1_000,
            fallback: Fallback::Local(max),
            mode: Mode::Enforce,
            class: None,
            reuse: false,
        }
    }

    /// How many a rate gives at once to a key that has been idle. Default: as many as in a period. At least 1.
    ///
    /// Over a period after a pause that makes up to `count + burst`. With 1 they are spaced evenly.
    ///
    /// # Panics
    ///
    /// If the limit is no rate.
    #[must_use]
    pub const fn burst(mut self, burst: u32) -> Self {
        match &mut self.refill {
            Some(refill) => refill.burst = Some(burst),
            None => panic!("only a rate has a burst"),
        }
        self
    }

    /// How many callers share a key of it, which says when its slots are taken by a request that needs several.
    /// Default: [`Class::Caller`], and [`Class::Global`] for [`Key::SHARED`](crate::Key::SHARED).
    #[must_use]
    pub const fn class(mut self, class: Class) -> Self {
        self.class = Some(class);
        self
    }

    /// Lets a slot that comes free serve the next request of the same process without asking the store. Default: no.
    ///
    /// A process may do so while nobody waits for a slot of the key, by a right that the store gives for 100 ms at a time
    /// and takes back with a message. Slots that are kept count as held, so the cap is as exact as ever. Fairness
    /// is not: somebody who waits in another process may be overtaken until the message is there, or if it is lost
    /// until the right ends. A request that does not wait may be refused while another process keeps a slot that it has
    /// no use for; its refusal calls that back.
    ///
    /// This is for short requests under a limit that is rarely reached, with a [wait](Self::wait_up_to), and for keys
    /// that are in use all the time: the right is let go when no slot came or went for 50 ms. So a single task whose
    /// requests take longer has nothing of it, and over thousands of keys that are each used now and then it costs more
    /// than it saves. A request under several limits at once asks the store for all its slots; what this process keeps
    /// idle goes back with it, so that it is not refused for that. Nothing is kept under a limit that is not
    /// [enforced](Self::mode).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// static SEARCH: Limit = Limit::concurrent("search", 64).wait_up_to(Duration::from_secs(1)).reuse();
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::in_memory();
    /// let semaphore = limiter.semaphore(&SEARCH, "acme");
    /// for _ in 0..1_000 {
    ///     let permit = semaphore.acquire().await?; // from the second one on it is the same slot
    ///     drop(permit);
    /// }
    /// assert_eq!(limiter.status().held, 0); // what is kept is nobody's
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If this is a rate, which has no slots.
    #[must_use]
    pub const fn reuse(mut self) -> Self {
        assert!(self.refill.is_none(), "a rate has no slots to be reused");
        self.reuse = true;
        self
    }

    /// Whether it is enforced. Default: [`Mode::Enforce`].
    #[must_use]
    pub const fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// How long a request may wait in line for a slot. Default: zero, it is refused at once. At most [`MAX_WAIT`](crate::MAX_WAIT).
    ///
    /// Longer waits smooth bursts; waits longer than the callers' patience only fill the line.
    #[must_use]
    pub const fn wait_up_to(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// How many may wait in line for one key, across all replicas. Default: 1,000. At most [`MAX_WAITERS`](crate::MAX_WAITERS).
    #[must_use]
    pub const fn max_waiters(mut self, max_waiters: u32) -> Self {
        self.max_waiters = max_waiters;
        self
    }

    /// What happens while the store is down or slower than the limiter's `store_timeout`. Default:
    /// [`Fallback::Local`] with the limit's own value.
    #[must_use]
    pub const fn fallback(mut self, policy: Fallback) -> Self {
        self.fallback = policy;
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The most permits at once; of a rate, the most in a period.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// The period of a rate.
    pub fn period(&self) -> Option<Duration> {
        self.refill.map(|refill| refill.period)
    }

    /// The rate, with another count for a key that has one of its own; `None` if this is no rate.
    pub(crate) fn to_rate(&self, count: u32) -> Option<Rate> {
        let refill = self.refill?;
        Some(Rate::new(
            count,
            refill.period,
            refill.burst.unwrap_or(count),
        ))
    }

    pub(crate) fn is_reused(&self) -> bool {
        self.reuse
    }

    pub(crate) fn current_mode(&self) -> Mode {
        self.mode
    }

    /// Whether a request under it alone is one for one slot.
    pub(crate) fn is_plain(&self) -> bool {
        self.refill.is_none() && self.mode == Mode::Enforce
    }

    pub(crate) fn class_of(&self, key: &Key) -> Class {
        let by_key = if *key == Key::SHARED {
            Class::Global
        } else {
            Class::Caller
        };
        self.class.unwrap_or(by_key)
    }

    /// The longest wait.
    pub(crate) fn wait(&self) -> Duration {
        self.wait
    }

    pub(crate) fn waiters(&self) -> u32 {
        self.max_waiters
    }

    pub(crate) fn current_fallback(&self) -> Fallback {
        self.fallback
    }

    /// An error of which only the limit is known.
    pub(crate) fn acquire_error(&self, kind: AcquireErrorKind) -> AcquireError {
        AcquireError {
            kind,
            limit_name: self.name.clone(),
            period: self.period(),
            is_shared: false,
            max: self.max,
            in_use: 0,
            waiting: 0,
            place: None,
            waited: Duration::ZERO,
            retry_after: None,
            quotas: Vec::new(),
        }
    }

    /// A used-up quota of a key with this value.
    pub(crate) fn quota(&self, max: u32) -> Quota {
        Quota {
            limit_name: self.name.clone(),
            period: self.period(),
            is_enforced: self.mode == Mode::Enforce,
            max,
            remaining: 0,
            reset: None,
        }
    }
}
