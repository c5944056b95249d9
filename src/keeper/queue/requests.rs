//! A request's way through its queue: submitted, collected; and that of a leg of a claim.

use std::{sync::Arc, time::Duration};

use super::{Entry, Queue, State};
use crate::{
    error::AcquireError,
    keeper::{
        context::{Availability, Context},
        demand::{Notes, Taken},
        effects::{Effect, Inquiry},
    },
    leases::{Lease, Leases, Tenure},
    ledger::{One, Seq},
};

impl Queue {
    /// Asks for a slot: of the store, or of the ledger in this process.
    pub(in crate::keeper) fn submit(&mut self, ctx: &mut Context, wait: Duration) -> Arc<Lease> {
        let lease = self.enter(ctx, wait, |entry| entry.state = State::Asking(None));
        let seq = lease.seq();
        match ctx.availability {
            _ if self.local.is_some() => self.acquire_here(ctx, seq),
            Availability::Up => self.outbox().acquire.push_back(seq),
            down => self.fall_back(ctx, seq, down),
        }
        lease
    }

    /// Makes an entry for a leg of a claim. It is parked until it is its turn.
    pub(in crate::keeper) fn submit_leg(
        &mut self,
        ctx: &mut Context,
        wait: Duration,
        claim: u64,
        shadow: bool,
    ) -> Arc<Lease> {
        self.enter(ctx, wait, |entry| {
            (entry.claim, entry.shadow) = (Some(claim), shadow);
        })
    }

    /// Asks for the slot of a leg whose turn it is, while the store does not decide.
    pub(in crate::keeper) fn begin_leg(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.begin(ctx.now);
        self.set(ctx, seq, State::Asking(None));
        match ctx.availability {
            Availability::Up => self.acquire_here(ctx, seq),
            _ if self.local.is_some() => self.acquire_here(ctx, seq),
            down => self.fall_back(ctx, seq, down),
        }
    }

    /// The answer to a request for a single slot, once there is one. A refused one is gone then; a granted one is for the
    /// permit to release.
    pub(in crate::keeper) fn collect(
        &mut self,
        ctx: &mut Context,
        lease: &Arc<Lease>,
    ) -> Option<Result<Taken, AcquireError>> {
        let seq = lease.seq();
        let held = |entry: &Entry| entry.is_held() && !entry.open;
        if self.entries.get(&seq).is_some_and(held) {
            // Nobody came for it in time.
            self.lose(ctx, seq);
        }
        match self.take(ctx, lease) {
            Some(taken) => Some(Ok(taken)),
            None => self.answer(ctx, lease),
        }
    }

    /// Gives a slot that is held to its request.
    pub(in crate::keeper) fn take(
        &mut self,
        ctx: &mut Context,
        lease: &Arc<Lease>,
    ) -> Option<Taken> {
        let seq = lease.seq();
        let entry = self.entries.get_mut(&seq)?;
        if !entry.is_held() || lease.is_over(ctx.now) {
            return None;
        }
        entry.taken = true;
        let waited = ctx.now.saturating_duration_since(entry.asked);
        if !std::mem::replace(&mut entry.alone, true) {
            ctx.record(|history, now| history.taken(&self.ledger, seq, now));
            lease.begin_tenure(ctx.now);
            lease.set_reusable(entry.in_store || !ctx.shared);
        }
        ctx.note_admission(self.number, waited);
        Some(Taken {
            leases: Leases::One(Tenure::of(lease.clone())),
            waited,
            place: entry.place,
            notes: None,
        })
    }

    /// Gives a slot to a claim, as one of several. Returns the place at which it had joined the queue.
    pub(in crate::keeper) fn take_as_leg(&mut self, ctx: &mut Context, lease: &Arc<Lease>) -> u32 {
        let seq = lease.seq();
        let Some(entry) = self.entries.get_mut(&seq) else {
            return 0;
        };
        (entry.taken, entry.claim) = (true, None);
        lease.begin_tenure(ctx.now);
        ctx.record(|history, now| history.taken(&self.ledger, seq, now));
        entry.place
    }

    /// The answer to a request that has no slot.
    fn answer(
        &mut self,
        ctx: &mut Context,
        lease: &Arc<Lease>,
    ) -> Option<Result<Taken, AcquireError>> {
        let seq = lease.seq();
        let entry = self.entries.get_mut(&seq)?;
        let (waited, place) = (ctx.now.saturating_duration_since(entry.asked), entry.place);
        match entry.state {
            State::Refused(kind) => {
                let error = self.error(ctx, kind, place, waited);
                self.give_up(ctx, seq);
                Some(Err(error))
            }
            State::Passed(kind) => {
                ctx.note_pass(self.number, kind);
                self.give_up(ctx, seq);
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

    /// A permit has this slot beside another one, which counts for it.
    pub(in crate::keeper) fn set_companion(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && !std::mem::replace(&mut entry.companion, true)
        {
            ctx.counts.companions += 1;
        }
    }

    /// A permit with several slots releases this one on its own, so it does not go to the pool.
    pub(in crate::keeper) fn set_apart(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.alone = false;
        }
    }

    /// Answers how the ledger stands, if it is in this process; else the store is asked, if it is up.
    pub(in crate::keeper) fn inquire(&mut self, ctx: &mut Context, inquiry: Inquiry) {
        if self.local.is_some() {
            self.run_here(ctx, One::Nothing);
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        } else if ctx.availability == Availability::Up {
            self.push_inquiry(inquiry);
        } else {
            ctx.effects.push(Effect::Dismiss(inquiry));
        }
    }
}
