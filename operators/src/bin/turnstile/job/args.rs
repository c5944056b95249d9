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
    /// --concurrent it makes the limit fair: all users of the limit must do the same. If it is secret, prefer the
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
    /// Use --concurrent and --tenant even if other holders have another value: the largest applies to all.
    #[arg(long, requires = "concurrent")]
    pub force: bool,
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
    /// Stop the command once it has had its slot for this time, and exit with 124. At most one day.
    #[arg(long, value_name = "TIME", value_parser = up_to_a_day)]
    pub max_hold: Option<Duration>,
    /// Name of the command for operators. Default: the name of the program, or of the script that it interprets.
    #[arg(long)]
    pub label: Option<String>,
    /// Kill the command and all that descends from it if this process dies, even of SIGKILL.
    #[cfg(target_os = "linux")]
    #[arg(long)]
    pub die_with_me: bool,
    /// Release the slot when the command itself ends, though processes that it has started run on. Signals go to the
    /// command alone.
    #[cfg(target_os = "linux")]
    #[arg(long)]
    pub only_child: bool,
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
#[group(multiple = false)]
pub(crate) struct Source {
    /// Slots of the limit. Default: as its other holders have it. Another value than theirs is refused: see --force.
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

    /// The label for operators: without arguments, which may contain secrets, except the name of a script.
    pub(super) fn label(&self) -> String {
        let label = self.label.clone();
        label.unwrap_or_else(|| self.script().unwrap_or_else(|| name_of(self.program())))
    }

    /// The script or module that the program interprets, such as `train.py` in `python3 -u train.py`.
    fn script(&self) -> Option<String> {
        let program = name_of(self.program());
        INTERPRETERS
            .iter()
            .find(|name| program.starts_with(**name))?;
        let mut arguments = self.command.iter().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.to_str()? {
                "-m" => return arguments.next().map(|module| name_of(module)),
                // The rest is code.
                "-c" | "-e" | "-E" | "-p" | "--eval" | "--print" => return None,
                option if option.starts_with('-') => {}
                _ if Path::new(argument).is_file() => return Some(name_of(argument)),
                _ => {}
            }
        }
        None
    }
}

/// Beginnings of the names of programs whose names say nothing about the job.
const INTERPRETERS: [&str; 9] = [
    "python", "pypy", "node", "ruby", "perl", "bash", "dash", "sh", "Rscript",
];

fn name_of(path: &OsStr) -> String {
    let name = Path::new(path).file_name();
    name.unwrap_or(path).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Call {
        #[command(flatten)]
        run: RunArgs,
    }

    /// Of the arguments only the name of a script is shown.
    #[test]
    fn a_script_is_named_in_place_of_its_interpreter() {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("train.py");
        std::fs::write(&script, "").expect("room");
        let script = script.to_str().expect("text");
        for (command, label) in [
            (&["python3", script, "--token", "secret"][..], "train.py"),
            (
                &["/usr/bin/python3.12", "-u", "-W", "ignore", script],
                "train.py",
            ),
            (&["python3", "-m", "acme.train", "secret"], "acme.train"),
            (&["python3", "-c", "secret"], "python3"),
            (&["bash", "-c", script], "bash"),
            (&["node", "--eval", script], "node"),
            (&["node", "no-such-file"], "node"),
            (&["/opt/train", script], "train"),
        ] {
            let limit = ["run", "gpu", "--concurrent", "1"];
            let words = { limit.iter() }.chain(&["--"]).chain(command);
            assert_eq!(Call::parse_from(words).run.label(), label, "{command:?}");
            let words = { limit.iter() }
                .chain(&["--label", "mine", "--"])
                .chain(command);
            assert_eq!(Call::parse_from(words).run.label(), "mine");
        }
    }
}
