//! What keeps a slot until the end of its response.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use super::gate::Gate;
use crate::permit::Permit;

/// Holds the slot of a response in progress: first in the future, then in the body. Empty once the slot was given
/// back, and for a request without a limit.
#[derive(Default)]
pub(super) struct Guard {
    permit: Option<Arc<Permit>>,
    /// The gate, if a lost slot ends the response.
    abort: Option<Arc<Gate>>,
    /// Wakes the response when the slot is lost. Made when the response first has to wait.
    lost: Option<Lost>,
}

type Lost = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

impl Guard {
    pub(super) fn new(permit: Arc<Permit>, abort: Option<Arc<Gate>>) -> Self {
        Self {
            permit: Some(permit),
            abort,
            lost: None,
        }
    }

    /// Gives the slot back, unless somebody else holds it too.
    pub(super) fn release(&mut self) {
        *self = Self::default();
    }

    /// Polls what the slot is held for. `None`: the slot is lost, and that ends the response.
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Option<T>> {
        let (Some(permit), Some(gate)) = (&self.permit, &self.abort) else {
            return poll(cx).map(Some);
        };
        // This asks the clock, so it is right even when nothing in this process ran for a while.
        if !permit.is_lost() {
            if let Poll::Ready(output) = poll(cx) {
                return Poll::Ready(Some(output));
            }
            let lost = self.lost.get_or_insert_with(|| {
                let permit = permit.clone();
                Box::pin(async move { permit.lost().await })
            });
            if lost.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        let limit = gate.limit().name();
        tracing::warn!(limit, "a slot was lost: its response is aborted");
        Poll::Ready(None)
    }
}
