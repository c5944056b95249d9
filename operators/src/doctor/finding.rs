//! A finding: the subject of a check, and its health.

use serde::{Deserialize, Serialize};

use crate::kinds::kinds;

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

kinds! {
    /// The subject of a check, with a name such as `service_rights`.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[non_exhaustive]
    pub enum Check {
        /// The server's kind and version.
        Version = "version",
        /// Whether the server may evict permits.
        Eviction = "eviction",
        /// Whether the server's output buffers allow connections with a subscription.
        Buffers = "buffers",
        /// The duration of a round trip.
        Latency = "latency",
        /// The server's clock compared with this machine's.
        Clock = "clock",
        /// Whether a service would work: slots are acquired, handed over and released, on a separate key.
        Service = "service",
        /// Whether the user has a service's permissions.
        ServiceRights = "service_rights",
        /// Whether the user has the permissions of an operator who asks and revokes.
        AskingRights = "asking_rights",
        /// Whether the user has the permissions of an operator who changes limits.
        ChangingRights = "changing_rights",
        /// The keys of the namespace.
        Keys = "keys",
        /// Whether all replicas answer, reach the store, and have the same settings.
        Replicas = "replicas",
        /// Whether all replicas have the same values for the limits.
        Limits = "limits",
    }
}

kinds! {
    /// The result of a check, with a name such as `warning`.
    #[derive(PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[non_exhaustive]
    pub enum Health {
        /// As it should be.
        Good = "good",
        /// Could not be checked, or needs no action.
        Note = "note",
        /// Works, with a disadvantage described in the text.
        Warning = "warning",
        /// Does not work, or loses permits.
        Fault = "fault",
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
        for check in Check::ALL {
            assert_eq!(serde_json::to_value(check).unwrap(), check.as_str());
        }
        for health in Health::ALL {
            assert_eq!(serde_json::to_value(health).unwrap(), health.as_str());
        }
    }
}
