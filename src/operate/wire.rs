//! Questions and answers on the wire: JSON, parsed only after a check of its size.

use serde::{Deserialize, Serialize};

use super::{
    answer::{KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow, TenantRow},
    changes::Revocation,
};
use crate::overrides::KeyDigest;

/// Format of messages. To a question in another format a replica answers that it is busy, in its own: the operator then
/// names it as one of another version.
pub(super) const VERSION: u32 = 1;

/// Maximum size of a question, in bytes.
#[cfg(feature = "redis")]
pub(super) const MAX_QUESTION: usize = 4 * 1_024;

/// A message on the control channel. The fields before the last two are the same in all formats.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Message<Q = Question> {
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

/// The question or order of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Question {
    Replicas,
    /// All limits, or the limit of this name.
    Limits(Option<String>),
    Permits(Of),
    Keys(Of),
    Refusals(Of),
    /// Tenants of a fair limit.
    Tenants(Of),
    /// Overrides that a replica has in force but that are not recorded. With the token of the latest change that the operator
    /// has seen in the record: a replica that has seen another reads it again before it answers.
    Overrides(Option<String>),
    /// Revoke permits.
    Revoke(SignedOrder<Revocation>),
    /// End pauses.
    Resume(SignedOrder<Of>),
    /// The operators' record has changed.
    ReadAgain,
}

/// A limit and optionally one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Of {
    pub limit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyDigest>,
}

/// An order to revoke permits, or to end the pauses of keys. Replicas that carry it out log the author and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SignedOrder<T> {
    pub of: T,
    pub author: String,
    pub reason: String,
}

/// A replica's answer. `v` and `replica` are the same in all formats.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub v: u32,
    pub number: u64,
    pub replica: String,
    pub label: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    pub body: Body,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Body {
    /// The replica is asked too often.
    Busy,
    /// The replica does not have a limit of this name.
    UnknownLimit,
    /// The replica has a limit of this name, which is not fair.
    NotFair,
    Replicas(Vec<ReplicaRow>),
    Limits(Vec<LimitRow>),
    Permits(Vec<PermitRow>),
    Revoked(RevokedHere),
    Keys(Vec<KeyRow>),
    Refusals(Vec<RefusalRow>),
    Tenants(Vec<TenantRow>),
    Overrides(Applied),
}

/// The permits that a replica has revoked, running ones first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RevokedHere {
    /// Number of permits that are still held, among all revoked ones.
    pub running: u64,
    pub permits: Vec<PermitRow>,
}

/// The overrides of a replica.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Applied {
    /// The token of the record in force.
    pub token: Option<String>,
    /// Fields and texts in force but not recorded.
    pub unrecorded: Vec<[String; 2]>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}
