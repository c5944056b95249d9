//! The store: where ledgers live when they are shared by replicas.
//!
//! A [`Store`] opens a [`Session`] for each driver of a keeper. A session runs [`Exchange`]s and reports [`Event`]s. It
//! knows nothing of permits, time limits or retries: those are the keeper's. The in-process ledger needs no store: the
//! keeper runs it itself.

pub(crate) mod in_flight;
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

/// Opens sessions, and keeps for the next one what a session has learned of the servers.
pub(crate) trait Store: Send + Sync + 'static {
    /// A session that has not connected yet.
    fn open(&self) -> Box<dyn Session>;
}

/// The connections of one driver.
///
/// They are made on the runtime that polls the session and its exchanges, and end when both are dropped: no connection
/// outlives its reactor, and none is left to a reactor that no thread drives.
pub(crate) trait Session: Send + 'static {
    /// Connects if need be and runs one exchange. Exchanges are sent in the order in which these futures are first
    /// polled. The caller bounds it in time; once polled it may run in the store although the future was dropped.
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>>;

    /// Moves the bytes of its connections, and returns what the store reports by itself. The one task that awaits
    /// exchanges polls this too: so a reply wakes one task and not two.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event>;

    /// Stops using the current connection, which may be half open. The next exchange makes a new one.
    fn disconnect(&mut self);
}

/// A report of a store that nobody asked for.
#[derive(Debug)]
pub(crate) enum Event {
    /// A new connection is there, and its subscription to wake-ups is confirmed if it has one; earlier wake-ups may be
    /// lost.
    Connected,
    /// A connection has ended: from now on wake-ups are lost. Its exchanges in flight fail by themselves.
    Disconnected,
    /// Waiters of this replica were promoted by another one's exchange.
    Wake(Wake),
    /// Wake-ups came faster than they were taken, and some were dropped.
    Missed,
}

/// Why an exchange has no reply, or a ledger none.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    pub(crate) kind: StoreErrorKind,
    /// In our own words: without passwords, keys, or any other text of a server.
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreErrorKind {
    /// Down, slow, full, loading, failing over: it may recover by itself, and the limit's fallback applies.
    Outage,
    /// The store refuses the name or password. Like the kinds that follow it stays until an operator mends it, and it
    /// never opens the gate.
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

/// An exchange without a reply.
#[derive(Debug)]
pub(crate) struct ExchangeError {
    pub failure: Failure,
    pub error: StoreError,
}

/// Why an exchange has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was cut, or could not be made.
    Cut,
    TimedOut,
    /// By the store's own word.
    Refused,
}

#[cfg(test)]
impl ExchangeError {
    pub(crate) fn of(failure: Failure, message: &str) -> Self {
        let kind = match failure {
            Failure::Refused => StoreErrorKind::Permission,
            Failure::Cut | Failure::TimedOut => StoreErrorKind::Outage,
        };
        let message = message.to_owned();
        let error = StoreError { kind, message };
        Self { failure, error }
    }
}

impl From<StoreError> for ExchangeError {
    fn from(error: StoreError) -> Self {
        let failure = match error.is_outage() {
            true => Failure::Cut,
            false => Failure::Refused,
        };
        Self { failure, error }
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
