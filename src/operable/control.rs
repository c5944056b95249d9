//! The task that listens to operators.

use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;

/// Listens to operators, independently of the drivers. Dropped with the last keeper.
pub(crate) trait ControlTask: Send + Sync {
    /// Runs the task on this runtime, unless it is already running.
    fn run_on(&self, runtime: &Handle);

    /// The store has lost its data, and with it the operators' knowledge of this process.
    fn data_lost(&self);

    /// The limiter is shut down, so this process no longer answers operators.
    fn leave(&self) -> BoxFuture<'static, ()>;
}

/// A keeper's control task, if any. A keeper gets its task only once.
pub(crate) type Control = OnceLock<Arc<dyn ControlTask>>;
