//! A replica: clients that call the upstream again and again, behind one of the limits to compare.

use std::{error::Error, future::poll_fn, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::StreamBody;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::Mutex,
    time::{Instant, sleep},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_resilience_adaptive as resilience;
use tower_turnstile::{Limit, Limiter, Scope, layer};

use crate::plan::Plan;

type Failed = Box<dyn Error + Send + Sync>;
type Connection = Arc<Mutex<BufReader<TcpStream>>>;

/// Longer than any run.
const PATIENT: Duration = Duration::from_secs(3_600);
const MOST: u32 = 1_000;

/// A request: its connection, and the length of its stream in seconds.
#[derive(Clone)]
struct Ask(Connection, f64);

/// The head of a response.
async fn head(Ask(connection, length): Ask) -> Result<StatusCode, Failed> {
    let mut connection = connection.lock().await;
    connection
        .write_all(format!("{length}\n").as_bytes())
        .await?;
    let mut line = String::new();
    connection.read_line(&mut line).await?;
    Ok(line.trim().parse()?)
}

async fn rest(connection: &Connection) -> Result<(), Failed> {
    connection
        .lock()
        .await
        .read_line(&mut String::new())
        .await?;
    Ok(())
}

/// The whole stream: other crates release at the end of this future. A refusal is an error.
async fn whole(ask: Ask) -> Result<(), Failed> {
    let connection = ask.0.clone();
    match head(ask).await? {
        StatusCode::OK => rest(&connection).await,
        status => Err(status.to_string().into()),
    }
}

/// A replica of `share` of the clients: `share[0]` of `share[1]`.
pub struct Replica {
    pub plan: Plan,
    pub upstream: String,
    pub redis: String,
    pub clients: usize,
    pub replicas: usize,
    /// The value at the start, over all replicas.
    pub start: u32,
}

impl Replica {
    pub async fn run(self, limit: &str) -> Result<(), Failed> {
        let each = (self.start as usize / self.replicas).max(1);
        let most = MOST as usize;
        let call = service_fn(whole);
        match limit {
            "static" | "turnstile" | "target" => self.turnstile(limit).await,
            "resilience-aimd" => {
                let aimd = resilience::Aimd::builder()
                    .initial_limit(each)
                    .max_limit(most)
                    .latency_threshold(PATIENT);
                let layer = resilience::AdaptiveLimiterLayer::new(aimd.build()?);
                self.clients(layer.layer(call)).await
            }
            "resilience-gradient2" => {
                let gradient = resilience::Gradient2::builder()
                    .initial_limit(each)
                    .max_limit(most);
                let layer = resilience::AdaptiveLimiterLayer::new(gradient.build()?);
                self.clients(layer.layer(call)).await
            }
            "acc-aimd" => {
                let aimd = tower_acc::Aimd::builder()
                    .initial_limit(each)
                    .min_limit(1)
                    .max_limit(most);
                self.clients(tower_acc::ConcurrencyLimit::new(
                    call,
                    aimd.timeout(PATIENT).build(),
                ))
                .await
            }
            "acc-gradient2" => {
                let gradient = tower_acc::Gradient2::builder()
                    .initial_limit(each)
                    .min_limit(1)
                    .max_limit(most);
                self.clients(tower_acc::ConcurrencyLimit::new(call, gradient.build()))
                    .await
            }
            "acc-vegas" => {
                let vegas = tower_acc::Vegas::builder()
                    .initial_limit(each)
                    .max_limit(most);
                self.clients(tower_acc::ConcurrencyLimit::new(call, vegas.build()))
                    .await
            }
            other => Err(format!("no limit is named {other}").into()),
        }
    }

    /// A slot is held until the end of the stream, as under the others.
    async fn turnstile(self, kind: &str) -> Result<(), Failed> {
        let limiter = Limiter::connect(&self.redis).await?;
        let limit = Limit::try_concurrent("upstream", self.start)?.wait_up_to(PATIENT);
        let scope = Scope::from(limit.max_waiters(10_000));
        let scope = match kind {
            "static" => scope,
            "target" => scope
                .outcome_by(layer::slower_than(self.plan.target))
                .adapt(5..=MOST),
            _ => scope.outcome_by(layer::overload).adapt(5..=MOST),
        };
        let service = service_fn(|request: Request<Ask>| async move {
            let ask = request.into_body();
            let connection = ask.0.clone();
            let status = head(ask).await?;
            let end = stream::once(async move {
                if status == StatusCode::OK {
                    rest(&connection).await?;
                }
                Ok::<_, Failed>(Frame::data(Bytes::new()))
            });
            let response = Response::builder().status(status);
            Ok::<_, Failed>(response.body(StreamBody::new(Box::pin(end)))?)
        });
        let service = limiter.layer(scope)?.layer(service);
        let call = service_fn(move |ask: Ask| {
            let service = service.clone();
            async move {
                let response = service.oneshot(Request::new(ask)).await?;
                let mut body = pin!(response.into_body());
                while poll_fn(|cx| body.as_mut().poll_frame(cx)).await.is_some() {}
                Ok::<_, Failed>(())
            }
        });
        self.clients(call).await
    }

    /// Calls until the plan ends. A client that is refused calls again at once.
    async fn clients<S, E>(&self, service: S) -> Result<(), Failed>
    where
        S: Service<Ask, Error = E, Response = (), Future: Send> + Clone + Send + 'static,
        E: Send,
    {
        let start = Instant::now();
        let end = start + self.plan.length();
        for number in 0..self.clients {
            let connection = TcpStream::connect(&self.upstream).await?;
            connection.set_nodelay(true)?;
            let connection = Arc::new(Mutex::new(BufReader::new(connection)));
            let (plan, service) = (self.plan.clone(), service.clone());
            tokio::spawn(async move {
                if number % 10 > 0 {
                    sleep(Duration::from_secs_f64(plan.quiet)).await;
                }
                loop {
                    let mut service = service.clone();
                    let ask = Ask(connection.clone(), plan.draw());
                    if let Ok(service) = service.ready().await {
                        let _ = service.call(ask).await;
                    }
                }
            });
        }
        tokio::time::sleep_until(end).await;
        Ok(())
    }
}
