//! The guard that keeps a slot until the end of its response, and the terms on which it may end first.
//!
//! Tests: `tests/layer/lost.rs`, `bounds.rs`.

use std::{future::Future, pin::Pin, sync::Arc};

use tokio::time::Instant;

use super::options::OnLost;
use crate::{error::LostErrorKind, leases::Bounds, permit::Share, telemetry::LimitMeter};

/// Holds the slot of a response, on its way from the service's future to its body.
pub(in crate::layer) enum SlotGuard {
    /// For a response that does not end with its slot. `None`: no limit applies, or the slot was released.
    Plain(Option<Share>),
    /// For a response that ends with its slot.
    Tied(Tie),
}

/// The tie between a response and its slot.
pub(in crate::layer) struct Tie {
    pub(in crate::layer) share: Share,
    pub(in crate::layer) terms: Arc<Terms>,
    /// The end of the slot, if already awaited.
    pub(in crate::layer) ended: Option<Ended>,
}

/// Completes when the slot is over for a reason that ends the response.
pub(super) type Ended = Pin<Box<dyn Future<Output = LostErrorKind> + Send>>;

/// The reasons why a layer's responses end with their slots, and the limit under which these ends are reported. Default: no
/// reason.
#[derive(Clone, Default)]
pub(in crate::layer) struct Terms {
    pub(in crate::layer) on_lost: OnLost,
    /// `None`: as for a lost slot.
    pub(in crate::layer) at_shutdown: Option<OnLost>,
    pub(in crate::layer) bounds: Bounds,
    /// Whether operators may end responses.
    pub(in crate::layer) may_be_revoked: bool,
    /// `None`: the layer has no limit, or the permit was lost before the body existed.
    pub(in crate::layer) meter: Option<Arc<LimitMeter>>,
}

impl SlotGuard {
    pub(in crate::layer) fn share(&self) -> Option<&Share> {
        match self {
            Self::Plain(share) => share.as_ref(),
            Self::Tied(tie) => Some(&tie.share),
        }
    }
}

impl Tie {
    /// Starts the unread time: the response head is ready, and no frame of the body has been polled.
    pub(in crate::layer) fn begin_unread(&self) {
        if self.terms.bounds.idle.is_some() {
            self.share.set_unread(Some(Instant::now()));
        }
    }
}

impl Terms {
    fn at_shutdown(&self) -> OnLost {
        self.at_shutdown.unwrap_or(self.on_lost)
    }

    /// Whether a response may end with its slot.
    pub(in crate::layer) fn may_end_early(&self) -> bool {
        let may_abort = [self.on_lost, self.at_shutdown()].contains(&OnLost::Abort);
        may_abort || !self.bounds.is_none() || self.may_be_revoked
    }

    /// The reasons why responses may end with their slots.
    pub(in crate::layer) fn possible_ends(&self) -> impl Iterator<Item = LostErrorKind> {
        [
            (LostErrorKind::Lost, self.ends(LostErrorKind::Lost)),
            (LostErrorKind::ShutDown, self.ends(LostErrorKind::ShutDown)),
            (LostErrorKind::HeldTooLong, self.bounds.max_hold.is_some()),
            (LostErrorKind::Idle, self.bounds.idle.is_some()),
            (LostErrorKind::Revoked, self.may_be_revoked),
        ]
        .into_iter()
        .filter_map(|(kind, is_possible)| is_possible.then_some(kind))
    }

    /// Whether a response ends with a slot that is over for this reason.
    pub(super) fn ends(&self, kind: LostErrorKind) -> bool {
        match kind {
            LostErrorKind::Lost => self.on_lost == OnLost::Abort,
            LostErrorKind::ShutDown => self.at_shutdown() == OnLost::Abort,
            LostErrorKind::HeldTooLong | LostErrorKind::Idle | LostErrorKind::Revoked => true,
        }
    }
}
