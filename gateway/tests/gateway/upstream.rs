//! The service behind the gateways.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures_util::{
    Stream, StreamExt,
    future::{pending, ready},
    stream,
};
use http::{HeaderValue, Request, Response, StatusCode, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpListener,
    sync::{Notify, watch},
};

use crate::answers::{Answer, End, named};

/// A request with `x-answer` gets the answer of that name, or no answer if the name is `silent`. Other requests are
///
/// - at `/v1/chat/stream` and `/v1/models/stream` an event, and more as the test says, without end;
/// - at `/v1/chat/short` answered at once;
/// - at `/v1/chat/silent` never answered;
/// - at `/v1/chat/echo` answered with its own body, as it comes.
pub(crate) struct Upstream {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    /// Calls that have come and are not over.
    calls: watch::Sender<usize>,
    story: watch::Sender<Story>,
    /// The head of the latest call.
    head: Mutex<Option<Parts>>,
    /// The body of the latest call with `x-answer`.
    body: Mutex<Bytes>,
    cut: Notify,
}

/// State that all streams report.
#[derive(Clone, Copy)]
struct Story {
    events: usize,
    end: Option<StoryEnd>,
}

#[derive(Clone, Copy)]
enum StoryEnd {
    Whole,
    Broken,
}

type Body = BoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

impl Upstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            calls: watch::Sender::default(),
            story: watch::Sender::new(Story {
                events: 1,
                end: None,
            }),
            head: Mutex::default(),
            body: Mutex::default(),
            cut: Notify::new(),
        });
        tokio::spawn(accept(listener, shared.clone()));
        Self { address, shared }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until this many calls are open.
    pub(crate) async fn until_calls(&self, calls: usize) {
        let mut now = self.shared.calls.subscribe();
        now.wait_for(|now| *now == calls).await.expect("it goes on");
    }

    /// The next event of all streams.
    pub(crate) fn tell(&self) {
        self.shared.story.send_modify(|story| story.events += 1);
    }

    /// Ends all streams.
    pub(crate) fn end(&self) {
        let end = Some(StoryEnd::Whole);
        self.shared.story.send_modify(|story| story.end = end);
    }

    /// Breaks all streams in the middle.
    pub(crate) fn fail(&self) {
        let end = Some(StoryEnd::Broken);
        self.shared.story.send_modify(|story| story.end = end);
    }

    /// Breaks the answer that waits for its cut, once.
    pub(crate) fn cut(&self) {
        self.shared.cut.notify_one();
    }

    /// Takes the head of the latest call.
    pub(crate) fn head(&self) -> Parts {
        let head = self.shared.head.lock().expect("no panic").take();
        head.expect("a call")
    }

    pub(crate) fn has_no_head(&self) -> bool {
        self.shared.head.lock().expect("no panic").is_none()
    }

    /// Body of the latest call with `x-answer`.
    pub(crate) fn body(&self) -> Bytes {
        self.shared.body.lock().expect("no panic").clone()
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((connection, _)) = listener.accept().await {
        let shared = shared.clone();
        let service = service_fn(move |request| answer(shared.clone(), request));
        tokio::spawn(async move {
            // The connection ends in an error when a stream breaks on purpose, or the gateway disconnects.
            let _ = http1::Builder::new()
                .serve_connection(TokioIo::new(connection), service)
                .await;
        });
    }
}

async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let call = Call::begin(&shared);
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let name = head.headers.get("x-answer");
    let name = name.map(|name| name.to_str().expect("text").to_owned());
    *shared.head.lock().expect("no panic") = Some(head);
    if let Some(name) = name {
        let body = body.collect().await.expect("whole").to_bytes();
        *shared.body.lock().expect("no panic") = body;
        if name == "silent" {
            return pending().await;
        }
        return Ok(scripted(named(&name), call));
    }
    let body = match path.as_str() {
        "/v1/chat/stream" | "/v1/models/stream" => StreamBody::new(events(call)).boxed_in(),
        "/v1/chat/silent" => pending().await,
        "/v1/chat/echo" => body.boxed_in(),
        _ => Full::from("done").boxed_in(),
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    for (name, value) in [
        ("connection", "x-hop"),
        ("keep-alive", "timeout=5"),
        ("x-hop", "for the gateway"),
        ("x-end", "for the client"),
    ] {
        headers.insert(name, value.parse().expect("a value"));
    }
    Ok(response)
}

fn scripted(answer: Answer, call: Call) -> Response<Body> {
    let shared = call.0.clone();
    let pieces = answer
        .pieces
        .into_iter()
        .map(|piece| Ok(Frame::data(piece)));
    let end = async move {
        let _open = call;
        match answer.end {
            End::Whole => None,
            End::Cut => {
                shared.cut.notified().await;
                Some(Err(io::Error::other("cut")))
            }
            End::Open => pending().await,
        }
    };
    let end = stream::once(end).filter_map(ready);
    let mut response = Response::new(StreamBody::new(stream::iter(pieces).chain(end)).boxed_in());
    *response.status_mut() = StatusCode::from_u16(answer.status).expect("a status");
    for (name, value) in answer.headers {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// `data: 1`, `data: 2` and so on, as far as the story goes.
fn events(call: Call) -> impl Stream<Item = io::Result<Frame<Bytes>>> {
    let story = call.0.story.subscribe();
    stream::unfold((0, story, call), async |(sent, mut story, call)| {
        let now = story.wait_for(|now| now.events > sent || now.end.is_some());
        let now = *now.await.ok()?;
        if now.events > sent {
            let event = Frame::data(Bytes::from(format!("data: {}\n\n", sent + 1)));
            return Some((Ok(event), (sent + 1, story, call)));
        }
        match now.end {
            Some(StoryEnd::Broken) => Some((Err(io::Error::other("broken")), (sent, story, call))),
            _ => None,
        }
    })
}

/// One that is open.
struct Call(Arc<Shared>);

impl Call {
    fn begin(shared: &Arc<Shared>) -> Self {
        shared.calls.send_modify(|calls| *calls += 1);
        Self(shared.clone())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.calls.send_modify(|calls| *calls -= 1);
    }
}

trait BoxedIn {
    fn boxed_in(self) -> Body;
}

impl<B> BoxedIn for B
where
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>
        + Send
        + Sync
        + 'static,
{
    fn boxed_in(self) -> Body {
        self.map_err(Into::into).boxed()
    }
}
