//! The limits of a semaphore for one key.

use smallvec::{SmallVec, smallvec};

use super::limit::Limit;

/// One limit or a list of limits, for [`Limiter::semaphore`](crate::Limiter::semaphore).
///
/// Also accepted by [`Semaphore::and`](crate::Semaphore::and). Create it from a [`Limit`] or a `&Limit`, or from an
/// array or a `Vec` of either, or a slice of limits.
#[derive(Clone, Debug)]
pub struct Limits(pub(crate) SmallVec<[Limit; 1]>);

impl From<Limit> for Limits {
    fn from(limit: Limit) -> Self {
        Self(smallvec![limit])
    }
}

impl From<&Limit> for Limits {
    fn from(limit: &Limit) -> Self {
        limit.clone().into()
    }
}

impl<const N: usize> From<[Limit; N]> for Limits {
    fn from(limits: [Limit; N]) -> Self {
        Self(limits.into_iter().collect())
    }
}

impl<const N: usize> From<&[Limit; N]> for Limits {
    fn from(limits: &[Limit; N]) -> Self {
        limits[..].into()
    }
}

impl<const N: usize> From<[&Limit; N]> for Limits {
    fn from(limits: [&Limit; N]) -> Self {
        Self(limits.into_iter().cloned().collect())
    }
}

impl From<Vec<Limit>> for Limits {
    fn from(limits: Vec<Limit>) -> Self {
        Self(limits.into())
    }
}

impl From<Vec<&Limit>> for Limits {
    fn from(limits: Vec<&Limit>) -> Self {
        Self(limits.into_iter().cloned().collect())
    }
}

impl From<&[Limit]> for Limits {
    fn from(limits: &[Limit]) -> Self {
        Self(limits.iter().cloned().collect())
    }
}
