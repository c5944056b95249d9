//! `turnstile run`: a command that holds a slot.
//!
//! | file | what |
//! | --- | --- |
//! | `args` | its arguments |
//! | `program` | whether there is such a command, before a slot is asked for |
//! | `slot` | the limit, as the arguments or a file have it, and its slot |
//! | `wait` | waits for the slot, and says where it stands |
//! | `child` | the command, from its start to its end |
//! | `code` | exit codes |
//! | `signals` | signals, and whether the command gets them anyway |
//! | `die_with` | the command dies with this process |

mod args;
mod child;
mod code;
#[cfg(target_os = "linux")]
mod die_with;
mod program;
mod signals;
mod slot;
mod wait;

use std::{process::ExitCode, time::Duration};

use tower_turnstile::Limiter;

#[cfg(target_os = "linux")]
pub(crate) use self::die_with::run as die_with;
pub(crate) use self::{args::RunArgs, child::end_code};
use self::{
    child::Ended,
    signals::Signals,
    slot::SlotSource,
    wait::{Waited, wait},
};
use crate::{args::Args, run::CommandError};

/// Waits for a slot, and runs the command while it has it. The exit code is that of the command.
pub(crate) async fn run(args: &Args, job: &RunArgs) -> Result<ExitCode, CommandError> {
    program::check(job.program())?;
    let fault = |error| CommandError::new(code::NOT_EXECUTABLE, format!("no signals: {error}"));
    let mut signals = Signals::catch().map_err(fault)?;
    let slots = SlotSource::connect(args, job).await?;
    let outcome = match wait(&slots, &job.limit, &mut signals).await {
        Ok(Waited::Granted(permit)) => child::run(job, permit, &mut signals).await,
        Ok(Waited::Cancelled(signal)) => Ok(Ended::Signalled(signal as i32)),
        Err(error) => Err(error),
    };
    leave(&slots.limiter).await;
    outcome.map(|ended| ExitCode::from(end_code(ended)))
}

/// Nothing stays behind in the store: neither a waiter nor a row of the roster.
async fn leave(limiter: &Limiter) {
    let report = limiter.shutdown(Duration::ZERO).await;
    if report.unconfirmed > 0 {
        note!(
            "turnstile: the store has not confirmed the release: the slot is free when its lease ends"
        );
    }
}
