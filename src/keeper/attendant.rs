//! What works beside the drivers: it answers operators. Without the feature `operate` there is none.

#[cfg(feature = "operate")]
use std::sync::{Arc, OnceLock};

#[cfg(feature = "operate")]
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;

/// Works beside the drivers. It is dropped with the last keeper.
#[cfg(feature = "operate")]
pub(crate) trait Attendant: Send + Sync {
    /// Sees to it that its task runs: on this runtime, unless it runs already.
    fn attend(&self, runtime: &Handle);

    /// The limiter is shut down: this process is not asked any more.
    fn leave(&self) -> BoxFuture<'static, ()>;
}

/// The attendant of a keeper, if it has one.
#[derive(Default)]
pub(super) struct Seat {
    #[cfg(feature = "operate")]
    attendant: OnceLock<Arc<dyn Attendant>>,
}

#[cfg(feature = "operate")]
impl Seat {
    pub(super) fn set(&self, attendant: Arc<dyn Attendant>) {
        // A keeper is given one only once.
        let _ = self.attendant.set(attendant);
    }

    pub(super) fn attend(&self, runtime: &Handle) {
        if let Some(attendant) = self.attendant.get() {
            attendant.attend(runtime);
        }
    }

    pub(super) async fn leave(&self) {
        if let Some(attendant) = self.attendant.get() {
            attendant.leave().await;
        }
    }
}

#[cfg(not(feature = "operate"))]
impl Seat {
    pub(super) fn attend(&self, _: &Handle) {}

    pub(super) async fn leave(&self) {}
}
