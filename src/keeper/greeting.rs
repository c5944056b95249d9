//! The session that a limiter was connected with, until its driver starts.

use std::time::Duration;

use tokio::{
    runtime::{self, Handle},
    time::Instant,
};

use crate::store::Session;

/// How long a session may lie unused: later a firewall may have forgotten its connection, and the first request would
/// wait for nothing.
const FRESH: Duration = Duration::from_secs(10);

/// A session that nobody polls, and the runtime that its connections belong to.
pub(super) struct Greeting {
    session: Box<dyn Session>,
    runtime: runtime::Id,
    since: Instant,
}

impl Greeting {
    pub(super) fn new(session: Box<dyn Session>, runtime: &Handle) -> Self {
        Self {
            session,
            runtime: runtime.id(),
            since: Instant::now(),
        }
    }

    pub(super) fn is_for(&self, runtime: &Handle) -> bool {
        self.runtime == runtime.id()
    }

    /// The session, if a driver on this runtime may go on with it.
    pub(super) fn session(self, runtime: &Handle) -> Option<Box<dyn Session>> {
        let is_fresh = self.since.elapsed() < FRESH;
        (is_fresh && self.is_for(runtime)).then_some(self.session)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::Arc,
        task::{Context, Poll},
    };

    use futures_util::future::BoxFuture;
    use tokio::time::advance;

    use super::*;
    use crate::{
        ledger::{Exchange, Reply},
        store::{Event, StoreError},
    };

    struct Idle;

    impl Session for Idle {
        fn exchange(&mut self, _: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
            unreachable!("nothing is sent")
        }

        fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
            Poll::Pending
        }

        fn disconnect(&mut self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_for_its_own_runtime_and_not_for_long() {
        let here = Handle::current();
        let other = tokio::runtime::Builder::new_current_thread();
        let other = { other }.build().expect("a runtime");
        for (runtime, idle, is_kept) in [
            (&here, FRESH - Duration::from_millis(1), true),
            (&here, FRESH, false),
            (other.handle(), Duration::ZERO, false),
        ] {
            let greeting = Greeting::new(Box::new(Idle), &here);
            advance(idle).await;
            assert_eq!(greeting.session(runtime).is_some(), is_kept);
        }
        other.shutdown_background();
    }
}
