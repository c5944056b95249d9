//! The command dies with this process.
//!
//! Linux notifies a process of the death of its parent, but only if the process itself has asked for it. So this binary
//! starts itself as a guard between the two, which kills the command and all that descends from it; or which, for the
//! command alone, becomes the command: the request survives, because the process stays the same.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    process::{self, Command},
};

use nix::{
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{Pid, getpid, getppid},
};

use super::{
    child::{Ended, end_code, ended},
    program,
    signals::Signals,
    tree::{Reach, Tree},
};
use crate::{code, commands::CommandError, timers::due};

/// Starts the command through this binary.
pub(super) fn command(command: &[OsString], only_child: bool) -> Command {
    let mut start = Command::new("/proc/self/exe");
    start.arg0("turnstile").arg("die-with");
    start.arg(getpid().to_string());
    if only_child {
        start.arg("--only-child");
    }
    start.arg("--").args(command);
    start
}

/// Runs the command until all of it is over, or becomes the command.
pub(crate) async fn run(
    parent: i32,
    only_child: bool,
    command: &[OsString],
) -> Result<u8, CommandError> {
    let fault = |error: &dyn std::fmt::Display| {
        CommandError::new(code::NOT_EXECUTABLE, format!("--die-with-me: {error}"))
    };
    let is_orphan = || getppid() != Pid::from_raw(parent);
    let Some((name, arguments)) = command.split_first() else {
        return Err(fault(&nix::Error::EINVAL));
    };
    let mut start = process::Command::new(name);
    start.args(arguments);
    let mut signals = None;
    if !only_child {
        signals = Some(Signals::catch_all().map_err(|error| fault(&error))?);
    }
    // SIGCHLD is caught even if the caller ignores signals.
    let at_death = if only_child {
        Signal::SIGKILL
    } else {
        Signal::SIGCHLD
    };
    set_pdeathsig(at_death).map_err(|error| fault(&error))?;
    // The parent has died meanwhile, and another process has adopted this one.
    if is_orphan() {
        return Ok(end_code(Ended::Signalled(Signal::SIGKILL as i32)));
    }
    let Some(mut signals) = signals else {
        return Err(program::failure(name, &start.exec()));
    };
    let failure = |error| program::failure(name, &error);
    let mut tree = Tree::start(start, Reach::All).map_err(failure)?;
    loop {
        if let Some(status) = tree.reap().map_err(failure)? {
            return Ok(end_code(ended(status)));
        }
        tokio::select! {
            signal = signals.next() => if is_orphan() {
                let _ = tree.send(Signal::SIGKILL, |_| false);
            } else {
                signals.pass_on(signal, &tree);
            },
            () = due(tree.report_at) => tree.report(),
        }
    }
}
