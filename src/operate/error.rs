//! Errors of an operator's calls.

use std::{error::Error, fmt};

use crate::reason::impl_codes;
#[cfg(feature = "redis")]
use crate::store::{StoreError, StoreErrorKind};

/// Error of an operator's call. Nothing was changed, unless the store did not answer ([`OperateErrorKind::Unavailable`]): then
/// an order may have been carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperateError {
    kind: OperateErrorKind,
    message: String,
}

/// Reason for an [`OperateError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OperateErrorKind {
    /// The store did not answer in time.
    Unavailable,
    /// The store's user lacks permission for a required command, key or channel.
    Permission,
    /// The store answers but cannot be used.
    Store,
    /// No replica has a limit of this name, and all replicas have answered.
    UnknownLimit,
    /// No replica that has answered has a limit of this name, and others have not answered; or there is no replica.
    NoAnswer,
    /// The replicas are asked more often than they answer: up to 20 times per second.
    Busy,
    /// The operator asks only its own process, but the call needs a store.
    NoStore,
    /// A value, a time, or an author is out of range.
    Value,
    /// Another operator has changed the same override since it was read.
    Conflict,
    /// The record has too many overrides.
    TooManyOverrides,
    /// Nothing to remove, no such permit or pause, or no replica.
    NotFound,
    /// The limit has no tenants, since it is not [fair](crate::Limit::fair).
    NotFair,
}

impl_codes!(OperateErrorKind {
    Unavailable,
    Permission,
    Store,
    UnknownLimit,
    NoAnswer,
    Busy,
    NoStore,
    Value,
    Conflict,
    TooManyOverrides,
    NotFound,
    NotFair,
});

impl OperateError {
    pub(crate) fn new(kind: OperateErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn value(message: impl Into<String>) -> Self {
        Self::new(OperateErrorKind::Value, message)
    }

    /// Returns the reason.
    pub fn kind(&self) -> OperateErrorKind {
        self.kind
    }
}

impl fmt::Display for OperateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for OperateError {}

#[cfg(feature = "redis")]
impl From<StoreError> for OperateError {
    fn from(error: StoreError) -> Self {
        let kind = match error.kind {
            StoreErrorKind::Outage => OperateErrorKind::Unavailable,
            StoreErrorKind::Permission | StoreErrorKind::Credentials => {
                OperateErrorKind::Permission
            }
            StoreErrorKind::Misconfigured => OperateErrorKind::Store,
        };
        Self::new(kind, error.message)
    }
}
