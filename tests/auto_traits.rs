//! `Send`, `Sync` and `Unpin` of every public type and future.

use std::{convert::Infallible, future::Ready, rc::Rc};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use static_assertions::{assert_impl_all, assert_not_impl_any};
use tower::util::BoxCloneService;
use tower_turnstile::{
    Acquire, AcquireError, AcquireErrorKind, ClientAddress, ConfigError, ConfigErrorKind, Fallback,
    Hold, Key, Limit, LimitLayer, Limiter, LostErrorKind, OnLost, ParseIdError, PeerAddress,
    Permit, PermitId, ReadAheadLayer, Refusal, RefusalKind, ReleaseAt, ReleaseError, Scope,
    Semaphore, ShutdownReport, Slot, Status, Usage,
    layer::{
        Limited, LostError, ReadAhead, ReadAheadBody, ReadAheadFuture, ResponseBody, ResponseFuture,
    },
};

macro_rules! assert_values {
    ($($type:ty),+ $(,)?) => {
        $(assert_impl_all!($type: Send, Sync, Unpin, Clone, std::fmt::Debug);)+
    };
}

assert_values!(
    AcquireError,
    AcquireErrorKind,
    ClientAddress,
    ConfigError,
    ConfigErrorKind,
    Key,
    Limit,
    LimitLayer,
    Limiter,
    LostErrorKind,
    ParseIdError,
    PermitId,
    OnLost,
    Fallback,
    ReleaseError,
    PeerAddress,
    ReadAheadLayer,
    Refusal,
    RefusalKind,
    ReleaseAt,
    Scope,
    Semaphore,
    ShutdownReport,
    Slot,
    Status,
    Usage,
);

#[cfg(feature = "operate")]
mod operate {
    use tower_turnstile::operate::{KeyDigest, Override, Setting, Target, TenantDigest};

    use super::*;

    assert_values!(KeyDigest, Override, Setting, Target, TenantDigest);
}

assert_impl_all!(AcquireError: std::error::Error);
assert_impl_all!(ConfigError: std::error::Error);
assert_impl_all!(ReleaseError: std::error::Error);
assert_impl_all!(LostError: std::error::Error, Send, Sync, Unpin);
assert_impl_all!(Acquire: Send, Sync, Unpin, std::fmt::Debug);

// A slot has a single owner.
assert_impl_all!(Permit: Send, Sync, Unpin, std::fmt::Debug);
assert_not_impl_any!(Permit: Clone);
assert_impl_all!(Hold: Send, Sync, Unpin, std::fmt::Debug);
assert_not_impl_any!(Hold: Clone);

/// A service over plain data, and a service confined to its thread.
type Answer<B> = Result<Response<B>, Infallible>;
type Plain<Q> = tower::util::ServiceFn<fn(Request<Q>) -> Ready<Answer<Full<Bytes>>>>;
type Local = tower::util::ServiceFn<fn(Request<()>) -> Ready<Answer<Rc<Full<Bytes>>>>>;

assert_impl_all!(Limited<Plain<()>>: Send, Sync, Unpin, Clone, std::fmt::Debug);
assert_impl_all!(ResponseFuture<Plain<()>, ()>: Send, Unpin, std::fmt::Debug);
assert_not_impl_any!(ResponseFuture<Plain<Rc<()>>, Rc<()>>: Send);
assert_not_impl_any!(ResponseFuture<Local, ()>: Send);
assert_impl_all!(ResponseBody<Full<Bytes>>: Send, Sync, Unpin, std::fmt::Debug);
assert_impl_all!(ResponseBody<hyper::body::Incoming>: Send, Sync, Unpin);
assert_not_impl_any!(ResponseBody<Rc<()>>: Send, Sync);

// Its bodies cannot be dropped by another thread when their slot ends.
assert_impl_all!(Limited<Plain<()>>: tower::Service<Request<()>>);
assert_not_impl_any!(Limited<Local>: tower::Service<Request<()>>);

assert_impl_all!(ReadAhead<Plain<()>>: Send, Sync, Unpin, Clone, std::fmt::Debug);
assert_impl_all!(ReadAheadFuture<Plain<ReadAheadBody<()>>, ()>: Send, Unpin, std::fmt::Debug);
assert_not_impl_any!(ReadAheadFuture<Plain<ReadAheadBody<Rc<()>>>, Rc<()>>: Send);
assert_impl_all!(ReadAheadBody<hyper::body::Incoming>: Send, Sync, Unpin, std::fmt::Debug);

fn send_sync<T: Send + Sync>(_: T) {}

/// Only compiled, never run.
#[allow(dead_code)]
fn futures(limiter: &Limiter, permit: &Permit, slot: &Slot, hold: &Hold) {
    send_sync(permit.lost());
    send_sync(slot.lost());
    send_sync(hold.lost());
    fn send<T: Send>(_: T) {}
    send(Limiter::connect("memory:"));
    send(limiter.shutdown(std::time::Duration::ZERO));
    fn release(permit: Permit) -> impl Future + Send {
        permit.release()
    }
    send(release);
}

/// A layered service goes where services are boxed.
#[test]
fn layered_services_can_be_boxed() {
    use tower::Layer;

    let plain = tower::service_fn(|_: Request<()>| {
        std::future::ready(Answer::Ok(Response::new(Full::<Bytes>::default())))
    });
    let layer = Limiter::in_memory()
        .layer(Limit::concurrent("one", 1))
        .unwrap();
    let _: BoxCloneService<Request<()>, _, Infallible> = BoxCloneService::new(layer.layer(plain));
}

#[cfg(feature = "test-util")]
assert_values!(tower_turnstile::test_util::TestStore);

#[cfg(feature = "config")]
mod config {
    use tower_turnstile::config::{
        CallerKey, Config, ConfigFileError, Fault, LimitConfig, LimitPreview, LiveConfig,
        RequestPreview, RouteConfig, StoreConfig, StoreUrl,
    };

    use super::*;

    assert_values!(
        CallerKey,
        Config,
        ConfigFileError,
        Fault,
        LimitConfig,
        LimitPreview,
        LiveConfig,
        RequestPreview,
        RouteConfig,
        StoreConfig,
        StoreUrl,
    );
    assert_impl_all!(ConfigFileError: std::error::Error);
}
