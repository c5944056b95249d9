//! G4: the queue advances even if wake-ups are lost.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::{sleep, timeout};

use crate::{
    scene::{
        Holders, LEASE, POLL, SLACK, WAITER_TTL, queue, quick, semaphore, soon, strict,
        until_empty, until_usage, usage,
    },
    support::{
        fault_proxy::{FaultProxy, Seen, Way},
        redis_server::RedisServer,
    },
};

/// Subscribed connections are killed continuously, and wake-ups, replies and requests with them.
#[tokio::test]
async fn killed_subscribers_delay_nobody_by_more_than_a_poll() {
    const PLACES: u32 = 12;
    let server = RedisServer::start();
    let holders = Holders::count(1);
    let limit = strict(1);
    let (one, other) = (
        semaphore(&server.url(), &limit).await,
        semaphore(&server.url(), &limit).await,
    );
    let mut held = holders.enter(soon(one.acquire()).await.expect("free"));
    let mut line = FuturesUnordered::new();
    for place in 1..=PLACES {
        let semaphore = [&one, &other][place as usize % 2];
        line.push(queue(semaphore, place).await);
    }
    let mut slowest = Duration::ZERO;
    let mut killed = 0;
    while !line.is_empty() {
        drop(held);
        let disturbed = Cell::new(Instant::now());
        // Kill at once, and a few more times: a wake-up is most likely lost. A waiter may be passed over if its
        // connection is gone at the time of the release.
        let kills = async {
            for _ in 0..5 {
                let kill = server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
                disturbed.set(Instant::now());
                killed += kill.parse::<u32>().expect("a number");
                // To cut a connection while it is made, again and again, is an outage.
                let _ = timeout(SLACK, until_subscribed(&server)).await;
            }
        };
        let next = async {
            let next = soon(line.next()).await.expect("some wait");
            slowest = slowest.max(disturbed.get().elapsed());
            next
        };
        let (next, ()) = tokio::join!(next, kills);
        held = holders.enter(next.expect("no panic"));
    }
    println!(
        "{killed} connections killed; the slowest of {PLACES} waited {slowest:?}; {}",
        holders.figures()
    );
    // A connection that replaces several others may lack a subscription for a while.
    assert!(killed > PLACES / 2, "{killed}");
    assert!(slowest < POLL + SLACK, "G4: {slowest:?}");
    assert_eq!(holders.figures().peak, 1, "G1");
    drop(held);
    until_empty(&server).await;
}

/// Waits until some connections are subscribed, and no more are added.
async fn until_subscribed(server: &RedisServer) {
    let subscribed = || {
        let list = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        let ids = list.lines().filter_map(|line| line.split(' ').next());
        ids.filter(|id| !id.is_empty())
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let mut before = subscribed();
    loop {
        sleep(Duration::from_millis(50)).await;
        let now = subscribed();
        if !now.is_empty() && now == before {
            return;
        }
        before = now;
    }
}

/// A wake-up is lost with its connection. The end of the connection is noticed, and the next one begins with a
/// question.
#[tokio::test]
async fn a_wake_up_lost_with_its_connection_is_asked_for() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let giver = semaphore(&server.url(), &strict(1)).await;
    let poll = Duration::from_secs(4);
    let waits = quick().poll_interval(poll).waiter_ttl(3 * poll);
    let waits = waits.connect(&proxy.url()).await.expect("it is up");
    let waits = waits.semaphore(strict(1), "key");
    for _ in 0..3 {
        let held = soon(giver.acquire()).await.expect("free");
        let waiter = queue(&waits, 1).await;
        proxy.drop_replies(true);
        let lost = |seen: &Seen| seen.lost(Way::Replies);
        let before = lost(&proxy.seen());
        drop(held);
        soon(proxy.until(|seen| lost(seen) > before)).await;
        assert_eq!(usage(&giver).await, (1, 0), "it has the slot");
        let ended = Instant::now();
        proxy.drop_replies(false);
        drop(soon(waiter).await.expect("no panic"));
        let took = ended.elapsed();
        println!("granted {took:?} after the connection ended");
        assert!(took < SLACK, "G4: {took:?}");
        until_empty(&server).await;
    }
}

/// Wake-ups are never sent.
#[tokio::test]
async fn without_wake_ups_the_queue_moves_by_polls() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "default", "-publish"]);
    let giver = semaphore(&server.url(), &strict(1)).await;
    let waits = semaphore(&server.url(), &strict(1)).await;
    for _ in 0..3 {
        let held = soon(giver.acquire()).await.expect("free");
        let waiter = queue(&waits, 1).await;
        let released = Instant::now();
        drop(held);
        drop(soon(waiter).await.expect("no panic"));
        let took = released.elapsed();
        println!("without wake-ups it waited {took:?}");
        assert!(took < POLL + SLACK, "G4: {took:?}");
        until_empty(&server).await;
    }
    let log = server.cli(&["ACL", "LOG"]);
    assert!(log.contains("publish"), "it was refused: {log}");
}

/// The head of the queue is disconnected: its replica is as good as crashed.
#[tokio::test]
async fn a_head_that_is_cut_off_delays_others_by_twice_its_time() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(1);
    let giver = semaphore(&server.url(), &strict(1)).await;
    let cut_off = semaphore(&proxy.url(), &strict(1)).await;
    let other = semaphore(&server.url(), &strict(1)).await;
    let held = holders.enter(soon(giver.acquire()).await.expect("free"));
    let head = tokio::spawn({
        let request = cut_off.acquire();
        async move { request.await.map(drop) }
    });
    until_usage(&other, |_, waiting| waiting == 1).await;
    let next = queue(&other, 2).await;
    proxy.half_open(true);
    let released = Instant::now();
    drop(held);
    let next = holders.enter(soon(next).await.expect("no panic"));
    let took = released.elapsed();
    println!("the one behind it waited {took:?}; {}", holders.figures());
    assert!(took < 2 * WAITER_TTL + SLACK, "G4: {took:?}");
    soon(head)
        .await
        .expect("no panic")
        .expect_err("its store is down");
    assert_eq!(holders.figures().peak, 1, "G1");
    drop(next);
    proxy.half_open(false);
    assert!(until_empty(&server).await < LEASE);
}
