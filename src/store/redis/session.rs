//! A session, polled by the driver: sends each exchange on its connection, or in a cluster to its key's node, and
//! drives all its connections. Its [`Exchanger`] makes and replaces them.
//!
//! Tests: below, `tests.rs`; in a cluster: `tests/cluster.rs`.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, atomic::Ordering::Relaxed},
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt, join, join3, try_join};
use redis::{
    Client, Cmd, ErrorKind, PushInfo, PushKind, RedisResult, Script, ServerErrorKind, Value, cmd,
};
use tokio::time::{Instant, timeout};

use super::{
    codec::{decode, encode},
    error::{evicting, is_cut, is_unknown_script, no_answer, store_error},
    events::Events,
    known::Known,
    link::{LinkState, Opened, SessionLink},
    lookup::Lookups,
    socket,
    target::{Dialer, MAX_REDIRECTS, NODES_DISAGREE},
};
use crate::{
    ledger::{EXCHANGE_LUA, Exchange, HELLO_LUA, Reply},
    store::{COUNT_INTERVAL, CountTimer, Event, Session, StoreError},
    sync::locked,
};

static EXCHANGE: LazyLock<Script> = LazyLock::new(|| Script::new(&EXCHANGE_LUA));
static HELLO: LazyLock<Script> = LazyLock::new(|| Script::new(&HELLO_LUA));
/// Time limit of a question beside the exchanges.
const MAX_QUESTION: Duration = Duration::from_secs(10);

pub(super) struct RedisSession {
    exchanger: Arc<Exchanger>,
    connections: Vec<Opened>,
    count_timer: CountTimer,
    /// A running count of the replicas, or the subscription after a pause.
    question: Option<BoxFuture<'static, ()>>,
}

impl RedisSession {
    pub(super) fn new(known: Arc<Known>, dialer: Dialer) -> Self {
        Self {
            exchanger: Arc::new(Exchanger {
                known,
                dialer,
                events: Arc::default(),
                connecting: tokio::sync::Mutex::default(),
                current: Mutex::default(),
                opened: Mutex::default(),
                lookups: Lookups::default(),
            }),
            connections: Vec::new(),
            count_timer: CountTimer::default(),
            question: None,
        }
    }

    /// Beside the exchanges, counts the replicas now and then, and subscribes once a pause without a subscription is over.
    fn poll_question(&mut self, cx: &mut Context<'_>) {
        if let Some(question) = &mut self.question
            && question.poll_unpin(cx).is_ready()
        {
            self.question = None;
        }
        if self.question.is_none()
            && self.count_timer.is_due()
            && self.poll_count_timer().is_ready()
        {
            let exchanger = self.exchanger.clone();
            let resumes = exchanger.known.subscription.resumes(Instant::now());
            self.question = exchanger.current().map(|link| {
                let question = async move {
                    if resumes {
                        exchanger.subscribe_again(&link).await;
                    } else if link.listens() {
                        exchanger.count_replicas(&link).await;
                    }
                };
                question.boxed()
            });
            self.poll_question(cx);
        }
    }

    /// The timer wakes whichever task polls the session, so it is not polled each time.
    fn poll_count_timer(&mut self) -> Poll<()> {
        let waker = Waker::from(self.exchanger.events.clone());
        (self.count_timer).poll_due(&mut Context::from_waker(&waker))
    }

    /// Drives all connections in use.
    fn poll_connections(&mut self, cx: &mut Context<'_>) {
        let exchanger = &self.exchanger;
        self.connections.append(&mut locked(&exchanger.opened));
        self.connections.retain_mut(|(link, io)| {
            let Some(link) = link.upgrade() else {
                return false;
            };
            let has_ended = io.poll_unpin(cx).is_ready();
            if has_ended {
                link.end(&exchanger.events);
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
        let exchanger = self.exchanger.clone();
        async move { exchanger.exchange(&exchange).await }.boxed()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        self.exchanger.events.poller.register(cx.waker());
        self.poll_question(cx);
        self.poll_connections(cx);
        let Some(event) = self.exchanger.events.next() else {
            return Poll::Pending;
        };
        match event {
            Event::Connected => {
                let pause = self.exchanger.known.subscription.pause(Instant::now());
                self.count_timer.start(pause.unwrap_or(COUNT_INTERVAL));
                let _is_pending = self.poll_count_timer();
            }
            Event::Disconnected => self.exchanger.known.subscription.note_end(Instant::now()),
            _ => {}
        }
        Poll::Ready(event)
    }

    fn disconnect(&mut self) {
        self.question = None;
        self.exchanger.disconnect();
    }

    fn no_answer(&self, patience: Duration) -> StoreError {
        let current = self.exchanger.current();
        let silence = no_answer(patience, current.is_some());
        let dialer = &self.exchanger.dialer;
        match current {
            Some(link) => silence.at(&link.address()),
            None => {
                let fault = dialer.fault().map(|fault| store_error(&fault));
                let fault = fault.filter(|fault| !fault.is_outage());
                fault.unwrap_or(silence).at(&dialer.address())
            }
        }
    }
}

/// Runs the exchanges of a session; their futures share it. A hello opens the connection, which is replaced after an
/// error.
struct Exchanger {
    known: Arc<Known>,
    dialer: Dialer,
    events: Arc<Events>,
    /// Held while connecting, so that exchanges share one attempt and are sent in order.
    connecting: tokio::sync::Mutex<()>,
    current: Mutex<Option<SessionLink>>,
    opened: Mutex<Vec<Opened>>,
    lookups: Lookups,
}

/// The command that calls the script of an exchange, and the script's text or digest.
fn script_of(exchange: &Exchange, by_text: bool) -> (&'static str, &'static str) {
    match (by_text, exchange.is_empty()) {
        (true, true) => ("EVAL", &HELLO_LUA),
        (true, false) => ("EVAL", &EXCHANGE_LUA),
        (false, true) => ("EVALSHA", HELLO.get_hash()),
        (false, false) => ("EVALSHA", EXCHANGE.get_hash()),
    }
}

/// Takes a connection out of use, if there is one. Exchanges in flight may keep it open until after the next one is made,
/// and its end would be taken for that of the next one.
fn leave(link: Option<SessionLink>) -> bool {
    link.inspect(|link| link.state.in_use.store(false, Relaxed))
        .is_some()
}

/// Exchanges.
impl Exchanger {
    /// Runs an exchange, in a cluster at its key's node.
    async fn exchange(&self, exchange: &Exchange) -> Result<Reply, StoreError> {
        for _ in 0..MAX_REDIRECTS {
            let link = self.link(exchange).await?;
            let outcome = self.run(&link, exchange).await;
            // The subscription is at this node: the other one counts no subscribers of ours.
            let command = |by_text| self.encode(exchange, script_of(exchange, by_text), false);
            let forget = || self.forget(&link);
            let followed = (self.dialer).follow(outcome, &link.client, command, forget);
            if let Some(outcome) = followed.await {
                return self.read(&link, exchange, outcome);
            }
            if !exchange.is_hello() {
                let moved = StoreError::outage("a key has moved to another node");
                return Err(moved.at(&self.dialer.address()));
            }
        }
        Err(StoreError::outage(NODES_DISAGREE).at(&self.dialer.address()))
    }

    async fn run(&self, link: &SessionLink, exchange: &Exchange) -> RedisResult<Value> {
        if link.take_first_call() {
            return self.run_first(link, exchange).await;
        }
        let mut connection = link.connection.clone();
        let mut by_text = !exchange.is_empty() && link.take_lacking();
        loop {
            let resent = link.state.resent.load(Relaxed);
            let command = self.encode(exchange, script_of(exchange, by_text), link.listens());
            match command.query_async(&mut connection).await {
                // All exchanges in flight find this out. The first of them sends the text, and the others follow it on the
                // same connection. The text of a hello is short.
                Err(error) if is_unknown_script(&error) && !by_text => {
                    by_text = exchange.is_empty() || link.take_resending(resent);
                }
                outcome => return outcome,
            }
        }
    }

    /// Runs a hello, whose text is short. The same hello by the digest of the other script shows, without a further round
    /// trip, whether the server has the text from another replica.
    async fn run_first(&self, link: &SessionLink, hello: &Exchange) -> RedisResult<Value> {
        let listens = link.listens();
        let command = self.encode(hello, ("EVAL", &HELLO_LUA), listens);
        let other = self.encode(hello, ("EVALSHA", EXCHANGE.get_hash()), listens);
        let (mut first, mut second) = (link.connection.clone(), link.connection.clone());
        let (outcome, found) = join(
            command.query_async(&mut first),
            other.query_async::<Value>(&mut second),
        )
        .await;
        let lacks_script = found.is_err_and(|error| is_unknown_script(&error));
        link.state.lacks_script.store(lacks_script, Relaxed);
        outcome
    }

    fn read(
        &self,
        link: &SessionLink,
        exchange: &Exchange,
        outcome: RedisResult<Value>,
    ) -> Result<Reply, StoreError> {
        let was_cut = outcome.as_ref().is_err_and(is_cut);
        let value = outcome.map_err(|error| store_error(&error));
        let reply = value.and_then(|value| decode(exchange, value));
        let reply = reply.map_err(|error| error.at(&link.address()));
        if reply.is_err() {
            // Whatever the error, the next connection may lead to another server. A connection that was cut is no reason
            // to look for another node.
            if self.forget(link) && !was_cut {
                self.lookups.failed();
                self.dialer.search_again();
            }
        }
        reply
    }

    fn encode(&self, exchange: &Exchange, (command, script): (&str, &str), listens: bool) -> Cmd {
        let (wake_prefix, idle_key) = (&self.known.wake_prefix, self.known.idle_key.as_deref());
        encode(command, script, wake_prefix, idle_key, listens, exchange)
    }
}

/// Connections.
impl Exchanger {
    /// The latest connection, unless it has ended.
    fn current(&self) -> Option<SessionLink> {
        locked(&self.current).clone().filter(SessionLink::is_alive)
    }

    /// The connection for an exchange. A hello opens it if necessary, and is its first exchange.
    async fn link(&self, exchange: &Exchange) -> Result<SessionLink, StoreError> {
        let _connecting = self.connecting.lock().await;
        if let Some(link) = self.current().filter(|_| !self.dialer.has_switched()) {
            return Ok(link);
        }
        if !exchange.is_hello() {
            return Err(StoreError::outage("the connection has ended").at(&self.dialer.address()));
        }
        let subscribes = self.known.subscription.begins(Instant::now());
        // Without a time limit: the caller limits the whole exchange.
        let link = self.dialer.connect(|client| self.open(client, subscribes));
        let link = link.await.inspect_err(|_| self.lookups.failed());
        let link = link.map_err(|error| store_error(&error).at(&self.dialer.address()))?;
        let old = locked(&self.current).replace(link.clone());
        leave(old);
        self.use_from_now(&link);
        Ok(link)
    }

    /// Takes this connection out of use, and returns whether it was in use. Exchanges in flight may still be answered.
    fn forget(&self, link: &SessionLink) -> bool {
        let is_it = |current: &mut SessionLink| Arc::ptr_eq(&current.state, &link.state);
        let old = locked(&self.current).take_if(is_it);
        leave(old)
    }

    fn disconnect(&self) {
        let old = locked(&self.current).take();
        leave(old);
        self.lookups.failed();
        self.dialer.disconnect();
    }

    /// Opens a connection and awaits the confirmation of its subscription, if any. Its end is not reported before its
    /// first use.
    async fn open(&self, client: Client, subscribes: bool) -> RedisResult<SessionLink> {
        let state = Arc::<LinkState>::default();
        // A strong reference here would keep the connection's state alive.
        let (events, weak) = (self.events.clone(), Arc::downgrade(&state));
        let known = self.known.clone();
        let config = socket::config().set_push_sender(move |push: PushInfo| {
            match weak.upgrade() {
                Some(state) if push.kind == PushKind::Disconnection => state.end(&events),
                _ => events.on_push(&push, &known),
            }
            Ok::<(), ()>(())
        });
        let (connection, io) = socket::open(&client, config, &self.lookups).await?;
        if let Some(io) = io {
            locked(&self.opened).push((Arc::downgrade(&state), io));
            self.events.poller.wake();
        }
        let link = SessionLink {
            connection,
            client,
            state,
        };
        self.confirm(&link, subscribes).await?;
        Ok(link)
    }

    /// Subscribes if required, checks the server, and asks the first connection's questions, in one round trip: a few round
    /// trips to a distant store may exceed an exchange's time limit.
    async fn confirm(&self, link: &SessionLink, subscribes: bool) -> RedisResult<()> {
        let check = self.dialer.check(link.connection.clone());
        let subscribed = async {
            if subscribes {
                self.subscribe(link).await?;
            }
            Ok(())
        };
        let (subscribed, (), checked) = join3(subscribed, self.read_policy(link), check).await;
        checked.and(subscribed)
    }

    async fn subscribe(&self, link: &SessionLink) -> RedisResult<()> {
        let mut subscriber = link.connection.clone();
        let channels = [&self.known.channel, &self.known.channel_of_all];
        // In this order: the count has to include this subscription.
        let subscription = subscriber.subscribe(&channels);
        let ((), counted) = try_join(subscription, self.subscribers(link)).await?;
        let [own, all] = counted.unwrap_or_default();
        link.state.is_counted.store(own > 0, Relaxed);
        link.state.replicas.store(all, Relaxed);
        Ok(())
    }

    /// Subscribes the connection in use. If the server refuses, the next connection reports the error.
    async fn subscribe_again(&self, link: &SessionLink) {
        match timeout(MAX_QUESTION, self.subscribe(link)).await {
            Ok(Ok(())) => {
                // Wake-ups, in the pause.
                self.events.push(Event::Missed);
                self.report_count(link.state.replicas.load(Relaxed));
            }
            Ok(Err(error)) if !store_error(&error).is_outage() => {
                self.forget(link);
            }
            _ => link.state.end(&self.events),
        }
    }

    /// The numbers of subscribers, at this server, of this replica's channel and of the channel of all replicas: 0 if a
    /// proxy is in between, and `None` if the question is forbidden.
    async fn subscribers(&self, link: &SessionLink) -> RedisResult<Option<[u32; 2]>> {
        let channels = [&self.known.channel, &self.known.channel_of_all];
        let mut count = cmd("PUBSUB");
        count.arg("NUMSUB").arg(&channels);
        let mut connection = link.connection.clone();
        let counts: RedisResult<HashMap<String, u32>> = count.query_async(&mut connection).await;
        match counts {
            Ok(counts) => {
                let count = |channel: &String| counts.get(channel).copied().unwrap_or(0);
                Ok(Some(channels.map(count)))
            }
            Err(error) if is_cut(&error) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Reports the number of connected replicas, if the server sends it in time. A connection whose subscription has ended
    /// alone is over: wake-ups would be lost, and other replicas pass over the waiters of this one. So is one to a node
    /// whose hash slot has moved: the others are counted elsewhere.
    async fn count_replicas(&self, link: &SessionLink) {
        let answers = try_join(self.subscribers(link), self.has_moved(link));
        let Ok(Ok((counts, has_moved))) = timeout(MAX_QUESTION, answers).await else {
            return;
        };
        if has_moved || counts.is_some_and(|[own, _]| own == 0 && link.listens()) {
            link.state.end(&self.events);
        } else if let Some([_, replicas]) = counts {
            self.report_count(replicas);
        }
    }

    /// Whether another node has the hash slot now. While there is no work, no exchange is redirected.
    async fn has_moved(&self, link: &SessionLink) -> RedisResult<bool> {
        let Some(key) = &self.known.idle_key else {
            return Ok(false);
        };
        let mut connection = link.connection.clone();
        let outcome: RedisResult<Value> = cmd("GET").arg(key).query_async(&mut connection).await;
        let moved = ErrorKind::Server(ServerErrorKind::Moved);
        Ok(outcome.is_err_and(|error| error.kind() == moved))
    }

    fn report_count(&self, replicas: u32) {
        if replicas > 0 {
            self.events.push(Event::Counted(replicas));
        }
    }

    /// Asks whether the store may evict permits, unless the answer is known from a connection that was used. Of several
    /// connections that are opened, such as one to a replaced primary, most are never used. The server may forbid the
    /// question.
    async fn read_policy(&self, link: &SessionLink) {
        if self.known.policy_was_read.load(Relaxed) {
            return;
        }
        let mut ask = cmd("CONFIG");
        ask.arg("GET").arg("maxmemory-policy");
        let mut connection = link.connection.clone();
        let policy: RedisResult<Vec<(String, String)>> = ask.query_async(&mut connection).await;
        if !policy.as_ref().is_err_and(is_cut) {
            let mut policies = policy.unwrap_or_default().into_iter();
            let evicts = policies.find_map(|(_, policy)| evicting(&policy));
            let _ = link.state.evicts.set(evicts);
        }
    }

    fn use_from_now(&self, link: &SessionLink) {
        link.state.in_use.store(true, Relaxed);
        self.events.push(Event::Connected);
        self.report_count(link.state.replicas.load(Relaxed));
        if let Some(evicts) = link.state.evicts.get()
            && !self.known.policy_was_read.swap(true, Relaxed)
            && let Some(policy) = evicts
        {
            tracing::warn!(
                policy,
                "the store may evict permits: set its maxmemory-policy to noeviction"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{self, poll_fn},
        pin::pin,
        sync::atomic::Ordering::Relaxed,
        task::Waker,
    };

    use super::*;
    use crate::{
        ledger::{Batch, ReplicaId},
        redis_server::RedisServer,
        store::redis::{RedisStore, StoreTarget},
    };

    fn exchange(batches: Vec<Batch>) -> Arc<Exchange> {
        Arc::new(Exchange {
            replica: ReplicaId::from_bits(1),
            lease_ms: 1_000,
            respond_ms: 1_000,
            waiter_ttl_ms: 1_000,
            not_after_us: u64::MAX,
            batches,
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
            expected: None,
        })
    }

    fn session(url: &str) -> RedisSession {
        let target = StoreTarget::open(url).unwrap();
        let store = RedisStore::new(target, "test", ReplicaId::from_bits(1));
        store.session(crate::part::Part::default())
    }

    async fn drive<T>(session: &mut RedisSession, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let step = |cx: &mut Context<'_>| {
            while session.poll_event(cx).is_ready() {}
            future.as_mut().poll(cx)
        };
        poll_fn(step).await
    }

    #[tokio::test]
    async fn a_server_that_ends_the_handshake_is_left_out() {
        let server = RedisServer::start();
        let mut session = session("redis://redis.example");
        let exchanger = session.exchanger.clone();
        (exchanger.lookups)
            .know_a_faulty_server_and("redis.example", server.port())
            .await;
        let hello = session.exchange(exchange(Vec::new()));
        let _ended = drive(&mut session, hello).await;
        let hello = session.exchange(exchange(Vec::new()));
        drive(&mut session, hello).await.expect("another server");
    }

    /// G4: as a proxy may lose it. Wake-ups would not arrive any more.
    #[tokio::test]
    async fn a_connection_whose_subscription_has_ended_is_over() {
        let server = RedisServer::start();
        let mut session = session(&server.url());
        let hello = session.exchange(exchange(Vec::new()));
        assert!(drive(&mut session, hello).await.is_ok());
        let exchanger = session.exchanger.clone();
        let link = exchanger.current().unwrap();
        drive(&mut session, exchanger.count_replicas(&link)).await;
        assert!(link.is_alive() && link.listens());
        let mut connection = link.connection.clone();
        let ended = connection.unsubscribe(&exchanger.known.channel);
        drive(&mut session, ended).await.unwrap();
        // A server that does not answer the question says nothing about the subscription.
        server.cli(&["ACL", "SETUSER", "default", "-pubsub"]);
        drive(&mut session, exchanger.count_replicas(&link)).await;
        assert!(link.is_alive());
        server.cli(&["ACL", "SETUSER", "default", "+pubsub"]);
        drive(&mut session, exchanger.count_replicas(&link)).await;
        assert!(!link.is_alive() && exchanger.current().is_none());
    }

    /// The `redis` crate does not report every end: after some network errors its future just completes.
    #[test]
    fn a_connection_that_just_ends_is_reported_once() {
        let mut session = session("redis://localhost");
        let link = Arc::<LinkState>::default();
        link.in_use.store(true, Relaxed);
        let io = future::ready(()).boxed();
        session.connections.push((Arc::downgrade(&link), io));
        let mut cx = Context::from_waker(Waker::noop());
        let event = session.poll_event(&mut cx);
        assert!(matches!(event, Poll::Ready(Event::Disconnected)));
        link.end(&session.exchanger.events);
        assert!(session.poll_event(&mut cx).is_pending());
    }

    /// As if an exchange in flight had kept it open.
    #[tokio::test]
    async fn the_end_of_a_connection_that_was_left_is_not_reported() {
        let server = RedisServer::start();
        let mut session = session(&server.url());
        let leave: [fn(&mut RedisSession, &SessionLink); 2] = [
            |session, link| assert!(session.exchanger.forget(link)),
            |session, _| session.disconnect(),
        ];
        for leave in leave {
            let hello = session.exchange(exchange(Vec::new()));
            assert!(drive(&mut session, hello).await.is_ok());
            let link = session.exchanger.current().unwrap();
            leave(&mut session, &link);
            link.state.end(&session.exchanger.events);
            assert!(session.exchanger.events.next().is_none());
        }
    }

    /// G7: although the server does not answer that exchange.
    #[tokio::test]
    async fn a_connection_that_was_left_ends_with_its_last_exchange() {
        let server = RedisServer::start();
        let mut session = session(&server.url());
        let hello = session.exchange(exchange(Vec::new()));
        assert!(drive(&mut session, hello).await.is_ok());
        server.pause();
        let mut silent = session.exchange(exchange(Vec::new()));
        let sent = |cx: &mut Context<'_>| Poll::Ready(silent.poll_unpin(cx).is_pending());
        assert!(drive(&mut session, poll_fn(sent)).await);
        session.disconnect();
        let mut connections = async || {
            drive(&mut session, future::ready(())).await;
            session.connections.len()
        };
        assert_eq!(connections().await, 1);
        drop(silent);
        assert_eq!(connections().await, 0);
    }

    /// For example, a connection to a replaced primary, which loses the race against the connection to the new one.
    #[tokio::test]
    async fn a_connection_that_is_not_used_does_not_answer_for_the_others() {
        let server = RedisServer::start();
        let mut session = session(&server.url());
        let exchanger = session.exchanger.clone();
        let Dialer::Server(client) = &exchanger.dialer else {
            unreachable!("one server")
        };
        let opened = exchanger.open(Client::clone(client), true);
        drop(drive(&mut session, opened).await.unwrap());
        server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"]);
        let hello = session.exchange(exchange(Vec::new()));
        assert!(drive(&mut session, hello).await.is_ok());
        let used = exchanger.current().unwrap();
        assert_eq!(used.state.evicts.get(), Some(&Some("allkeys-lfu")));
    }
}
