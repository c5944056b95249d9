//! The value of a limit that its other holders have, for a process that declares it by arguments.
//!
//! Otherwise `--concurrent 80` in one shell would open a limit of 8 for all: the largest value applies.

use tower_turnstile_operate::{
    Declared, OperateError, OperateErrorKind, Others, Registration, beside::Beside,
};

use crate::{code, commands::CommandError};

/// What the arguments say about a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// `None`: as the other holders have it.
    pub slots: Option<u32>,
    /// `None`: likewise, or not fair.
    pub is_fair: Option<bool>,
    /// Whether another value than the other holders' is wanted.
    pub is_forced: bool,
    /// How the arguments name both.
    pub names: (&'static str, &'static str),
}

/// Declares a limit, and returns its value. Fails if other replicas have the limit with another value.
///
/// While the store is down, a given value is taken as it is.
pub(crate) async fn in_force(
    beside: &Beside,
    limit: &str,
    wanted: Wanted,
) -> Result<Declared, CommandError> {
    let declared = match wanted.slots {
        Some(max) => Declared {
            max,
            fair: wanted.is_fair.unwrap_or_default(),
            adapts: false,
        },
        None => {
            let others = beside.declare(Registration::Join, limit, None).await;
            let others = others.map_err(|error| unknown(limit, wanted.names.0, &error))?;
            let known = agreed(limit, wanted.names.0, &others)?;
            Declared {
                fair: wanted.is_fair.unwrap_or(known.fair),
                // With a fixed value this process opens an adaptive limit for all.
                adapts: false,
                ..known
            }
        }
    };
    let how = if wanted.is_forced {
        Registration::Join
    } else {
        Registration::JoinIfShared
    };
    // A store that does not answer, or refuses, grants no slot either: the fallback decides.
    let others = beside.declare(how, limit, Some(declared)).await;
    let others = others.unwrap_or_default();
    match others.differing(declared) {
        Some((replica, other)) if !wanted.is_forced && !others.is_shared => {
            Err(refused(limit, declared, replica, *other, wanted.names))
        }
        _ => Ok(declared),
    }
}

/// Says whether other replicas have another value than a file.
pub(crate) async fn compare(beside: &Beside, limit: &str, declared: Declared) {
    let others = { beside.declare(Registration::Join, limit, Some(declared)) }.await;
    if let Ok(others) = others
        && let Some((replica, other)) = others.differing(declared)
    {
        note!(
            "turnstile: limit `{limit}` has {declared} in the file, and {other} for {replica}: the largest applies"
        );
    }
}

/// The value that all others have.
fn agreed(limit: &str, slots: &str, others: &Others) -> Result<Declared, CommandError> {
    let message = match &others.extremes[..] {
        [(one, high), (other, low)] if high != low => {
            format!("limit `{limit}` has {high} for {one}, and {low} for {other}: pass {slots}")
        }
        [(_, all), ..] => return Ok(*all),
        [] => format!("nobody else has limit `{limit}`: pass {slots}"),
    };
    Err(CommandError::new(code::CONFIG, message))
}

fn refused(
    limit: &str,
    declared: Declared,
    replica: &str,
    other: Declared,
    (slots, fairness): (&str, &str),
) -> CommandError {
    let advice = if other.adapts {
        "name its file with --config".to_owned()
    } else if declared.max != other.max {
        format!("leave {slots} out")
    } else if other.fair {
        format!("pass {fairness}")
    } else {
        format!("leave {fairness} out")
    };
    let message = format!(
        "limit `{limit}` has {other} for {replica}, not {declared}: {advice}, or pass --force, and the largest applies to all. \
         A replica that has crashed counts for 3 minutes"
    );
    CommandError::new(code::CONFIG, message)
}

fn unknown(limit: &str, slots: &str, error: &OperateError) -> CommandError {
    let code = match error.kind() {
        OperateErrorKind::Unavailable => code::NO_SLOT,
        _ => code::CONFIG,
    };
    let message = format!("the value of limit `{limit}` is unknown: {error}: pass {slots}");
    CommandError::new(code, message)
}
