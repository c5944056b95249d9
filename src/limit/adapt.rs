//! The bounds of a limit that finds its own value.

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
