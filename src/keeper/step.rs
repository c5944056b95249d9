//! What a request asks of one keeper, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    Core, Shared,
    demand::{Asked, Demand, Taken},
    effects::StoredWaker,
};
use crate::error::AcquireError;

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

/// What came of looking for an answer.
type Looked = Result<Option<Taken>, AcquireError>;

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
        let (looked, is_watched) = match &self.stage {
            Stage::New(_) => (self.ask(tells), false),
            Stage::Asked(asked) => self.look(asked, tells, cx.waker()),
            Stage::Answered => panic!("`Acquire` polled after completion"),
        };
        let looked = match looked {
            Ok(None) if !is_watched => self.watch(tells, cx.waker()),
            looked => looked,
        };
        match looked.transpose() {
            Some(answer) => {
                self.stage = Stage::Answered;
                Poll::Ready(answer)
            }
            None => Poll::Pending,
        }
    }

    /// Asks for the first time. Mostly there is an answer at once, if the ledger is in this process.
    #[inline]
    fn ask(&mut self, tells: bool) -> Looked {
        let Stage::New(demand) = &self.stage else {
            return Ok(None);
        };
        let ((asked, looked), needs_driver) = self.shared.with_need(|core, now| {
            let asked = match core.submit(demand, now) {
                Ok(asked) => asked,
                Err(error) => return (None, Err(noted(core, error))),
            };
            let looked = look(core, &asked, tells, now);
            (Some(asked), looked)
        });
        match (asked, looked) {
            (Some(asked), Ok(None)) => self.stage = Stage::Asked(asked),
            (_, Ok(Some(taken))) if needs_driver => return self.start_driver(Some(taken)),
            (_, looked) => return looked,
        }
        match needs_driver {
            true => self.start_driver(None),
            false => Ok(None),
        }
    }

    /// Tells also whether this task is woken when there is an answer.
    fn look(&self, asked: &Asked, tells: bool, waker: &Waker) -> (Looked, bool) {
        let ((looked, is_watched), needs_driver) = self.shared.with_need(|core, now| {
            let looked = look(core, asked, tells, now);
            (looked, core.is_watched_by(asked, waker))
        });
        match looked {
            Ok(taken) if needs_driver => (self.start_driver(taken), is_watched),
            looked => (looked, is_watched),
        }
    }

    /// Sees to it that this task is woken when there is an answer, unless there is one now.
    fn watch(&self, tells: bool, waker: &Waker) -> Looked {
        let Stage::Asked(asked) = &self.stage else {
            return Ok(None);
        };
        self.shared.watch_driver();
        // Without the lock: to clone a waker runs foreign code.
        let waker = StoredWaker::of(waker);
        self.shared.with(|core, now| {
            let looked = look(core, asked, tells, now);
            match looked {
                Ok(None) => core.watch(asked, waker),
                _ => core.drop_waker(waker),
            }
            looked
        })
    }

    /// Without the driver nobody would see to what was taken or asked for.
    #[cold]
    fn start_driver(&self, taken: Option<Taken>) -> Looked {
        let Err(kind) = self.shared.start_driver() else {
            return Ok(taken);
        };
        match (taken, &self.stage) {
            (Some(taken), _) => self.shared.give_back(taken),
            (None, Stage::Asked(asked)) => self.shared.with(|core, now| core.cancel(asked, now)),
            (None, _) => {}
        }
        self.shared.with(|core, _| {
            let error = core.refusal(self.limit, kind);
            Err(noted(core, error))
        })
    }
}

fn look(core: &mut Core, asked: &Asked, tells: bool, now: Instant) -> Looked {
    // A claim is gone once it is collected.
    let quotas = tells.then(|| core.quotas(asked));
    match core.collect(asked, now).transpose() {
        Ok(taken) => Ok(taken.map(|mut taken| {
            if let Some(quotas) = quotas {
                taken.notes.get_or_insert_default().quotas = quotas;
            }
            taken
        })),
        Err(error) => Err(noted(core, error)),
    }
}

fn noted(core: &mut Core, error: AcquireError) -> AcquireError {
    core.note_refusal(&error);
    error
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Stage::Asked(asked) = &self.stage {
            self.shared.with(|core, now| core.cancel(asked, now));
        }
    }
}
