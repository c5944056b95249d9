//! Errors of an operator's calls.

use std::{error::Error, fmt};

use tower_turnstile::operate::seam::StoreError;

use crate::reason_code::Reason;

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
    /// The limit has no tenants, since it is not [fair](tower_turnstile::Limit::fair).
    NotFair,
}

impl OperateErrorKind {
    #[cfg(test)]
    pub(crate) const EACH: [Self; 12] = [
        Self::Unavailable,
        Self::Permission,
        Self::Store,
        Self::UnknownLimit,
        Self::NoAnswer,
        Self::Busy,
        Self::NoStore,
        Self::Value,
        Self::Conflict,
        Self::TooManyOverrides,
        Self::NotFound,
        Self::NotFair,
    ];

    /// Returns the code of this reason, in snake case: the same in the answers of the page and the command.
    pub fn as_str(self) -> &'static str {
        self.reason().code()
    }

    pub(crate) const fn reason(self) -> Reason {
        match self {
            Self::Unavailable => Reason::Unavailable,
            Self::Permission => Reason::Permission,
            Self::Store => Reason::Store,
            Self::UnknownLimit => Reason::UnknownLimit,
            Self::NoAnswer => Reason::NoAnswer,
            Self::Busy => Reason::Busy,
            Self::NoStore => Reason::NoStore,
            Self::Value => Reason::Value,
            Self::Conflict => Reason::Conflict,
            Self::TooManyOverrides => Reason::TooManyOverrides,
            Self::NotFound => Reason::NotFound,
            Self::NotFair => Reason::NotFair,
        }
    }
}

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

impl From<StoreError> for OperateError {
    fn from(error: StoreError) -> Self {
        let kind = if error.is_outage() {
            OperateErrorKind::Unavailable
        } else if error.is_forbidden() {
            OperateErrorKind::Permission
        } else {
            OperateErrorKind::Store
        };
        Self::new(kind, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::Verdict;

    #[test]
    fn a_verdict_in_json_has_its_code() {
        for verdict in Verdict::EACH {
            let name = match serde_json::to_value(verdict).unwrap() {
                Value::Object(member) => member.keys().next().unwrap().clone(),
                name => name.as_str().unwrap().to_owned(),
            };
            assert_eq!(name, verdict.as_str());
        }
    }

    /// The library compares the rest of the table.
    #[test]
    fn the_table_of_codes_in_the_guide_has_those_of_operators() {
        let page = include_str!("../../src/guide/metrics.md");
        let of = |kind: &str| -> BTreeSet<&str> {
            let rows = page.lines().filter(|line| line.starts_with("| `"));
            rows.filter(|row| row.contains(kind))
                .map(|row| row.split('`').nth(1).expect("a code"))
                .collect()
        };
        let errors = OperateErrorKind::EACH.iter().map(|kind| kind.as_str());
        assert_eq!(of("`OperateErrorKind`"), errors.collect());
        let verdicts = Verdict::EACH.iter().map(|verdict| verdict.as_str());
        assert_eq!(of("`Verdict`"), verdicts.collect());
        for reason in Reason::ALL {
            let code = format!("| `{}` |", reason.code());
            assert!(page.contains(&code), "{code}");
        }
    }
}
