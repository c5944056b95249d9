//! A permit's way through the state machine: asked for, collected, released.

use std::{slice, sync::Arc, task::Waker, time::Duration};

use tokio::time::Instant;

use super::{
    Core, Ctx, Lease,
    demand::{Asked, Demand, Leases, Leg, Notes, Taken},
    effects::{Effect, Inquiry, StoredWaker},
    entry::{Entry, State},
    line::Line,
    tenure::Tenure,
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    ledger::One,
    status::{Quota, Status},
    telemetry::Measure,
};

impl Core {
    /// Asks for a permit. The request is there until [`collect`](Self::collect) has an answer, or
    /// [`cancel`](Self::cancel).
    pub(crate) fn submit(&mut self, demand: &Demand, now: Instant) -> Result<Asked, AcquireError> {
        self.ctx.now = now;
        if self.ctx.ending {
            return Err(self.refusal(demand.first_limit(), AcquireErrorKind::ShutDown));
        }
        match demand {
            Demand::One(leg) if self.limits[leg.limit].is_plain() => {
                Ok(Asked::Slot(self.submit_slot(leg, now)))
            }
            Demand::One(leg) => {
                let legs = slice::from_ref(leg);
                Ok(Asked::Claim(self.submit_claim(legs, now)))
            }
            Demand::All(legs) => Ok(Asked::Claim(self.submit_claim(legs, now))),
        }
    }

    fn submit_slot(&mut self, leg: &Leg, now: Instant) -> Arc<Lease> {
        let index = self.line(leg.limit, &leg.key, now);
        self.lines[index].set_own_max(&mut self.ctx, leg.max);
        if let Some(lease) = self.take_kept(index) {
            self.settle(index);
            return lease;
        }
        // For a key that has no slots at all it would wait for nothing.
        let wait = if leg.max == Some(0) {
            Duration::ZERO
        } else {
            leg.wait
        };
        let lease = self.enter(index, wait, now, |entry| entry.state = State::Asking(None));
        let (line, seq) = (&mut self.lines[index], lease.seq());
        match self.ctx.down {
            _ if line.local.is_some() => line.acquire_here(&mut self.ctx, seq),
            Some(refused) => line.decide_without_store(&mut self.ctx, seq, refused),
            None => line.work.get_or_insert_default().acquire.push_back(seq),
        }
        self.settle(index);
        lease
    }

    /// Makes an entry in a line.
    pub(super) fn enter(
        &mut self,
        line: usize,
        wait: Duration,
        now: Instant,
        prepare: impl FnOnce(&mut Entry),
    ) -> Arc<Lease> {
        let seq = self.ctx.next_seq();
        let pool = self.lines[line].pool.clone();
        let (keeper, epoch) = (self.ctx.keeper(), self.ctx.epoch);
        let lease = Arc::new(Lease::new(keeper, line, seq, epoch, pool));
        let mut entry = Entry::new(lease.clone(), wait, now);
        prepare(&mut entry);
        self.ctx.count(self.lines[line].key.0, entry.state);
        self.lines[line].entries.insert(seq, entry);
        lease
    }

    pub(crate) fn refusal(&self, limit: usize, kind: AcquireErrorKind) -> AcquireError {
        self.limits[limit].acquire_error(kind)
    }

    /// A request gets this for an answer.
    pub(crate) fn note_refusal(&mut self, error: &AcquireError) {
        if let Some(number) = self.number_of(error.limit_name()) {
            self.ctx.measure(number, Measure::Refused(error.kind()));
        }
    }

    /// The answer to a request, once there is one. A refused one is gone then; a granted one is for the permit to
    /// release.
    pub(crate) fn collect(
        &mut self,
        asked: &Asked,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        self.ctx.now = now;
        match asked {
            Asked::Slot(lease) => self.collect_slot(lease, now),
            Asked::Claim(id) => self.collect_claim(*id, now),
        }
    }

    /// Whether this task is woken when a request has an answer.
    pub(crate) fn is_watched_by(&self, asked: &Asked, waker: &Waker) -> bool {
        let stored = match asked {
            Asked::Slot(lease) => self.entry(lease).and_then(|entry| entry.waker.as_ref()),
            Asked::Claim(id) => self.claims.get(id).and_then(|claim| claim.waker.as_ref()),
        };
        stored.is_some_and(|stored| stored.will_wake(waker))
    }

    /// This task is to be woken then, in place of another one.
    pub(crate) fn watch(&mut self, asked: &Asked, waker: StoredWaker) {
        let watched = match asked {
            Asked::Slot(lease) => {
                let line = self.lines.get_mut(lease.line);
                let entry = line.and_then(|line| line.entries.get_mut(&lease.seq()));
                entry.map(|entry| &mut entry.waker)
            }
            Asked::Claim(id) => self.claims.get_mut(id).map(|claim| &mut claim.waker),
        };
        let old = match watched {
            Some(watched) => watched.replace(waker),
            None => Some(waker),
        };
        self.ctx.effects.drop_waker(old);
    }

    pub(crate) fn drop_waker(&mut self, waker: StoredWaker) {
        self.ctx.effects.drop_waker(Some(waker));
    }

    pub(super) fn entry(&self, lease: &Lease) -> Option<&Entry> {
        self.lines.get(lease.line)?.entries.get(&lease.seq())
    }

    /// How the limits of a request stand.
    pub(crate) fn quotas(&self, asked: &Asked) -> Vec<Quota> {
        match asked {
            Asked::Slot(lease) => {
                let line = self.lines.get(lease.line);
                line.and_then(|line| line.quota(&self.ctx))
                    .into_iter()
                    .collect()
            }
            Asked::Claim(id) => self
                .claims
                .get(id)
                .map_or_else(Vec::new, |claim| self.quotas_of(claim)),
        }
    }

    /// A request is no longer wanted.
    pub(crate) fn cancel(&mut self, asked: &Asked, now: Instant) {
        self.ctx.now = now;
        match asked {
            Asked::Slot(lease) => self.release(lease, now),
            Asked::Claim(id) => self.drop_claim(*id),
        }
    }

    fn collect_slot(
        &mut self,
        lease: &Arc<Lease>,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        let line = self.lines.get_mut(lease.line)?;
        let taken = line.take(&mut self.ctx, lease, now);
        if taken.is_some() {
            // Nothing that the line is listed by has changed.
            return taken.map(Ok);
        }
        let held = |entry: &Entry| entry.is_held() && !entry.open;
        if line.entries.get(&lease.seq()).is_some_and(held) {
            // Nobody came for it in time.
            line.lose(&mut self.ctx, lease.seq());
        }
        let answer = match line.take(&mut self.ctx, lease, now) {
            Some(taken) => Some(Ok(taken)),
            None => line.answer(&mut self.ctx, lease, now),
        };
        self.settle(lease.line);
        answer
    }

    /// A slot is no longer wanted.
    pub(crate) fn release(&mut self, lease: &Arc<Lease>, now: Instant) {
        self.ctx.now = now;
        self.bounded.forget(lease.seq());
        if self.keep(lease) {
            return;
        }
        lease.return_at(now);
        if let Some(line) = self.lines.get_mut(lease.line) {
            line.give_up(&mut self.ctx, lease.seq());
            self.settle(lease.line);
        }
    }

    /// A slot is no longer wanted that was held with others. In a cluster it was alone when it was taken.
    pub(crate) fn part(&mut self, lease: &Arc<Lease>, now: Instant) {
        let line = self.lines.get_mut(lease.line);
        if let Some(entry) = line.and_then(|line| line.entries.get_mut(&lease.seq())) {
            entry.alone = false;
        }
        self.release(lease, now);
    }

    /// A slot is not used after all: nothing is learned from it of how long slots are held.
    pub(crate) fn untake(&mut self, lease: &Arc<Lease>, now: Instant) {
        let line = self.lines.get_mut(lease.line);
        if let Some(entry) = line.and_then(|line| line.entries.get_mut(&lease.seq())) {
            entry.taken = false;
        }
        self.release(lease, now);
    }

    /// The place at which a waiting request joined the line.
    pub(crate) fn place(&self, asked: &Asked) -> Option<u32> {
        match asked {
            Asked::Slot(lease) => self.place_of(lease),
            Asked::Claim(id) => self.place_of_claim(*id),
        }
    }

    pub(super) fn place_of(&self, lease: &Lease) -> Option<u32> {
        let entry = self.entry(lease)?;
        entry.is_waiting().then_some(entry.place)
    }

    /// Asks what all replicas together hold under a key.
    pub(crate) fn inquire(&mut self, limit: usize, key: &Key, inquiry: Inquiry, now: Instant) {
        self.ctx.now = now;
        let index = self.line(limit, key, now);
        let line = &mut self.lines[index];
        if line.local.is_some() {
            line.run_here(&mut self.ctx, One::Nothing);
            let answer = Effect::Answer(inquiry, line.usage());
            self.ctx.effects.push(answer);
        } else if self.store_is_up() {
            let work = self.lines[index].work.get_or_insert_default();
            work.inquiries.push(inquiry);
        } else {
            self.ctx.effects.push(Effect::Dismiss(inquiry));
        }
        self.settle(index);
    }

    pub(crate) fn status(&self) -> Status {
        Status {
            // One that was lost while it lay idle is noticed there later.
            held: self.ctx.counts.held.saturating_sub(self.idle()),
            waiting: self.ctx.counts.waiting + self.sleepers.len(),
            store_up: self.breaker.is_well(),
        }
    }

    /// Refuses newcomers from now on, and everybody who waits. Returns how many waited.
    pub(crate) fn close(&mut self, now: Instant) -> usize {
        (self.ctx.now, self.ctx.ending) = (now, true);
        self.recall_all();
        let claims = self.refuse_claims(AcquireErrorKind::ShutDown);
        claims
            + self.each_entry(|line, ctx, seq| {
                let waits = line.entries.get(&seq).is_some_and(|entry| {
                    entry.wanted && !entry.taken && entry.claim.is_none() && !entry.is_decided()
                });
                if waits {
                    line.refuse(ctx, seq, AcquireErrorKind::ShutDown);
                }
                waits
            })
    }

    /// Marks what is still held as lost, and releases it. Returns how many that were.
    pub(crate) fn lose_all(&mut self, now: Instant) -> usize {
        self.ctx.now = now;
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

    pub(crate) fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.ctx.ending
    }

    /// Whether nothing is left to be told to the store, or to be expected from it.
    pub(crate) fn is_quiet(&self) -> bool {
        let nothing_to_say =
            self.ready.is_empty() && self.asking.is_empty() && self.refunds.is_empty();
        self.in_flight.is_empty() && (nothing_to_say || !self.store_is_up())
    }
}

impl Line {
    /// A slot that is held is the request's now.
    fn take(&mut self, ctx: &mut Ctx, lease: &Arc<Lease>, now: Instant) -> Option<Taken> {
        let seq = lease.seq();
        let entry = self.entries.get_mut(&seq)?;
        if !entry.is_held() || lease.is_over(now) {
            return None;
        }
        entry.taken = true;
        let waited = now.saturating_duration_since(entry.asked);
        if !std::mem::replace(&mut entry.alone, true) {
            ctx.record(ctx.history.taken(&self.ledger, seq, now));
            lease.begin_tenure(now);
            lease.set_reusable(entry.in_store || !ctx.shared);
        }
        ctx.note_admission(self.key.0, waited);
        Some(Taken {
            leases: Leases::One(Tenure::of(lease.clone())),
            waited,
            place: entry.place,
            notes: None,
        })
    }

    /// What becomes of a request that has no slot.
    fn answer(
        &mut self,
        ctx: &mut Ctx,
        lease: &Arc<Lease>,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        let entry = self.entries.get_mut(&lease.seq())?;
        let (waited, place) = (now.saturating_duration_since(entry.asked), entry.place);
        match entry.state {
            State::Refused(kind) => {
                let error = self.error(ctx, kind, place, waited);
                self.give_up(ctx, lease.seq());
                Some(Err(error))
            }
            State::Passed(kind) => {
                ctx.note_pass(self.key.0, kind);
                self.give_up(ctx, lease.seq());
                let notes = Notes {
                    passed: vec![(self.limit.clone(), kind)],
                    ..Notes::default()
                };
                Some(Ok(Taken {
                    leases: Leases::default(),
                    waited,
                    place,
                    notes: Some(Box::new(notes)),
                }))
            }
            _ => None,
        }
    }
}
