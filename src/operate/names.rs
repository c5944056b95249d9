//! Names in the store: the operators' record, roster and channels.

use crate::{overrides::KeyDigest, part::Part};

/// The names of one namespace in one database.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    namespace: String,
    /// Channels are shared by all databases of a server.
    db: i64,
    in_cluster: bool,
}

impl Names {
    pub(crate) fn new(namespace: &str, db: i64) -> Self {
        Self {
            namespace: namespace.to_owned(),
            db,
            in_cluster: false,
        }
    }

    /// In a cluster the names of ledgers begin with their part.
    pub(crate) fn in_cluster(self, in_cluster: bool) -> Self {
        Self { in_cluster, ..self }
    }

    pub(crate) fn is_in_cluster(&self) -> bool {
        self.in_cluster
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(crate) fn ledger(&self, digest: KeyDigest) -> String {
        if self.in_cluster {
            format!(
                "{}{digest}",
                Part::of(digest.bits()).prefix(&self.namespace)
            )
        } else {
            format!("{}:{{{digest}}}", self.namespace)
        }
    }

    /// The common prefix of all ledgers' keys; in a cluster, of one part.
    pub(crate) fn ledgers(&self, part: Option<Part>) -> String {
        match part {
            Some(part) => part.prefix(&self.namespace),
            None => format!("{}:{{", self.namespace),
        }
    }

    /// The key of the record of overrides. All keys below share its hash slot.
    pub(crate) fn record(&self) -> String {
        format!("{}:control", self.namespace)
    }

    /// The key of the log of changes. It does not begin with `<namespace>:{` like a ledger, so services cannot write
    /// it.
    pub(crate) fn log(&self) -> String {
        format!("{{{}:control}}:log", self.namespace)
    }

    /// The key of the roster. It begins with `<namespace>:{` like the ledgers, so that services can write it.
    pub(crate) fn roster(&self) -> String {
        format!("{0}:{{{0}:control}}:roster", self.namespace)
    }

    /// The channel of questions and orders.
    pub(crate) fn control_channel(&self) -> String {
        format!("{}:control:{}", self.namespace, self.db)
    }

    pub(crate) fn answer_channel(&self, operator: &str) -> String {
        format!("{}:answer:{operator}", self.namespace)
    }
}
