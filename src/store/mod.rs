//! The store: where ledgers live when they are shared by replicas.
//!
//! A store runs an [`Exchange`] and tells of [`Event`]s. It knows nothing of permits, time limits or retries: those
//! are the keeper's. The in-process ledger needs no store: the keeper runs it itself.

#[cfg(feature = "redis")]
pub(crate) mod redis;
mod server_error;

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;

use crate::ledger::{Exchange, LedgerError, Reply, Wake};

/// Runs exchanges. Nothing here spawns a task that outlives [`Store::disconnect`].
pub(crate) trait Store: Send + Sync + 'static {
    /// Connects if need be and runs one exchange. Exchanges are sent in the order in which these futures are first
    /// polled. The caller bounds it in time; once polled it may run in the store although the future was dropped.
    fn exchange(&self, exchange: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>>;

    /// Moves the bytes of its connections, and gives what the store tells by itself. The one task that awaits exchanges
    /// polls this too: so a reply wakes one task and not two.
    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<Event>;

    /// Drops the connection. The next exchange makes a new one, on the runtime that polls it.
    fn disconnect(&self);
}

/// What a store tells by itself.
#[derive(Debug)]
pub(crate) enum Event {
    /// A new connection is there and the subscription to wake-ups is confirmed; earlier ones may be lost.
    Connected,
    /// A connection has ended: from now on wake-ups are lost. What is under way on it fails by itself.
    Disconnected,
    /// Waiters of this replica were promoted by another one's exchange.
    Wake(Wake),
}

/// Why an exchange has no reply, or a ledger none.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    pub(crate) kind: StoreErrorKind,
    /// In words of ours: without passwords, keys, or anything else that a server said.
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreErrorKind {
    /// Down, slow, full, loading, failing over: it may get well by itself, and the limit's policy applies.
    Outage,
    /// The store refuses the name or password. Like what follows it stays until somebody mends it, and it never
    /// opens the gate.
    Credentials,
    /// The store does not permit a command, key or channel.
    Permission,
    /// A key of another type, a cluster, a server that is too old or no Redis at all.
    Misconfigured,
}

impl StoreErrorKind {
    pub(crate) fn is_outage(self) -> bool {
        self == Self::Outage
    }
}

impl StoreError {
    pub(crate) fn is_outage(&self) -> bool {
        self.kind.is_outage()
    }
}

impl From<&LedgerError> for StoreError {
    fn from(error: &LedgerError) -> Self {
        Self::of_server(&error.message)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
