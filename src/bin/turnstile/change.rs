//! Commands that change something, and commands that show changes.

use std::{process::ExitCode, time::Duration};

use serde_json::{Value, json};
use tower_turnstile::operate::{
    Answers, By, Edited, LimitRow, LogEntry, Operator, Order, Outcome, Override, Overrides,
    PermitRow, PermitState, Setting, Target, What,
};

use crate::{
    args::{Args, ChangeCommand, Signature},
    code,
    output::{self, Row},
    run::{CommandError, show as show_answers},
    text::{duration, escaped},
};

pub(crate) async fn run(
    args: &Args,
    operator: &Operator,
    change: &ChangeCommand,
) -> Result<ExitCode, CommandError> {
    let Signature { author, reason } = change.signature();
    let by = By::new(author, reason)?;
    let order = order(operator, change).await?;
    let code = match operator.order(&order, &by).await? {
        Outcome::Revoked(answers) => revoked(args, &answers),
        outcome => report(args, &outcome),
    };
    if let ChangeCommand::Pause {
        limit, wait: true, ..
    } = change
    {
        drain(operator, limit).await?;
    }
    Ok(code)
}

/// The order, for the state that is printed here.
async fn order(operator: &Operator, change: &ChangeCommand) -> Result<Order, CommandError> {
    Ok(match change {
        ChangeCommand::Set {
            limit,
            value,
            burst,
            caller,
            term,
        } => {
            let target = caller.target(limit);
            Order::Set {
                seen: seen(operator, &target).await?,
                target,
                value: *value,
                burst: *burst,
                length: term.length,
            }
        }
        ChangeCommand::Mode { limit, mode, term } => Order::Mode {
            limit: limit.clone(),
            mode: (*mode).into(),
            length: term.length,
            seen: seen(operator, &Target::limit(limit)).await?,
        },
        ChangeCommand::Pause { limit, term, .. } => Order::Pause {
            limit: limit.clone(),
            length: term.length,
            seen: seen(operator, &Target::limit(limit)).await?,
        },
        ChangeCommand::Unset { limit, caller, .. } => {
            let target = caller.target(limit);
            Order::Unset {
                seen: seen(operator, &target).await?,
                target,
            }
        }
        ChangeCommand::Revoke { whose, caller, .. } => {
            Order::Revoke(whose.revocation(caller).ok_or_else(|| {
                let message = "--limit goes with --key or --digest, and only these do";
                CommandError::new(code::WRONG_CALL, message.to_owned())
            })?)
        }
        ChangeCommand::Undo { .. } => {
            let log = operator.log().await?;
            // A revocation cannot be undone.
            let can_be_undone = |entry: &&LogEntry| entry.what != What::Revoked;
            let Some(last) = log.iter().find(can_be_undone) else {
                let message = "there is no change to take back".to_owned();
                return Err(CommandError::new(code::REFUSED, message));
            };
            for edited in &last.edits {
                note!("takes back: {}", escaped(&edit_text(edited)));
            }
            let id = last.id.clone();
            Order::Undo { id }
        }
    })
}

/// Succeeds if all permits have ended.
fn revoked(args: &Args, answers: &Answers<PermitRow>) -> ExitCode {
    let code = show_answers(args, answers);
    let runs = |row: &&PermitRow| row.state == PermitState::Held;
    let running = answers.rows.iter().filter(runs).count();
    match running {
        0 => code,
        _ => {
            note!("{running} still run: they are told, and keep their slots until they stop");
            ExitCode::from(code::PARTIAL)
        }
    }
}

/// Reports the progress whenever it changes.
async fn drain(operator: &Operator, limit: &str) -> Result<(), CommandError> {
    let mut last = None;
    let progress = |held, answers: &Answers<LimitRow>| {
        let now = (held, answers.answered, answers.replicas);
        if last.replace(now) != Some(now) {
            let (held, answered, replicas) = now;
            note!("waiting: {held} slots held; {answered} of {replicas} replicas answered");
        }
    };
    operator.drained(limit, progress).await?;
    note!("nobody holds a slot");
    Ok(())
}

/// Reads the overrides, and prints the state before the change.
async fn seen(operator: &Operator, target: &Target) -> Result<Option<Vec<String>>, CommandError> {
    let seen = operator.overrides().await?;
    for one in seen.of(target) {
        let text = format!("before: {target} is {}, by {}", one.setting, one.author);
        note!("{}", escaped(&text));
    }
    Ok(Some(seen.tokens(target)))
}

fn report(args: &Args, outcome: &Outcome) -> ExitCode {
    if args.json {
        output::json(std::slice::from_ref(outcome));
    }
    match outcome {
        Outcome::Done { replicas } => {
            note!("done on {replicas} of {replicas}");
            ExitCode::SUCCESS
        }
        Outcome::Recorded {
            confirmed,
            of,
            missing,
        } => {
            let missing: Vec<_> = missing.iter().map(|label| escaped(label)).collect();
            match &missing[..] {
                [] => note!("recorded, {confirmed} of {of} have confirmed it"),
                _ => {
                    let missing = missing.join(", ");
                    note!("recorded, {confirmed} of {of} have confirmed it; not yet: {missing}");
                }
            }
            ExitCode::from(code::PARTIAL)
        }
        _ => ExitCode::from(code::PARTIAL),
    }
}

struct OverrideRow<'a>(&'a Override, u64);

impl Row for OverrideRow<'_> {
    const COLUMNS: &'static [&'static str] =
        &["LIMIT", "KEY", "SETTING", "ENDS IN", "AUTHOR", "REASON", ""];

    fn cells(&self) -> Vec<String> {
        let Self(one, now_ms) = self;
        vec![
            one.target.limit.clone(),
            one.target
                .key
                .map(|key| key.to_string())
                .unwrap_or_default(),
            one.setting.to_string(),
            duration(one.until_ms.saturating_sub(*now_ms)),
            one.author.clone(),
            one.reason.clone(),
            if one.recorded { "" } else { NOT_RECORDED }.to_owned(),
        ]
    }
}

/// The store has lost the override, and replicas may not restore it.
const NOT_RECORDED: &str = "in force, not recorded";

pub(crate) fn show(args: &Args, overrides: &Overrides) {
    if args.json {
        return output::json(overrides.all());
    }
    let row = |one| OverrideRow(one, overrides.read_at_ms());
    output::table(&overrides.all().iter().map(row).collect::<Vec<_>>());
    if overrides.ignored() > 0 {
        note!("{} entries cannot be read", overrides.ignored());
    }
}

/// A changed override, or `None` for revoked permits.
struct LogRow<'a>(&'a LogEntry, Option<&'a Edited>, u64);

impl Row for LogRow<'_> {
    const COLUMNS: &'static [&'static str] = &["AGO", "AUTHOR", "CHANGE", "REASON"];

    fn cells(&self) -> Vec<String> {
        let Self(entry, edited, now_ms) = self;
        vec![
            duration(now_ms.saturating_sub(entry.at_ms)),
            entry.author.clone(),
            match edited {
                Some(edited) => edit_text(edited),
                None => revoked_text(entry),
            },
            entry.reason.clone(),
        ]
    }
}

/// One object for each changed override, and for each order to revoke permits.
pub(crate) fn show_log(args: &Args, log: &[LogEntry]) {
    let edits = log.iter().flat_map(|entry| {
        let revoked = entry.revoked.iter().map(move |_| (entry, None));
        let edits = entry.edits.iter().map(move |edited| (entry, Some(edited)));
        revoked.chain(edits)
    });
    if args.json {
        let flat: Vec<Value> = edits.map(|(entry, edited)| flat(entry, edited)).collect();
        return output::json(&flat);
    }
    // Ages are relative to the latest change: the log has no other clock.
    let latest_ms = log.first().map_or(0, |entry| entry.at_ms);
    let rows: Vec<_> = edits
        .map(|(entry, edited)| LogRow(entry, edited, latest_ms))
        .collect();
    output::table(&rows);
}

fn flat(entry: &LogEntry, edited: Option<&Edited>) -> Value {
    let text = |setting: Option<Setting>| setting.map(|setting| setting.to_string());
    json!({
        "at_ms": entry.at_ms,
        "what": entry.what,
        "limit": edited.map(|edited| &edited.target.limit),
        "key": edited.and_then(|edited| edited.target.key),
        "before": edited.and_then(|edited| text(edited.before)),
        "after": edited.and_then(|edited| text(edited.after)),
        "revoked": entry.revoked,
        "author": entry.author,
        "reason": entry.reason,
    })
}

fn revoked_text(entry: &LogEntry) -> String {
    format!("revoked {}", entry.revoked.as_deref().unwrap_or_default())
}

fn edit_text(edited: &Edited) -> String {
    let text = |setting: Option<Setting>| match setting {
        Some(setting) => setting.to_string(),
        None => "as declared".to_owned(),
    };
    let (before, after) = (text(edited.before), text(edited.after));
    format!("{}: {before} -> {after}", edited.target)
}

/// Parses a length such as `90s`, `10m`, `1h` or `7d`.
pub(crate) fn length(text: &str) -> Result<Duration, String> {
    let fault = || "write a number with s, m, h or d, such as 90s or 1h".to_owned();
    let unit = text.chars().last().ok_or_else(fault)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(fault()),
    };
    let count: u32 = text[..text.len() - 1].parse().map_err(|_| fault())?;
    Ok(Duration::from_secs(u64::from(count) * seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_a_unit() {
        for (text, seconds) in [("90s", 90), ("10m", 600), ("1h", 3_600), ("7d", 604_800)] {
            assert_eq!(length(text), Ok(Duration::from_secs(seconds)));
        }
        for text in ["", "1", "h", "-1h", "1.5h", "1\u{e9}", "99999999999s"] {
            assert!(length(text).is_err(), "{text}");
        }
    }
}
