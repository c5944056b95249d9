//! Tracks in debug builds whether a thread holds a lock under which no foreign code may run.

use std::{cell::Cell, thread};

thread_local! {
    /// Number of such locks held by the thread.
    static LOCKED: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, this thread runs no foreign code.
pub(crate) struct LockMarker(());

impl LockMarker {
    pub(crate) fn new() -> Self {
        change(|locked| locked + 1);
        Self(())
    }
}

impl Drop for LockMarker {
    fn drop(&mut self) {
        change(|locked| locked - 1);
    }
}

/// A thread may drop permits at its end, when its thread-locals are gone.
fn change(by: impl FnOnce(u32) -> u32) {
    if cfg!(debug_assertions) {
        let _ = LOCKED.try_with(|cell| cell.set(by(cell.get())));
    }
}

#[track_caller]
pub(crate) fn assert_unlocked() {
    if cfg!(debug_assertions) {
        let locked = LOCKED.try_with(Cell::get).unwrap_or(0);
        assert!(
            locked == 0 || thread::panicking(),
            "foreign code under the lock of a keeper"
        );
    }
}
