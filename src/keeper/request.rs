//! A request for a permit, as a future.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll, ready},
};

use super::{
    Keepers,
    demand::{Demand, Leg, Taken},
    part::Part,
    step::Step,
};
use crate::{error::AcquireError, status::Quota};

/// A request for a permit; what the public future is made of.
///
/// A single keeper is asked for everything at once. In a cluster each limit has a keeper of its own, and they are asked
/// one after the other, always in the same order. What was taken of the first ones is kept while the next one makes it
/// wait, and given back if that one refuses.
pub(crate) struct Request {
    keepers: Arc<Keepers>,
    step: Step,
    /// The steps after it, from the last to the next.
    rest: Vec<(Part, Leg)>,
    /// What came of those before it.
    taken: Option<Box<(Taken, Vec<Quota>)>>,
    /// Whether to tell how its limits stand.
    tells: bool,
}

/// What a permit is made of.
pub(crate) struct Granted {
    pub(crate) keepers: Arc<Keepers>,
    pub(crate) taken: Taken,
    /// How its limits stand, if it was to tell.
    pub(crate) quotas: Vec<Quota>,
}

impl Request {
    pub(super) fn new(keepers: Arc<Keepers>, demand: Demand) -> Self {
        let (first, rest) = match keepers.only() {
            Some(keeper) => (Step::new(keeper.clone(), demand), Vec::new()),
            None => {
                let mut rest = keepers.in_order(demand);
                (keepers.step(&mut rest).expect("a demand has a leg"), rest)
            }
        };
        Self {
            keepers,
            step: first,
            rest,
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

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        loop {
            let outcome = ready!(self.step.poll(self.tells, cx));
            let before = mem::take(&mut self.taken).map(|before| *before);
            let (taken, quotas) = match (outcome, before) {
                (Ok(now), None) => now,
                (Ok((taken, quotas)), Some(before)) => (
                    before.0.and(taken),
                    before.1.into_iter().chain(quotas).collect(),
                ),
                (Err(error), before) => return Poll::Ready(Err(self.refused(error, before))),
            };
            let Some(next) = self.keepers.step(&mut self.rest) else {
                let keepers = self.keepers.clone();
                return Poll::Ready(Ok(Granted {
                    keepers,
                    taken,
                    quotas,
                }));
            };
            self.step = next;
            self.taken = Some(Box::new((taken, quotas)));
        }
    }

    /// Gives back what was taken before.
    fn refused(
        &self,
        mut error: AcquireError,
        before: Option<(Taken, Vec<Quota>)>,
    ) -> AcquireError {
        if let Some((taken, quotas)) = before {
            error.waited += taken.waited;
            // What it was charged is given back, so only its slots tell more.
            let slots = quotas
                .into_iter()
                .filter(|quota| quota.limit.period().is_none());
            error.quotas.extend(slots);
            self.keepers.give_back(taken);
        }
        error
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(before) = self.taken.take() {
            self.keepers.give_back(before.0);
        }
    }
}
