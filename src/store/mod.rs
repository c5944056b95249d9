//! The store: where ledgers live when they are shared by replicas.
//!
//! A [`Store`] opens a [`Session`] for each driver of a keeper. A session runs [`Exchange`]s and reports [`Event`]s. It
//! knows nothing of permits, time limits or retries: those are the keeper's. The in-process ledger needs no store: the
//! keeper runs it itself. A [`KeptSession`] is one that no driver polls.

#[cfg(feature = "redis")]
pub(crate) mod redis;
mod server_error;

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::{
    runtime::{self, Handle},
    time::Instant,
};

use crate::ledger::{Exchange, LedgerError, Reply, Wake};

/// Time for which a session may lie unused: later a firewall may have forgotten its connection, and the first request
/// would wait for nothing.
const FRESH: Duration = Duration::from_secs(10);

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
    /// Runs one exchange. Exchanges are sent in the order in which these futures are first polled. The caller bounds it in
    /// time; once polled it may run in the store although the future was dropped.
    ///
    /// Only a [hello](Exchange::is_hello) makes a connection, or follows its key to another node. Any other exchange fails if
    /// the connection has ended: the next server may have lost the holders, and newcomers must not be there before them.
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>>;

    /// Moves the bytes of its connections, and returns what the store reports by itself. The one task that awaits
    /// exchanges polls this too: so a reply wakes one task and not two.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event>;

    /// Stops using the current connection, which may be half open. The next exchange makes a new one.
    fn disconnect(&mut self);

    /// The error of an exchange that has no answer within this time: it says what was waited for, as far as that is known.
    fn no_answer(&self, patience: Duration) -> StoreError {
        StoreError::outage(format!("no answer within {patience:?}"))
    }
}

/// A session that is not polled, and the runtime that its connections belong to.
pub(crate) struct KeptSession {
    session: Box<dyn Session>,
    runtime: runtime::Id,
    since: Instant,
}

impl KeptSession {
    pub(crate) fn new(session: Box<dyn Session>, runtime: &Handle) -> Self {
        Self {
            session,
            runtime: runtime.id(),
            since: Instant::now(),
        }
    }

    pub(crate) fn is_for(&self, runtime: &Handle) -> bool {
        self.runtime == runtime.id()
    }

    /// The session, if a driver on this runtime may go on with it.
    pub(crate) fn session(self, runtime: &Handle) -> Option<Box<dyn Session>> {
        let is_fresh = self.since.elapsed() < FRESH;
        (is_fresh && self.is_for(runtime)).then_some(self.session)
    }
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
    pub(crate) fn outage(message: impl Into<String>) -> Self {
        Self {
            kind: StoreErrorKind::Outage,
            message: message.into(),
        }
    }

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

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    struct Idle;

    impl Session for Idle {
        fn exchange(&mut self, _: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
            unreachable!("nothing is sent")
        }

        fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
            Poll::Pending
        }

        fn disconnect(&mut self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_for_its_own_runtime_and_not_for_long() {
        let here = Handle::current();
        let other = tokio::runtime::Builder::new_current_thread();
        let other = { other }.build().expect("a runtime");
        for (runtime, idle, is_kept) in [
            (&here, FRESH - Duration::from_millis(1), true),
            (&here, FRESH, false),
            (other.handle(), Duration::ZERO, false),
        ] {
            let kept = KeptSession::new(Box::new(Idle), &here);
            advance(idle).await;
            assert_eq!(kept.session(runtime).is_some(), is_kept);
        }
        other.shutdown_background();
    }
}
