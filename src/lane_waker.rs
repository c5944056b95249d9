//! A waker for a part of a task: the lane of a driver.

use std::{
    sync::Arc,
    task::{Wake, Waker},
};

use crate::sync::{AtomicBool, AtomicWaker, Ordering};

/// Wakes the driver, and marks its lane as woken.
///
/// `is_woken` is set before the task is woken, and the driver's waker is registered before `is_woken` is read: a wake-up
/// that is not seen by the poll under way wakes the task again (`keeper/driver/tests.rs`).
pub(crate) struct LaneWaker {
    is_woken: AtomicBool,
    task: Arc<AtomicWaker>,
}

impl LaneWaker {
    pub(crate) fn for_lane(task: &Arc<AtomicWaker>) -> (Arc<Self>, Waker) {
        let own = Arc::new(Self {
            is_woken: AtomicBool::new(false),
            task: task.clone(),
        });
        (own.clone(), Waker::from(own))
    }

    /// Whether the lane was woken since the last call.
    pub(crate) fn take(&self) -> bool {
        self.is_woken.swap(false, Ordering::AcqRel)
    }
}

impl Wake for LaneWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.swap(true, Ordering::AcqRel);
        self.task.wake();
    }
}
