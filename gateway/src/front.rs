//! Runs before the limits: canonicalises paths, authenticates callers, and turns refusals into errors of the client's dialect.
//! Decides how a request has ended.
//!
//! Tests: `tests/gateway/dialects.rs`, `paths.rs`.

use std::{
    convert::Infallible,
    error::Error,
    iter,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tower::{Service, ServiceExt};
use tower_turnstile::{BoxError, Refusal, layer::LostError};

use crate::{
    access::{AccessLog, Entry},
    callers::Callers,
    dialect::Dialect,
    discard::discard,
    fault::{Fault, set_rate_limits},
    path::canonical,
    silence::SilenceError,
    sse::is_event_stream,
};

/// Time for the last event of a stream to be sent, before its connection is cut.
const CUT_AFTER: Duration = Duration::from_millis(100);

/// Serves a request through the limited service.
pub(crate) async fn respond<S, B>(
    limited: S,
    callers: Callers,
    log: AccessLog,
    mut request: Request<Incoming>,
) -> Result<Response<Either<EndingBody<B>, Full<Bytes>>>, Infallible>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes>,
{
    let is_head = request.method() == Method::HEAD;
    let entry = log.begin();
    let admitted = admit(&callers, &entry, &mut request);
    let path = request.uri().path().to_owned();
    let (dialect, what) = (Dialect::of(&path), format!("{} {path}", request.method()));
    entry.note(|line| line.request.clone_from(&what));
    let answer = |fault: &Fault| {
        entry.refused(fault.status.as_u16(), fault.code);
        full(fault.to_response(dialect), is_head)
    };
    if let Err(fault) = admitted {
        entry.admitted(None);
        discard_body(request).await;
        return Ok(answer(&fault));
    }
    request.extensions_mut().insert(entry.clone());
    let Ok(response) = limited.oneshot(request).await;
    let (mut head, body) = response.into_parts();
    let refusal = head.extensions.remove::<Refusal>();
    let refused = refusal
        .as_ref()
        .map(|refusal| Fault::of_refusal(refusal, &what));
    set_rate_limits(&mut head.headers, dialect, refusal.as_ref());
    if let Some(fault) = refused.or_else(|| head.extensions.remove::<Fault>()) {
        let mut response = answer(&fault);
        // Keep the rate limit fields.
        for (name, value) in &head.headers {
            if name.as_str().contains("ratelimit") {
                response.headers_mut().append(name, value.clone());
            }
        }
        return Ok(response);
    }
    let is_stream = is_event_stream(&head.headers);
    if is_stream {
        // The usage report may be removed, or an error event added.
        head.headers.remove(header::CONTENT_LENGTH);
    }
    entry.note(|line| line.status = Some(head.status.as_u16()));
    // A decoder does not tell its end, but may know a length.
    if body.is_end_stream() || body.size_hint().exact() == Some(0) {
        entry.passed(Some("complete"));
        return Ok(Response::from_parts(head, Either::Right(Full::default())));
    }
    let body = EndingBody {
        body,
        stream: is_stream.then_some((dialect, path)),
        cut: None,
        entry,
    };
    Ok(Response::from_parts(head, Either::Left(body)))
}

/// Makes the path canonical, and finds the caller.
fn admit(callers: &Callers, entry: &Entry, request: &mut Request<Incoming>) -> Result<(), Fault> {
    *request.uri_mut() = canonical(request.uri()).ok_or_else(Fault::ambiguous_path)?;
    let caller = callers.admit(request.headers_mut());
    if let Some(caller) = caller.map_err(Fault::of_key)? {
        entry.note(|line| {
            line.caller = Some(caller.name.clone());
            line.tenant = Some(caller.tenant.clone());
        });
    }
    let upgrade = request.headers().get(header::UPGRADE);
    if upgrade.is_some_and(|name| name.as_bytes().eq_ignore_ascii_case(b"websocket")) {
        let message = "the gateway serves no WebSockets: send the request over HTTP";
        let status = StatusCode::UPGRADE_REQUIRED;
        return Err(Fault::new(status, "upgrade_required", message));
    }
    Ok(())
}

/// A response with this body. Over HTTP/2 no server removes the content of a response to HEAD.
fn full<B>(response: Response<Bytes>, is_head: bool) -> Response<Either<B, Full<Bytes>>> {
    let (mut head, body) = response.into_parts();
    let length = body.len();
    head.headers.insert(header::CONTENT_LENGTH, length.into());
    let body = if is_head { Bytes::new() } else { body };
    Response::from_parts(head, Either::Right(Full::from(body)))
}

/// A client that waits to be told to go on sends nothing.
async fn discard_body(request: Request<Incoming>) {
    if !request.headers().contains_key(header::EXPECT) {
        discard(request.version(), request.into_body()).await;
    }
}

/// Response body whose stream of events ends with an error event if the gateway cuts it.
pub(crate) struct EndingBody<B: Body> {
    body: B,
    /// The dialect and path of a stream of events.
    stream: Option<(Dialect, String)>,
    /// Set once the error event has been sent.
    cut: Option<Cut<B::Error>>,
    entry: Entry,
}

struct Cut<E> {
    error: Option<E>,
    at: Pin<Box<Sleep>>,
}

impl<B> Body for EndingBody<B>
where
    B: Body<Data = Bytes, Error = BoxError> + Unpin,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(cut) = &mut self.cut {
            ready!(cut.at.as_mut().poll(cx));
            return Poll::Ready(cut.error.take().map(Err));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let Some(Err(error)) = &frame else {
            // A server that knows the length stops polling after the last frame.
            let is_last = frame.is_none() || self.body.size_hint().exact() == Some(0);
            self.entry.passed(is_last.then_some("complete"));
            return Poll::Ready(frame);
        };
        let fault = fault_of(error.as_ref());
        let code = fault.as_ref().map_or("upstream_broke", |fault| fault.code);
        self.entry.passed(Some(code));
        let (Some(fault), Some((dialect, path))) = (fault, &self.stream) else {
            return Poll::Ready(frame);
        };
        let event = fault.to_event(*dialect, path);
        self.cut = Some(Cut {
            error: frame.and_then(Result::err),
            at: Box::pin(sleep(CUT_AFTER)),
        });
        Poll::Ready(Some(Ok(Frame::data(event))))
    }

    fn is_end_stream(&self) -> bool {
        self.cut.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // An error event may be added.
        match self.stream {
            Some(_) => SizeHint::default(),
            None => self.body.size_hint(),
        }
    }
}

/// Returns why the gateway ended a stream. `None`: the upstream ended it.
fn fault_of(error: &(dyn Error + 'static)) -> Option<Fault> {
    iter::successors(Some(error), |&error| error.source()).find_map(|cause| {
        if let Some(lost) = cause.downcast_ref::<LostError>() {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Some(Fault::new(status, "stream_ended", lost.to_string()));
        }
        let silence = cause.downcast_ref::<SilenceError>()?;
        let status = StatusCode::GATEWAY_TIMEOUT;
        Some(Fault::new(status, "upstream_silent", silence.to_string()))
    })
}
