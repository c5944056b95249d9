//! A request for a permit, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use super::{Lease, Shared, turn::Taken};
use crate::{error::AcquireError, key::Key};

/// A request for a permit; what the public future is made of.
pub(crate) struct Request {
    shared: Arc<Shared>,
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
    New {
        limit: usize,
        key: Key,
        wait: Duration,
    },
    Asked(Arc<Lease>),
    Done,
}

impl Request {
    pub(super) fn new(shared: Arc<Shared>, limit: usize, key: Key, wait: Duration) -> Self {
        Self {
            shared,
            stage: Stage::New { limit, key, wait },
        }
    }

    pub(crate) fn place(&self) -> Option<u32> {
        match &self.stage {
            Stage::Asked(lease) => self.shared.with(|core, _| core.place(lease)),
            _ => None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        let shared = &self.shared;
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        let asked = shared.with(|core, now| {
            let lease = match stage {
                Stage::New { limit, key, wait } => core.submit(limit, key, wait, now)?,
                Stage::Asked(lease) => lease,
                Stage::Done => panic!("`Acquire` polled after completion"),
            };
            let answer = core.collect(&lease, cx.waker(), now);
            Ok((lease, answer))
        });
        let (lease, answer) = asked?;
        if let Err(kind) = shared.start_driver() {
            shared.release(&lease);
            return Poll::Ready(Err(AcquireError::new(kind, 0)));
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
