//! Group commit: what many lines have to say is said in one exchange.

use std::{sync::Arc, time::Duration};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Core, Ctx, MAX_BATCHES, MAX_IN_FLIGHT, MAX_NAMES,
    entry::{Release, Seen, State},
    line::Line,
    outage::Breaker,
};
use crate::{
    ledger::{Ask, Batch, Exchange},
    status::Usage,
};

/// An exchange that has not been answered.
pub(super) struct InFlight {
    pub(super) number: u64,
    pub(super) sent: Instant,
    pub(super) exchange: Arc<Exchange>,
    /// One for each batch.
    pub(super) notes: Vec<Note>,
}

/// What the keeper wants to remember of a batch.
pub(super) struct Note {
    pub(super) line: usize,
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
            Breaker::Up { .. } if self.clock.is_none() => {
                self.in_flight.is_empty() && !self.ready.is_empty()
            }
            Breaker::Up { .. } => self.in_flight.len() < MAX_IN_FLIGHT && !self.ready.is_empty(),
        }
    }

    /// The next exchange, if one may be sent. It must be answered by `on_reply` or `on_failure`.
    pub(crate) fn next_exchange(&mut self, now: Instant) -> Option<Outgoing> {
        if !self.may_send(now) {
            return None;
        }
        let mut deadline = now + self.ctx.settings.store_timeout;
        let (mut batches, mut notes) = (Vec::new(), Vec::new());
        // Without the store's time no acquire can be given an end, and a store that is down is asked nothing else.
        if self.store_is_up() && self.clock.is_some() {
            let mut room = MAX_NAMES;
            for _ in 0..self.ready.len() {
                if room == 0 || batches.len() == MAX_BATCHES {
                    break;
                }
                let Some(index) = self.ready.pop_front() else {
                    break;
                };
                let line = &mut self.lines[index];
                line.listed = false;
                if let Some((batch, note)) =
                    line.take_work(&self.ctx, index, &mut room, &mut deadline, now)
                {
                    batches.push(batch);
                    notes.push(note);
                }
                self.settle(index);
            }
            if batches.is_empty() {
                return None;
            }
        }
        Some(self.send(batches, notes, deadline, now))
    }

    /// An exchange that asks for nothing but the time.
    pub(crate) fn hello(&mut self, now: Instant) -> Outgoing {
        self.send(
            Vec::new(),
            Vec::new(),
            now + self.ctx.settings.store_timeout,
            now,
        )
    }

    fn send(
        &mut self,
        batches: Vec<Batch>,
        notes: Vec<Note>,
        deadline: Instant,
        now: Instant,
    ) -> Outgoing {
        let settings = &self.ctx.settings;
        self.exchanges += 1;
        let exchange = Arc::new(Exchange {
            replica: settings.replica,
            lease_ms: ms(settings.lease),
            promote_ms: ms(settings.lease.min(settings.waiter_ttl * 9 / 10)),
            alive_ms: ms(settings.waiter_ttl + settings.poll_interval + settings.store_timeout),
            not_after_us: self.clock.map_or(0, |clock| clock.at(deadline)),
            batches,
        });
        let number = self.exchanges;
        self.in_flight.push(InFlight {
            number,
            sent: now,
            exchange: exchange.clone(),
            notes,
        });
        Outgoing {
            number,
            exchange,
            deadline,
        }
    }
}

impl Line {
    /// As much of this line's work as there is room for.
    fn take_work(
        &mut self,
        ctx: &Ctx,
        index: usize,
        room: &mut usize,
        deadline: &mut Instant,
        now: Instant,
    ) -> Option<(Batch, Note)> {
        let mut batch = Batch {
            key: self.ledger.clone(),
            limit: self.limit.max(),
            max_waiters: self.limit.waiters(),
            ..Batch::default()
        };
        let touch = std::mem::take(&mut self.work.touch);
        let inquiries = std::mem::take(&mut self.work.inquiries);
        let count = self.work.release.len().min(*room);
        let releases: Vec<Release> = self.work.release.drain(..count).collect();
        batch.release = releases.iter().map(|release| release.seq).collect();
        *room -= count;
        while *room > 0
            && let Some(seq) = self.work.renew.pop_front()
        {
            if self.entries.contains_key(&seq) {
                batch.renew.push(seq);
                *room -= 1;
            }
        }
        while *room > 0
            && let Some(seq) = self.work.adopt.pop_front()
        {
            if let Some(entry) = self.entries.get_mut(&seq)
                && entry.is_held()
                && !entry.open
                && !entry.lease.is_over(now)
            {
                entry.open = true;
                batch.adopt.push(seq);
                *room -= 1;
            }
        }
        let introducing = self.is_introducing();
        while *room > 0
            && !introducing
            && let Some(seq) = self.work.acquire.pop_front()
        {
            if let Some(entry) = self.entries.get_mut(&seq)
                && let State::Asking(None) = entry.state
            {
                entry.open = true;
                entry.state = State::Asking(Some(Seen {
                    store_us: 0,
                    sent: now,
                }));
                batch.acquire.push(Ask {
                    seq,
                    wait: !entry.wait.is_zero(),
                });
                // A request that has spent part of its time on an exchange that failed does not get all of it again.
                let patience = (entry.asking_since + ctx.settings.store_timeout)
                    .max(now + ctx.settings.store_timeout / 8);
                *deadline = patience.min(*deadline);
                *room -= 1;
            }
        }
        batch.waits = !self.queue.is_empty() || batch.acquire.iter().any(|ask| ask.wait);
        let empty = batch.release.is_empty()
            && batch.renew.is_empty()
            && batch.adopt.is_empty()
            && batch.acquire.is_empty();
        if empty && !touch && inquiries.is_empty() {
            return None;
        }
        self.in_flight += 1;
        Some((
            batch,
            Note {
                line: index,
                releases,
                inquiries,
            },
        ))
    }
}

fn ms(length: Duration) -> u64 {
    length.as_millis() as u64
}
