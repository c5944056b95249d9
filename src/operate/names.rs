//! Names in the store: the operators' record, roster and channels.

/// The names of one namespace in one database.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    namespace: String,
    /// Channels are common to all databases of a server.
    db: i64,
}

impl Names {
    pub(crate) fn new(namespace: &str, db: i64) -> Self {
        Self {
            namespace: namespace.to_owned(),
            db,
        }
    }

    /// The key of the record of overrides. Its hash slot is that of all keys here.
    pub(crate) fn record(&self) -> String {
        format!("{}:control", self.namespace)
    }

    /// The key of the log of changes. Services may not write it: unlike a ledger it does not begin with `<namespace>:{`.
    pub(crate) fn log(&self) -> String {
        format!("{{{}:control}}:log", self.namespace)
    }

    /// The key of the roster. Like the ledgers it begins with `<namespace>:{`, so that services may write it.
    pub(crate) fn roster(&self) -> String {
        format!("{0}:{{{0}:control}}:roster", self.namespace)
    }

    /// The channel of questions and orders.
    pub(crate) fn control_channel(&self) -> String {
        format!("{}:control:{}", self.namespace, self.db)
    }

    /// The channel of the answers to one operator.
    pub(crate) fn answer_channel(&self, operator: &str) -> String {
        format!("{}:answer:{operator}", self.namespace)
    }
}
