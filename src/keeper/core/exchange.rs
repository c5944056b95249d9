//! Exchanges: the next one, and its answer; answers to claims are in `store.rs`.

use tokio::time::Instant;

use super::{Core, ExchangeId, Outgoing, breaker::Work, link::PendingExchange};
use crate::{leases::StoreMoment, ledger::Reply, part::Part};

impl Core {
    /// Whether [`next_exchange`](Self::next_exchange) would return one.
    pub fn may_send(&self) -> bool {
        let mut links = self.links.iter();
        links.any(|link| link.may_send(self))
    }

    /// The earliest deadline of the exchanges in flight, among those not yet due at `then`.
    pub fn answer_due(&self, then: Instant) -> Option<Instant> {
        let sent = self.links.iter().flat_map(|link| &link.in_flight);
        let deadlines = sent.map(|sent| sent.at + self.ctx.settings.store_timeout);
        deadlines.filter(|due| *due > then).min()
    }

    /// Whether an exchange in flight was sent at this time or before.
    pub fn awaits_answer_since(&self, then: Instant) -> bool {
        (self.links.iter().flat_map(|link| &link.in_flight)).any(|sent| sent.at <= then)
    }

    /// The next exchange, if one may be sent; links take turns. It must be answered by [`on_reply`](Self::on_reply) or
    /// [`on_failure`](Self::on_failure).
    pub fn next_exchange(&mut self) -> Option<Outgoing> {
        (0..self.links.len()).find_map(|_| {
            self.last_link = (self.last_link + 1) % self.links.len();
            let link = &self.links[self.last_link];
            let (part, may_send) = (link.part, link.may_send(self));
            may_send.then(|| self.draft(part).fill_and_send())?
        })
    }

    /// An exchange without work: it asks for the time, and for the generation.
    pub fn hello(&mut self, part: Part) -> Outgoing {
        self.draft(part).send()
    }
}

/// Answers. `store.rs` handles exchanges without one.
impl Core {
    /// An exchange was answered.
    pub fn on_reply(&mut self, id: ExchangeId, reply: Reply) {
        if let Some(sent) = self.links[id.part].take_sent(id) {
            self.answered(sent, reply);
            self.follow_decisions();
        }
    }

    fn answered(&mut self, sent: PendingExchange, reply: Reply) {
        let (id, at) = (sent.id, sent.at);
        let (link, now) = (&mut self.links[id.part], self.ctx.now);
        let seen = StoreMoment {
            store_us: reply.now_us,
            sent: at,
        };
        // Beyond the timeout this process stood still, perhaps before it sent the exchange.
        let is_quick = now.saturating_duration_since(at) <= self.ctx.settings.store_timeout;
        link.connection.answered(id.number, seen, is_quick);
        link.window.on_answer(at, now);
        if reply.is_late {
            self.note_answer(id.part, Work::None, None);
            return self.unanswered(sent, true);
        }
        (self.ctx).record(|history, now| history.answered(id.number, &reply, now));
        let (exchange, mut pending, claims) = (sent.exchange, sent.pending, sent.claims);
        let link = &mut self.links[id.part];
        if exchange.generation_query.is_some() && link.connection.has(id.number) {
            let is_lost = link.compare_generation(seen, reply.generation, &self.ctx.settings);
            self.on_generation(id.part, reply.generation, is_lost, seen);
        }
        // First, legs of claims are counted, since a batch's numbers include them. Then batches are answered, and take these legs out
        // of their snapshots. Then claims are answered, and each leg joins again, for its place.
        for (claim, answer) in exchange.claims.iter().zip(&reply.claims) {
            let standings = answer.iter().flat_map(|answer| &answer.standings);
            for (ask, standing) in claim.asks.iter().zip(standings) {
                pending[ask.batch].count_leg(ask.seq, standing);
            }
        }
        let (mut outage, work) = (None, Work::of(&reply));
        for ((pending, batch), result) in
            pending.iter_mut().zip(&exchange.batches).zip(reply.batches)
        {
            let queue = self.queues.without_listing(pending.queue);
            if reply.more {
                queue.outbox.want(true);
            }
            match result {
                Ok(answer) => queue.on_answer(&mut self.ctx, batch, pending, answer, seen),
                Err(error) => {
                    outage = outage.or(self.batch_unusable(id.part, batch, pending, &error))
                }
            }
        }
        let unusable = self.claims_answered(id, &exchange, (&claims, &pending), reply.claims, seen);
        outage = outage.or(unusable);
        for pending in &pending {
            self.change(pending.queue, |queue, ctx| {
                queue.after_answer(ctx, pending, seen)
            });
        }
        self.note_answer(id.part, work, outage.as_ref());
        self.reopen_sent(id, claims);
    }
}
