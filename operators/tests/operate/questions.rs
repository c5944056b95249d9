//! Questions to several replicas: each answer matches the clients' knowledge.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use http::Request;
use tower_turnstile_operate::{
    Answers, KeyDigest, KeyRow, OperateError, OperateErrorKind, Order, Outcome, PermitRow,
    PermitState, RefusalRow, ReplicaRow, Target, TenantDigest,
};

use crate::{
    scene::{
        CHAT, HOUR, Monitor, Orders as _, Patient, StoppableReplica, ada, again_while,
        await_replicas, builder, open, replica, replicas, seen, strangers, undrained, until,
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        queue::wait_in_line,
        redis_server::RedisServer,
    },
};

/// How long replicas may take to answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// Asks until an answer has not waited for all of that time. A busy machine may be late, but not each time.
async fn at_once<T>(ask: impl AsyncFn() -> T) -> T {
    let timed = async || {
        let start = Instant::now();
        (ask().await, start.elapsed())
    };
    again_while(|(_, took)| *took >= PATIENCE, timed).await.0
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
                .unwrap()
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
        let semaphore = limiters[number % 3]
            .semaphore(CHAT, tenant(number * number))
            .unwrap();
        waiters.push(wait_in_line(&semaphore).await);
        let digest = KeyDigest::of("chat", tenant(number * number));
        *waiting.entry(digest).or_default() += 1;
    }

    let permits = at_once(async || operator.permits("chat", None).await)
        .await
        .unwrap();
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

    let limits = at_once(async || operator.limits().await).await.unwrap();
    let limit = &limits.rows[0];
    assert_eq!((limits.rows.len(), limit.held, limit.waiting), (1, 60, 40));
    assert_eq!((limit.max, limit.differs), (10, false));

    let keys = at_once(async || operator.keys("chat", None).await)
        .await
        .unwrap();
    assert_eq!(keys.rows.len(), 6);
    for row in &keys.rows {
        let queued = waiting.get(&row.key).copied().unwrap_or_default();
        assert_eq!((row.held, row.waiting, row.max), (10, queued, 10));
    }

    let replicas = at_once(async || operator.replicas().await).await.unwrap();
    let numbers = replicas.rows.iter().map(|row| row.held + row.waiting);
    assert_eq!(numbers.sum::<usize>(), 100);
    let error = at_once(async || operator.permits("other", None).await)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::UnknownLimit);
    drop((streams, waiters));
}

/// Replicas spread their answers over a millisecond for each expected one, up to a second, and operators wait for that time.
#[tokio::test]
async fn entries_of_the_roster_that_have_not_answered_delay_no_further_question() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    strangers(&server, 2_000);
    let monitor = Monitor::of(&server).await;
    let ask = async || operator.0.replicas().await.unwrap();
    again_while(|answers| answers.answered == 0, ask).await;
    let answers = ask().await;
    assert_eq!(answers.replicas, 2_001);
    let asked = monitor.commands(&server).await;
    let asked: Vec<_> = asked
        .iter()
        .filter(|line| line.contains("\"PUBLISH\" \"turnstile:control:0\""))
        .collect();
    let (first, last) = (asked[0], asked[asked.len() - 1]);
    assert!(
        first.contains(r#"\"replicas\":2001,\"expected\":2001,"#),
        "{first}"
    );
    assert!(
        last.contains(r#"\"replicas\":2001,\"expected\":1,"#),
        "{last}"
    );
}

/// A replica whose process is stopped: it is connected, and on the roster.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stands_still_is_named() {
    let server = RedisServer::start();
    let (_others, operator) = replicas(&server, 2).await;
    let still = StoppableReplica::start(&server, "still").await;
    await_replicas(&operator, 3).await;
    let _still = still.stop();

    let others_answer = async || {
        let is_late = |answers: &Answers<ReplicaRow>| answers.answered < 2;
        again_while(is_late, async || operator.0.replicas().await.unwrap()).await
    };
    let replicas = others_answer().await;
    assert_eq!((replicas.answered, replicas.replicas), (2, 3));
    assert_eq!(replicas.missing, ["still"]);
    assert!(!replicas.is_complete());
    // From now on the others do not wait for it.
    assert_eq!(at_once(others_answer).await.missing, ["still"]);
}

/// A replica that misses a question may have the limit that the others do not have.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_a_replica_that_stands_still_is_not_unknown() {
    let server = RedisServer::start();
    let (_others, operator) = replicas(&server, 1).await;
    let still = StoppableReplica::start(&server, "still").await;
    let held = still
        .limiter
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await;
    let held = held.unwrap();
    await_replicas(&operator, 2).await;
    let _still = still.stop();
    let operator = operator.0;

    fn is_partial<T>(answers: Answers<T>) {
        let counts = (answers.rows.len(), answers.replicas);
        assert_eq!(counts, (0, 2));
        assert!(answers.missing.contains(&"still".to_owned()));
    }
    let permits: Answers<PermitRow> = operator.permits("chat", None).await.unwrap();
    is_partial(permits);
    let keys: Answers<KeyRow> = operator.keys("chat", None).await.unwrap();
    is_partial(keys);
    let refusals: Answers<RefusalRow> = operator.refusals("chat", None).await.unwrap();
    is_partial(refusals);
    let acme = KeyDigest::of("chat", "acme");
    // The other replica may answer late.
    let is_late = |error: &OperateError| !error.to_string().contains("1 of 2");
    let ask = async || operator.explain("chat", acme).await.unwrap_err();
    let error = again_while(is_late, ask).await;
    assert_eq!(error.kind(), OperateErrorKind::NoAnswer);
    let expected = "no replica that answers has a limit `chat`: 1 of 2 have answered";
    assert_eq!(error.to_string(), expected);

    let now = seen(&operator).await;
    let outcome = operator.pause(&now, "chat", HOUR, &ada()).await.unwrap();
    let Outcome::Recorded { of: 2, missing, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(missing.contains(&"still".to_owned()));
    let resumed = operator.resume(&Target::limit("chat"), &ada()).await;
    is_partial(resumed.unwrap());
    let share = Order::Share {
        limit: "chat".to_owned(),
        tenant: TenantDigest::of("acme"),
        share: 5,
        length: HOUR,
        seen: None,
    };
    let error = operator.order(&share, &ada()).await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::NotFound, "{error}");

    undrained(&operator, "chat", |_, answers| answers.missing == ["still"]).await;
    drop(held);
}

/// At a distance each round trip counts: the second command of a question is sent before the first is answered.
#[tokio::test]
async fn the_roster_and_the_clock_are_read_at_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let operator = Patient::connect(&proxy.url()).await.0;
    let times = || {
        let stats = server.cli(&["INFO", "commandstats"]);
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_time:calls="));
        let calls = line.and_then(|line| line.split(',').next());
        calls.map_or(0, |calls| calls.parse::<u32>().expect("a number"))
    };
    operator.replicas().await.unwrap();
    let before = times();
    proxy.hold_all(Way::Replies);
    tokio::select! {
        outcome = operator.replicas() => panic!("no command is answered: {outcome:?}"),
        () = until(async || times() > before) => {}
    }
}

/// Replica 0 has no room for the key that replica 1 has too.
#[tokio::test]
async fn a_key_that_a_replica_may_have_left_out_is_marked() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let mut held = Vec::new();
    for number in 0..400_u64 {
        let semaphore = limiters[0].semaphore(CHAT, number).unwrap();
        held.extend(semaphore.acquire().await);
        held.extend(semaphore.acquire().await);
    }
    // Replica 0 lists the keys with the most slots first.
    for (replica, key, count) in [
        (0, "acme", 1),
        (1, "acme", 1),
        (0, "globex", 3),
        (1, "globex", 1),
    ] {
        for _ in 0..count {
            held.extend(
                limiters[replica]
                    .semaphore(CHAT, key)
                    .unwrap()
                    .acquire()
                    .await,
            );
        }
    }
    assert_eq!(held.len(), 806);
    let keys = operator.keys("chat", None).await.unwrap();
    assert!(keys.left_out > 200, "{}", keys.left_out);
    let facts = |key: KeyDigest| {
        let row = keys.rows.iter().find(|row| row.key == key).unwrap();
        (row.held, row.replicas, row.partial)
    };
    let acme = KeyDigest::of("chat", "acme");
    assert_eq!(facts(acme), (1, 1, true));
    assert_eq!(facts(KeyDigest::of("chat", "globex")), (4, 2, false));
    let one = operator.keys("chat", Some(acme)).await.unwrap();
    let row = &one.rows[0];
    assert_eq!((row.held, row.replicas, row.partial), (2, 2, false));
    #[cfg(feature = "cli")]
    {
        let shown = crate::command_line::says(&server, &["keys", "chat"]).await;
        let line = shown.lines().find(|line| line.contains(&acme.to_string()));
        assert!(line.unwrap().contains("at least 1 "), "{shown}");
    }
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
    let staging = Patient::connect(&in_other_db).await;
    let shop = Patient::in_namespace(&server.url(), "shop").await;
    for (operator, label) in [(&operator, "web-0"), (&staging, "staging"), (&shop, "shop")] {
        let rows = await_replicas(operator, 1).await;
        assert_eq!(rows[0].label, label);
    }
}

#[tokio::test]
async fn twenty_namespaces_are_listed() {
    let server = RedisServer::start();
    let digest = KeyDigest::of("chat", "acme");
    for number in 10..35 {
        server.cli(&["ZADD", &format!("ns-{number}:{{{digest}}}"), "1", "a"]);
    }
    let operator = Patient::connect(&server.url()).await;
    let namespaces = operator.namespaces().await.unwrap();
    let all: Vec<_> = (10..35).map(|number| format!("ns-{number}")).collect();
    assert_eq!(namespaces, all[..20]);
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
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 2).await;
}

/// More rows than fit into an answer: the oldest are shown, and the others counted.
#[tokio::test]
async fn what_does_not_fit_is_counted() {
    let server = RedisServer::start();
    let limiter = replica(&server, "web").await;
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let many = tower_turnstile::Limit::concurrent("many", 10_000);
    let many = limiter.semaphore(many, "acme").unwrap();
    let first = many.acquire().await.unwrap();
    let held = (0..1_999).map(|_| many.acquire());
    let held = futures_util::future::try_join_all(held).await.unwrap();
    let permits = at_once(async || operator.permits("many", None).await)
        .await
        .unwrap();
    assert_eq!(permits.rows.len() as u64 + permits.left_out, 2_000);
    assert!(permits.rows.len() > 50, "{}", permits.rows.len());
    assert!(!permits.is_complete());
    assert_eq!(Some(permits.rows[0].id), first.id());
    let limits = at_once(async || operator.limits().await).await.unwrap();
    assert_eq!(limits.rows[0].held, 2_000);
    drop(held);
}
