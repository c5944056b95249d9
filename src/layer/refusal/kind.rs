//! The reasons of refusals.

use http::StatusCode;

use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    reason::{Reason, impl_codes},
};

/// The reason of a [`Refusal`](crate::layer::Refusal).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalKind {
    /// No slot is free, and the limit has no wait; or the value of the key is 0, under which nobody waits.
    Full,
    /// All slots are in use, and the queue is full.
    QueueFull,
    /// No slot became free within the wait.
    TimedOut,
    /// The rate is used up, and the next permit would come after the wait.
    TooSoon,
    /// The slot was lost before the service answered, and the call was cancelled.
    ///
    /// Only with [`OnLost::Abort`](crate::layer::OnLost::Abort).
    Lost,
    /// The service did not answer within [`LimitLayer::max_hold`](crate::layer::LimitLayer::max_hold).
    ///
    /// The call was cancelled.
    HeldTooLong,
    /// An operator revoked the permit before the service answered, and the call was cancelled.
    Revoked,
    /// The store is down or too slow, and no fallback admits the request. Or the store is back, permits are still being
    /// entered into it, and the limit has no wait.
    Unavailable,
    /// The store refuses: credentials, permissions, or a key of another type. The log has the details.
    Misconfigured,
    /// There is no Tokio runtime for the background task, or one without timers or IO.
    NoRuntime,
    /// The limiter is shutting down.
    ShutDown,
    /// An operator has paused this limit, or an overloaded upstream this key ([`Scope::outcome_by`](crate::Scope::outcome_by)):
    /// no request is admitted for a time.
    Paused,
    /// The request needs more units than the limit has, or its weight is not 1 to 64. The status is 400.
    ///
    /// See [`Scope::weight_by`](crate::layer::Scope::weight_by).
    InvalidWeight,
    /// The request costs more than the burst of the rate. The status is 400.
    ///
    /// See [`Scope::cost_by`](crate::layer::Scope::cost_by).
    InvalidCost,
    /// The handler names a budget that the request does not have. The status is 500.
    ///
    /// Only in a [`Refusal`](crate::layer::Refusal) made from the error of [`Slot::budget`](crate::layer::Slot::budget).
    UnknownRate,
    /// The handler pauses a limit that the request does not have. The status is 500.
    ///
    /// Only in a [`Refusal`](crate::layer::Refusal) made from the error of [`Slot::pause`](crate::layer::Slot::pause).
    UnknownLimit,
    /// The request has no key, and [`Scope::require_key`](crate::layer::Scope::require_key) is set; or no tenant, and
    /// [`Scope::require_tenant`](crate::layer::Scope::require_tenant) is set. The status is 400.
    NoKey,
    /// A [configuration](crate::config) cannot tell which route the [path](crate::config#ambiguous-paths) is on. The status
    /// is 400.
    AmbiguousPath,
    /// The request's body failed while it waited. The status is 400.
    ///
    /// The client disconnected in the middle of the body, or sent invalid HTTP. Only with
    /// [`LimitLayer::read_ahead`](crate::layer::LimitLayer::read_ahead).
    BodyFailed,
}

impl_codes!(RefusalKind {
    Full,
    QueueFull,
    TimedOut,
    TooSoon,
    Lost,
    HeldTooLong,
    Revoked,
    Unavailable,
    Misconfigured,
    NoRuntime,
    ShutDown,
    Paused,
    InvalidWeight,
    InvalidCost,
    UnknownRate,
    UnknownLimit,
    NoKey,
    AmbiguousPath,
    BodyFailed,
});

impl RefusalKind {
    /// Returns whether a limit was reached. If not, the store or the limiter is unavailable, the limit is paused, or the
    /// request or its handler is at fault.
    pub fn is_limited(self) -> bool {
        matches!(
            self,
            Self::Full | Self::QueueFull | Self::TimedOut | Self::TooSoon
        )
    }

    /// Whether the same request would be refused again: the status is 400.
    pub(in crate::layer) fn is_invalid(self) -> bool {
        matches!(
            self,
            Self::NoKey | Self::AmbiguousPath | Self::InvalidWeight | Self::InvalidCost
        )
    }

    /// The refusal of a request without a key under this limit.
    pub(in crate::layer) fn without_key(limit_name: &str) -> Self {
        match Reason::without_key(limit_name) {
            Reason::AmbiguousPath => Self::AmbiguousPath,
            _ => Self::NoKey,
        }
    }

    /// Whether the same request may be admitted later.
    pub(super) fn is_worth_a_retry(self) -> bool {
        !self.is_invalid() && !self.is_of_handler() && self != Self::BodyFailed
    }

    /// Whether the handler is at fault: the status is 500.
    pub(super) fn is_of_handler(self) -> bool {
        matches!(self, Self::UnknownRate | Self::UnknownLimit)
    }

    /// The default status when a limit was reached, which depends on whether all callers share the limit.
    pub(in crate::layer) fn limited_status(is_shared: bool) -> StatusCode {
        if is_shared {
            StatusCode::SERVICE_UNAVAILABLE
        } else {
            StatusCode::TOO_MANY_REQUESTS
        }
    }
}

impl From<AcquireErrorKind> for RefusalKind {
    fn from(kind: AcquireErrorKind) -> Self {
        match kind {
            AcquireErrorKind::Full => Self::Full,
            AcquireErrorKind::QueueFull => Self::QueueFull,
            AcquireErrorKind::TimedOut => Self::TimedOut,
            AcquireErrorKind::TooSoon => Self::TooSoon,
            AcquireErrorKind::InvalidWeight => Self::InvalidWeight,
            AcquireErrorKind::InvalidCost => Self::InvalidCost,
            AcquireErrorKind::UnknownRate => Self::UnknownRate,
            AcquireErrorKind::UnknownLimit => Self::UnknownLimit,
            AcquireErrorKind::Unavailable => Self::Unavailable,
            AcquireErrorKind::Misconfigured => Self::Misconfigured,
            AcquireErrorKind::NoRuntime => Self::NoRuntime,
            AcquireErrorKind::ShutDown => Self::ShutDown,
            AcquireErrorKind::Paused => Self::Paused,
        }
    }
}

impl From<LostErrorKind> for RefusalKind {
    fn from(kind: LostErrorKind) -> Self {
        match kind {
            LostErrorKind::Lost => Self::Lost,
            LostErrorKind::ShutDown => Self::ShutDown,
            // Without a response, nothing can lie unread.
            LostErrorKind::HeldTooLong | LostErrorKind::Idle => Self::HeldTooLong,
            LostErrorKind::Revoked => Self::Revoked,
        }
    }
}
