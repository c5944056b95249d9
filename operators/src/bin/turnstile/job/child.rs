//! The command, from its start to its end.

use std::{future::pending, os::unix::process::ExitStatusExt, process::ExitStatus};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep_until},
};
use tower_turnstile::{LostErrorKind, Permit};

#[cfg(target_os = "linux")]
use super::die_with;
use super::{
    args::{OnLostArg, RunArgs},
    program,
    signals::Signals,
};
use crate::{code, commands::CommandError};

/// The environment variable with the permit's id for the command.
const PERMIT: &str = "TURNSTILE_PERMIT";

/// How a command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Exited(u8),
    /// Ended by the signal of this number.
    Signalled(i32),
    /// Stopped because its slot was lost.
    Lost,
}

/// The exit code for this end.
pub(crate) fn end_code(ended: Ended) -> u8 {
    match ended {
        Ended::Exited(code) => code,
        Ended::Signalled(signal) => code::SIGNALLED.saturating_add(signal as u8),
        Ended::Lost => code::LOST,
    }
}

/// Runs the command until it ends, without a time limit.
pub(super) async fn run(
    job: &RunArgs,
    permit: Permit,
    signals: &mut Signals,
) -> Result<Ended, CommandError> {
    let failure = |error| program::failure(job.program(), &error);
    signals.catch_suspending().map_err(failure)?;
    let mut child = spawn(job, &permit).map_err(failure)?;
    let mut slot = Slot::Held;
    loop {
        tokio::select! {
            biased;
            status = child.wait() => {
                let ended = ended(status.map_err(failure)?);
                return Ok(if slot.is_stopping() { Ended::Lost } else { ended });
            }
            signal = signals.next() => {
                if let Some(pid) = pid(&child) {
                    signals.pass_on(signal, pid);
                }
            }
            why = permit.lost(), if slot == Slot::Held => slot = lose(job, &child, why),
            () = slot.kill_time() => {
                let _ = send(&child, Signal::SIGKILL);
                slot = Slot::Killed;
            }
        }
    }
}

/// The slot of a running command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Held,
    /// The slot is lost, and the command continues.
    Missed,
    /// The slot is lost, and the command must end by this time.
    Stopping(Instant),
    Killed,
}

impl Slot {
    fn is_stopping(self) -> bool {
        matches!(self, Self::Stopping(_) | Self::Killed)
    }

    async fn kill_time(self) {
        match self {
            Self::Stopping(until) => sleep_until(until).await,
            _ => pending().await,
        }
    }
}

fn spawn(job: &RunArgs, permit: &Permit) -> std::io::Result<Child> {
    let mut command = start_of(job);
    // That of an outer `turnstile run` is another permit's.
    command.env_remove(PERMIT);
    if let Some(id) = permit.id() {
        command.env(PERMIT, id.to_string());
    }
    command.spawn()
}

fn start_of(job: &RunArgs) -> Command {
    #[cfg(target_os = "linux")]
    if job.die_with_me {
        return die_with::command(&job.command);
    }
    let mut command = Command::new(job.program());
    command.args(job.command.iter().skip(1));
    command
}

/// A revoked slot stays in use until the command ends, so the command is stopped, like a response.
fn lose(job: &RunArgs, child: &Child, why: LostErrorKind) -> Slot {
    let is_revoked = why == LostErrorKind::Revoked;
    let what = if is_revoked { "revoked" } else { "lost" };
    if job.on_lost == OnLostArg::Continue && !is_revoked {
        note!("turnstile: the slot is {what}: the command runs on without it");
        return Slot::Missed;
    }
    // Before the note, which waits for whoever reads it.
    let stopped = send(child, Signal::SIGTERM);
    // A suspended command would not receive the signal.
    let _ = send(child, Signal::SIGCONT);
    match stopped {
        Err(Errno::EPERM) => {
            note!("turnstile: the slot is {what}, and the command may not be stopped: it runs on");
        }
        _ => note!("turnstile: the slot is {what}: the command is stopped"),
    }
    Slot::Stopping(Instant::now() + job.grace)
}

/// Fails if the command has just ended, or runs as another user.
fn send(child: &Child, signal: Signal) -> Result<(), Errno> {
    pid(child).map_or(Ok(()), |pid| kill(pid, signal))
}

/// `None` if the command has ended.
fn pid(child: &Child) -> Option<Pid> {
    let pid = child.id()?.try_into().ok()?;
    Some(Pid::from_raw(pid))
}

fn ended(status: ExitStatus) -> Ended {
    match status.signal() {
        Some(signal) => Ended::Signalled(signal),
        None => Ended::Exited(status.code().unwrap_or_default() as u8),
    }
}
