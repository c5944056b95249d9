//! Makes the connection of a session when an exchange needs one, shares it between exchanges, and replaces it after an error.
//!
//! Tests: `tests.rs`.

use std::{
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    time::Duration,
};

use redis::{Client, PushInfo, PushKind, RedisResult, aio::MultiplexedConnection, cmd};
use tokio::time::{Instant, timeout};

use super::{
    error::{evicting, store_error},
    events::Events,
    known::Known,
    link::{Link, LinkState, Opened},
    locked::locked,
    socket,
    subscription::{Approach, Probed},
    target::Dialer,
};
use crate::store::{Event, StoreError};

/// The longest time of a probe.
const MAX_PROBE: Duration = Duration::from_secs(10);

pub(super) struct Connector {
    pub(super) known: Arc<Known>,
    dialer: Dialer,
    pub(super) events: Arc<Events>,
    /// Held while connecting, so that exchanges share one attempt and are sent in their order.
    connecting: tokio::sync::Mutex<()>,
    current: Mutex<Option<Link>>,
    opened: Mutex<Vec<Opened>>,
}

impl Connector {
    pub(super) fn new(known: Arc<Known>, dialer: Dialer) -> Self {
        Self {
            known,
            dialer,
            events: Arc::default(),
            connecting: tokio::sync::Mutex::default(),
            current: Mutex::default(),
            opened: Mutex::default(),
        }
    }

    #[cfg(feature = "cluster")]
    pub(super) fn dialer(&self) -> &Dialer {
        &self.dialer
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
        let _connecting = self.connecting.lock().await;
        if let Some(link) = self.current().filter(|link| self.is_usable(link)) {
            return Ok(link);
        }
        let link = self.connect().await.map_err(|error| store_error(&error))?;
        let old = locked(&self.current).replace(link.clone());
        drop(old);
        Ok(link)
    }

    fn is_usable(&self, link: &Link) -> bool {
        let may_be_plain = || self.known.subscription.approach() == Approach::Plain;
        (link.state.is_subscribed || may_be_plain()) && !self.dialer.has_switched()
    }

    /// Takes this connection out of use, and returns whether it was in use. Its exchanges in flight may still be
    /// answered.
    pub(super) fn forget(&self, link: &Link) -> bool {
        let old = locked(&self.current).take_if(|current| current.is(link));
        old.is_some()
    }

    pub(super) fn disconnect(&self) {
        let old = locked(&self.current).take();
        drop(old);
        self.dialer.disconnect();
    }

    /// Without time limits of its own: the caller has one for the whole exchange.
    async fn connect(&self) -> RedisResult<Link> {
        let mut attempts = self.dialer.attempts();
        loop {
            let client = self.dialer.client().await?;
            attempts -= 1;
            match self.connect_to(client).await {
                Err(error) if error.is_io_error() && attempts > 0 => {}
                outcome => return outcome,
            }
        }
    }

    async fn connect_to(&self, client: Client) -> RedisResult<Link> {
        let link = match self.known.subscription.approach() {
            Approach::Subscribe => self.open(client, true).await?,
            Approach::Probe => self.open_cautiously(client).await?,
            Approach::Plain => self.open(client, false).await?,
        };
        self.use_from_now(&link);
        self.read_policy(&mut link.connection()).await;
        Ok(link)
    }

    /// A connection whose subscription is confirmed, if it is to have one. Until it is used, its end is not reported.
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
            let is_counted = self.is_counted(&mut connection.clone()).await?;
            state.is_counted.store(is_counted, Relaxed);
        }
        Ok(Link::new(connection, client, state))
    }

    /// Whether the server counts this subscription. That may be forbidden, or a proxy may stand between.
    async fn is_counted(&self, connection: &mut MultiplexedConnection) -> RedisResult<bool> {
        let mut count = cmd("PUBSUB");
        count.arg("NUMSUB").arg(&self.known.channel);
        match count.query_async::<(String, u64)>(connection).await {
            Ok((_, subscribers)) => Ok(subscribers > 0),
            Err(error) if error.is_io_error() => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// A connection that passed the probe, or has no subscription.
    pub(super) async fn open_cautiously(&self, client: Client) -> RedisResult<Link> {
        let subscription = &self.known.subscription;
        let link = self.open(client.clone(), true).await?;
        if !link.ends_at_a_large_reply().await.unwrap_or(false) {
            subscription.note(Probed::Passed, Instant::now());
            return Ok(link);
        }
        let plain = self.open(client, false).await?;
        subscription.note(Probed::Ended, Instant::now());
        Ok(plain)
    }

    /// The connection without a subscription, if it is time to probe one.
    pub(super) fn probe_due(&self, now: Instant) -> Option<Link> {
        let is_due = self.known.subscription.is_due(now);
        is_due.then(|| self.current()).flatten()
    }

    /// Probes a subscription on another connection to the same server, while exchanges use the one that has none.
    pub(super) async fn probe_subscription(&self, plain: &Link) {
        let probe = self.subscribed(plain.client().clone());
        let probed = match timeout(MAX_PROBE, probe).await {
            Ok(Ok(link)) => {
                self.replace(plain, link);
                Probed::Passed
            }
            Ok(Err(probed)) if plain.is_alive() => probed,
            _ => Probed::Unknown,
        };
        self.known.subscription.note(probed, Instant::now());
    }

    async fn subscribed(&self, client: Client) -> Result<Link, Probed> {
        let link = self.open(client, true).await;
        let link = link.map_err(|error| match store_error(&error).is_outage() {
            true => Probed::Unknown,
            false => Probed::Refused,
        })?;
        match link.ends_at_a_large_reply().await {
            Ok(false) => Ok(link),
            Ok(true) => Err(Probed::Ended),
            Err(_) => Err(Probed::Unknown),
        }
    }

    /// Logs one warning of a store that may evict permits. The server may forbid the question.
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

    /// Exchanges in flight on the old one are still answered there.
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
