//! Group commit: what many lines have to say is said in one exchange.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core, MAX_IN_FLIGHT, MAX_OF_ONE_KEY_IN_FLIGHT, draft::Draft, effects::Inquiry, entry::Release,
};
use crate::ledger::Exchange;

/// An exchange that has not been answered.
pub(super) struct InFlight {
    pub(super) number: u64,
    pub(super) sent: Instant,
    /// When the driver gives up on it.
    pub(super) deadline: Instant,
    pub(super) exchange: Arc<Exchange>,
    /// One for each batch.
    pub(super) notes: Vec<Note>,
    /// The keeper's name for each claim; 0 for a request for a single slot.
    pub(super) claims: Vec<u64>,
}

/// What the keeper wants to remember of a batch.
pub(super) struct Note {
    pub(super) line: usize,
    /// The ledger cannot be used.
    pub(super) failed: bool,
    pub(super) releases: Vec<Release>,
    pub(super) inquiries: Vec<Inquiry>,
    /// As the answer tells it: [`BatchReply::nearest_ms`](crate::ledger::BatchReply::nearest_ms).
    pub(super) nearest_ms: Option<u64>,
}

/// An exchange for the driver to run.
pub(crate) struct Outgoing {
    pub(crate) number: u64,
    pub(crate) exchange: Arc<Exchange>,
    /// When to give up on it.
    pub(crate) deadline: Instant,
}

impl Core {
    /// Whether [`next_exchange`](Self::next_exchange) would give something.
    pub(crate) fn may_send(&self, now: Instant) -> bool {
        match self.breaker.probe_at() {
            _ if !self.ctx.shared => false,
            Some(probe_at) => self.in_flight.is_empty() && now >= probe_at,
            None => {
                let most = match (&self.clock, self.ctx.settings.part) {
                    (None, _) => 1,
                    (Some(_), None) => MAX_IN_FLIGHT,
                    (Some(_), Some(_)) => MAX_OF_ONE_KEY_IN_FLIGHT,
                };
                let work =
                    !self.ready.is_empty() || !self.asking.is_empty() || !self.refunds.is_empty();
                (work || self.connection.is_wanted) && self.in_flight.len() < most
            }
        }
    }

    /// The next exchange, if one may be sent. It must be answered by `on_reply` or `on_failure`.
    pub(crate) fn next_exchange(&mut self, now: Instant) -> Option<Outgoing> {
        if !self.may_send(now) {
            return None;
        }
        let mut draft = Draft::new(now + self.ctx.settings.store_timeout);
        // Without the store's time no acquire can be given an end, and a store that is down is asked nothing else.
        if self.store_is_up() && self.clock.is_some() {
            match self.ctx.settings.part {
                None => self.draft_all(&mut draft, now),
                Some(_) => self.draft_one_key(&mut draft, now),
            }
            if draft.is_empty() {
                return None;
            }
        }
        Some(self.send(draft, now))
    }

    /// When the next of the exchanges under way must have been answered.
    pub(super) fn answer_due(&self) -> Option<Instant> {
        self.in_flight.iter().map(|flight| flight.deadline).min()
    }

    /// Whether one was sent then, or before that.
    pub(super) fn awaits_answer_since(&self, then: Instant) -> bool {
        self.in_flight.iter().any(|flight| flight.sent <= then)
    }

    /// An exchange that asks for nothing but the time.
    pub(crate) fn hello(&mut self, now: Instant) -> Outgoing {
        let draft = Draft::new(now + self.ctx.settings.store_timeout);
        self.send(draft, now)
    }

    fn send(&mut self, draft: Draft, now: Instant) -> Outgoing {
        let Draft {
            batches,
            notes,
            claims,
            refunds,
            deadline,
            ..
        } = draft;
        let (ids, claims) = claims.into_values().unzip();
        let settings = &self.ctx.settings;
        self.exchanges += 1;
        self.connection.is_wanted = false;
        let exchange = Arc::new(Exchange {
            replica: settings.replica,
            lease_ms: ms(settings.lease),
            promote_ms: ms(settings.lease.min(settings.waiter_ttl * 9 / 10)),
            alive_ms: ms(settings.waiter_ttl + settings.poll_interval + settings.store_timeout),
            not_after_us: self.clock.map_or(0, |clock| clock.at(deadline)),
            batches,
            claims,
            refunds,
        });
        let number = self.exchanges;
        let sent = self.ctx.history.sent(number, &exchange, now);
        self.ctx.record(sent);
        self.in_flight.push(InFlight {
            number,
            sent: now,
            deadline,
            exchange: exchange.clone(),
            notes,
            claims: ids,
        });
        Outgoing {
            number,
            exchange,
            deadline,
        }
    }
}

fn ms(length: Duration) -> u64 {
    length.as_millis() as u64
}
