//! Pauses for overloaded upstreams, as operators see and end them.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tower_turnstile::{Acquire, Limit, Limiter, Semaphore};
use tower_turnstile_operate::{
    Answers, KeyDigest, KeyRow, OperateErrorKind, Target, Verdict, What,
};

use crate::{
    scene::{
        CHAT, GUARD, HOUR, Orders as _, Patient, ada, again_while, replicas, scenes, soon, until,
        until_paused,
    },
    support::{queue::wait_in_line, redis_server::RedisServer},
};

/// Longer than a test.
const LONG: Duration = Duration::from_secs(600);

fn acme(limiter: &Limiter) -> Semaphore {
    limiter.semaphore(CHAT, "acme").unwrap()
}

async fn waiting(semaphores: [&Semaphore; 2], count: usize) -> Vec<Acquire> {
    let mut waiters = Vec::new();
    for number in 0..count {
        waiters.push(wait_in_line(semaphores[number % 2]).await);
    }
    waiters
}

/// The first row of the keys.
async fn key_row(operator: &Patient) -> KeyRow {
    let keys = operator.keys("chat", None).await.unwrap();
    keys.rows.into_iter().next().expect("a key")
}

/// Whether the store has a pause of this key, or the rise after it, that was not ended.
fn has_pause(server: &RedisServer) -> bool {
    let ledger = format!("turnstile:{{{}}}", KeyDigest::of("chat", "acme"));
    let over = server.cli(&["ZSCORE", &ledger, "!"]);
    !over.is_empty() && !over.ends_with(".5")
}

/// Pauses and resumes until all replicas have answered in time: of the others there are no rows.
pub(crate) async fn resumed(ask: impl AsyncFn() -> Answers<KeyRow>) -> Answers<KeyRow> {
    again_while(|ended: &Answers<KeyRow>| !ended.are_all(), ask).await
}

#[tokio::test]
async fn a_pause_is_seen_and_ended() {
    for (server, limiters, operator) in scenes().await {
        let [one, other] = limiters.each_ref().map(acme);
        let replicas = if server.is_some() { 2 } else { 1 };
        let target = Target::key("chat", "acme");
        let ended = resumed(async || {
            one.pause(&CHAT, LONG).unwrap();
            until_paused(&one).await;
            until_paused(&other).await;
            let waiters = waiting([&one, &other], 8).await;

            let pause = key_row(&operator).await.pause.expect("it is paused");
            assert!((500_000..=600_000).contains(&pause.pause_ends_in_ms));
            assert_eq!(pause.paused_by, "web-0");
            let limit = operator.limits().await.unwrap().rows.remove(0);
            assert_eq!((limit.paused, limit.paused_keys), (false, replicas));

            let ended = operator.0.resume(&target, &ada()).await.unwrap();
            let _permits = soon(try_join_all(waiters)).await.unwrap();
            // The whole limit holds at once.
            assert!(!server.as_ref().is_some_and(has_pause));
            assert_eq!(key_row(&operator).await.pause, None);
            ended
        })
        .await;
        let [row] = &ended.rows[..] else {
            panic!("{ended:?}");
        };
        assert_eq!(
            (row.waiting, row.replicas, row.pause.is_some()),
            (8, replicas, true)
        );
        let log = operator.log().await.unwrap();
        assert_eq!((log[0].what, &*log[0].author), (What::Resumed, "ada"));
        assert_eq!(log[0].subject, Some(target.to_string()));

        // An upstream that still refuses pauses the key again.
        let permit = one.acquire().await.unwrap();
        permit.pause(&CHAT, LONG).unwrap();
        until_paused(&other).await;
        operator.0.resume(&target, &ada()).await.unwrap();
        drop(other.acquire().await.unwrap());
    }
}

/// Other limits stay paused.
#[tokio::test]
async fn all_keys_of_a_limit_are_resumed() {
    const OTHER: Limit = Limit::concurrent("other", 10);
    for (_server, limiters, operator) in scenes().await {
        let keys = ["acme", "globex"].map(|key| limiters[0].semaphore(CHAT, key).unwrap());
        let other = limiters[0].semaphore(OTHER, "acme").unwrap();
        let ended = resumed(async || {
            for semaphore in keys.iter().chain([&other]) {
                semaphore.pause(semaphore.limit(), LONG).unwrap();
                until_paused(semaphore).await;
            }
            let target = Target::limit("chat");
            operator.0.resume(&target, &ada()).await.unwrap()
        });
        assert_eq!(ended.await.rows.len(), 2);
        for semaphore in &keys {
            drop(semaphore.acquire().await.unwrap());
        }
        until_paused(&other).await;
        let log = operator.log().await.unwrap();
        assert_eq!(log[0].subject.as_deref(), Some("2 keys of limit `chat`"));
    }
}

/// A rollout: the replica that started the pause has been replaced.
#[tokio::test]
async fn a_pause_outlives_its_replica_and_is_ended_all_the_same() {
    let ended = resumed(async || {
        let server = RedisServer::start();
        let (mut limiters, operator) = replicas(&server, 2).await;
        let stays = acme(&limiters[1]);
        acme(&limiters[0]).pause(&CHAT, LONG).unwrap();
        until_paused(&stays).await;
        limiters.remove(0).shutdown(GUARD).await;
        let pause = key_row(&operator).await.pause.expect("it is paused");
        assert_eq!(pause.paused_by, "", "only the other replica knew");
        let target = Target::key("chat", "acme");
        let ended = operator.0.resume(&target, &ada()).await.unwrap();
        drop(stays.acquire().await.unwrap());
        ended
    });
    assert_eq!(ended.await.rows.len(), 1);
}

#[tokio::test]
async fn a_request_of_a_paused_key_is_explained() {
    for (_server, limiters, operator) in scenes().await {
        let (chat, impatient) = (CHAT, Limit::concurrent("impatient", 2));
        let digest = |limit| KeyDigest::of(limit, "acme");
        let explain = async |limit| operator.explain(limit, digest(limit)).await.unwrap();
        for (limit, verdict) in [(&chat, Verdict::Queued(1)), (&impatient, Verdict::Paused)] {
            let semaphore = limiters[0].semaphore(limit, "acme").unwrap();
            semaphore.pause(limit, LONG).unwrap();
            until_paused(&semaphore).await;
            let why = explain(limit.name()).await;
            assert_eq!((why.verdict, why.in_use), (Some(verdict), 0));
            let pause = why.pause.expect("it is paused");
            assert!((500_000..=600_000).contains(&pause.pause_ends_in_ms));
            assert_eq!(pause.paused_by, "web-0");
        }
        let target = Target::limit("impatient");
        operator.0.resume(&target, &ada()).await.unwrap();
        let why = explain("impatient").await;
        assert_eq!((why.verdict, why.pause), (Some(Verdict::Admitted), None));
    }
}

/// As the guide says (`redis.md`).
#[tokio::test]
async fn a_pause_can_be_ended_in_the_store() {
    let server = RedisServer::start();
    let (limiters, _) = replicas(&server, 1).await;
    let acme = acme(&limiters[0]);
    acme.pause(&CHAT, LONG).unwrap();
    until_paused(&acme).await;
    let ledger = format!("turnstile:{{{}}}", KeyDigest::of("chat", "acme"));
    server.cli(&["ZINCRBY", &ledger, "0.5", "!"]);
    until(async || acme.try_acquire().await.is_ok()).await;
}

/// The limit rises after a pause, which only the store knows once its replicas are gone.
#[tokio::test]
async fn a_limit_that_rises_is_explained() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let held = acme(&limiters[0]).acquire().await.unwrap();
    let key = KeyDigest::of("chat", "acme");
    let ended_ago = async |ago_ms: u64| {
        let set_at = Instant::now();
        let time = "local time = redis.call('TIME')";
        let over =
            format!("time[1] * 1000 + math.floor(time[2] / 1000) + 5000 - {ago_ms} + 2 ^ 51");
        let set = format!("{time} return redis.call('ZADD', KEYS[1], {over}, '!')");
        server.cli(&["EVAL", &set, "1", &format!("turnstile:{{{key}}}")]);
        let why = operator.explain("chat", key).await.unwrap();
        (why, set_at.elapsed())
    };
    // Later the limit has risen further.
    let is_late = |(_, took): &(_, Duration)| *took >= Duration::from_millis(450);
    let explained = async |ago_ms| {
        again_while(is_late, async || ended_ago(ago_ms).await)
            .await
            .0
    };
    // More than 3 of 10 slots are in force, and then one, which is held.
    let why = explained(1_600).await;
    assert_eq!((why.verdict, why.pause), (Some(Verdict::Admitted), None));
    let why = explained(0).await;
    assert_eq!((why.verdict, why.pause), (Some(Verdict::Queued(1)), None));
    drop(held);
}

#[tokio::test]
async fn what_cannot_be_resumed_is_an_error() {
    for (_server, limiters, operator) in scenes().await {
        drop(acme(&limiters[0]).acquire().await.unwrap());
        for (target, kind) in [
            (Target::key("chat", "acme"), OperateErrorKind::NotFound),
            (Target::limit("chat"), OperateErrorKind::NotFound),
            (Target::limit("unknown"), OperateErrorKind::UnknownLimit),
            (Target::limit(""), OperateErrorKind::Value),
            (Target::limit("x".repeat(129)), OperateErrorKind::Value),
        ] {
            let error = operator.resume(&target, &ada()).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{target}");
        }
        assert_eq!(operator.log().await.unwrap(), []);
        // An operator's own pause is no pause of a key.
        let now = operator.overrides().await.unwrap();
        operator.pause(&now, "chat", HOUR, &ada()).await.unwrap();
        let error = operator.resume(&Target::limit("chat"), &ada()).await;
        assert_eq!(error.unwrap_err().kind(), OperateErrorKind::NotFound);
    }
    let server = RedisServer::start();
    let operator = Patient::connect(&server.url()).await.0;
    let error = operator.resume(&Target::limit("chat"), &ada()).await;
    assert_eq!(
        error.unwrap_err().to_string(),
        "there is no operable replica"
    );
}

/// The replica may still remember the pause: the answer names it.
#[tokio::test]
async fn a_replica_that_does_not_answer_is_missing() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let now_ms = server.cli(&["EVAL", "return redis.call('TIME')[1] * 1000", "0"]);
    let roster = "turnstile:{turnstile:control}:roster";
    server.cli(&["ZADD", roster, &now_ms, "AAAAAAAAAAAAAAAAweb-9"]);
    let acme = acme(&limiters[0]);
    drop(acme.acquire().await.unwrap());
    let target = Target::limit("chat");
    // The other one may be late.
    let is_late = |ended: &Answers<KeyRow>| ended.missing != ["web-9"];
    let resume = async || operator.0.resume(&target, &ada()).await.unwrap();
    assert!(again_while(is_late, resume).await.rows.is_empty());
    let pause_and_resume = async || {
        acme.pause(&CHAT, LONG).unwrap();
        until_paused(&acme).await;
        resume().await
    };
    let ended = again_while(is_late, pause_and_resume).await;
    assert_eq!(ended.rows.len(), 1);
    drop(acme.acquire().await.unwrap());
}
