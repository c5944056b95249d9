//! Changes that a request may order.
//!
//! To add a kind of change, add a variant of [`Order`] here and an entry of `KINDS` in `page/change.js`.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, de::DeserializeOwned};

use super::problem::Problem;
use crate::{
    limit::{LimitValue, Mode},
    operate::{
        Answers, By, KeyDigest, OperateError, OperateErrorKind, Operator, Outcome, Override,
        Overrides, PermitRow, Revocation, Target,
    },
};

/// The body of a change.
#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Order {
    /// Sets the value of a limit or of one key, optionally with a burst for a rate.
    Set {
        limit: String,
        key: Option<KeyDigest>,
        value: u32,
        burst: Option<u32>,
        for_ms: u64,
        reason: String,
        seen: Option<SeenTokens>,
    },
    /// Sets the mode of a limit.
    Mode {
        limit: String,
        mode: Mode,
        for_ms: u64,
        reason: String,
        seen: Option<SeenTokens>,
    },
    /// Admits nobody.
    Pause {
        limit: String,
        for_ms: u64,
        reason: String,
        seen: Option<SeenTokens>,
    },
    /// Removes the overrides of a limit or of one key.
    Unset {
        limit: String,
        key: Option<KeyDigest>,
        reason: String,
        seen: Option<SeenTokens>,
    },
    /// Undoes a change of the log.
    Undo { id: String, reason: String },
    /// Revokes held permits.
    Revoke {
        #[serde(flatten)]
        whose: Revocation,
        reason: String,
    },
}

/// The result of an order.
#[derive(Debug)]
pub(super) enum Made {
    Changed(Outcome),
    Revoked(Answers<PermitRow>),
}

/// Tokens of the target's overrides as seen by the operator. Absent: any overrides.
type SeenTokens = Vec<String>;

/// The body of a request for the digest of a key. The key is in the body so that it never occurs in a log of URLs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DigestOf {
    pub(super) limit: String,
    pub(super) key: String,
}

pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let parsed = serde_json::from_slice(body);
    parsed.map_err(|error| Problem::malformed(format!("the body cannot be read: {error}")))
}

/// Makes a change.
pub(super) async fn make(
    operator: &Operator,
    order: Order,
    author: String,
) -> Result<Made, OperateError> {
    let by = |reason: String| By::new(author, reason);
    let outcome = match order {
        Order::Revoke { whose, reason } => {
            let revoked = operator.revoke(&whose, &by(reason)?).await?;
            return Ok(Made::Revoked(revoked));
        }
        Order::Set {
            limit,
            key,
            value,
            burst,
            for_ms,
            reason,
            seen,
        } => {
            let value = LimitValue { max: value, burst };
            let (by, target) = (by(reason)?, target(limit, key));
            let seen = current(operator, &target, seen).await?;
            let length = Duration::from_millis(for_ms);
            operator.set(&seen, &target, value, length, &by).await
        }
        Order::Mode {
            limit,
            mode,
            for_ms,
            reason,
            seen,
        } => {
            let by = by(reason)?;
            let seen = current(operator, &Target::limit(&*limit), seen).await?;
            let length = Duration::from_millis(for_ms);
            operator.mode(&seen, &limit, mode, length, &by).await
        }
        Order::Pause {
            limit,
            for_ms,
            reason,
            seen,
        } => {
            let by = by(reason)?;
            let seen = current(operator, &Target::limit(&*limit), seen).await?;
            let length = Duration::from_millis(for_ms);
            operator.pause(&seen, &limit, length, &by).await
        }
        Order::Unset {
            limit,
            key,
            reason,
            seen,
        } => {
            let (by, target) = (by(reason)?, target(limit, key));
            let seen = current(operator, &target, seen).await?;
            operator.unset(&seen, &target, &by).await
        }
        Order::Undo { id, reason } => {
            let (by, log) = (by(reason)?, operator.log().await?);
            let Some(entry) = log.iter().find(|entry| entry.id == id) else {
                let message = "the log has no such change";
                return Err(OperateError::new(OperateErrorKind::NotFound, message));
            };
            operator.undo(entry, &by).await
        }
    };
    outcome.map(Made::Changed)
}

fn target(limit: String, key: Option<KeyDigest>) -> Target {
    match key {
        Some(key) => Target::digest(limit, key),
        None => Target::limit(limit),
    }
}

/// The overrides in force, after checking that the operator has seen those of the target.
async fn current(
    operator: &Operator,
    target: &Target,
    seen: Option<SeenTokens>,
) -> Result<Overrides, OperateError> {
    let overrides = operator.overrides().await?;
    let Some(seen) = seen else {
        return Ok(overrides);
    };
    let seen: BTreeSet<&str> = seen.iter().map(String::as_str).collect();
    let (mut unseen, mut known) = (None, 0);
    for one in overrides.of(target) {
        match seen.contains(one.token.as_str()) {
            true => known += 1,
            false => unseen = Some(one),
        }
    }
    match unseen.is_none() && known == seen.len() {
        true => Ok(overrides),
        false => Err(conflict(target, unseen)),
    }
}

fn conflict(target: &Target, unseen: Option<&Override>) -> OperateError {
    let message = match unseen {
        Some(Override {
            setting, author, ..
        }) => format!("changed meanwhile by {author}: {target} is now {setting}"),
        None => format!("changed meanwhile: an override of {target} has ended or was removed"),
    };
    OperateError::new(OperateErrorKind::Conflict, message)
}
