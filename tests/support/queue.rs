//! Waiting requests.

use std::time::Duration;

use tokio::time::timeout;
use tower_turnstile::{Acquire, Semaphore};

use super::soon;

/// A request that waits in the queue.
pub(crate) async fn wait_in_line(semaphore: &Semaphore) -> Acquire {
    let mut acquire = semaphore.acquire();
    soon(async {
        // Its place arrives with an answer that does not wake it.
        while acquire.position().is_none_or(|position| position == 0) {
            let once = timeout(Duration::from_millis(1), &mut acquire).await;
            assert!(once.is_err(), "a slot was free");
        }
    })
    .await;
    acquire
}
