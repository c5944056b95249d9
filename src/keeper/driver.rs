//! The driver: the one task that sends, receives and sleeps for a keeper.

use std::sync::Arc;

use super::{
    Shared,
    again::Again,
    under_way::{News, UnderWay},
};
use crate::store::Session;

/// Runs until nothing is left to do for a keeper that nobody uses, or until its runtime ends.
pub(super) async fn run(gone: Gone, session: Option<Box<dyn Session>>) {
    Again::new(work(&gone.0, session)).await;
}

async fn work(shared: &Shared, session: Option<Box<dyn Session>>) {
    let mut under_way = UnderWay::new(session, shared.store_meter());
    while let Some((exchanges, until)) = shared.next_step() {
        exchanges
            .into_iter()
            .for_each(|outgoing| under_way.send(outgoing));
        let news = tokio::select! {
            biased;
            news = under_way.next(until) => news,
            () = shared.parking().notified() => continue,
        };
        shared.with(|core, now| match news {
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

/// Tells the keeper when the task ends, however it ends, even if it was never polled.
pub(super) struct Gone(pub(super) Arc<Shared>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.driver_is_gone();
    }
}
