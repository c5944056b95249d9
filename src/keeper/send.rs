//! Group commit: what many lines have to say is said in one exchange.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Core, MAX_BATCHES, MAX_IN_FLIGHT, MAX_NAMES, MAX_REFUNDS, draft::Draft, entry::Release,
    outage::Breaker,
};

use crate::{ledger::Exchange, status::Usage};

/// An exchange that has not been answered.
pub(super) struct InFlight {
    pub(super) number: u64,
    pub(super) sent: Instant,
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
    pub(super) inquiries: Vec<oneshot::Sender<Usage>>,
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
        match self.breaker {
            _ if !self.ctx.shared => false,
            Breaker::Down { probe_at, .. } => self.in_flight.is_empty() && now >= probe_at,
            Breaker::Up { .. } => {
                let most = if self.clock.is_some() {
                    MAX_IN_FLIGHT
                } else {
                    1
                };
                let work =
                    !self.ready.is_empty() || !self.asking.is_empty() || !self.refunds.is_empty();
                work && self.in_flight.len() < most
            }
        }
    }

    /// The next exchange, if one may be sent. It must be answered by `on_reply` or `on_failure`.
    pub(crate) fn next_exchange(&mut self, now: Instant) -> Option<Outgoing> {
        if !self.may_send(now) {
            return None;
        }
        let mut draft = Draft {
            batches: Vec::new(),
            notes: Vec::new(),
            claims: BTreeMap::new(),
            room: MAX_NAMES,
            deadline: now + self.ctx.settings.store_timeout,
        };
        // Without the store's time no acquire can be given an end, and a store that is down is asked nothing else.
        if self.store_is_up() && self.clock.is_some() {
            self.draft_claims(&mut draft, now);
            for _ in 0..self.ready.len() {
                if draft.room == 0 || draft.batches.len() == MAX_BATCHES {
                    break;
                }
                let Some(index) = self.ready.pop_front() else {
                    break;
                };
                self.lines[index].listed = false;
                self.draft_batch(&mut draft, index, now);
                self.settle(index);
            }
            draft.join();
            if draft.batches.is_empty() && draft.claims.is_empty() && self.refunds.is_empty() {
                return None;
            }
        }
        Some(self.send(draft, now))
    }

    /// An exchange that asks for nothing but the time.
    pub(crate) fn hello(&mut self, now: Instant) -> Outgoing {
        let draft = Draft {
            batches: Vec::new(),
            notes: Vec::new(),
            claims: BTreeMap::new(),
            room: 0,
            deadline: now + self.ctx.settings.store_timeout,
        };
        self.send(draft, now)
    }

    fn send(&mut self, draft: Draft, now: Instant) -> Outgoing {
        let Draft {
            batches,
            notes,
            claims,
            deadline,
            ..
        } = draft;
        let (ids, claims) = claims.into_values().unzip();
        let count = self.refunds.len().min(MAX_REFUNDS);
        let refunds = self.refunds.drain(..count).collect();
        let settings = &self.ctx.settings;
        self.exchanges += 1;
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
        self.in_flight.push(InFlight {
            number,
            sent: now,
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
