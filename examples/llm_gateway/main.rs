//! A streaming reverse proxy for language models, whose limits stand in a file: streams, starts and tokens of each key.
//!
//! ```sh
//! cargo run --example llm_gateway --features config -- \
//!     --upstream http://127.0.0.1:8000 --config examples/llm_gateway.toml
//! ```
//!
//! Start it again with `--listen 127.0.0.1:3001`: all replicas on one store keep to the limits together. SIGHUP reads
//! the file again, while streams go on; a file with a fault changes nothing. SIGTERM refuses newcomers, and lets what
//! is open go on for a while; a second one does not wait.
//!
//! A slot is taken until the last frame of the upstream's response has been passed on. It is given back at once when
//! the client leaves, which drops the call to the upstream too, or when the upstream fails.
//!
//! Bodies pass as they come, and unchanged but for one thing: a request for a stream in the style of OpenAI asks for
//! `stream_options.include_usage` if it says nothing about it, so the stream ends with a chunk that has the usage and no
//! choices.
//!
//! | file | what it does |
//! | --- | --- |
//! | `main` | options, connections, signals |
//! | `proxy` | the way to the upstream and back |
//! | `prompt` | reads a request, to charge its prompt before the upstream is called |
//! | `meter` | charges an answer while it passes, and settles it |
//! | `usage` | counts the tokens of an answer |
//! | `sse` | finds events in a stream |

mod meter;
mod prompt;
mod proxy;
mod sse;
mod usage;

use std::{
    io::IsTerminal,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use futures_util::{FutureExt, future::join};
use http::{
    Request, Uri,
    uri::{Authority, Scheme},
};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    time::{sleep, timeout},
};
use tower::ServiceBuilder;
use tower_turnstile::{
    PeerAddress,
    config::{Config, ConfigFileError, LimitConfig, LiveConfig},
    layer::ReadAheadLayer,
};
use tracing_subscriber::EnvFilter;

use crate::{meter::LIMIT, proxy::Proxy};

/// How long connections may take to close once their streams have ended.
const CLOSE: Duration = Duration::from_secs(1);
/// HTTP/2 clients are asked so often whether they are still there.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// After a connection could not be accepted, for want of file descriptors most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A reverse proxy whose streams are limited across all replicas that share a store.
#[derive(Parser)]
struct Options {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// Where requests go: http://host:port
    #[arg(long, value_parser = upstream)]
    upstream: Authority,
    /// File with the limits, in TOML; SIGHUP reads it again
    #[arg(long)]
    config: PathBuf,
    /// How long the upstream may take to begin its response, and a client to send a prompt
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    head_timeout: Duration,
    /// How long what is open may go on after SIGTERM
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    grace: Duration,
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Options::try_parse() {
        Ok(options) => run(options).await,
        Err(help) if !help.use_stderr() => help.exit(),
        Err(error) => Err(first_paragraph(&error)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

/// Serves until a signal comes. An error names the option to mend.
async fn run(options: Options) -> Result<(), String> {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();

    let blamed = |fault| format!("--config {}: {fault}", options.config.display());
    let config = read(&options.config).await.map_err(blamed)?;
    let live = LiveConfig::connect(&config).await;
    let live = live.map_err(|error| blamed(in_one_line(&error)))?;
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("--listen {}: {error}", options.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    let listen_to = |kind| signal(kind).map_err(|error| error.to_string());
    let mut hangup = listen_to(SignalKind::hangup())?;
    let mut interrupt = listen_to(SignalKind::interrupt())?;
    let mut terminate = listen_to(SignalKind::terminate())?;
    let mut told_to_end = async || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    println!("listening on http://{address}");

    let layer = live.layer().read_ahead();
    let proxy = Proxy::new(options.upstream, options.head_timeout);
    let connections = GracefulShutdown::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((connection, peer)) => serve(connection, peer, &layer, &proxy, &connections),
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            _ = hangup.recv() => match reload(&live, &options.config).await {
                Ok(()) => tracing::info!("reloaded"),
                Err(fault) => tracing::error!(fault, "not reloaded, the limits are as before"),
            },
            () = told_to_end() => break,
        }
    }
    drop(listener);
    tracing::info!("shutting down");
    let (limiter, grace) = (live.limiter(), options.grace);
    let closed = connections.shutdown().shared();
    let report = tokio::select! {
        (report, _) = join(limiter.shutdown(grace), timeout(grace, closed.clone())) => report,
        () = told_to_end() => limiter.shutdown(Duration::ZERO).await,
    };
    tracing::info!(?report, "shut down");
    let _ = timeout(CLOSE, closed).await;
    Ok(())
}

/// A file without the limit that is charged would turn the budget off. A budget that is not wanted has `mode = "off"`.
async fn read(path: &Path) -> Result<Config, String> {
    let config = Config::from_file(path).await;
    let config = config.map_err(|error| in_one_line(&error))?;
    let is_rate = |limit: &LimitConfig| limit.rate.is_some();
    match config.limits.get(LIMIT).is_some_and(is_rate) {
        true => Ok(config),
        false => Err(format!(
            "limits.{LIMIT}: is missing, or no rate: the gateway charges it"
        )),
    }
}

async fn reload(live: &LiveConfig, path: &Path) -> Result<(), String> {
    let config = read(path).await?;
    live.reload(&config).map_err(|error| in_one_line(&error))
}

/// Serves a connection, HTTP/1 or HTTP/2, on a task of its own.
fn serve(
    connection: TcpStream,
    peer: SocketAddr,
    layer: &ReadAheadLayer,
    proxy: &Proxy,
    connections: &GracefulShutdown,
) {
    let _ = connection.set_nodelay(true);
    let proxy = proxy.clone();
    let service = ServiceBuilder::new()
        .map_request(move |mut request: Request<Incoming>| {
            // For limits by the client's address.
            request.extensions_mut().insert(PeerAddress(peer));
            request
        })
        .layer(layer.clone())
        .service_fn(move |request| proxy.clone().forward(request, peer.ip()));
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new());
    server
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE);
    let connection =
        server.serve_connection(TokioIo::new(connection), TowerToHyperService::new(service));
    let connection = connections.watch(connection.into_owned());
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(error, "a connection broke");
        }
    });
}

fn upstream(text: &str) -> Result<Authority, String> {
    let parts = text.parse::<Uri>().unwrap_or_default().into_parts();
    let is_bare = parts.path_and_query.is_none_or(|path| path == "/");
    match (parts.scheme, parts.authority) {
        (Some(scheme), Some(host)) if scheme == Scheme::HTTP && is_bare => Ok(host),
        _ => Err("it must be http://host:port".to_owned()),
    }
}

/// All faults of a file.
fn in_one_line(error: &ConfigFileError) -> String {
    error.to_string().replace('\n', "; ")
}

/// What clap says in its first paragraph, in one line.
fn first_paragraph(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.trim_start_matches("error: ");
    let words = text.split("\n\n").take(1).flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}
