//! A request for a permit, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    Core, Shared,
    demand::{Asked, Demand, Taken},
};
use crate::{error::AcquireError, status::Quota};

/// A request for a permit; what the public future is made of.
pub(crate) struct Request {
    shared: Arc<Shared>,
    /// The number of its first limit.
    limit: usize,
    /// Whether to tell how its limits stand.
    tells: bool,
    /// `None` once it has its answer.
    stage: Option<Stage>,
}

/// What a permit is made of.
pub(crate) struct Granted {
    pub(crate) shared: Arc<Shared>,
    pub(crate) taken: Taken,
    /// How its limits stand, if it was to tell.
    pub(crate) quotas: Vec<Quota>,
}

enum Stage {
    New(Demand),
    Asked(Asked),
}

impl Request {
    pub(super) fn new(shared: Arc<Shared>, demand: Demand) -> Self {
        let limit = demand.first_limit();
        let stage = Some(Stage::New(demand));
        Self {
            shared,
            limit,
            tells: false,
            stage,
        }
    }

    /// Tells how its limits stand when it is granted.
    pub(crate) fn telling(mut self) -> Self {
        self.tells = true;
        self
    }

    pub(crate) fn place(&self) -> Option<u32> {
        match &self.stage {
            Some(Stage::Asked(asked)) => self.shared.with(|core, _| core.place(asked)),
            _ => None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        let shared = &self.shared;
        let Some(stage) = self.stage.take() else {
            panic!("`Acquire` polled after completion");
        };
        let asked = shared.with(|core, now| {
            let asked = match stage {
                Stage::New(demand) => core
                    .submit(demand, now)
                    .inspect_err(|error| core.note_refusal(error))?,
                Stage::Asked(asked) => asked,
            };
            // A claim is gone once it is collected.
            let quotas = if self.tells {
                core.quotas(&asked)
            } else {
                Vec::new()
            };
            let answer = core.collect(&asked, cx.waker(), now);
            if let Some(Err(error)) = &answer {
                core.note_refusal(error);
            }
            Ok((asked, answer, quotas))
        });
        let (asked, answer, quotas) = asked?;
        if let Err(kind) = shared.start_driver() {
            match answer {
                Some(Ok(taken)) => shared.release(&taken.leases),
                _ => shared.with(|core, now| core.cancel(&asked, now)),
            }
            let refuse = |core: &mut Core, _| {
                let error = core.refusal(self.limit, kind);
                core.note_refusal(&error);
                error
            };
            return Poll::Ready(Err(shared.with(refuse)));
        }
        match answer {
            Some(answer) => Poll::Ready(answer.map(|taken| {
                let shared = shared.clone();
                Granted {
                    shared,
                    taken,
                    quotas,
                }
            })),
            None => {
                self.stage = Some(Stage::Asked(asked));
                Poll::Pending
            }
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(Stage::Asked(asked)) = &self.stage {
            self.shared.with(|core, now| core.cancel(asked, now));
        }
    }
}
