//! Replicas of a service on one server, their clients, and operators who change limits.

use std::{convert::Infallible, ops::Deref, thread, time::Duration};

use futures_util::future::{BoxFuture, FutureExt};
use http::{Request, Response};
use http_body_util::Full;
use redis::{AsyncConnectionConfig, aio::MultiplexedConnection};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::TcpStream,
    runtime::{self, Runtime},
    sync::oneshot,
    time::sleep,
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, Limit, LimitLayer, LimitValue, Limiter, LimiterBuilder, Mode, Semaphore,
};
use tower_turnstile_operate::{
    Answers, By, Explanation, KeyDigest, KeyRow, LimitRow, OperateError, OperateErrorKind,
    Operator, Order, Outcome, Overrides, PermitRow, RefusalRow, ReplicaRow, Revocation, Target,
    TenantRow,
};

use crate::support::redis_server::RedisServer;
pub(crate) use crate::support::{GUARD, soon};

/// Ten slots for each tenant.
pub(crate) const CHAT: Limit = Limit::concurrent("chat", 10).wait_up_to(HOUR);
/// Two slots for each key.
pub(crate) const JOBS: Limit = Limit::concurrent("jobs", 2).wait_up_to(HOUR);

pub(crate) const HOUR: Duration = Duration::from_secs(3_600);
/// A guard for what replicas do unasked. Once a minute they register and read the record anyway.
pub(crate) const UNASKED: Duration = Duration::from_secs(30);
/// Replicas answer twenty questions a second, and some calls ask six.
pub(crate) const BETWEEN_CALLS: Duration = Duration::from_millis(350);

/// A limiter for which a stall of the machine changes nothing.
pub(crate) fn steady() -> LimiterBuilder {
    let builder = Limiter::builder().lease(5 * GUARD).waiter_ttl(5 * GUARD);
    builder.store_timeout(Duration::from_secs(20))
}

pub(crate) fn builder(label: &str) -> LimiterBuilder {
    steady().operable().replica_label(label)
}

pub(crate) async fn replica(server: &RedisServer, label: &str) -> Limiter {
    let limiter = builder(label).connect(&server.url()).await;
    limiter.expect("it is up")
}

/// Replicas `web-0` and so on, and an operator to whom all of them answer.
pub(crate) async fn replicas(server: &RedisServer, count: usize) -> (Vec<Limiter>, Patient) {
    let mut replicas = Vec::new();
    for number in 0..count {
        replicas.push(replica(server, &format!("web-{number}")).await);
    }
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, count).await;
    (replicas, operator)
}

/// A connection without the bounds of `redis`: half a second for an answer, and one to connect.
pub(crate) async fn connection(url: &str) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(GUARD))
        .set_response_timeout(Some(GUARD));
    let client = redis::Client::open(url).expect("a URL");
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    connection.await.expect("it is up")
}

/// All commands that a server has received since.
pub(crate) struct Monitor(Lines<BufReader<TcpStream>>);

impl Monitor {
    pub(crate) async fn of(server: &RedisServer) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port())).await;
        let mut monitor = BufReader::new(stream.expect("it is up"));
        monitor.write_all(b"MONITOR\r\n").await.expect("it is up");
        let mut lines = monitor.lines();
        let line = lines.next_line().await.expect("it is up");
        assert_eq!(line.as_deref(), Some("+OK"));
        Self(lines)
    }

    /// In lines such as `1.5 [0 127.0.0.1:1234] "TIME"`.
    pub(crate) async fn commands(mut self, server: &RedisServer) -> Vec<String> {
        server.cli(&["ECHO", "the end"]);
        let mut commands = Vec::new();
        loop {
            let line = soon(self.0.next_line()).await.expect("it is up");
            let line = line.expect("the end comes first");
            if line.contains("\"the end\"") {
                return commands;
            }
            commands.push(line);
        }
    }
}

/// Adds entries to the roster that no replica answers for.
pub(crate) fn strangers(server: &RedisServer, count: u32) {
    let add = "local now = redis.call('TIME')[1] * 1000
        for number = 1, ARGV[1] do
            redis.call('ZADD', KEYS[1], now, string.format('%016dstranger-%d', number, number))
        end";
    let roster = "turnstile:{turnstile:control}:roster";
    server.cli(&["EVAL", add, "1", roster, &count.to_string()]);
}

/// Waits until this many replicas answer. Replicas start to listen only after they have connected.
pub(crate) async fn await_replicas(operator: &Operator, count: usize) -> Vec<ReplicaRow> {
    let is_late = |answers: &Answers<ReplicaRow>| {
        (answers.answered, answers.replicas) != (count, count) || !answers.busy.is_empty()
    };
    let ask = async || operator.replicas().await.expect("it is up");
    again_while(is_late, ask).await.rows
}

/// Repeats a question while its answer is like this.
pub(crate) async fn again_while<T>(is_late: impl Fn(&T) -> bool, ask: impl AsyncFn() -> T) -> T {
    soon(async {
        let mut pause = Duration::from_millis(20);
        loop {
            // Orders are large futures.
            let answer = Box::pin(ask()).await;
            if !is_late(&answer) {
                return answer;
            }
            sleep(pause).await;
            pause = (2 * pause).min(BETWEEN_CALLS);
        }
    })
    .await
}

pub(crate) async fn until(is_so: impl AsyncFn() -> bool) {
    soon(async {
        while !is_so().await {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// An operator of replicas that are all there. Replicas have half a second to answer, too little on a machine that stalls, and
/// may be busy: then this operator asks again.
pub(crate) struct Patient(pub(crate) Operator);

impl Deref for Patient {
    type Target = Operator;

    fn deref(&self) -> &Operator {
        &self.0
    }
}

type Asked<T> = Result<Answers<T>, OperateError>;

fn is_late<T>(answers: &Asked<T>) -> bool {
    answers.as_ref().is_ok_and(|answers| !answers.are_all())
}

impl Patient {
    pub(crate) async fn connect(url: &str) -> Self {
        Self::in_namespace(url, "turnstile").await
    }

    pub(crate) async fn in_namespace(url: &str, namespace: &str) -> Self {
        let builder = Operator::builder().namespace(namespace);
        let builder = builder.store_timeout(Duration::from_secs(9));
        Self(builder.connect(url).await.expect("it is up"))
    }

    pub(crate) async fn replicas(&self) -> Asked<ReplicaRow> {
        again_while(is_late, async || self.0.replicas().await).await
    }

    pub(crate) async fn limits(&self) -> Asked<LimitRow> {
        again_while(is_late, async || self.0.limits().await).await
    }

    pub(crate) async fn permits(&self, limit: &str, key: Option<KeyDigest>) -> Asked<PermitRow> {
        again_while(is_late, async || self.0.permits(limit, key).await).await
    }

    pub(crate) async fn keys(&self, limit: &str, key: Option<KeyDigest>) -> Asked<KeyRow> {
        again_while(is_late, async || self.0.keys(limit, key).await).await
    }

    pub(crate) async fn refusals(&self, limit: &str, key: Option<KeyDigest>) -> Asked<RefusalRow> {
        again_while(is_late, async || self.0.refusals(limit, key).await).await
    }

    pub(crate) async fn tenants(&self, limit: &str, key: Option<KeyDigest>) -> Asked<TenantRow> {
        again_while(is_late, async || self.0.tenants(limit, key).await).await
    }

    pub(crate) async fn explain(
        &self,
        limit: &str,
        key: impl Into<Option<KeyDigest>>,
    ) -> Result<Explanation, OperateError> {
        let key: Option<KeyDigest> = key.into();
        let is_late = |why: &Result<Explanation, OperateError>| match why {
            Ok(why) => !why.permits.are_all(),
            Err(error) => is_late_error(error),
        };
        again_while(is_late, async || self.0.explain(limit, key).await).await
    }

    /// The outcome once all replicas have answered. What replicas have done without answering in time is not done again: then
    /// rows are missing.
    pub(crate) async fn order(&self, order: &Order, by: &By) -> Result<Outcome, OperateError> {
        let is_late = |outcome: &Result<Outcome, OperateError>| match outcome {
            Ok(Outcome::Resumed(keys)) => keys.rows.is_empty() && !keys.are_all(),
            Ok(Outcome::Revoked(revoked)) => revoked.ended == 0 && !revoked.permits.are_all(),
            Err(error) => is_late_error(error),
            Ok(_) => false,
        };
        match again_while(is_late, async || self.0.order(order, by).await).await? {
            Outcome::Recorded { .. } => self.confirmed(order).await,
            outcome => Ok(outcome),
        }
    }

    /// Waits until all replicas have confirmed the last change, which was this order.
    async fn confirmed(&self, order: &Order) -> Result<Outcome, OperateError> {
        let change = self.log().await?.swap_remove(0).id;
        let has = |row: &ReplicaRow| row.token.as_deref() == Some(&*change);
        let have_not = |answers: &Asked<ReplicaRow>| {
            let answers = answers.as_ref();
            answers.is_ok_and(|answers| !answers.rows.iter().all(has))
        };
        let answers = again_while(have_not, async || self.replicas().await).await?;
        let replicas = answers.answered;
        let (Order::Set {
            target: Target { limit, .. },
            ..
        }
        | Order::Mode { limit, .. }
        | Order::Pause { limit, .. }) = order
        else {
            return Ok(Outcome::Done { replicas });
        };
        match self.permits(limit, None).await {
            Err(error) if error.kind() == OperateErrorKind::UnknownLimit => {
                Ok(Outcome::Unused { replicas })
            }
            _ => Ok(Outcome::Done { replicas }),
        }
    }
}

fn is_late_error(error: &OperateError) -> bool {
    use OperateErrorKind::{Busy, NoAnswer};
    // The last is of an order for a share.
    [Busy, NoAnswer].contains(&error.kind())
        || error.to_string().contains("no replica has answered")
}

/// Fails if the limit is drained before a check that it is not satisfies this condition: the number of held slots, and the
/// answers.
pub(crate) async fn undrained(
    operator: &Operator,
    limit: &str,
    is_so: impl Fn(usize, &Answers<LimitRow>) -> bool,
) {
    let (first, has_come) = oneshot::channel();
    let mut first = Some(first);
    let drained = operator.drained(limit, |held, answers| {
        if is_so(held, answers)
            && let Some(first) = first.take()
        {
            first.send(()).expect("it is awaited");
        }
    });
    tokio::select! {
        outcome = drained => panic!("slots are held: {outcome:?}"),
        has_come = soon(has_come) => has_come.expect("it is kept"),
    }
}

/// A replica whose process can stop: it stays connected, and on the roster.
pub(crate) struct StoppableReplica {
    pub(crate) limiter: Limiter,
    stop: oneshot::Sender<()>,
    driven: thread::JoinHandle<Runtime>,
}

/// Stopped until dropped.
pub(crate) struct StoppedReplica {
    _limiter: Limiter,
    runtime: Option<Runtime>,
}

impl StoppableReplica {
    pub(crate) async fn start(server: &RedisServer, label: &str) -> Self {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let builder = builder(label).runtime(runtime.handle().clone());
        let limiter = builder.connect(&server.url()).await.expect("it is up");
        let (stop, stopped) = oneshot::channel::<()>();
        let driven = thread::spawn(move || {
            let _ = runtime.block_on(stopped);
            runtime
        });
        Self {
            limiter,
            stop,
            driven,
        }
    }

    pub(crate) fn stop(self) -> StoppedReplica {
        self.stop.send(()).expect("it is driven");
        StoppedReplica {
            _limiter: self.limiter,
            runtime: Some(self.driven.join().expect("it is driven")),
        }
    }
}

impl Drop for StoppedReplica {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A response whose unread body holds its slot until dropped.
pub(crate) type Open = Box<dyn Send>;

/// Opens a stream behind a layer.
pub(crate) fn open(layer: &LimitLayer, request: Request<()>) -> BoxFuture<'static, Open> {
    let service = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::<bytes::Bytes>::from("stream")))
    });
    let mut service = layer.layer(service);
    async move {
        let service = service.ready().await.expect("infallible");
        let response = service.call(request).await.expect("infallible");
        assert!(response.status().is_success(), "{:?}", response.status());
        Box::new(response.into_body()) as Open
    }
    .boxed()
}

pub(crate) fn ada() -> By {
    By::new("ada", "Black Friday").unwrap()
}

pub(crate) fn jobs() -> Target {
    Target::limit("jobs")
}

pub(crate) fn acme(limiter: &Limiter) -> Semaphore {
    limiter.semaphore(&JOBS, "acme").unwrap()
}

pub(crate) async fn seen(operator: &Operator) -> Overrides {
    operator.overrides().await.unwrap()
}

/// Orders in one line, given the overrides that their operator has seen.
pub(crate) trait Orders {
    async fn give(&self, order: &Order, by: &By) -> Result<Outcome, OperateError>;

    async fn set(
        &self,
        seen: &Overrides,
        target: &Target,
        value: impl Into<LimitValue>,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let LimitValue { max, burst, .. } = value.into();
        let order = Order::Set {
            target: target.clone(),
            value: max,
            burst,
            length,
            seen: Some(seen.tokens(target)),
        };
        self.give(&order, by).await
    }

    async fn mode(
        &self,
        seen: &Overrides,
        limit: &str,
        mode: Mode,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let order = Order::Mode {
            limit: limit.to_owned(),
            mode,
            length,
            seen: Some(seen.tokens(&Target::limit(limit))),
        };
        self.give(&order, by).await
    }

    async fn pause(
        &self,
        seen: &Overrides,
        limit: &str,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let order = Order::Pause {
            limit: limit.to_owned(),
            length,
            seen: Some(seen.tokens(&Target::limit(limit))),
        };
        self.give(&order, by).await
    }

    async fn unset(
        &self,
        seen: &Overrides,
        target: &Target,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let order = Order::Unset {
            target: target.clone(),
            seen: Some(seen.tokens(target)),
        };
        self.give(&order, by).await
    }

    async fn revoke(
        &self,
        whose: &Revocation,
        by: &By,
    ) -> Result<Answers<PermitRow>, OperateError> {
        let order = Order::Revoke(whose.clone());
        match self.give(&order, by).await? {
            Outcome::Revoked(revoked) => Ok(revoked.permits),
            outcome => panic!("{outcome:?}"),
        }
    }

    async fn resume(&self, target: &Target, by: &By) -> Result<Answers<KeyRow>, OperateError> {
        let target = target.clone();
        match self.give(&Order::Resume { target }, by).await? {
            Outcome::Resumed(answers) => Ok(answers),
            outcome => panic!("{outcome:?}"),
        }
    }
}

impl Orders for Operator {
    async fn give(&self, order: &Order, by: &By) -> Result<Outcome, OperateError> {
        self.order(order, by).await
    }
}

impl Orders for Patient {
    async fn give(&self, order: &Order, by: &By) -> Result<Outcome, OperateError> {
        self.order(order, by).await
    }
}

/// Sets the value of the limit, and waits until it is in force in this many replicas.
pub(crate) async fn set(operator: &Patient, value: u32, length: Duration, replicas: usize) {
    let order = Order::Set {
        target: jobs(),
        value,
        burst: None,
        length,
        seen: None,
    };
    let outcome = operator.order(&order, &ada()).await.unwrap();
    // Some tests set the value before the first request.
    let is_done = [Outcome::Done { replicas }, Outcome::Unused { replicas }].contains(&outcome);
    assert!(is_done, "{outcome:?}");
}

pub(crate) async fn until_max(semaphore: &Semaphore, max: u32) {
    until(async || (semaphore.usage().await).is_ok_and(|usage| usage.max == max)).await;
}

/// Waits until the pause of a key is in force for this semaphore's replica.
pub(crate) async fn until_paused(semaphore: &Semaphore) {
    until(async || {
        let error = semaphore.try_acquire().await.err();
        error.is_some_and(|error| error.kind() == AcquireErrorKind::Paused)
    })
    .await;
}

/// In memory, and on Redis with two replicas.
pub(crate) async fn scenes() -> [(Option<RedisServer>, [Limiter; 2], Patient); 2] {
    let alone = builder("web-0").in_memory().unwrap();
    let server = RedisServer::start();
    let (mut limiters, operator) = replicas(&server, 2).await;
    let both = [limiters.remove(0), limiters.remove(0)];
    let here = Patient(Operator::of(&alone));
    [
        (None, [alone.clone(), alone], here),
        (Some(server), both, operator),
    ]
}
