//! A streaming reverse proxy for a service such as a language model, whose limits stand in a file.
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

use std::{
    convert::Infallible,
    error::Error,
    io::IsTerminal,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use bytes::Bytes;
use clap::Parser;
use futures_util::{FutureExt, future::join};
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header,
    uri::{Authority, Scheme},
};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
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
    config::{Config, ConfigFileError, LiveConfig},
    layer::{ReadAheadBody, ReadAheadLayer},
};
use tracing_subscriber::EnvFilter;

/// How long connections may take to close once their streams have ended.
const CLOSE: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
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
    /// How long the upstream may take to begin its response
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

async fn read(path: &Path) -> Result<Config, String> {
    let config = Config::from_file(path).await;
    config.map_err(|error| in_one_line(&error))
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

/// The way to the upstream. Cheap to clone; clones share connections.
#[derive(Clone)]
struct Proxy {
    client: Client<HttpConnector, ReadAheadBody<Incoming>>,
    upstream: Authority,
    head_timeout: Duration,
}

type Body = Either<Incoming, Full<Bytes>>;

impl Proxy {
    fn new(upstream: Authority, head_timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(connector);
        Self {
            client,
            upstream,
            head_timeout,
        }
    }

    /// Asks the upstream. Bodies go both ways as they come. Dropping this, or the response, drops the upstream's call.
    async fn forward(
        self,
        request: Request<ReadAheadBody<Incoming>>,
        peer: IpAddr,
    ) -> Result<Response<Body>, Infallible> {
        let Some(request) = self.rewritten(request, peer) else {
            return Ok(own(StatusCode::BAD_REQUEST));
        };
        let response = match timeout(self.head_timeout, self.client.request(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                let error: &(dyn Error + 'static) = &error;
                tracing::warn!(error, "the upstream failed");
                return Ok(own(StatusCode::BAD_GATEWAY));
            }
            Err(_) => {
                tracing::warn!("the upstream took too long");
                return Ok(own(StatusCode::GATEWAY_TIMEOUT));
            }
        };
        let (mut head, body) = response.into_parts();
        remove_hop_by_hop(&mut head.headers);
        head.version = Version::default();
        Ok(Response::from_parts(head, Either::Left(body)))
    }

    /// The request as the upstream gets it; `None` if there is no path in it.
    fn rewritten<B>(&self, request: Request<B>, peer: IpAddr) -> Option<Request<B>> {
        let (mut head, body) = request.into_parts();
        head.uri = Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(self.upstream.clone())
            .path_and_query(head.uri.path_and_query()?.clone())
            .build()
            .ok()?;
        head.version = Version::default();
        remove_hop_by_hop(&mut head.headers);
        // The client puts in that of the URI.
        head.headers.remove(header::HOST);
        let peer = HeaderValue::try_from(peer.to_canonical().to_string()).ok()?;
        head.headers.append(X_FORWARDED_FOR, peer);
        Some(Request::from_parts(head, body))
    }
}

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// What belongs to one connection (RFC 9110, 7.6.1), beside what the field `Connection` names.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<_> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| HeaderName::try_from(name.trim()).ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// A response of the gateway itself.
fn own(status: StatusCode) -> Response<Body> {
    let reason = status.canonical_reason().unwrap_or_default();
    let mut response = Response::new(Either::Right(Full::from(reason)));
    *response.status_mut() = status;
    response
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
