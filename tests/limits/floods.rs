//! G5, G7: one client opens and resets thousands of HTTP/2 streams.

use std::{convert::Infallible, future::pending, net::SocketAddr};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::{Request, Response, StatusCode};
use http_body_util::StreamBody;
use hyper::{body::Frame, server::conn::http2};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, service_fn};
use tower_turnstile::{Limit, Limiter};

use crate::{
    connect, idle, resident_kib, script_calls,
    support::{GUARD, alone, redis_server::RedisServer},
};

const STREAMS: u32 = 4_000;
/// Streams opened before they are reset together.
const AT_ONCE: u32 = 100;
const SLOTS: u32 = 8;
const FLOOD: Limit = Limit::concurrent("flood", SLOTS).wait_up_to(GUARD);

#[test]
fn thousands_of_streams_that_are_reset_leave_nothing_behind() {
    alone(async {
        let server = RedisServer::start();
        let limiter = connect(&server).await;
        let address = serve(&limiter).await;
        flood(address, AT_ONCE).await;
        idle(&limiter, &server).await;

        let (calls, before_kib) = (script_calls(&server), resident_kib());
        flood(address, STREAMS).await;
        idle(&limiter, &server).await;
        let calls = script_calls(&server) - calls;
        let more_kib = resident_kib().saturating_sub(before_kib);
        println!("{STREAMS} streams reset: {calls} script calls, {more_kib} KiB more");
        // Acquires and releases, and some polls.
        assert!(calls <= u64::from(2 * STREAMS), "{calls}");
        assert!(more_kib < 32 * 1024, "{more_kib}");

        let mut client = open(address).await;
        let (answer, _stream) = client.send_request(request(), true).unwrap();
        assert_eq!(answer.await.unwrap().status(), StatusCode::OK);
    });
}

/// Sends the flood over one connection, many streams at once. Some are answered, but most are still waiting when they
/// are reset.
async fn flood(address: SocketAddr, streams: u32) {
    let mut client = open(address).await;
    for _ in 0..streams / AT_ONCE {
        let (answers, mut streams) = (FuturesUnordered::new(), Vec::new());
        for _ in 0..AT_ONCE {
            client = client.ready().await.unwrap();
            let (answer, stream) = client.send_request(request(), true).unwrap();
            answers.push(answer);
            streams.push(stream);
        }
        // All slots are taken again, by whichever streams came first: the earlier ones have released theirs.
        let mut admitted = answers.take(SLOTS as usize);
        while let Some(answer) = admitted.next().await {
            assert_eq!(answer.unwrap().status(), StatusCode::OK);
        }
        for stream in &mut streams {
            stream.send_reset(h2::Reason::CANCEL);
        }
    }
}

async fn open(address: SocketAddr) -> h2::client::SendRequest<Bytes> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client
}

fn request() -> Request<()> {
    Request::get("http://localhost/").body(()).unwrap()
}

/// Serves endless bodies until the test's runtime ends.
async fn serve(limiter: &Limiter) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let endless = || futures_util::stream::once(pending::<Result<Frame<Bytes>, Infallible>>());
    let service = service_fn(move |_: Request<hyper::body::Incoming>| async move {
        Ok::<_, Infallible>(Response::new(StreamBody::new(endless())))
    });
    let service = TowerToHyperService::new(limiter.layer(FLOOD).unwrap().layer(service));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            // Otherwise hyper ends the connection before the flood reaches the layer.
            builder.max_pending_accept_reset_streams(STREAMS as usize);
            tokio::spawn(builder.serve_connection(TokioIo::new(stream), service.clone()));
        }
    });
    address
}
