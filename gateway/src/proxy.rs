//! Forwards requests to the upstream, and responses back.

use std::{
    convert::Infallible,
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, header,
    request::Parts, uri::PathAndQuery,
};
use http_body::Body;
use http_body_util::{BodyExt, Either, Empty, Full};
use hyper::body::Incoming;
use tokio::time::timeout;
use tower::ServiceExt;
use tower_http::decompression::{Decompression, DecompressionBody};
use tower_turnstile::{AcquireError, PeerAddress, Refusal, Slot, layer::ReadAheadBody};

use crate::{
    access::{AccessLog, Entry},
    dialect::Dialect,
    discard::discard,
    endpoint::Endpoint,
    fault::Fault,
    meter::{Meter, MeteredBody},
    prompt::Prompt,
    silence::Silent,
    sse::is_event_stream,
    upstream::{self, HttpClient, Upstream},
    weights::Weights,
};

/// Forwards requests. Cheap to clone; clones share connections.
#[derive(Clone)]
pub(crate) struct Proxy {
    /// The second client opens a connection for each request.
    clients: [HttpClient<ClientBody>; 2],
    settings: Arc<Settings>,
}

/// Settings from the command line.
pub(crate) struct Settings {
    pub(crate) upstreams: Vec<Upstream>,
    /// Name of the limit that is charged.
    pub(crate) budget: Arc<str>,
    pub(crate) weights: Weights,
    /// Header with the caller's name, which the front has set.
    pub(crate) caller_header: Option<HeaderName>,
    pub(crate) asks_usage: bool,
    pub(crate) max_request: usize,
    pub(crate) head_timeout: Duration,
    pub(crate) silence: Duration,
    pub(crate) upstream_idle: Duration,
}

pub(crate) type ProxyBody = Either<MeteredBody<Silent<Answer>>, Empty<Bytes>>;
type Answer = DecompressionBody<Incoming>;
type ClientBody = Either<ReadAheadBody<Incoming>, Full<Bytes>>;

/// A request that was not answered by the upstream.
enum Failure {
    Fault(Fault),
    Refused(AcquireError),
}

impl Proxy {
    /// # Errors
    ///
    /// If an upstream needs TLS and the system has no root certificates.
    pub(crate) fn new(settings: Settings) -> Result<Self, String> {
        let with_tls = settings.upstreams.iter().any(Upstream::is_tls);
        Ok(Self {
            clients: upstream::clients(with_tls, settings.upstream_idle)?,
            settings: Arc::new(settings),
        })
    }

    /// Forwards a request. Dropping the future or the response drops the call to the upstream.
    ///
    /// If the upstream has not answered, the response is empty and has a [`Fault`] or a [`Refusal`] in its extensions.
    pub(crate) async fn forward(
        self,
        request: Request<ReadAheadBody<Incoming>>,
    ) -> Result<Response<ProxyBody>, Infallible> {
        let answer = self.answer(request).await;
        Ok(answer.unwrap_or_else(|failure| {
            let mut response = Response::new(Either::Right(Empty::new()));
            // For `overload`: the upstream has accepted nothing, and is not known to be overloaded.
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            match failure {
                Failure::Fault(fault) => drop(response.extensions_mut().insert(fault)),
                Failure::Refused(error) => {
                    drop(response.extensions_mut().insert(Refusal::from(&error)));
                }
            }
            response
        }))
    }

    /// Streams bodies in both directions. Only a request that costs tokens is read before it is sent.
    async fn answer(
        self,
        request: Request<ReadAheadBody<Incoming>>,
    ) -> Result<Response<ProxyBody>, Failure> {
        let (mut head, body) = request.into_parts();
        // No clone stays with the call to the upstream.
        let entry = head.extensions.remove::<Entry>();
        let entry = entry.unwrap_or_else(|| AccessLog::default().begin());
        entry.admitted(None);
        let endpoint = Endpoint::of(&head.method, head.uri.path());
        let version = head.version;
        let has_own_key = self.rewrite(&mut head)?;
        let (mut head_timeout, mut hides_usage) = (self.settings.head_timeout, false);
        let mut is_stream = false;
        let (body, mut meter) = match endpoint {
            Some(endpoint) => {
                let charged = self.charge(endpoint, version, &mut head, body, entry);
                let (prompt, meter) = charged.await?;
                (is_stream, hides_usage) = (prompt.is_stream, prompt.hides_usage);
                if !prompt.is_stream {
                    // The head comes with the complete response.
                    head_timeout = self.settings.silence;
                }
                (Either::Right(Full::from(prompt.body)), Some(meter))
            }
            None => (Either::Left(body), None),
        };
        let request = Request::from_parts(head, body);
        let sent = self.send(request, head_timeout, meter.is_some()).await;
        match sent.and_then(|response| with_accepted_key(response, has_own_key)) {
            Ok(response) => {
                let (mut head, body) = response.into_parts();
                remove_hop_by_hop(&mut head.headers);
                remove_foreign(&mut head.headers);
                head.version = Version::default();
                let mut body = Silent::new(body, self.settings.silence);
                let mut next = None;
                if is_stream && head.status.is_success() && !is_event_stream(&head.headers) {
                    // Some servers do not label their streams, which begin with a field or a comment.
                    if let Some(Ok(frame)) = next.insert(body.frame().await)
                        && let Some(first) = frame
                            .data_ref()
                            .and_then(|data| data.trim_ascii_start().first())
                        && b":deir".contains(first)
                    {
                        let events = HeaderValue::from_static("text/event-stream");
                        head.headers.insert(header::CONTENT_TYPE, events);
                    }
                }
                if let Some(meter) = &mut meter {
                    meter.begin(&head, hides_usage);
                }
                let body = MeteredBody { body, meter, next };
                Ok(Response::from_parts(head, Either::Left(body)))
            }
            Err(fault) => {
                if let Some(meter) = meter {
                    meter.fail();
                }
                Err(fault)
            }
        }
    }

    /// Reads the prompt and charges it.
    async fn charge(
        &self,
        endpoint: Endpoint,
        version: Version,
        head: &mut Parts,
        mut body: ReadAheadBody<Incoming>,
        entry: Entry,
    ) -> Result<(Prompt, Meter), Failure> {
        let settings = &self.settings;
        let waits = head.headers.contains_key(header::EXPECT);
        let prompt = Prompt::read(endpoint, &head.headers, &mut body, settings.max_request);
        let prompt = timeout(settings.head_timeout, prompt).await;
        match &prompt {
            // Refused unread: a client that waits to be told to go on sends nothing.
            Ok(Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, _))) if waits => {}
            Ok(Err(_)) => discard(version, body).await,
            // A client that is late has had its time.
            Ok(Ok(_)) | Err(_) => {}
        }
        let late = (
            StatusCode::REQUEST_TIMEOUT,
            "the request did not come in time".to_owned(),
        );
        let prompt = prompt.unwrap_or(Err(late));
        let mut prompt = prompt.map_err(|(status, message)| {
            Failure::Fault(Fault::new(status, "invalid_request", message))
        })?;
        entry.note(|line| line.model = prompt.model.take());
        if settings.asks_usage {
            prompt.ask_usage(endpoint);
        }
        // The length may have changed; the HTTP client sets it. A compressed response would have to be decoded.
        head.headers.remove(header::CONTENT_LENGTH);
        let identity = HeaderValue::from_static("identity");
        head.headers.insert(header::ACCEPT_ENCODING, identity);
        // The body was read as JSON in UTF-8; an upstream must not read it as another charset or a form.
        let json = HeaderValue::from_static("application/json");
        head.headers.insert(header::CONTENT_TYPE, json);
        let lost = || Fault::new(StatusCode::SERVICE_UNAVAILABLE, "lost", "the slot was lost");
        let hold = head.extensions.get().and_then(Slot::hold);
        let hold = hold.ok_or_else(|| Failure::Fault(lost()))?;
        let (asked, (budget, weights)) = (Instant::now(), (&settings.budget, settings.weights));
        let meter = Meter::charge(hold, budget, prompt.tokens, weights, entry.clone()).await;
        entry.admitted(Some(asked));
        Ok((prompt, meter.map_err(Failure::Refused)?))
    }

    /// `decodes`: decompresses a response, so that it can be read.
    async fn send(
        &self,
        request: Request<ClientBody>,
        head_timeout: Duration,
        decodes: bool,
    ) -> Result<Response<Answer>, Failure> {
        let [pooled, fresh] = &self.clients;
        let decoding = |client: &HttpClient<_>| Decompression::new(client.clone()).gzip(decodes);
        let (mut head, body) = request.into_parts();
        if body.size_hint().exact().is_none() {
            // Otherwise the HTTP client drops the body of a GET.
            let chunked = HeaderValue::from_static("chunked");
            head.headers.insert(header::TRANSFER_ENCODING, chunked);
        }
        let is_repeatable = head.method.is_idempotent() && body.is_end_stream();
        let again = is_repeatable
            .then(|| Request::from_parts(head.clone(), Either::Right(Full::default())));
        let sent = async {
            let sent = decoding(pooled)
                .oneshot(Request::from_parts(head, body))
                .await;
            match (sent, again) {
                // The upstream may have closed the connection just then.
                (Err(error), Some(again)) if !error.is_connect() => {
                    decoding(fresh).oneshot(again).await
                }
                (sent, _) => sent,
            }
        };
        let (status, message) = match timeout(head_timeout, sent).await {
            Ok(Ok(response)) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                tracing::warn!("the upstream switches to a protocol that nobody asked for");
                (
                    StatusCode::BAD_GATEWAY,
                    "the upstream answered in another protocol",
                )
            }
            Ok(Ok(response)) => return Ok(response),
            Ok(Err(error)) => {
                let error: &(dyn Error + 'static) = &error;
                tracing::warn!(error, "the upstream failed");
                (StatusCode::BAD_GATEWAY, "the upstream cannot be reached")
            }
            Err(_) => {
                tracing::warn!("the upstream took too long");
                (StatusCode::GATEWAY_TIMEOUT, "the upstream took too long")
            }
        };
        Err(Failure::Fault(Fault::new(
            status,
            "upstream_failed",
            message,
        )))
    }

    /// Turns the caller's head into the upstream's. Returns whether it has the gateway's own key.
    fn rewrite(&self, head: &mut Parts) -> Result<bool, Failure> {
        let path = head.uri.path().to_owned();
        let upstream = Upstream::of(&self.settings.upstreams, &path);
        let unknown = || Failure::Fault(Fault::unknown(&format!("{} {path}", head.method)));
        let upstream = upstream.ok_or_else(unknown)?;
        let slash = PathAndQuery::from_static("/");
        let path_and_query = head.uri.path_and_query().unwrap_or(&slash);
        head.uri = upstream.uri(path_and_query).ok_or_else(unknown)?;
        head.version = Version::default();
        // `Connection` may name it, but it is not the caller's.
        let caller = self.settings.caller_header.as_ref();
        let caller = caller.and_then(|name| Some((name, head.headers.remove(name)?)));
        remove_hop_by_hop(&mut head.headers);
        remove_foreign(&mut head.headers);
        if let Some((name, caller)) = caller {
            head.headers.insert(name, caller);
        }
        Dialect::of(&path).set_key(&mut head.headers, upstream.key.as_ref());
        // The HTTP client sets it from the URI.
        head.headers.remove(header::HOST);
        if let Some(PeerAddress(peer)) = head.extensions.get() {
            let peer = peer.ip().to_canonical().to_string();
            if let Ok(peer) = HeaderValue::try_from(peer) {
                head.headers.insert(X_FORWARDED_FOR, peer);
            }
        }
        Ok(upstream.key.is_some())
    }
}

/// An upstream that refuses the gateway's own key has failed: its answer may quote the key, and clients would take the error
/// for their own.
fn with_accepted_key<B>(response: Response<B>, has_own_key: bool) -> Result<Response<B>, Failure> {
    if !has_own_key || response.status() != StatusCode::UNAUTHORIZED {
        return Ok(response);
    }
    tracing::error!("the upstream refuses the gateway's key");
    let message = "the upstream refuses the gateway";
    let fault = Fault::new(StatusCode::BAD_GATEWAY, "upstream_failed", message);
    Err(Failure::Fault(fault))
}

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Fields of a single connection (RFC 9110, 7.6.1), besides those named by `Connection`.
const HOP_BY_HOP: &str = "connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer \
                          transfer-encoding upgrade";
/// Beginnings of fields about one side only.
const FOREIGN: &str = "openai-organization openai-project anthropic-organization-id set-cookie alt-svc \
                       strict-transport-security forwarded x-forwarded- x-real-ip x-http-method x-method-override \
                       x-original- x-rewrite-url";

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<_> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| HeaderName::try_from(name.trim()).ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP.split(' ') {
        headers.remove(name);
    }
}

/// Removes what is about the account and the connections of one side only (callers see their own limits), and what a caller
/// claims about its address, host, method or path, which the gateway has read elsewhere.
fn remove_foreign(headers: &mut HeaderMap) {
    let is_one = |name: &&HeaderName| {
        let name = name.as_str();
        name.contains("ratelimit") || FOREIGN.split(' ').any(|begin| name.starts_with(begin))
    };
    let names: Vec<_> = headers.keys().filter(is_one).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}
