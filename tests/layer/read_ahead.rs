//! Clients that disconnect while their request waits, with an unread body: whether this is noticed, with and without
//! read-ahead, on real connections.

use std::{
    convert::Infallible,
    future::IntoFuture,
    io::{Read, Write},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, Request, Response, StatusCode, Version};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
    time::Instant,
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{Limiter, Permit, layer::ReadAheadLayer};

use crate::{
    servers::{server, until},
    support::{GUARD, ONE, Script, soon, take},
};

const KIB: usize = 1024;

/// A limiter whose only slot is taken, and a layer that waits for it.
pub(crate) async fn busy() -> (Limiter, Permit, ReadAheadLayer) {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    // Nobody leaves because the wait is over.
    let layer = limiter
        .layer(ONE.wait_up_to(6 * GUARD))
        .unwrap()
        .read_ahead();
    (limiter, permit, layer)
}

/// A service that reports its calls and reads the body.
fn reader<Q>() -> (
    impl Service<Request<Q>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + Sync
    + 'static,
    mpsc::UnboundedReceiver<()>,
)
where
    Q: Body<Data = Bytes, Error: Send> + Send + 'static,
{
    let (called, calls) = mpsc::unbounded_channel();
    let service = service_fn(move |request: Request<Q>| {
        let _ = called.send(());
        async move {
            let _ = request.into_body().collect().await;
            Ok(Response::new(Full::from("read")))
        }
    });
    (service, calls)
}

fn with_length(length: usize) -> Vec<u8> {
    let mut raw =
        format!("POST / HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n\r\n").into_bytes();
    raw.extend(bytes(length));
    raw
}

fn chunked(length: usize) -> Vec<u8> {
    let head = b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut raw = head.to_vec();
    for chunk in bytes(length).chunks(1_000) {
        raw.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        raw.extend(chunk);
        raw.extend(b"\r\n");
    }
    raw.extend(b"0\r\n\r\n");
    raw
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index % 251) as u8).collect()
}

/// Sends a raw request, counting the bytes, until the task is aborted.
fn http1(address: SocketAddr, raw: Vec<u8>) -> (JoinHandle<()>, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let client = tokio::spawn(async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        for part in raw.chunks(KIB) {
            stream.write_all(part).await.unwrap();
            count.fetch_add(part.len(), Ordering::Relaxed);
        }
        std::future::pending().await
    });
    (client, sent)
}

/// Queues with this request, sends at least this much of it, and disconnects.
async fn joins_and_leaves(limiter: &Limiter, address: SocketAddr, raw: Vec<u8>, at_least: usize) {
    let waiting = limiter.status().waiting;
    let (client, sent) = http1(address, raw);
    soon(until(|| limiter.status().waiting == waiting + 1)).await;
    soon(until(|| sent.load(Ordering::Relaxed) >= at_least)).await;
    client.abort();
    client.await.unwrap_err();
}

#[tokio::test]
async fn http1_client_that_leaves_is_noticed_whatever_it_sent() {
    let raws = [
        with_length(100),
        chunked(100),
        with_length(64 * KIB),
        chunked(64 * KIB),
    ];
    for raw in raws {
        let (limiter, permit, layer) = busy().await;
        let (service, mut calls) = reader();
        let address = server(layer, service).await;
        let length = raw.len();
        joins_and_leaves(&limiter, address, raw, length).await;
        soon(until(|| limiter.status().waiting == 0)).await;
        drop(permit);
        // A request that still waited would now be served.
        drop(take(&limiter).await);
        assert!(calls.try_recv().is_err());
    }
}

#[tokio::test]
async fn http1_client_that_leaves_in_the_middle_is_noticed() {
    for raw in [with_length(2048 * KIB), chunked(1024 * KIB)] {
        let (limiter, _permit, layer) = busy().await;
        let (service, _told) = reader();
        let address = server(layer, service).await;
        let begun = raw[..8 * KIB].to_vec();
        joins_and_leaves(&limiter, address, begun, 8 * KIB).await;
        soon(until(|| limiter.status().waiting == 0)).await;
    }
}

#[tokio::test]
async fn http1_client_with_a_long_body_is_noticed_if_so_much_is_read_ahead() {
    let (limiter, _permit, layer) = busy().await;
    let (service, _told) = reader();
    let address = server(layer.up_to(1024 * KIB), service).await;
    for raw in [with_length(1024 * KIB), chunked(1024 * KIB)] {
        let length = raw.len();
        joins_and_leaves(&limiter, address, raw, length).await;
        soon(until(|| limiter.status().waiting == 0)).await;
    }
}

/// Documented limitation: this test fails when the docs become outdated.
#[tokio::test]
async fn http1_client_with_more_than_is_read_ahead_is_not_noticed() {
    let (limiter, permit, layer) = busy().await;
    let (service, calls) = reader();
    let address = server(layer, service).await;
    keeps_its_position(&limiter, permit, address, calls, 1024 * KIB, 512 * KIB).await;
}

/// As above, with the layer without read-ahead.
#[tokio::test]
async fn http1_client_with_a_body_is_not_noticed_without_read_ahead() {
    let (limiter, permit, _) = busy().await;
    let (service, calls) = reader();
    let address = server(limiter.layer(ONE.wait_up_to(6 * GUARD)).unwrap(), service).await;
    keeps_its_position(&limiter, permit, address, calls, 64 * KIB, 64 * KIB).await;
}

async fn keeps_its_position(
    limiter: &Limiter,
    permit: Permit,
    address: SocketAddr,
    mut calls: mpsc::UnboundedReceiver<()>,
    length: usize,
    at_least: usize,
) {
    joins_and_leaves(limiter, address, with_length(length), at_least).await;
    // Clients that come and go afterwards give the server time to notice.
    for _ in 0..3 {
        joins_and_leaves(limiter, address, with_length(0), 1).await;
        soon(until(|| limiter.status().waiting == 1)).await;
    }
    drop(permit);
    soon(calls.recv()).await.expect("the service is called");
}

#[tokio::test]
async fn http2_client_that_leaves_is_noticed_in_any_case() {
    let (limiter, _permit, ahead) = busy().await;
    let plain = limiter.layer(ONE.wait_up_to(6 * GUARD)).unwrap();
    let ((with, _), (without, _)) = (reader(), reader());
    for address in [server(ahead, with).await, server(plain, without).await] {
        for length in [100, 64 * KIB, 1024 * KIB] {
            let mut client = http2(address).await;
            let call = tokio::spawn(client.send_request(upload(length)));
            soon(until(|| limiter.status().waiting == 1)).await;
            call.abort();
            soon(until(|| limiter.status().waiting == 0)).await;

            // All its tasks end with their runtime, and so does the connection.
            let clients = tokio::runtime::Runtime::new().unwrap();
            let call = async move { http2(address).await.send_request(upload(length)).await };
            clients.spawn(call);
            soon(until(|| limiter.status().waiting == 1)).await;
            clients.shutdown_background();
            soon(until(|| limiter.status().waiting == 0)).await;
        }
    }
}

type Frames = stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>;

async fn http2(address: SocketAddr) -> http2::SendRequest<StreamBody<Frames>> {
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn upload(length: usize) -> Request<StreamBody<Frames>> {
    let data = bytes(length);
    let frames = data.chunks(8 * KIB).map(Bytes::copy_from_slice);
    let frames = frames.map(|data| Ok(Frame::data(data))).collect::<Vec<_>>();
    let body = StreamBody::new(stream::iter(frames));
    Request::post("http://test/").body(body).unwrap()
}

/// The client has closed its side in the middle of the body, and still listens.
#[tokio::test]
async fn request_whose_body_fails_is_refused() {
    let (_limiter, _permit, layer) = busy().await;
    let (service, mut calls) = reader();
    let address = server(layer, service).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    client
        .write_all(&with_length(2 * KIB)[..KIB])
        .await
        .unwrap();
    client.shutdown().await.unwrap();
    let mut answer = String::new();
    soon(client.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    assert!(calls.try_recv().is_err());
}

#[tokio::test]
async fn client_that_expects_100_continue_gets_it_only_if_it_waits() {
    let (limiter, permit, layer) = busy().await;
    let deaf =
        service_fn(|_: Request<_>| async move { Ok(Response::new(Full::<Bytes>::from("served"))) });
    let address = server(layer, deaf).await;
    let ask = b"POST / HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n";
    let mut permit = Some(permit);
    for first in ["HTTP/1.1 100 ", "HTTP/1.1 200 "] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(ask).await.unwrap();
        let mut head = [0; 13];
        soon(client.read_exact(&mut head)).await.unwrap();
        assert_eq!(str::from_utf8(&head).unwrap(), first);
        drop((client, permit.take()));
        soon(until(|| limiter.status() == Limiter::in_memory().status())).await;
    }
}

/// Sends each request whole before it reads the response, as simple clients do. Returns the number of responses that came
/// whole on one connection.
fn answered(address: SocketAddr, raw: &[u8], requests: usize) -> usize {
    let mut client = std::net::TcpStream::connect(address).unwrap();
    client.set_read_timeout(Some(GUARD)).unwrap();
    let mut read = Vec::new();
    for before in 0..requests {
        for part in raw.chunks(64 * KIB) {
            if client.write_all(part).is_err() {
                return before;
            }
            // As fast as a network.
            std::thread::sleep(Duration::from_millis(1));
        }
        read.clear();
        while !is_whole(&String::from_utf8_lossy(&read)) {
            let mut part = [0; 1024];
            match client.read(&mut part) {
                Ok(0) | Err(_) => return before,
                Ok(count) => read.extend_from_slice(&part[..count]),
            }
        }
        assert!(read.starts_with(b"HTTP/1.1 503 "));
    }
    requests
}

fn is_whole(response: &str) -> bool {
    response.split_once("\r\n\r\n").is_some_and(|(head, body)| {
        let mut lines = head.lines();
        let length = lines.find_map(|line| line.strip_prefix("content-length: "));
        body.len() == length.expect("a length").parse::<usize>().unwrap()
    })
}

/// hyper closes a connection with an unread body, and the kernel then resets it.
#[tokio::test]
async fn http1_client_that_sends_its_body_first_sees_the_refusal() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let patient = ONE.wait_up_to(Duration::from_millis(50));
    for (limit, clients) in [(ONE, 50), (patient, 3)] {
        let (service, mut calls) = reader();
        let address = server(limiter.layer(limit).unwrap().read_ahead(), service).await;
        for raw in [with_length(2048 * KIB), chunked(1000 * KIB)] {
            let client = move || {
                // The layer reads for a second, and the machine may have stood still for as long.
                let is_answered =
                    |requests| (0..2).any(|_| answered(address, &raw, requests) == requests);
                let of_one = (0..clients).filter(|_| is_answered(1));
                // The connection stays open.
                (of_one.count(), is_answered(3))
            };
            let answers = tokio::task::spawn_blocking(client).await.unwrap();
            assert_eq!(answers, (clients, true));
        }
        assert!(calls.try_recv().is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_waits_for_a_body_that_may_be_sent_soon() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let (service, _calls) = reader();
    let service = limiter.layer(ONE).unwrap().read_ahead().layer(service);
    let delay = async |request: Request<Script>| {
        let asked = Instant::now();
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        asked.elapsed()
    };
    let post = |body| Request::post("/").body(body).unwrap();
    let stalled = || Script::of(["begun"]).then_waits();
    assert_eq!(delay(post(stalled())).await.as_secs(), 1);
    let mut over_http2 = post(stalled());
    *over_http2.version_mut() = Version::HTTP_2;
    let mut waits_for_100 = post(stalled());
    let expects = HeaderValue::from_static("100-continue");
    waits_for_100.headers_mut().insert("expect", expects);
    for at_once in [
        post(Script::of([]).tells_end()),
        post(Script::of(["whole"])),
        post(Script::of(["begun"]).then_fails()),
        post(stalled().of_length(8 * 1024 * 1024 + 1)),
        over_http2,
        waits_for_100,
    ] {
        let what = format!("{at_once:?}");
        assert!(delay(at_once).await.is_zero(), "{what}");
    }
}

/// While the request waits its body is read, so the client is told to continue.
#[tokio::test(start_paused = true)]
async fn refusal_waits_for_a_body_that_was_asked_for() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let (service, _calls) = reader();
    let wait = Duration::from_millis(50);
    let layer = limiter.layer(ONE.wait_up_to(wait)).unwrap().read_ahead();
    let post = Request::post("/").header("expect", "100-continue");
    let request = post.body(Script::of(["begun"]).then_waits()).unwrap();
    let asked = Instant::now();
    let response = layer.layer(service).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(asked.elapsed().as_secs(), 1);
}

#[tokio::test]
async fn refusal_does_not_wait_for_a_body_without_end() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let (service, _calls) = reader();
    let service = limiter.layer(ONE).unwrap().read_ahead().layer(service);
    let frames = Arc::new(AtomicUsize::new(0));
    let count = frames.clone();
    let frame = move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[0; 64 * KIB])))
    };
    let body = StreamBody::new(stream::repeat_with(frame).take(1_000));
    let call = service.oneshot(Request::post("/").body(body).unwrap());
    let response = soon(call).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(frames.load(Ordering::Relaxed), 128, "8 MiB");
}

#[tokio::test]
async fn whole_upload_arrives_after_a_wait() {
    let limiter = Limiter::in_memory();
    let permit = take(&limiter).await;
    let app: Router = Router::new()
        .route("/", post(async |body: Bytes| body))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .layer(limiter.layer(ONE.wait_up_to(GUARD)).unwrap().read_ahead());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, app).into_future());
    let client = reqwest::Client::new();
    let url = format!("http://{address}/");
    let sent = bytes(1024 * KIB);
    let call = tokio::spawn(client.post(url).body(sent.clone()).send());
    soon(until(|| limiter.status().waiting == 1)).await;
    drop(permit);
    let answer = call.await.unwrap().unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(answer.bytes().await.unwrap() == sent);
}
