//! The examples that are packages: `grpc`, `admin` and `proxy`. `metrics` is the server of other tests.

mod support;

use http_body_util::BodyExt;
use support::{
    GUARD, alone,
    redis_server::RedisServer,
    replica::{Replica, command},
    soon,
};
use tower_turnstile::{Limit, Limiter};

#[test]
fn grpc_shows_what_it_says() {
    let output = command("example-grpc", &[]).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(
        lines,
        [
            "server: a stream began",
            "server: another one is refused: ResourceExhausted, \"calls: 1 of 1 slots in use\", to be tried again in 1s",
            "server: a call with another key is served",
            "server: the stream has ended, and a call is served",
            "client: a call beside a stream is refused: ResourceExhausted, \"own-calls: 1 of 1 slots in use\", to be tried again in 1s",
            "client: the stream was dropped, and a call is served",
        ]
    );
}

/// The page ends with the service.
#[test]
fn a_service_with_a_page_ends_by_sigterm() {
    alone(async {
        let options = ["--listen", "127.0.0.1:0", "--page-port", "0"];
        let mut replica = Replica::launch(command("example-admin", &options)).await;
        assert_eq!(replica.terminate().await, Some(0));
    });
}

/// A proxy with one slot for each key, and so many KiB a minute.
async fn proxy(server: &RedisServer, upstream: &Replica, traffic: &str) -> Replica {
    let upstream = format!("http://{}", upstream.address());
    let mut proxy = command("example-proxy", &["--upstream", &upstream]);
    proxy.args(["--listen", "127.0.0.1:0", "--store", &server.url()]);
    proxy.args(["--requests", "1", "--traffic", traffic]);
    Replica::launch(proxy).await
}

const LONG: &str = "/stream?chunks=1000000&every=10";

/// A slot is held from the first byte to the last, or until the client leaves, in the view of another process.
#[test]
fn a_proxy_streams_and_holds_the_slot_meanwhile() {
    alone(async {
        let server = RedisServer::start();
        let upstream = Replica::start("memory:", &["--limit", "100"]).await;
        let mut proxy = proxy(&server, &upstream, "100000").await;
        let limiter = Limiter::builder().lease(4 * GUARD).store_timeout(GUARD);
        let limiter = limiter.connect(server.url()).await.expect("it is up");
        let limit = Limit::concurrent("requests", 1).wait_up_to(GUARD);
        let slot = limiter.semaphore(limit, "me").unwrap();

        let stream = proxy.get(LONG).key("me");
        let (response, connection) = soon(stream.send()).await.expect("it runs");
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        // The upstream does not end: what arrives was passed on at once.
        let first = soon(body.frame()).await.expect("a frame").expect("whole");
        assert!(!first.into_data().expect("data").is_empty());
        // On a machine that stalls, the proxy's fallback has admitted the request, and the store learns of it later.
        soon(async { while slot.try_acquire().await.is_ok() {} }).await;
        assert_eq!(proxy.get("/free").key("you").status().await, 200);

        drop((body, connection));
        let permit = soon(slot.acquire()).await.expect("the client has left");
        drop(permit);

        let short = proxy.get("/stream?chunks=30&every=10").key("me");
        let (response, _connection) = soon(short.send()).await.expect("it runs");
        proxy.ask_to_end();
        let whole = soon(response.into_body().collect()).await;
        let whole = whole.expect("it ends in order").to_bytes();
        assert_eq!(String::from_utf8_lossy(&whole).matches("data").count(), 30);
        assert_eq!(soon(proxy.terminated()).await, Some(0));
    });
}

#[test]
fn a_proxy_refuses_a_key_whose_budget_is_used_up() {
    alone(async {
        let server = RedisServer::start();
        let upstream = Replica::start("memory:", &["--limit", "100"]).await;
        let proxy = proxy(&server, &upstream, "2").await;
        // The first response puts the budget into debt: that of the proxy's fallback, on a machine that stalls.
        let refused = async {
            loop {
                let long = proxy.get("/stream?chunks=1000&every=0").key("me");
                let (response, _connection) = long.send().await.expect("it runs");
                if response.status() != 200 {
                    return response;
                }
                let body = response.into_body().collect().await.expect("whole");
                assert!(body.to_bytes().len() > 2048);
            }
        };
        let refused = soon(refused).await;
        assert_eq!(refused.status(), 429);
        assert!(refused.headers().contains_key("retry-after"));
        assert_eq!(proxy.get("/free").key("you").status().await, 200);
    });
}
