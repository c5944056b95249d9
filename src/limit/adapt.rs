//! The bounds of a limit that finds its own value.

use super::limit::Limit;

/// The bounds within which a limit finds its own value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Adapt {
    pub floor: u32,
    pub ceiling: u32,
}

/// How an upstream took a request of an adaptive limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "the layer reports it")]
pub(crate) enum Verdict {
    Accepted,
    Overloaded,
}

impl Limit {
    pub(crate) fn adapt(&self) -> Option<Adapt> {
        self.adapt
    }

    /// The limit as one that finds its own value within these bounds, beginning at the declared one.
    #[allow(dead_code, reason = "the layer declares it")]
    pub(crate) fn adapted(mut self, adapt: Adapt) -> Limit {
        self.adapt = Some(adapt);
        self.changed()
    }
}
