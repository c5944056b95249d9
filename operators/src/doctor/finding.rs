//! A finding: the subject of a check, and its health.

use serde::{Deserialize, Serialize};

/// The result of a check: see [`OperatorBuilder::diagnose`](crate::OperatorBuilder::diagnose).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// The subject of the check.
    pub check: Check,
    /// The result.
    pub health: Health,
    /// The observation, and the remedy if one is needed.
    pub text: String,
}

/// The subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Check {
    /// The server's kind and version.
    Version,
    /// Whether the server may evict permits.
    Eviction,
    /// Whether the server's output buffers allow connections with a subscription.
    Buffers,
    /// The duration of a round trip.
    Latency,
    /// The server's clock compared with this machine's.
    Clock,
    /// Whether a service would work: slots are acquired, handed over and released, on a separate key.
    Service,
    /// Whether the user has a service's permissions.
    ServiceRights,
    /// Whether the user has the permissions of an operator who asks and revokes.
    AskingRights,
    /// Whether the user has the permissions of an operator who changes limits.
    ChangingRights,
    /// The keys of the namespace.
    Keys,
    /// Whether all replicas answer, reach the store, and have the same settings.
    Replicas,
    /// Whether all replicas have the same values for the limits.
    Limits,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Health {
    /// As it should be.
    Good,
    /// Could not be checked, or needs no action.
    Note,
    /// Works, with a disadvantage described in the text.
    Warning,
    /// Does not work, or loses permits.
    Fault,
}

impl Check {
    /// Returns the name of the check, such as `service_rights`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::Eviction => "eviction",
            Self::Buffers => "buffers",
            Self::Latency => "latency",
            Self::Clock => "clock",
            Self::Service => "service",
            Self::ServiceRights => "service_rights",
            Self::AskingRights => "asking_rights",
            Self::ChangingRights => "changing_rights",
            Self::Keys => "keys",
            Self::Replicas => "replicas",
            Self::Limits => "limits",
        }
    }
}

impl Health {
    /// Returns the name of the result, such as `warning`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }
}

impl Finding {
    pub(super) fn new(check: Check, health: Health, text: impl Into<String>) -> Self {
        let text = text.into();
        Self {
            check,
            health,
            text,
        }
    }
}

/// Maximum number of names in a text: everybody who may write a ledger can add thousands of replicas to the roster.
const MAX_SHOWN: usize = 20;

/// The first of these names, and the number of the others.
pub(super) fn abridged(names: &[String]) -> String {
    let (shown, more) = names.split_at(names.len().min(MAX_SHOWN));
    match more.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_and_its_health_are_the_same_words_in_json() {
        let checks = [
            Check::Version,
            Check::Eviction,
            Check::Buffers,
            Check::Latency,
            Check::Clock,
            Check::Service,
            Check::ServiceRights,
            Check::AskingRights,
            Check::ChangingRights,
            Check::Keys,
            Check::Replicas,
            Check::Limits,
        ];
        for check in checks {
            assert_eq!(serde_json::to_value(check).unwrap(), check.as_str());
        }
        for health in [Health::Good, Health::Note, Health::Warning, Health::Fault] {
            assert_eq!(serde_json::to_value(health).unwrap(), health.as_str());
        }
    }
}
