//! The store, as the core knows it: unanswered exchanges, connections, events and wake-ups, the breaker, answers to claims, errors of ledgers.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core, ExchangeId, Request, Stage,
    breaker::{Breaker, Transition, Work},
    link::{Asker, PendingExchange},
};
use crate::{
    fallbacks::Availability,
    keeper::{
        demand::RequestId,
        effects::{Effect, LogEvent},
        queue::{Doubt, PendingBatch},
    },
    leases::{Fee, Paid, ReportOutcome, StoreMoment},
    ledger::{Batch, Charged, Claim, ClaimAsk, ClaimReply, Exchange, LedgerError, Refund, Wake},
    limit::Limit,
    part::Part,
    store::{Event, ExchangeError, Failure, StoreError},
    telemetry::{Cause, StoreState},
};

/// Pause after a failed attempt to connect: a second failure at the same moment would prove nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A claim, with its answer.
struct SentClaim<'a> {
    part: Part,
    asker: Asker,
    /// If it still waits for this answer.
    request: Option<RequestId>,
    claim: &'a Claim,
    pending: &'a [PendingBatch],
}

/// Exchanges without an answer.
impl Core {
    /// Handles an exchange without an answer, which may or may not have run. Returns whether it was on the current
    /// connection.
    pub fn on_failure(&mut self, id: ExchangeId, error: &ExchangeError) -> bool {
        let link = &mut self.links[id.part];
        let Some(sent) = link.take_sent(id) else {
            return false;
        };
        let is_in_use = link.connection.has(id.number);
        let failure = match error.failure {
            // Silence of a connection that has ended proves nothing about the store.
            Failure::TimedOut if !is_in_use => Failure::Cut,
            failure => failure,
        };
        // Whatever was wrong with the connection, it is not used again. Not every session reports its end.
        if is_in_use {
            link.connection.ended(self.exchanges);
        }
        self.unanswered(sent, false);
        self.note_failure(failure, id, &error.error.message);
        if is_in_use {
            let connection = &mut self.links[id.part].connection;
            connection.reconnect_in(RETRY_PAUSE, self.ctx.now);
        }
        self.follow_decisions();
        is_in_use
    }

    /// The driver has gone with its runtime. Requests that are polled start another one.
    pub fn on_driver_gone(&mut self) {
        self.fail_exchanges();
        // A request served from the pool would not restart the driver, so the pool is emptied.
        if self.ctx.shared {
            self.each_queue(None, |queue, ctx| queue.empty_pool(ctx));
        }
        self.each_queue(None, |queue, ctx| queue.on_abandoned(ctx));
        self.ctx.end_confirmations(None);
        for request in self.requests.each() {
            let waker = request.waker.take();
            self.ctx.effects.push(waker.map(Effect::Wake));
        }
        self.follow_decisions();
    }

    /// The driver did not run in time, and another one takes over, perhaps on its own thread.
    pub fn on_late_driver(&mut self, has_thread: bool) {
        self.ctx.log(LogEvent::DriverLate { has_thread });
        self.fail_exchanges();
        self.follow_decisions();
    }

    /// The driver that sent these exchanges will not see their answers. This proves nothing about the store.
    fn fail_exchanges(&mut self) {
        self.ctx.driven = false;
        for part in self.ctx.settings.parts.all() {
            // The next driver has its own connections.
            self.links[part].connection.ended(self.exchanges);
            for sent in mem::take(&mut self.links[part].in_flight) {
                self.unanswered(sent, false);
            }
        }
    }

    /// Repeats the work of an exchange without an answer, or with one that it was too late (`is_late`): then it has certainly
    /// not run.
    pub(super) fn unanswered(&mut self, sent: PendingExchange, is_late: bool) {
        let (id, part, exchange) = (sent.id, sent.id.part, sent.exchange);
        let (mut pending, claims) = (sent.pending, sent.claims);
        let not_after_us = if is_late { 0 } else { exchange.not_after_us };
        let has_not_run = not_after_us == 0;
        (self.ctx).record(|history, now| history.failed(id.number, has_not_run, now));
        if has_not_run {
            let refunds = &mut self.links[part].refunds;
            refunds.extend(exchange.refunds.iter().cloned());
        }
        let availability = self.ctx.availability(part);
        for (pending, batch) in pending.iter_mut().zip(&exchange.batches) {
            let queue = self.queues.without_listing(pending.queue);
            queue.unanswered(&mut self.ctx, batch, pending, not_after_us, availability);
        }
        for ask in exchange.claims.iter().flat_map(|claim| &claim.asks) {
            let queue = self.queues.without_listing(pending[ask.batch].queue);
            queue.entry_unanswered(&mut self.ctx, ask.seq, not_after_us, availability);
        }
        let is_up = availability == Availability::Up;
        for pending in &pending {
            self.change(pending.queue, |queue, ctx| {
                queue.outbox.over();
                if is_up {
                    queue.call_roll(ctx, false);
                }
            });
        }
        let outcome = if has_not_run {
            ReportOutcome::Refused
        } else {
            ReportOutcome::Unknown
        };
        for asker in &claims {
            if let Asker::Account(id) = *asker {
                (self.accounting).on_report(id, outcome, &mut self.ctx, &mut self.links);
            }
        }
        self.reopen_sent(id, claims);
    }
}

/// Events.
impl Core {
    /// An event of the connection to this part of the store.
    pub fn on_event(&mut self, part: Part, event: &Event) {
        match event {
            Event::Connected => self.on_connected(part),
            // Perhaps the server has ended: holders may be forgotten, and waiters promoted without a wake-up.
            Event::Disconnected => {
                let connection = self.links[part].connection.ended(self.exchanges);
                connection.reconnect_soon(self.ctx.now);
            }
            Event::Wake(wake) => self.on_wake(wake),
            Event::Missed => self.on_missed(part),
            Event::Lost(key) => self.on_lost(part, key),
            Event::Counted(replicas) => self.on_counted(part, *replicas),
        }
        self.follow_decisions();
    }

    /// Wake-ups of any queue may have been missed: each queue asks for its waiters by name, and releases idle slots,
    /// since another replica may have recalled them. News of a loss of data may have been missed too.
    fn on_missed(&mut self, part: Part) {
        self.links[part].forget_query();
        self.each_queue(Some(part), |queue, ctx| {
            queue.on_recall(ctx, ctx.now);
            queue.call_roll(ctx, true);
        });
    }

    /// The store has counted the replicas.
    fn on_counted(&mut self, part: Part, replicas: u32) {
        let link = &self.links[part];
        let is_settled = link.is_up() && link.connection.is_settled(self.ctx.now);
        let fallbacks = &mut self.ctx.registry.fallbacks;
        fallbacks.note_replicas(part, replicas, is_settled);
        self.ctx.measure_limits();
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
        let transition = self.follow_breaker(id.part, failed, (Cause::of(failure), why));
        if transition == Transition::StaysOpen {
            self.each_queue(Some(id.part), |queue, ctx| queue.releases.forget(ctx.now));
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
                let answered = |breaker: &mut Breaker, now, _: &mut _| breaker.answered(work, now);
                self.follow_breaker(part, answered, (Cause::Outage, ""));
            }
        }
    }

    /// Ends the trouble of a store that has worked for long enough.
    pub(super) fn end_trouble(&mut self) {
        for part in self.ctx.settings.parts.all() {
            let ends_at = self.links[part].breaker.ends_at();
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
        let breaker = &mut self.links[part].breaker;
        let was_up = breaker.is_well();
        let change = step(breaker, self.ctx.now, &mut self.ctx.rng);
        let (availability, is_up) = (breaker.availability(), breaker.is_well());
        let registry = &mut self.ctx.registry;
        registry.set_availability(part, availability, self.ctx.now);
        let refused = availability == Availability::Refused;
        let state = match change {
            Transition::Opened { is_news: true } => Some(StoreState::Down { was_up, refused }),
            _ => (is_up && !was_up).then_some(StoreState::Up),
        };
        self.ctx.effects.push(state.map(Effect::MeasureStore));
        match change {
            Transition::Opened { .. } => {
                self.leave_store(part);
                // The time of a fallback begins.
                self.ctx.measure_limits();
                self.ctx.log_trouble(part, cause, why);
            }
            Transition::StaysOpen => self.ctx.log_trouble(part, cause, why),
            Transition::Closed { is_news } => {
                // Replicas that are back early would be granted the slots that the others have released, before these
                // others record the permits of their fallbacks. Only a newcomer shows whether a store has memory again.
                if !self.links[part].breaker.is_full() {
                    self.ctx.returns.begin_after_outage(part, self.ctx.now);
                }
                self.each_queue(Some(part), |queue, ctx| queue.rejoin_store(ctx));
                self.ctx.measure_limits();
                if is_news {
                    self.ctx.log_end_of_trouble(part);
                }
            }
            Transition::Recovered => self.ctx.log_end_of_trouble(part),
            Transition::None => {}
        }
        change
    }

    fn leave_store(&mut self, part: Part) {
        self.links[part].refunds.clear();
        self.ctx.end_confirmations(Some(part));
        // Requests in flight go on once their exchange is over, or when their time to ask is up.
        let is_here = |request: &Request| {
            let is_sent = matches!(request.stage(), Stage::ClaimSent(_) | Stage::ByQueue);
            !is_sent && request.part(&self.queues, &self.ctx) == part
        };
        for id in self.requests.those(is_here) {
            self.requests.stop_asking(id);
        }
        // In a cluster no request has one.
        (self.requests.each()).for_each(|request| request.ticket = None);
        let availability = self.ctx.availability(part);
        (self.accounting).report_all_here(part, &mut self.ctx, &mut self.links);
        self.each_queue(Some(part), |queue, ctx| {
            queue.leave_store(ctx, availability)
        });
        for id in self.links[part].unsent.take_all() {
            self.reopen(id);
        }
    }

    /// A new connection, perhaps to a server with another clock, or without our data. Wake-ups may be lost.
    fn on_connected(&mut self, part: Part) {
        let now = self.ctx.now;
        let link = &mut self.links[part];
        link.connection.made(now);
        link.breaker.connected();
        link.window.on_connected();
        if link.is_up() {
            let why = Doubt::OfStore;
            self.each_queue(Some(part), |queue, ctx| queue.introduce(ctx, why));
        }
    }

    /// No part of the store has a connection.
    pub fn leave_connections(&mut self) {
        for link in self.links.iter_mut() {
            let connection = link.connection.ended(self.exchanges);
            connection.reconnect_in(Duration::ZERO, self.ctx.now);
        }
    }
}

/// Answers of the store: unusable ledgers, and claims.
impl Core {
    /// The ledger of a batch cannot be used. Returns an error that means that the store is down.
    pub(super) fn batch_unusable(
        &mut self,
        part: Part,
        batch: &Batch,
        pending: &mut PendingBatch,
        error: &LedgerError,
    ) -> Option<StoreError> {
        let queue = self.queues.without_listing(pending.queue);
        let limit = queue.terms().limit().clone();
        pending.failed = true;
        queue.unanswered(&mut self.ctx, batch, pending, 0, error.availability());
        if error.is_lost() {
            self.links[part].ask_generation();
            return None;
        }
        let error = StoreError::from(error);
        (self.complaints).report(&limit, &batch.key, &error, &mut self.ctx);
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
        let (part, mut outage) = (id.part, None);
        let before = self.links[part].refunds.len();
        for ((&asker, claim), result) in askers.iter().zip(&exchange.claims).zip(answers) {
            let request = asker.request();
            let sent = SentClaim {
                part,
                asker,
                request: request.filter(|request| self.requests.is_sent_in(*request, id)),
                claim,
                pending,
            };
            let known = self.links[part].refunds.len();
            match result {
                Ok(answer) => self.claim_answered(&sent, &answer, at),
                Err(error) => outage = outage.or(self.claim_unusable(&sent, &error, at)),
            }
            // Newest claim first: a rate with a small burst can only undo its latest reserved start.
            let refunds = &mut self.links[part].refunds;
            let new = refunds.len() - known;
            refunds[before..].rotate_right(new);
        }
        outage
    }

    fn claim_answered(&mut self, sent: &SentClaim<'_>, answer: &ClaimReply, at: StoreMoment) {
        let asks = sent.claim.asks.iter().zip(&answer.standings);
        for (ask, standing) in asks {
            let pending = &sent.pending[ask.batch];
            let queue = self.queues.without_listing(pending.queue);
            queue.acquired(&mut self.ctx, pending, ask.seq, *standing, at);
        }
        if let Asker::Account(id) = sent.asker {
            let outcome = ReportOutcome::of(&answer.charged);
            return (self.accounting).on_report(id, outcome, &mut self.ctx, &mut self.links);
        }
        if let Some(id) = sent.request {
            self.requests.stop_asking(id);
            if let Some(request) = self.requests.get_mut(id) {
                request.ticket = request.ticket.or(answer.ticket());
                let next = request.next(&self.queues, &self.ctx);
                self.charged(id, next, &answer.charged, at.store_us, Paid::InStore);
            }
            return;
        }
        // It has gone on without this answer.
        let charges = sent.claim.charges.iter().zip(&answer.charged);
        let refunds = charges.filter_map(|(charge, charged)| match *charged {
            Charged::Until { tat: charged, .. } => {
                let (key, cost) = (charge.key.clone(), charge.cost);
                Some(Refund { key, cost, charged })
            }
            _ => None,
        });
        self.links[sent.part].refunds.extend(refunds);
    }

    /// A ledger or a rate of the claim cannot be used. Returns an error that means that the store is down.
    fn claim_unusable(
        &mut self,
        sent: &SentClaim<'_>,
        error: &LedgerError,
        at: StoreMoment,
    ) -> Option<StoreError> {
        let availability = error.availability();
        let failed = |ask: &ClaimAsk| sent.pending[ask.batch].failed;
        // Otherwise a part of the claim may have been written.
        let has_not_run = sent.claim.asks.iter().any(failed);
        let is_own = sent.claim.charges.is_empty() && !has_not_run;
        let (is_lost, error) = (error.is_lost(), StoreError::from(error));
        // The faults of ledgers have been reported.
        if let Some((limit, key)) = self.limit_of(sent).filter(|_| !is_lost && !has_not_run) {
            (self.complaints).report(&limit, &key, &error, &mut self.ctx);
        }
        for ask in &sent.claim.asks {
            let pending = &sent.pending[ask.batch];
            let not_after_us = if has_not_run { 0 } else { at.store_us };
            let availability = match (pending.failed, is_own) {
                // The other legs retry if the request continues without this one.
                (false, false) => Availability::Up,
                _ => availability,
            };
            let queue = self.queues.without_listing(pending.queue);
            queue.entry_unanswered(&mut self.ctx, ask.seq, not_after_us, availability);
        }
        if let Asker::Account(id) = sent.asker {
            (self.accounting).on_report(id, ReportOutcome::Refused, &mut self.ctx, &mut self.links);
        } else if let Some(id) = sent.request
            && !has_not_run
            && availability == Availability::Refused
        {
            self.refuse_unpaid(id);
        }
        (error.is_outage() && !is_lost).then_some(error)
    }

    /// The limit and the key of the claim's first charge, or else the limit of its first slot: the error has no key.
    fn limit_of(&self, sent: &SentClaim<'_>) -> Option<(Arc<Limit>, Arc<str>)> {
        let Some(charge) = sent.claim.charges.first() else {
            let queue = sent.pending[sent.claim.asks.first()?.batch].queue;
            return Some((self.queues[queue].terms().limit().clone(), Arc::default()));
        };
        let is_it = |fee: &&Fee| fee.charge.key == charge.key;
        let fee = match sent.asker {
            Asker::Account(id) => self.accounting.accounts.get(id)?.fee(),
            asker => (self.requests.get(asker.request()?)?.fees().iter()).find(is_it)?,
        };
        Some((fee.limit.clone(), charge.key.clone()))
    }
}
