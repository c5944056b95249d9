//! The arguments of `turnstile run`.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args as Group, ValueEnum};
use tower_turnstile::{Fallback, Limit};

use crate::text::parse_duration;

#[derive(Debug, Group)]
pub(crate) struct RunArgs {
    /// Name of the limit.
    pub limit: String,
    #[command(flatten)]
    pub source: Source,
    /// The caller that uses the slot. Empty for the key that all callers share. If the key is secret, prefer the
    /// environment.
    #[arg(
        long,
        env = "TURNSTILE_KEY",
        hide_env_values = true,
        default_value = "",
        allow_hyphen_values = true
    )]
    pub key: String,
    /// The tenant of the command, under a limit whose slots are shared fairly among tenants. Empty for none. With
    /// --concurrent it makes the limit fair: all users of the limit should do the same. If it is secret, prefer the
    /// environment.
    #[arg(
        long,
        env = "TURNSTILE_TENANT",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    pub tenant: Option<String>,
    /// The share of the tenant. Default: as in the file; without a file, 1.
    #[arg(long, requires = "tenant", value_parser = clap::value_parser!(u32).range(1..=i64::from(Limit::MAX_SHARE)))]
    pub share: Option<u32>,
    /// Units of the limit that the command uses.
    #[arg(long, value_name = "UNITS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub weight: u32,
    /// Maximum wait for a slot, up to one day; 0s: refuse at once. Default: as in the file; without a file, one day.
    #[arg(long, value_name = "TIME", value_parser = up_to_a_day)]
    pub wait: Option<Duration>,
    /// Behaviour while the store is down.
    #[arg(long, value_name = "DO", default_value = "reject")]
    pub fallback: FallbackArg,
    /// Behaviour if the slot is lost. If an operator revokes the slot, the command is stopped anyway.
    #[arg(long, value_name = "DO", default_value = "stop")]
    pub on_lost: OnLostArg,
    /// Time between SIGTERM and SIGKILL for a command that is stopped, up to one day.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = up_to_a_day)]
    pub grace: Duration,
    /// Kill the command if this process dies, even of SIGKILL. Processes started by the command are not affected.
    #[cfg(target_os = "linux")]
    #[arg(long)]
    pub die_with_me: bool,
    /// The command, and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The longest wait that a limit can have.
fn up_to_a_day(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(time) if time <= Limit::MAX_WAIT => Ok(time),
        Ok(_) => Err("the longest time is 24h".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Where the limit is declared.
#[derive(Debug, Group)]
#[group(required = true, multiple = false)]
pub(crate) struct Source {
    /// Slots of the limit. All users of the limit must agree.
    #[arg(long, value_name = "SLOTS")]
    pub concurrent: Option<u32>,
    /// Configuration file that declares the limit, as for services. Its store, if any, takes precedence over --store.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FallbackArg {
    /// Do not run the command.
    Reject,
    /// Run the command without a slot.
    Allow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLostArg {
    /// Stop the command, and exit with 76.
    Stop,
    /// Let the command continue: others may have its slot.
    Continue,
}

impl From<FallbackArg> for Fallback {
    fn from(fallback: FallbackArg) -> Self {
        match fallback {
            FallbackArg::Reject => Self::Reject,
            FallbackArg::Allow => Self::Allow,
        }
    }
}

impl RunArgs {
    pub(super) fn program(&self) -> &OsStr {
        self.command
            .first()
            .map_or(OsStr::new(""), |program| program)
    }

    /// The label for operators: the name of the command, without its arguments, which may contain secrets.
    pub(super) fn label(&self) -> String {
        let name = Path::new(self.program()).file_name();
        name.unwrap_or(self.program())
            .to_string_lossy()
            .into_owned()
    }
}
