//! Connections come and go.

use std::time::Duration;

use tokio::time::Instant;

use super::Core;

/// A server that ends every connection is not given a new one more often.
const PAUSE: Duration = Duration::from_millis(50);

/// The connection to the store, as far as the store tells of it.
#[derive(Default)]
pub(super) struct Connection {
    made: Option<Instant>,
    /// When to make a new one, as it has ended.
    again_at: Option<Instant>,
    /// Now.
    pub(super) is_wanted: bool,
}

impl Connection {
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.again_at
    }
}

impl Core {
    /// There is a new connection, perhaps to a server with another clock, or without our data. Wake-ups may be lost.
    pub(crate) fn on_connected(&mut self, now: Instant) {
        self.connection = Connection {
            made: Some(now),
            ..Connection::default()
        };
        self.ctx.now = now;
        self.clock = None;
        self.breaker.connected();
        if self.store_is_up() {
            self.each_line(|line, ctx| line.introduce(ctx));
        }
    }

    /// The connection has ended, perhaps since the server has: whoever holds may be forgotten, and whoever waits may have
    /// been promoted and not know it.
    pub(crate) fn on_disconnected(&mut self, now: Instant) {
        let made = self.connection.made;
        let soonest = made.map_or(now, |made| made + PAUSE);
        self.connection.again_at = Some(soonest.max(now));
    }

    /// Whoever waits or holds needs a new connection, if nothing else has made one.
    pub(super) fn reconnect(&mut self, now: Instant) {
        let is_due = self.connection.again_at.take_if(|at| *at <= now).is_some();
        if is_due && self.store_is_up() && !self.lines.is_empty() {
            self.clock = None;
            self.connection.is_wanted = true;
        }
    }
}
