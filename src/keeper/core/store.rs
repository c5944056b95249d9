//! The store, as the core knows it: unanswered exchanges, connections, the breaker, answers to claims, errors of ledgers.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core, ExchangeId, Request, Stage,
    breaker::{Breaker, Transition, Work},
    link::{Asker, Connection, PendingExchange},
};
use crate::{
    fallbacks::Availability,
    keeper::{
        demand::RequestId,
        effects::{Effect, LogEvent},
        queue::PendingBatch,
    },
    leases::{Paid, ReportOutcome, StoreMoment},
    ledger::{Batch, Charged, Claim, ClaimReply, Exchange, Generation, LedgerError, Wake},
    limit::Limit,
    part::Part,
    store::{COUNT_INTERVAL, Event, ExchangeError, Failure, StoreError},
    telemetry::{Cause, StoreState},
};

/// Pause between two connections, even to a server that ends every connection.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
/// Pause after a failed attempt to connect: a second failure at the same moment would prove nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How much earlier than the interval a count may follow a connection: the connection is reported a moment later.
const COUNT_SLACK: Duration = Duration::from_secs(1);
/// Interval between reports that a store has never been reached.
const REMINDER_INTERVAL: Duration = Duration::from_secs(60);

struct SentClaim<'a> {
    exchange: ExchangeId,
    asker: Asker,
    claim: &'a Claim,
    pending: &'a [PendingBatch],
}

/// Exchanges without an answer.
impl Core {
    /// Handles an exchange without an answer, which may or may not have run. Returns whether it was on the current
    /// connection.
    pub fn on_failure(&mut self, id: ExchangeId, error: &ExchangeError, now: Instant) -> bool {
        self.ctx.now = now;
        let link = self.link(id.part);
        let Some(sent) = link.take_sent(id) else {
            return false;
        };
        let is_in_use = link.connection.has(id);
        let failure = match error.failure {
            // Silence of a connection that has ended proves nothing about the store.
            Failure::TimedOut if !is_in_use => Failure::Cut,
            failure => failure,
        };
        // Whatever was wrong with the connection, it is not used again. Not every session reports its end.
        if is_in_use {
            self.leave_connection(id.part);
        }
        self.unanswered(sent);
        self.note_failure(failure, id, &error.error.message);
        if is_in_use {
            self.reconnect_in(RETRY_PAUSE, id.part);
        }
        self.follow_decisions();
        is_in_use
    }

    pub fn log_panic(&mut self) {
        self.ctx.log(LogEvent::DriverPanicked);
    }

    /// The driver has gone with its runtime. Requests that are polled start another one.
    pub fn on_driver_gone(&mut self, now: Instant) {
        (self.ctx.now, self.ctx.driven) = (now, false);
        self.fail_exchanges();
        // A request served from the pool would not restart the driver, so the pool is emptied.
        if self.ctx.shared {
            self.each_queue(|queue, ctx| queue.empty_pool(ctx));
        }
        self.each_queue(|queue, ctx| queue.on_abandoned(ctx));
        self.ctx.end_confirmations(None);
        for (_, request) in &mut self.requests {
            self.ctx.effects.wake(request.waker.take());
        }
        self.follow_decisions();
    }

    /// The driver did not run in time, and another one takes over, perhaps on its own thread.
    pub fn on_late_driver(&mut self, has_thread: bool, now: Instant) {
        (self.ctx.now, self.ctx.driven) = (now, false);
        self.ctx.log(LogEvent::DriverLate { has_thread });
        self.fail_exchanges();
        self.follow_decisions();
    }

    /// The driver that sent these exchanges will not see their answers. This proves nothing about the store.
    fn fail_exchanges(&mut self) {
        for part in self.ctx.settings.parts.all() {
            // The next driver has its own connections.
            self.leave_connection(part);
            for sent in mem::take(&mut self.link(part).in_flight) {
                self.unanswered(sent);
            }
        }
    }

    fn unanswered(&mut self, sent: PendingExchange) {
        let not_after_us = sent.exchange.not_after_us;
        self.repeat(sent, not_after_us);
    }

    /// An exchange may have run, or may run until `not_after_us`; with 0 it has certainly not run. Its work is repeated.
    pub(super) fn repeat(&mut self, sent: PendingExchange, not_after_us: u64) {
        let PendingExchange {
            id,
            exchange,
            mut pending,
            claims,
            ..
        } = sent;
        let part = id.part;
        self.ctx
            .record(|history, now| history.failed(id.number, not_after_us == 0, now));
        if not_after_us == 0 {
            let link = self.link(part);
            link.refunds.extend(exchange.refunds.iter().cloned());
        }
        let availability = self.ctx.availability(part);
        for (pending, batch) in pending.iter_mut().zip(&exchange.batches) {
            let queue = self.queues.without_listing(pending.queue);
            queue.on_failure(&mut self.ctx, batch, pending, not_after_us, availability);
        }
        for ask in exchange.claims.iter().flat_map(|claim| &claim.asks) {
            let queue = self.queues.without_listing(pending[ask.batch].queue);
            queue.on_ask_failure(&mut self.ctx, ask.seq, not_after_us, availability);
        }
        let (now, is_up) = (self.ctx.now, availability == Availability::Up);
        for pending in &pending {
            self.change(pending.queue, |queue, ctx| {
                queue.after_failure();
                if is_up {
                    queue.call_roll_soon(ctx);
                }
            });
        }
        let outcome = match not_after_us {
            0 => ReportOutcome::Refused,
            _ => ReportOutcome::Unknown,
        };
        for asker in &claims {
            if let Asker::Account(id) = *asker {
                self.on_report(id, outcome);
            }
        }
        self.reopen_sent(id, claims.into_iter().filter_map(Asker::request));
        if is_up && self.link(part).begins_roll_call(now) {
            self.each_queue_of(part, |queue, ctx| queue.call_roll_soon(ctx));
        }
    }
}

/// Events.
impl Core {
    /// An event of the connection to this part of the store.
    pub fn on_event(&mut self, part: Part, event: &Event, now: Instant) {
        self.ctx.now = now;
        match event {
            Event::Connected => self.on_connected(part),
            Event::Disconnected => self.on_disconnected(part),
            Event::Wake(wake) => self.on_wake(wake),
            Event::Missed => self.on_missed(part),
            Event::Lost(key) => self.on_lost(part, key),
            Event::Counted(replicas) => self.on_counted(part, *replicas),
        }
        self.follow_decisions();
    }

    /// Another replica has found that the store has lost permits of this ledger, or all data of this part.
    fn on_lost(&mut self, part: Part, key: &str) {
        let is_of_part = key == &*self.link(part).generation_key;
        if is_of_part && (self.ctx.returns).has_just_begun(part, None, self.ctx.now) {
            // The generation shows whether this is the same loss or another one.
            let link = self.link(part);
            link.forget_query();
            link.connection.is_wanted = true;
        } else if is_of_part {
            self.begin_return(part, true, self.ctx.now + self.ctx.returns.length);
        } else if let Some(queue) = self.queues.of_ledger(key) {
            self.change(queue, |queue, ctx| queue.on_loss(ctx));
        }
    }

    /// The store has answered a query. `is_lost`: it has lost the data that this process knew.
    pub(super) fn on_generation(
        &mut self,
        part: Part,
        answer: Option<Generation>,
        is_lost: bool,
        at: StoreMoment,
    ) {
        if self.ctx.returns.end(part, at.sent) {
            self.each_queue_of(part, |queue, _| queue.go_on());
        }
        if is_lost {
            self.ctx
                .effects
                .push(Effect::MeasureStore(StoreState::Lost));
        }
        let found_ms = answer.map_or(0, |answer| answer.found_ms);
        let left = self.ctx.returns.left(found_ms, is_lost, at.store_us);
        // A new connection introduces all queues anyway.
        let is_new = self.link(part).connection.made >= Some(at.sent);
        self.begin_return(part, is_lost && !is_new, self.ctx.now + left);
    }

    fn begin_return(&mut self, part: Part, introduces: bool, until: Instant) {
        if until > self.ctx.now && self.ctx.returns.begin(part, until) {
            self.ctx.log(LogEvent::DataLost);
        }
        if introduces && self.link(part).is_up() {
            self.each_queue_of(part, |queue, ctx| queue.introduce(ctx));
        }
    }

    /// Wake-ups of any queue may have been missed: each queue asks for its waiters by name, and releases idle slots,
    /// since another replica may have recalled them. News of a loss of data may have been missed too.
    fn on_missed(&mut self, part: Part) {
        self.link(part).forget_query();
        self.each_queue_of(part, |queue, ctx| {
            queue.on_recall(ctx, ctx.now);
            queue.call_roll();
        });
    }

    /// The store has counted the replicas. On a new connection it may not see those that have yet to reconnect, nor may
    /// they have counted this one.
    fn on_counted(&mut self, part: Part, replicas: u32) {
        let link = &self.links[part.number()];
        let is_settled = |made| self.ctx.now + COUNT_SLACK >= made + COUNT_INTERVAL;
        let is_settled = link.is_up() && link.connection.made.is_some_and(is_settled);
        self.ctx.note_replicas(part, replicas, is_settled);
        self.measure_limits();
    }

    /// Another replica's exchange has promoted waiters of this one, or recalls idle slots.
    fn on_wake(&mut self, wake: &Wake) {
        // A wake-up for an unknown key is not recorded: anybody can publish one.
        let Some(queue) = self.queues.of_ledger(&wake.key) else {
            return;
        };
        self.ctx.record(|history, now| history.woken(wake, now));
        self.change(queue, |queue, ctx| {
            if wake.seqs.is_empty() {
                queue.on_recall(ctx, ctx.now);
            }
            for seq in &wake.seqs {
                queue.on_wake(ctx, *seq, wake);
            }
        });
    }
}

/// The breaker of a link, and its connection.
impl Core {
    /// Passes the failure of an exchange to the breaker.
    pub(super) fn note_failure(&mut self, failure: Failure, id: ExchangeId, why: &str) {
        let numbers = (id.number, self.exchanges);
        let holds = self.ctx.lease_held().is_some();
        let failed =
            |one: &mut Breaker, now, rng: &mut _| one.failed(failure, numbers, holds, now, rng);
        match self.follow_breaker(id.part, failed, (Cause::of(failure), why)) {
            Transition::Opened { is_news: true } => self.reach.reported = Some(self.ctx.now),
            Transition::StaysOpen => {
                self.each_queue_of(id.part, |queue, ctx| queue.forget_releases(ctx.now));
                self.remind_of(why);
            }
            _ => {}
        }
    }

    /// The store has answered, perhaps only that it cannot work.
    pub(super) fn note_answer(&mut self, part: Part, work: Work, outage: Option<&StoreError>) {
        match outage {
            Some(error) => {
                let why = (Cause::Full, error.message.as_str());
                let of = (self.exchanges, self.ctx.lease_held());
                let refused =
                    |one: &mut Breaker, now, rng: &mut _| one.refused_to_write(of, now, rng);
                self.follow_breaker(part, refused, why);
            }
            None => {
                self.reach.reached = true;
                let answered = |breaker: &mut Breaker, now, _: &mut _| breaker.answered(work, now);
                self.follow_breaker(part, answered, (Cause::Outage, ""));
            }
        }
    }

    /// Reports every minute that the store was never reached: its address may be wrong.
    fn remind_of(&mut self, why: &str) {
        let now = self.ctx.now;
        let is_due = |at| now >= at + REMINDER_INTERVAL;
        if !self.reach.reached && self.reach.reported.is_some_and(is_due) {
            self.reach.reported = Some(now);
            self.ctx.log(LogEvent::StoreNeverReached {
                error: why.to_owned(),
            });
        }
    }

    /// Ends the trouble of a store that has worked for long enough.
    pub(super) fn end_trouble(&mut self) {
        for part in self.ctx.settings.parts.all() {
            let ends_at = self.link(part).breaker.ends_at();
            if ends_at.is_some_and(|at| at <= self.ctx.now) {
                let on_time = |breaker: &mut Breaker, now, _: &mut _| breaker.on_time(now);
                self.follow_breaker(part, on_time, (Cause::Outage, ""));
            }
        }
    }

    /// Steps the breaker, and acts on its transition. `why`: the cause, if this is a trouble.
    fn follow_breaker(
        &mut self,
        part: Part,
        step: impl FnOnce(&mut Breaker, Instant, &mut fastrand::Rng) -> Transition,
        (cause, why): (Cause, &str),
    ) -> Transition {
        let breaker = &mut self.links[part.number()].breaker;
        let was_up = breaker.is_well();
        let change = step(breaker, self.ctx.now, &mut self.ctx.rng);
        let (availability, is_up) = (breaker.availability(), breaker.is_well());
        self.ctx.set_availability(part, availability);
        let refused = availability == Availability::Refused;
        let state = match change {
            Transition::Opened { is_news: true } => Some(StoreState::Down { was_up, refused }),
            _ if is_up && !was_up => Some(StoreState::Up),
            _ => None,
        };
        if let Some(state) = state {
            self.ctx.effects.push(Effect::MeasureStore(state));
        }
        match change {
            Transition::Opened { .. } => self.leave_store(part),
            Transition::Closed { .. } => {
                // Replicas that are back early would be granted the slots that the others have released, before these
                // others record the permits of their fallbacks. Only a newcomer shows whether a store has memory again.
                if !self.link(part).breaker.is_full() {
                    self.ctx.returns.begin_after_outage(part, self.ctx.now);
                }
                self.each_queue_of(part, |queue, ctx| queue.rejoin_store(ctx));
            }
            Transition::None | Transition::StaysOpen | Transition::Recovered => {}
        }
        if let Transition::Opened { .. } | Transition::Closed { .. } = change {
            // The time of a fallback may be over, or begins again.
            self.measure_limits();
        }
        match change {
            Transition::Opened { .. } | Transition::StaysOpen => {
                self.ctx.log_trouble(part, cause, why);
            }
            Transition::Closed { is_news: true } | Transition::Recovered => {
                self.ctx.log_recovery(part);
            }
            _ => {}
        }
        change
    }

    fn leave_store(&mut self, part: Part) {
        self.link(part).refunds.clear();
        self.ctx.end_confirmations(Some(part));
        // Requests in flight go on once their exchange is over, or when their time to ask is up.
        let is_here = |request: &Request| {
            let is_sent = matches!(request.stage, Stage::Sent(_) | Stage::Listed);
            !is_sent && self.part_of(request) == part
        };
        for id in self.requests_that(is_here) {
            self.stop_asking(id);
        }
        // In a cluster no request has one.
        for (_, request) in &mut self.requests {
            request.ticket = None;
        }
        let availability = self.ctx.availability(part);
        self.report_all_here(part);
        self.each_queue_of(part, |queue, ctx| queue.leave_store(ctx, availability));
        let link = self.link(part);
        link.unsent.append(&mut link.held_back);
        let unsent = mem::take(&mut link.unsent);
        self.reopen_all(unsent);
    }

    /// A new connection, perhaps to a server with another clock, or without our data. Wake-ups may be lost.
    fn on_connected(&mut self, part: Part) {
        let now = self.ctx.now;
        let link = self.link(part);
        link.connection = Connection {
            made: Some(now),
            begins_after: link.connection.begins_after,
            ..Connection::default()
        };
        link.clock = None;
        link.behind_since = None;
        link.breaker.connected();
        link.window.on_connected();
        if link.is_up() {
            self.each_queue_of(part, |queue, ctx| queue.introduce(ctx));
        }
    }

    /// The connection has ended, or there was none. The next exchange reconnects, so it has to be a hello: newcomers
    /// sent with it would reach the next server before the holders. The next server's clock may also differ.
    fn leave_connection(&mut self, part: Part) {
        let last = self.exchanges;
        let link = self.link(part);
        link.clock = None;
        link.connection.begins_after = last;
    }

    /// No part of the store has a connection.
    pub fn leave_connections(&mut self) {
        for part in self.ctx.settings.parts.all() {
            self.leave_connection(part);
            self.reconnect_in(Duration::ZERO, part);
        }
    }

    /// The connection has ended, perhaps because the server has: holders may be forgotten, and waiters promoted without
    /// a wake-up.
    fn on_disconnected(&mut self, part: Part) {
        self.leave_connection(part);
        let now = self.ctx.now;
        let made = self.link(part).connection.made;
        let soonest = made.map_or(now, |made| made + RECONNECT_PAUSE);
        self.reconnect_in(soonest.saturating_duration_since(now), part);
    }

    /// Asks for a hello after this pause: holders without anything to send need a connection too. While the store is
    /// down, probes reconnect.
    fn reconnect_in(&mut self, pause: Duration, part: Part) {
        let at = self.ctx.now + pause;
        let connection = &mut self.link(part).connection;
        let earlier = connection.reconnect_at.filter(|earlier| *earlier < at);
        connection.reconnect_at = earlier.or(Some(at));
    }
}

/// Answers of the store: unusable ledgers, and claims.
impl Core {
    /// The ledger of a batch cannot be used. Returns an error that means that the store is down.
    pub(super) fn batch_unusable(
        &mut self,
        batch: &Batch,
        pending: &mut PendingBatch,
        error: &LedgerError,
    ) -> Option<StoreError> {
        let error = StoreError::from(error);
        let queue = self.queues.without_listing(pending.queue);
        let limit = queue.limit().clone();
        pending.failed = true;
        queue.on_failure(&mut self.ctx, batch, pending, 0, error.availability());
        self.complain(&limit, &batch.key, &error);
        error.is_outage().then_some(error)
    }

    /// Processes the answers to the claims of an exchange. Returns an error that means that the store is down.
    pub(super) fn claims_answered(
        &mut self,
        id: ExchangeId,
        exchange: &Exchange,
        (askers, pending): (&[Asker], &[PendingBatch]),
        answers: Vec<Result<ClaimReply, LedgerError>>,
        at: StoreMoment,
    ) -> Option<StoreError> {
        self.uncount_legs(exchange, pending, &answers);
        let mut outage = None;
        let refunds_before = self.link(id.part).refunds.len();
        for ((&asker, claim), result) in askers.iter().zip(&exchange.claims).zip(answers) {
            let sent = SentClaim {
                exchange: id,
                asker,
                claim,
                pending,
            };
            let refunds_then = self.link(id.part).refunds.len();
            match result {
                Ok(answer) => self.claim_answered(&sent, &answer, at),
                Err(error) => {
                    let error = StoreError::from(&error);
                    if let Some(limit) = self.limit_of(&sent) {
                        let key = claim.charges.first().map(|charge| &charge.key);
                        self.complain(&limit, &key.cloned().unwrap_or_default(), &error);
                    }
                    self.claim_unusable(&sent, error.availability());
                    outage = outage.or(error.is_outage().then_some(error));
                }
            }
            self.link(id.part).refunds[refunds_then..].reverse();
        }
        // Newest claim first, each in its own order: a rate with a small burst can only undo its latest reserved start.
        self.link(id.part).refunds[refunds_before..].reverse();
        outage
    }

    /// Restores the queues' snapshots to before the exchange's claims, whose standings follow one by one.
    fn uncount_legs(
        &mut self,
        exchange: &Exchange,
        pending: &[PendingBatch],
        answers: &[Result<ClaimReply, LedgerError>],
    ) {
        for (claim, answer) in exchange.claims.iter().zip(answers) {
            let standings = answer.iter().flat_map(|answer| &answer.standings);
            for (ask, standing) in claim.asks.iter().zip(standings) {
                let queue = self.queues.without_listing(pending[ask.batch].queue);
                queue.uncount([standing]);
            }
        }
    }

    fn claim_answered(&mut self, sent: &SentClaim<'_>, answer: &ClaimReply, at: StoreMoment) {
        for (ask, standing) in sent.claim.asks.iter().zip(&answer.standings) {
            let queue = self.queues.without_listing(sent.pending[ask.batch].queue);
            queue.acquired(&mut self.ctx, ask.seq, *standing, at);
        }
        if let Some(id) = self.request_of(sent) {
            self.stop_asking(id);
            if let Some(request) = self.request_mut(id) {
                request.ticket = request.ticket.or(answer.ticket());
            }
        }
        self.claim_charged(sent, &answer.charged, at.store_us);
    }

    /// A ledger or a rate of the claim cannot be used.
    fn claim_unusable(&mut self, sent: &SentClaim<'_>, availability: Availability) {
        let mut is_rate = true;
        for ask in &sent.claim.asks {
            let pending = &sent.pending[ask.batch];
            let failed = pending.failed;
            is_rate &= !failed;
            // The other legs retry if the request continues without this one.
            let availability = if failed {
                availability
            } else {
                Availability::Up
            };
            let queue = self.queues.without_listing(pending.queue);
            queue.on_ask_failure(&mut self.ctx, ask.seq, 0, availability);
        }
        match sent.asker {
            Asker::Account(id) => self.on_report(id, ReportOutcome::Refused),
            Asker::Request(_) if is_rate && availability == Availability::Refused => {
                if let Some(id) = self.request_of(sent) {
                    self.refuse_unpaid(id);
                }
            }
            _ => {}
        }
    }

    /// The request, if it still waits for this answer.
    fn request_of(&self, sent: &SentClaim<'_>) -> Option<RequestId> {
        let request = sent.asker.request();
        request.filter(|id| self.is_sent_in(*id, sent.exchange))
    }

    /// The first limit of the claim.
    fn limit_of(&self, sent: &SentClaim<'_>) -> Option<Arc<Limit>> {
        if let Some(ask) = sent.claim.asks.first() {
            let queue = sent.pending[ask.batch].queue;
            return Some(self.queues[queue].limit().clone());
        }
        let fee = match sent.asker {
            Asker::Account(id) => self.accounts.get(id)?.fee(),
            _ => self.request(sent.asker.request()?)?.fees().first()?,
        };
        Some(fee.limit.clone())
    }

    /// The store has charged the claim, or has refused to.
    fn claim_charged(&mut self, sent: &SentClaim<'_>, charged: &[Charged], now_us: u64) {
        if let Asker::Account(id) = sent.asker {
            return self.on_report(id, ReportOutcome::of(charged));
        }
        let Some(id) = self.request_of(sent) else {
            return self.refund_unclaimed(sent.exchange.part, &sent.claim.charges, charged);
        };
        let Some(next) = self.request(id).map(|request| self.next_for(request)) else {
            return;
        };
        self.charged(id, next, charged, now_us, Paid::InStore);
    }
}
