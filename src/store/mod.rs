//! The store: where ledgers live when they are shared by replicas.
//!
//! A [`Store`] opens a [`Session`] for each driver of a keeper and each part of the store. A session runs [`Exchange`]s and
//! reports [`Event`]s. Permits, time limits and retries are the keeper's business. The in-process ledger needs no store: the
//! keeper runs it itself. A [`KeptSession`] waits for the next driver.

#[cfg(feature = "redis")]
pub(crate) mod redis;
mod server_error;

use std::{
    fmt,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::{
    runtime::{self, Handle},
    task::unconstrained,
    time::{Instant, Sleep, sleep},
};

use crate::{
    fallbacks::Availability,
    ledger::{Exchange, LedgerError, Reply, Wake},
    part::Part,
};

/// How long a session may stay unused. After a longer time a firewall may have dropped its connection, and the first
/// request would wait in vain.
const FRESH: Duration = Duration::from_secs(10);

/// Opens sessions, and keeps what they learn about the servers for later sessions.
pub(crate) trait Store: Send + Sync + 'static {
    /// A session with this part of the store. It has not connected yet.
    fn open(&self, part: Part) -> Box<dyn Session>;

    /// The store's address, for people.
    fn address(&self) -> String {
        String::new()
    }
}

/// The connections of one driver to one part of the store.
///
/// The connections are made on the runtime that polls the session and its exchanges, and end when both are dropped. So
/// no connection outlives its reactor or depends on a reactor that no thread drives.
pub(crate) trait Session: Send + 'static {
    /// Runs one exchange. Exchanges are sent in the order in which these futures are first polled. The caller sets the
    /// time limit. Once polled, the exchange may run in the store even if the future is dropped.
    ///
    /// Only a [hello](Exchange::is_hello) connects, or follows its key to another node. Any other exchange fails if the
    /// connection has ended: the next server may have lost the holders, and must see them before any newcomer.
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>>;

    /// Drives the connections' I/O and returns the store's own reports. The same task awaits exchanges and polls this
    /// method, so a reply wakes one task instead of two.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event>;

    /// Stops using the current connection, which may be half open. The next hello makes a new one.
    fn disconnect(&mut self);

    /// The error of an exchange without an answer within `patience`. Names the stage that timed out, if it is known.
    fn no_answer(&self, patience: Duration) -> StoreError {
        StoreError::outage(format!("no answer within {patience:?}"))
    }
}

/// A session without a driver, and the runtime of its connections.
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

    /// The session, if a driver on this runtime may continue with it.
    pub(crate) fn session(self, runtime: &Handle) -> Option<Box<dyn Session>> {
        let is_fresh = self.since.elapsed() < FRESH;
        (is_fresh && self.is_for(runtime)).then_some(self.session)
    }
}

/// An unsolicited report of a store.
#[derive(Debug)]
pub(crate) enum Event {
    /// A new connection is ready, and its subscription to wake-ups, if any, is confirmed. Earlier wake-ups may be lost.
    Connected,
    /// A connection has ended, so wake-ups are lost from now on. Its exchanges in flight fail on their own.
    Disconnected,
    /// Another replica's exchange promoted waiters of this replica.
    Wake(Wake),
    /// Messages may be missing: they arrived faster than the driver took them, or the connection did not subscribe for a while.
    Missed,
    /// Another replica has found that the ledger with this key has lost permits; or, with the key of a generation, that all data of
    /// this part are lost.
    Lost(String),
    /// The number of replicas, including this one, that are connected to the server of the connection.
    Counted(u32),
}

/// Time between two counts of the replicas on a connection.
pub(crate) const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// When a session counts the replicas again.
#[derive(Default)]
pub(crate) struct CountTimer(Option<Pin<Box<Sleep>>>);

impl CountTimer {
    pub(crate) fn start(&mut self, pause: Duration) {
        self.0 = Some(Box::pin(sleep(pause)));
    }

    /// Whether a count is due. Cheaper than [`poll_due`](Self::poll_due), and registers no task.
    pub(crate) fn is_due(&self) -> bool {
        self.0.as_ref().is_some_and(|timer| timer.is_elapsed())
    }

    /// Ready once for each interval, from the start on.
    pub(crate) fn poll_due(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.0 else {
            return Poll::Pending;
        };
        // A task out of budget would not be registered.
        let mut poll = || pin!(unconstrained(timer.as_mut())).poll(cx);
        ready!(poll());
        self.start(COUNT_INTERVAL);
        let _is_pending = self.poll_due(cx);
        Poll::Ready(())
    }
}

/// Why an exchange or a ledger has no reply.
#[derive(Clone, Debug)]
pub struct StoreError {
    pub(crate) kind: StoreErrorKind,
    /// In our own words, without passwords, keys or any text from a server.
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreErrorKind {
    /// Down, slow, full, loading or failing over. The store may recover on its own, and the limit's fallback applies.
    Outage,
    /// The store refuses the name or password. This kind and the following ones last until an operator fixes them, and
    /// never open the gate.
    Credentials,
    /// The store does not permit a command, key or channel.
    Permission,
    /// A key of another type, a cluster, an outdated server, or a server other than Redis.
    Misconfigured,
}

impl StoreError {
    pub(crate) fn outage(message: impl Into<String>) -> Self {
        Self {
            kind: StoreErrorKind::Outage,
            message: message.into(),
        }
    }

    /// The store's answer is not what this crate's commands and scripts return.
    #[cfg(feature = "redis")]
    pub(crate) fn misconfigured(message: impl Into<String>) -> Self {
        Self {
            kind: StoreErrorKind::Misconfigured,
            message: message.into(),
        }
    }

    /// Names the server that the error is about.
    #[cfg(feature = "redis")]
    pub(crate) fn at(mut self, address: &str) -> Self {
        self.message = format!("{address}: {}", self.message);
        self
    }

    /// Whether the store is down, slow, or cannot do its work now.
    pub fn is_outage(&self) -> bool {
        self.kind == StoreErrorKind::Outage
    }

    /// Whether the store refuses the user, or what the user has asked for.
    pub fn is_forbidden(&self) -> bool {
        matches!(
            self.kind,
            StoreErrorKind::Credentials | StoreErrorKind::Permission
        )
    }

    /// The store's answer to an operator is not what the command returns.
    #[cfg(feature = "redis")]
    pub fn unreadable() -> Self {
        Self::misconfigured("the store's answer to an operator cannot be read")
    }

    /// What decides on the requests of a failed batch.
    pub(crate) fn availability(&self) -> Availability {
        if self.is_outage() {
            Availability::Down
        } else {
            Availability::Refused
        }
    }
}

/// An exchange without a reply.
#[derive(Debug)]
pub(crate) struct ExchangeError {
    pub failure: Failure,
    pub error: StoreError,
}

/// Why an exchange failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was cut, or could not be made.
    Cut,
    TimedOut,
    /// The store refused it explicitly.
    Refused,
}

impl From<StoreError> for ExchangeError {
    fn from(error: StoreError) -> Self {
        let failure = if error.is_outage() {
            Failure::Cut
        } else {
            Failure::Refused
        };
        Self { failure, error }
    }
}

impl LedgerError {
    /// What the error means for requests under the limit of this ledger. A ledger that may be lost is asked again.
    pub(crate) fn availability(&self) -> Availability {
        if self.is_lost() {
            return Availability::Up;
        }
        StoreError::from(self).availability()
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
