//! What the store says: replies, wake-ups, nothing at all.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Core, Ctx, clock::StoreClock, entry::Seen, outage::Breaker, send::InFlight, silence::Fate,
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
            notes,
            ..
        }) = self.take_in_flight(number)
        else {
            return;
        };
        let heard_at = Seen {
            store_us: reply.now_us,
            sent,
        };
        self.clock = Some(StoreClock {
            now_us: reply.now_us,
            sent,
        });
        let mut outage = None;
        for ((note, batch), result) in notes.into_iter().zip(&exchange.batches).zip(reply.batches) {
            let index = note.line;
            let line = &mut self.lines[index];
            line.in_flight -= 1;
            line.work.touch |= reply.more;
            match result {
                Ok(answer) => line.answered(&mut self.ctx, batch, note, answer, heard_at, now),
                Err(error) => {
                    let error = StoreError::from(&error);
                    let fate = if error.is_outage() {
                        Fate::Down
                    } else {
                        Fate::Refused
                    };
                    self.ctx.complain(&error, now);
                    line.unanswered(&mut self.ctx, batch, note, 0, fate, now);
                    outage = outage.or(error.is_outage().then_some(error));
                }
            }
            self.settle(index);
        }
        match outage {
            Some(error) if self.store_is_up() => self.go_down(false, &error.message, now),
            Some(_) => {}
            None => self.note_success(!exchange.batches.is_empty()),
        }
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
            notes,
            ..
        }) = self.take_in_flight(number)
        else {
            return;
        };
        self.note_failure(sent, timed_out, !error.is_outage(), &error.message, now);
        let fate = match self.breaker {
            Breaker::Up { .. } => Fate::Unknown,
            Breaker::Down { refused: true, .. } => Fate::Refused,
            Breaker::Down { refused: false, .. } => Fate::Down,
        };
        for (note, batch) in notes.into_iter().zip(&exchange.batches) {
            let index = note.line;
            let line = &mut self.lines[index];
            line.in_flight -= 1;
            line.unanswered(&mut self.ctx, batch, note, exchange.not_after_us, fate, now);
            self.settle(index);
        }
        if self.store_is_up() {
            self.each_line(|line, _| line.call_roll());
        }
    }

    /// There is a new connection, perhaps to a server with another clock, or without our data. Wake-ups may be lost.
    pub(crate) fn on_connected(&mut self) {
        self.clock = None;
        if self.store_is_up() {
            self.each_line(|line, _| line.introduce());
        }
    }

    /// Another replica's exchange has promoted waiters of this one.
    pub(crate) fn on_wake(&mut self, wake: &Wake, now: Instant) {
        self.ctx.now = now;
        let Some(&index) = self.by_ledger.get(wake.key.as_str()) else {
            return;
        };
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
