//! What keeps a slot until the end of its response.

use std::sync::Arc;

use super::{gate::Gate, revocable::Ended};
use crate::permit::Share;

/// Holds the slot of a response, on its way from the service's future to its body.
pub(super) enum Guard {
    /// For a response that ends by itself. `None`: no limit applies to it, or its slot was given back.
    Plain(Option<Share>),
    /// For one that ends with its slot.
    Revocable(Tie),
}

/// What ties a response to its slot.
pub(super) struct Tie {
    pub(super) share: Share,
    pub(super) gate: Arc<Gate>,
    /// The end of the slot, if it is awaited already.
    pub(super) ended: Option<Ended>,
}
