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
    /// When to ask for a new one, as it has ended.
    again_at: Option<Instant>,
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
            again_at: None,
        };
        self.introduce_all();
    }

    /// The connection has ended, perhaps since the server has: whoever waits may have been promoted and not know it, and
    /// whoever holds may be forgotten.
    pub(crate) fn on_disconnected(&mut self, now: Instant) {
        let made = self.connection.made;
        let soonest = made.map_or(now, |made| made + PAUSE);
        self.connection.again_at = Some(soonest.max(now));
    }

    /// Lines that have something to ask make a new connection, if nothing else has made one.
    pub(super) fn reconnect(&mut self, now: Instant) {
        let again_at = &mut self.connection.again_at;
        if again_at.take_if(|at| *at <= now).is_some() {
            self.introduce_all();
        }
    }

    fn introduce_all(&mut self) {
        self.clock = None;
        if self.store_is_up() {
            self.each_line(|line, _| line.introduce());
        }
    }
}
