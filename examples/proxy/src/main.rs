//! A streaming reverse proxy that limits the requests in progress of each API key, and the traffic, across all replicas.
//!
//! ```sh
//! cargo run -p example-proxy -- --upstream http://127.0.0.1:8000 --store redis://127.0.0.1
//! curl -N -H 'x-api-key: me' http://127.0.0.1:3000/
//! ```
//!
//! A start to copy. It forwards to one upstream without TLS, does not forward upgrades (WebSockets), and expects an
//! authentication in front, since a request without a key is not limited. For language models, whose cost is counted in
//! tokens, see the command `turnstile-gateway` (`gateway/`).

use std::{convert::Infallible, error::Error, net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderName, Request, Response, StatusCode, Uri, header, uri::PathAndQuery},
    serve::ListenerExt,
};
use clap::{Parser, builder::TypedValueParser, value_parser};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    time::timeout,
};
use tower::{Layer, service_fn};
use tower_turnstile::{Limit, Limiter, OnLost, Slot, layer::ReadAheadBody};

const KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Name of the budget.
const TRAFFIC: &str = "traffic";
/// Longest time until the upstream begins its response.
const HEAD: Duration = Duration::from_secs(60);
/// Time for open responses to end after a signal.
const GRACE: Duration = Duration::from_secs(20);

/// A streaming reverse proxy with a limit and a budget for each x-api-key.
#[derive(Parser)]
struct Options {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// http://host:port
    #[arg(long)]
    upstream: Uri,
    /// memory: or redis://host:port
    #[arg(long, default_value = "memory:")]
    store: String,
    /// Requests in progress; others wait up to ten seconds
    #[arg(long, default_value_t = 4, value_parser = value())]
    requests: u32,
    /// KiB of responses per minute; a request costs at least one
    #[arg(long, default_value_t = 100_000, value_parser = value())]
    traffic: u32,
}

fn value() -> impl TypedValueParser<Value = u32> {
    value_parser!(u32).range(1..=i64::from(Limit::MAX))
}

type ClientBody = ReadAheadBody<Body>;

#[derive(Clone)]
struct Proxy {
    client: Client<HttpConnector, ClientBody>,
    upstream: Uri,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let limiter = Limiter::connect(&options.store).await?;
    let requests = Limit::concurrent("requests", options.requests);
    let requests = requests.wait_up_to(Duration::from_secs(10));
    let traffic = Limit::rate(TRAFFIC, options.traffic, Duration::from_secs(60)).unit("KiB");
    let layer = limiter
        .layer((requests.by_header(KEY), traffic.by_header(KEY)))?
        // A response that is cut ends with an error: its client does not take it for complete.
        .at_shutdown(OnLost::Abort)
        // A client that leaves while it waits is noticed, also behind a long request body.
        .read_ahead();

    let proxy = Proxy {
        client: Client::builder(TokioExecutor::new()).build_http(),
        upstream: options.upstream,
    };
    let forward = service_fn(move |request| proxy.clone().forward(request));
    let app = Router::new().fallback_service(layer.layer(forward));
    let listener = TcpListener::bind(options.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let ending = limiter.clone();
    let server = axum::serve(listener, app).with_graceful_shutdown(async move {
        stop().await;
        // Refuses requests from now on, and aborts the responses that are still open after the grace.
        tokio::spawn(async move { ending.shutdown(GRACE).await });
    });
    server.await?;
    limiter.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

/// Completes on SIGTERM, which a service manager sends to stop a process, and on ctrl-c.
async fn stop() {
    let mut terminate = signal(SignalKind::terminate()).expect("the signal can be awaited");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = ctrl_c() => {}
    }
}

impl Proxy {
    /// The slot is held until the response has been passed on. If the client leaves, the call to the upstream is dropped.
    async fn forward(self, request: Request<ClientBody>) -> Result<Response<Body>, Infallible> {
        let response = self.answer(request).await;
        Ok(response.unwrap_or_else(|status| {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = status;
            response
        }))
    }

    async fn answer(self, mut request: Request<ClientBody>) -> Result<Response<Body>, StatusCode> {
        let slot: Option<&Slot> = request.extensions().get();
        let budget = slot.and_then(|slot| slot.budget(TRAFFIC).ok());
        let budget = budget.ok_or(StatusCode::INTERNAL_SERVER_ERROR)?;
        *request.uri_mut() = self.uri(request.uri()).ok_or(StatusCode::BAD_GATEWAY)?;
        remove_hop_by_hop(request.headers_mut());
        // The client sets it from the URI.
        request.headers_mut().remove(header::HOST);

        let sent = timeout(HEAD, self.client.request(request)).await;
        let sent = sent.map_err(|_| StatusCode::GATEWAY_TIMEOUT)?;
        let mut response = sent.map_err(|_| StatusCode::BAD_GATEWAY)?;
        remove_hop_by_hop(response.headers_mut());
        // A key whose budget is used up is in debt: its next request is refused until the debt has drained.
        let mut bytes = 0;
        Ok(response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                bytes += frame.data_ref().map_or(0, |data| data.len() as u32);
                budget.spend(bytes / 1024);
                bytes %= 1024;
                frame
            }))
        }))
    }

    fn uri(&self, of_client: &Uri) -> Option<Uri> {
        let mut parts = self.upstream.clone().into_parts();
        let slash = PathAndQuery::from_static("/");
        parts.path_and_query = Some(of_client.path_and_query().cloned().unwrap_or(slash));
        Uri::from_parts(parts).ok()
    }
}

/// Removes the fields of a single connection (RFC 9110, 7.6.1).
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named = headers.get_all(header::CONNECTION).iter();
    let named = named
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','));
    let named: Vec<HeaderName> = named.filter_map(|name| name.trim().parse().ok()).collect();
    let of_connection = [
        header::CONNECTION,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ];
    for name in named.iter().chain(&of_connection) {
        headers.remove(name);
    }
}
