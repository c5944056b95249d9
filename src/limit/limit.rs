//! A limit and its settings.
//!
//! Tests: `tests/semaphore/main.rs`, `rates.rs`.

use std::{borrow::Cow, time::Duration};

use super::{
    adapt::Adapt,
    kinds::{Class, Fallback, Mode},
    value::LimitValue,
};
use crate::{
    error::ConfigError,
    key::Key,
    ledger::{Rate, ReplicaId},
    ranges::{
        MAX_LIMIT, MAX_NAME_LEN, MAX_PAUSE, MAX_PER_US, MAX_PERIOD, MAX_RATE, MAX_WAIT, MAX_WAITERS,
    },
    status::Quota,
    unit::Unit,
};

/// Limits the permits of a key, at once or per period, across all replicas.
///
/// ```
/// use std::time::Duration;
/// use tower_turnstile::Limit;
///
/// const CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(2)).max_waiters(100);
/// assert_eq!(CHAT.max(), 5);
/// ```
///
/// All replicas should use the same values. While they differ, as in a rollout, the largest value of a concurrency limit
/// applies, and each replica charges a rate by its own value. Within one process, two limits with the same name and different values are an error; only the wait may differ. A limit that the
/// limiter itself returned ([`Limiter::limit`](crate::Limiter::limit),
/// [`LiveConfig::limit`](crate::config::LiveConfig::limit), [`Semaphore::limit`](crate::Semaphore::limit)) always stands
/// for the current values of its name. [What number?](crate::guide::number) helps to find one.
///
/// # Rates
///
/// [`Limit::rate`] limits how often requests start, and allows a [burst](Limit::burst). A request holds nothing of a rate
/// once it has started. With a wait, a request that comes too early reserves the next free time and starts then.
///
/// ```
/// # use std::time::Duration;
/// # use tower_turnstile::Limit;
/// const OPENS: Limit = Limit::rate("opens", 60, Duration::from_secs(60)).burst(10);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub(super) name: Cow<'static, str>,
    pub(super) max: u32,
    /// Only for a rate.
    pub(super) refill: Option<Refill>,
    pub(super) wait: Duration,
    pub(super) max_waiters: u32,
    pub(super) fallback: Fallback,
    pub(super) fallback_for: Option<Duration>,
    pub(super) mode: Mode,
    pub(super) class: Option<Class>,
    pub(super) reuse: bool,
    pub(super) fair: bool,
    pub(super) adapt: Option<Adapt>,
    registered_at: RegisteredAt,
}

/// The limiter that returned this limit, unless a setter has changed the limit since.
///
/// Always equal to another, since it is not a value of the limit.
#[derive(Clone, Copy, Debug)]
struct RegisteredAt(Option<ReplicaId>);

impl PartialEq for RegisteredAt {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for RegisteredAt {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refill {
    pub(super) period: Duration,
    /// `None`: the count per period.
    pub(super) burst: Option<u32>,
    pub(super) unit: Unit,
}

impl Refill {
    const fn new(period: Duration) -> Self {
        Self {
            period,
            burst: None,
            unit: Unit::REQUESTS,
        }
    }
}

impl Limit {
    /// The largest value of a concurrency limit: 1,000,000.
    pub const MAX: u32 = MAX_LIMIT;
    /// The largest count and burst of a rate: 1,000,000,000. No rate is faster than 1,000,000 per millisecond.
    pub const MAX_RATE: u32 = MAX_RATE;
    /// The longest period of a rate: 31 days.
    pub const MAX_PERIOD: Duration = MAX_PERIOD;
    /// The longest pause: 1 h. See [`Scope::pause_at_most`](crate::Scope::pause_at_most).
    pub const MAX_PAUSE: Duration = MAX_PAUSE;
    /// The longest wait: 24 h.
    pub const MAX_WAIT: Duration = MAX_WAIT;
    /// The longest queue of a key: 100,000 requests.
    pub const MAX_WAITERS: u32 = MAX_WAITERS;

    /// Allows at most `max` concurrent permits for each key.
    ///
    /// The name is a literal, and the limit can be a `const`. For a name that is a `String`, or a value from a
    /// configuration, use [`Limit::try_concurrent`]: a borrowed name does not live long enough.
    ///
    /// ```compile_fail,E0597
    /// # use tower_turnstile::Limit;
    /// # fn limit() -> Limit {
    /// let name = String::from("chat");
    /// Limit::concurrent(&name, 5) // use `Limit::try_concurrent(name, 5)?`
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is empty or longer than 128 bytes, or `max` is 0 or above [`Limit::MAX`]. In a `const` or `static` the panic
    /// is a compile error. For values that are not constants use [`Limit::try_concurrent`].
    #[must_use]
    #[track_caller]
    pub const fn concurrent(name: &'static str, max: u32) -> Self {
        assert!(max <= MAX_LIMIT, "a limit is at most 1000000");
        Self::constant(name, max)
    }

    #[track_caller]
    const fn constant(name: &'static str, max: u32) -> Self {
        assert!(!name.is_empty(), "a limit needs a name");
        assert!(
            name.len() <= MAX_NAME_LEN,
            "the name of a limit has at most 128 bytes"
        );
        assert!(max > 0, "a limit is at least 1");
        Self::new(Cow::Borrowed(name), max)
    }

    /// Fallible version of [`Limit::concurrent`], for values from a configuration.
    ///
    /// # Errors
    ///
    /// Returns an error if the name is empty or longer than 128 bytes, or `max` is 0 or above [`Limit::MAX`].
    pub fn try_concurrent(
        name: impl Into<Cow<'static, str>>,
        max: u32,
    ) -> Result<Self, ConfigError> {
        Self::unchecked(name, max, None).checked()
    }

    /// Allows `count` permits per `period` for each key, and a [burst](Self::burst) of `count` at once.
    ///
    /// The algorithm is GCRA (a leaky bucket as a meter): in any window of length `t` at most
    /// `count x t / period + burst` permits are granted, by the store's clock, exact to the microsecond. After the store has
    /// lost its data, each key starts with a full burst.
    ///
    /// For a name that is a `String`, or values from a configuration, use [`Limit::try_rate`].
    ///
    /// # Panics
    ///
    /// If the name is empty or longer than 128 bytes, `count` is 0, above [`Limit::MAX_RATE`] or faster than 1,000,000 per
    /// millisecond, or the period is shorter than 1 ms or longer than [`Limit::MAX_PERIOD`]. In a `const` or `static` the panic is
    /// a compile error. For values that are not constants use [`Limit::try_rate`].
    #[must_use]
    #[track_caller]
    pub const fn rate(name: &'static str, count: u32, period: Duration) -> Self {
        assert!(
            period.as_micros() >= 1_000,
            "the period of a rate is at least 1 ms"
        );
        assert!(
            period.as_micros() <= MAX_PERIOD.as_micros(),
            "the period of a rate is at most 31 days"
        );
        assert!(
            count <= most_in(period),
            "a rate is at most 1000000000, and 1000000 per millisecond"
        );
        let mut limit = Self::constant(name, count);
        limit.refill = Some(Refill::new(period));
        limit
    }

    /// Fallible version of [`Limit::rate`], for values from a configuration.
    ///
    /// # Errors
    ///
    /// Returns an error if the name is empty or longer than 128 bytes, or a value is out of range.
    pub fn try_rate(
        name: impl Into<Cow<'static, str>>,
        count: u32,
        period: Duration,
    ) -> Result<Self, ConfigError> {
        Self::unchecked(name, count, Some(period)).checked()
    }

    /// A limit whose values are not checked yet; with a period, a rate.
    pub(crate) fn unchecked(
        name: impl Into<Cow<'static, str>>,
        max: u32,
        period: Option<Duration>,
    ) -> Self {
        let mut limit = Self::new(name.into(), max);
        limit.refill = period.map(Refill::new);
        limit
    }

    pub(super) const fn new(name: Cow<'static, str>, max: u32) -> Self {
        Self {
            name,
            max,
            refill: None,
            wait: Duration::ZERO,
            max_waiters: 1_000,
            fallback: Fallback::Local(max),
            fallback_for: None,
            mode: Mode::Enforce,
            class: None,
            reuse: false,
            fair: false,
            adapt: None,
            registered_at: RegisteredAt(None),
        }
    }

    /// Sets the number of permits that an idle key may get at once. Default: the rate's count. From 1 to
    /// [`Limit::MAX_RATE`], and at most what the rate admits in 71 years.
    ///
    /// In the first period after a key was idle, up to `count + burst` requests may start. With a burst of 1, requests
    /// are spaced evenly.
    ///
    /// # Panics
    ///
    /// If the limit is not a rate.
    #[must_use]
    #[track_caller]
    pub const fn burst(mut self, burst: u32) -> Self {
        let refill = self.refill.as_mut().expect("only a rate has a burst");
        refill.burst = Some(burst);
        self.changed()
    }

    /// Sets the unit of a rate. Default: `requests`.
    ///
    /// Refusals, the `RateLimit` fields and the views for operators show the unit; nothing else depends on it. A unit has 1
    /// to 32 characters: a letter, then letters, digits, `-`, `_` and `.`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_turnstile::Limit;
    /// const TOKENS: Limit = Limit::rate("tokens", 60_000, Duration::from_secs(60)).unit("tokens");
    /// ```
    ///
    /// # Panics
    ///
    /// If the limit is not a rate, or the unit is empty, too long or has other characters. In a `const` or `static` the
    /// panic is a compile error.
    #[must_use]
    #[track_caller]
    pub const fn unit(mut self, unit: &str) -> Self {
        let unit = Unit::new(unit).expect(
            "a unit has 1 to 32 characters: a letter, then letters, digits, `-`, `_` and `.`",
        );
        let refill = self.refill.as_mut().expect("only a rate has a unit");
        refill.unit = unit;
        self.changed()
    }

    /// Sets how many callers share a key, which orders acquisition under several limits.
    ///
    /// Default: [`Class::Caller`], and [`Class::Global`] for [`Key::SHARED`](crate::Key::SHARED).
    #[must_use]
    pub const fn class(mut self, class: Class) -> Self {
        self.class = Some(class);
        self.changed()
    }

    /// Sets the class, unless a class was set before.
    #[cfg(feature = "axum")]
    pub(crate) fn or_class(self, class: Class) -> Self {
        match self.class {
            Some(_) => self,
            None => self.class(class),
        }
    }

    /// Lets a released slot serve the next request of its process without a round trip. Default: off.
    ///
    /// Use it for many short requests under a limit that is rarely reached, with a [wait](Self::wait_up_to). The cap stays
    /// exact; a request that waits in another process may be overtaken until the message that recalls the slot has arrived.
    /// [Reuse](crate::guide::reuse) has the details, and the cases in which reuse does not help.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const SEARCH: Limit = Limit::concurrent("search", 64).wait_up_to(Duration::from_secs(1)).reuse();
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::in_memory();
    /// let semaphore = limiter.semaphore(&SEARCH, "acme")?;
    /// for _ in 0..1_000 {
    ///     let permit = semaphore.acquire().await?; // the same slot from the second one on
    ///     drop(permit);
    /// }
    /// assert_eq!(limiter.status().held, 0); // a kept slot is not held
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the limit is a rate, which has no slots.
    #[must_use]
    #[track_caller]
    pub const fn reuse(mut self) -> Self {
        assert!(self.refill.is_none(), "a rate has no slots to be reused");
        self.reuse = true;
        self.changed()
    }

    /// Sets whether the limit is enforced. Default: [`Mode::Enforce`].
    #[must_use]
    pub const fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self.changed()
    }

    /// Sets how long a request may queue for a slot. Default: zero, the request is refused at once.
    ///
    /// Longer waits smooth bursts; waits longer than the callers' patience only fill the queue. At most
    /// [`Limit::MAX_WAIT`].
    #[must_use]
    pub const fn wait_up_to(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets the length of a key's queue, across all replicas. Default: 1,000.
    ///
    /// A request that finds the queue full is refused at once. At most [`Limit::MAX_WAITERS`]. A rate has no queue: a request
    /// waits at most for as long as this many requests of its cost take.
    #[must_use]
    pub const fn max_waiters(mut self, max_waiters: u32) -> Self {
        self.max_waiters = max_waiters;
        self.changed()
    }

    /// Sets how requests are admitted while the store is down. Default: [`Fallback::Local`].
    ///
    /// The fallback applies while the store is down or slower than the limiter's
    /// [`store_timeout`](crate::LimiterBuilder::store_timeout). The default enforces the limit's own value in each process.
    #[must_use]
    pub const fn fallback(mut self, policy: Fallback) -> Self {
        self.fallback = policy;
        self.changed()
    }

    /// Sets the total time for which the [fallback](Self::fallback) may decide. Default: as long as the store is down.
    ///
    /// This time is a budget: it is spent while the store is down, and earned back ten times as slowly while the store
    /// is up. Once it is spent, newcomers and queued requests are refused as if the fallback were [`Fallback::Reject`];
    /// permits stay held. This bounds how many requests are admitted without a common count: in a long outage, under a
    /// store that fails again and again, and in a process that alone is cut off while the store still admits the
    /// requests of others.
    ///
    /// A request that falls back alone, since its turn to be sent came too late, does not count.
    ///
    /// In a cluster each of its parts has its own budget. Above zero, and at most 24 hours.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_turnstile::{Fallback, Limit};
    /// const CHAT: Limit = Limit::concurrent("chat", 200)
    ///     .fallback(Fallback::Local(50))
    ///     .fallback_for(Duration::from_secs(30));
    /// ```
    #[must_use]
    pub const fn fallback_for(mut self, time: Duration) -> Self {
        self.fallback_for = Some(time);
        self.changed()
    }

    /// Makes the limit adaptive. With the bounds that it has already, it stays the limit that the limiter has returned.
    pub(crate) fn adapted(self, adapt: Adapt) -> Self {
        if self.adapt == Some(adapt) {
            return self;
        }
        let adapt = Some(adapt);
        Self { adapt, ..self }.changed()
    }

    /// From now on the values are those of the code, and are compared with the registered values.
    pub(super) const fn changed(mut self) -> Self {
        self.registered_at = RegisteredAt(None);
        self
    }

    /// The limit as returned by this limiter, which knows the limit by its name.
    pub(crate) fn registered_at(mut self, limiter: ReplicaId) -> Self {
        self.registered_at = RegisteredAt(Some(limiter));
        self
    }

    /// Whether any limiter returned the limit, unless a setter has changed it since.
    pub(super) fn is_registered(&self) -> bool {
        self.registered_at.0.is_some()
    }

    /// Whether this limiter returned the limit. Then the limiter's current values apply, not the values at the time of the
    /// return.
    pub(crate) fn is_registered_at(&self, limiter: ReplicaId) -> bool {
        self.registered_at.0 == Some(limiter)
    }

    /// The limit with another value, another mode, or both. A local fallback follows the value: it stays equal to the value
    /// if it was equal before, and never exceeds it.
    pub(crate) fn overridden(&self, value: Option<LimitValue>, mode: Option<Mode>) -> Self {
        let mut limit = self.clone();
        if let Some(LimitValue { max, burst }) = value {
            limit.max = max;
            limit.fallback = match self.fallback {
                Fallback::Local(own) if own == self.max => Fallback::Local(max),
                Fallback::Local(own) => Fallback::Local(own.min(max)),
                other => other,
            };
            if let Some(refill) = &mut limit.refill {
                refill.burst = burst.or(refill.burst);
            }
        }
        limit.mode = mode.unwrap_or(self.mode);
        limit
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the maximum number of concurrent permits, or the count per period of a rate.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// Returns the period of a rate; `None` for other limits.
    pub fn period(&self) -> Option<Duration> {
        self.refill.map(|refill| refill.period)
    }

    pub(crate) fn unit_of_rate(&self) -> Option<&str> {
        self.refill.as_ref().map(|refill| refill.unit.as_str())
    }

    pub(crate) fn counted(&self) -> Unit {
        match &self.refill {
            Some(refill) => refill.unit,
            None => Unit::CONCURRENT_REQUESTS,
        }
    }

    /// The rate with this value, which may be a key's own; `None` if the limit is not a rate.
    pub(crate) fn to_rate(&self, value: impl Into<LimitValue>) -> Option<Rate> {
        let (refill, value) = (self.refill?, value.into());
        let burst = value.burst.or(refill.burst);
        Some(Rate::new(
            value.max,
            refill.period,
            burst.unwrap_or(value.max),
        ))
    }

    pub(crate) fn is_reused(&self) -> bool {
        self.reuse
    }

    /// The bounds of an adaptive limit; `None` for others.
    pub(crate) fn adapt(&self) -> Option<Adapt> {
        self.adapt
    }

    pub(crate) fn current_mode(&self) -> Mode {
        self.mode
    }

    /// Whether a request under this limit alone needs exactly one slot.
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

    pub(crate) fn wait(&self) -> Duration {
        self.wait
    }

    pub(crate) fn waiters(&self) -> u32 {
        self.max_waiters
    }

    pub(crate) fn current_fallback(&self) -> Fallback {
        self.fallback
    }

    /// Whether the replicas divide it among themselves in an outage.
    pub(crate) fn is_divided(&self) -> bool {
        self.fallback == Fallback::Share
    }

    /// The time for which the fallback may decide, if it is bounded.
    pub(crate) fn fallback_budget(&self) -> Option<Duration> {
        self.fallback_for
    }

    /// Whether the limit may refuse requests because the store is down.
    pub(crate) fn may_be_unavailable(&self) -> bool {
        let may_reject = match self.fallback {
            Fallback::Reject | Fallback::Share => true,
            // While permits return to the store.
            Fallback::Local(max) => max < self.max && self.period().is_none(),
            Fallback::Allow => false,
        };
        may_reject || self.fallback_for.is_some()
    }

    /// A used-up quota of a key with this value.
    pub(crate) fn quota(&self, max: u32) -> Quota {
        Quota {
            limit_name: self.name.clone(),
            period: self.period(),
            unit: self.counted(),
            is_enforced: self.mode == Mode::Enforce,
            max,
            remaining: 0,
            reset: None,
        }
    }
}

/// The largest count of a rate with this period, or with the shortest if it is too short.
pub(super) const fn most_in(period: Duration) -> u32 {
    match MAX_PER_US * period.as_micros() {
        most if most < MAX_LIMIT as u128 => MAX_LIMIT,
        most if most < MAX_RATE as u128 => most as u32,
        _ => MAX_RATE,
    }
}

/// Returns the limit's name, which identifies the rate in [`Permit::budget`](crate::Permit::budget).
impl AsRef<str> for Limit {
    fn as_ref(&self) -> &str {
        &self.name
    }
}
