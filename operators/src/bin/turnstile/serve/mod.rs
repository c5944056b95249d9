//! `turnstile serve`: slots over HTTP, for programs in any language. A slot is held for as long as its request lives.
//!
//! | file | what it decides |
//! | --- | --- |
//! | `args` | the values of the arguments |
//! | `limits` | the limits, and the semaphore for a client's parameters |
//! | `server` | connections: where, how many, how long |
//! | `api` | which requests are accepted, and what each path does |
//! | `form` | the parameters of a request, and their ranges |
//! | `client` | the events of a client, and when its slot is released |
//! | `held` | what a client does with its permit on another connection |
//! | `problem` | answers to requests that reach no limit |

mod api;
mod args;
mod client;
mod form;
mod held;
mod limits;
mod problem;
mod server;

use std::{
    convert::Infallible, future::pending, path::Path, pin::pin, process::ExitCode, sync::Arc,
    time::Duration,
};

use futures_util::future::join;
use hmac_sha256::Hash;
use hyper::service::service_fn;
use hyper_util::{server::graceful::GracefulShutdown, service::TowerToHyperService};
use nix::sys::signal::Signal::SIGHUP;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

pub(crate) use self::args::ServeArgs;
use self::{args::Address, held::HeldPermits, limits::ServedLimits, server::Socket};
use crate::{
    args::Args,
    code,
    commands::CommandError,
    job::{CONNECTED, Signals},
    notes::Notes,
    output,
    text::escaped,
};

/// Heartbeats without an acknowledgement after which a client's machine is dead.
const DEAD_AFTER: u32 = 3;
/// Connections besides those of clients, for pings.
const MORE_CONNECTIONS: usize = 1_000;
/// Connections to the page.
const PAGE_CONNECTIONS: usize = 100;
/// Time for clients to read the last events.
const CLOSE: Duration = Duration::from_secs(1);
/// Pause between attempts to reach the store for the page.
const RETRY_EVERY: Duration = Duration::from_secs(5);

/// What all requests share.
struct Serving {
    limits: ServedLimits,
    /// The hash of the token.
    token: Option<[u8; 32]>,
    heartbeat: Duration,
    max_hold: Option<Duration>,
    grace: Duration,
    phase: watch::Sender<Phase>,
    /// A permit for each client.
    clients: Arc<Semaphore>,
    max_clients: u32,
    held: HeldPermits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Serving,
    /// Newcomers are refused, and holders have the grace.
    Draining,
    /// The grace is over.
    Ended,
}

/// Serves until a signal comes.
pub(crate) async fn run(args: &Args, serve: &ServeArgs) -> Result<ExitCode, CommandError> {
    serve.check()?;
    tracing_subscriber::fmt()
        .with_writer(|| Notes)
        .with_ansi(false)
        .init();
    let room = server::room()?;
    // Pings have connections of their own.
    let fit = u32::try_from(room - room / 4).unwrap_or(u32::MAX);
    let max_clients = serve.max_clients.min(fit);
    if max_clients < serve.max_clients {
        note!("turnstile: `ulimit -n` allows for at most {max_clients} clients");
    }
    let fault = |error| CommandError::new(code::REFUSED, format!("no signals: {error}"));
    let mut signals = Signals::catch().map_err(fault)?;
    let file = match &serve.source.config {
        Some(path) => {
            signals.leave_out(SIGHUP);
            Some((&**path, signal(SignalKind::hangup()).map_err(fault)?))
        }
        None => None,
    };
    let mut starting = pin!(start(args, serve));
    let (socket, page, limits) = tokio::select! {
        started = &mut starting => started?,
        _ = signals.ending() => {
            if let Ok(Ok((_, _, limits))) = timeout(CONNECTED, starting).await {
                limits.limiter().shutdown(Duration::ZERO).await;
            }
            return Ok(ExitCode::SUCCESS);
        }
    };
    let serving = Arc::new(Serving {
        limits,
        token: (serve.token.as_ref()).map(|token| Hash::hash(token.as_bytes())),
        heartbeat: serve.heartbeat,
        max_hold: serve.max_hold,
        grace: serve.grace,
        phase: watch::Sender::new(Phase::Serving),
        clients: Arc::new(Semaphore::new(max_clients as usize)),
        max_clients,
        held: HeldPermits::default(),
    });
    let connections = GracefulShutdown::new();
    let shared = serving.clone();
    let service = service_fn(move |request| api::answer(shared.clone(), request));
    let at_most = room.min(max_clients as usize + MORE_CONNECTIONS);
    output::line(&format!("listening on {}", socket.address()));
    tokio::select! {
        never = server::serve(&socket, at_most, serve.heartbeat * DEAD_AFTER, service, &connections) => match never {},
        never = serve_page(&serving, page) => match never {},
        never = reload_on_hangup(&serving, args, file) => match never {},
        () = async {
            signals.ending().await;
            drain(&serving, &mut signals).await;
        } => {}
    }
    let _ = timeout(CLOSE, connections.shutdown()).await;
    Ok(ExitCode::SUCCESS)
}

async fn start(
    args: &Args,
    serve: &ServeArgs,
) -> Result<(Socket, Option<Socket>, ServedLimits), CommandError> {
    let socket = Socket::bind(&serve.listen).await?;
    let page = match serve.page {
        Some(address) => Some(Socket::bind(&Address::Tcp(address)).await?),
        None => None,
    };
    let limits = ServedLimits::connect(args, serve).await?;
    Ok((socket, page, limits))
}

/// Refuses newcomers, and gives holders the grace, unless there is another signal.
async fn drain(serving: &Serving, signals: &mut Signals) {
    serving.phase.send_replace(Phase::Draining);
    let limiter = serving.limits.limiter();
    let gone = serving.clients.acquire_many(serving.max_clients);
    let report = tokio::select! {
        (report, _) = join(limiter.shutdown(serving.grace), timeout(serving.grace, gone)) => report,
        _ = signals.ending() => limiter.shutdown(Duration::ZERO).await,
    };
    serving.phase.send_replace(Phase::Ended);
    if report.unconfirmed > 0 {
        note!(
            "turnstile: the store has not confirmed all releases: their slots are free when their leases end"
        );
    }
}

async fn serve_page(serving: &Serving, page: Option<Socket>) -> Infallible {
    let Some(socket) = page else {
        return pending().await;
    };
    output::line(&format!("page on {}", socket.address()));
    let page = loop {
        match serving.limits.page().await {
            Ok(page) => break page,
            Err(error) => note!("turnstile: the page waits: {}", escaped(&error.message)),
        }
        sleep(RETRY_EVERY).await;
    };
    let page = TowerToHyperService::new(page);
    let connections = GracefulShutdown::new();
    let dead_after = serving.heartbeat * DEAD_AFTER;
    server::serve(&socket, PAGE_CONNECTIONS, dead_after, page, &connections).await
}

/// Reads the file again at each SIGHUP.
async fn reload_on_hangup(
    serving: &Serving,
    args: &Args,
    file: Option<(&Path, Signal)>,
) -> Infallible {
    if let Some((path, mut hangup)) = file {
        while hangup.recv().await.is_some() {
            match serving.limits.reload(args, path).await {
                Ok(()) => note!("turnstile: reloaded"),
                Err(error) => note!(
                    "turnstile: not reloaded, the old limits stay in force: {}",
                    escaped(&error.message)
                ),
            }
        }
    }
    pending().await
}
