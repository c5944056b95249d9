//! The reasons of refusals.

use http::StatusCode;

use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    reason::{AMBIGUOUS_PATH, kinds},
};

kinds! {
    /// The reason of a [`Refusal`](crate::layer::Refusal).
    pub enum RefusalKind {
        /// No slot is free, and the limit has no wait; or the value of the key is 0, under which nobody waits.
        Full = "full",
        /// All slots are in use, and the queue is full.
        QueueFull = "queue_full",
        /// No slot became free within the wait.
        TimedOut = "timed_out",
        /// The rate is used up, and the next permit would come after the wait.
        TooSoon = "too_soon",
        /// The slot was lost before the service answered, and the call was cancelled.
        ///
        /// Only with [`OnLost::Abort`](crate::layer::OnLost::Abort).
        Lost = "lost",
        /// The service did not answer within [`LimitLayer::max_hold`](crate::layer::LimitLayer::max_hold).
        ///
        /// The call was cancelled.
        HeldTooLong = "max_hold",
        /// An operator revoked the permit before the service answered, and the call was cancelled.
        Revoked = "revoked",
        /// The store is down or too slow, and no fallback admits the request. Or the store is back, permits are still being
        /// entered into it, and the limit has no wait.
        Unavailable = "unavailable",
        /// The store refuses: credentials, permissions, or a key of another type. The log has the details.
        Misconfigured = "misconfigured",
        /// There is no Tokio runtime for the background task, or one without timers or IO.
        NoRuntime = "no_runtime",
        /// The limiter is shutting down.
        ShutDown = "shut_down",
        /// An operator has paused this limit, or an overloaded upstream this key ([`Scope::outcome_by`](crate::Scope::outcome_by)):
        /// no request is admitted for a time.
        Paused = "paused",
        /// The request needs more units than the limit has, or its weight is not 1 to 64. The status is 400.
        ///
        /// See [`Scope::weight_by`](crate::layer::Scope::weight_by).
        InvalidWeight = "invalid_weight",
        /// The request costs more than the burst of the rate. The status is 400.
        ///
        /// See [`Scope::cost_by`](crate::layer::Scope::cost_by).
        InvalidCost = "invalid_cost",
        /// The handler names a budget that the request does not have. The status is 500.
        ///
        /// Only in a [`Refusal`](crate::layer::Refusal) made from the error of [`Slot::budget`](crate::layer::Slot::budget).
        UnknownRate = "unknown_rate",
        /// The handler pauses a limit that the request does not have, or reports to one. The status is 500.
        ///
        /// Only in a [`Refusal`](crate::layer::Refusal) made from the error of [`Slot::pause`](crate::layer::Slot::pause) or
        /// [`Slot::report`](crate::layer::Slot::report).
        UnknownLimit = "unknown_limit",
        /// The request has no key, and [`Scope::require_key`](crate::layer::Scope::require_key) is set; or no tenant, and
        /// [`Scope::require_tenant`](crate::layer::Scope::require_tenant) is set. The status is 400.
        NoKey = "no_key",
        /// A [configuration](crate::config) cannot tell which route the [path](crate::config#ambiguous-paths) is on. The status
        /// is 400.
        AmbiguousPath = "ambiguous_path",
        /// The request's body failed while it waited. The status is 400.
        ///
        /// The client disconnected in the middle of the body, or sent invalid HTTP. Only with
        /// [`LimitLayer::read_ahead`](crate::layer::LimitLayer::read_ahead).
        BodyFailed = "body_failed",
    }
}

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
    pub(super) fn is_invalid(self) -> bool {
        matches!(
            self,
            Self::NoKey | Self::AmbiguousPath | Self::InvalidWeight | Self::InvalidCost
        )
    }

    /// The refusal of a request without a key under this limit.
    pub(in crate::layer) fn without_key(limit_name: &str) -> Self {
        match limit_name {
            AMBIGUOUS_PATH => Self::AmbiguousPath,
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

    /// The default status, which depends on whether all callers share the limit.
    pub(in crate::layer) fn status(self, is_shared: bool) -> StatusCode {
        match self {
            Self::BodyFailed => StatusCode::BAD_REQUEST,
            _ if self.is_invalid() => StatusCode::BAD_REQUEST,
            _ if self.is_of_handler() => StatusCode::INTERNAL_SERVER_ERROR,
            _ if self.is_limited() && !is_shared => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::SERVICE_UNAVAILABLE,
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
