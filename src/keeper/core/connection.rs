//! The connection of a link, as the core knows it: which exchanges belong to it, when another one is made, and the
//! store's clock, which is known only on a connection.
//!
//! Only a hello makes a connection, so while the clock is unknown nothing else is sent: newcomers sent with the first
//! exchange would reach the next server before the holders.

use std::time::Duration;

use tokio::time::Instant;

use crate::{leases::StoreMoment, store::COUNT_INTERVAL};

/// Pause between two connections, even to a server that ends every connection.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
/// How much earlier than the interval a count may follow a connection: the connection is reported a moment later.
const COUNT_SLACK: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Connection {
    made: Option<Instant>,
    /// When to reconnect after the connection has ended.
    reconnect_at: Option<Instant>,
    /// An exchange is wanted now, even one without work.
    is_wanted: bool,
    /// The last exchange drafted for an earlier connection.
    begins_after: u64,
    /// The moment of the latest reply on this connection.
    clock: Option<StoreMoment>,
    /// Since when each exchange has left work for the next one.
    behind_since: Option<Instant>,
}

impl Connection {
    /// A connection is made, perhaps to a server with another clock.
    pub fn made(&mut self, now: Instant) {
        *self = Self {
            made: Some(now),
            is_wanted: self.is_wanted,
            begins_after: self.begins_after,
            ..Self::default()
        };
    }

    /// It has ended, or there was none. `last`: the exchange drafted last.
    pub fn ended(&mut self, last: u64) -> &mut Self {
        self.clock = None;
        self.begins_after = last;
        self
    }

    /// Asks for a hello after this pause: holders without anything to send need a connection too. While the store is
    /// down, probes reconnect.
    pub fn reconnect_in(&mut self, pause: Duration, now: Instant) {
        let at = now + pause;
        self.reconnect_at = Some(self.reconnect_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// As [`reconnect_in`](Self::reconnect_in), at once, or after a pause since it was made.
    pub fn reconnect_soon(&mut self, now: Instant) {
        let soonest = self.made.map_or(now, |made| made + RECONNECT_PAUSE);
        self.reconnect_in(soonest.saturating_duration_since(now), now);
    }

    /// Whether it is time to reconnect, once.
    pub fn ends_pause(&mut self, now: Instant) -> bool {
        self.reconnect_at.take_if(|at| *at <= now).is_some()
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.reconnect_at
    }

    pub fn want(&mut self) {
        self.is_wanted = true;
    }

    pub fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// There was nothing to send.
    pub fn unwant(&mut self) {
        self.is_wanted = false;
    }

    /// An exchange is sent: a hello, if the connection has ended.
    pub fn sent(&mut self) {
        (self.is_wanted, self.reconnect_at) = (false, None);
    }

    /// Whether the exchange of this number was drafted for this connection, or establishes it.
    pub fn has(&self, exchange: u64) -> bool {
        exchange > self.begins_after
    }

    /// Sets the clock if there is none, or if the answer was quick, provided that the exchange is of this connection: the
    /// next server's clock may differ.
    pub fn answered(&mut self, exchange: u64, seen: StoreMoment, is_quick: bool) {
        if self.has(exchange) && (is_quick || self.clock.is_none()) {
            self.clock = Some(seen);
        }
    }

    /// Whether the store has answered on this connection. If not, the next exchange has to be a hello.
    pub fn has_clock(&self) -> bool {
        self.clock.is_some()
    }

    /// The store's time at this moment.
    pub fn store_us(&self, at: Instant) -> Option<u64> {
        Some(self.clock?.at(at))
    }

    /// Whether it was made at this time or later.
    pub fn is_made_since(&self, at: Instant) -> bool {
        self.made >= Some(at)
    }

    /// Whether all replicas that were connected before can be counted by now: those that have yet to reconnect are
    /// not seen, nor may they have counted this one.
    pub fn is_settled(&self, now: Instant) -> bool {
        let is_settled = |made| now + COUNT_SLACK >= made + COUNT_INTERVAL;
        self.made.is_some_and(is_settled)
    }

    /// An exchange has taken all work, or has left some for the next one.
    pub fn note_behind(&mut self, is_behind: bool, now: Instant) {
        self.behind_since = self.behind_since.or(Some(now)).filter(|_| is_behind);
    }

    /// For how long exchanges have left work for the next one.
    pub fn behind_for(&self, now: Instant) -> Duration {
        self.behind_since
            .map_or(Duration::ZERO, |since| now - since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn seen(store_us: u64, sent: Instant) -> StoreMoment {
        StoreMoment { store_us, sent }
    }

    /// Exchange 1 makes a connection, which ends after exchange 3 was drafted.
    #[test]
    fn only_answers_on_the_connection_set_its_clock() {
        let (mut connection, now) = (Connection::default(), Instant::now());
        connection.answered(1, seen(500, now), true);
        connection.made(now);
        assert!(!connection.has_clock(), "made, and not yet answered");
        connection.answered(2, seen(1_000, now), true);
        assert_eq!(connection.store_us(now + ms(1)), Some(2_000));
        connection.ended(3);
        assert!(!connection.has(3) && connection.has(4));
        connection.answered(3, seen(1_000, now), true);
        assert!(!connection.has_clock());
        connection.answered(4, seen(7, now), true);
        assert_eq!(connection.store_us(now), Some(7));
    }

    /// The process stood still: its clock at the time of sending is not known.
    #[test]
    fn a_slow_answer_sets_the_clock_only_if_there_is_none() {
        let (mut connection, now) = (Connection::default(), Instant::now());
        connection.answered(1, seen(1, now), false);
        connection.answered(2, seen(2, now), false);
        assert_eq!(connection.store_us(now), Some(1));
        connection.answered(3, seen(3, now), true);
        assert_eq!(connection.store_us(now), Some(3));
    }

    #[test]
    fn the_earliest_reason_to_reconnect_counts_until_an_exchange_is_sent() {
        let (mut connection, now) = (Connection::default(), Instant::now());
        connection.reconnect_in(ms(100), now);
        connection.reconnect_in(ms(20), now);
        connection.reconnect_in(ms(60), now);
        assert_eq!(connection.next_due(), Some(now + ms(20)));
        assert!(!connection.ends_pause(now + ms(19)));
        assert!(connection.ends_pause(now + ms(20)));
        assert!(!connection.ends_pause(now + ms(20)), "once");
        connection.want();
        connection.reconnect_in(ms(5), now);
        connection.sent();
        assert!(!connection.is_wanted());
        assert_eq!(connection.next_due(), None);
    }

    #[test]
    fn a_server_that_ends_every_connection_gets_a_pause() {
        for (lasted, pause) in [(0, 50), (30, 20), (50, 0), (900, 0)] {
            let (mut connection, made) = (Connection::default(), Instant::now());
            connection.made(made);
            connection.reconnect_soon(made + ms(lasted));
            assert_eq!(connection.next_due(), Some(made + ms(lasted + pause)));
        }
        let (mut never_made, now) = (Connection::default(), Instant::now());
        never_made.reconnect_soon(now);
        assert_eq!(never_made.next_due(), Some(now));
    }

    #[test]
    fn it_is_behind_while_each_exchange_leaves_work() {
        let (mut connection, now) = (Connection::default(), Instant::now());
        let mut behind = |is_behind, at| {
            connection.note_behind(is_behind, now + ms(at));
            connection.behind_for(now + ms(at))
        };
        assert_eq!(behind(true, 0), ms(0));
        assert_eq!(behind(true, 30), ms(30));
        assert_eq!(behind(false, 40), ms(0));
        assert_eq!(behind(true, 50), ms(0));
    }

    #[test]
    fn replicas_are_counted_one_interval_after_it_was_made() {
        let (mut connection, now) = (Connection::default(), Instant::now());
        assert!(!connection.is_settled(now));
        connection.made(now);
        assert!(connection.is_made_since(now) && !connection.is_made_since(now + ms(1)));
        let settled = now + COUNT_INTERVAL - COUNT_SLACK;
        assert!(!connection.is_settled(settled - ms(1)));
        assert!(connection.is_settled(settled));
    }
}
