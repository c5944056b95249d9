//! The arguments.

#[cfg(target_os = "linux")]
use std::ffi::OsString;
use std::time::Duration;

use clap::{Args as Group, Parser, Subcommand, ValueEnum};
use tower_turnstile::{
    Mode, PermitId,
    operate::{KeyDigest, Revocation},
};

#[cfg(unix)]
use crate::job::RunArgs;
use crate::{change::length, check::CheckArgs, code, run::CommandError};

/// Asks the replicas of a service who holds the slots of its limits, and who waits; changes limits for a time; and runs
/// commands under them.
///
/// Exit codes: 0 done; 1 refused, or not found, and nothing changed; 2 wrong call; 3 the store did not answer; 4 not all
/// replicas have answered, or confirmed a change, or none is there; 5 the output could not be written. `run` has its own.
#[derive(Debug, Parser)]
#[command(name = "turnstile", version)]
pub(crate) struct Args {
    /// URL of the store. A password in an argument is seen by everybody on the machine: prefer the environment.
    #[arg(long, env = "TURNSTILE_STORE", hide_env_values = true)]
    store: Option<String>,

    /// Namespace of the service.
    #[arg(long, env = "TURNSTILE_NAMESPACE", default_value = "turnstile")]
    pub namespace: String,

    /// Print one JSON array of flat objects.
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: Command,
}

impl Args {
    pub(crate) fn store(&self) -> Result<&str, CommandError> {
        self.store.as_deref().ok_or_else(|| {
            let message = "say the store: by --store, or in the environment by TURNSTILE_STORE";
            CommandError::new(code::WRONG_CALL, message.to_owned())
        })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Limits and replicas on one page.
    Status,
    /// Limits, with what is held and waits under them.
    Limits,
    /// Holders of a limit's slots, and requests that wait for them.
    Permits {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: MaybeCaller,
    },
    /// Keys of a limit that are in use, the longest queues first.
    Keys {
        /// Name of the limit.
        limit: String,
    },
    /// The last refusals of a limit.
    Refusals {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: MaybeCaller,
    },
    /// Replicas, and their settings.
    Replicas,
    /// The outcome of a caller's request now, and why.
    Explain {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: Caller,
    },
    /// The digest of a caller's key, as other commands print it. Asks nobody.
    Digest {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: Caller,
    },
    /// Faults of the store and of the replicas, with any user's rights. Takes a slot of its own, and changes nothing else.
    Doctor,
    /// Reads a configuration file as a service does, and prints its faults, or its limits and routes as they apply.
    ///
    /// It asks no store. With --path it prints what a request would meet. Exit codes: 0 the file is valid, whatever a request
    /// meets; 1 it has faults; 2 wrong call, or it cannot be read.
    Check(CheckArgs),
    /// Runs a command while it holds a slot of a limit.
    ///
    /// It queues with all that use the limit, in order of arrival, and starts the command once it has a slot. Signals go to
    /// the command, which finds the id of its permit in TURNSTILE_PERMIT. When the command ends, the slot is released.
    ///
    /// Killed by SIGKILL, it leaves a command that runs on without a slot, once its lease has ended (30 s): see
    /// --die-with-me. Suspended for longer than that, it loses the slot too.
    ///
    /// Exit codes: that of the command, or 128 and the number of the signal that has ended it. 75: there was no slot, or the
    /// store is down, and the command was not started. 76: the slot was lost, and the command was stopped. 78: the file is
    /// faulty, or the store refuses. 126, 127: the command cannot be executed, or is not there. 2: wrong call.
    #[cfg(unix)]
    #[command(
        after_help = "Example: turnstile run gpu --key acme --concurrent 8 --wait 30m -- python train.py"
    )]
    Run(RunArgs),
    /// Becomes a command that dies with its parent.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    DieWith {
        parent: i32,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    #[command(flatten)]
    Change(ChangeCommand),
}

/// Changes for a time, and commands that make them.
#[derive(Debug, Subcommand)]
pub(crate) enum ChangeCommand {
    /// Changes by operators that are in force.
    Overrides,
    /// The latest changes.
    Log,
    /// Sets the value of a limit, or of one caller, for a time. Lowering takes no slot away.
    Set {
        /// Name of the limit.
        limit: String,
        /// Slots, or requests in a period. Only a caller may have 0.
        value: u32,
        /// Requests of a rate that may start at once after a pause. Without it: as declared; for a caller, as for the limit.
        #[arg(long)]
        burst: Option<u32>,
        #[command(flatten)]
        caller: MaybeCaller,
        #[command(flatten)]
        term: Term,
    },
    /// Sets the mode of a limit for a time. `shadow` and `off` admit everybody.
    Mode {
        /// Name of the limit.
        limit: String,
        mode: ModeArg,
        #[command(flatten)]
        term: Term,
    },
    /// Admits nobody for a time. Newcomers and those who wait are refused; holders finish.
    Pause {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        term: Term,
        /// Wait until nobody holds a slot.
        #[arg(long)]
        wait: bool,
    },
    /// Removes what was changed of a limit, or of one caller: what is declared holds again.
    Unset {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: MaybeCaller,
        #[command(flatten)]
        signature: Signature,
    },
    /// Ends permits that are held: responses end with an error, jobs are told.
    Revoke {
        #[command(flatten)]
        whose: Whose,
        #[command(flatten)]
        caller: MaybeCaller,
        #[command(flatten)]
        signature: Signature,
    },
    /// Takes back the latest change.
    Undo {
        #[command(flatten)]
        signature: Signature,
    },
}

/// Permits to revoke: one, those of a caller under a limit, or those of a replica.
#[derive(Debug, Group)]
#[group(required = true, multiple = false)]
pub(crate) struct Whose {
    /// Id of the permit.
    #[arg(allow_hyphen_values = true)]
    permit: Option<PermitId>,
    /// Name of the limit under which one caller's permits are meant.
    #[arg(long)]
    limit: Option<String>,
    /// Id of the replica.
    #[arg(long, allow_hyphen_values = true)]
    replica: Option<String>,
}

impl Whose {
    /// `None`: a limit goes with a caller, and a caller with a limit.
    pub(crate) fn revocation(&self, caller: &MaybeCaller) -> Option<Revocation> {
        match (self.permit, &self.limit, &self.replica) {
            (Some(permit), None, None) if caller.is_all() => Some(Revocation::Permit(permit)),
            (None, Some(limit), None) => Some(Revocation::Key {
                limit: limit.clone(),
                key: caller.digest(limit)?,
            }),
            (None, None, Some(replica)) if caller.is_all() => {
                Some(Revocation::Replica(replica.clone()))
            }
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ModeArg {
    Enforce,
    Shadow,
    Off,
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Enforce => Self::Enforce,
            ModeArg::Shadow => Self::Shadow,
            ModeArg::Off => Self::Off,
        }
    }
}

/// How long a change holds, by whom, and why.
#[derive(Debug, Group)]
pub(crate) struct Term {
    /// How long it holds: 1s to 7d.
    #[arg(long = "for", value_name = "TIME", value_parser = length)]
    pub length: Duration,
    #[command(flatten)]
    pub signature: Signature,
}

/// By whom, and why. All operators see it.
#[derive(Debug, Group)]
pub(crate) struct Signature {
    /// Why.
    #[arg(long)]
    pub reason: String,
    /// Author of the change.
    #[arg(long, env = "USER")]
    pub author: String,
}

/// One caller.
#[derive(Debug, Group)]
#[group(required = true, multiple = false)]
pub(crate) struct Caller {
    /// The caller's key. Empty for the key that all callers share.
    #[arg(long, allow_hyphen_values = true)]
    key: Option<String>,
    /// The digest of the caller's key.
    #[arg(long, allow_hyphen_values = true)]
    digest: Option<KeyDigest>,
}

/// One caller, or all.
#[derive(Debug, Group)]
#[group(required = false, multiple = false)]
pub(crate) struct MaybeCaller {
    /// The caller's key. Empty for the key that all callers share.
    #[arg(long, allow_hyphen_values = true)]
    key: Option<String>,
    /// The digest of the caller's key.
    #[arg(long, allow_hyphen_values = true)]
    digest: Option<KeyDigest>,
}

impl Caller {
    pub(crate) fn digest(&self, limit: &str) -> KeyDigest {
        digest(limit, self.key.as_deref(), self.digest).unwrap_or_else(|| KeyDigest::of(limit, ""))
    }
}

impl MaybeCaller {
    fn is_all(&self) -> bool {
        self.key.is_none() && self.digest.is_none()
    }

    pub(crate) fn digest(&self, limit: &str) -> Option<KeyDigest> {
        digest(limit, self.key.as_deref(), self.digest)
    }
}

fn digest(limit: &str, key: Option<&str>, digest: Option<KeyDigest>) -> Option<KeyDigest> {
    digest.or_else(|| key.map(|key| KeyDigest::of(limit, key)))
}
