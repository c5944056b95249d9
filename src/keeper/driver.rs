//! The driver: the one task that sends, receives and sleeps for a keeper.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{Shared, send::Outgoing};
use crate::{
    ledger::Reply,
    store::{Event, MAX_EVENTS, Store, StoreError, StoreErrorKind},
    telemetry::StoreMeter,
};

/// A deadline that is noticed so much too late was not missed by the store: this process stood still.
const STOOD_STILL: Duration = Duration::from_millis(100);

/// Runs until nothing is left to do for a keeper that nobody uses, or until its runtime ends.
pub(super) async fn run(gone: Gone, store: Option<Arc<dyn Store>>) {
    let shared = &gone.0;
    // Kept here so that the channel stays open without a store.
    let (tell, mut events) = mpsc::channel(MAX_EVENTS);
    if let Some(store) = &store {
        store.listen(tell.clone());
    }
    let meter = shared.store_meter();
    let mut under_way = FuturesUnordered::new();
    while let Some((exchanges, until)) = shared.next_step() {
        if let Some(store) = &store {
            under_way.extend(
                exchanges
                    .into_iter()
                    .map(|outgoing| exchange(store.clone(), meter.clone(), outgoing)),
            );
        }
        tokio::select! {
            biased;
            Some(event) = events.recv() => shared.with(|core, now| match event {
                Event::Connected => core.on_connected(),
                Event::Wake(wake) => core.on_wake(&wake, now),
            }),
            Some((number, outcome)) = under_way.next() => shared.with(|core, now| match outcome {
                Ok(reply) => core.on_reply(number, reply, now),
                Err((error, timed_out)) => core.on_failure(number, &error, timed_out, now),
            }),
            () = shared.parking().notified() => {}
            () = rest(until) => {}
        }
    }
}

type Outcome = Result<Reply, (StoreError, bool)>;

/// Runs one exchange within its time.
pub(super) fn exchange(
    store: Arc<dyn Store>,
    meter: StoreMeter,
    outgoing: Outgoing,
) -> impl Future<Output = (u64, Outcome)> {
    let Outgoing {
        number,
        exchange,
        deadline,
    } = outgoing;
    let sent = Instant::now();
    let patience = deadline.saturating_duration_since(sent);
    async move {
        let mut reply = store.exchange(exchange);
        let mut outcome = timeout_at(deadline, &mut reply).await;
        if outcome.is_err() && Instant::now() > deadline + STOOD_STILL {
            // The reply may have been here all the time, unread.
            outcome = timeout(patience, &mut reply).await;
        }
        let outcome = match outcome {
            Ok(result) => result.map_err(|error| (error, false)),
            Err(_) => {
                // A connection that does not answer is not used again: it may be half open.
                store.disconnect();
                let message = format!("no answer within {patience:?}");
                Err((
                    StoreError {
                        kind: StoreErrorKind::Outage,
                        message,
                    },
                    true,
                ))
            }
        };
        meter.exchanged(&outcome, sent.elapsed());
        (number, outcome)
    }
}

async fn rest(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until).await,
        None => std::future::pending().await,
    }
}

/// Tells the keeper when the task ends, however it ends, even if it was never polled.
pub(super) struct Gone(pub(super) Arc<Shared>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.driver_is_gone();
    }
}
