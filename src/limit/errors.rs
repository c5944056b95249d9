//! Errors of a limit.

use std::{borrow::Cow, time::Duration};

use super::limit::Limit;
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    ranges::MAX_NAME_LEN,
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
