//! `Send`, `Sync` and `Unpin` of every public type.

use static_assertions::assert_impl_all;
use tower_turnstile_operate::{
    Answers, By, Check, Edited, Explanation, Finding, Health, KeyDigest, KeyRow, LimitRow,
    LogEntry, OperateError, OperateErrorKind, Operator, OperatorBuilder, Order, Outcome, Override,
    Overrides, PermitRow, PermitState, RefusalRow, ReplicaRow, Revocation, Setting, Target,
    TenantDigest, TenantRow, UnclaimedRow, Verdict,
};

macro_rules! assert_values {
    ($($type:ty),+ $(,)?) => {
        $(assert_impl_all!($type: Send, Sync, Unpin, Clone, std::fmt::Debug);)+
    };
}

assert_values!(
    Answers<PermitRow>,
    By,
    Check,
    Edited,
    Explanation,
    Finding,
    Health,
    KeyDigest,
    KeyRow,
    LimitRow,
    LogEntry,
    OperateError,
    OperateErrorKind,
    OperatorBuilder,
    Outcome,
    Override,
    Overrides,
    Order,
    PermitRow,
    PermitState,
    RefusalRow,
    ReplicaRow,
    Revocation,
    Setting,
    Target,
    TenantDigest,
    TenantRow,
    UnclaimedRow,
    Verdict,
);
assert_impl_all!(OperateError: std::error::Error);
assert_impl_all!(Operator: Send, Sync, Unpin, std::fmt::Debug);

#[cfg(feature = "admin")]
mod admin {
    use tower_turnstile_operate::admin::{Admin, AdminBuilder};

    use http::Request;

    use super::*;

    assert_values!(Admin);
    assert_impl_all!(AdminBuilder: Send, Sync, Unpin, std::fmt::Debug);
    // With the bodies of hyper's server and of axum's.
    assert_impl_all!(Admin: tower::Service<Request<hyper::body::Incoming>>);
    assert_impl_all!(Admin: tower::Service<Request<axum::body::Body>>);
}
