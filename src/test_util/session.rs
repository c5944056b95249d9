//! A replica's connection to a test's store.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::time::{Instant, Sleep, sleep_until};

use super::server::{Client, ConnectionId, Inbox, Server};
use crate::{
    ledger::{Exchange, ReplicaId, Reply},
    part::Part,
    store::{COUNT_INTERVAL, CountTimer, Event, Session, Store, StoreError},
};

/// A limiter's path to its store.
pub(super) struct Replica {
    pub(super) server: Arc<Server>,
    pub(super) id: ReplicaId,
}

impl Store for Replica {
    fn open(&self, part: Part) -> Box<dyn Session> {
        Box::new(TestSession {
            server: self.server.clone(),
            client: (self.id, part),
            connection: None,
            events: VecDeque::new(),
            count_timer: CountTimer::default(),
        })
    }
}

struct TestSession {
    server: Arc<Server>,
    client: Client,
    connection: Option<ClientConnection>,
    /// Starts and ends of connections that the driver has not seen.
    events: VecDeque<Event>,
    count_timer: CountTimer,
}

struct ClientConnection {
    id: ConnectionId,
    inbox: Inbox,
    /// The message in transit.
    next: Option<(Pin<Box<Sleep>>, Event)>,
}

impl TestSession {
    /// The connection for an exchange. A hello reconnects if it was cut. `None` if the exchange has no connection, or
    /// the store is down.
    fn connection(&mut self, exchange: &Exchange) -> Option<ConnectionId> {
        let (server, client) = (&self.server, self.client);
        if let Some(open) = &self.connection {
            if server.is_open(client, open.id) {
                return Some(open.id);
            }
            self.connection = None;
            self.events.push_back(Event::Disconnected);
        }
        if !exchange.is_hello() {
            return None;
        }
        let (connection, inbox) = server.connect(client)?;
        self.connection = Some(ClientConnection {
            id: connection,
            inbox,
            next: None,
        });
        self.events.push_back(Event::Connected);
        self.events.push_back(Event::Counted(server.count(client)));
        self.count_timer.start(COUNT_INTERVAL);
        Some(connection)
    }
}

impl Session for TestSession {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let (server, client) = (self.server.clone(), self.client);
        let connection = self.connection(&exchange);
        async move {
            let reply = match connection {
                Some(connection) => run(server, client, connection, exchange).await,
                None => None,
            };
            reply.ok_or_else(|| {
                StoreError::outage("there is no connection to the store of the test")
            })
        }
        .boxed()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        if let Some(event) = self.events.pop_front() {
            return Poll::Ready(event);
        }
        let Some(connection) = &mut self.connection else {
            // The exchange that opens a connection is polled by the same task.
            return Poll::Pending;
        };
        // The end of the connection comes first: a server that has cut it counts nobody.
        match connection.poll_message(cx) {
            Poll::Ready(Some(event)) => return Poll::Ready(event),
            Poll::Ready(None) => {
                self.connection = None;
                return Poll::Ready(Event::Disconnected);
            }
            Poll::Pending => {}
        }
        ready!(self.count_timer.poll_due(cx));
        Poll::Ready(Event::Counted(self.server.count(self.client)))
    }

    fn disconnect(&mut self) {
        if let Some(open) = &self.connection {
            self.server.disconnect(self.client, open.id);
        }
    }
}

impl Drop for TestSession {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl ClientConnection {
    /// `None` if the connection has ended.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        loop {
            if let Some((arrives, _)) = &mut self.next {
                ready!(arrives.as_mut().poll(cx));
                return Poll::Ready(self.next.take().map(|(_, message)| message));
            }
            match ready!(self.inbox.poll_recv(cx)) {
                Some((arrives, message)) if arrives > Instant::now() => {
                    self.next = Some((Box::pin(sleep_until(arrives)), message));
                }
                arrived => return Poll::Ready(arrived.map(|(_, message)| message)),
            }
        }
    }
}

/// Sends an exchange when first polled. `None` if the connection was cut before the reply arrived.
async fn run(
    server: Arc<Server>,
    client: Client,
    connection: ConnectionId,
    exchange: Arc<Exchange>,
) -> Option<Reply> {
    let sent = server.send(client, connection, exchange)?;
    if sent.arrives > Instant::now() {
        // The exchange arrives even if nobody awaits the reply.
        let server = server.clone();
        tokio::spawn(async move {
            sleep_until(sent.arrives).await;
            server.run_arrived();
        });
    } else {
        server.run_arrived();
    }
    let reply = sent.reply.await.ok()?;
    if sent.answered > Instant::now() {
        sleep_until(sent.answered).await;
    }
    server.is_open(client, connection).then_some(reply)
}
