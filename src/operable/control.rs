//! The task that listens to operators. Without the feature `operate` there is none.

#[cfg(feature = "operate")]
use std::sync::{Arc, OnceLock};

#[cfg(feature = "operate")]
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;

/// Listens to operators, beside the drivers. It is dropped with the last keeper.
#[cfg(feature = "operate")]
pub(crate) trait ControlTask: Send + Sync {
    /// Runs on this runtime, unless it runs already.
    fn run_on(&self, runtime: &Handle);

    /// The store has lost its data, and so what operators know of this process.
    fn data_lost(&self);

    /// The limiter is shut down: this process is not asked any more.
    fn leave(&self) -> BoxFuture<'static, ()>;
}

/// The task of a keeper, if it has one.
#[derive(Default)]
pub(crate) struct Control {
    #[cfg(feature = "operate")]
    task: OnceLock<Arc<dyn ControlTask>>,
}

#[cfg(feature = "operate")]
impl Control {
    pub(crate) fn set(&self, task: Arc<dyn ControlTask>) {
        // A keeper is given one only once.
        let _ = self.task.set(task);
    }

    pub(crate) fn run_on(&self, runtime: &Handle) {
        if let Some(task) = self.task.get() {
            task.run_on(runtime);
        }
    }

    pub(crate) fn data_lost(&self) {
        if let Some(task) = self.task.get() {
            task.data_lost();
        }
    }

    pub(crate) async fn leave(&self) {
        if let Some(task) = self.task.get() {
            task.leave().await;
        }
    }
}

#[cfg(not(feature = "operate"))]
impl Control {
    pub(crate) fn run_on(&self, _: &Handle) {}

    pub(crate) fn data_lost(&self) {}

    pub(crate) async fn leave(&self) {}
}
