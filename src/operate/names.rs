//! Names in the store: ledgers, and the operators' record, roster and channels.

use crate::{
    key::Key,
    ledger::ReplicaId,
    overrides::KeyDigest,
    part::{Part, Parts},
    store::redis::StoreTarget,
};

/// The names of one namespace in one database.
#[derive(Clone, Debug)]
pub struct Names {
    namespace: String,
    /// Channels are shared by all databases of a server.
    db: i64,
    /// In a cluster the names of ledgers begin with their part.
    parts: Parts,
}

impl Names {
    pub(crate) fn new(namespace: &str, target: &StoreTarget) -> Self {
        Self {
            namespace: namespace.to_owned(),
            db: target.db(),
            parts: target.layout(),
        }
    }

    /// Whether this is the id of a replica or an operator.
    pub fn is_id(text: &str) -> bool {
        ReplicaId::is_text(text)
    }

    /// Whether the keys are spread over the nodes of a cluster.
    pub fn is_in_cluster(&self) -> bool {
        self.parts.is_cluster()
    }

    /// The prefix of all names.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The key of a ledger.
    pub fn ledger(&self, digest: KeyDigest) -> String {
        if self.is_in_cluster() {
            let prefix = Part::of(digest.bits()).prefix(&self.namespace);
            format!("{prefix}{digest}")
        } else {
            format!("{}:{{{digest}}}", self.namespace)
        }
    }

    /// The common prefix of all ledgers' keys; in a cluster, of those in the target's part.
    pub fn ledgers(&self, target: &StoreTarget) -> String {
        match target.part() {
            Some(part) => part.prefix(&self.namespace),
            None => format!("{}:{{", self.namespace),
        }
    }

    /// The key of the generation of the data; in a cluster, of the first part's.
    pub fn generation(&self) -> String {
        self.parts.generation_key(Part::default(), &self.namespace)
    }

    /// The key of the record of overrides. All keys below share its hash slot.
    pub fn record(&self) -> String {
        format!("{}:control", self.namespace)
    }

    /// The key of the log of changes. It does not begin with `<namespace>:{` like a ledger, so services cannot write
    /// it.
    pub fn log(&self) -> String {
        format!("{{{}:control}}:log", self.namespace)
    }

    /// The key of the roster. It begins with `<namespace>:{` like the ledgers, so that services can write it.
    pub fn roster(&self) -> String {
        format!("{0}:{{{0}:control}}:roster", self.namespace)
    }

    /// The key of what the store has about a limit, such as `declared`.
    pub fn about(&self, limit: &str, what: &str) -> String {
        let digest = KeyDigest::of(limit, Key::SHARED);
        format!("{0}:{{{0}:control}}:{what}:{digest}", self.namespace)
    }

    /// The channel of questions and orders.
    pub fn control_channel(&self) -> String {
        format!("{}:control:{}", self.namespace, self.db)
    }

    /// The channel of answers to the operator with this id.
    pub fn answer_channel(&self, operator: &str) -> String {
        format!("{}:answer:{operator}", self.namespace)
    }

    /// The namespace of the key of a ledger or a roster. `None` if it has another format.
    pub fn namespace_of(key: &[u8]) -> Option<String> {
        let key = str::from_utf8(key).ok()?;
        let (namespace, rest) = key.rsplit_once(":{")?;
        let (tag, rest) = rest.split_once('}')?;
        let is_digest = |text: &str| text.parse::<KeyDigest>().is_ok();
        let is_roster = rest == ":roster" && tag.strip_suffix(":control") == Some(namespace);
        let in_part = || Part::all().any(|part| part.tag() == tag);
        let in_cluster = || rest.strip_prefix(':').is_some_and(is_digest) && in_part();
        let is_ours = is_roster || rest.is_empty() && is_digest(tag) || in_cluster();
        (is_ours && !namespace.is_empty()).then(|| namespace.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_ours_have_a_namespace() {
        let digest = KeyDigest::of("chat", "acme");
        for namespace in ["turnstile", "shop:eu", "a.b-c_d"] {
            let of = |parts| Names {
                namespace: namespace.to_owned(),
                db: 0,
                parts,
            };
            let (names, in_cluster) = (of(Parts::WHOLE), of(Parts::CLUSTER));
            for key in [
                names.roster(),
                names.ledger(digest),
                in_cluster.ledger(digest),
            ] {
                assert_eq!(
                    Names::namespace_of(key.as_bytes()).as_deref(),
                    Some(namespace),
                    "{key}"
                );
            }
            assert_eq!(Names::namespace_of(names.record().as_bytes()), None);
        }
        for other in [
            "",
            "{a}",
            "bull:{queue}:wait",
            "shop:{other:control}:roster",
            "shop:{0123}",
            ":{0123456789abcdef0123456789abcdef}",
            "shop:{no}:0123456789abcdef0123456789abcdef",
        ] {
            assert_eq!(Names::namespace_of(other.as_bytes()), None, "{other}");
        }
        assert_eq!(Names::namespace_of(b"\xff:{a}"), None);
    }
}
