//! What a request asks of one keeper, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    Core, Shared,
    demand::{Asked, Demand, Taken},
};
use crate::{error::AcquireError, status::Quota};

/// A demand on one keeper, from the asking to the answer. Dropped before that, it is cancelled.
pub(super) struct Step {
    shared: Arc<Shared>,
    /// The number of its first limit.
    limit: usize,
    /// `None` once it has its answer.
    stage: Option<Stage>,
}

enum Stage {
    New(Demand),
    Asked(Asked),
}

impl Step {
    pub(super) fn new(shared: Arc<Shared>, demand: Demand) -> Self {
        Self {
            shared,
            limit: demand.first_limit(),
            stage: Some(Stage::New(demand)),
        }
    }

    pub(super) fn place(&self) -> Option<u32> {
        match &self.stage {
            Some(Stage::Asked(asked)) => self.shared.with(|core, _| core.place(asked)),
            _ => None,
        }
    }

    /// What it took, and, if it `tells`, how its limits stand.
    #[inline]
    pub(super) fn poll(
        &mut self,
        tells: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Taken, Vec<Quota>), AcquireError>> {
        let shared = &self.shared;
        let Some(stage) = self.stage.take() else {
            panic!("`Acquire` polled after completion");
        };
        let (asked, needs_driver) = shared.with_need(|core, now| {
            let asked = match stage {
                Stage::New(demand) => core
                    .submit(demand, now)
                    .inspect_err(|error| core.note_refusal(error))?,
                Stage::Asked(asked) => asked,
            };
            // A claim is gone once it is collected.
            let quotas = if tells {
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
        if needs_driver && let Err(kind) = shared.start_driver() {
            match answer {
                Some(Ok(taken)) => shared.give_back(taken),
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
            Some(answer) => Poll::Ready(answer.map(|taken| (taken, quotas))),
            None => {
                self.stage = Some(Stage::Asked(asked));
                Poll::Pending
            }
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(Stage::Asked(asked)) = &self.stage {
            self.shared.with(|core, now| core.cancel(asked, now));
        }
    }
}
