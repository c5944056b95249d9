//! A request for a permit, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use super::{Lease, Shared, turn::Taken};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
};

/// A request for a permit; what the public future is made of.
pub(crate) struct Request {
    shared: Arc<Shared>,
    limit: usize,
    stage: Stage,
}

/// What a permit is made of.
pub(crate) struct Granted {
    pub(crate) shared: Arc<Shared>,
    pub(crate) lease: Arc<Lease>,
    pub(crate) waited: Duration,
    pub(crate) place: u32,
}

enum Stage {
    New { key: Key, wait: Duration },
    Asked(Arc<Lease>),
    Done,
}

impl Request {
    pub(super) fn new(shared: Arc<Shared>, limit: usize, key: Key, wait: Duration) -> Self {
        Self {
            shared,
            limit,
            stage: Stage::New { key, wait },
        }
    }

    pub(crate) fn place(&self) -> Option<u32> {
        match &self.stage {
            Stage::Asked(lease) => self.shared.with(|core, _| core.place(lease)),
            _ => None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        let (shared, limit) = (&self.shared, self.limit);
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        assert!(
            !matches!(stage, Stage::Done),
            "`Acquire` polled after completion"
        );
        let asked = shared.with(|core, now| {
            let lease = match stage {
                Stage::New { key, wait } => core.submit(limit, key, wait, now)?,
                Stage::Asked(lease) => lease,
                Stage::Done => return Err(core.refusal(limit, AcquireErrorKind::ShutDown)),
            };
            let answer = core.collect(&lease, cx.waker(), now);
            Ok((lease, answer))
        });
        let (lease, answer) = asked?;
        if let Err(kind) = shared.start_driver() {
            shared.release(&lease);
            return Poll::Ready(Err(shared.with(|core, _| core.refusal(limit, kind))));
        }
        match answer {
            Some(answer) => Poll::Ready(answer.map(|Taken { waited, place }| {
                let shared = shared.clone();
                Granted {
                    shared,
                    lease,
                    waited,
                    place,
                }
            })),
            None => {
                self.stage = Stage::Asked(lease);
                Poll::Pending
            }
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Stage::Asked(lease) = &self.stage {
            self.shared.release(lease);
        }
    }
}
