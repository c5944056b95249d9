//! A session: what the driver polls.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::Instant;

use super::{exchange::Exchanger, link::Opened};
use crate::{
    ledger::{Exchange, Reply},
    store::{Event, Session, StoreError},
};

pub(super) struct RedisSession {
    exchanger: Arc<Exchanger>,
    connections: Vec<Opened>,
    /// A probe of whether connections may subscribe.
    probe: Option<BoxFuture<'static, ()>>,
}

impl RedisSession {
    pub(super) fn new(exchanger: Exchanger) -> Self {
        Self {
            exchanger: Arc::new(exchanger),
            connections: Vec::new(),
            probe: None,
        }
    }

    fn probe(&self) -> Option<BoxFuture<'static, ()>> {
        let plain = self.exchanger.connector.probe_due(Instant::now())?;
        let exchanger = self.exchanger.clone();
        Some(async move { exchanger.connector.probe_subscription(&plain).await }.boxed())
    }

    /// Moves the bytes of all connections that are used.
    fn poll_connections(&mut self, cx: &mut Context<'_>) {
        let connector = &self.exchanger.connector;
        self.connections.extend(connector.take_opened());
        self.connections.retain_mut(|(link, io)| {
            let Some(link) = link.upgrade() else {
                return false;
            };
            let has_ended = io.poll_unpin(cx).is_ready();
            if has_ended {
                link.end(&connector.events);
            }
            !has_ended
        });
    }
}

impl Session for RedisSession {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        if self.probe.is_none() {
            self.probe = self.probe();
        }
        let exchanger = self.exchanger.clone();
        async move { exchanger.exchange(&exchange).await }.boxed()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        self.exchanger
            .connector
            .events
            .poller()
            .register(cx.waker());
        if let Some(probe) = &mut self.probe
            && probe.poll_unpin(cx).is_ready()
        {
            self.probe = None;
        }
        self.poll_connections(cx);
        let Some(event) = self.exchanger.connector.events.next() else {
            return Poll::Pending;
        };
        if matches!(event, Event::Disconnected) {
            self.exchanger.known.subscription.note_end(Instant::now());
        }
        Poll::Ready(event)
    }

    fn disconnect(&mut self) {
        self.exchanger.connector.disconnect();
    }
}

#[cfg(test)]
mod tests {
    use std::{future, sync::atomic::Ordering::Relaxed, task::Waker};

    use super::*;
    use crate::{
        ledger::ReplicaId,
        store::redis::{RedisStore, Target, link::LinkState},
    };

    /// The `redis` crate does not report every end: after some errors of the network there is just nothing left to do.
    #[test]
    fn a_connection_that_just_ends_is_reported_once() {
        let target = Target::open("redis://localhost").unwrap();
        let mut session = RedisStore::new(target, "test", ReplicaId::from_bits(1)).session();
        let link = Arc::new(LinkState::new(true));
        link.in_use.store(true, Relaxed);
        let io = future::ready(()).boxed();
        session.connections.push((Arc::downgrade(&link), io));
        let mut cx = Context::from_waker(Waker::noop());
        let event = session.poll_event(&mut cx);
        assert!(matches!(event, Poll::Ready(Event::Disconnected)));
        link.end(&session.exchanger.connector.events);
        assert!(session.poll_event(&mut cx).is_pending());
    }
}
