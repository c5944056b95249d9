//! The way to the upstream and back.

use std::{convert::Infallible, error::Error, net::IpAddr, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header,
    request::Parts,
    uri::{Authority, Scheme},
};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use tokio::time::timeout;
use tower_turnstile::{AcquireError, Refusal, Slot, layer::ReadAheadBody};

use crate::{
    meter::{Meter, MeteredBody},
    prompt::{Dialect, Prompt},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The way to the upstream. Cheap to clone; clones share connections.
#[derive(Clone)]
pub(crate) struct Proxy {
    client: Client<HttpConnector, ClientBody>,
    upstream: Authority,
    head_timeout: Duration,
}

pub(crate) type Body = Either<MeteredBody<Incoming>, Full<Bytes>>;
type ClientBody = Either<ReadAheadBody<Incoming>, Full<Bytes>>;

/// A request that the gateway answers itself.
enum Failure {
    Status(StatusCode),
    Refused(AcquireError),
}

impl Proxy {
    pub(crate) fn new(upstream: Authority, head_timeout: Duration) -> Self {
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

    /// Asks the upstream. Dropping this, or the response, drops the upstream's call.
    pub(crate) async fn forward(
        self,
        request: Request<ReadAheadBody<Incoming>>,
        peer: IpAddr,
    ) -> Result<Response<Body>, Infallible> {
        let answer = self.answer(request, peer).await;
        Ok(answer.unwrap_or_else(Failure::into_response))
    }

    /// Bodies go both ways as they come, but for the requests that are charged: they are read before.
    async fn answer(
        self,
        request: Request<ReadAheadBody<Incoming>>,
        peer: IpAddr,
    ) -> Result<Response<Body>, Failure> {
        let (mut head, body) = request.into_parts();
        self.rewrite(&mut head, peer)
            .ok_or(Failure::Status(StatusCode::BAD_REQUEST))?;
        let (body, mut meter) = match Dialect::of(&head) {
            Some(dialect) => {
                let (prompt, meter) = self.charge(dialect, &mut head, body).await?;
                (Either::Right(prompt), Some(meter))
            }
            None => (Either::Left(body), None),
        };
        match self.send(Request::from_parts(head, body)).await {
            Ok(response) => {
                let (mut head, body) = response.into_parts();
                if let Some(meter) = &mut meter {
                    meter.begin(&head);
                }
                remove_hop_by_hop(&mut head.headers);
                head.version = Version::default();
                let body = MeteredBody::new(body, meter);
                Ok(Response::from_parts(head, Either::Left(body)))
            }
            Err(status) => {
                if let Some(meter) = meter {
                    meter.fail();
                }
                Err(Failure::Status(status))
            }
        }
    }

    /// Reads the prompt and charges it.
    async fn charge(
        &self,
        dialect: Dialect,
        head: &mut Parts,
        body: ReadAheadBody<Incoming>,
    ) -> Result<(Full<Bytes>, Meter), Failure> {
        let prompt = Prompt::read(dialect, &head.headers, body);
        let prompt = timeout(self.head_timeout, prompt).await;
        let prompt = prompt.unwrap_or(Err(StatusCode::REQUEST_TIMEOUT));
        let prompt = prompt.map_err(Failure::Status)?;
        // The client puts in that of the body, which may be longer now. And what is compressed could not be read.
        head.headers.remove(header::CONTENT_LENGTH);
        head.headers.remove(header::ACCEPT_ENCODING);
        // Without one the slot was lost.
        let hold = head.extensions.get().and_then(Slot::hold);
        let hold = hold.ok_or(Failure::Status(StatusCode::SERVICE_UNAVAILABLE))?;
        let meter = Meter::charge(hold, prompt.tokens).await;
        let meter = meter.map_err(Failure::Refused)?;
        Ok((Full::from(prompt.body), meter))
    }

    async fn send(&self, request: Request<ClientBody>) -> Result<Response<Incoming>, StatusCode> {
        match timeout(self.head_timeout, self.client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => {
                let error: &(dyn Error + 'static) = &error;
                tracing::warn!(error, "the upstream failed");
                Err(StatusCode::BAD_GATEWAY)
            }
            Err(_) => {
                tracing::warn!("the upstream took too long");
                Err(StatusCode::GATEWAY_TIMEOUT)
            }
        }
    }

    /// Makes it the head that the upstream gets. `None`: there is no path in it.
    fn rewrite(&self, head: &mut Parts, peer: IpAddr) -> Option<()> {
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
        Some(())
    }
}

impl Failure {
    fn into_response(self) -> Response<Body> {
        let response = match self {
            Self::Refused(error) => Refusal::from(&error).to_response(),
            Self::Status(status) => {
                let reason = status.canonical_reason().unwrap_or_default();
                let mut response = Response::new(Bytes::from(reason));
                *response.status_mut() = status;
                response
            }
        };
        response.map(|body| Either::Right(Full::from(body)))
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
