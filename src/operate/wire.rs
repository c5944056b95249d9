//! Questions and answers on the wire: JSON, parsed only after a check of its size.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::rows::{KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow, TenantRow, is_default};
use crate::{
    overrides::{KeyDigest, Target},
    permit_id::PermitId,
};

/// A message on the control channel. The fields before the last two are the same in all formats.
#[derive(Debug, Serialize, Deserialize)]
pub struct Message<Q = Question> {
    /// The format.
    pub v: u32,
    /// The operator's id, which is the last part of its answer channel's name.
    pub from: String,
    /// Numbers the operator's messages.
    pub number: u64,
    /// Until when the message is valid, in milliseconds on the store's clock.
    pub not_after_ms: u64,
    /// Number of replicas on the roster.
    #[serde(default)]
    pub replicas: u32,
    /// Number of those that have answered lately or are new. Replicas spread their answers over time accordingly.
    #[serde(default)]
    pub expected: u32,
    pub ask: Q,
}

impl Message {
    /// The format: see `formats.rs` of the operators' tests. To a question in another format a replica answers that it is busy, in its own: the operator then names
    /// it as one of another version.
    pub const VERSION: u32 = 2;
    /// Maximum size, in bytes.
    pub const MAX: usize = 4 * 1_024;
}

/// The question or order of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Question {
    Replicas,
    /// All limits, or the limit of this name.
    Limits(Option<String>),
    Permits(Target),
    Keys(Target),
    Refusals(Target),
    /// Tenants of a fair limit.
    Tenants(Target),
    /// Overrides that a replica has in force but that are not recorded. With the token of the latest change that the operator
    /// has seen in the record: a replica that has seen another reads it again before it answers.
    Overrides(Option<String>),
    /// Revoke permits.
    Revoke {
        of: Revocation,
        author: String,
        reason: String,
    },
    /// End pauses.
    Resume {
        of: Target,
        author: String,
        reason: String,
    },
    /// The operators' record has changed.
    ReadAgain,
}

/// Permits to revoke.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Revocation {
    /// One permit, with its slots of all limits.
    Permit(PermitId),
    /// All permits of a caller under a limit.
    Key {
        /// The limit's name.
        limit: String,
        /// The caller.
        key: KeyDigest,
    },
    /// All permits of a replica, by its id.
    Replica(String),
}

impl fmt::Display for Revocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Permit(id) => write!(f, "permit {id}"),
            Self::Key { limit, key } => Target::digest(limit, *key).fmt(f),
            Self::Replica(id) => write!(f, "replica {id}"),
        }
    }
}

/// A replica's answer. `v` and `replica` are the same in all formats.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    pub v: u32,
    pub number: u64,
    pub replica: String,
    pub label: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub left_out: u64,
    pub body: Body,
}

impl Answer {
    /// Maximum size, in bytes.
    pub const MAX: usize = 16 * 1_024;
}

/// What a replica answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Body {
    /// The replica is asked too often.
    Busy,
    /// The replica does not have a limit of this name.
    UnknownLimit,
    /// The replica has a limit of this name, which is not fair.
    NotFair,
    Replicas(Vec<ReplicaRow>),
    Limits(Vec<LimitRow>),
    Permits(Vec<PermitRow>),
    /// The permits that a replica has revoked, running ones first, and how many of all these are still held.
    Revoked {
        running: u64,
        permits: Vec<PermitRow>,
    },
    Keys(Vec<KeyRow>),
    Refusals(Vec<RefusalRow>),
    Tenants(Vec<TenantRow>),
    /// The token of the record in force, and fields and texts in force but not recorded.
    Overrides {
        token: Option<String>,
        unrecorded: Vec<[String; 2]>,
    },
}
