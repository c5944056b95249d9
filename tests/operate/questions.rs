//! Questions to several replicas: each answer matches the clients' knowledge.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use http::Request;
use tokio::{runtime, sync::oneshot};
use tower_turnstile::operate::{KeyDigest, OperateErrorKind, Operator, PermitState};

use crate::{
    scene::{CHAT, await_replicas, builder, open, replica, replicas},
    support::{queue::wait_in_line, redis_server::RedisServer},
};

/// Time limit for an answer over the loopback interface.
const SOON: Duration = Duration::from_millis(200);

/// Awaits an answer, within the time limit.
async fn timed<T>(answer: impl Future<Output = T>) -> T {
    let start = Instant::now();
    let answer = answer.await;
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    answer
}

fn tenant(number: usize) -> String {
    format!("tenant-{}", number % 6)
}

#[tokio::test(flavor = "multi_thread")]
async fn three_replicas_with_sixty_streams_and_forty_waiters() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 3).await;
    let layers: Vec<_> = limiters
        .iter()
        .map(|limiter| {
            limiter
                .layer(CHAT.by_header("x-tenant"))
                .label_by(|_| "POST /chat")
        })
        .collect();
    let mut streams = Vec::new();
    for number in 0..60 {
        let request = Request::builder().header("x-tenant", tenant(number));
        // So that each tenant has streams on several replicas.
        let layer = &layers[(number / 6) % 3];
        streams.push(open(layer, request.body(()).unwrap()).await);
    }
    let (mut waiters, mut waiting) = (Vec::new(), BTreeMap::<KeyDigest, usize>::new());
    for number in 0..40 {
        let semaphore = limiters[number % 3].semaphore(CHAT, tenant(number * number));
        waiters.push(wait_in_line(&semaphore).await);
        let digest = KeyDigest::of("chat", tenant(number * number));
        *waiting.entry(digest).or_default() += 1;
    }

    let permits = timed(operator.permits("chat", None)).await.unwrap();
    assert!(permits.is_complete(), "{permits:?}");
    assert_eq!((permits.answered, permits.replicas), (3, 3));
    let (held, waits): (Vec<_>, Vec<_>) = permits
        .rows
        .iter()
        .partition(|row| row.state == PermitState::Held);
    assert_eq!((held.len(), waits.len()), (60, 40));
    for number in 0..6 {
        let digest = KeyDigest::of("chat", tenant(number));
        let ledger = format!("turnstile:{{{digest}}}");
        let members = server.cli(&["ZRANGE", &ledger, "0", "(2251799813685248", "BYSCORE"]);
        let members: BTreeSet<_> = members.lines().map(str::to_owned).collect();
        let rows = held.iter().filter(|row| row.key == digest);
        let rows: BTreeSet<_> = rows.map(|row| row.id.to_string()).collect();
        assert_eq!((rows.len(), rows), (10, members));
        let queued = waits.iter().filter(|row| row.key == digest).count();
        assert_eq!(queued, waiting.get(&digest).copied().unwrap_or_default());
    }
    assert!(held.iter().all(|row| row.label == "POST /chat"));
    for label in ["web-0", "web-1", "web-2"] {
        let count = held.iter().filter(|row| row.replica_label == label).count();
        assert!((18..=24).contains(&count), "{label} has {count}");
    }

    let limits = timed(operator.limits()).await.unwrap();
    let limit = &limits.rows[0];
    assert_eq!((limits.rows.len(), limit.held, limit.waiting), (1, 60, 40));
    assert_eq!((limit.max, limit.differs), (10, false));

    let keys = timed(operator.keys("chat", None)).await.unwrap();
    assert_eq!(keys.rows.len(), 6);
    for row in &keys.rows {
        let queued = waiting.get(&row.key).copied().unwrap_or_default();
        assert_eq!((row.held, row.waiting, row.max), (10, queued, 10));
    }

    let replicas = timed(operator.replicas()).await.unwrap();
    let numbers = replicas.rows.iter().map(|row| row.held + row.waiting);
    assert_eq!(numbers.sum::<usize>(), 100);
    let error = timed(operator.permits("other", None)).await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::UnknownLimit);
    drop((streams, waiters));
}

/// A replica whose process is stopped: it is connected, and on the roster.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stands_still_is_named() {
    let server = RedisServer::start();
    let (_others, operator) = replicas(&server, 2).await;
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let still = builder("still").runtime(runtime.handle().clone());
    let still = still.connect(&server.url()).await.unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let driven = thread::spawn(move || {
        let _ = runtime.block_on(stopped);
        runtime
    });
    await_replicas(&operator, 3).await;
    stop.send(()).unwrap();
    let runtime = driven.join().unwrap();

    let start = Instant::now();
    let replicas = operator.replicas().await.unwrap();
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    assert_eq!((replicas.answered, replicas.replicas), (2, 3));
    assert_eq!(replicas.missing, ["still"]);
    assert!(!replicas.is_complete());
    // From now on the others do not wait for it: ten questions would take five seconds.
    let start = Instant::now();
    for _ in 0..10 {
        assert_eq!(operator.replicas().await.unwrap().missing, ["still"]);
    }
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(4), "{elapsed:?}");
    drop(still);
    runtime.shutdown_background();
}

/// Staging must neither see nor change production.
#[tokio::test]
async fn other_databases_and_namespaces_are_others() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let in_other_db = format!("{}/1", server.url());
    let _staging = builder("staging").connect(&in_other_db).await.unwrap();
    let shop = builder("shop").namespace("shop");
    let _shop = shop.connect(&server.url()).await.unwrap();
    let staging = Operator::connect(&in_other_db).await.unwrap();
    let shop = Operator::builder()
        .namespace("shop")
        .connect(&server.url())
        .await
        .unwrap();
    for (operator, label) in [(&operator, "web-0"), (&staging, "staging"), (&shop, "shop")] {
        let rows = await_replicas(operator, 1).await;
        assert_eq!(rows[0].label, label);
    }
}

/// A replica leaves the roster when it is shut down or dropped: a deployment leaves no ghosts.
#[tokio::test]
async fn a_replica_that_leaves_is_not_missed() {
    let server = RedisServer::start();
    let (mut limiters, operator) = replicas(&server, 3).await;
    let shut_down = limiters.pop().unwrap();
    shut_down.shutdown(Duration::ZERO).await;
    await_replicas(&operator, 2).await;
    drop(limiters.pop());
    await_replicas(&operator, 1).await;
    let roster = "turnstile:{turnstile:control}:roster";
    assert_eq!(server.cli(&["ZCARD", roster]), "1");
    let ttl: u64 = server.cli(&["PTTL", roster]).parse().unwrap();
    assert!(ttl <= 180_000, "it expires");
}

#[tokio::test]
async fn a_replica_listens_anew_after_the_store_was_restarted() {
    let mut server = RedisServer::start();
    let (_limiters, _operator) = replicas(&server, 2).await;
    server.restart();
    let operator = Operator::connect(&server.url()).await.unwrap();
    await_replicas(&operator, 2).await;
}

/// More rows than fit into an answer: the oldest are shown, and the others counted.
#[tokio::test]
async fn what_does_not_fit_is_counted() {
    let server = RedisServer::start();
    let limiter = replica(&server, "web").await;
    let operator = Operator::connect(&server.url()).await.unwrap();
    await_replicas(&operator, 1).await;
    let many = tower_turnstile::Limit::concurrent("many", 10_000);
    let many = limiter.semaphore(many, "acme");
    let first = many.acquire().await.unwrap();
    let held = (0..1_999).map(|_| many.acquire());
    let held = futures_util::future::try_join_all(held).await.unwrap();
    let permits = timed(operator.permits("many", None)).await.unwrap();
    assert_eq!(permits.rows.len() as u64 + permits.left_out, 2_000);
    assert!(permits.rows.len() > 50, "{}", permits.rows.len());
    assert!(!permits.is_complete());
    assert_eq!(Some(permits.rows[0].id), first.id());
    let limits = timed(operator.limits()).await.unwrap();
    assert_eq!(limits.rows[0].held, 2_000);
    drop(held);
}
