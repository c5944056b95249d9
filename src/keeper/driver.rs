//! The driver: the one task that sends, receives and sleeps for a keeper.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt;
use tokio::{runtime, sync::Notify};

use super::{
    Shared,
    again::Again,
    under_way::{News, UnderWay},
};
use crate::store::Session;

/// Runs until nothing is left to do for a keeper that nobody uses, until another one takes its place, or until its
/// runtime ends.
pub(super) async fn run(
    gone: Gone,
    session: Option<Box<dyn Session>>,
    runtime: runtime::Id,
    work: Arc<Notify>,
) {
    let Gone { shared, generation } = &gone;
    let driver = Again::new(drive(shared, session, *generation, &work));
    if let Err(panic) = AssertUnwindSafe(driver).catch_unwind().await {
        shared.note_panic(runtime, lacks_something(&*panic));
    }
}

async fn drive(
    shared: &Arc<Shared>,
    session: Option<Box<dyn Session>>,
    generation: u64,
    work: &Notify,
) {
    let mut under_way = UnderWay::new(session, shared.store_meter());
    // For whoever has started it.
    let mut watched = false;
    while let Some((exchanges, until)) = shared.next_step(generation) {
        exchanges
            .into_iter()
            .for_each(|outgoing| under_way.send(outgoing));
        if !std::mem::replace(&mut watched, true) {
            shared.watch_driver();
        }
        let news = tokio::select! {
            biased;
            news = under_way.next(until) => news,
            () = work.notified() => continue,
        };
        shared.on_news(generation, |core, now| match news {
            News::Event(event) => core.on_event(&event, now),
            News::Over(number, Ok(reply)) => core.on_reply(number, reply, now),
            News::Over(number, Err((error, timed_out))) => {
                core.on_failure(number, &error, timed_out, now);
            }
            // The next step does what is due.
            News::Due => {}
        });
    }
}

/// Whether a panic is tokio's, for want of a timer or of IO. There is no other way to ask a runtime for them.
pub(super) fn lacks_something(panic: &(dyn Any + Send)) -> bool {
    const WORDS: &str = "A Tokio 1.x context was found, but";
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| Some(panic.downcast_ref::<String>()?.as_str()));
    text.is_some_and(|text| text.starts_with(WORDS))
}

/// Tells the keeper when the task ends, however it ends, even if it was never polled.
pub(super) struct Gone {
    pub(super) shared: Arc<Shared>,
    pub(super) generation: u64,
}

impl Drop for Gone {
    fn drop(&mut self) {
        self.shared.driver_is_gone(self.generation);
    }
}
