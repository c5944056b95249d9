//! Each command's questions, and its output.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::json;
use tower_turnstile::{ConfigError, ConfigErrorKind};
use tower_turnstile_operate::{
    Answers, Explanation, Finding, Health, OperateError, OperateErrorKind, Operator, TenantDigest,
};

use crate::{
    args::{Args, Command, Of, Tenant},
    change, check, code,
    output::{self, Row},
    text::listed,
};
#[cfg(unix)]
use crate::{job, serve};

/// Why a command failed.
pub(crate) struct CommandError {
    pub code: u8,
    pub message: String,
}

impl CommandError {
    pub(crate) fn new(code: u8, message: String) -> Self {
        Self { code, message }
    }
}

impl From<ConfigError> for CommandError {
    fn from(error: ConfigError) -> Self {
        let code = match error.kind() {
            ConfigErrorKind::Unreachable => code::NO_STORE,
            ConfigErrorKind::Url | ConfigErrorKind::Value => code::WRONG_CALL,
            _ => code::REFUSED,
        };
        Self::new(code, error.to_string())
    }
}

impl From<OperateError> for CommandError {
    fn from(error: OperateError) -> Self {
        let code = match error.kind() {
            OperateErrorKind::Unavailable => code::NO_STORE,
            OperateErrorKind::NoAnswer => code::PARTIAL,
            OperateErrorKind::Value => code::WRONG_CALL,
            _ => code::REFUSED,
        };
        Self::new(code, error.to_string())
    }
}

pub(crate) async fn run(args: &Args) -> Result<ExitCode, CommandError> {
    if let Command::Digest {
        limit,
        caller,
        tenant,
    } = &args.command
    {
        let (what, digest) = match tenant {
            Some(tenant) => ("tenant", TenantDigest::of(&**tenant).to_string()),
            None => ("key", caller.one(limit).to_string()),
        };
        if args.json {
            output::json(&[json!({"limit": limit, what: digest})])
        } else {
            output::line(&digest)
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::Check(file) = &args.command {
        return check::run(args, file).await;
    }
    #[cfg(unix)]
    if let Command::Run(job) = &args.command {
        return job::run(args, job).await;
    }
    #[cfg(unix)]
    if let Command::Serve(options) = &args.command {
        return serve::run(args, options).await;
    }
    #[cfg(target_os = "linux")]
    if let Command::DieWith {
        parent,
        only_child,
        command,
    } = &args.command
    {
        let ended = job::die_with(*parent, *only_child, command).await;
        return ended.map(ExitCode::from);
    }
    let builder = Operator::builder().namespace(&args.namespace);
    if let Command::Doctor = args.command {
        return Ok(diagnosed(args, &builder.diagnose(args.store()?).await?));
    }
    let operator = builder.connect(args.store()?).await?;
    ask(args, &operator).await
}

async fn ask(args: &Args, operator: &Operator) -> Result<ExitCode, CommandError> {
    Ok(match &args.command {
        Command::Change(made) => return change::run(args, operator, made).await,
        Command::Overrides => return change::show(args, operator).await,
        Command::Log => return change::show_log(args, operator).await,
        Command::Status => return status(args, operator).await,
        Command::Limits => told(args, operator, &operator.limits().await?).await,
        Command::Replicas => told(args, operator, &operator.replicas().await?).await,
        Command::Permits(Of { limit, caller }) => {
            let permits = operator.permits(limit, caller.digest(limit)).await?;
            told(args, operator, &permits).await
        }
        Command::Keys { limit } => told(args, operator, &operator.keys(limit, None).await?).await,
        Command::Tenants(Of { limit, caller }) => {
            let tenants = operator.tenants(limit, caller.digest(limit)).await?;
            told(args, operator, &tenants).await
        }
        Command::Refusals(Of { limit, caller }) => {
            let refusals = operator.refusals(limit, caller.digest(limit)).await?;
            told(args, operator, &refusals).await
        }
        Command::Explain { of, tenant } => return explain(args, operator, of, tenant).await,
        _ => unreachable!("the others have no operator"),
    })
}

async fn explain(
    args: &Args,
    operator: &Operator,
    Of { limit, caller }: &Of,
    tenant: &Tenant,
) -> Result<ExitCode, CommandError> {
    let mut why = operator.explain(limit, caller.digest(limit)).await?;
    let is_unknown = match tenant.digest() {
        Some(tenant) => !only_of(tenant, &mut why)?,
        None => false,
    };
    if args.json {
        output::json(&[output::flat_explanation(&why)])
    } else {
        output::explanation(&why)
    }
    if is_unknown {
        note!("no replica knows a request of this tenant: is its name right?");
        return Ok(ExitCode::from(code::PARTIAL));
    }
    Ok(exit_code(&why.permits))
}

/// Removes the rows of other tenants. Returns whether any is left.
fn only_of(tenant: TenantDigest, why: &mut Explanation) -> Result<bool, CommandError> {
    let Some(tenants) = &mut why.tenants else {
        let limit = &why.limit.limit;
        let message = format!("limit `{limit}` is not fair, so it has no tenants");
        return Err(CommandError::new(code::REFUSED, message));
    };
    tenants.rows.retain(|row| row.tenant == tenant);
    (why.permits.rows).retain(|row| row.tenant == Some(tenant));
    (why.refusals.rows).retain(|row| row.tenant == Some(tenant));
    Ok(!(tenants.rows.is_empty() && why.permits.rows.is_empty() && why.refusals.rows.is_empty()))
}

/// Fails if any check found a fault.
fn diagnosed(args: &Args, findings: &[Finding]) -> ExitCode {
    if args.json {
        output::json(findings)
    } else {
        output::table(findings)
    }
    if findings
        .iter()
        .any(|finding| finding.health == Health::Fault)
    {
        ExitCode::from(code::REFUSED)
    } else {
        ExitCode::SUCCESS
    }
}

async fn status(args: &Args, operator: &Operator) -> Result<ExitCode, CommandError> {
    let (replicas, limits) = (operator.replicas().await?, operator.limits().await?);
    if args.json {
        return Ok(told(args, operator, &limits).await);
    }
    output::table(&replicas.rows);
    output::blank();
    output::table(&limits.rows);
    output::answered(&limits);
    explain_silence(args, operator, &limits).await;
    Ok(exit_code(&limits))
}

/// Prints the answers, and explains why they are missing.
async fn told<T: Row + Serialize>(
    args: &Args,
    operator: &Operator,
    answers: &Answers<T>,
) -> ExitCode {
    let code = show(args, answers);
    explain_silence(args, operator, answers).await;
    code
}

/// A wrong namespace looks like a service without replicas.
async fn explain_silence<T>(args: &Args, operator: &Operator, answers: &Answers<T>) {
    if answers.replicas > 0 {
        return;
    }
    let namespace = &args.namespace;
    note!("no operable replica is in namespace `{namespace}`");
    // A user without permission to scan does not see the namespaces.
    let Ok(namespaces) = operator.namespaces().await else {
        return;
    };
    match &namespaces[..] {
        [] => note!("no namespace is in use in this database"),
        _ => note!("in use in this database: {}", listed(&namespaces)),
    }
}

pub(crate) fn show<T: Row + Serialize>(args: &Args, answers: &Answers<T>) -> ExitCode {
    if args.json {
        output::json(&answers.rows);
    } else {
        output::table(&answers.rows);
    }
    // Separate from the JSON, which has only rows.
    output::answered(answers);
    exit_code(answers)
}

fn exit_code<T>(answers: &Answers<T>) -> ExitCode {
    if answers.are_all() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(code::PARTIAL)
    }
}
