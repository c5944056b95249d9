//! A session: what the driver polls. It sends each exchange on its connection, or in a cluster to where its key is, and
//! moves the bytes of all its connections.
//!
//! Tests: below, `tests.rs`; in a cluster: `tests/cluster.rs`.

use std::{
    sync::{Arc, LazyLock},
    task::{Context, Poll},
};

use futures_util::future::{BoxFuture, FutureExt};
use redis::{Cmd, ErrorKind, RedisResult, Script, ServerErrorKind, Value};
use tokio::time::Instant;

#[cfg(feature = "cluster")]
use super::{
    cluster::{PartDialer, Redirect},
    target::Dialer,
};
use super::{
    codec::{decode, encode},
    connector::Connector,
    error::store_error,
    known::Known,
    link::{Link, Opened},
};
#[cfg(feature = "cluster")]
use crate::store::StoreErrorKind;
use crate::{
    ledger::{EXCHANGE_LUA, Exchange, Reply},
    store::{Event, Session, StoreError},
};

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(EXCHANGE_LUA));
/// Redirects of one exchange: a cluster that is changing may take a few.
#[cfg(feature = "cluster")]
const MAX_REDIRECTS: usize = 8;

pub(super) struct RedisSession {
    exchanger: Arc<Exchanger>,
    connections: Vec<Opened>,
    /// A probe of whether connections may subscribe.
    probe: Option<BoxFuture<'static, ()>>,
}

impl RedisSession {
    pub(super) fn new(known: Arc<Known>, connector: Connector) -> Self {
        Self {
            exchanger: Arc::new(Exchanger { known, connector }),
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

/// Runs the exchanges of a session, whose futures share it.
struct Exchanger {
    known: Arc<Known>,
    connector: Connector,
}

impl Exchanger {
    async fn exchange(&self, exchange: &Exchange) -> Result<Reply, StoreError> {
        #[cfg(feature = "cluster")]
        if let Dialer::Cluster(dialer) = self.connector.dialer() {
            return self.exchange_in(dialer, exchange).await;
        }
        let link = self.connector.link().await?;
        let outcome = self.run(&link, exchange).await;
        self.read(&link, exchange, outcome)
    }

    /// Runs an exchange where its key is.
    #[cfg(feature = "cluster")]
    async fn exchange_in(
        &self,
        dialer: &PartDialer,
        exchange: &Exchange,
    ) -> Result<Reply, StoreError> {
        for _ in 0..MAX_REDIRECTS {
            let link = self.connector.link().await?;
            let mut outcome = self.run(&link, exchange).await;
            let redirect = |outcome: &RedisResult<Value>| {
                let error = outcome.as_ref().err()?;
                dialer.redirect(error, link.client())
            };
            match redirect(&outcome) {
                Some(Redirect::Moved(node)) => {
                    // Others on this connection are redirected too, but only one of them leads the way.
                    if self.connector.forget(&link) {
                        dialer.lead_to(node);
                    }
                    continue;
                }
                Some(Redirect::Ask(node)) => {
                    outcome = dialer.ask(node, &self.by_text(&link, exchange)).await;
                    if redirect(&outcome).is_some() {
                        continue;
                    }
                }
                None => {}
            }
            return self.read(&link, exchange, outcome);
        }
        Err(StoreError {
            kind: StoreErrorKind::Outage,
            message: "the cluster's nodes do not agree on who has a key".to_owned(),
        })
    }

    async fn run(&self, link: &Link, exchange: &Exchange) -> RedisResult<Value> {
        let mut connection = link.connection();
        // The first call of a connection brings the text: the server may not have it.
        let command = match link.take_first_call() {
            true => self.by_text(link, exchange),
            false => self.encode(link, "EVALSHA", SCRIPT.get_hash(), exchange),
        };
        match command.query_async(&mut connection).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let by_text = self.by_text(link, exchange);
                by_text.query_async(&mut connection).await
            }
            outcome => outcome,
        }
    }

    fn read(
        &self,
        link: &Link,
        exchange: &Exchange,
        outcome: RedisResult<Value>,
    ) -> Result<Reply, StoreError> {
        let value = outcome.map_err(|error| store_error(&error));
        let reply = value.and_then(|value| decode(exchange, value));
        if reply.is_err() {
            // The next connection may lead to another server, whatever is wrong with this one. After ASK it was another node
            // that failed: the search starts anew.
            self.connector.forget(link);
        }
        reply
    }

    fn by_text(&self, link: &Link, exchange: &Exchange) -> Cmd {
        self.encode(link, "EVAL", EXCHANGE_LUA, exchange)
    }

    fn encode(&self, link: &Link, command: &str, script: &str, exchange: &Exchange) -> Cmd {
        let Known {
            wake_prefix,
            idle_key,
            ..
        } = &*self.known;
        let idle_key = idle_key.as_deref();
        let listens = link.listens();
        encode(command, script, wake_prefix, idle_key, listens, exchange)
    }
}

#[cfg(test)]
mod tests {
    use std::{future, sync::atomic::Ordering::Relaxed, task::Waker};

    use super::*;
    use crate::{
        ledger::ReplicaId,
        store::redis::{RedisStore, StoreTarget, link::LinkState},
    };

    /// The `redis` crate does not report every end: after some errors of the network there is just nothing left to do.
    #[test]
    fn a_connection_that_just_ends_is_reported_once() {
        let target = StoreTarget::open("redis://localhost").unwrap();
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
