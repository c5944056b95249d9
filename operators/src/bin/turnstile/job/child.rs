//! The command, from its start to its end.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Command, ExitStatus},
};

use nix::{errno::Errno, sys::signal::Signal};
use tokio::time::Instant;
use tower_turnstile::{LostErrorKind, Permit};

#[cfg(target_os = "linux")]
use super::die_with;
use super::{
    args::{OnLostArg, RunArgs},
    program,
    signals::Signals,
    tree::{Reach, Tree},
};
use crate::{code, commands::CommandError, text::duration, timers::due};

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
    /// Stopped because it had its slot for the longest time.
    HeldTooLong,
}

/// The exit code for this end.
pub(crate) fn end_code(ended: Ended) -> u8 {
    match ended {
        Ended::Exited(code) => code,
        Ended::Signalled(signal) => code::SIGNALLED.saturating_add(signal as u8),
        Ended::Lost => code::LOST,
        Ended::HeldTooLong => code::TIMED_OUT,
    }
}

/// Runs the command until all of it is over.
pub(super) async fn run(
    job: &RunArgs,
    permit: Permit,
    signals: &mut Signals,
) -> Result<Ended, CommandError> {
    let failure = |error| program::failure(job.program(), &error);
    signals.catch_suspending().map_err(failure)?;
    let mut tree = spawn(job, &permit).map_err(failure)?;
    let held_until = job.max_hold.map(|longest| Instant::now() + longest);
    let mut slot = Slot::Held;
    loop {
        if let Some(status) = tree.reap().map_err(failure)? {
            return Ok(slot.stopped_as().unwrap_or_else(|| ended(status)));
        }
        tokio::select! {
            biased;
            signal = signals.next() => {
                signals.pass_on(signal, &tree);
                if let Slot::Killed(_) = slot {
                    // Some may have been started since.
                    let _ = tree.send(Signal::SIGKILL, |_| false);
                }
            }
            why = permit.lost(), if slot == Slot::Held => slot = lose(job, &tree, why),
            () = due(held_until), if slot.stopped_as().is_none() => {
                let longest = job.max_hold.unwrap_or_default().as_millis() as u64;
                let why = format!("the command has had its slot for {}", duration(longest));
                slot = stop(job, &tree, &why, Ended::HeldTooLong);
            }
            () = due(slot.kill_at()) => slot = slot.kill(&tree),
            () = due(tree.report_at) => tree.report(),
        }
    }
}

/// The slot of a running command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Held,
    /// The slot is lost, and the command continues.
    Missed,
    /// The command must end by this time.
    Stopping(Instant, Ended),
    Killed(Ended),
}

impl Slot {
    /// Why the command was stopped, if it was.
    fn stopped_as(self) -> Option<Ended> {
        match self {
            Self::Stopping(_, why) | Self::Killed(why) => Some(why),
            Self::Held | Self::Missed => None,
        }
    }

    fn kill_at(self) -> Option<Instant> {
        match self {
            Self::Stopping(at, _) => Some(at),
            _ => None,
        }
    }

    fn kill(self, tree: &Tree) -> Self {
        let _ = tree.send(Signal::SIGKILL, |_| false);
        self.stopped_as().map_or(self, Self::Killed)
    }
}

fn spawn(job: &RunArgs, permit: &Permit) -> std::io::Result<Tree> {
    let (mut command, reach) = start_of(job);
    // That of an outer `turnstile run` is another permit's.
    command.env_remove(PERMIT);
    if let Some(id) = permit.id() {
        command.env(PERMIT, id.to_string());
    }
    Tree::start(command, reach)
}

fn start_of(job: &RunArgs) -> (Command, Reach) {
    let mut command = Command::new(job.program());
    command.args(job.command.iter().skip(1));
    #[cfg(target_os = "linux")]
    return match (job.die_with_me, job.only_child) {
        (false, false) => (command, Reach::All),
        (false, true) => (command, Reach::Command),
        (true, false) => (die_with::command(&job.command, false), Reach::Guarded),
        (true, true) => (die_with::command(&job.command, true), Reach::Command),
    };
    #[cfg(not(target_os = "linux"))]
    (command, Reach::Command)
}

/// A revoked slot stays in use until the command ends, so the command is stopped, like a response.
fn lose(job: &RunArgs, tree: &Tree, why: LostErrorKind) -> Slot {
    let is_revoked = why == LostErrorKind::Revoked;
    let what = if is_revoked { "revoked" } else { "lost" };
    if job.on_lost == OnLostArg::Continue && !is_revoked {
        note!("turnstile: the slot is {what}: the command runs on without it");
        return Slot::Missed;
    }
    stop(job, tree, &format!("the slot is {what}"), Ended::Lost)
}

fn stop(job: &RunArgs, tree: &Tree, why: &str, end: Ended) -> Slot {
    let stopped = tree.send(Signal::SIGTERM, |_| false);
    // A suspended process would not receive the signal.
    let _ = tree.send(Signal::SIGCONT, |_| false);
    match stopped {
        Err(Errno::EPERM) => {
            note!("turnstile: {why}, and the command may not be stopped: it runs on");
        }
        _ => note!("turnstile: {why}: the command is stopped"),
    }
    Slot::Stopping(Instant::now() + job.grace, end)
}

pub(super) fn ended(status: ExitStatus) -> Ended {
    match status.signal() {
        Some(signal) => Ended::Signalled(signal),
        None => Ended::Exited(status.code().unwrap_or_default() as u8),
    }
}
