//! The command dies with this process.
//!
//! Linux kills a process when its parent dies, but only if the process itself has asked for it. So this binary starts
//! itself, makes that request, and then becomes the command: the request survives, because the process stays the same.

use std::{ffi::OsString, os::unix::process::CommandExt, process};

use nix::{
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::{Pid, getpid, getppid},
};
use tokio::process::Command;

use super::{
    child::{Ended, end_code},
    program,
};
use crate::{code, commands::CommandError};

/// Starts the command through this binary.
pub(super) fn command(command: &[OsString]) -> Command {
    let mut start = Command::new("/proc/self/exe");
    start
        .arg0("turnstile")
        .arg("die-with")
        .arg(getpid().to_string());
    start.arg("--").args(command);
    start
}

/// Becomes the command. Returns only on failure.
pub(crate) fn run(parent: i32, command: &[OsString]) -> Result<u8, CommandError> {
    let fault = |error| CommandError::new(code::NOT_EXECUTABLE, format!("--die-with-me: {error}"));
    set_pdeathsig(Signal::SIGKILL).map_err(fault)?;
    // The parent has died meanwhile, and another process has adopted this one.
    if getppid() != Pid::from_raw(parent) {
        return Ok(end_code(Ended::Signalled(Signal::SIGKILL as i32)));
    }
    let Some((name, arguments)) = command.split_first() else {
        return Err(fault(nix::Error::EINVAL));
    };
    let error = process::Command::new(name).args(arguments).exec();
    Err(program::failure(name, &error))
}
