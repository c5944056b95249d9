//! Responses that end on a real connection, with hyper on both sides, over HTTP/1 and HTTP/2.

use std::{convert::Infallible, net::SocketAddr};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt, Empty, Full};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower::{BoxError, Layer, Service, service_fn};
use tower_turnstile::{Limiter, OnLost, Slot};

use crate::support::{GUARD, ONE, Script, freed, held, serve, soon, take};

/// Serves on a separate port until the test's runtime ends.
pub(crate) async fn server<L, S, B>(layer: L, service: S) -> SocketAddr
where
    L: Layer<S>,
    L::Service: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    L::Service: Service<Request<Incoming>, Future: Send> + Clone + Send + Sync + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = TowerToHyperService::new(layer.layer(service));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let builder = auto::Builder::new(TokioExecutor::new());
                let io = TokioIo::new(stream);
                let _ = builder.serve_connection_with_upgrades(io, service).await;
            });
        }
    });
    address
}

pub(crate) async fn http1(address: SocketAddr) -> http1::SendRequest<Empty<Bytes>> {
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (sender, connection) = http1::handshake(io).await.unwrap();
    tokio::spawn(connection);
    sender
}

pub(crate) async fn http2(address: SocketAddr) -> http2::SendRequest<Empty<Bytes>> {
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    sender
}

pub(crate) fn request(method: Method) -> Request<Empty<Bytes>> {
    let request = Request::builder().method(method).uri("http://test/");
    request.body(Empty::new()).unwrap()
}

fn endless() -> Script {
    Script::of(["data: 1\n\n"]).then_waits()
}

#[tokio::test]
async fn http1_client_that_leaves_mid_stream_releases() {
    let limiter = Limiter::in_memory();
    let address = server(limiter.layer(ONE).unwrap(), serve(endless())).await;
    let mut client = http1(address).await;
    let mut response = client.send_request(request(Method::GET)).await.unwrap();
    response.frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 1);
    drop((client, response));
    freed(&limiter).await;
}

#[tokio::test]
async fn http1_client_that_leaves_while_waiting_gives_up_its_place() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let address = server(
        limiter.layer(ONE.wait_up_to(6 * GUARD)).unwrap(),
        serve(endless()),
    )
    .await;
    let mut client = TcpStream::connect(address).await.unwrap();
    client
        .write_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        .await
        .unwrap();
    soon(until(|| limiter.status().waiting == 1)).await;
    drop(client);
    soon(until(|| limiter.status().waiting == 0)).await;
}

#[tokio::test]
async fn http2_reset_mid_stream_releases() {
    let limiter = Limiter::in_memory();
    let address = server(limiter.layer(ONE).unwrap(), serve(endless())).await;
    let mut client = http2(address).await;
    let mut response = client.send_request(request(Method::GET)).await.unwrap();
    response.frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 1);
    drop(response); // RST_STREAM; the connection stays
    freed(&limiter).await;
    assert!(client.is_ready());
}

#[tokio::test]
async fn http2_reset_while_waiting_gives_up_its_place() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let address = server(
        limiter.layer(ONE.wait_up_to(6 * GUARD)).unwrap(),
        serve(endless()),
    )
    .await;
    let mut client = http2(address).await;
    let call = tokio::spawn(client.send_request(request(Method::GET)));
    soon(until(|| limiter.status().waiting == 1)).await;
    call.abort();
    soon(until(|| limiter.status().waiting == 0)).await;
    assert!(client.is_ready());
}

#[tokio::test]
async fn http2_connection_that_breaks_releases() {
    let limiter = Limiter::in_memory();
    let address = server(limiter.layer(ONE).unwrap(), serve(endless())).await;
    let clients = tokio::runtime::Runtime::new().unwrap();
    let response = clients.spawn(async move {
        let mut client = http2(address).await;
        client.send_request(request(Method::GET)).await.unwrap()
    });
    response.await.unwrap().frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 1);
    clients.shutdown_background();
    freed(&limiter).await;
}

#[tokio::test]
async fn head_request_releases() {
    let limiter = Limiter::in_memory();
    let address = server(limiter.layer(ONE).unwrap(), serve(endless())).await;
    let (mut one, mut two) = (http1(address).await, http2(address).await);
    for _ in 0..2 {
        let response = one.send_request(request(Method::HEAD)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        freed(&limiter).await;
        let response = two.send_request(request(Method::HEAD)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        freed(&limiter).await;
    }
}

/// Such bodies are never sent, whatever the service returns.
#[tokio::test]
async fn no_content_and_not_modified_release() {
    let limiter = Limiter::in_memory();
    for status in [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED] {
        let service = service_fn(move |_| {
            let mut response = Response::new(endless());
            *response.status_mut() = status;
            std::future::ready(Ok(response))
        });
        let address = server(limiter.layer(ONE).unwrap(), service).await;
        let mut client = http1(address).await;
        let response = client.send_request(request(Method::GET)).await.unwrap();
        assert_eq!(response.status(), status);
        freed(&limiter).await;
        assert!(client.ready().await.is_ok());
    }
}

/// A server that has sent the announced length does not poll for the end.
#[tokio::test]
async fn content_length_reached_releases() {
    let limiter = Limiter::in_memory();
    let script = Script::of(["1234"]).then_waits().of_length(4);
    let address = server(limiter.layer(ONE).unwrap(), serve(script)).await;
    let mut client = http1(address).await;
    for _ in 0..2 {
        let response = client.send_request(request(Method::GET)).await.unwrap();
        assert_eq!(response.headers()[header::CONTENT_LENGTH], "4");
        assert_eq!(response.collect().await.unwrap().to_bytes(), "1234");
        freed(&limiter).await;
    }
}

#[tokio::test]
async fn whole_body_with_trailers_releases() {
    let limiter = Limiter::in_memory();
    let script = Script::of(["a", "b"]).trailers("x-sum", "2");
    let address = server(limiter.layer(ONE).unwrap(), serve(script)).await;
    let mut client = http2(address).await;
    let response = client.send_request(request(Method::GET)).await.unwrap();
    let collected = response.collect().await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-sum"], "2");
    freed(&limiter).await;
}

#[tokio::test]
async fn lost_slot_breaks_the_response_off() {
    for http2_too in [false, true] {
        let limiter = Limiter::in_memory();
        let layer = limiter.layer(ONE).unwrap().on_lost(OnLost::Abort);
        let address = server(layer, serve(endless())).await;
        let sent = request(Method::GET);
        let mut response = if http2_too {
            http2(address).await.send_request(sent).await.unwrap()
        } else {
            http1(address).await.send_request(sent).await.unwrap()
        };
        response.frame().await.unwrap().unwrap();
        limiter.shutdown(std::time::Duration::ZERO).await;
        assert!(soon(response.frame()).await.unwrap().is_err());
    }
}

#[tokio::test]
async fn refusal_is_a_whole_response() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let address = server(limiter.layer(ONE).unwrap(), serve(Full::from("served"))).await;
    let mut client = http1(address).await;
    for _ in 0..2 {
        let response = client.send_request(request(Method::GET)).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let length = response.headers()[header::CONTENT_LENGTH]
            .to_str()
            .unwrap()
            .to_owned();
        let json = response.collect().await.unwrap().to_bytes();
        assert_eq!(json.len().to_string(), length);
    }
}

/// Answers 101, and echoes until the client closes.
async fn echo(mut request: Request<Incoming>, holds: bool) -> Response<Empty<Bytes>> {
    let slot = request.extensions().get::<Slot>().expect("a slot");
    let hold = slot.hold().filter(|_| holds);
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let (mut from, mut to) = tokio::io::split(TokioIo::new(upgrade.await.unwrap()));
        let _ = tokio::io::copy(&mut from, &mut to).await;
        drop(hold);
    });
    let switching = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
    let switching = switching
        .header("connection", "upgrade")
        .header("upgrade", "echo");
    switching.body(Empty::new()).unwrap()
}

async fn upgraded(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let ask = b"GET / HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    stream.write_all(ask).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101 "));
    stream.write_all(b"ping").await.unwrap();
    let mut pong = [0; 4];
    stream.read_exact(&mut pong).await.unwrap();
    assert_eq!(&pong, b"ping");
    stream
}

#[tokio::test]
async fn upgrade_with_hold_keeps_its_slot_until_it_closes() {
    let limiter = Limiter::in_memory();
    let service = service_fn(|request| async move { Ok(echo(request, true).await) });
    let address = server(limiter.layer(ONE).unwrap(), service).await;
    let stream = upgraded(address).await;
    assert_eq!(held(&limiter), 1);
    drop(stream);
    freed(&limiter).await;
}

#[tokio::test]
async fn upgrade_without_hold_releases_at_its_head() {
    let limiter = Limiter::in_memory();
    let service = service_fn(|request| async move { Ok(echo(request, false).await) });
    let address = server(limiter.layer(ONE).unwrap(), service).await;
    let _stream = upgraded(address).await;
    freed(&limiter).await;
}

/// For states whose changes cannot be awaited.
pub(crate) async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}
