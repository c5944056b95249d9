//! A permit's way through the state machine: asked for, collected, released.

use std::{sync::Arc, task::Waker, time::Duration};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Core, Ctx, Lease,
    entry::{Entry, State},
    line::Line,
    outage::Breaker,
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    ledger::Batch,
    status::{Status, Usage},
};

/// How a request came by its permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) waited: Duration,
    /// The place in the line when it was joined; 0 if there was no need to wait.
    pub(super) place: u32,
}

impl Core {
    /// Asks for a permit. The entry is there until [`collect`](Self::collect) or [`release`](Self::release).
    pub(crate) fn submit(
        &mut self,
        limit: usize,
        key: Key,
        wait: Duration,
        now: Instant,
    ) -> Result<Arc<Lease>, AcquireError> {
        self.ctx.now = now;
        if self.closing {
            return Err(self.refusal(limit, AcquireErrorKind::ShutDown));
        }
        let index = self.line(limit, key, now);
        let seq = self.ctx.next_seq();
        let lease = Arc::new(Lease::new(index, seq, self.ctx.epoch));
        let state = State::Asking(None);
        self.ctx.counts.add(state);
        let line = &mut self.lines[index];
        line.entries.insert(
            seq,
            Entry {
                lease: lease.clone(),
                state,
                in_store: false,
                held_since: None,
                open: false,
                not_after_us: 0,
                renewing: false,
                wanted: true,
                taken: false,
                asked: now,
                asking_since: now,
                wait,
                place: 0,
                waker: None,
            },
        );
        match self.breaker {
            _ if line.local.is_some() => line.acquire_here(&mut self.ctx, seq),
            Breaker::Down { refused, .. } => line.decide_without_store(&mut self.ctx, seq, refused),
            Breaker::Up { .. } => line.work.acquire.push_back(seq),
        }
        self.settle(index);
        Ok(lease)
    }

    pub(crate) fn refusal(&self, limit: usize, kind: AcquireErrorKind) -> AcquireError {
        AcquireError::new(kind, self.limits[limit].max())
    }

    /// The answer to a request, once there is one. A refused entry is gone then; a held one stays until it is released.
    pub(crate) fn collect(
        &mut self,
        lease: &Lease,
        waker: &Waker,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        self.ctx.now = now;
        let line = self.lines.get_mut(lease.line)?;
        let held = |entry: &Entry| entry.is_held() && !entry.open;
        if line.entries.get(&lease.seq()).is_some_and(held) && lease.is_over(now) {
            // Nobody came for it in time.
            line.lose(&mut self.ctx, lease.seq());
        }
        let answer = line.answer(&mut self.ctx, lease, waker, now);
        self.settle(lease.line);
        answer
    }

    /// A permit, or a request, is no longer wanted.
    pub(crate) fn release(&mut self, lease: &Lease, now: Instant) {
        self.ctx.now = now;
        lease.return_at(now);
        if let Some(line) = self.lines.get_mut(lease.line) {
            line.give_up(&mut self.ctx, lease.seq());
            self.settle(lease.line);
        }
    }

    /// The place at which a waiting request joined the line.
    pub(crate) fn place(&self, lease: &Lease) -> Option<u32> {
        let line = self.lines.get(lease.line)?;
        let entry = line.entries.get(&lease.seq())?;
        entry.is_waiting().then_some(entry.place)
    }

    /// Asks what all replicas together hold under a key.
    pub(crate) fn inquire(
        &mut self,
        limit: usize,
        key: Key,
        now: Instant,
    ) -> oneshot::Receiver<Usage> {
        let (tell, told) = oneshot::channel();
        let index = self.line(limit, key, now);
        let line = &mut self.lines[index];
        if line.local.is_some() {
            line.run_here(&mut self.ctx, Batch::default());
            // The receiver is right here.
            let _ = tell.send(line.usage());
        } else if matches!(self.breaker, Breaker::Up { .. }) {
            line.work.inquiries.push(tell);
        }
        self.settle(index);
        told
    }

    pub(crate) fn status(&self) -> Status {
        Status {
            held: self.ctx.counts.held,
            waiting: self.ctx.counts.waiting,
            store_up: self.store_is_up(),
        }
    }

    /// Refuses newcomers from now on, and everybody who waits. Returns how many waited.
    pub(crate) fn close(&mut self) -> usize {
        self.closing = true;
        self.each_entry(|line, ctx, seq| {
            let waits = line.entries.get(&seq).is_some_and(|entry| {
                entry.wanted && !entry.taken && !matches!(entry.state, State::Refused(_))
            });
            if waits {
                line.refuse(ctx, seq, AcquireErrorKind::ShutDown);
            }
            waits
        })
    }

    /// Marks what is still held as lost, and releases it. Returns how many that were.
    pub(crate) fn lose_all(&mut self) -> usize {
        self.each_entry(|line, ctx, seq| {
            let held = line
                .entries
                .get(&seq)
                .is_some_and(|entry| entry.wanted && entry.is_held());
            if held {
                line.lose(ctx, seq);
            }
            held
        })
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Whether nothing is left to be told to the store, or to be expected from it.
    pub(crate) fn is_quiet(&self) -> bool {
        self.in_flight.is_empty() && (self.ready.is_empty() || !self.store_is_up())
    }
}

impl Line {
    fn answer(
        &mut self,
        ctx: &mut Ctx,
        lease: &Lease,
        waker: &Waker,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        let entry = self.entries.get_mut(&lease.seq())?;
        let waited = now.saturating_duration_since(entry.asked);
        match entry.state {
            State::Held { .. } if !lease.is_over(now) => {
                entry.taken = true;
                let place = entry.place;
                Some(Ok(Taken { waited, place }))
            }
            State::Refused(kind) => {
                let error = self.error(kind, waited);
                self.give_up(ctx, lease.seq());
                Some(Err(error))
            }
            _ => {
                if !entry.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
                    ctx.old_wakers.extend(entry.waker.replace(waker.clone()));
                }
                None
            }
        }
    }
}
