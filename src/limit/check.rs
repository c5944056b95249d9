//! Checks of a limit: alone, against another limit of the same name, and together with others in a policy.
//!
//! Tests: `tests/semaphore/main.rs`, `tests/config/faults.rs`.

use std::{collections::BTreeSet, fmt, time::Duration};

use super::{
    adapt::Adapt,
    kinds::Fallback,
    limit::{Limit, most_in},
    value::LimitValue,
};
use crate::{
    error::{ConfigError, ConfigErrorKind},
    ledger::Rate,
    ranges::{MAX_LIMIT, MAX_NAME_LEN, MAX_PERIOD, MAX_SCOPES, MAX_WAIT, MAX_WAITERS},
};

impl Limit {
    /// Checks the values that the `const` setters cannot refuse.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        first(self.faults())
    }

    /// Checks the name and the amount alone.
    pub(super) fn checked(self) -> Result<Self, ConfigError> {
        first(self.faults_of_amount())?;
        Ok(self)
    }

    /// All faults, each with the name of its setting.
    pub(crate) fn faults(&self) -> Vec<(&'static str, String)> {
        let (name, mut faults) = (&self.name, self.faults_of_amount());
        if faults.is_empty()
            && let Some(rate) = self.to_rate(self.max)
            && !rate.is_exact()
        {
            let fault = format!("rate `{name}` has a {}", burst_out_of_range(rate));
            faults.push(("burst", fault));
        }
        if self.wait > MAX_WAIT {
            let wait = self.wait;
            let fault =
                format!("the wait of limit `{name}` is {wait:?}: it must be at most {MAX_WAIT:?}");
            faults.push(("wait", fault));
        }
        if self.max_waiters > MAX_WAITERS {
            let fault = format!(
                "max_waiters of limit `{name}` is {}: it must be at most {MAX_WAITERS}",
                self.max_waiters
            );
            faults.push(("max_waiters", fault));
        }
        if let Fallback::Local(n) = self.fallback
            && n != self.max
            && !(1..=self.most()).contains(&n)
        {
            let range = self.range(1);
            let fault = format!("the local fallback of limit `{name}` is {n}: {range}");
            faults.push(("fallback", fault));
        }
        if let Some(time) = self.fallback_for
            && !(Duration::from_nanos(1)..=MAX_WAIT).contains(&time)
        {
            let fault = format!(
                "the fallback of limit `{name}` lasts for {time:?}: it must be above 0 and at most {MAX_WAIT:?}"
            );
            faults.push(("fallback_for", fault));
        }
        faults.extend(self.fairness_fault().map(|fault| ("fair", fault)));
        faults.extend(self.adapt_fault().map(|fault| ("adapt", fault)));
        faults
    }

    fn faults_of_amount(&self) -> Vec<(&'static str, String)> {
        let (name, max, mut faults) = (&self.name, self.max, Vec::new());
        if name.is_empty() || name.len() > MAX_NAME_LEN {
            let length = name.len();
            let fault = format!("the name of a limit has 1 to {MAX_NAME_LEN} bytes, not {length}");
            faults.push(("name", fault));
        }
        if !(1..=self.most()).contains(&max) {
            let fault = format!("limit `{name}` is {max}: {}", self.range(1));
            faults.push(("max", fault));
        }
        if let Some(period) = self.period()
            && !(Duration::from_millis(1)..=MAX_PERIOD).contains(&period)
        {
            let fault = format!(
                "the period of rate `{name}` is {period:?}: it must be 1 ms to {MAX_PERIOD:?}"
            );
            faults.push(("period", fault));
        }
        faults
    }

    /// Whether a key may have this value in place of the limit's own.
    pub(crate) fn check_value(&self, value: LimitValue) -> Result<(), ConfigError> {
        let (name, LimitValue { max, burst }) = (&self.name, value);
        let is_in_range = (1..=self.most()).contains(&max);
        let fault = match self.to_rate(value) {
            // A value of 0 refuses every request of a key. A rate cannot be 0.
            None if burst.is_none() && (is_in_range || max == 0) => return Ok(()),
            None if burst.is_none() => format!("value of {max}: {}", self.range(0)),
            None => "burst, but the limit is not a rate".to_owned(),
            Some(_) if !is_in_range => format!("value of {max}: {}", self.range(1)),
            Some(rate) if rate.is_exact() => return Ok(()),
            Some(rate) => burst_out_of_range(rate),
        };
        Err(ConfigError::value(format!(
            "a key of limit `{name}` has a {fault}"
        )))
    }

    /// Whether a key may begin with this value in place of the limit's own. Operators may go beyond the bounds of an adaptive limit.
    pub(crate) fn check_own_value(&self, value: LimitValue) -> Result<(), ConfigError> {
        self.check_value(value)?;
        let (name, LimitValue { max, .. }) = (&self.name, value);
        match self.adapt.filter(|bounds| max != 0 && !bounds.allows(max)) {
            Some(Adapt { floor, ceiling }) => Err(ConfigError::value(format!(
                "a key of limit `{name}` has a value of {max}: the limit is adaptive, so it must be 0, or {floor} to {ceiling}"
            ))),
            None => Ok(()),
        }
    }

    fn adapt_fault(&self) -> Option<String> {
        let (bounds, name, max, most) = (self.adapt?, &self.name, self.max, self.most());
        let Adapt { floor, ceiling } = bounds;
        let fault = if self.refill.is_some() {
            "a rate has no slots to be adapted".to_owned()
        } else if self.reuse {
            "set no `reuse`, since slots that a replica keeps look as if in use".to_owned()
        } else if floor == 0 || floor > ceiling || ceiling > most {
            format!(
                "its bounds are {floor} to {ceiling}: they must be 1 to {most}, the lower first"
            )
        } else if !bounds.allows(max) {
            format!("it begins at {max}, which must be {floor} to {ceiling}")
        } else {
            return None;
        };
        Some(format!("limit `{name}` is adaptive: {fault}"))
    }

    /// The largest value: that of its kind, and for a rate with a short period the fastest.
    pub(crate) fn most(&self) -> u32 {
        self.period().map_or(MAX_LIMIT, most_in)
    }

    /// The range of a value, for errors.
    fn range(&self, least: u32) -> String {
        let per_ms = self
            .refill
            .map_or("", |_| ", at most 1000000 per millisecond");
        format!("it must be {least} to {}{per_ms}", self.most())
    }

    /// Whether this limit can become the other one while it is in use.
    pub(crate) fn may_become(&self, other: &Limit) -> Result<(), ConfigError> {
        let name = &self.name;
        let message = if self.refill.is_some() != other.refill.is_some() {
            format!("limit `{name}` cannot change between concurrent and rate while it is in use")
        } else if self.class != other.class {
            format!("the class of limit `{name}` cannot change while it is in use")
        } else if self.fair != other.fair {
            format!("the fairness of limit `{name}` cannot change while it is in use")
        } else {
            return Ok(());
        };
        Err(ConfigError::new(ConfigErrorKind::Conflict, message))
    }

    /// The settings in which the two limits differ, with both values.
    pub(crate) fn difference(&self, other: &Self) -> String {
        fn differs<T: PartialEq + fmt::Debug>(name: &str, one: T, other: T) -> Option<String> {
            (one != other).then(|| format!("{name} {one:?} and {other:?}"))
        }
        let differences = [
            differs("value", self.max, other.max),
            differs("refill", self.refill, other.refill),
            differs("max_waiters", self.max_waiters, other.max_waiters),
            differs("fallback", self.fallback, other.fallback),
            differs("fallback_for", self.fallback_for, other.fallback_for),
            differs("mode", self.mode, other.mode),
            differs("class", self.class, other.class),
            differs("reuse", self.reuse, other.reuse),
            differs("fair", self.fair, other.fair),
            differs("adapt", self.adapt, other.adapt),
        ];
        let differences: Vec<_> = differences.into_iter().flatten().collect();
        differences.join(", ")
    }

    /// Whether both have the same ledgers. The wait may differ between uses of a limit.
    pub(crate) fn agrees_with(&self, other: &Limit) -> bool {
        self.clone().wait_up_to(other.wait) == *other
    }
}

/// A burst outside the range of its rate, for errors.
fn burst_out_of_range(rate: Rate) -> String {
    let (burst, most) = (rate.burst, rate.most_burst());
    format!("burst of {burst}: it must be 1 to {most}, at most what its rate admits in 71 years")
}

/// Whether a request may be under all of these limits.
pub(crate) fn check_together<'a>(
    limits: impl IntoIterator<Item = &'a Limit>,
) -> Result<(), ConfigError> {
    let mut names = BTreeSet::new();
    for limit in limits {
        if !names.insert(limit.name()) {
            return Err(ConfigError::value(format!(
                "limit `{}` is listed twice",
                limit.name()
            )));
        }
    }
    match names.len() {
        1..=MAX_SCOPES => Ok(()),
        count => Err(ConfigError::value(format!(
            "a request can be under 1 to {MAX_SCOPES} limits, not {count}"
        ))),
    }
}

fn first(faults: Vec<(&'static str, String)>) -> Result<(), ConfigError> {
    let first = faults.into_iter().next();
    first.map_or(Ok(()), |(_, fault)| Err(ConfigError::value(fault)))
}
