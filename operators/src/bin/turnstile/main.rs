//! `turnstile`: shows who holds the slots of a service's limits and who waits, by asking its replicas; changes limits
//! for a limited time; runs commands under them; and serves their slots to programs.

#![deny(clippy::print_stderr, clippy::print_stdout)]

/// Writes a line to standard error, which may be closed or blocked: `eprintln!` would panic, or block.
macro_rules! note {
    ($($text:tt)*) => { crate::output::note(format_args!($($text)*)) };
}

mod args;
mod change;
mod check;
#[cfg_attr(not(unix), allow(dead_code))]
mod code;
mod commands;
#[cfg(unix)]
mod in_force;
#[cfg(unix)]
mod job;
mod notes;
mod output;
#[cfg(unix)]
mod serve;
#[cfg(unix)]
mod source;
mod table;
mod text;
#[cfg(unix)]
mod timers;

use std::process::ExitCode;

use clap::Parser;

use self::{args::Args, commands::CommandError};

fn main() -> ExitCode {
    // A wrong call exits here, with code 2.
    let args = Args::parse();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let code = end(match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(commands::run(&args));
            // A lookup of a name may go on for a minute, and cannot be cancelled.
            runtime.shutdown_background();
            outcome
        }
        Err(error) => Err(CommandError::new(code::REFUSED, error.to_string())),
    });
    notes::flush(notes::AT_END);
    code
}

fn end(outcome: Result<ExitCode, CommandError>) -> ExitCode {
    match outcome {
        Ok(_) if output::is_lost() => ExitCode::from(code::NO_OUTPUT),
        Ok(code) => code,
        Err(failure) => {
            note!("turnstile: {}", text::escaped(&failure.message));
            ExitCode::from(failure.code)
        }
    }
}
