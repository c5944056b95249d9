//! Code shared by the integration tests.

// Each test binary uses a part of this module.
#![allow(dead_code, unreachable_pub)]

pub(crate) mod clock;
pub(crate) mod fault_proxy;
pub(crate) mod log;
pub(crate) mod queue;
pub(crate) mod recorder;
pub(crate) mod redis_cluster;
pub(crate) mod redis_server;
pub(crate) mod replica;
pub(crate) mod sentinel;
pub(crate) mod stopwatch;
pub(crate) mod stuck;
pub(crate) mod watch;

use std::sync::{Mutex, PoisonError};

use tokio::{runtime, time::timeout};

pub(crate) use self::redis_server::GUARD;

/// Fails instead of hanging.
pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    timeout(GUARD, future).await.expect("it does not hang")
}

/// Runs one process test at a time, each on its own runtime.
pub(crate) fn alone(test: impl Future<Output = ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async { timeout(4 * GUARD, test).await.expect("it does not hang") });
}
