//! Questions and answers on the wire: JSON, read only once their size is known to be small.

use serde::{Deserialize, Serialize};

use super::{
    answer::{KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow},
    changes::Revocation,
    digest::KeyDigest,
};

/// Format of messages. A replica ignores those of another one.
pub(super) const VERSION: u32 = 1;

/// A message on the control channel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Message {
    /// The format.
    pub v: u32,
    /// The operator, which is the last part of the channel of its answers.
    pub from: String,
    /// Numbers the operator's messages.
    pub number: u64,
    /// Until when it counts, in milliseconds of the store's clock.
    pub not_after_ms: u64,
    /// Replicas on the roster: they do not answer all at once.
    pub replicas: u32,
    pub ask: Question,
}

/// The question or order of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Question {
    Replicas,
    Limits,
    Permits(Of),
    Keys(Of),
    Refusals(Of),
    /// Overrides that a replica has in force and that are not recorded.
    Overrides(Seen),
    /// To revoke permits.
    Revoke(RevokeOrder),
    /// The operators' record has changed.
    ReadAgain,
}

/// A limit, and perhaps one of its keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Of {
    pub limit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyDigest>,
}

/// The record of overrides that an operator has seen, by the token of its latest change. A replica that has seen another one
/// reads it again before it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Seen {
    pub token: Option<String>,
}

/// An order to revoke permits. Author and reason are logged by those that obey.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RevokeOrder {
    pub whose: Revocation,
    pub author: String,
    pub reason: String,
}

/// A replica's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub v: u32,
    pub number: u64,
    pub replica: String,
    pub label: String,
    /// In a cluster: the ids by which each part of it knows this replica.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    pub body: Body,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Body {
    /// It is asked too often.
    Busy,
    /// It has no limit of this name.
    UnknownLimit,
    Replicas(Vec<ReplicaRow>),
    Limits(Vec<LimitRow>),
    Permits(Vec<PermitRow>),
    Keys(Vec<KeyRow>),
    Refusals(Vec<RefusalRow>),
    Overrides(Applied),
}

/// The overrides of a replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Applied {
    /// That of the record that it applies.
    pub token: Option<String>,
    /// Fields and texts that it applies and that are not recorded.
    pub unrecorded: Vec<[String; 2]>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}
