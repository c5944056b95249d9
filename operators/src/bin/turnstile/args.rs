//! The arguments.

#[cfg(target_os = "linux")]
use std::ffi::OsString;
use std::time::Duration;

use clap::{
    ArgGroup, Args as Group, Parser, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use tower_turnstile::{Mode, PermitId};
use tower_turnstile_operate::{KeyDigest, Revocation, Target, TenantDigest};

use crate::{check::CheckArgs, code, commands::CommandError, text::parse_duration};
#[cfg(unix)]
use crate::{job::RunArgs, serve::ServeArgs};

/// Shows who holds the slots of a service's limits and who waits, by asking its replicas; changes limits for a limited
/// time; runs commands under them; and serves their slots to programs.
///
/// Exit codes: 0 done; 1 refused or not found, and nothing changed; 2 wrong call; 3 the store did not answer; 4 some
/// replicas, or all, have not answered or confirmed a change, or none has the changed limit; 5 the output could not be
/// written. `run` and `serve` have their own.
#[derive(Debug, Parser)]
#[command(name = "turnstile", version)]
pub(crate) struct Args {
    /// URL of the store. Everybody on the machine can see a password in an argument: prefer the environment.
    #[arg(long, global = true, env = "TURNSTILE_STORE", hide_env_values = true)]
    store: Option<String>,

    /// Namespace of the service. A file with a store has its own.
    #[arg(long, env = "TURNSTILE_NAMESPACE", default_value = "turnstile")]
    #[arg(global = true)]
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
            let message = "no store is given: pass --store, or set TURNSTILE_STORE";
            CommandError::new(code::WRONG_CALL, message.to_owned())
        })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Limits and replicas on one page.
    Status,
    /// Limits, with their holders and waiters.
    Limits,
    /// Holders of a limit's slots, and waiting requests.
    Permits(Of),
    /// Keys of a limit in use, longest queues first.
    Keys {
        /// Name of the limit.
        limit: String,
    },
    /// Tenants of a fair limit in use, longest queues first: their shares, and what they owe the others.
    Tenants(Of),
    /// The last refusals of a limit.
    Refusals(Of),
    /// Replicas, and their settings.
    Replicas,
    /// The outcome of a caller's next request, and the reasons. Without a caller: under a limit that all callers share.
    ///
    /// With a tenant of a fair limit: only the requests of this tenant.
    Explain {
        #[command(flatten)]
        of: Of,
        #[command(flatten)]
        tenant: Tenant,
    },
    /// The digest of a caller's key, or of a tenant, as shown by other commands. Works offline.
    #[command(group(ArgGroup::new("who").args(["key", "digest", "tenant"]).required(true)))]
    Digest {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: Caller,
        /// The tenant. Its digest is the same under all limits.
        #[arg(long, allow_hyphen_values = true)]
        tenant: Option<String>,
    },
    /// Diagnoses the store and the replicas, with any user's permissions. Acquires a separate slot, and changes nothing
    /// else.
    Doctor,
    /// Reads a configuration file like a service, and prints its faults, or its limits and routes as they apply.
    ///
    /// No store is asked. With --path the command prints which limits apply to a request. Exit codes: 0 the file is
    /// valid, whatever the outcome for the request; 1 it has faults; 2 wrong call, or it cannot be read.
    Check(CheckArgs),
    /// Runs a command while holding a slot of a limit.
    ///
    /// It queues with all other users of the limit, in order of arrival, or with --tenant in fair shares among tenants,
    /// and starts the command once it has a slot. The command finds its permit's id in TURNSTILE_PERMIT.
    ///
    /// On Linux the slot is held until the last process that descends from the command has ended, daemons too, and signals
    /// go to all of these, SIGUSR1 and SIGUSR2 to the command alone: see --only-child.
    ///
    /// In the foreground of a terminal, SIGINT and SIGQUIT are taken for the terminal's, which the command has received too,
    /// and are not passed on: send SIGTERM instead.
    ///
    /// The command inherits the environment, with TURNSTILE_STORE and TURNSTILE_KEY, and so can run `turnstile` itself.
    /// Start it by `env -u TURNSTILE_STORE` if it may not have the store's password.
    ///
    /// If it is killed by SIGKILL, the command continues without a slot once its lease has ended (30 s): see
    /// --die-with-me. If it is suspended for longer than that, it loses the slot too.
    ///
    /// Exit codes: the command's exit code, or 128 plus the number of the signal that ended it. 75: no slot, or the
    /// store is down, and the command was not started. 76: the slot was lost, and the command was stopped. 124: stopped by
    /// --max-hold. 78: the file is faulty, the store refuses, or other holders have another value. 126, 127: the command cannot be executed, or was not found. 2: wrong call.
    #[cfg(unix)]
    #[command(
        after_help = "Example: turnstile run gpu --key acme --concurrent 8 --wait 30m -- python train.py"
    )]
    Run(RunArgs),
    /// Serves slots over HTTP, to programs in any language.
    ///
    /// A client holds a slot for as long as its request lives: curl -N http://127.0.0.1:3100/slots/gpu -d key=acme. The
    /// guide's page "Not Rust" has parameters, events and a client in Python. SIGTERM tells holders to finish within
    /// --grace. If the server is killed by SIGKILL, the slots of its clients are free once their leases have ended (30 s).
    ///
    /// Exit codes: 0: ended by a signal. 1: cannot listen. 2: wrong call. 75: a limit is given without slots, and the store
    /// does not answer. 78: the file is faulty, the store refuses, or other holders have another value.
    #[cfg(unix)]
    #[command(after_help = "Example: turnstile serve --limit gpu=2 --fair --page 127.0.0.1:3101")]
    Serve(ServeArgs),
    /// Runs a command that dies with its parent.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    DieWith {
        parent: i32,
        #[arg(long)]
        only_child: bool,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Overrides in force.
    Overrides,
    /// The latest changes.
    Log,
    #[command(flatten)]
    Change(ChangeCommand),
}

/// Orders.
#[derive(Debug, Subcommand)]
pub(crate) enum ChangeCommand {
    /// Sets the value of a limit, or of one caller, or the share of a tenant, for a limited time. A lower value revokes
    /// no slot.
    #[command(mut_group("Tenant", |group| group.conflicts_with_all(["value", "burst", "Caller"])))]
    Set {
        /// Name of the limit.
        limit: String,
        /// Slots, or requests per period. Only a caller may have 0.
        #[arg(required_unless_present = "share")]
        value: Option<u32>,
        /// Share of a tenant of a fair limit, in place of a value: 1 to 1000.
        #[arg(long, requires = "Tenant", conflicts_with = "value")]
        share: Option<u32>,
        #[command(flatten)]
        tenant: Tenant,
        /// Requests of a rate that may start at once after a pause. Default: as declared; for a caller, as for the
        /// limit.
        #[arg(long)]
        burst: Option<u32>,
        #[command(flatten)]
        caller: Caller,
        #[command(flatten)]
        term: Term,
    },
    /// Sets the mode of a limit for a limited time. `shadow` and `off` admit everybody.
    Mode {
        /// Name of the limit.
        limit: String,
        #[arg(value_parser = mode())]
        mode: Mode,
        #[command(flatten)]
        term: Term,
    },
    /// Admits nobody for a limited time. Newcomers and waiting requests are refused; holders finish.
    Pause {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        term: Term,
        /// Wait until nobody holds a slot.
        #[arg(long)]
        wait: bool,
    },
    /// Removes the overrides of a limit, of one caller, or of one tenant: the declared values apply again.
    #[command(mut_group("Tenant", |group| group.conflicts_with("Caller")))]
    Unset {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: Caller,
        #[command(flatten)]
        tenant: Tenant,
        #[command(flatten)]
        signature: Signature,
    },
    /// Revokes held permits: responses end with an error, jobs are notified.
    Revoke {
        #[command(flatten)]
        whose: Whose,
        #[command(flatten)]
        caller: Caller,
        #[command(flatten)]
        signature: Signature,
    },
    /// Ends the pause of a caller, or of all callers of a limit, that an overloaded upstream has asked for. Waiting
    /// requests are admitted at once.
    Resume {
        /// Name of the limit.
        limit: String,
        #[command(flatten)]
        caller: Caller,
        #[command(flatten)]
        signature: Signature,
    },
}

impl ChangeCommand {
    pub(crate) fn signature(&self) -> &Signature {
        match self {
            Self::Set { term, .. } | Self::Mode { term, .. } | Self::Pause { term, .. } => {
                &term.signature
            }
            Self::Unset { signature, .. }
            | Self::Revoke { signature, .. }
            | Self::Resume { signature, .. } => signature,
        }
    }
}

/// Permits to revoke: one permit, a caller's permits under a limit, or a replica's permits.
#[derive(Debug, Group)]
#[group(required = true, multiple = false)]
pub(crate) struct Whose {
    /// Id of the permit.
    #[arg(allow_hyphen_values = true)]
    permit: Option<PermitId>,
    /// Name of the limit of the caller's permits.
    #[arg(long)]
    limit: Option<String>,
    /// Id of the replica.
    #[arg(long, allow_hyphen_values = true)]
    replica: Option<String>,
}

impl Whose {
    /// `None` if a limit is given without a caller, or a caller without a limit.
    pub(crate) fn revocation(&self, caller: &Caller) -> Option<Revocation> {
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

fn mode() -> impl TypedValueParser<Value = Mode> {
    let modes = [Mode::Enforce, Mode::Shadow, Mode::Off];
    PossibleValuesParser::new(modes.map(Mode::as_str)).map(move |word| {
        let mode = modes.into_iter().find(|mode| mode.as_str() == word);
        mode.expect("one of the words")
    })
}

/// The length of a change, its author and its reason.
#[derive(Debug, Group)]
pub(crate) struct Term {
    /// Length of the change: 1s to 7d.
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    pub length: Duration,
    #[command(flatten)]
    pub signature: Signature,
}

/// Author and reason, shown to all operators.
#[derive(Debug, Group)]
pub(crate) struct Signature {
    /// Reason for the change.
    #[arg(long)]
    pub reason: String,
    /// Author of the change.
    #[arg(long, env = "USER")]
    pub author: String,
}

/// A limit and a caller, or all callers.
#[derive(Debug, Group)]
#[group(skip)]
pub(crate) struct Of {
    /// Name of the limit.
    pub limit: String,
    #[command(flatten)]
    pub caller: Caller,
}

/// One caller, or all unless the command requires one.
#[derive(Debug, Group)]
#[group(multiple = false)]
pub(crate) struct Caller {
    /// The caller's key. Empty for the key that all callers share.
    #[arg(long, allow_hyphen_values = true)]
    key: Option<String>,
    /// The digest of the caller's key.
    #[arg(long, allow_hyphen_values = true)]
    digest: Option<KeyDigest>,
}

impl Caller {
    fn is_all(&self) -> bool {
        self.key.is_none() && self.digest.is_none()
    }

    pub(crate) fn digest(&self, limit: &str) -> Option<KeyDigest> {
        let key = self.key.as_deref();
        self.digest
            .or_else(|| key.map(|key| KeyDigest::of(limit, key)))
    }

    /// For a command that requires a caller.
    pub(crate) fn one(&self, limit: &str) -> KeyDigest {
        self.digest(limit).expect("the arguments are checked")
    }

    pub(crate) fn target(&self, limit: &str) -> Target {
        match self.digest(limit) {
            Some(digest) => Target::digest(limit, digest),
            None => Target::limit(limit),
        }
    }
}

/// One tenant of a fair limit, or none.
#[derive(Debug, Group)]
#[group(multiple = false)]
pub(crate) struct Tenant {
    /// The tenant.
    #[arg(long, allow_hyphen_values = true)]
    tenant: Option<String>,
    /// The digest of the tenant.
    #[arg(long, allow_hyphen_values = true)]
    tenant_digest: Option<TenantDigest>,
}

impl Tenant {
    pub(crate) fn name(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    pub(crate) fn digest(&self) -> Option<TenantDigest> {
        let tenant = self.tenant.as_deref();
        self.tenant_digest.or_else(|| tenant.map(TenantDigest::of))
    }
}
