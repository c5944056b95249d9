//! What a request asks of one keeper, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    Core, Shared,
    demand::{Asked, Demand, Taken},
};
use crate::error::{AcquireError, AcquireErrorKind};

/// A demand on one keeper, from the asking to the answer. Dropped before that, it is cancelled.
pub(super) struct Step {
    shared: Arc<Shared>,
    /// The number of its first limit.
    limit: usize,
    stage: Stage,
}

enum Stage {
    New(Demand),
    Asked(Asked),
    Answered,
}

enum Outcome {
    Taken(Taken),
    Asked(Asked),
}

impl Step {
    pub(super) fn new(shared: Arc<Shared>, demand: Demand) -> Self {
        Self {
            shared,
            limit: demand.first_limit(),
            stage: Stage::New(demand),
        }
    }

    pub(super) fn place(&self) -> Option<u32> {
        match &self.stage {
            Stage::Asked(asked) => self.shared.with(|core, _| core.place(asked)),
            _ => None,
        }
    }

    /// What it took; and, if it `tells`, how its limits stand.
    #[inline]
    pub(super) fn poll(
        &mut self,
        tells: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Taken, AcquireError>> {
        let (shared, stage) = (&self.shared, &self.stage);
        let (outcome, needs_driver) = shared.with_need(|core, now| {
            let outcome = stage.step(core, tells, cx.waker(), now);
            outcome.inspect_err(|error| core.note_refusal(error))
        });
        let outcome = match needs_driver.then(|| shared.start_driver()) {
            Some(Err(kind)) => outcome.and_then(|outcome| Err(self.undo(outcome, kind))),
            _ => outcome,
        };
        self.stage = Stage::Answered;
        match outcome {
            Ok(Outcome::Taken(taken)) => Poll::Ready(Ok(taken)),
            Ok(Outcome::Asked(asked)) => {
                self.stage = Stage::Asked(asked);
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Nobody would see to it.
    #[cold]
    fn undo(&self, outcome: Outcome, kind: AcquireErrorKind) -> AcquireError {
        match outcome {
            Outcome::Taken(taken) => self.shared.give_back(taken),
            Outcome::Asked(asked) => self.shared.with(|core, now| core.cancel(&asked, now)),
        }
        self.shared.with(|core, _| {
            let error = core.refusal(self.limit, kind);
            core.note_refusal(&error);
            error
        })
    }
}

impl Stage {
    fn step(
        &self,
        core: &mut Core,
        tells: bool,
        waker: &Waker,
        now: Instant,
    ) -> Result<Outcome, AcquireError> {
        let asked = match self {
            Self::New(demand) => core.submit(demand, now)?,
            Self::Asked(asked) => asked.clone(),
            Self::Answered => panic!("`Acquire` polled after completion"),
        };
        // A claim is gone once it is collected.
        let quotas = tells.then(|| core.quotas(&asked));
        match core.collect(&asked, waker, now).transpose()? {
            Some(mut taken) => {
                if let Some(quotas) = quotas {
                    taken.notes.get_or_insert_default().quotas = quotas;
                }
                Ok(Outcome::Taken(taken))
            }
            None => Ok(Outcome::Asked(asked)),
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Stage::Asked(asked) = &self.stage {
            self.shared.with(|core, now| core.cancel(asked, now));
        }
    }
}
