//! What keeps a slot until the end of its response.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::time::Instant;

use super::gate::Gate;
use crate::{error::LostErrorKind, permit::Share};

/// Holds the slot of a response in progress: first in the future, then in the body. Empty once the slot was given
/// back, and for a request without a limit.
#[derive(Default)]
pub(super) struct Guard {
    share: Option<Share>,
    /// The gate, if the end of the slot may end the response.
    gate: Option<Arc<Gate>>,
    /// Wakes the response when its slot is over. Made when the response first has to wait.
    over: Option<Over>,
}

type Over = Pin<Box<dyn Future<Output = LostErrorKind> + Send + Sync>>;

impl Guard {
    pub(super) fn new(share: Share, gate: Option<Arc<Gate>>) -> Self {
        Self {
            share: Some(share),
            gate,
            over: None,
        }
    }

    /// Gives the slot back, unless somebody else holds it too.
    pub(super) fn release(&mut self) {
        *self = Self::default();
    }

    /// Polls what the slot is held for. An error: the slot is over, and that ends the response.
    #[inline]
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Result<T, LostErrorKind>> {
        let (Some(share), Some(gate)) = (&self.share, &self.gate) else {
            return poll(cx).map(Ok);
        };
        let idles = gate.bounds.idle.is_some();
        if idles {
            share.set_unread(None);
        }
        // This asks the clock, so it is right even when nothing in this process ran for a while.
        let kind = match share.over().filter(|kind| gate.ends(*kind)) {
            Some(kind) => kind,
            None => {
                if let Poll::Ready(output) = poll(cx) {
                    if idles {
                        share.set_unread(Some(Instant::now()));
                    }
                    return Poll::Ready(Ok(output));
                }
                let over = self.over.get_or_insert_with(|| {
                    let (share, gate) = (share.clone(), gate.clone());
                    Box::pin(async move { share.ended(|kind| gate.ends(kind)).await })
                });
                ready!(over.as_mut().poll(cx))
            }
        };
        let limit = gate.first_scope().limit().name();
        tracing::warn!(limit, ?kind, "a slot is over: its response is aborted");
        if let Some(meter) = &gate.meter {
            meter.aborted(kind);
        }
        Poll::Ready(Err(kind))
    }
}

/// Whoever else holds the slot has no response that could lie unread.
impl Drop for Guard {
    fn drop(&mut self) {
        if let (Some(share), Some(_)) = (&self.share, &self.gate) {
            share.set_unread(None);
        }
    }
}
