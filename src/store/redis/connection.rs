//! The connection of a session: made by the exchange that needs it, shared by all, and not used again after an error.

use std::sync::{
    Arc, Mutex, Weak,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use redis::{Client, PushInfo, PushKind, RedisResult, aio::MultiplexedConnection, cmd};

use super::{
    Known,
    error::evicting,
    events::Events,
    locked,
    socket::{self, Io},
    store_error,
    subscription::Mode,
    target::Route,
};
use crate::store::{Event, StoreError};

pub(super) struct Connector {
    pub(super) known: Arc<Known>,
    route: Route,
    pub(super) events: Arc<Events>,
    /// Held while connecting, so that exchanges share one attempt and are sent in their order.
    turn: tokio::sync::Mutex<()>,
    current: Mutex<Option<Link>>,
    opened: Mutex<Vec<Opened>>,
}

/// A connection that its session has to poll, for as long as something uses it.
pub(super) type Opened = (Weak<LinkState>, Io);

/// A connection that exchanges may use.
#[derive(Clone)]
pub(super) struct Link {
    connection: MultiplexedConnection,
    /// Where it leads.
    client: Client,
    state: Arc<LinkState>,
}

pub(super) struct LinkState {
    is_subscribed: bool,
    /// The keeper was told of it, and is told when it ends.
    pub(super) in_use: AtomicBool,
    ended: AtomicBool,
    script_was_sent: AtomicBool,
}

impl LinkState {
    pub(super) fn new(is_subscribed: bool) -> Self {
        Self {
            is_subscribed,
            in_use: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            script_was_sent: AtomicBool::new(false),
        }
    }

    /// The connection has ended, and not by us.
    pub(super) fn end(&self, events: &Events) {
        if !self.ended.swap(true, Relaxed) && self.in_use.load(Relaxed) {
            events.push(Event::Disconnected);
        }
    }
}

impl Link {
    pub(super) fn is_alive(&self) -> bool {
        !self.state.ended.load(Relaxed)
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Whether the caller is the first to run the script here. It sends the text, so that what comes right behind
    /// finds the script by its digest, and none falls behind for want of it.
    pub(super) fn is_first(&self) -> bool {
        !self.state.script_was_sent.swap(true, Relaxed)
    }

    pub(super) fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }
}

impl Connector {
    pub(super) fn new(known: Arc<Known>, route: Route) -> Self {
        Self {
            known,
            route,
            events: Arc::default(),
            turn: tokio::sync::Mutex::default(),
            current: Mutex::default(),
            opened: Mutex::default(),
        }
    }

    #[cfg(feature = "cluster")]
    pub(super) fn route(&self) -> &Route {
        &self.route
    }

    /// Connections that were opened since this was last called.
    pub(super) fn take_opened(&self) -> Vec<Opened> {
        std::mem::take(&mut *locked(&self.opened))
    }

    /// The connection that was used last, unless that has ended.
    pub(super) fn current(&self) -> Option<Link> {
        locked(&self.current).clone().filter(Link::is_alive)
    }

    /// The connection to use now, made if need be.
    pub(super) async fn link(&self) -> Result<Link, StoreError> {
        let _turn = self.turn.lock().await;
        if let Some(link) = self.current().filter(|link| self.is_usable(link)) {
            return Ok(link);
        }
        let link = self.connect().await.map_err(|error| store_error(&error))?;
        let old = locked(&self.current).replace(link.clone());
        drop(old);
        Ok(link)
    }

    fn is_usable(&self, link: &Link) -> bool {
        let may_be_plain = || self.known.subscription.mode() == Mode::Suspended;
        (link.state.is_subscribed || may_be_plain()) && !self.route.has_switched()
    }

    /// Takes this connection out of use, and tells whether it was in use. Exchanges that are under way on it may still
    /// be answered.
    pub(super) fn forget(&self, link: &Link) -> bool {
        let old = locked(&self.current).take_if(|current| current.is(link));
        old.is_some()
    }

    pub(super) fn disconnect(&self) {
        let old = locked(&self.current).take();
        drop(old);
        self.route.disconnect();
    }

    /// Without time limits of its own: the caller has one for all of it.
    async fn connect(&self) -> RedisResult<Link> {
        let mut attempts = self.route.attempts();
        loop {
            let client = self.route.client().await?;
            attempts -= 1;
            match self.connect_to(client).await {
                Err(error) if error.is_io_error() && attempts > 0 => {}
                outcome => return outcome,
            }
        }
    }

    async fn connect_to(&self, client: Client) -> RedisResult<Link> {
        let link = match self.known.subscription.mode() {
            Mode::Used => self.open(client, true).await?,
            Mode::Suspected => self.open_cautiously(client).await?,
            Mode::Suspended => self.open(client, false).await?,
        };
        self.use_from_now(&link);
        self.read_policy(&mut link.connection()).await;
        Ok(link)
    }

    /// A connection whose subscription is confirmed, if it is to have one. Nobody is told when it ends, until it is used.
    pub(super) async fn open(&self, client: Client, subscribes: bool) -> RedisResult<Link> {
        let state = Arc::new(LinkState::new(subscribes));
        // Its own `io` must not keep it.
        let (events, weak) = (self.events.clone(), Arc::downgrade(&state));
        let config = socket::config().set_push_sender(move |push: PushInfo| {
            match weak.upgrade() {
                Some(state) if push.kind == PushKind::Disconnection => state.end(&events),
                _ => events.on_push(&push),
            }
            Ok::<(), ()>(())
        });
        let (connection, io) = socket::open(&client, config).await?;
        if let Some(io) = io {
            locked(&self.opened).push((Arc::downgrade(&state), io));
            self.events.poller().wake();
        }
        if subscribes {
            connection.clone().subscribe(&self.known.channel).await?;
        }
        Ok(Link {
            connection,
            client,
            state,
        })
    }

    /// Warns once of a store that may evict permits. It may not be allowed to ask.
    async fn read_policy(&self, connection: &mut MultiplexedConnection) {
        if self.known.policy_was_read.swap(true, Relaxed) {
            return;
        }
        let mut ask = cmd("CONFIG");
        ask.arg("GET").arg("maxmemory-policy");
        let policy: RedisResult<Vec<(String, String)>> = ask.query_async(connection).await;
        for (_, policy) in policy.unwrap_or_default() {
            if let Some(policy) = evicting(&policy) {
                tracing::warn!(
                    policy,
                    "the store may evict permits: set its maxmemory-policy to noeviction"
                );
            }
        }
    }

    /// What is under way on the old one is still answered there.
    pub(super) fn replace(&self, old: &Link, new: Link) {
        if self.forget(old) {
            self.use_from_now(&new);
            *locked(&self.current) = Some(new);
        }
    }

    fn use_from_now(&self, link: &Link) {
        link.state.in_use.store(true, Relaxed);
        self.events.push(Event::Connected);
    }
}
