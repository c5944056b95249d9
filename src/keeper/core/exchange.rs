//! Exchanges: batches the work of many queues, and claims, into one call (group commit), and processes the answer;
//! answers to claims are in `store.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Core, ExchangeId, Legs, Outgoing, Request, SlotLeg, Stage,
    breaker::Work,
    link::{Asker, Link, PendingExchange},
    queues::Turn,
};
use crate::{
    keeper::{
        context::Context,
        queue::{LegState, PendingBatch, Queue},
    },
    leases::{Lease, QueueId, StoreMoment},
    ledger::{
        Ask, Batch, Claim, ClaimAsk, Exchange, MAX_PERMITS, Refund, Reply, Standing, Want,
        weight_of,
    },
    part::Part,
};

/// Approximate limit of bytes in flight beyond the minimum of exchanges: a slow link must not take long to send them.
const MAX_BYTES_IN_FLIGHT: usize = 1024 * 1024;
/// Units of permits in one exchange: about two milliseconds of the store's time.
const MAX_UNITS: usize = 1_000;
// The last permit is sent whole, even if it exceeds the room; so is a claim, which starts with half of the room.
const _: () = assert!(2 * MAX_UNITS <= MAX_PERMITS as usize);
/// Refunds, and reports of spending, in one exchange: about a millisecond.
pub(in crate::keeper) const MAX_REFUNDS: usize = 200;
/// Ledgers in one exchange: about a millisecond.
const MAX_BATCHES: usize = 64;
/// Share of newcomers, in ledgers and in units. The rest is for releases, renewals, introductions and polls, so that
/// neither kind of work delays the other, whatever the load. Each kind may use the share that the other leaves.
const MAX_BATCHES_OF_NEWCOMERS: usize = MAX_BATCHES * 3 / 4;
const UNITS_FOR_OTHERS: usize = MAX_UNITS / 4;

/// Kinds of work; an exchange about one key carries a single kind.
const KINDS: usize = 5;

/// An exchange in the making.
struct Draft {
    part: Part,
    batches: Vec<Batch>,
    pending: Vec<PendingBatch>,
    /// Ordered by when each claim began to ask, then by its number.
    claims: BTreeMap<(Instant, u64), (Asker, Claim)>,
    refunds: Vec<Refund>,
    /// Units left.
    room: usize,
}

impl Core {
    /// Whether [`next_exchange`](Self::next_exchange) would return one.
    pub fn may_send(&self, now: Instant) -> bool {
        let mut links = self.links.iter();
        self.ctx.shared && links.any(|link| self.may_send_on(link, now))
    }

    fn may_send_on(&self, link: &Link, now: Instant) -> bool {
        match link.breaker.probe_at() {
            Some(probe_at) => link.in_flight.is_empty() && now >= probe_at,
            None => {
                let is_free = match link.clock {
                    None => !link.is_connecting(),
                    Some(_) => self.window_has_room(link, now),
                };
                (self.has_work(link) || link.connection.is_wanted) && is_free
            }
        }
    }

    pub(super) fn has_work(&self, link: &Link) -> bool {
        self.queues.ready_count(link.part) > 0
            || link.has_unsent(self.ctx.introduced)
            || !link.refunds.is_empty()
            || self.accounts.next_key(link.part).is_some()
    }

    fn window_has_room(&self, link: &Link, now: Instant) -> bool {
        let in_flight = link.in_flight.len();
        let has_room = link
            .window
            .has_room(in_flight, now, || self.fills_an_exchange(link));
        has_room
            && (in_flight < link.window.least() || link.bytes_in_flight() < MAX_BYTES_IN_FLIGHT)
    }

    /// When work may be sent that is only delayed by pacing.
    pub(super) fn paced_until(&self, link: &Link) -> Option<Instant> {
        let at = link.window.paced_until(link.in_flight.len())?;
        let is_next = at > self.ctx.now && link.is_up() && link.clock.is_some();
        (is_next && self.has_work(link)).then_some(at)
    }

    /// Whether the present work fills the next exchange.
    fn fills_an_exchange(&self, link: &Link) -> bool {
        let mut names = 0;
        let is_cluster = self.ctx.settings.parts.is_cluster();
        let batches = if is_cluster { 2 } else { MAX_BATCHES };
        self.queues.ready_count(link.part) >= batches
            || link.unsent.len() >= MAX_BATCHES / 2
            || link.refunds.len() >= MAX_REFUNDS
            || self.queues.ready(link.part).any(|queue| {
                names += queue.names_to_send();
                names >= MAX_UNITS
            })
    }

    fn exchanges_in_flight(&self) -> impl Iterator<Item = &PendingExchange> {
        self.links.iter().flat_map(|link| &link.in_flight)
    }

    /// The earliest deadline of the exchanges in flight, among those not yet due at `then`.
    pub fn answer_due(&self, then: Instant) -> Option<Instant> {
        let due = self.exchanges_in_flight().map(|sent| sent.deadline);
        due.filter(|due| *due > then).min()
    }

    /// Whether an exchange in flight was sent at this time or before.
    pub fn awaits_answer_since(&self, then: Instant) -> bool {
        self.exchanges_in_flight().any(|sent| sent.at <= then)
    }

    /// The next exchange, if one may be sent; links take turns. It must be answered by [`on_reply`](Self::on_reply) or
    /// [`on_failure`](Self::on_failure).
    pub fn next_exchange(&mut self, now: Instant) -> Option<Outgoing> {
        if !self.ctx.shared {
            return None;
        }
        (0..self.links.len()).find_map(|_| {
            self.last_link = (self.last_link + 1) % self.links.len();
            let link = &self.links[self.last_link];
            if self.may_send_on(link, now) {
                self.next_exchange_on(link.part, now)
            } else {
                None
            }
        })
    }

    fn next_exchange_on(&mut self, part: Part, now: Instant) -> Option<Outgoing> {
        self.ctx.now = now;
        let mut draft = Draft::new(part);
        if let Some(trial) = self.trial(part) {
            // Without a pending batch: no queue sees its answer.
            draft.batches.push(trial);
            return Some(self.send(draft));
        }
        let link = self.link(part);
        let is_ready = link.is_up() && link.clock.is_some();
        // Without the store's time, no acquire can be given an expiry; a store that is down gets only probes.
        if is_ready && !self.asks_generation(part) {
            self.fill(&mut draft);
            let link = self.link(part);
            if draft.is_empty() && link.in_flight.is_empty() && !link.held_back.is_empty() {
                // The outbox contained only holders that are gone. No answer will release these claims.
                self.fill(&mut draft);
            }
            if draft.is_empty() {
                // Otherwise the driver would be woken for this link after each step, and never return to its runtime.
                self.link(part).connection.is_wanted = false;
                return None;
            }
            let is_behind = self.has_work(&self.links[part.number()]);
            let link = self.link(part);
            link.behind_since = link.behind_since.or(Some(now)).filter(|_| is_behind);
        }
        Some(self.send(draft))
    }

    /// Whether the next exchange only asks for the generation of the data.
    fn asks_generation(&self, part: Part) -> bool {
        let link = &self.links[part.number()];
        let has_newcomers = || {
            let has_any = self.queues.count_of(part, Turn::Newcomers) > 0
                || link.has_unsent(self.ctx.introduced);
            has_any && self.ctx.has_strict_limits(part)
        };
        let (ctx, suspected) = (&self.ctx, self.ctx.returns.suspected(part));
        let is_due = link.should_query(suspected, &ctx.settings, ctx.now, has_newcomers);
        is_due && (self.has_work(link) || link.connection.is_wanted)
    }

    /// Work for a store that has answered a probe: a release, which it must write even at `maxmemory`. The name was
    /// never issued and the ledger belongs to no limit, so the release changes nothing.
    fn trial(&mut self, part: Part) -> Option<Batch> {
        let link = self.link(part);
        let is_due = link.breaker.is_on_trial() && link.clock.is_some();
        is_due.then(|| Batch {
            key: self.ctx.settings.unused_ledger(part).into(),
            limit: 1,
            release: vec![self.ctx.next_name(1)],
            ..Batch::default()
        })
    }

    /// An exchange that asks for the time only.
    pub fn hello(&mut self, part: Part, now: Instant) -> Outgoing {
        self.ctx.now = now;
        self.send(Draft::new(part))
    }

    fn fill(&mut self, draft: &mut Draft) {
        // In their turn: later requests for a single slot do not go before them.
        let introduced = self.ctx.introduced;
        self.link(draft.part).retry_held_back(introduced);
        if !self.ctx.settings.parts.is_cluster() {
            self.draft_all(draft)
        } else {
            self.draft_one_key(draft)
        }
    }

    /// Drafts all kinds of work that fit. Claims and newcomers get at most three quarters of the room if there is other
    /// work.
    fn draft_all(&mut self, draft: &mut Draft) {
        self.draft_claims(draft, |draft| draft.batches.len() < MAX_BATCHES / 2);
        draft.room = draft.room.saturating_sub(UNITS_FOR_OTHERS);
        self.draft_queues(draft, Turn::Newcomers, MAX_BATCHES_OF_NEWCOMERS);
        draft.room += UNITS_FOR_OTHERS;
        self.draft_queues(draft, Turn::Others, MAX_BATCHES);
        self.draft_queues(draft, Turn::Newcomers, MAX_BATCHES);
        self.keep_order_with_claims(draft);
        self.draft_sums(draft, None);
        let link = self.link(draft.part);
        let count = link.refunds.len().min(MAX_REFUNDS);
        draft.refunds.extend(link.refunds.drain(..count));
    }

    /// Drafts work about one key, be it a ledger or the state of a rate: in a cluster, keys migrate between nodes one
    /// by one. Refunds and reports precede claims, which then see their effect. But while exchanges are in flight, the
    /// kinds of work take turns, so that no kind waits until all work of another is done.
    fn draft_one_key(&mut self, draft: &mut Draft) {
        let link = self.link(draft.part);
        if link.in_flight.is_empty() {
            link.next_kind = 0;
        }
        let next = link.next_kind;
        for kind in (next..KINDS).chain(0..next) {
            match kind {
                0 => self.draft_queues(draft, Turn::Newcomers, 1),
                1 => self.link(draft.part).draft_refunds_of_one_key(draft),
                2 => {
                    let key = self.accounts.next_key(draft.part).cloned();
                    self.draft_sums(draft, key.as_ref());
                }
                3 => self.draft_claims(draft, |draft| draft.claims.is_empty()),
                _ => self.draft_queues(draft, Turn::Others, 1),
            }
            if !draft.is_empty() {
                self.link(draft.part).next_kind = (kind + 1) % KINDS;
                break;
            }
        }
        self.keep_order_with_claims(draft);
    }

    /// Drafts reports of spending: all, or those for this key.
    fn draft_sums(&mut self, draft: &mut Draft, only: Option<&Arc<str>>) {
        for _ in 0..MAX_REFUNDS {
            let is_other = |only| self.accounts.next_key(draft.part) != Some(only);
            if only.is_some_and(is_other) {
                break;
            }
            let Some((id, charge)) = self.next_report(draft.part) else {
                break;
            };
            let claim = Claim {
                charges: vec![charge],
                ..Claim::default()
            };
            let order = (self.ctx.now, self.next_request().number.get());
            draft.claims.insert(order, (Asker::Account(id), claim));
        }
    }

    /// Adds batches of the queues with this kind of work, up to `most` batches in total.
    fn draft_queues(&mut self, draft: &mut Draft, turn: Turn, most: usize) {
        let count = self.queues.count_of(draft.part, turn);
        for _ in 0..count {
            if draft.room == 0 || draft.batches.len() >= most {
                break;
            }
            let Some(queue) = self.queues.pop_ready(draft.part, turn) else {
                break;
            };
            self.change(queue, |queue, ctx| draft.add_batch(queue, ctx));
        }
    }

    /// Claims take at most half of the room: queues have work too.
    fn draft_claims(&mut self, draft: &mut Draft, more: impl Fn(&Draft) -> bool) {
        while draft.room > MAX_UNITS / 2 && more(draft) {
            let Some(id) = self.link(draft.part).unsent.pop_first() else {
                break;
            };
            // If the request lost a slot meanwhile, it may also be listed at another link, which sends it.
            let is_unsent = |request: &&Request| {
                matches!(request.stage, Stage::Unsent) && self.part_of(request) == draft.part
            };
            let Some(request) = self.request(id).filter(is_unsent) else {
                continue;
            };
            let next = self.next_for(request);
            let legs: Legs = next.legs_in(request).cloned().collect();
            let is_introducing = |leg: &SlotLeg| self.queues[leg.lease.queue].is_introducing();
            if legs.iter().any(is_introducing) {
                self.link(draft.part).held_back.insert(id);
                continue;
            }
            let since = request.asking.map_or(self.ctx.now, |asking| asking.since);
            // A request that has queued before is ordered by its arrival.
            let ticket = request.ticket;
            let order = (ticket.map_or(since, |_| request.asked), id.number.get());
            let charges = next.fees_in(request);
            let charges: Vec<_> = charges.map(|(_, fee)| fee.charge.clone()).collect();
            let sent = Stage::Sent(ExchangeId {
                number: self.exchanges + 1,
                part: draft.part,
            });
            if let Some(request) = self.request_mut(id) {
                request.stage = sent;
            }
            draft.room = draft.room.saturating_sub(charges.len());
            let asks = legs
                .iter()
                .filter_map(|SlotLeg { lease, .. }| self.draft_leg(draft, lease))
                .collect();
            let claim = Claim {
                charges,
                asks,
                ticket,
            };
            draft.claims.insert(order, (Asker::Request(id), claim));
        }
    }

    /// Drafts a leg that the request does not have yet, and a batch for its queue if necessary.
    fn draft_leg(&mut self, draft: &mut Draft, lease: &Lease) -> Option<ClaimAsk> {
        let seq = lease.seq();
        self.change(lease.queue, |queue, ctx| {
            let Some(LegState::Idle) = queue.leg_state(seq, ctx.now) else {
                return None;
            };
            let units = weight_of(seq) as usize;
            let has_room = queue.make_room(ctx, units);
            let batch = match draft.batch_of(lease.queue) {
                Some(number) => {
                    let (batch, pending) = (&mut draft.batches[number], &mut draft.pending[number]);
                    queue.take_releases(batch, pending, &mut draft.room);
                    number
                }
                None => {
                    // Makes sure that there is a batch, even for this leg only.
                    queue.ask_for_batch();
                    draft.add_batch(queue, ctx);
                    draft.batches.len() - 1
                }
            };
            let (want, payer) = queue.take_leg(ctx, seq, has_room)?;
            draft.batches[batch].waits |= want == Want::Wait;
            draft.room = draft.room.saturating_sub(units);
            Some(ClaimAsk {
                batch,
                seq,
                want,
                payer,
            })
        })
    }

    fn send(&mut self, draft: Draft) -> Outgoing {
        let Draft {
            part,
            batches,
            pending,
            claims,
            refunds,
            ..
        } = draft;
        let (ids, claims): (_, Vec<_>) = claims.into_values().unzip();
        let (settings, now) = (&self.ctx.settings, self.ctx.now);
        // The store gets its full timeout, however long requests have waited here: they have deadlines of their own.
        let timeout = settings.store_timeout;
        let deadline = now + timeout;
        self.exchanges += 1;
        let number = self.exchanges;
        let is_empty = batches.is_empty() && claims.is_empty() && refunds.is_empty();
        let link = &mut self.links[part.number()];
        let generation_query = is_empty.then(|| link.query(settings, now));
        // This exchange reconnects if the connection has ended.
        (link.connection.is_wanted, link.connection.reconnect_at) = (false, None);
        let exchange = Arc::new(Exchange {
            replica: settings.replica,
            lease_ms: ms(settings.lease),
            respond_ms: ms(link.responds_within(settings, now)),
            waiter_ttl_ms: ms(settings.waiter_ttl),
            not_after_us: link.clock.map_or(0, |clock| clock.at(deadline)),
            batches,
            claims,
            refunds,
            generation_query,
        });
        // A session connects only for a hello.
        debug_assert!(link.clock.is_some() || exchange.is_hello());
        let id = ExchangeId { number, part };
        link.window.on_sent(now);
        link.in_flight.push(PendingExchange {
            id,
            at: now,
            deadline,
            bytes: exchange.bytes(),
            exchange: exchange.clone(),
            pending,
            claims: ids,
        });
        self.ctx
            .record(|history, now| history.sent(number, &exchange, now));
        Outgoing {
            id,
            exchange,
            timeout,
        }
    }
}

impl Link {
    fn draft_refunds_of_one_key(&mut self, draft: &mut Draft) {
        if let Some(key) = self.refunds.first().map(|refund| refund.key.clone()) {
            let same = self.refunds.extract_if(.., |refund| refund.key == key);
            draft.refunds.extend(same.take(MAX_REFUNDS));
        }
    }
}

impl Draft {
    fn new(part: Part) -> Self {
        Self {
            part,
            batches: Vec::new(),
            pending: Vec::new(),
            claims: BTreeMap::new(),
            refunds: Vec::new(),
            room: MAX_UNITS,
        }
    }

    fn batch_of(&self, queue: QueueId) -> Option<usize> {
        let mut pending = self.pending.iter();
        pending.position(|pending| pending.queue == queue)
    }

    /// Adds one batch with as much of a queue's work as fits.
    fn add_batch(&mut self, queue: &mut Queue, ctx: &mut Context) {
        if let Some(number) = self.batch_of(queue.id()) {
            let (batch, pending) = (&mut self.batches[number], &mut self.pending[number]);
            queue.fill_batch(ctx, batch, pending, &mut self.room);
        } else if let Some((batch, pending)) = queue.take_batch(ctx, &mut self.room) {
            self.batches.push(batch);
            self.pending.push(pending);
        }
    }

    fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.claims.is_empty() && self.refunds.is_empty()
    }
}

impl Core {
    /// Turns requests sent by their queues into claims of one leg, if a claim asks for the same ledger or one of them
    /// has lost its place: this keeps them in order with the claims, or with the waiters.
    fn keep_order_with_claims(&self, draft: &mut Draft) {
        let claims = draft.claims.values().flat_map(|(_, claim)| &claim.asks);
        let claimed = claims.map(|ask| ask.batch);
        let pending = draft.pending.iter().enumerate();
        let lost = pending.filter(|(_, pending)| pending.has_tickets());
        let touched: BTreeSet<usize> = claimed.chain(lost.map(|(batch, _)| batch)).collect();
        for batch in touched {
            for Ask { seq, wait, payer } in std::mem::take(&mut draft.batches[batch].acquire) {
                let want = if wait { Want::Wait } else { Want::Now };
                let claim = Claim {
                    asks: vec![ClaimAsk {
                        batch,
                        seq,
                        want,
                        payer,
                    }],
                    ticket: draft.pending[batch].ticket_of(seq),
                    ..Claim::default()
                };
                let id = self.queues[draft.pending[batch].queue].request_of(seq);
                let id = id.expect("it has a request");
                let asking = self.request(id).and_then(|request| request.asking);
                let since = asking.map_or(self.ctx.now, |asking| asking.since);
                let order = (since, id.number.get());
                draft.claims.insert(order, (Asker::Listed, claim));
            }
        }
    }
}

/// Answers. `store.rs` handles exchanges without one.
impl Core {
    /// An exchange was answered.
    pub fn on_reply(&mut self, id: ExchangeId, reply: Reply, now: Instant) {
        self.ctx.now = now;
        if let Some(sent) = self.link(id.part).take_sent(id) {
            self.answered(sent, reply);
            self.follow_decisions();
        }
    }

    fn answered(&mut self, sent: PendingExchange, reply: Reply) {
        let (id, at) = (sent.id, sent.at);
        let (link, now) = (&mut self.links[id.part.number()], self.ctx.now);
        let seen = StoreMoment {
            store_us: reply.now_us,
            sent: at,
        };
        // An answer on a connection that has ended does not set the clock: the next server's clock may differ. Nor does one
        // that took longer than the timeout: the process stood still, perhaps before it sent the exchange.
        let is_quick = now.saturating_duration_since(at) <= self.ctx.settings.store_timeout;
        if link.connection.has(id) && (is_quick || link.clock.is_none()) {
            link.clock = Some(seen);
        }
        link.window.on_answer(at, now);
        if reply.is_late {
            self.note_answer(id.part, Work::None, None);
            return self.repeat(sent, 0);
        }
        self.ctx
            .record(|history, now| history.answered(id.number, &reply, now));
        let PendingExchange {
            exchange,
            mut pending,
            claims,
            ..
        } = sent;
        let link = &mut self.links[id.part.number()];
        if exchange.generation_query.is_some() && link.connection.has(id) {
            let is_lost = link.on_generation(seen, reply.generation, &self.ctx.settings);
            self.on_generation(id.part, reply.generation, is_lost, seen);
        }
        // Adds the units that this exchange has granted to claims: the ledger's numbers, with which each queue compares
        // its own, include them.
        for (claim, answer) in exchange.claims.iter().zip(&reply.claims) {
            let standings = answer.iter().flat_map(|answer| &answer.standings);
            for (ask, standing) in claim.asks.iter().zip(standings) {
                if let Standing::Held { .. } = standing {
                    pending[ask.batch].held += weight_of(ask.seq);
                }
            }
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
        let unusable = self.claims_answered(id, &exchange, (&claims, &pending), reply.claims, seen);
        outage = outage.or(unusable);
        for pending in &pending {
            self.change(pending.queue, |queue, ctx| {
                queue.after_answer(ctx, pending, seen)
            });
        }
        self.note_answer(id.part, work, outage.as_ref());
        self.reopen_sent(id, claims.into_iter().filter_map(Asker::request));
    }
}

fn ms(length: Duration) -> u64 {
    length.as_millis() as u64
}
