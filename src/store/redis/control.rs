//! A connection beside the exchanges: single commands, and messages by publish and subscribe.
//!
//! It is separate from the connection of the exchanges, so that a flood of messages or a large answer cannot delay
//! them. The connection leads to the node of one key (in a cluster, all its commands concern keys of the same hash
//! slot), and a task of the current runtime drives it. After an error the connection is dropped, and the next command
//! reconnects. A command on another runtime also reconnects if the connection's runtime has ended or is stalled.
//!
//! Tests: below; in a cluster: `operators/tests/operate/stores.rs`.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::try_join;
use redis::{
    Client, Cmd, FromRedisValue, PushInfo, PushKind, RedisResult, Value,
    aio::MultiplexedConnection, cmd, from_redis_value,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc},
    time::timeout,
};

use super::{
    error::{is_cut, no_answer, store_error},
    lookup::Lookups,
    socket,
    target::{Dialer, MAX_REDIRECTS, NODES_DISAGREE, StoreTarget},
};
use crate::{store::StoreError, sync::locked};

/// How soon another runtime must prove that it drives the connection.
const DRIVEN_WITHIN: Duration = Duration::from_millis(100);

/// Sends commands and receives messages of channels.
pub struct ControlConnection {
    dialer: Dialer,
    /// Time limit of a command, including connecting.
    patience: Duration,
    /// Held while connecting, so that commands share one attempt.
    connecting: tokio::sync::Mutex<()>,
    current: Mutex<Option<ControlLink>>,
    /// Channels to which each new connection subscribes.
    channels: Mutex<BTreeSet<String>>,
    /// Messages received. Those that do not fit are dropped unread.
    inbox: mpsc::Sender<Vec<u8>>,
    /// Maximum size of a message.
    max_bytes: usize,
    ended: Arc<Notify>,
    lookups: Lookups,
}

#[derive(Clone)]
struct ControlLink {
    connection: MultiplexedConnection,
    client: Client,
    has_ended: Arc<AtomicBool>,
    /// Drives the connection.
    runtime: Handle,
}

impl ControlLink {
    /// Whether the connection makes progress: its runtime may have ended or stalled.
    async fn is_driven(&self) -> bool {
        if Handle::current().id() == self.runtime.id() {
            return true;
        }
        let sign = self.runtime.spawn(async {});
        matches!(timeout(DRIVEN_WITHIN, sign).await, Ok(Ok(())))
    }
}

impl ControlConnection {
    /// Creates a connection that is not open yet. In a cluster `target` is any part. `patience` is the time limit of a
    /// command.
    pub fn new(target: &StoreTarget, patience: Duration) -> Self {
        Self::with_inbox(target, patience, 1, 0).0
    }

    /// Creates a connection that also receives messages: it keeps up to `capacity` of up to `max_bytes` each, and drops
    /// the others.
    pub fn with_inbox(
        target: &StoreTarget,
        patience: Duration,
        capacity: usize,
        max_bytes: usize,
    ) -> (Self, mpsc::Receiver<Vec<u8>>) {
        let (inbox, received) = mpsc::channel(capacity);
        let control = Self {
            dialer: target.dialer(),
            patience,
            connecting: tokio::sync::Mutex::default(),
            current: Mutex::default(),
            channels: Mutex::default(),
            inbox,
            max_bytes,
            ended: Arc::default(),
            lookups: Lookups::default(),
        };
        (control, received)
    }

    /// The time of the node that received the last command, in milliseconds since 1970.
    ///
    /// # Errors
    ///
    /// See [`run`](Self::run).
    pub async fn time_ms(&self) -> Result<u64, StoreError> {
        let (seconds, micros): (u64, u64) = self.run(&cmd("TIME")).await?;
        Ok(seconds.saturating_mul(1_000).saturating_add(micros / 1_000))
    }

    /// Runs a command at its key's node. A failed command is not retried: it may have run.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer in time or refuses, or if the answer cannot be read.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the command may still run.
    pub async fn run<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, StoreError> {
        let value = self.in_time(self.run_at_its_node(command)).await?;
        from_redis_value(value).map_err(|_| StoreError::unreadable())
    }

    /// Connects, unless a connection is open.
    ///
    /// # Errors
    ///
    /// See [`run`](Self::run).
    pub async fn connect_now(&self) -> Result<(), StoreError> {
        self.in_time(async { self.link().await.map(drop) }).await
    }

    /// Subscribes this connection and all later ones to a channel. After an error the channel is not subscribed.
    ///
    /// # Errors
    ///
    /// See [`run`](Self::run).
    pub async fn subscribe(&self, channel: &str) -> Result<(), StoreError> {
        let subscribe = async {
            let link = self.link().await?;
            link.connection.clone().subscribe(channel).await?;
            locked(&self.channels).insert(channel.to_owned());
            Ok(())
        };
        self.in_time(subscribe).await
    }

    /// Publishes a message to the subscribers at all nodes of a cluster.
    ///
    /// # Errors
    ///
    /// See [`run`](Self::run).
    pub async fn publish(&self, channel: &str, message: &[u8]) -> Result<(), StoreError> {
        let mut publish = cmd("PUBLISH");
        publish.arg(channel).arg(message);
        self.run(&publish).await
    }

    /// Whether a connection is open, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.current().is_some()
    }

    /// Completes when a connection has ended or an operation has failed since the last call, or when the server was replaced.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn ended(&self) {
        tokio::select! {
            () = self.ended.notified() => {}
            () = self.dialer.switched() => {}
        }
    }

    async fn in_time<T>(
        &self,
        work: impl Future<Output = RedisResult<T>>,
    ) -> Result<T, StoreError> {
        let error = match timeout(self.patience, work).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => store_error(&error),
            Err(_) => {
                let is_connected = self.is_connected();
                // Do not reuse a connection that does not answer: it may be half open.
                self.disconnect();
                self.lookups.failed();
                no_answer(self.patience, is_connected)
            }
        };
        // With TLS, a connection that is given up does not tell its end.
        self.ended.notify_one();
        Err(error.at(&self.dialer.address()))
    }

    async fn run_at_its_node(&self, command: &Cmd) -> RedisResult<Value> {
        for _ in 0..MAX_REDIRECTS {
            let link = self.link().await?;
            let outcome = command.query_async(&mut link.connection.clone()).await;
            let (again, forget) = (|_| command.clone(), || self.forget(&link));
            let followed = (self.dialer).follow(outcome, &link.client, again, forget);
            let Some(outcome) = followed.await else {
                continue;
            };
            if let Err(error) = &outcome
                && store_error(error).is_outage()
                && self.forget(&link)
                && !is_cut(error)
            {
                self.lookups.failed();
                self.dialer.search_again();
            }
            return outcome;
        }
        Err((redis::ErrorKind::Io, NODES_DISAGREE).into())
    }

    fn current(&self) -> Option<ControlLink> {
        let current = locked(&self.current).clone();
        current.filter(|link| !link.has_ended.load(Relaxed) && !self.dialer.has_switched())
    }

    async fn link(&self) -> RedisResult<ControlLink> {
        let _connecting = self.connecting.lock().await;
        if let Some(link) = self.current()
            && link.is_driven().await
        {
            return Ok(link);
        }
        let link = self.dialer.connect(|client| self.open(client)).await;
        let link = link.inspect_err(|_| self.lookups.failed())?;
        let old = locked(&self.current).replace(link.clone());
        drop(old);
        Ok(link)
    }

    async fn open(&self, client: Client) -> RedisResult<ControlLink> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (of_link, ended) = (has_ended.clone(), self.ended.clone());
        let end = move || {
            of_link.store(true, Relaxed);
            ended.notify_one();
        };
        let (inbox, max_bytes, on_push) = (self.inbox.clone(), self.max_bytes, end.clone());
        let config = socket::config().set_push_sender(move |push: PushInfo| {
            match (push.kind, &push.data[..]) {
                (PushKind::Message, [_channel, Value::BulkString(payload)])
                    if payload.len() <= max_bytes =>
                {
                    let _ = inbox.try_send(payload.clone());
                }
                (PushKind::Disconnection, _) => on_push(),
                _ => {}
            }
            Ok::<(), ()>(())
        });
        let (connection, io) = socket::open(&client, config, &self.lookups).await?;
        if let Some(io) = io {
            tokio::spawn(async move {
                io.await;
                end();
            });
        }
        let channels = locked(&self.channels).clone();
        let subscribed = async {
            for channel in channels {
                connection.clone().subscribe(channel).await?;
            }
            RedisResult::Ok(())
        };
        try_join(self.dialer.check(connection.clone()), subscribed).await?;
        Ok(ControlLink {
            connection,
            client,
            has_ended,
            runtime: Handle::current(),
        })
    }

    /// Takes this connection out of use, and returns whether it was in use.
    fn forget(&self, link: &ControlLink) -> bool {
        let is_it = |current: &mut ControlLink| Arc::ptr_eq(&current.has_ended, &link.has_ended);
        locked(&self.current).take_if(is_it).is_some()
    }

    /// Closes the connection. The next command opens another.
    pub fn disconnect(&self) {
        let old = locked(&self.current).take();
        drop(old);
        self.dialer.disconnect();
    }
}

impl fmt::Debug for ControlConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlConnection").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::{super::target::Dialer, *};
    use crate::{
        redis_server::{GUARD, RedisServer},
        store::StoreErrorKind,
    };

    fn control(
        server: &RedisServer,
        capacity: usize,
    ) -> (ControlConnection, mpsc::Receiver<Vec<u8>>) {
        let target = StoreTarget::open(&server.url()).expect("a URL");
        ControlConnection::with_inbox(&target, GUARD, capacity, 8)
    }

    async fn next(received: &mut mpsc::Receiver<Vec<u8>>) -> Vec<u8> {
        let message = timeout(GUARD, received.recv()).await;
        message.expect("in time").expect("an inbox")
    }

    /// Otherwise its name would never lead to the other server.
    #[tokio::test]
    async fn a_server_that_ends_the_handshake_is_left_out() {
        let server = RedisServer::start();
        let target = StoreTarget::open("redis://redis.example").expect("a URL");
        let control = ControlConnection::new(&target, GUARD);
        (control.lookups)
            .know_a_faulty_server_and("redis.example", server.port())
            .await;
        let _ended = control.connect_now().await;
        control.connect_now().await.expect("another server");
        control.disconnect();
        control.connect_now().await.expect("it works");
    }

    /// With TLS nothing else tells it.
    #[tokio::test]
    async fn a_connection_that_is_given_up_has_ended() {
        let server = RedisServer::start();
        let target = StoreTarget::open(&server.url()).expect("a URL");
        let control = ControlConnection::new(&target, Duration::from_secs(1));
        while control.connect_now().await.is_err() {}
        while control.ended().now_or_never().is_some() {}
        server.pause();
        let error = control.time_ms().await.expect_err("it stands still");
        assert!(error.is_outage() && !control.is_connected());
        assert!(control.ended().now_or_never().is_some());
        server.resume();
    }

    #[tokio::test]
    async fn commands_scripts_and_messages() {
        let server = RedisServer::start();
        let (control, mut received) = control(&server, 4);
        assert!(!control.is_connected());
        let script = "redis.call('SET', KEYS[1], ARGV[1]); return redis.call('GET', KEYS[1])";
        let mut eval = cmd("EVAL");
        eval.arg(script).arg(1).arg("turnstile:control").arg("text");
        assert_eq!(control.run::<String>(&eval).await.unwrap(), "text");
        let error = control.run::<u64>(&eval).await.unwrap_err();
        assert_eq!(error.message, StoreError::unreadable().message);
        control.subscribe("turnstile:answer:1").await.unwrap();
        control
            .publish("turnstile:answer:1", b"hello")
            .await
            .unwrap();
        assert_eq!(next(&mut received).await, b"hello");
    }

    /// It may go on to answer, and to get no news.
    #[tokio::test]
    async fn a_replaced_server_is_left() {
        let target = StoreTarget::open("redis+sentinel://localhost/main").expect("a URL");
        let control = ControlConnection::new(&target, GUARD);
        assert!(control.ended().now_or_never().is_none());
        let Dialer::Sentinel(dialer) = &control.dialer else {
            unreachable!("its URL")
        };
        dialer.switch();
        assert!(control.ended().now_or_never().is_some());
    }

    /// Messages that are too long or too many are dropped unread.
    #[tokio::test]
    async fn messages_are_bounded_in_size_and_number() {
        let server = RedisServer::start();
        let (control, mut received) = control(&server, 2);
        control.subscribe("turnstile:control:0").await.unwrap();
        for message in ["123456789", "1", "2", "3"] {
            server.cli(&["PUBLISH", "turnstile:control:0", message]);
        }
        // The answer follows the messages on the connection.
        control.run::<()>(&cmd("PING")).await.unwrap();
        assert_eq!(next(&mut received).await, b"1");
        assert_eq!(next(&mut received).await, b"2");
        assert!(received.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_new_connection_subscribes_anew() {
        let mut server = RedisServer::start();
        let (control, mut received) = control(&server, 2);
        control.subscribe("turnstile:control:0").await.unwrap();
        server.restart();
        timeout(GUARD, control.ended())
            .await
            .expect("its end is noticed");
        assert!(!control.is_connected());
        control.run::<()>(&cmd("PING")).await.unwrap();
        server.cli(&["PUBLISH", "turnstile:control:0", "again"]);
        assert_eq!(next(&mut received).await, b"again");
    }

    /// A forbidden channel fails its own subscription only.
    #[tokio::test]
    async fn a_forbidden_channel_leaves_the_connection_in_use() {
        let server = RedisServer::start();
        let user = [
            "ACL",
            "SETUSER",
            "default",
            "resetchannels",
            "&turnstile:wake:*",
        ];
        server.cli(&user);
        let (control, _received) = control(&server, 2);
        let error = control.subscribe("turnstile:control:0").await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Permission);
        control.run::<()>(&cmd("PING")).await.unwrap();
        assert!(control.is_connected());
    }

    #[tokio::test]
    async fn a_silent_server_is_an_outage() {
        let server = RedisServer::start();
        let target = StoreTarget::open(&server.url()).expect("a URL");
        let control = ControlConnection::new(&target, Duration::from_millis(100));
        let connects = async { while control.run::<()>(&cmd("PING")).await.is_err() {} };
        timeout(GUARD, connects).await.expect("it answers");
        server.pause();
        let error = control.run::<()>(&cmd("PING")).await.unwrap_err();
        assert!(error.is_outage());
        assert!(!control.is_connected());
        server.resume();
    }
}
