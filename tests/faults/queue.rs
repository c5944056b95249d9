//! G4: the queue advances even if wake-ups are lost.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::sleep;

use crate::{
    scene::{
        Holders, LONG, granted, queue, quick, soon, steady, steady_semaphore, strict, until_empty,
        until_usage, usage,
    },
    support::{
        fault_proxy::{FaultProxy, Seen, Way},
        redis_server::RedisServer,
    },
};

/// Connections are killed at each release, and wake-ups, replies and requests with them. Two connections that are cut
/// while they are made are an outage: a waiter may be refused, and queues again. Most of them do not subscribe, since two
/// before them have just ended.
#[tokio::test]
async fn killed_connections_keep_nobody_waiting() {
    const PLACES: u32 = 6;
    let server = RedisServer::start();
    let holders = Arc::new(Holders::count(1));
    let limit = strict(1);
    let replicas = [
        steady_semaphore(&server.url(), &limit).await,
        steady_semaphore(&server.url(), &limit).await,
    ];
    let mut held = holders.enter(granted(&replicas[0]).await);
    let mut line = FuturesUnordered::new();
    for place in 1..=PLACES {
        let (semaphore, holders) = (replicas[place as usize % 2].clone(), holders.clone());
        line.push(tokio::spawn(async move {
            holders.enter(granted(&semaphore).await)
        }));
        until_usage(&replicas[0], |_, waiting| waiting == place).await;
    }
    while !line.is_empty() {
        drop(held);
        // The first kill comes before the release, and the others about when the connections are made again.
        let kills = async {
            for pause_ms in [0, 2, 10, 30] {
                sleep(Duration::from_millis(pause_ms)).await;
                let kill = |kind| server.cli(&["CLIENT", "KILL", "TYPE", kind]) == "0";
                while kill("pubsub") & kill("normal") {
                    sleep(Duration::from_millis(2)).await;
                }
            }
        };
        let (next, ()) = tokio::join!(soon(line.next()), soon(kills));
        held = next.expect("some wait").expect("G4: by itself");
    }
    assert_eq!(holders.figures().peak, 1, "G1");
    drop(held);
    until_empty(&server).await;
}

/// A wake-up is lost with its connection. The end of the connection is noticed, and the next one begins with a
/// question, long before a poll.
#[tokio::test]
async fn a_wake_up_lost_with_its_connection_is_asked_for() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let giver = steady_semaphore(&server.url(), &strict(1)).await;
    let waits = steady().poll_interval(LONG).waiter_ttl(3 * LONG);
    let waits = waits.connect(&proxy.url()).await.expect("it is up");
    let waits = waits.semaphore(strict(1), "key").unwrap();
    for _ in 0..3 {
        let held = soon(giver.acquire()).await.expect("free");
        let waiter = queue(&waits, 1).await;
        proxy.drop_replies(true);
        let lost = |seen: &Seen| seen.lost(Way::Replies);
        let before = lost(&proxy.seen());
        drop(held);
        soon(proxy.until(|seen| lost(seen) > before)).await;
        assert_eq!(usage(&giver).await, (1, 0), "it has the slot");
        proxy.drop_replies(false);
        drop(soon(waiter).await.expect("G4"));
        until_empty(&server).await;
    }
}

/// Wake-ups are never sent.
#[tokio::test]
async fn without_wake_ups_the_queue_moves_by_polls() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "default", "-publish"]);
    let giver = steady_semaphore(&server.url(), &strict(1)).await;
    let waits = steady_semaphore(&server.url(), &strict(1)).await;
    for _ in 0..3 {
        let held = soon(giver.acquire()).await.expect("free");
        let waiter = queue(&waits, 1).await;
        drop(held);
        drop(soon(waiter).await.expect("G4"));
        until_empty(&server).await;
    }
    let log = server.cli(&["ACL", "LOG"]);
    assert!(log.contains("publish"), "it was refused: {log}");
}

/// The head of the queue is disconnected: its replica is as good as crashed. The slot that it was granted goes on after
/// the giver's `poll_interval` and `store_timeout`. It keeps its place.
#[tokio::test]
async fn a_head_that_is_cut_off_is_passed_over() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let holders = Holders::count(1);
    let giver = quick().lease(LONG).waiter_ttl(LONG);
    let giver = giver.connect(&server.url()).await.expect("it is up");
    let giver = giver.semaphore(strict(1), "key").unwrap();
    let cut_off = steady_semaphore(&proxy.url(), &strict(1)).await;
    let other = steady_semaphore(&server.url(), &strict(1)).await;
    let held = holders.enter(granted(&giver).await);
    let head = queue(&cut_off, 1).await;
    let next = queue(&other, 2).await;
    proxy.half_open(true);
    drop(held);
    soon(proxy.until(|seen| seen.lost(Way::Replies) > 0)).await;
    let next = holders.enter(soon(next).await.expect("G4"));
    proxy.half_open(false);
    drop(next);
    drop(holders.enter(soon(head).await.expect("G4: it is there again")));
    assert_eq!(holders.figures().peak, 1, "G1");
    until_empty(&server).await;
}
