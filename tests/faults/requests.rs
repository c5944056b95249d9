//! Requests and replies that are late, lost, overtaken or abandoned: work executed after everybody has stopped waiting.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use tokio::time::sleep;

use crate::{
    scene::{
        Holders, LEASE, PATIENT, POLL, SLACK, STORE_TIMEOUT, calls, queue, quick, replica, scripts,
        semaphore, soon, start, strict, until_empty, until_usage, usage,
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

/// A server that allows `DEBUG`, as Redis 6 always does.
pub(crate) fn debuggable(options: &[&str]) -> RedisServer {
    let server = RedisServer::start_with(options);
    match server
        .cli(&["CONFIG", "GET", "enable-debug-command"])
        .as_str()
    {
        "" => server,
        _ => RedisServer::start_with(&[options, &["--enable-debug-command", "yes"]].concat()),
    }
}

/// Puts the server to sleep, before this returns. On waking, Redis runs everything that was sent meanwhile.
pub(crate) fn put_to_sleep(server: &RedisServer, seconds: &str) -> TcpStream {
    let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).expect("it listens");
    let (mut sleeper, mut asker) = (connect(), connect());
    let debug = format!("DEBUG SLEEP {seconds}\r\n");
    sleeper.write_all(debug.as_bytes()).expect("open");
    asker
        .set_read_timeout(Some(Duration::from_millis(40)))
        .expect("a time");
    loop {
        asker.write_all(b"PING\r\n").expect("open");
        if asker.read(&mut [0; 64]).is_err() {
            return sleeper;
        }
    }
}

/// G6. Redis runs a request even if its client is gone. Before `not_after` the following release frees the slot; after
/// it the request is void.
#[tokio::test]
async fn an_acquire_abandoned_in_flight_leaves_no_ghost() {
    for store_timeout in [STORE_TIMEOUT, Duration::from_secs(2)] {
        let server = debuggable(&[]);
        let limiter = quick()
            .lease(3 * LEASE + SLACK)
            .store_timeout(store_timeout);
        let limiter = limiter.connect(&server.url()).await.expect("it is up");
        let one = limiter.semaphore(strict(1), "key");
        drop(soon(one.acquire()).await.expect("free"));
        until_empty(&server).await;

        let before = scripts(&server);
        let _asleep = put_to_sleep(&server, "1");
        let mut request = one.acquire();
        start(&mut request);
        // The driver sends it meanwhile: this runtime has one thread.
        sleep(Duration::from_millis(1)).await;
        let answer = request.now_or_never();
        assert!(answer.is_none(), "G6: it is in flight when it is dropped");
        // The server answers again after its sleep.
        let keys = server.key_count();
        let began = Instant::now();
        while scripts(&server) == before {
            assert!(began.elapsed() < PATIENT, "it was sent");
        }
        let took = until_empty(&server).await;
        println!(
            "store_timeout {store_timeout:?}: {keys} keys when it awoke, empty {took:?} later"
        );
        assert!(took < POLL + SLACK, "G6: {took:?}");
        let other = semaphore(&server.url(), &strict(1)).await;
        drop(soon(other.try_acquire()).await.expect("free"));
        until_empty(&server).await;
    }
}

/// G6. The connection is cut while an acquire is in flight. The release overtakes it on the next connection. Only then
/// does the acquire arrive: it is granted, and the release is repeated.
#[tokio::test]
async fn an_acquire_that_arrives_after_its_release_leaves_no_ghost() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let limiter = quick().lease(4 * LEASE).store_timeout(LEASE);
    let limiter = limiter.connect(&proxy.url()).await.expect("it is up");
    let one = limiter.semaphore(strict(1), "key");
    drop(soon(one.acquire()).await.expect("free"));
    until_empty(&server).await;

    proxy.hold(Way::Requests, 0);
    let sent = proxy.seen().connections[0].received(Way::Requests);
    let mut request = one.acquire();
    start(&mut request);
    soon(proxy.until(|seen| seen.connections[0].received(Way::Requests) > sent)).await;
    drop(request);
    let before = scripts(&server);
    proxy.cut_client(0);
    // The release, on a separate connection.
    while scripts(&server) == before {
        sleep(Duration::from_millis(2)).await;
    }
    let granted = calls(&server, "zadd");
    proxy.release(Way::Requests);
    while calls(&server, "zadd") == granted {
        sleep(Duration::from_millis(1)).await;
    }
    let took = until_empty(&server).await;
    println!("a ghost for {took:?}");
    assert!(took < POLL + SLACK, "G6: {took:?}");
}

/// G6. A renewal that arrives after the release does not revive the permit, and takes no slot from its next holder.
#[tokio::test]
async fn a_renewal_that_arrives_after_the_release_revives_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let one = semaphore(&proxy.url(), &strict(1)).await;
    let other = semaphore(&server.url(), &strict(1)).await;
    let permit = soon(one.acquire()).await.expect("free");

    proxy.hold(Way::Requests, 0);
    let sent = proxy.seen().connections[0].received(Way::Requests);
    // A third of the lease later.
    soon(proxy.until(|seen| seen.connections[0].received(Way::Requests) > sent)).await;
    drop(permit);
    proxy.cut_client(0);
    let next = soon(other.acquire()).await.expect("the release went first");
    let before = scripts(&server);
    proxy.release(Way::Requests);
    while scripts(&server) == before {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(usage(&other).await, (1, 0), "G6");
    assert!(!next.is_lost(), "G6");
    drop(next);
    let took = until_empty(&server).await;
    println!("empty {took:?} after the last release");
    assert!(took < SLACK, "G6: {took:?}");
}

/// G6. A late release, already repeated long ago on another connection, affects no other holder.
#[tokio::test]
async fn a_release_that_arrives_late_touches_no_other_holder() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let one = semaphore(&proxy.url(), &strict(1)).await;
    let permit = soon(one.acquire()).await.expect("free");
    proxy.hold(Way::Requests, 0);
    let sent = proxy.seen().connections[0].received(Way::Requests);
    drop(permit);
    soon(proxy.until(|seen| seen.connections[0].received(Way::Requests) > sent)).await;
    proxy.cut_client(0);
    // On the same replica the next permit differs only in its number.
    let next = soon(one.acquire()).await.expect("released meanwhile");
    let before = scripts(&server);
    proxy.release(Way::Requests);
    while scripts(&server) == before {
        sleep(Duration::from_millis(1)).await;
    }
    // A request of unknown fate may have left a waiter, which is gone afterwards.
    soon(async {
        loop {
            let (in_use, waiting) = usage(&one).await;
            assert_eq!(in_use, 1, "G6");
            if waiting == 0 {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    sleep(LEASE).await;
    assert!(!next.is_lost(), "G6");
}

/// G6. The fate of requests is unknown, again and again: this leaves neither ghosts nor slots granted twice.
#[tokio::test]
async fn lost_replies_cost_neither_the_cap_nor_a_slot() {
    const CAP: u32 = 3;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(CAP);
    let lossy = semaphore(&proxy.url(), &strict(CAP)).await;
    let sound = semaphore(&server.url(), &strict(CAP)).await;
    let hold = Duration::from_millis(5);
    let loads = [holders.load(&lossy, 8, hold), holders.load(&sound, 4, hold)];
    for _ in 0..8 {
        proxy.drop_replies(true);
        sleep(Duration::from_millis(150)).await;
        proxy.drop_replies(false);
        sleep(Duration::from_millis(250)).await;
    }
    let [lossy, sound] = loads;
    let (lossy, sound) = (lossy.finish().await, sound.finish().await);
    let took = until_empty(&server).await;
    let (figures, seen) = (holders.figures(), proxy.seen());
    let lost = seen.received(Way::Replies) - seen.delivered(Way::Replies);
    println!(
        "{figures}; {lost} bytes lost on {} connections; lossy {lossy:?}, sound {sound:?}; empty after {took:?}",
        seen.accepted()
    );
    assert!(lost > 0 && lossy.admitted > 0 && sound.admitted > 0);
    assert!(figures.peak <= CAP as usize, "G1: {figures}");
    assert!(took < STORE_TIMEOUT + POLL + SLACK, "G6: {took:?}");
    assert!(sound.refused.is_empty(), "{sound:?}");
}

/// G2. A wake-up that arrives when its grant may be over is not used: another holder may have the slot by then.
#[tokio::test]
async fn a_late_wake_up_is_not_used() {
    let server = RedisServer::start();
    let holders = Holders::count(1);
    let proxy = FaultProxy::start(server.port());
    // While the wake-up is held back, these limiters must not poll, or they would notice the grant.
    let long = quick().lease(10 * LEASE);
    let giver = long.clone().connect(&server.url()).await.expect("it is up");
    let giver = giver.semaphore(strict(1), "key");
    let rarely = long.poll_interval(4 * LEASE).waiter_ttl(12 * LEASE);
    let late = rarely.connect(&proxy.url()).await.expect("it is up");
    let late = late.semaphore(strict(1), "key");
    let other = replica(&server.url()).await.semaphore(strict(1), "key");

    let held = holders.enter(soon(giver.acquire()).await.expect("free"));
    let first = queue(&late, 1).await;
    let second = queue(&other, 2).await;
    proxy.hold_all(Way::Replies);
    let granted = Instant::now();
    drop(held);
    // The first grant ends unused, after the giver's `waiter_ttl`.
    let next = holders.enter(soon(second).await.expect("no panic"));
    let passed = granted.elapsed();
    proxy.release(Way::Replies);
    until_usage(&other, |in_use, waiting| (in_use, waiting) == (1, 1)).await;
    assert!(!first.is_finished(), "G2");
    drop(next);
    let last = holders.enter(soon(first).await.expect("no panic"));
    assert!(!last.is_lost());
    println!("the slot went on after {passed:?}; {}", holders.figures());
    assert_eq!(holders.figures().peak, 1, "G1, G2");
}

/// G2. A reply delayed by less than the timeout: the permit's deadline counts from the sending of its request.
#[tokio::test]
async fn a_slow_store_shortens_permits_and_breaks_no_cap() {
    const CAP: u32 = 2;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(CAP);
    let [slow, quick] = [
        semaphore(&proxy.url(), &strict(CAP)).await,
        semaphore(&server.url(), &strict(CAP)).await,
    ];
    let delay = STORE_TIMEOUT / 2 - Duration::from_millis(50);
    proxy.delay(Way::Requests, delay);
    proxy.delay(Way::Replies, delay / 2);
    let began = Instant::now();
    let permit = soon(slow.acquire()).await.expect("late, but in time");
    let lasts = permit.deadline().expect("held") - tokio::time::Instant::now();
    let took = began.elapsed();
    println!("granted after {took:?}, held for {lasts:?} of {LEASE:?} from then on");
    assert!(took >= delay + delay / 2, "{took:?}");
    assert!(lasts <= LEASE - (delay + delay / 2), "G2: {lasts:?}");
    drop(permit);
    // A request may wait for the exchange before its own, and a new connection takes four round trips.
    proxy.delay(Way::Requests, STORE_TIMEOUT / 10);
    proxy.delay(Way::Replies, STORE_TIMEOUT / 20);
    let hold = Duration::from_millis(20);
    let loads = [holders.load(&slow, 4, hold), holders.load(&quick, 4, hold)];
    sleep(2 * LEASE / 3).await;
    for load in loads {
        let done = load.finish().await;
        assert!(done.admitted > 0 && done.refused.is_empty(), "G8: {done:?}");
    }
    println!("{}", holders.figures());
    assert!(holders.figures().peak <= CAP as usize, "G1");
}

/// G8. After the TCP handshake, a new connection takes three round trips, so that it fits into an exchange's time
/// limit. A limiter's first connection asks more questions than a later one.
#[tokio::test]
async fn a_connection_to_a_distant_store_is_made_in_time() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let way = Duration::from_millis(200);
    proxy.delay(Way::Requests, way);
    proxy.delay(Way::Replies, way);
    let limiter = tower_turnstile::Limiter::builder()
        .store_timeout(9 * way)
        .connect(proxy.url());
    let began = Instant::now();
    let limiter = soon(limiter).await.expect("valid");
    let took = began.elapsed();
    println!("connected after {took:?}, with {:?} a round trip", 2 * way);
    assert!(limiter.status().store_up, "after {took:?}");
    // More would take further round trips on a real network, whose connections start slowly.
    let sent = proxy.seen().received(Way::Requests);
    assert!(sent < 10 * 1_460, "{sent} bytes");
    let permit = soon(limiter.semaphore(strict(1), "key").acquire()).await;
    drop(permit.expect("free"));
}
