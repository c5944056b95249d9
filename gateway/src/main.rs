//! A streaming reverse proxy for language models that limits the streams, starts and tokens of each key, from a file.
//!
//! ```sh
//! turnstile-gateway --config gateway.toml --upstream http://127.0.0.1:8000
//! ```
//!
//! Start it again with `--listen 127.0.0.1:3001`: all replicas on one store share the limits. SIGHUP reloads the files while
//! streams continue; a file with a fault changes nothing. SIGTERM refuses new requests, and those whose prompts are still
//! arriving, and gives open responses `--grace`; a second SIGTERM does not wait.
//!
//! A request holds its slot until the last frame of the upstream's response has been passed on. The slot is released at
//! once if the upstream fails or the client disconnects, which also drops the call to the upstream.
//!
//! Bodies pass unchanged, with two exceptions. OpenAI's chat completions are streamed with `stream_options.include_usage`, so
//! that the last chunk reports the usage. Its `choices` are empty, which clients do not expect, so the chunk is passed on only
//! if the client asked for it; `--no-stream-options` turns this off, for upstreams that refuse the field. And a response that
//! costs tokens passes decoded if an upstream sends gzip, which the gateway never asks for. A stream of events that the
//! gateway ends gets an event with the error. Streams that cost tokens pass event by event, other bodies as they arrive.
//!
//! The caller's key is never passed on. With `--callers`, the limits count by the caller's tenant in its place. Without, any key
//! is accepted, so something in front of the gateway has to authenticate callers.
//!
//! `README.md` shows a gateway in front of providers, the view of users of each SDK, and all charges and refusals.
//!
//! | file | what it does |
//! | --- | --- |
//! | `main` | options, connections, signals |
//! | `file` | reads and reloads the files |
//! | `front` | before the limits: paths, callers, errors for clients |
//! | `proxy`, `silence` | the way to the upstream and back |
//! | `discard` | reads the rest of the body of a refused request |
//! | `upstream` | the upstreams and their keys |
//! | `prompt` | reads a request and estimates its tokens |
//! | `meter` | charges a response while it passes, and settles it |
//! | `weights` | the kinds of tokens, and what they cost |
//! | `usage` | counts the tokens of a response |
//! | `estimate` | estimates the tokens of a text |
//! | `sse`, `json` | streaming readers of server-sent events and of JSON |
//! | `endpoint` | the requests that cost tokens |
//! | `dialect`, `fault` | the APIs of providers, and errors in their form |
//! | `path`, `callers` | canonical paths; authentication |
//! | `time` | times in messages |
//! | `access`, `monitor` | the access log; metrics and health |

mod access;
mod callers;
mod dialect;
mod discard;
mod endpoint;
mod estimate;
mod fault;
mod file;
mod front;
mod json;
mod meter;
mod monitor;
mod path;
mod prompt;
mod proxy;
mod silence;
mod sse;
mod time;
mod upstream;
mod usage;
mod weights;

use std::{
    convert::Infallible,
    fmt::Display,
    io::IsTerminal,
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use clap::Parser;
use futures_util::{FutureExt, future::join};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn as hyper_service};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{Signal, SignalKind, signal},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep, timeout},
};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};
use tower_http::cors::{AllowHeaders, CorsLayer};
use tower_turnstile::{BoxError, Limiter, PeerAddress, config::LiveConfig};
use tracing_subscriber::EnvFilter;

use crate::{
    access::AccessLog,
    callers::Callers,
    file::{File, in_one_line},
    front::respond,
    monitor::{ACCEPT_PAUSE, Monitor},
    proxy::{Proxy, Settings},
    upstream::Upstream,
    weights::Weights,
};

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;
type Gateway = BoxCloneService<Request<Incoming>, Answer, Infallible>;

/// Time for connections to close once their streams have ended.
const CLOSE: Duration = Duration::from_secs(1);
/// Interval between HTTP/2 pings.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Longest time until the first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// Open files besides connections of clients and to upstreams: those of the store, the monitor and the runtime.
const OWN_FILES: u64 = 40;
/// Shortest time between two warnings that no connection is accepted.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// A reverse proxy whose streams are limited across all replicas that share a store.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// Upstream, [PATH=]URL[,VARIABLE]; repeatable. PATH: only for paths below it. VARIABLE: environment variable with the
    /// key for this upstream
    #[arg(long, value_name = "UPSTREAM", required = true)]
    upstream: Vec<Upstream>,
    /// File with the limits, in TOML; SIGHUP reloads it
    #[arg(long)]
    config: PathBuf,
    /// File with the callers, their keys and their tenants, in TOML; SIGHUP reloads it. Without it any key is accepted
    #[arg(long)]
    callers: Option<PathBuf>,
    /// Request header that tells upstreams and limits the caller's name, such as x-caller
    #[arg(long, value_name = "NAME", requires = "callers", value_parser = header)]
    caller_header: Option<HeaderName>,
    /// Name of the limit that tokens are charged to
    #[arg(long, default_value = "tokens")]
    budget: String,
    /// Units charged for a token of each kind; `cached` is input that the upstream has read from its cache
    #[arg(long, default_value = "input=1,cached=1,output=1")]
    weights: Weights,
    /// File to which each request appends a line of JSON: who used what
    #[arg(long, value_name = "FILE")]
    access_log: Option<PathBuf>,
    /// Do not ask for the usage of streamed chat completions: for an upstream that refuses `stream_options`. Their tokens
    /// are then estimated
    #[arg(long)]
    no_stream_options: bool,
    /// Address of /metrics and /health
    #[arg(long)]
    monitor: Option<SocketAddr>,
    /// Longest request that costs tokens, in bytes, KiB or MiB; requests with images need more
    #[arg(long, default_value = "4MiB", value_parser = bytes)]
    max_request: usize,
    /// Longest time until the upstream begins a stream, and until a client has sent its prompt
    #[arg(long, default_value = "60s", value_parser = duration)]
    head_timeout: Duration,
    /// Longest time without a byte from the upstream, in a response or before one that is not a stream
    #[arg(long, default_value = "10m", value_parser = duration)]
    silence: Duration,
    /// Longest time between the requests of an HTTP/1 connection: longer than a balancer in front keeps it
    #[arg(long, default_value = "620s", value_parser = duration)]
    idle: Duration,
    /// Longest time that a connection to an upstream is kept unused: shorter than the upstream keeps it
    #[arg(long, default_value = "4s", value_parser = humantime::parse_duration)]
    upstream_idle: Duration,
    /// Origin whose pages may call the gateway from a browser, or *; repeatable. The gateway then answers OPTIONS itself
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<HeaderValue>,
    /// Time for open requests to finish after SIGTERM
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
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
    log_to_stderr();
    let most = max_connections()?;
    // For upstreams and the store.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let recorder = monitor::recorder(options.monitor.is_some())?;
    let callers = callers(&options)?;
    let log = options.access_log.as_deref().map(AccessLog::open);
    let log = log.transpose()?.unwrap_or_default();
    let file = File {
        path: options.config,
        budget: options.budget.into(),
        callers: callers.clone(),
    };
    let config = file.read().await?;
    let live = LiveConfig::connect(&config).await;
    let live = live.map_err(|error| file.blame(in_one_line(&error)))?;
    let settings = Settings {
        upstreams: options.upstream,
        budget: file.budget.clone(),
        weights: options.weights,
        caller_header: options.caller_header,
        asks_usage: !options.no_stream_options,
        max_request: options.max_request,
        head_timeout: options.head_timeout,
        silence: options.silence,
        upstream_idle: options.upstream_idle,
    };
    let proxy = Proxy::new(settings).map_err(|error| format!("--upstream: {error}"))?;
    let (ending, is_ending) = watch::channel(false);
    if let (Some(address), Some(recorder)) = (options.monitor, recorder) {
        let listener = listen("--monitor", address).await?;
        let monitor = Monitor {
            recorder,
            limiter: live.limiter().clone(),
            is_ending,
        };
        tokio::spawn(monitor.serve(listener));
    }
    let listener = listen("--listen", options.listen).await?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    let hangup = listen_to(SignalKind::hangup())?;
    let mut told_to_end = end_signals()?;
    file.warn_of_gaps(&config);
    println!("listening on http://{address}");
    // In its own task: reading a file takes a while, and must not delay new connections.
    tokio::spawn(file.reload_on(hangup, live.clone()));
    let gateway = gateway(&live, proxy, callers, log, options.allow_origin);
    let connections = GracefulShutdown::new();
    tokio::select! {
        () = accept((listener, most), gateway, options.idle, &connections) => {}
        () = told_to_end() => {}
    }
    ending.send_replace(true);
    shut_down(live.limiter(), connections, options.grace, told_to_end()).await;
    Ok(())
}

/// Reads the file of callers. Warns if there is none, and the upstreams' keys are the gateway's own.
fn callers(options: &Options) -> Result<Callers, String> {
    if let Some(path) = options.callers.clone() {
        return Callers::from_file(path, options.caller_header.clone());
    }
    if options.upstream.iter().any(|one| one.key.is_some()) {
        tracing::warn!(
            "without --callers, whoever reaches this address spends on the upstream's key"
        );
    }
    Ok(Callers::default())
}

/// Gives open responses the grace, unless there is another signal.
async fn shut_down(
    limiter: &Limiter,
    connections: GracefulShutdown,
    grace: Duration,
    signal: impl Future<Output = ()>,
) {
    tracing::info!("shutting down");
    let closed = connections.shutdown().shared();
    let report = tokio::select! {
        (report, _) = join(limiter.shutdown(grace), timeout(grace, closed.clone())) => report,
        () = signal => limiter.shutdown(Duration::ZERO).await,
    };
    tracing::info!(?report, "shut down");
    let _ = timeout(CLOSE, closed).await;
}

fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

fn gateway(
    live: &LiveConfig,
    proxy: Proxy,
    callers: Callers,
    log: AccessLog,
    origins: Vec<HeaderValue>,
) -> Gateway {
    let forward = service_fn(move |request| proxy.clone().forward(request));
    let limited = live.layer().read_ahead().layer(forward);
    ServiceBuilder::new()
        .option_layer(cors(origins))
        .map_response(|response: Response<_>| response.map(BodyExt::boxed_unsync))
        .service_fn(move |request| respond(limited.clone(), callers.clone(), log.clone(), request))
        .boxed_clone()
}

/// Answers preflights, and lets pages of these origins read all responses, also refusals.
fn cors(origins: Vec<HeaderValue>) -> Option<CorsLayer> {
    // The wildcard of headers does not include `Authorization`.
    let layer = CorsLayer::permissive().allow_headers(AllowHeaders::mirror_request());
    if origins.iter().any(|origin| origin == "*") {
        Some(layer)
    } else {
        (!origins.is_empty()).then(|| layer.allow_origin(origins))
    }
}

/// A function that waits for the next signal to end.
fn end_signals() -> Result<impl AsyncFnMut(), String> {
    let mut interrupt = listen_to(SignalKind::interrupt())?;
    let mut terminate = listen_to(SignalKind::terminate())?;
    Ok(async move || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

fn listen_to(kind: SignalKind) -> Result<Signal, String> {
    signal(kind).map_err(|error| error.to_string())
}

async fn listen(option: &str, address: SocketAddr) -> Result<TcpListener, String> {
    let listener = TcpListener::bind(address).await;
    listener.map_err(|error| format!("{option} {address}: {error}"))
}

/// Raises the limit of open files as far as the system allows, and returns how many connections of clients fit below it, each
/// with one to an upstream.
fn max_connections() -> Result<usize, String> {
    let fault = |error| format!("the limit of open files: {error}");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(fault)?;
    let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    let files = if raised.is_ok() { hard } else { soft };
    let most = files.saturating_sub(OWN_FILES) / 2;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    Ok(most.clamp(1, Semaphore::MAX_PERMITS))
}

/// Serves connections without end, at most `most` at a time. An HTTP/1 connection may be idle for this long.
async fn accept(
    (listener, most): (TcpListener, usize),
    gateway: Gateway,
    idle: Duration,
    connections: &GracefulShutdown,
) {
    let mut server = auto::Builder::new(TokioExecutor::new());
    server
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(idle);
    server
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE);
    let room = Arc::new(Semaphore::new(most));
    let mut warned = None;
    let mut warn = |fault: &dyn Display| {
        if warned.is_none_or(|at: Instant| at.elapsed() >= WARN_EVERY) {
            warned = Some(Instant::now());
            tracing::warn!(%fault, "new connections have to wait");
        }
    };
    loop {
        if room.available_permits() == 0 {
            warn(&format_args!("{most} connections are open"));
        }
        let place = room.clone().acquire_owned().await;
        match listener.accept().await {
            Ok((connection, peer)) => {
                let connection = (connection, place.ok());
                serve(connection, peer, gateway.clone(), &server, connections);
            }
            Err(error) => {
                warn(&error);
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves a connection, HTTP/1 or HTTP/2, on a task of its own, and keeps its place until it is closed.
fn serve(
    (connection, place): (TcpStream, Option<OwnedSemaphorePermit>),
    peer: SocketAddr,
    service: Gateway,
    server: &auto::Builder<TokioExecutor>,
    connections: &GracefulShutdown,
) {
    let _ = connection.set_nodelay(true);
    let has_asked = Arc::new(AtomicBool::new(false));
    let asks = has_asked.clone();
    let service = hyper_service(move |mut request: Request<Incoming>| {
        asks.store(true, Relaxed);
        // For limits by the client's address.
        request.extensions_mut().insert(PeerAddress(peer));
        service.clone().oneshot(request)
    });
    let connection = server.serve_connection(TokioIo::new(connection), service);
    let connection = connections.watch(connection.into_owned());
    tokio::spawn(async move {
        let _place = place;
        let mut connection = pin!(connection);
        let ended = match timeout(FIRST_REQUEST, &mut connection).await {
            Ok(ended) => ended,
            // hyper has no time limit until it knows the version.
            Err(_) if !has_asked.load(Relaxed) => return,
            Err(_) => connection.await,
        };
        if let Err(error) = ended {
            tracing::debug!(error, "a connection broke");
        }
    });
}

/// Parses the name of a header that belongs to nobody else.
fn header(text: &str) -> Result<HeaderName, String> {
    let name = HeaderName::try_from(text).ok();
    let name = name.filter(|name| name.as_str().starts_with("x-") && name != "x-api-key");
    name.ok_or_else(|| "it must be the name of a header of your own, with x- in front".to_owned())
}

/// Parses a time that is not 0.
fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let duration = Some(duration).filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| "it must be longer than 0s".to_owned())
}

/// Parses a number of bytes, KiB or MiB.
fn bytes(text: &str) -> Result<usize, String> {
    let (number, unit) = match text {
        _ if text.ends_with("MiB") => (&text[..text.len() - 3], 1024 * 1024),
        _ if text.ends_with("KiB") => (&text[..text.len() - 3], 1024),
        _ => (text, 1),
    };
    let number = number.trim().parse::<usize>().ok();
    let bytes = number.and_then(|number| number.checked_mul(unit));
    let bytes = bytes.filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| "it must be a number of bytes, such as 16MiB".to_owned())
}

/// Returns the first paragraph of clap's message, in one line.
fn first_paragraph(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.trim_start_matches("error: ");
    let words = text.split("\n\n").take(1).flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}
