//! Readers that stop but stay connected: their calls end with their slots, on real connections.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{future::join_all, stream};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo},
};
use tokio::net::TcpStream;
use tokio_test::{assert_pending, task};
use tower::{BoxError, Layer, Service, ServiceExt, layer::util::Identity, service_fn};
use tower_turnstile::{Limit, LimitLayer, Limiter, OnLost};

use crate::{
    servers::{request, server, until},
    support::{Gauge, ONE, Watched, held, soon},
};

const EIGHT: Limit = Limit::concurrent("eight", 8).wait_up_to(Duration::from_secs(600));
const BOUND: Duration = Duration::from_millis(200);
const BOUNDS: [fn(LimitLayer) -> LimitLayer; 2] =
    [|layer| layer.idle(BOUND), |layer| layer.max_hold(BOUND)];

#[derive(Clone, Copy, Debug)]
enum Version {
    Http1,
    Http2,
}

const VERSIONS: [Version; 2] = [Version::Http1, Version::Http2];

/// Opens several requests at once, until each has its response head, unless its slot has ended by then, as after a stall of the
/// machine. The bodies are not read, so windows and sockets fill up.
async fn open(version: Version, address: SocketAddr, count: usize) -> Vec<Response<Incoming>> {
    let get = || request(Method::GET);
    let responses = match version {
        Version::Http1 => {
            let calls = (0..count).map(async |_| {
                let (mut sender, connection) = http1::handshake(connect(address).await).await?;
                tokio::spawn(connection);
                sender.send_request(get()).await
            });
            soon(join_all(calls)).await
        }
        Version::Http2 => {
            let handshake = http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(16_384)
                .handshake(connect(address).await);
            let (sender, connection) = handshake.await.unwrap();
            tokio::spawn(connection);
            let calls = (0..count).map(|_| sender.clone().send_request(get()));
            soon(join_all(calls)).await
        }
    };
    let responses = responses.into_iter().flatten();
    responses
        .filter(|one| one.status() == StatusCode::OK)
        .collect()
}

async fn connect(address: SocketAddr) -> TokioIo<TcpStream> {
    TokioIo::new(TcpStream::connect(address).await.unwrap())
}

/// A service with endless responses, as fast as they are read.
fn flood<Q>(
    gauge: &Gauge,
) -> impl Service<
    Request<Q>,
    Response = Response<impl Body<Data = Bytes, Error = BoxError> + Send + 'static>,
    Error = std::convert::Infallible,
    Future: Send,
> + Clone
+ Send
+ Sync
+ 'static {
    let gauge = gauge.clone();
    service_fn(move |_| {
        let frame = || Ok::<_, BoxError>(Frame::data(vec![0; 65_536].into()));
        let body = StreamBody::new(stream::repeat_with(frame));
        let end = gauge.enter();
        std::future::ready(Ok(Response::new(Watched { body, end })))
    })
}

/// Reads the available data, and returns its length.
async fn read_on(
    mut response: Response<impl Body<Data = Bytes, Error: std::fmt::Debug> + Unpin>,
) -> usize {
    let mut bytes = 0;
    loop {
        match soon(response.frame()).await {
            Some(Ok(frame)) => bytes += frame.into_data().unwrap().len(),
            Some(Err(_)) => return bytes,
            None => panic!("cut short after {bytes} bytes, and taken for complete"),
        }
    }
}

/// A stall of the machine may end a call before its first byte, but not all.
async fn all_read_on(unread: Vec<Response<Incoming>>) {
    let bytes = join_all(unread.into_iter().map(read_on)).await;
    assert_ne!(bytes.into_iter().sum::<usize>(), 0);
}

/// Otherwise one client could pile up calls, because the slots of its unread responses serve its next requests.
#[tokio::test]
async fn no_more_calls_are_open_than_the_limit_allows() {
    for version in VERSIONS {
        for bound in BOUNDS {
            let (limiter, gauge) = (Limiter::in_memory(), Gauge::default());
            let address = server(bound(limiter.layer(EIGHT).unwrap()), flood(&gauge)).await;
            let mut unread = Vec::new();
            for _ in 0..3 {
                let began = Instant::now();
                unread.append(&mut open(version, address, 8).await);
                soon(until(|| held(&limiter) == 0)).await;
                assert!(began.elapsed() >= BOUND, "not before its time");
            }
            gauge.until(0).await;
            assert!((1..=8).contains(&gauge.most()), "{version:?}");
            all_read_on(unread).await;
        }
    }
}

/// A client waiting for its peer does not read either. A program that ignores a response adds to the unread ones.
#[tokio::test]
async fn clients_let_go_of_calls_that_are_not_read() {
    for version in VERSIONS {
        let gauge = Gauge::default();
        let peer = server(Identity::new(), flood(&gauge)).await;
        let client = Client::builder(TokioExecutor::new())
            .http2_only(matches!(version, Version::Http2))
            .build_http::<Empty<Bytes>>();
        let limiter = Limiter::in_memory();
        let client = limiter.layer(ONE).unwrap().idle(BOUND).layer(client);
        let get = Request::get(format!("http://{peer}/")).body(Empty::new());
        let response = soon(client.oneshot(get.unwrap())).await.unwrap();
        assert_eq!(gauge.most(), 1, "{version:?}");
        // The peer notices that the client is gone.
        gauge.until(0).await;
        assert_eq!(held(&limiter), 0);
        read_on(response).await;
    }
}

#[tokio::test]
async fn clients_let_go_of_calls_that_are_not_polled() {
    for version in VERSIONS {
        let gauge = Gauge::default();
        let counted = gauge.clone();
        let silent = service_fn(move |_: Request<Incoming>| {
            let open = counted.enter();
            async move {
                let _open = open;
                std::future::pending::<Result<Response<Empty<Bytes>>, _>>().await
            }
        });
        let peer = server(Identity::new(), silent).await;
        let client = Client::builder(TokioExecutor::new())
            .http2_only(matches!(version, Version::Http2))
            .build_http::<Empty<Bytes>>();
        let limiter = Limiter::in_memory();
        let client = limiter
            .layer(ONE)
            .unwrap()
            .on_lost(OnLost::Abort)
            .layer(client);
        let get = Request::get(format!("http://{peer}/")).body(Empty::new());
        let mut call = task::spawn(client.oneshot(get.unwrap()));
        // A separate task opens the connection once it is requested.
        while gauge.open() == 0 {
            if call.is_woken() || gauge.most() == 0 {
                assert_pending!(call.poll());
            }
            tokio::task::yield_now().await;
        }
        limiter.shutdown(Duration::ZERO).await;
        gauge.until(0).await;
        let refused = soon(call).await.unwrap();
        assert_eq!(
            refused.status(),
            StatusCode::SERVICE_UNAVAILABLE,
            "{version:?}"
        );
    }
}

mod lost {
    use tower_turnstile::{Fallback, Key};

    use super::*;
    use crate::common::{fault_proxy::FaultProxy, redis_server::RedisServer};

    async fn replica(url: &str, lease: Duration) -> Limiter {
        let builder = Limiter::builder()
            .lease(lease)
            .store_timeout(lease / 4)
            .poll_interval(Duration::from_millis(100));
        builder.connect(url).await.expect("up")
    }

    /// When another replica gets the slots, their previous work has ended.
    #[tokio::test]
    async fn store_that_is_black_holed_for_longer_than_a_lease() {
        for version in VERSIONS {
            let redis = RedisServer::start();
            let proxy = FaultProxy::start(redis.port());
            let limiter = replica(&proxy.url(), Duration::from_secs(2)).await;
            let other = replica(&redis.url(), Duration::from_secs(600)).await;
            let gauge = Gauge::default();
            // In an outage there may be more work than slots.
            let eight = EIGHT.fallback(Fallback::Reject);
            let layer = limiter.layer(&eight).unwrap().on_lost(OnLost::Abort);
            let address = server(layer, flood(&gauge)).await;
            let unread = open(version, address, 8).await;

            proxy.half_open(true);
            let mut taken = Vec::new();
            while taken.len() < 8 {
                let permit = soon(other.semaphore(&eight, Key::SHARED).unwrap().acquire()).await;
                taken.push(permit.expect("a slot comes free"));
                assert!(gauge.open() + taken.len() <= 8, "G1");
            }
            proxy.half_open(false);
            all_read_on(unread).await;
        }
    }
}
