//! Locks that ignore poisoning.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
