//! A request for a permit, as a future.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll, ready},
};

use super::{
    Keepers,
    demand::{Demand, Leg, Taken},
    step::Step,
};
use crate::error::AcquireError;
use crate::part::Part;

/// A request for a permit; what the public future is made of.
///
/// A single keeper is asked for everything at once. In a cluster each limit has a keeper of its own, and they are asked
/// one after the other, always in the same order. What was taken of the first ones is kept while the next one makes it
/// wait, and given back if that one refuses. If a slot is lost meanwhile, all slots are asked for again.
pub(crate) struct Request {
    keepers: Arc<Keepers>,
    step: Step,
    /// In a cluster: all that it wants, from the last to the first.
    legs: Vec<(Part, Leg)>,
    /// How many of them are still to be asked for after this step.
    left: usize,
    /// What came of those before it.
    taken: Option<Box<Taken>>,
    /// Whether to tell how its limits stand.
    tells: bool,
}

/// What a permit is made of.
pub(crate) struct Granted {
    pub(crate) keepers: Arc<Keepers>,
    pub(crate) taken: Taken,
}

impl Request {
    pub(super) fn new(keepers: Arc<Keepers>, demand: Demand) -> Self {
        let (first, legs) = match keepers.only() {
            Some(keeper) => (Step::new(keeper.clone(), demand), Vec::new()),
            None => {
                let legs = keepers.in_order(demand);
                let first = legs.last().expect("a demand has a leg");
                (keepers.step(first), legs)
            }
        };
        Self {
            keepers,
            step: first,
            left: legs.len().saturating_sub(1),
            legs,
            taken: None,
            tells: false,
        }
    }

    /// Tells how its limits stand when it is granted.
    pub(crate) fn telling(mut self) -> Self {
        self.tells = true;
        self
    }

    pub(crate) fn place(&self) -> Option<u32> {
        self.step.place()
    }

    #[inline]
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        if self.legs.is_empty() {
            let taken = self.step.poll(self.tells, cx);
            return taken.map_ok(|taken| self.granted(taken));
        }
        self.poll_legs(cx)
    }

    fn poll_legs(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        loop {
            let outcome = ready!(self.step.poll(self.tells, cx));
            let before = mem::take(&mut self.taken).map(|before| *before);
            let taken = match (outcome, before) {
                (Ok(now), None) => now,
                (Ok(now), Some(before)) if before.leases.is_lost() => {
                    self.ask_for_slots_again(before.and(now))
                }
                (Ok(now), Some(before)) => before.and(now),
                (Err(error), before) => return Poll::Ready(Err(self.refused(error, before))),
            };
            let Some(left) = self.left.checked_sub(1) else {
                self.keepers.note_admissions(&self.legs, &taken);
                return Poll::Ready(Ok(self.granted(taken)));
            };
            self.step = self.keepers.step(&self.legs[left]);
            self.left = left;
            self.taken = Some(Box::new(taken));
        }
    }

    fn granted(&self, taken: Taken) -> Granted {
        let keepers = self.keepers.clone();
        Granted { keepers, taken }
    }

    /// A slot was lost while the next one was waited for. All go back, because to wait for one with a later one in hand
    /// could end in a circle. What rates have charged is kept; what was waited is not waited again.
    fn ask_for_slots_again(&mut self, mut taken: Taken) -> Taken {
        self.keepers.untake(&mem::take(&mut taken.leases));
        if let Some(notes) = &mut taken.notes {
            notes.passed.retain(|(limit, _)| limit.period().is_some());
            notes.quotas.retain(|quota| quota.period.is_some());
        }
        // Rates are the first to be asked, so they are at the end.
        self.left = 0;
        for (_, leg) in &mut self.legs {
            if !self.keepers.is_rate(leg.limit) {
                leg.wait = leg.wait.saturating_sub(taken.waited);
                self.left += 1;
            }
        }
        taken
    }

    /// Gives back what was taken before.
    fn refused(&self, mut error: AcquireError, before: Option<Taken>) -> AcquireError {
        if let Some(mut taken) = before {
            error.waited += taken.waited;
            let quotas = taken
                .notes
                .as_mut()
                .map(|notes| mem::take(&mut notes.quotas));
            let slots = quotas
                .into_iter()
                .flatten()
                .filter(|quota| quota.period.is_none());
            error.quotas.extend(slots);
            error.quotas.extend(self.keepers.give_back(taken));
        }
        error
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(before) = self.taken.take() {
            drop(self.keepers.give_back(*before));
        }
    }
}
