//! G4, G8: a server whose output buffers for subscribers are too small ends the connection, with all exchanges in
//! flight.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use crate::{
    scene::{PATIENT, SLACK, queue, quick, semaphore, soon, strict, until_empty, until_granted},
    support::redis_server::RedisServer,
};

/// One exchange for this many waiters has a reply of more than 16 KiB.
const WAITERS: u32 = 1_500;
const POLL: Duration = Duration::from_secs(1);

fn limit_subscribers(server: &RedisServer, limit: &str) {
    let setting = format!("pubsub {limit}");
    server.cli(&["CONFIG", "SET", "client-output-buffer-limit", &setting]);
}

#[tokio::test]
async fn output_buffers_that_are_too_small_for_subscribers_are_no_outage() {
    let server = RedisServer::start();
    let giver = semaphore(&server.url(), &strict(1)).await;
    let builder = quick().poll_interval(POLL).waiter_ttl(3 * POLL);
    let limiter = builder.connect(&server.url()).await.expect("it is up");
    let waits = limiter.semaphore(strict(1).max_waiters(10_000), "key");

    // A wake-up arrives at once.
    let handoff = async || {
        let held = soon(giver.acquire()).await.expect("free");
        let waiter = queue(&waits, 1).await;
        let released = Instant::now();
        drop(held);
        drop(soon(waiter).await.expect("no panic"));
        let took = released.elapsed();
        until_empty(&server).await;
        took
    };
    let with_wake_ups = handoff().await;

    let subscribers = || {
        let clients = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        let ids = clients
            .split([' ', '\n'])
            .filter(|word| word.starts_with("id="));
        ids.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let before = subscribers();
    limit_subscribers(&server, "1kb 1kb 1");
    let held = soon(giver.acquire()).await.expect("free");
    let mut waiting = JoinSet::new();
    for _ in 0..WAITERS {
        let request = waits.acquire();
        waiting.spawn(async move { request.await.map(drop) });
    }
    let began = Instant::now();
    // A question in flight on a connection that ends is not repeated.
    let are_queued = async || {
        waits
            .usage()
            .await
            .is_ok_and(|usage| usage.waiting == WAITERS)
    };
    while !are_queued().await {
        assert!(limiter.status().store_up, "G8");
        assert!(began.elapsed() < PATIENT, "{:?}", limiter.status());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    println!("{WAITERS} are in the queue after {:?}", began.elapsed());
    // Polls are large too. No request is refused.
    tokio::time::sleep(3 * POLL).await;
    assert!(limiter.status().store_up, "G8");
    assert!(
        !before.is_subset(&subscribers()),
        "the server has cut one off"
    );
    assert!(waiting.try_join_next().is_none());
    let released = Instant::now();
    drop(held);
    let first = soon(waiting.join_next()).await.expect("waiters");
    first.expect("no panic").expect("it has its turn");
    let took = released.elapsed();
    println!("the first was let in after {took:?}");
    assert!(took < POLL + SLACK, "G4: {took:?}");
    waiting.shutdown().await;
    until_empty(&server).await;
    let without = handoff().await;
    assert!(without < POLL + SLACK, "G4: {without:?}");
    // A limiter that starts now has to probe first.
    let newcomer = semaphore(&server.url(), &strict(1)).await;
    let took = until_granted(&newcomer).await;
    println!("a newcomer is served after {took:?}");
    assert!(took < SLACK, "G8: {took:?}");
    until_empty(&server).await;

    limit_subscribers(&server, "32mb 8mb 60");
    let repaired = Instant::now();
    let mut quick = 0;
    // Without wake-ups one in five would be as fast by chance.
    while quick < 4 {
        assert!(repaired.elapsed() < PATIENT, "no wake-ups again");
        quick = match handoff().await < POLL / 5 {
            true => quick + 1,
            false => 0,
        };
    }
    println!(
        "handed on after {with_wake_ups:?}, without wake-ups {without:?}; with them again {:?} \
         after the repair",
        repaired.elapsed()
    );
}
