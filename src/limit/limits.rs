//! The limits of a semaphore for one key.

use std::borrow::Borrow;

use smallvec::{SmallVec, smallvec};

use super::limit::Limit;

/// One limit or a list of limits, for [`Limiter::semaphore`](crate::Limiter::semaphore).
///
/// Also accepted by [`Semaphore::and`](crate::Semaphore::and). Create it from a [`Limit`] or a `&Limit`, or from an
/// array, a slice or a `Vec` of either.
#[derive(Clone, Debug)]
pub struct Limits(pub(crate) SmallVec<[Limit; 1]>);

impl<L: Borrow<Limit>> From<L> for Limits {
    fn from(limit: L) -> Self {
        Self(smallvec![limit.borrow().clone()])
    }
}

impl<L: Borrow<Limit>, const N: usize> From<[L; N]> for Limits {
    fn from(limits: [L; N]) -> Self {
        limits[..].into()
    }
}

impl<L: Borrow<Limit>, const N: usize> From<&[L; N]> for Limits {
    fn from(limits: &[L; N]) -> Self {
        limits[..].into()
    }
}

impl<L: Borrow<Limit>> From<Vec<L>> for Limits {
    fn from(limits: Vec<L>) -> Self {
        limits[..].into()
    }
}

impl<L: Borrow<Limit>> From<&[L]> for Limits {
    fn from(limits: &[L]) -> Self {
        Self(limits.iter().map(|limit| limit.borrow().clone()).collect())
    }
}
