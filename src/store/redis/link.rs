//! One connection and its state: not a link of the core, which has one connection after the other.
//!
//! Tests: `session.rs`, `tests.rs`.

use std::sync::{
    Arc, OnceLock, Weak,
    atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
};

use redis::{Client, aio::MultiplexedConnection};

use super::{
    events::Events,
    socket::{Io, address_of},
};
use crate::store::Event;

/// A connection that its session has to poll, for as long as something uses it.
pub(super) type Opened = (Weak<LinkState>, Io);

/// A connection that exchanges may use.
#[derive(Clone)]
pub(super) struct SessionLink {
    pub(super) connection: MultiplexedConnection,
    /// Where the connection leads.
    pub(super) client: Client,
    pub(super) state: Arc<LinkState>,
}

#[derive(Default)]
pub(super) struct LinkState {
    /// The server counts our subscription, so a count of zero means that it has ended.
    pub(super) is_counted: AtomicBool,
    /// Number of connected replicas, as counted on the new connection; 0 if it is unknown.
    pub(super) replicas: AtomicU32,
    /// The keeper knows the connection, so its end is reported.
    pub(super) in_use: AtomicBool,
    ended: AtomicBool,
    was_called: AtomicBool,
    /// The server does not have the text of the script, and no exchange has sent it.
    pub(super) lacks_script: AtomicBool,
    /// How often an exchange has sent the text of the script, since the server had lost it.
    pub(super) resent: AtomicU32,
    /// The eviction policy that the server names, if it may evict permits; empty until the server has answered.
    pub(super) evicts: OnceLock<Option<&'static str>>,
}

impl LinkState {
    /// Notes that the connection has ended on its own.
    pub(super) fn end(&self, events: &Events) {
        if !self.ended.swap(true, Relaxed) && self.in_use.load(Relaxed) {
            events.push(Event::Disconnected);
        }
    }
}

impl SessionLink {
    pub(super) fn is_alive(&self) -> bool {
        !self.state.ended.load(Relaxed)
    }

    /// Whether the caller is the first to run a script on this connection.
    pub(super) fn take_first_call(&self) -> bool {
        !self.state.was_called.swap(true, Relaxed)
    }

    /// Whether the caller has to send the text of the script. The exchanges behind it find the script by its digest.
    pub(super) fn take_lacking(&self) -> bool {
        self.state.lacks_script.swap(false, Relaxed)
    }

    /// Whether the caller has to send the text of a script that the server has lost. If another exchange has sent it since
    /// that count was taken, those sent after it find it by its digest.
    pub(super) fn take_resending(&self, count: u32) -> bool {
        let next = count.wrapping_add(1);
        (self.state.resent)
            .compare_exchange(count, next, Relaxed, Relaxed)
            .is_ok()
    }

    /// Whether the server counts our subscription, so that a count of 0 means that the subscription is lost.
    pub(super) fn listens(&self) -> bool {
        self.state.is_counted.load(Relaxed)
    }

    /// The address of its server.
    pub(super) fn address(&self) -> String {
        address_of(self.client.get_connection_info())
    }
}
