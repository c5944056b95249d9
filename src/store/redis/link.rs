//! One connection, and what is known of it.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use redis::{Client, RedisResult, aio::MultiplexedConnection, cmd};

use super::{events::Events, socket::Io};
use crate::store::Event;

/// Bytes that a connection with a subscription must be able to bear: more than those of two replies.
const ENOUGH: usize = 128 * 1_024;

/// A connection that its session has to poll, for as long as something uses it.
pub(super) type Opened = (Weak<LinkState>, Io);

/// A connection that exchanges may use.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) connection: MultiplexedConnection,
    /// Where it leads.
    pub(super) client: Client,
    pub(super) state: Arc<LinkState>,
}

pub(super) struct LinkState {
    pub(super) is_subscribed: bool,
    /// The keeper was told of it, and is told when it ends.
    pub(super) in_use: AtomicBool,
    ended: AtomicBool,
    script_was_sent: AtomicBool,
}

impl LinkState {
    pub(super) fn new(is_subscribed: bool) -> Self {
        Self {
            is_subscribed,
            in_use: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            script_was_sent: AtomicBool::new(false),
        }
    }

    /// The connection has ended, and not by us.
    pub(super) fn end(&self, events: &Events) {
        if !self.ended.swap(true, Relaxed) && self.in_use.load(Relaxed) {
            events.push(Event::Disconnected);
        }
    }
}

impl Link {
    pub(super) fn is_alive(&self) -> bool {
        !self.state.ended.load(Relaxed)
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Whether the caller is the first to run the script here. It sends the text, so that what comes right behind
    /// finds the script by its digest, and none falls behind for want of it.
    pub(super) fn is_first(&self) -> bool {
        !self.state.script_was_sent.swap(true, Relaxed)
    }

    pub(super) fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Whether the server ends the connection at a reply that a subscriber must be able to receive.
    pub(super) async fn ends_at_a_large_reply(&self) -> RedisResult<bool> {
        let mut large = cmd("EVAL");
        let script = "return string.rep('.', ARGV[1])";
        large.arg(script).arg(0).arg(ENOUGH);
        match large.query_async(&mut self.connection()).await {
            Ok(()) => Ok(false),
            Err(error) if error.is_io_error() => Ok(true),
            Err(error) => Err(error),
        }
    }
}
