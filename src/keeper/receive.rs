//! What the store says: replies, wake-ups, nothing at all.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core, Ctx,
    breaker::{Availability, Failure, Work},
    clock::StoreClock,
    effects::Report,
    entry::Seen,
    send::InFlight,
    silence::Fate,
    verdict::SentClaim,
};
use crate::{
    ledger::{Charged, Reply, Standing, Wake},
    limit::Limit,
    store::{Event, StoreError},
};

/// A misconfigured ledger is complained of once in this time, however many requests it refuses.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

impl Core {
    /// An exchange was answered.
    pub(crate) fn on_reply(&mut self, number: u64, reply: Reply, now: Instant) {
        self.ctx.now = now;
        let Some(InFlight {
            sent,
            exchange,
            mut notes,
            claims,
            ..
        }) = self.take_in_flight(number)
        else {
            return;
        };
        let answered = self.ctx.history.answered(number, &reply, now);
        self.ctx.record(answered);
        self.asking.append(&mut self.held_back);
        let heard_at = Seen {
            store_us: reply.now_us,
            sent,
        };
        // One that came with the end of its connection tells nothing of the next: that is still to be made.
        if !self.connection.is_wanted {
            self.clock = Some(StoreClock {
                now_us: reply.now_us,
                sent,
            });
        }
        let (mut outage, work) = (None, work_of(&reply));
        for ((note, batch), result) in notes.iter_mut().zip(&exchange.batches).zip(reply.batches) {
            let line = &mut self.lines[note.line];
            line.touch |= reply.more;
            match result {
                Ok(answer) => line.answered(&mut self.ctx, batch, note, answer, heard_at, now),
                Err(error) => {
                    let error = StoreError::from(&error);
                    note.failed = true;
                    let limit = line.limit.clone();
                    self.ctx.complain(&limit, &error, now);
                    line.unanswered(&mut self.ctx, batch, note, 0, Fate::of(&error), now);
                    outage = outage.or(error.is_outage().then_some(error));
                }
            }
        }
        self.unqueue(&exchange, &notes, &reply.claims);
        let mut stale = Vec::new();
        for ((&id, claim), result) in claims.iter().zip(&exchange.claims).zip(reply.claims) {
            let notes = &notes;
            let claim = SentClaim { id, claim, notes };
            match result {
                Ok(answer) => stale.extend(self.claim_answered(&claim, &answer, heard_at, now)),
                Err(error) => {
                    let error = StoreError::from(&error);
                    if let Some(limit) = self.limit_of(&claim) {
                        self.ctx.complain(&limit, &error, now);
                    }
                    self.claim_unusable(&claim, Fate::of(&error));
                    outage = outage.or(error.is_outage().then_some(error));
                }
            }
        }
        for (index, seq) in stale.into_iter().rev() {
            self.lines[index].ask_once_more(&mut self.ctx, seq);
        }
        for note in &notes {
            let line = &mut self.lines[note.line];
            line.in_flight -= 1;
            line.watch(&mut self.ctx, note.nearest_ms, heard_at, now);
            self.settle(note.line);
        }
        match outage {
            Some(error) => self.note_refused_write(&error.message),
            None => self.note_success(work),
        }
        self.reopen_all(&claims);
    }

    /// An exchange has no answer, and it is not known whether it ran.
    pub(crate) fn on_failure(
        &mut self,
        number: u64,
        error: &StoreError,
        timed_out: bool,
        now: Instant,
    ) {
        self.ctx.now = now;
        let Some(flight) = self.take_in_flight(number) else {
            return;
        };
        let failure = match timed_out {
            _ if !error.is_outage() => Failure::Refused,
            true => Failure::TimedOut,
            false => Failure::Cut,
        };
        self.note_failure(failure, flight.sent, &error.message);
        self.leave_unanswered(flight);
    }

    /// The driver is gone that sent it. This says nothing of the store.
    pub(super) fn abandon_exchange(&mut self, number: u64) {
        if let Some(flight) = self.take_in_flight(number) {
            self.leave_unanswered(flight);
        }
    }

    /// What becomes of the requests of an exchange without an answer.
    fn leave_unanswered(&mut self, flight: InFlight) {
        let InFlight {
            number,
            exchange,
            mut notes,
            claims,
            ..
        } = flight;
        let now = self.ctx.now;
        let failed = self.ctx.history.failed(number, now);
        self.ctx.record(failed);
        self.asking.append(&mut self.held_back);
        let fate = match self.breaker.availability() {
            Availability::Up => Fate::Unknown,
            Availability::Refused => Fate::Refused,
            Availability::Down => Fate::Down,
        };
        let not_after_us = exchange.not_after_us;
        for (note, batch) in notes.iter_mut().zip(&exchange.batches) {
            let line = &mut self.lines[note.line];
            line.unanswered(&mut self.ctx, batch, note, not_after_us, fate, now);
        }
        for (&id, claim) in claims.iter().zip(&exchange.claims).rev() {
            let notes = &notes;
            self.claim_failed(&SentClaim { id, claim, notes }, not_after_us, fate);
        }
        for note in &notes {
            self.lines[note.line].in_flight -= 1;
            self.settle(note.line);
        }
        self.reopen_all(&claims);
        if self.store_is_up() {
            self.each_line(|line, ctx| line.call_roll_soon(ctx));
        }
    }

    pub(crate) fn on_event(&mut self, event: &Event, now: Instant) {
        match event {
            Event::Connected => self.on_connected(now),
            Event::Disconnected => self.on_disconnected(now),
            Event::Wake(wake) => self.on_wake(wake, now),
            Event::Missed => self.on_missed(now),
        }
    }

    /// Wake-ups were dropped, of any line: each asks for its waiters by name, and gives back what lies idle, since
    /// another replica may have called it back.
    fn on_missed(&mut self, now: Instant) {
        self.ctx.now = now;
        self.each_line(|line, ctx| {
            line.recalled(ctx, now);
            line.call_roll();
        });
    }

    /// Another replica's exchange has promoted waiters of this one.
    pub(crate) fn on_wake(&mut self, wake: &Wake, now: Instant) {
        self.ctx.now = now;
        // Of another key nothing is recorded: it is only what somebody published.
        let Some(&index) = self.by_ledger.get(wake.key.as_str()) else {
            return;
        };
        let woken = self.ctx.history.woken(wake, now);
        self.ctx.record(woken);
        if wake.seqs.is_empty() {
            self.lines[index].recalled(&mut self.ctx, now);
        }
        for seq in &wake.seqs {
            self.lines[index].woken(&mut self.ctx, *seq, wake, now);
        }
        self.settle(index);
    }

    fn take_in_flight(&mut self, number: u64) -> Option<InFlight> {
        let position = self
            .in_flight
            .iter()
            .position(|flight| flight.number == number)?;
        Some(self.in_flight.swap_remove(position))
    }
}

impl Ctx {
    /// A ledger cannot be used, and its limit refuses all requests. An outage is told of elsewhere.
    fn complain(&mut self, limit: &Arc<Limit>, error: &StoreError, now: Instant) {
        let is_due = |at| now >= at + COMPLAINT_INTERVAL;
        if !error.is_outage() && self.complained.is_none_or(is_due) {
            self.complained = Some(now);
            let (limit, error) = (limit.clone(), error.message.clone());
            self.effects.report(Report::LedgerUnusable { limit, error });
        }
    }
}

/// What an answer shows of the store's ability to work, if nothing in it has failed.
fn work_of(reply: &Reply) -> Work {
    let is_in =
        |standing: &Standing| matches!(standing, Standing::Held { .. } | Standing::Waiting { .. });
    let is_charged = |charged: &Charged| matches!(charged, Charged::Until { .. });
    let batches = reply.batches.iter().flatten();
    let claims = reply.claims.iter().flatten();
    let admitted = batches
        .clone()
        .any(|batch| batch.acquired.iter().any(is_in))
        || claims
            .clone()
            .any(|claim| claim.standings.iter().any(is_in) || claim.charged.iter().any(is_charged));
    match admitted {
        true => Work::Admitted,
        false if reply.batches.is_empty() && reply.claims.is_empty() => Work::None,
        false => Work::Some,
    }
}
