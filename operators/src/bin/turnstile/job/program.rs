//! Checks that the command exists before a slot is requested, with the rules of `execvp`.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use nix::unistd::{AccessFlags, access};

use crate::{code, commands::CommandError};

/// The search path of `execvp` without the variable `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// Number of bytes in which every binary format has a zero.
const START: u64 = 128;

/// Fails like a shell: with 127 if the command is missing, and with 126 if it cannot be executed.
pub(super) fn check(program: &OsStr) -> Result<(), CommandError> {
    let mut reason = io::Error::new(io::ErrorKind::NotFound, "there is no such command");
    for candidate in candidates(program) {
        match look(&candidate) {
            Ok(()) => return Ok(()),
            // An entry of the path may itself be missing, or a file.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) => {}
            // This one would be started.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                return Err(failure(program, &error));
            }
            Err(error) => reason = error,
        }
    }
    Err(failure(program, &reason))
}

/// The error of a command that was not executed.
pub(super) fn failure(program: &OsStr, error: &io::Error) -> CommandError {
    let code = match error.kind() {
        io::ErrorKind::NotFound => code::NOT_FOUND,
        _ => code::NOT_EXECUTABLE,
    };
    CommandError::new(code, format!("{}: {error}", program.to_string_lossy()))
}

fn candidates(program: &OsStr) -> Vec<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return vec![program.into()];
    }
    let path = env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let folders = env::split_paths(&path);
    // An empty folder means the current one.
    folders
        .map(|folder| Path::new(".").join(folder).join(program))
        .collect()
}

fn look(candidate: &Path) -> io::Result<()> {
    if !fs::metadata(candidate)?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "is not a file",
        ));
    }
    access(candidate, AccessFlags::X_OK)?;
    // The system executes no text without an interpreter: only shells do. A file may be executable, but not readable.
    let mut start = Vec::new();
    let read = File::open(candidate).and_then(|file| file.take(START).read_to_end(&mut start));
    if read.is_ok() && !start.starts_with(b"#!") && !start.contains(&0) {
        let reason =
            "is a script that does not begin with `#!` and its interpreter, such as `#!/bin/sh`";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    Ok(())
}
