//! An exchange: the work of many queues, and claims, batched (group commit) and sent; its answer, which `store.rs` reads as
//! far as it is about claims.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Asker, ClaimStage, ClaimState, Core, ExchangeId, Outgoing, PendingExchange, breaker::Work,
    queues::Queues,
};
use crate::{
    keeper::{
        context::Context,
        queue::{LegState, PendingBatch, Queue, StoreMoment},
    },
    key::Key,
    leases::{Lease, Paid, StoreClock},
    ledger::{
        Ask, Batch, Claim, ClaimAsk, Exchange, MAX_PERMITS, Refund, Reply, Want, number_of,
        weight_of,
    },
};

/// Exchanges in flight: two may be on their way while the next one fills.
const MAX_IN_FLIGHT: usize = 2;
/// The same in a cluster, where each is about one ledger or one rate.
const MAX_OF_ONE_KEY_IN_FLIGHT: usize = 8;
/// Units of permits in one exchange: about two milliseconds of the store's time.
const MAX_UNITS: usize = 1_000;
// The last permit is sent whole, even if there is less room; so is a claim, which begins with half of the room.
const _: () = assert!(2 * MAX_UNITS <= MAX_PERMITS as usize);
/// Refunds in one exchange, and sums that were spent: about a millisecond.
pub(in crate::keeper) const MAX_REFUNDS: usize = 200;
/// Ledgers in one exchange: about a millisecond.
const MAX_BATCHES: usize = 64;

/// An exchange in the making.
struct Draft {
    batches: Vec<Batch>,
    pending: Vec<PendingBatch>,
    /// By the order in which they began to ask: since when, and their numbers.
    claims: BTreeMap<(Instant, u64), (Asker, Claim)>,
    refunds: Vec<Refund>,
    /// Units that there is room for.
    room: usize,
    deadline: Instant,
}

impl Core {
    /// Whether [`next_exchange`](Self::next_exchange) would give something.
    pub fn may_send(&self, now: Instant) -> bool {
        match self.breaker.probe_at() {
            _ if !self.ctx.shared => false,
            Some(probe_at) => self.in_flight.is_empty() && now >= probe_at,
            None => {
                let mut in_flight = self.in_flight.iter();
                let is_free = match (&self.clock, self.ctx.settings.part) {
                    // Exchanges in flight on a connection that is over do not hold up the hello of the next one.
                    (None, _) => !in_flight.any(|sent| self.connection.has(sent.id)),
                    (Some(_), None) => in_flight.len() < MAX_IN_FLIGHT,
                    (Some(_), Some(_)) => in_flight.len() < MAX_OF_ONE_KEY_IN_FLIGHT,
                };
                let work = self.queues.ready().len() > 0
                    || !self.unsent_claims.is_empty()
                    || !self.refunds.is_empty()
                    || self.accounts.next_key().is_some();
                (work || self.connection.is_wanted) && is_free
            }
        }
    }

    /// When the next of the exchanges in flight must have been answered, of those that were not due by then.
    pub fn answer_due(&self, then: Instant) -> Option<Instant> {
        let due = self.in_flight.iter().map(|sent| sent.deadline);
        due.filter(|due| *due > then).min()
    }

    /// Whether an exchange in flight was sent then, or before that.
    pub fn awaits_answer_since(&self, then: Instant) -> bool {
        self.in_flight.iter().any(|sent| sent.at <= then)
    }

    /// The next exchange, if one may be sent. It must be answered by [`on_reply`](Self::on_reply) or
    /// [`on_failure`](Self::on_failure).
    pub fn next_exchange(&mut self, now: Instant) -> Option<Outgoing> {
        if !self.may_send(now) {
            return None;
        }
        self.ctx.now = now;
        let mut draft = Draft::new(now + self.ctx.settings.store_timeout);
        if let Some(trial) = self.trial() {
            draft.batches.push(trial);
            return Some(self.send(draft));
        }
        // Without the store's time no acquire can be given an end, and a store that is down is asked nothing else.
        if self.store_is_up() && self.clock.is_some() {
            self.fill(&mut draft);
            if draft.is_empty() && self.in_flight.is_empty() && !self.held_back.is_empty() {
                // Holders that are gone were still in an outbox. No answer will come that lets these claims go on.
                self.fill(&mut draft);
            }
            if draft.is_empty() {
                return None;
            }
        } else if self.store_is_up()
            && let Some(since) = self.asks_since()
        {
            // They wait for this too.
            draft.deadline = self.ctx.gives_up_at(since).min(draft.deadline);
        }
        Some(self.send(draft))
    }

    /// Work for a store that has answered a probe: a release, which it has to write even at `maxmemory`. It is of a name that
    /// was never asked for, in a ledger that no limit has, so that it changes nothing.
    fn trial(&mut self) -> Option<Batch> {
        let is_due = self.breaker.is_on_trial() && self.clock.is_some();
        is_due.then(|| Batch {
            key: self.ctx.settings.ledger_name(&Key::SHARED, "").into(),
            limit: 1,
            release: vec![self.ctx.next_name(1)],
            ..Batch::default()
        })
    }

    /// Since when the requests that are to be sent have been asking: the first of each queue, and the claims.
    fn asks_since(&self) -> Option<Instant> {
        let single = self.queues.ready().filter_map(Queue::asks_since);
        let claims = self.unsent_claims.iter();
        let claims = claims.filter_map(|id| self.claims.get(id)?.asking_since);
        single.chain(claims).min()
    }

    /// An exchange that asks for nothing but the time.
    pub fn hello(&mut self, now: Instant) -> Outgoing {
        self.ctx.now = now;
        let draft = Draft::new(now + self.ctx.settings.store_timeout);
        self.send(draft)
    }

    fn fill(&mut self, draft: &mut Draft) {
        // In their turn: later requests for a single slot do not go before them.
        self.unsent_claims.append(&mut self.held_back);
        match self.ctx.settings.part {
            None => self.draft_all(draft),
            Some(_) => self.draft_one_key(draft),
        }
    }

    /// As much of everything as there is room for.
    fn draft_all(&mut self, draft: &mut Draft) {
        self.draft_claims(draft, |draft| draft.batches.len() < MAX_BATCHES / 2);
        self.draft_queues(draft, MAX_BATCHES);
        draft.keep_order_with_claims(&self.queues);
        self.draft_sums(draft, None);
        let count = self.refunds.len().min(MAX_REFUNDS);
        draft.refunds.extend(self.refunds.drain(..count));
    }

    /// Only what has to do with one key, be it a ledger or the state of a rate: in a cluster keys move from node to
    /// node one by one. Refunds go before claims, which may profit from them; queues have every second turn.
    fn draft_one_key(&mut self, draft: &mut Draft) {
        let queues_first = self.exchanges.is_multiple_of(2);
        if queues_first {
            self.draft_queues(draft, 1);
        }
        if draft.is_empty() {
            self.draft_refunds_of_one_key(draft);
        }
        if draft.is_empty() {
            let key = self.accounts.next_key().cloned();
            self.draft_sums(draft, key.as_ref());
        }
        if draft.is_empty() {
            self.draft_claims(draft, |draft| draft.claims.is_empty());
        }
        if draft.is_empty() && !queues_first {
            self.draft_queues(draft, 1);
        }
        draft.keep_order_with_claims(&self.queues);
    }

    fn draft_refunds_of_one_key(&mut self, draft: &mut Draft) {
        if let Some(key) = self.refunds.first().map(|refund| refund.key.clone()) {
            let same = self.refunds.extract_if(.., |refund| refund.key == key);
            draft.refunds.extend(same.take(MAX_REFUNDS));
        }
    }

    /// Sums that were spent, all or those for this key.
    fn draft_sums(&mut self, draft: &mut Draft, only: Option<&Arc<str>>) {
        for _ in 0..MAX_REFUNDS {
            let is_other = |only| self.accounts.next_key() != Some(only);
            if only.is_some_and(is_other) {
                break;
            }
            let Some((id, charge)) = self.next_report() else {
                break;
            };
            let claim = Claim {
                charges: vec![charge],
                ..Claim::default()
            };
            let number = number_of(self.ctx.next_name(1));
            let order = (self.ctx.now, number);
            draft.claims.insert(order, (Asker::Account(id), claim));
        }
    }

    fn draft_queues(&mut self, draft: &mut Draft, most: usize) {
        let count = self.queues.ready().len();
        for _ in 0..count {
            if draft.room == 0 || draft.batches.len() == most {
                break;
            }
            let Some(queue) = self.queues.pop_ready() else {
                break;
            };
            self.queues.change(&mut self.ctx, queue, |queue, ctx| {
                draft.add_batch(queue, ctx)
            });
        }
    }

    /// Claims take no more than half of the room: queues have work too.
    fn draft_claims(&mut self, draft: &mut Draft, more: impl Fn(&Draft) -> bool) {
        while draft.room > MAX_UNITS / 2 && more(draft) {
            let Some(id) = self.unsent_claims.pop_first() else {
                break;
            };
            let is_unsent = |claim: &&mut ClaimState| matches!(claim.stage, ClaimStage::Unsent);
            let Some(claim) = self.claims.get_mut(&id).filter(is_unsent) else {
                continue;
            };
            let mut queues = claim.legs.iter().map(|lease| &self.queues[lease.queue]);
            if queues.any(Queue::is_introducing) {
                self.held_back.insert(id);
                continue;
            }
            claim.stage = ClaimStage::Sent;
            let since = claim.asking_since.unwrap_or(self.ctx.now);
            // One that has waited for a slot before goes by when it came.
            let ticket = claim.ticket;
            let order = (ticket.map_or(since, |_| claim.asked), id.0);
            draft.deadline = self.ctx.gives_up_at(since).min(draft.deadline);
            let legs = claim.legs.clone();
            let charges = claim.fees.iter().filter(|fee| fee.paid == Paid::Not);
            let charges: Vec<_> = charges.map(|fee| fee.charge.clone()).collect();
            draft.room = draft.room.saturating_sub(charges.len());
            let asks = legs
                .iter()
                .filter_map(|lease| self.draft_leg(draft, lease))
                .collect();
            let claim = Claim {
                charges,
                asks,
                ticket,
            };
            draft.claims.insert(order, (Asker::Claim(id), claim));
        }
    }

    /// A leg that the claim does not have yet; its queue gets a batch if it has none.
    fn draft_leg(&mut self, draft: &mut Draft, lease: &Lease) -> Option<ClaimAsk> {
        let seq = lease.seq();
        self.queues
            .change(&mut self.ctx, lease.queue, |queue, ctx| {
                let Some(LegState::Parked) = queue.leg_state(seq, ctx.now) else {
                    return None;
                };
                let units = weight_of(seq) as usize;
                let has_room = queue.make_room(ctx, units);
                let batch = match draft
                    .pending
                    .iter()
                    .position(|pending| pending.queue == lease.queue)
                {
                    Some(number) => {
                        let (batch, pending) =
                            (&mut draft.batches[number], &mut draft.pending[number]);
                        queue.take_releases(batch, pending, &mut draft.room);
                        number
                    }
                    None => {
                        // So that there is a batch, even if it has only this leg.
                        queue.ask_for_batch();
                        draft.add_batch(queue, ctx);
                        draft.batches.len() - 1
                    }
                };
                let want = queue.take_leg(ctx, seq, has_room)?;
                draft.batches[batch].waits |= want == Want::Wait;
                draft.room = draft.room.saturating_sub(units);
                Some(ClaimAsk { batch, seq, want })
            })
    }

    fn send(&mut self, draft: Draft) -> Outgoing {
        let Draft {
            batches,
            pending,
            claims,
            refunds,
            deadline,
            ..
        } = draft;
        let (ids, claims) = claims.into_values().unzip();
        let settings = &self.ctx.settings;
        self.exchanges += 1;
        // It makes the connection, if that has ended.
        (self.connection.is_wanted, self.connection.reconnect_at) = (false, None);
        let exchange = Arc::new(Exchange {
            replica: settings.replica,
            lease_ms: ms(settings.lease),
            promote_ms: ms(settings.lease.min(settings.waiter_ttl * 9 / 10)),
            heartbeat_ms: ms(settings.waiter_ttl + settings.poll_interval + settings.store_timeout),
            not_after_us: self.clock.map_or(0, |clock| clock.at(deadline)),
            batches,
            claims,
            refunds,
        });
        // A session does not connect for any other.
        debug_assert!(self.clock.is_some() || exchange.is_hello());
        let id = ExchangeId(self.exchanges);
        self.ctx
            .record(|history, now| history.sent(id.0, &exchange, now));
        self.in_flight.push(PendingExchange {
            id,
            at: self.ctx.now,
            deadline,
            exchange: exchange.clone(),
            pending,
            claims: ids,
        });
        Outgoing {
            id,
            exchange,
            deadline,
        }
    }
}

impl Draft {
    fn new(deadline: Instant) -> Self {
        Self {
            batches: Vec::new(),
            pending: Vec::new(),
            claims: BTreeMap::new(),
            refunds: Vec::new(),
            room: MAX_UNITS,
            deadline,
        }
    }

    /// Adds the batch of a queue, as far as there is room.
    fn add_batch(&mut self, queue: &mut Queue, ctx: &mut Context) {
        let batch = queue.take_batch(ctx, &mut self.room, &mut self.deadline);
        if let Some((batch, pending)) = batch {
            self.batches.push(batch);
            self.pending.push(pending);
        }
    }

    fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.claims.is_empty() && self.refunds.is_empty()
    }

    /// Requests for a single slot keep their order with the claims on their ledgers: they become claims of one leg.
    fn keep_order_with_claims(&mut self, queues: &Queues) {
        let claims = self.claims.values().flat_map(|(_, claim)| &claim.asks);
        let touched: BTreeSet<usize> = claims.map(|ask| ask.batch).collect();
        for batch in touched {
            for Ask { seq, wait } in std::mem::take(&mut self.batches[batch].acquire) {
                let want = if wait { Want::Wait } else { Want::Now };
                let claim = Claim {
                    asks: vec![ClaimAsk { batch, seq, want }],
                    ..Claim::default()
                };
                let since = queues[self.pending[batch].queue].asking_since(seq);
                let order = (since.expect("it is sent"), number_of(seq));
                self.claims.insert(order, (Asker::Slot, claim));
            }
        }
    }
}

/// Answers. An exchange without one is dealt with in `store.rs`.
impl Core {
    /// An exchange was answered.
    pub fn on_reply(&mut self, id: ExchangeId, reply: Reply, now: Instant) {
        self.ctx.now = now;
        if let Some(sent) = self.take_sent(id) {
            self.answered(sent, reply);
            self.advance_claims();
        }
    }

    fn answered(&mut self, sent: PendingExchange, reply: Reply) {
        let PendingExchange {
            id,
            at,
            exchange,
            mut pending,
            claims,
            ..
        } = sent;
        self.ctx
            .record(|history, now| history.answered(id.0, &reply, now));
        // Holders that they were held back for may be confirmed now.
        self.unsent_claims.append(&mut self.held_back);
        let seen = StoreMoment {
            store_us: reply.now_us,
            sent: at,
        };
        // An answer on a connection that is over does not set the clock: the next server may have another.
        if self.connection.has(id) {
            self.clock = Some(StoreClock {
                now_us: reply.now_us,
                sent: at,
            });
        }
        let (mut outage, work) = (None, Work::of(&reply));
        for ((pending, batch), result) in
            pending.iter_mut().zip(&exchange.batches).zip(reply.batches)
        {
            let queue = self.queues.without_listing(pending.queue);
            if reply.more {
                queue.ask_for_batch();
            }
            match result {
                Ok(answer) => queue.on_answer(&mut self.ctx, batch, pending, answer, seen),
                Err(error) => outage = outage.or(self.batch_unusable(batch, pending, &error)),
            }
        }
        let unusable = self.claims_answered(&exchange, (&claims, &pending), reply.claims, seen);
        outage = outage.or(unusable);
        for pending in &pending {
            self.queues
                .change(&mut self.ctx, pending.queue, |queue, ctx| {
                    queue.after_answer(ctx, pending, seen)
                });
        }
        self.note_answer(work, outage.as_ref());
        self.reopen_all(claims.into_iter().filter_map(Asker::claim));
    }
}

fn ms(length: Duration) -> u64 {
    length.as_millis() as u64
}
