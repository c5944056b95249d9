//! The store: ledgers, a clock, connections, and exchanges in transit.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    ledger::{Audience, Exchange, Ledgers, ReplicaId, Reply},
    part::Part,
    store::Event,
    sync::locked,
};

/// Store time at the store's creation.
const EPOCH_US: u64 = 1_700_000_000_000_000;
/// Maximum delay: longer than any test, but within the range of `Instant`.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// A replica; in a cluster, a single part of it.
pub(super) type Client = (ReplicaId, Part);

/// The number of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionId(u64);

/// Messages to one connection, each with its time of arrival. Closed with the connection.
pub(super) type Inbox = mpsc::UnboundedReceiver<(Instant, Event)>;

type Outbox = mpsc::UnboundedSender<(Instant, Event)>;

pub(super) struct Server {
    start: Instant,
    /// No user code runs under the lock.
    pub(super) state: Mutex<ServerState>,
}

/// Channels wake tasks, which is foreign code, so messages taken from the state are sent or dropped without the lock.
#[derive(Default)]
pub(super) struct ServerState {
    pub(super) ledgers: Ledgers,
    pub(super) is_down: bool,
    pub(super) delay: Duration,
    /// Store time of the last exchange.
    last_us: u64,
    /// Number of the latest connection or exchange.
    last_number: u64,
    /// All clients that have ever connected. `None` while a client is disconnected.
    clients: BTreeMap<Client, Option<ServerConnection>>,
    /// Exchanges in transit, by time of arrival and in the order in which they were sent.
    under_way: BTreeMap<(Instant, u64), UnderWay>,
}

struct ServerConnection {
    id: ConnectionId,
    messages: Outbox,
    /// When its latest exchange arrives: exchanges never overtake each other.
    last_arrival: Option<Instant>,
}

struct UnderWay {
    part: Part,
    exchange: Arc<Exchange>,
    /// Time that the reply takes.
    back: Duration,
    reply: oneshot::Sender<Reply>,
}

/// An exchange that was sent.
pub(super) struct PendingReply {
    pub(super) arrives: Instant,
    /// When the reply arrives.
    pub(super) answered: Instant,
    /// Closed if the exchange is lost in transit.
    pub(super) reply: oneshot::Receiver<Reply>,
}

/// Replies and messages that remain to be delivered.
#[derive(Default)]
struct Delivery {
    replies: Vec<(oneshot::Sender<Reply>, Reply)>,
    messages: Vec<(Outbox, Instant, Event)>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            state: Mutex::default(),
        }
    }
}

impl Server {
    pub(super) fn go_down(&self) {
        let mut state = locked(&self.state);
        state.is_down = true;
        let lost = mem::take(&mut state.under_way);
        let cut: Vec<_> = state.clients.values_mut().map(Option::take).collect();
        drop(state);
        drop((lost, cut));
    }

    /// Opens a connection, which replaces an older one. `None` if the store is down.
    pub(super) fn connect(&self, client: Client) -> Option<(ConnectionId, Inbox)> {
        let (messages, inbox) = mpsc::unbounded_channel();
        let mut state = locked(&self.state);
        if state.is_down {
            return None;
        }
        let id = ConnectionId(state.next_number());
        let connection = ServerConnection {
            id,
            messages,
            last_arrival: None,
        };
        let old = state.clients.insert(client, Some(connection));
        drop(state);
        drop(old);
        Some((id, inbox))
    }

    /// Closes a connection from the replica's side. Messages already sent still arrive.
    pub(super) fn disconnect(&self, client: Client, id: ConnectionId) {
        let mut state = locked(&self.state);
        let connection = state.clients.get_mut(&client);
        let closed = connection.and_then(|open| open.take_if(|open| open.id == id));
        drop(state);
        drop(closed);
    }

    /// Number of clients that are connected to the part of this one.
    pub(super) fn count(&self, (_, part): Client) -> u32 {
        let state = locked(&self.state);
        let clients = state.clients.iter();
        let connected = clients.filter(|((_, of), open)| *of == part && open.is_some());
        connected.count() as u32
    }

    pub(super) fn is_open(&self, client: Client, id: ConnectionId) -> bool {
        locked(&self.state).connection(client, id).is_some()
    }

    /// Sends an exchange. `None` if the connection was cut.
    pub(super) fn send(
        &self,
        client: Client,
        id: ConnectionId,
        exchange: Arc<Exchange>,
    ) -> Option<PendingReply> {
        let now = Instant::now();
        let mut state = locked(&self.state);
        let half = state.delay / 2;
        let connection = state.connection(client, id)?;
        let arrives = connection.last_arrival.max(Some(now + half))?;
        connection.last_arrival = Some(arrives);
        let (reply, receiver) = oneshot::channel();
        let under_way = UnderWay {
            part: client.1,
            exchange,
            back: half,
            reply,
        };
        let number = state.next_number();
        state.under_way.insert((arrives, number), under_way);
        Some(PendingReply {
            arrives,
            answered: arrives + half,
            reply: receiver,
        })
    }

    /// Runs all exchanges that have arrived, each at its time of arrival.
    pub(super) fn run_arrived(&self) {
        let (now, mut delivery) = (Instant::now(), Delivery::default());
        let mut state = locked(&self.state);
        while let Some(first) = state.under_way.first_entry()
            && first.key().0 <= now
        {
            let ((arrived, _), under_way) = first.remove_entry();
            let now_us = EPOCH_US + (arrived - self.start).as_micros() as u64;
            state.run(under_way, arrived, now_us, &mut delivery);
        }
        drop(state);
        delivery.deliver();
    }
}

impl ServerState {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn connection(&mut self, client: Client, id: ConnectionId) -> Option<&mut ServerConnection> {
        let connection = self.clients.get_mut(&client)?.as_mut();
        connection.filter(|open| open.id == id)
    }

    fn run(&mut self, sent: UnderWay, arrived: Instant, now_us: u64, delivery: &mut Delivery) {
        // Every exchange has a distinct time, even if the clock is paused: the shortest takes some microseconds.
        self.last_us = now_us.max(self.last_us + 1);
        let is_absent = |((replica, part), open): (&Client, &Option<ServerConnection>)| {
            (*part == sent.part && open.is_none()).then_some(*replica)
        };
        let absent: BTreeSet<_> = self.clients.iter().filter_map(is_absent).collect();
        self.ledgers.audience = Audience {
            listens: true,
            absent,
        };
        let (reply, published) = self.ledgers.exchange(&sent.exchange, self.last_us);
        delivery.replies.push((sent.reply, reply));
        let arrives = arrived + sent.back;
        for (replica, wake) in published.wakes {
            if let Some(Some(open)) = self.clients.get(&(replica, sent.part)) {
                let to = open.messages.clone();
                delivery.messages.push((to, arrives, Event::Wake(wake)));
            }
        }
        let of_part = (self.clients.iter()).filter(|((_, part), _)| *part == sent.part);
        for open in of_part.filter_map(|(_, open)| open.as_ref()) {
            for key in &published.lost {
                let (to, lost) = (open.messages.clone(), Event::Lost(key.clone()));
                delivery.messages.push((to, arrives, lost));
            }
        }
    }
}

impl Delivery {
    /// Delivers to all receivers that still exist.
    fn deliver(self) {
        for (receiver, arrives, message) in self.messages {
            let _ = receiver.send((arrives, message));
        }
        for (receiver, reply) in self.replies {
            let _ = receiver.send(reply);
        }
    }
}
