//! Limits: the value, the wait, and the fallback without a store.

mod adapt;
mod check;
mod errors;
mod fair;
mod kinds;
#[allow(clippy::module_inception)]
mod limit;
mod limits;
mod value;

pub(crate) use self::{
    adapt::{Adapt, Verdict},
    check::check_together,
};
pub use self::{
    kinds::{Class, Fallback, Mode},
    limit::Limit,
    limits::Limits,
    value::LimitValue,
};
pub(crate) use crate::ranges::{MAX_LIMIT, MAX_SCOPES, MAX_WAIT, MAX_WEIGHT};

/// The number of a limit in its limiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LimitId(pub usize);
