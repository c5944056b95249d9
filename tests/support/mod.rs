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
pub(crate) mod watch;

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{runtime, time::timeout};

/// A guard against hanging, and no verdict: whatever takes milliseconds may take this long on a machine that stalls.
pub(crate) const GUARD: Duration = Duration::from_secs(60);

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
