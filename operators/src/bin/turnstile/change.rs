//! Commands that change something, and commands that show changes.

use std::{
    collections::{BTreeSet, HashMap},
    process::ExitCode,
};

use serde_json::{Value, json};
use tower_turnstile_operate::{
    Answers, By, Edited, LimitRow, LogEntry, OperateError, OperateErrorKind, Operator, Order,
    Outcome, Override, Revoked, Setting, Target, TenantDigest, What,
};

use crate::{
    args::{Args, Caller, ChangeCommand, Signature, Tenant},
    code,
    commands::{CommandError, show as show_answers},
    output::{self, Column, Row},
    table::tenant_name,
    text::{date, duration, escaped, listed},
};

pub(crate) async fn run(
    args: &Args,
    operator: &Operator,
    change: &ChangeCommand,
) -> Result<ExitCode, CommandError> {
    let Signature { author, reason } = change.signature();
    let by = By::new(author, reason)?;
    let order = order(operator, change).await?;
    let outcome = operator.order(&order, &by).await.inspect_err(|error| {
        if error.kind() == OperateErrorKind::Unavailable {
            note!(
                "the order may have been carried out: see `turnstile overrides` and `turnstile log`"
            );
        }
    })?;
    let code = match outcome {
        Outcome::Revoked(outcome) => revoked(args, &outcome),
        Outcome::Resumed(answers) => show_answers(args, &answers),
        outcome => report(args, change, &outcome),
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
            share,
            tenant,
            burst,
            caller,
            term,
        } => {
            let target = target(limit, caller, tenant);
            let (length, seen) = (term.length, seen(operator, &target, tenant.name()).await?);
            match (share, target.tenant) {
                (Some(share), Some(tenant)) => Order::Share {
                    limit: target.limit,
                    tenant,
                    share: *share,
                    length,
                    seen,
                },
                _ => Order::Set {
                    target,
                    value: value.expect("the arguments are checked"),
                    burst: *burst,
                    length,
                    seen,
                },
            }
        }
        ChangeCommand::Mode { limit, mode, term } => Order::Mode {
            limit: limit.clone(),
            mode: *mode,
            length: term.length,
            seen: seen(operator, &Target::limit(limit), None).await?,
        },
        ChangeCommand::Pause { limit, term, .. } => Order::Pause {
            limit: limit.clone(),
            length: term.length,
            seen: seen(operator, &Target::limit(limit), None).await?,
        },
        ChangeCommand::Unset {
            limit,
            caller,
            tenant,
            ..
        } => {
            let target = target(limit, caller, tenant);
            Order::Unset {
                seen: seen(operator, &target, tenant.name()).await?,
                target,
            }
        }
        ChangeCommand::Revoke { whose, caller, .. } => {
            Order::Revoke(whose.revocation(caller).ok_or_else(not_a_caller)?)
        }
        ChangeCommand::Resume { limit, caller, .. } => Order::Resume {
            target: caller.target(limit),
        },
    })
}

fn not_a_caller() -> CommandError {
    let message = "--limit goes with --key or --digest, and only these do";
    CommandError::new(code::WRONG_CALL, message.to_owned())
}

fn target(limit: &str, caller: &Caller, tenant: &Tenant) -> Target {
    match tenant.digest() {
        Some(tenant) => Target::tenant(limit, tenant),
        None => caller.target(limit),
    }
}

/// Succeeds if all permits have ended.
fn revoked(args: &Args, outcome: &Revoked) -> ExitCode {
    let code = show_answers(args, &outcome.permits);
    match outcome.running {
        0 => code,
        running => {
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
            output::unanswered(answers);
        }
    };
    operator.drained(limit, progress).await.map_err(undrained)?;
    note!("nobody holds a slot");
    Ok(())
}

/// The pause is recorded by now, so no code may say that nothing was changed.
fn undrained(error: OperateError) -> CommandError {
    let kind = error.kind();
    let error = CommandError::from(error);
    match kind {
        // The pause has ended, or the store does not answer.
        OperateErrorKind::NotFound | OperateErrorKind::Unavailable => error,
        _ => CommandError::new(code::PARTIAL, error.message),
    }
}

/// Reads the overrides, and prints the state before the change. `tenant`: the target's name.
async fn seen(
    operator: &Operator,
    target: &Target,
    tenant: Option<&str>,
) -> Result<Option<Vec<String>>, CommandError> {
    let seen = operator.overrides().await?;
    for one in seen.of(target) {
        let of = named(target, tenant);
        let text = format!("before: {of} is {}, by {}", one.setting, one.author);
        note!("{}", escaped(&text));
    }
    Ok(Some(seen.tokens(target)))
}

fn report(args: &Args, change: &ChangeCommand, outcome: &Outcome) -> ExitCode {
    if args.json {
        output::json(std::slice::from_ref(outcome));
    }
    match outcome {
        Outcome::Done { replicas } => {
            note!("done on {replicas} of {replicas}");
            ExitCode::SUCCESS
        }
        Outcome::Unused { replicas } => {
            let what = match change {
                ChangeCommand::Set { share: Some(_), .. } => "a request of this tenant now",
                _ => "such a limit yet",
            };
            note!("done on {replicas} of {replicas}, and none has {what}: is its name right?");
            ExitCode::from(code::PARTIAL)
        }
        Outcome::Recorded {
            confirmed,
            of,
            missing,
        } => {
            match &missing[..] {
                [] => note!("recorded, {confirmed} of {of} have confirmed it"),
                _ => {
                    let missing = listed(missing);
                    note!("recorded, {confirmed} of {of} have confirmed it; not yet: {missing}");
                }
            }
            ExitCode::from(code::PARTIAL)
        }
        _ => ExitCode::from(code::PARTIAL),
    }
}

/// The record of changes has only digests of tenants.
type TenantNames = HashMap<TenantDigest, String>;

/// Limits that are asked for the names of their tenants.
const MAX_NAMING: usize = 10;

/// The names, as replicas show them, of tenants that hold slots, wait, or were refused lately.
async fn tenant_names(operator: &Operator, targets: impl Iterator<Item = &Target>) -> TenantNames {
    let fair = targets.filter(|target| target.tenant.is_some());
    let limits: BTreeSet<_> = fair.map(|target| &*target.limit).collect();
    let mut names = TenantNames::new();
    for limit in limits.into_iter().take(MAX_NAMING) {
        // Otherwise the digests stay.
        if let Ok(refusals) = operator.refusals(limit, None).await {
            let rows = refusals.rows.into_iter();
            names.extend(rows.filter_map(|row| Some((row.tenant?, row.tenant_text?))));
        }
        if let Ok(tenants) = operator.tenants(limit, None).await {
            let rows = tenants.rows.into_iter();
            names.extend(rows.filter_map(|row| Some((row.tenant, row.tenant_text?))));
        }
    }
    names
}

fn name_of<'a>(target: &Target, names: &'a TenantNames) -> Option<&'a str> {
    names.get(&target.tenant?).map(String::as_str)
}

/// The target, with the tenant's name if it is known.
fn named(target: &Target, tenant: Option<&str>) -> String {
    match tenant {
        Some(name) => format!("tenant {name} of limit `{}`", target.limit),
        None => target.to_string(),
    }
}

/// An override, the time at which it was read, and its tenant.
struct OverrideRow(Override, u64, String);

impl Row for OverrideRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("LIMIT", |row| row.0.target.limit.clone()),
        ("KEY", |row| {
            let key = row.0.target.key.map(|key| key.to_string());
            key.unwrap_or_default()
        }),
        ("TENANT", |row| row.2.clone()),
        ("SETTING", |row| row.0.setting.to_string()),
        ("ENDS IN", |row| {
            duration(row.0.until_ms.saturating_sub(row.1))
        }),
        ("AUTHOR", |row| row.0.author.clone()),
        ("REASON", |row| row.0.reason.clone()),
        ("", |row| {
            if row.0.recorded { "" } else { NOT_RECORDED }.to_owned()
        }),
    ];
}

/// The store has lost the override, and replicas may not restore it.
const NOT_RECORDED: &str = "in force, not recorded";

pub(crate) async fn show(args: &Args, operator: &Operator) -> Result<ExitCode, CommandError> {
    let overrides = operator.overrides().await?;
    if args.json {
        output::json(overrides.all());
        return Ok(ExitCode::SUCCESS);
    }
    let targets = overrides.all().iter().map(|one| &one.target);
    let names = tenant_names(operator, targets).await;
    let row = |one: &Override| {
        let tenant = one.target.tenant;
        let tenant = tenant.map(|tenant| tenant_name(tenant, name_of(&one.target, &names)));
        OverrideRow(
            one.clone(),
            overrides.read_at_ms(),
            tenant.unwrap_or_default(),
        )
    };
    output::table(&overrides.all().iter().map(row).collect::<Vec<_>>());
    if overrides.ignored() > 0 {
        note!("{} entries cannot be read", overrides.ignored());
    }
    Ok(ExitCode::SUCCESS)
}

struct LogRow {
    entry: LogEntry,
    change: String,
}

impl Row for LogRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("AT", |row| date(row.entry.at_ms)),
        ("AUTHOR", |row| row.entry.author.clone()),
        ("CHANGE", |row| row.change.clone()),
        ("REASON", |row| row.entry.reason.clone()),
    ];
}

/// One object for each changed override, and for each order to revoke permits or to end pauses.
pub(crate) async fn show_log(args: &Args, operator: &Operator) -> Result<ExitCode, CommandError> {
    let log = operator.log().await?;
    let edits = log.iter().flat_map(|entry| {
        let ordered = entry.subject.iter().map(move |_| (entry, None));
        let edits = entry.edits.iter().map(move |edited| (entry, Some(edited)));
        ordered.chain(edits)
    });
    if args.json {
        let flat: Vec<Value> = edits.map(|(entry, edited)| flat(entry, edited)).collect();
        output::json(&flat);
        return Ok(ExitCode::SUCCESS);
    }
    let targets = log.iter().flat_map(|entry| &entry.edits);
    let names = tenant_names(operator, targets.map(|edited| &edited.target)).await;
    let row = |(entry, edited): (&LogEntry, Option<&Edited>)| LogRow {
        entry: entry.clone(),
        change: match edited {
            Some(edited) => edit_text(edited, &names),
            None => subject_text(entry),
        },
    };
    output::table(&edits.map(row).collect::<Vec<_>>());
    Ok(ExitCode::SUCCESS)
}

fn flat(entry: &LogEntry, edited: Option<&Edited>) -> Value {
    let text = |setting: Option<Setting>| setting.map(|setting| setting.to_string());
    json!({
        "at_ms": entry.at_ms,
        "what": entry.what,
        "limit": edited.map(|edited| &edited.target.limit),
        "key": edited.and_then(|edited| edited.target.key),
        "tenant": edited.and_then(|edited| edited.target.tenant),
        "before": edited.and_then(|edited| text(edited.before)),
        "after": edited.and_then(|edited| text(edited.after)),
        "subject": entry.subject,
        "author": entry.author,
        "reason": entry.reason,
    })
}

fn subject_text(entry: &LogEntry) -> String {
    let verb = match entry.what {
        What::Resumed => "resumed",
        _ => "revoked",
    };
    format!("{verb} {}", entry.subject.as_deref().unwrap_or_default())
}

fn edit_text(edited: &Edited, names: &TenantNames) -> String {
    let text = |setting: Option<Setting>| match setting {
        Some(setting) => setting.to_string(),
        None => "as declared".to_owned(),
    };
    let (before, after) = (text(edited.before), text(edited.after));
    let target = named(&edited.target, name_of(&edited.target, names));
    format!("{target}: {before} -> {after}")
}
