//! Errors of an operator's calls.

use std::{error::Error, fmt};

use tower_turnstile::operate::seam::StoreError;

use crate::kinds::kinds;

/// Error of an operator's call. Nothing was changed, unless the store did not answer ([`OperateErrorKind::Unavailable`]): then
/// an order may have been carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperateError {
    kind: OperateErrorKind,
    message: String,
}

kinds! {
    /// Reason for an [`OperateError`].
    #[non_exhaustive]
    pub enum OperateErrorKind {
        /// The store did not answer in time.
        Unavailable = "unavailable",
        /// The store's user lacks permission for a required command, key or channel.
        Permission = "permission",
        /// The store answers but cannot be used.
        Store = "store",
        /// No replica has a limit of this name, and all replicas have answered.
        UnknownLimit = "unknown_limit",
        /// No replica that has answered has a limit of this name, and others have not answered; or there is no replica.
        NoAnswer = "no_answer",
        /// The replicas are asked more often than they answer: up to 20 times per second.
        Busy = "busy",
        /// The operator asks only its own process, but the call needs a store.
        NoStore = "no_store",
        /// A value, a time, or an author is out of range.
        Value = "value",
        /// Another operator has changed the same override since it was read.
        Conflict = "conflict",
        /// The record has too many overrides.
        TooManyOverrides = "too_many_overrides",
        /// Nothing to remove, no such permit or pause, or no replica.
        NotFound = "not_found",
        /// The limit has no tenants, since it is not [fair](tower_turnstile::Limit::fair).
        NotFair = "not_fair",
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
        let errors = OperateErrorKind::ALL.iter().map(|kind| kind.as_str());
        assert_eq!(of("`OperateErrorKind`"), errors.collect());
        let verdicts = Verdict::EACH.iter().map(|verdict| verdict.as_str());
        assert_eq!(of("`Verdict`"), verdicts.collect());
    }
}
