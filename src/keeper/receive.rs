//! What the store says: replies, wake-ups, nothing at all.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Core, Ctx, clock::StoreClock, entry::Seen, outage::Breaker, send::InFlight, silence::Fate,
    verdict::SentClaim,
};
use crate::{
    ledger::{Reply, Wake},
    store::StoreError,
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
        self.ctx.history.answered(number, &reply, now);
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
        let mut outage = None;
        for ((note, batch), result) in notes.iter_mut().zip(&exchange.batches).zip(reply.batches) {
            let line = &mut self.lines[note.line];
            line.touch |= reply.more;
            match result {
                Ok(answer) => line.answered(&mut self.ctx, batch, note, answer, heard_at, now),
                Err(error) => {
                    let error = StoreError::from(&error);
                    note.failed = true;
                    self.ctx.complain(&error, now);
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
                    self.ctx.complain(&error, now);
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
            Some(error) if self.store_is_up() => self.go_down(false, &error.message, now),
            Some(_) => {}
            None => {
                let worked = !exchange.batches.is_empty() || !exchange.claims.is_empty();
                self.note_success(worked);
            }
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
        self.ctx.history.failed(number, now);
        self.asking.append(&mut self.held_back);
        self.note_failure(sent, timed_out, !error.is_outage(), &error.message, now);
        let fate = match self.breaker {
            Breaker::Up { .. } => Fate::Unknown,
            Breaker::Down { refused: true, .. } => Fate::Refused,
            Breaker::Down { refused: false, .. } => Fate::Down,
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

    /// Another replica's exchange has promoted waiters of this one.
    pub(crate) fn on_wake(&mut self, wake: &Wake, now: Instant) {
        self.ctx.now = now;
        // Of another key nothing is told: it is only what somebody said.
        let Some(&index) = self.by_ledger.get(wake.key.as_str()) else {
            return;
        };
        self.ctx.history.woken(wake, now);
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
    fn complain(&mut self, error: &StoreError, now: Instant) {
        if self
            .complained
            .is_none_or(|at| now >= at + COMPLAINT_INTERVAL)
        {
            self.complained = Some(now);
            tracing::error!(
                error = error.message,
                "a ledger cannot be used: its limit refuses all requests"
            );
        }
    }
}
