//! Errors of a limit, and the limit of an error.

use std::{borrow::Cow, time::Duration};

use super::limit::{Limit, Refill};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    ranges::{MAX_LIMIT, MAX_NAME_LEN},
};

impl Limit {
    /// The error of a budget or a pause that names a limit which its permit does not have. The name may be any text.
    pub(crate) fn unknown(name: &str, kind: AcquireErrorKind) -> AcquireError {
        let mut end = name.len().min(MAX_NAME_LEN);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        let unknown = Self::new(Cow::Owned(name[..end].to_owned()), 0);
        unknown.acquire_error(kind)
    }

    /// The limit of an error, with default settings. The name may be any text, as for an unknown rate. The value is
    /// clamped, since a key's value may be 0 but a limit's may not.
    pub(crate) fn of_error(details: &AcquireErrorDetails) -> Self {
        let max = details.max.clamp(1, MAX_LIMIT);
        Self::new(details.limit_name.clone(), max).with_rate_of(details)
    }

    /// This limit with the rate of an error, which may have been updated since the limit was declared.
    pub(crate) fn with_rate_of(mut self, details: &AcquireErrorDetails) -> Self {
        let burst = self.refill.and_then(|refill| refill.burst);
        let unit = details.unit;
        self.refill = { details.period }.map(|period| Refill {
            period,
            burst,
            unit,
        });
        self
    }

    /// An error with no details but the limit.
    pub(crate) fn acquire_error(&self, kind: AcquireErrorKind) -> AcquireError {
        AcquireError::new(kind, self.error_details())
    }

    pub(crate) fn error_details(&self) -> AcquireErrorDetails {
        AcquireErrorDetails {
            limit_name: self.name.clone(),
            period: self.period(),
            unit: self.counted(),
            is_shared: false,
            max: self.max,
            weight: 1,
            cost: 1,
            in_use: 0,
            waiting: 0,
            place: None,
            waited: Duration::ZERO,
            retry_after: None,
            quotas: Vec::new(),
        }
    }
}
