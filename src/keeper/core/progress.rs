//! How far a request has come, by the states of its legs in their queues, and what it asks for next.
//!
//! A request asks for all slots and charges at once, which the store grants or refuses as a whole. Not so in a cluster,
//! where a script may touch the keys of one hash slot only, so an exchange is about one key: there a request asks for one
//! after the other, in an order that never deadlocks, and holds the earlier ones meanwhile.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    queues::Queues,
    requests::{Request, SlotLeg},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{context::Context, queue::LegState},
    leases::{Fee, Lease, Paid},
    limit::LimitId,
    part::Part,
    status::InLine,
};

/// How far a request has come.
pub(super) enum Progress {
    Complete,
    /// The next leg's turn begins.
    Turn,
    /// The store, or a queue, decides next. Contains the deadline of the wait, if the request waits in a queue.
    Waits(Option<Instant>),
    /// This leg cannot be kept: it was lost, or an earlier one was.
    Stray(Arc<Lease>),
}

/// The next slots and charges of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// All slots and charges that it does not have yet.
    All,
    /// In a cluster: this charge. Charges come first, since nothing is held while the request waits for them.
    Charge(usize),
    /// In a cluster: the slot of this leg. Earlier slots are held meanwhile.
    Slot(usize),
}

impl Next {
    pub fn legs_in(self, request: &Request) -> impl Iterator<Item = &SlotLeg> {
        let legs = request.legs.iter().enumerate();
        let legs = legs.filter(move |(number, _)| match self {
            Self::All => true,
            Self::Charge(_) => false,
            Self::Slot(next) => *number == next,
        });
        legs.map(|(_, leg)| leg)
    }

    /// Its pending charges, with their numbers.
    pub fn fees_in(self, request: &Request) -> impl Iterator<Item = (usize, &Fee)> {
        let fees = request.fees().iter().enumerate();
        fees.filter(move |(number, fee)| {
            let is_next = match self {
                Self::All => true,
                Self::Charge(next) => *number == next,
                Self::Slot(_) => false,
            };
            is_next && fee.paid == Paid::Not
        })
    }
}

impl Request {
    pub fn progress(&self, queues: &Queues, now: Instant) -> Progress {
        let mut is_complete = true;
        for leg in &self.legs {
            match leg.state(queues, now) {
                None => {}
                Some(LegState::Held { over: false, .. }) if is_complete => {}
                Some(LegState::Held { busy: false, .. }) => {
                    return Progress::Stray(leg.lease.clone());
                }
                Some(LegState::Idle) => is_complete = false,
                // An exchange that may enter a stray leg into the store again has to be answered first.
                Some(LegState::Held { .. } | LegState::Waiting(_) | LegState::Asked) => {
                    let waiting = self.waiting_leg(queues, now);
                    return Progress::Waits(waiting.map(|(leg, since)| leg.ends(since)));
                }
            }
        }
        if is_complete {
            Progress::Complete
        } else {
            Progress::Turn
        }
    }

    /// The leg that waits in a queue, and since when.
    pub fn waiting_leg(&self, queues: &Queues, now: Instant) -> Option<(&SlotLeg, Instant)> {
        let mut legs = self.legs.iter();
        legs.find_map(|leg| match leg.state(queues, now) {
            Some(LegState::Waiting(since)) => Some((leg, since)),
            _ => None,
        })
    }

    pub fn next(&self, queues: &Queues, ctx: &Context) -> Next {
        if !ctx.settings.parts.is_cluster() {
            return Next::All;
        }
        let mut fees = self.fees().iter();
        if let Some(number) = fees.position(|fee| fee.paid == Paid::Not) {
            return Next::Charge(number);
        }
        let lacks =
            |leg: &SlotLeg| !matches!(leg.state(queues, ctx.now), Some(LegState::Held { .. }));
        match self.legs.iter().position(lacks) {
            Some(number) => Next::Slot(number),
            None => Next::All,
        }
    }

    /// The part of the store with the next slots and charges.
    #[inline]
    pub fn part(&self, queues: &Queues, ctx: &Context) -> Part {
        if !ctx.settings.parts.is_cluster() {
            return Part::default();
        }
        match self.next(queues, ctx) {
            Next::All => Part::default(),
            Next::Charge(number) => self.fees()[number].part,
            Next::Slot(number) => queues[self.legs[number].lease.queue].terms().part,
        }
    }
}

/// Refusals.
impl Request {
    /// Without a responsible limit. It names the limit being waited for, or else the first.
    pub fn error(&self, kind: AcquireErrorKind, queues: &Queues, ctx: &Context) -> AcquireError {
        let mut legs = self.legs.iter();
        if let Some(leg) = legs.find(|leg| leg.in_line(queues).is_some()) {
            return self.error_at(leg, kind, queues, ctx);
        }
        let first = self.legs.first();
        let first = first.map(|leg| queues[leg.lease.queue].terms().limit_id);
        let first = first.or(self.fees().first().map(Fee::limit_id));
        let limit = ctx.registry.limit(first.unwrap_or(LimitId(0)));
        let mut error = limit.acquire_error(kind);
        error.details.waited = self.waited(ctx.now);
        error
    }

    /// By the limit of this leg.
    pub fn error_at(
        &self,
        SlotLeg { lease, .. }: &SlotLeg,
        kind: AcquireErrorKind,
        queues: &Queues,
        ctx: &Context,
    ) -> AcquireError {
        queues[lease.queue].error(ctx, lease.seq(), kind, self.waited(ctx.now))
    }
}

impl SlotLeg {
    /// Its place in its queue.
    pub fn in_line(&self, queues: &Queues) -> Option<InLine> {
        queues.get(self.lease.queue)?.in_line(self.lease.seq())
    }

    fn state(&self, queues: &Queues, now: Instant) -> Option<LegState> {
        let entry = queues[self.lease.queue].entry(self.lease.seq())?;
        entry.leg_state(now)
    }
}
