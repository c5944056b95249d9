//! The arguments.

use clap::{Args as Group, Parser, Subcommand};
use tower_turnstile::operate::KeyDigest;

/// Asks the replicas of a service who holds the slots of its limits, and who waits.
///
/// Exit codes: 0 done; 1 refused, or not found; 2 wrong call; 3 the store did not answer; 4 not all replicas have answered.
#[derive(Debug, Parser)]
#[command(name = "turnstile", version)]
pub(crate) struct Args {
    /// URL of the store. A password in an argument is seen by everybody on the machine: prefer the environment.
    #[arg(long, env = "TURNSTILE_STORE", hide_env_values = true)]
    pub store: String,

    /// Namespace of the service.
    #[arg(long, env = "TURNSTILE_NAMESPACE", default_value = "turnstile")]
    pub namespace: String,

    /// Print one JSON array of flat objects.
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Limits and replicas on one page.
    Status,
    /// Limits, with what is held and waits under them.
    Limits,
    /// Who holds slots of a limit, and who waits for them.
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
    /// What a request of one caller would meet now, and why.
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
}

/// One caller.
#[derive(Debug, Group)]
#[group(required = true, multiple = false)]
pub(crate) struct Caller {
    /// The caller's key. Empty for the key that all callers share.
    #[arg(long)]
    key: Option<String>,
    /// The digest of the caller's key.
    #[arg(long)]
    digest: Option<KeyDigest>,
}

/// One caller, or all.
#[derive(Debug, Group)]
#[group(required = false, multiple = false)]
pub(crate) struct MaybeCaller {
    /// The caller's key. Empty for the key that all callers share.
    #[arg(long)]
    key: Option<String>,
    /// The digest of the caller's key.
    #[arg(long)]
    digest: Option<KeyDigest>,
}

impl Caller {
    pub(crate) fn digest(&self, limit: &str) -> KeyDigest {
        digest(limit, self.key.as_deref(), self.digest).unwrap_or_else(|| KeyDigest::of(limit, ""))
    }
}

impl MaybeCaller {
    pub(crate) fn digest(&self, limit: &str) -> Option<KeyDigest> {
        digest(limit, self.key.as_deref(), self.digest)
    }
}

fn digest(limit: &str, key: Option<&str>, digest: Option<KeyDigest>) -> Option<KeyDigest> {
    digest.or_else(|| key.map(|key| KeyDigest::of(limit, key)))
}
