//! Runs before the limits: canonicalises paths, authenticates callers, and turns refusals into errors of the client's dialect.
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
    callers::Callers,
    dialect::Dialect,
    fault::{Fault, set_rate_limits},
    path::canonical,
    silence::SilenceError,
    sse::is_event_stream,
    unread::discard,
};

/// Time for the last event of a stream to be sent, before its connection is cut.
const CUT_AFTER: Duration = Duration::from_millis(100);

/// Serves a request through the limited service.
pub(crate) async fn respond<S, B>(
    limited: S,
    callers: Callers,
    mut request: Request<Incoming>,
) -> Result<Response<Either<EndingBody<B>, Full<Bytes>>>, Infallible>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes>,
{
    let dialect = Dialect::of(request.uri().path());
    let is_head = request.method() == Method::HEAD;
    let answer = |fault: &Fault, dialect| full(fault.to_response(dialect), is_head);
    let Some(uri) = canonical(request.uri()) else {
        discard_body(request).await;
        return Ok(answer(&Fault::ambiguous_path(), dialect));
    };
    let (dialect, path) = (Dialect::of(uri.path()), uri.path().to_owned());
    let what = format!("{} {path}", request.method());
    *request.uri_mut() = uri;
    if !callers.know(request.headers()) {
        discard_body(request).await;
        return Ok(answer(&Fault::no_key(), dialect));
    }
    let upgrade = request.headers().get(header::UPGRADE);
    if upgrade.is_some_and(|name| name.as_bytes().eq_ignore_ascii_case(b"websocket")) {
        let message = "the gateway serves no WebSockets: send the request over HTTP";
        let fault = Fault::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message);
        return Ok(answer(&fault, dialect));
    }
    let Ok(response) = limited.oneshot(request).await;
    let (mut head, body) = response.into_parts();
    let refusal = head.extensions.remove::<Refusal>();
    let refused = refusal
        .as_ref()
        .map(|refusal| Fault::of_refusal(refusal, &what));
    set_rate_limits(&mut head.headers, dialect, refusal.as_ref());
    if let Some(fault) = refused.or_else(|| head.extensions.remove::<Fault>()) {
        let mut response = answer(&fault, dialect);
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
    let body = EndingBody {
        body,
        stream: is_stream.then_some((dialect, path)),
        cut: None,
    };
    Ok(Response::from_parts(head, Either::Left(body)))
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
        let (Some(Err(error)), Some((dialect, path))) = (&frame, &self.stream) else {
            return Poll::Ready(frame);
        };
        let Some(fault) = fault_of(error.as_ref()) else {
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
    let mut next = Some(error);
    let mut causes = iter::from_fn(|| {
        let cause = next?;
        next = cause.source();
        Some(cause)
    });
    causes.find_map(|cause| {
        if let Some(lost) = cause.downcast_ref::<LostError>() {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Some(Fault::new(status, "stream_ended", lost.to_string()));
        }
        let silence = cause.downcast_ref::<SilenceError>()?;
        let status = StatusCode::GATEWAY_TIMEOUT;
        Some(Fault::new(status, "upstream_silent", silence.to_string()))
    })
}
