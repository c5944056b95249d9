//! Requests and replies that are late, lost, overtaken or abandoned: work executed after everybody has stopped waiting.

use std::time::Duration;

use tokio::time::sleep;

use crate::{
    scene::{
        Holders, LEASE, LONG, POLL, STORE_TIMEOUT, calls, granted, queue, quick, scripts, soon,
        start, steady, steady_semaphore, strict, until_empty, until_usage, usage,
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

/// Bytes that the client has sent on the first connection.
fn sent(proxy: &FaultProxy) -> usize {
    proxy.seen().connections[0].received(Way::Requests)
}

async fn until_sent(proxy: &FaultProxy, before: usize) {
    soon(proxy.until(|seen| seen.connections[0].received(Way::Requests) > before)).await;
}

/// Waits until the server has run another script.
async fn until_script(server: &RedisServer, before: usize) {
    soon(async {
        while scripts(server) == before {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// G6. Redis runs a request even if its client is gone. Before `not_after` the following release frees the slot; after
/// it the request is void.
#[tokio::test]
async fn an_acquire_abandoned_in_flight_leaves_no_ghost() {
    for is_void in [false, true] {
        let server = RedisServer::start();
        let limiter = if !is_void {
            steady()
        } else {
            steady().store_timeout(STORE_TIMEOUT)
        };
        let limiter = limiter.connect(&server.url()).await.expect("it is up");
        let one = limiter.semaphore(strict(1), "key").unwrap();
        drop(granted(&one).await);
        until_empty(&server).await;
        until_usage(&one, |in_use, waiting| (in_use, waiting) == (0, 0)).await;

        let before = scripts(&server);
        server.pause();
        let mut request = one.acquire();
        start(&mut request);
        // The driver sends it meanwhile: this runtime has one thread.
        sleep(Duration::from_millis(1)).await;
        drop(request);
        if is_void {
            sleep(STORE_TIMEOUT + POLL).await;
        }
        // It runs all that was sent meanwhile.
        server.resume();
        until_script(&server, before).await;
        until_empty(&server).await;
        let other = steady_semaphore(&server.url(), &strict(1)).await;
        drop(soon(other.try_acquire()).await.expect("G6: free"));
        until_empty(&server).await;
    }
}

/// G6. The connection is cut while an acquire is in flight. The release overtakes it on the next connection. Only then
/// does the acquire arrive: it is granted, and the release is repeated.
#[tokio::test]
async fn an_acquire_that_arrives_after_its_release_leaves_no_ghost() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let one = steady_semaphore(&proxy.url(), &strict(1)).await;
    drop(soon(one.acquire()).await.expect("free"));
    until_empty(&server).await;

    proxy.hold(Way::Requests, 0);
    let before = sent(&proxy);
    let mut request = one.acquire();
    start(&mut request);
    until_sent(&proxy, before).await;
    drop(request);
    let before = scripts(&server);
    proxy.cut_client(0);
    // The release, on a separate connection.
    until_script(&server, before).await;
    let granted = calls(&server, "zadd");
    proxy.release(Way::Requests);
    soon(async {
        while calls(&server, "zadd") == granted {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    until_empty(&server).await;
}

/// G6. A renewal that arrives after the release does not revive the permit, and takes no slot from its next holder.
#[tokio::test]
async fn a_renewal_that_arrives_after_the_release_revives_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    // Renewals soon, and a lease that outlasts a stall of the machine.
    let soon_due = quick().lease(3 * LEASE).store_timeout(3 * LEASE / 4);
    let one = soon_due.connect(&proxy.url()).await.expect("it is up");
    let one = one.semaphore(strict(1), "key").unwrap();
    let other = steady_semaphore(&server.url(), &strict(1)).await;
    let permit = granted(&one).await;

    let number = proxy.seen().accepted() - 1;
    let sent = proxy.seen().connections[number].received(Way::Requests);
    proxy.hold(Way::Requests, number);
    // A third of the lease later.
    soon(proxy.until(|seen| seen.connections[number].received(Way::Requests) > sent)).await;
    drop(permit);
    proxy.cut_client(number);
    let next = soon(other.acquire()).await.expect("the release went first");
    let before = scripts(&server);
    proxy.release(Way::Requests);
    until_script(&server, before).await;
    assert_eq!(usage(&other).await, (1, 0), "G6");
    drop(next);
    until_empty(&server).await;
}

/// G6. A late release, already repeated long ago on another connection, affects no other holder.
#[tokio::test]
async fn a_release_that_arrives_late_touches_no_other_holder() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let one = steady_semaphore(&proxy.url(), &strict(1)).await;
    let permit = soon(one.acquire()).await.expect("free");
    proxy.hold(Way::Requests, 0);
    let before = sent(&proxy);
    drop(permit);
    until_sent(&proxy, before).await;
    proxy.cut_client(0);
    // On the same replica the next permit differs only in its number.
    let _next = soon(one.acquire()).await.expect("released meanwhile");
    let before = scripts(&server);
    proxy.release(Way::Requests);
    until_script(&server, before).await;
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
}

/// G6. The fate of requests is unknown, again and again: this leaves neither ghosts nor slots granted twice.
#[tokio::test]
async fn lost_replies_cost_neither_the_cap_nor_a_slot() {
    const CAP: u32 = 3;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(CAP);
    // Ghosts would stay for long.
    let lossy = steady().store_timeout(STORE_TIMEOUT);
    let lossy = lossy.connect(&proxy.url()).await.expect("it is up");
    let lossy = lossy.semaphore(strict(CAP), "key").unwrap();
    let sound = steady_semaphore(&server.url(), &strict(CAP)).await;
    let hold = Duration::from_millis(5);
    let loads = [holders.load(&lossy, 8, hold), holders.load(&sound, 4, hold)];
    for _ in 0..5 {
        proxy.drop_replies(true);
        sleep(Duration::from_millis(150)).await;
        proxy.drop_replies(false);
        drop(holders.enter(granted(&lossy).await));
    }
    let [lossy, sound] = loads;
    let (lossy, sound) = (lossy.finish().await, sound.finish().await);
    until_empty(&server).await;
    let (figures, seen) = (holders.figures(), proxy.seen());
    let lost = seen.received(Way::Replies) - seen.delivered(Way::Replies);
    println!(
        "{figures}; {lost} bytes lost on {} connections; lossy {lossy:?}, sound {sound:?}",
        seen.accepted()
    );
    assert!(lost > 0);
    assert!(figures.peak <= CAP as usize, "G1: {figures}");
    assert!(sound.refused.is_empty(), "{sound:?}");
}

/// G2. A wake-up that arrives when its grant may be over is not used: another holder may have the slot by then.
#[tokio::test]
async fn a_late_wake_up_is_not_used() {
    let server = RedisServer::start();
    let holders = Holders::count(1);
    let proxy = FaultProxy::start(server.port());
    let giver = quick().lease(LONG).connect(&server.url()).await;
    let giver = giver
        .expect("it is up")
        .semaphore(strict(1), "key")
        .unwrap();
    // While the wake-up is held back, it must not poll, or it would notice the grant.
    let rarely = steady().poll_interval(LONG).waiter_ttl(3 * LONG);
    let late = rarely.connect(&proxy.url()).await.expect("it is up");
    let late = late.semaphore(strict(1), "key").unwrap();
    let other = steady_semaphore(&server.url(), &strict(1)).await;

    let held = holders.enter(granted(&giver).await);
    let first = queue(&late, 1).await;
    let second = queue(&other, 2).await;
    proxy.hold_all(Way::Replies);
    drop(held);
    // The first grant ends unused, after the giver's `poll_interval` and `store_timeout`.
    let next = holders.enter(soon(second).await.expect("no panic"));
    let asked = proxy.seen().received(Way::Requests);
    proxy.release(Way::Replies);
    // The wake-up has arrived.
    soon(proxy.until(|seen| seen.received(Way::Requests) > asked)).await;
    until_usage(&other, |in_use, waiting| (in_use, waiting) == (1, 1)).await;
    assert!(!first.is_finished(), "G2");
    drop(next);
    let last = holders.enter(soon(first).await.expect("no panic"));
    assert!(!last.is_lost());
    assert_eq!(holders.figures().peak, 1, "G1, G2");
}

/// G2. A reply delayed by less than the timeout: the permit's deadline counts from the sending of its request.
#[tokio::test]
async fn a_slow_store_shortens_permits_and_breaks_no_cap() {
    const CAP: u32 = 2;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(CAP);
    let [slow, fast] = [
        steady_semaphore(&proxy.url(), &strict(CAP)).await,
        steady_semaphore(&server.url(), &strict(CAP)).await,
    ];
    let delay = Duration::from_millis(150);
    proxy.delay(Way::Requests, delay);
    proxy.delay(Way::Replies, delay);
    let permit = soon(slow.acquire()).await.expect("late, but in time");
    let lasts = permit.deadline().expect("held") - tokio::time::Instant::now();
    println!("held for {lasts:?} from its arrival");
    assert!(lasts <= LONG - 2 * delay, "G2: {lasts:?}");
    drop(permit);
    proxy.delay(Way::Requests, delay / 4);
    proxy.delay(Way::Replies, delay / 8);
    let hold = Duration::from_millis(20);
    let loads = [holders.load(&slow, 4, hold), holders.load(&fast, 4, hold)];
    sleep(Duration::from_millis(500)).await;
    for load in loads {
        let done = load.finish().await;
        assert!(done.admitted > 0 && done.refused.is_empty(), "G8: {done:?}");
    }
    println!("{}", holders.figures());
    assert!(holders.figures().peak <= CAP as usize, "G1");
}

mod timed {
    use super::*;
    use crate::support::stopwatch::Stopwatch;

    /// G8. After the TCP handshake, a new connection takes three round trips, so that it fits into an exchange's time
    /// limit. A limiter's first connection asks more questions than a later one.
    #[tokio::test]
    async fn a_connection_to_a_distant_store_is_made_in_time() {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(server.port());
        let way = Duration::from_millis(300);
        proxy.delay(Way::Requests, way);
        proxy.delay(Way::Replies, way);
        let watch = Stopwatch::start();
        let limiter = soon(steady().connect(proxy.url())).await.expect("valid");
        watch.within(3 * 2 * way, "G8: to connect");
        assert!(limiter.status().store_up);
        // More would take further round trips on a real network, whose connections start slowly.
        let sent = proxy.seen().received(Way::Requests);
        assert!(sent < 10 * 1_460, "{sent} bytes");
        let permit = soon(limiter.semaphore(strict(1), "key").unwrap().acquire()).await;
        drop(permit.expect("free"));
    }
}
