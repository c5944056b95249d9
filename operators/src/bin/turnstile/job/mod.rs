//! `turnstile run`: runs a command while holding a slot.
//!
//! | file | content |
//! | --- | --- |
//! | `args` | its arguments |
//! | `program` | checks that the command exists, before a slot is requested |
//! | `slot` | the limit, from the arguments or a file, and its slot |
//! | `wait` | waits for the slot, and reports its place |
//! | `child` | the command, from its start to its end |
//! | `tree`, `processes` | the command's processes: when all are over, and signals to them |
//! | `signals` | signals, and whether processes receive them anyway |
//! | `die_with` | the command dies with this process |

mod args;
mod child;
#[cfg(target_os = "linux")]
mod die_with;
#[cfg(target_os = "linux")]
mod processes;
mod program;
mod signals;
mod slot;
mod tree;
mod wait;

use std::{pin::pin, process::ExitCode, time::Duration};

use tokio::time::timeout;
use tower_turnstile::Limiter;

#[cfg(target_os = "linux")]
pub(crate) use self::die_with::run as die_with;
pub(crate) use self::{args::RunArgs, child::end_code, signals::Signals};
use self::{
    child::Ended,
    slot::SlotSource,
    wait::{Waited, wait},
};
use crate::{args::Args, code, commands::CommandError};

/// Time after a signal for a store that answers, so that no row of the roster is left behind.
pub(crate) const CONNECTED: Duration = Duration::from_millis(500);

/// Waits for a slot, and runs the command while holding it. Returns the command's exit code.
pub(crate) async fn run(args: &Args, job: &RunArgs) -> Result<ExitCode, CommandError> {
    if args.json {
        let message = "`run` has no JSON: its output is that of the command";
        return Err(CommandError::new(code::WRONG_CALL, message.to_owned()));
    }
    program::check(job.program())?;
    let fault = |error| CommandError::new(code::NOT_EXECUTABLE, format!("no signals: {error}"));
    let mut signals = Signals::catch().map_err(fault)?;
    let mut connecting = pin!(SlotSource::connect(args, job));
    let slots = tokio::select! {
        slots = &mut connecting => slots?,
        signal = signals.ending() => {
            if let Ok(Ok(slots)) = timeout(CONNECTED, connecting).await {
                leave(&slots.limiter).await;
            }
            return Ok(ExitCode::from(end_code(Ended::Signalled(signal as i32))));
        }
    };
    let outcome = match wait(&slots, &job.limit, &mut signals).await {
        Ok(Waited::Granted(permit)) => child::run(job, permit, &mut signals).await,
        Ok(Waited::Cancelled(signal)) => Ok(Ended::Signalled(signal as i32)),
        Err(error) => {
            let _ = slots.beside.keep_refusals(&job.limit).await;
            Err(error)
        }
    };
    leave(&slots.limiter).await;
    outcome.map(|ended| ExitCode::from(end_code(ended)))
}

/// Leaves nothing behind in the store: neither a waiter nor a row of the roster.
async fn leave(limiter: &Limiter) {
    let report = limiter.shutdown(Duration::ZERO).await;
    if report.unconfirmed > 0 {
        note!(
            "turnstile: the store has not confirmed the release: the slot is free when its lease ends"
        );
    }
}
