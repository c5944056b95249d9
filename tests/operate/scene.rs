//! Replicas of a service on one server, their clients, and operators who change limits.

use std::{convert::Infallible, thread, time::Duration};

use futures_util::future::{BoxFuture, FutureExt};
use http::{Request, Response};
use http_body_util::Full;
use tokio::{
    runtime::{self, Runtime},
    sync::oneshot,
    time::{sleep, timeout},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    Limit, LimitLayer, LimitValue, Limiter, LimiterBuilder, Mode, Semaphore,
    operate::{
        Answers, By, KeyRow, LogEntry, OperateError, Operator, Order, Outcome, Overrides,
        PermitRow, ReplicaRow, Revocation, Target,
    },
};

use crate::support::redis_server::RedisServer;

/// Ten slots for each tenant.
pub(crate) const CHAT: Limit = Limit::concurrent("chat", 10).wait_up_to(Duration::from_secs(60));

pub(crate) const HOUR: Duration = Duration::from_secs(3_600);
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// Two slots for each key.
pub(crate) const JOBS: Limit = Limit::concurrent("jobs", 2).wait_up_to(Duration::from_secs(60));

pub(crate) fn builder(label: &str) -> LimiterBuilder {
    Limiter::builder().operable().replica_label(label)
}

pub(crate) async fn replica(server: &RedisServer, label: &str) -> Limiter {
    builder(label)
        .connect(&server.url())
        .await
        .expect("it is up")
}

/// Replicas `web-0` and so on, and an operator to whom all of them answer.
pub(crate) async fn replicas(server: &RedisServer, count: usize) -> (Vec<Limiter>, Operator) {
    let mut replicas = Vec::new();
    for number in 0..count {
        replicas.push(replica(server, &format!("web-{number}")).await);
    }
    let operator = Operator::connect(&server.url()).await.expect("it is up");
    await_replicas(&operator, count).await;
    (replicas, operator)
}

/// Waits until this many replicas answer. Replicas start to listen only after they have connected.
pub(crate) async fn await_replicas(operator: &Operator, count: usize) -> Vec<ReplicaRow> {
    let all = async {
        loop {
            let replicas = operator.replicas().await.expect("it is up");
            if (replicas.answered, replicas.replicas) == (count, count) && replicas.busy.is_empty()
            {
                return replicas.rows;
            }
            // No more often than replicas answer.
            sleep(Duration::from_millis(60)).await;
        }
    };
    timeout(Duration::from_secs(20), all)
        .await
        .expect("in time")
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
    limiter.semaphore(&JOBS, "acme")
}

pub(crate) async fn seen(operator: &Operator) -> Overrides {
    operator.overrides().await.unwrap()
}

/// Orders in one line, given the overrides that their operator has seen.
pub(crate) trait Orders {
    fn operator(&self) -> &Operator;

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
        self.operator().order(&order, by).await
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
        self.operator().order(&order, by).await
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
        self.operator().order(&order, by).await
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
        self.operator().order(&order, by).await
    }

    async fn undo(&self, entry: &LogEntry, by: &By) -> Result<Outcome, OperateError> {
        let id = entry.id.clone();
        self.operator().order(&Order::Undo { id }, by).await
    }

    async fn revoke(
        &self,
        whose: &Revocation,
        by: &By,
    ) -> Result<Answers<PermitRow>, OperateError> {
        let order = Order::Revoke(whose.clone());
        match self.operator().order(&order, by).await? {
            Outcome::Revoked(revoked) => Ok(revoked.permits),
            outcome => panic!("{outcome:?}"),
        }
    }

    async fn resume(&self, target: &Target, by: &By) -> Result<Answers<KeyRow>, OperateError> {
        let target = target.clone();
        match self.operator().order(&Order::Resume { target }, by).await? {
            Outcome::Resumed(answers) => Ok(answers),
            outcome => panic!("{outcome:?}"),
        }
    }
}

impl Orders for Operator {
    fn operator(&self) -> &Operator {
        self
    }
}

/// Sets the value of the limit, and waits until it is in force in this many replicas.
pub(crate) async fn set(operator: &Operator, value: u32, length: Duration, replicas: usize) {
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
    let all = async {
        while semaphore.usage().await.unwrap().max != max {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, all).await.expect("in time");
}

/// In memory, and on Redis with two replicas.
pub(crate) async fn scenes() -> [(Option<RedisServer>, [Limiter; 2], Operator); 2] {
    let alone = builder("web-0").in_memory().unwrap();
    let server = RedisServer::start();
    let (mut limiters, operator) = replicas(&server, 2).await;
    let both = [limiters.remove(0), limiters.remove(0)];
    let here = alone.operator();
    [
        (None, [alone.clone(), alone], here),
        (Some(server), both, operator),
    ]
}
