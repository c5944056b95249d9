//! G4, G8: a server whose output buffers for subscribers are too small ends the connection, with all exchanges in
//! flight.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};

use crate::{
    scene::{queue, soon, steady, steady_semaphore, strict, until_empty, until_granted},
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
    let giver = steady_semaphore(&server.url(), &strict(1)).await;
    let builder = steady().poll_interval(POLL);
    let limiter = builder.connect(&server.url()).await.expect("it is up");
    let waits = limiter
        .semaphore(strict(1).max_waiters(10_000), "key")
        .unwrap();

    // By a wake-up, or by a poll.
    let handoff = async || {
        let held = soon(giver.acquire()).await.expect("free");
        let waiter = queue(&waits, 1).await;
        let released = Instant::now();
        drop(held);
        drop(soon(waiter).await.expect("G4"));
        let took = released.elapsed();
        until_empty(&server).await;
        took
    };
    handoff().await;

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
    // A question in flight on a connection that ends is not repeated.
    let are_queued = async || {
        let usage = waits.usage().await;
        assert!(limiter.status().store_up, "G8");
        usage.is_ok_and(|usage| usage.waiting == WAITERS)
    };
    soon(async {
        while !are_queued().await || before.is_subset(&subscribers()) {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    // Polls are large too. No request is refused.
    sleep(3 * POLL / 2).await;
    assert!(limiter.status().store_up, "G8");
    assert!(waiting.try_join_next().is_none());
    drop(held);
    let first = soon(waiting.join_next()).await.expect("waiters");
    first.expect("no panic").expect("G4: it has its turn");
    waiting.shutdown().await;
    until_empty(&server).await;
    handoff().await;
    // A limiter that starts now learns that its connections end.
    let newcomer = steady_semaphore(&server.url(), &strict(1)).await;
    until_granted(&newcomer).await;
    until_empty(&server).await;

    limit_subscribers(&server, "32mb 8mb 60");
    let repaired = Instant::now();
    let has_wake_ups = async {
        let mut fast = 0;
        // Without wake-ups one in five would be as fast by chance.
        while fast < 4 {
            fast = if handoff().await < POLL / 5 {
                fast + 1
            } else {
                0
            };
        }
    };
    soon(has_wake_ups).await;
    println!("with wake-ups {:?} after the repair", repaired.elapsed());
}
