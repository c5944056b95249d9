//! The watchdog: a task on each runtime from which requests wait, which sees to it that the driver runs.
//!
//! It costs a timer a few times in a `store_timeout` while requests wait, however many they are, and ends soon after the last one.

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt;
use tokio::{
    runtime,
    time::{Instant, sleep},
};

use super::{Shared, driver::lacks_something, lifecycle::Finding};

/// Looks without anybody waiting after which it ends: a busy limiter does not start one for each request.
const IDLE_LOOKS: u32 = 16;

pub(super) async fn run(watch: Watch) {
    let Watch { shared, runtime } = &watch;
    if let Err(panic) = AssertUnwindSafe(watch_over(shared)).catch_unwind().await {
        shared.note_panic(*runtime, lacks_something(&*panic));
    }
}

async fn watch_over(shared: &Arc<Shared>) {
    let look = shared.patience().look;
    let mut idle = 0;
    while idle < IDLE_LOOKS {
        let from = Instant::now();
        sleep(look).await;
        if from.elapsed() > 2 * look {
            // The whole process stood still: the driver has had no chance to run either.
            continue;
        }
        idle = match shared.look_after_driver() {
            Finding::Idle => idle + 1,
            Finding::Well => 0,
            Finding::Late => {
                // If it cannot be started here, those who wait are told so when they ask.
                let _ = shared.start_driver();
                0
            }
        };
    }
}

/// Ends with the task, even if that is dropped with its runtime before it was ever polled.
pub(super) struct Watch {
    shared: Arc<Shared>,
    runtime: runtime::Id,
}

impl Watch {
    pub(super) fn new(shared: Arc<Shared>, runtime: runtime::Id) -> Self {
        Self { shared, runtime }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.is_unwatched(self.runtime);
    }
}
