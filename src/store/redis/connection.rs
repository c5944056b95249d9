//! The one connection: made by the exchange that needs it, shared by all, forgotten after an error.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use futures_util::FutureExt;
use redis::{
    AsyncConnectionConfig, Client, PushKind, RedisResult, aio::MultiplexedConnection, cmd,
};

use super::{
    Target,
    error::evicting,
    socket::{self, Io},
    store_error,
    wake::Events,
};
use crate::store::{Event, StoreError};

pub(super) struct Connector {
    target: Target,
    /// Where other replicas' exchanges tell of this one's promotions.
    channel: String,
    events: Arc<Events>,
    /// Held while connecting, so that exchanges share one attempt and are sent in their order.
    turn: tokio::sync::Mutex<()>,
    current: Mutex<Option<Link>>,
    /// The current connection, and those before it on which exchanges are still under way.
    polled: Mutex<Vec<Weak<LinkState>>>,
    policy_was_read: AtomicBool,
}

/// A connection with a confirmed subscription.
#[derive(Clone)]
pub(super) struct Link {
    connection: MultiplexedConnection,
    /// Where it leads.
    #[cfg_attr(not(feature = "cluster"), allow(dead_code))]
    client: Client,
    state: Arc<LinkState>,
}

#[derive(Default)]
struct LinkState {
    /// The connection is known to be cut. Shared with its `io`, which must not keep the link.
    cut: Arc<AtomicBool>,
    script_was_sent: AtomicBool,
    /// What moves its bytes. It ends with the last that uses the connection.
    io: Mutex<Option<Io>>,
}

impl LinkState {
    /// Tells whether there is anything left to be polled.
    fn poll(&self, cx: &mut Context<'_>) -> bool {
        let mut io = self.io.lock().unwrap_or_else(PoisonError::into_inner);
        if io.as_mut().is_some_and(|io| io.poll_unpin(cx).is_ready()) {
            self.cut.store(true, Relaxed);
            *io = None;
        }
        io.is_some()
    }
}

impl Link {
    fn is_usable(&self) -> bool {
        !self.state.cut.load(Relaxed)
    }

    /// Whether the caller is the first to run the script here. It sends the text, so that what comes right behind
    /// finds the script by its digest, and none falls behind for want of it.
    pub(super) fn is_first(&self) -> bool {
        !self.state.script_was_sent.swap(true, Relaxed)
    }

    pub(super) fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    #[cfg(feature = "cluster")]
    pub(super) fn client(&self) -> &Client {
        &self.client
    }
}

impl Connector {
    pub(super) fn new(target: Target, channel: String) -> Self {
        Self {
            target,
            channel,
            events: Arc::default(),
            turn: tokio::sync::Mutex::default(),
            current: Mutex::default(),
            polled: Mutex::default(),
            policy_was_read: AtomicBool::new(false),
        }
    }

    /// Moves the bytes of all connections.
    pub(super) fn poll_event(&self, cx: &mut Context<'_>) -> Poll<Event> {
        self.events.poller().register(cx.waker());
        let is_alive = |link: &Weak<LinkState>| link.upgrade().is_some_and(|link| link.poll(cx));
        self.polled().retain(is_alive);
        match self.events.next() {
            Some(event) => Poll::Ready(event),
            None => Poll::Pending,
        }
    }

    #[cfg(feature = "cluster")]
    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// The connection to use now, made if need be.
    pub(super) async fn link(&self) -> Result<Link, StoreError> {
        let _turn = self.turn.lock().await;
        let current = self.current().clone();
        if let Some(link) = current.filter(|link| link.is_usable() && !self.target.has_switched()) {
            return Ok(link);
        }
        let link = self.connect().await.map_err(|error| store_error(&error))?;
        *self.current() = Some(link.clone());
        Ok(link)
    }

    /// Takes this connection out of use, and tells whether it was in use. Exchanges that are under way on it may still
    /// be answered.
    pub(super) fn forget(&self, link: &Link) -> bool {
        let is_it = |current: &mut Link| Arc::ptr_eq(&current.state, &link.state);
        self.current().take_if(is_it).is_some()
    }

    pub(super) fn disconnect(&self) {
        *self.current() = None;
        // It would keep the runtime of a driver that has ended.
        drop(self.events.poller().take());
        self.target.disconnect();
    }

    /// Without time limits of its own: the caller has one for all of it.
    async fn connect(&self) -> RedisResult<Link> {
        let mut attempts = self.target.attempts();
        loop {
            let client = self.target.client().await?;
            attempts -= 1;
            match self.connect_to(client).await {
                Err(error) if error.is_io_error() && attempts > 0 => {}
                outcome => return outcome,
            }
        }
    }

    async fn connect_to(&self, client: Client) -> RedisResult<Link> {
        let state = Arc::<LinkState>::default();
        let (events, seen) = (self.events.clone(), state.cut.clone());
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(move |push: redis::PushInfo| {
                if push.kind == PushKind::Disconnection {
                    seen.store(true, Relaxed);
                    events.tell(Event::Disconnected);
                } else {
                    events.on_push(&push);
                }
                Ok::<(), ()>(())
            });
        let (mut connection, io) = socket::open(&client, config).await?;
        if let Some(io) = io {
            *state.io.lock().unwrap_or_else(PoisonError::into_inner) = Some(io);
            self.polled().push(Arc::downgrade(&state));
            self.events.poller().wake();
        }
        connection.subscribe(&self.channel).await?;
        self.events.tell(Event::Connected);
        self.read_policy(&mut connection).await;
        Ok(Link {
            connection,
            client,
            state,
        })
    }

    /// Warns once of a store that may evict permits. It may not be allowed to ask.
    async fn read_policy(&self, connection: &mut MultiplexedConnection) {
        if self.policy_was_read.swap(true, Relaxed) {
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

    fn polled(&self) -> MutexGuard<'_, Vec<Weak<LinkState>>> {
        self.polled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> MutexGuard<'_, Option<Link>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without a provider of cryptography rustls would panic.
#[cfg(feature = "tls")]
pub(super) fn check_tls(client: &Client) -> RedisResult<()> {
    use redis::{ConnectionAddr, ErrorKind};
    let is_tls = matches!(
        client.get_connection_info().addr(),
        ConnectionAddr::TcpTls { .. }
    );
    if is_tls && rustls::crypto::CryptoProvider::get_default().is_none() {
        let fault = "rustls has no default CryptoProvider: the application installs one";
        return Err((ErrorKind::InvalidClientConfig, fault).into());
    }
    Ok(())
}

#[cfg(not(feature = "tls"))]
pub(super) fn check_tls(_: &Client) -> RedisResult<()> {
    Ok(())
}
