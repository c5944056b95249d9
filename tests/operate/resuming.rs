//! Pauses for overloaded upstreams, as operators see and end them.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use tower_turnstile::{
    Acquire, AcquireErrorKind, Limit, Limiter, Permit, Semaphore,
    operate::{Answers, KeyDigest, KeyRow, OperateErrorKind, Operator, Target, Verdict, What},
};

use crate::{
    scene::{CHAT, HOUR, Orders as _, SOON, ada, await_replicas, builder, replicas, scenes},
    support::{queue::wait_in_line, redis_server::RedisServer},
};

/// Longer than a test.
const LONG: Duration = Duration::from_secs(600);
/// Replicas answer 20 questions per second.
const QUESTIONS: Duration = Duration::from_millis(250);

fn acme(limiter: &Limiter) -> Semaphore {
    limiter.semaphore(CHAT, "acme")
}

/// Waits until the pause is in force for this semaphore's replica.
async fn until_paused(semaphore: &Semaphore) {
    let all = async {
        loop {
            match semaphore.try_acquire().await {
                Err(error) if error.kind() == AcquireErrorKind::Paused => return,
                _ => sleep(Duration::from_millis(5)).await,
            }
        }
    };
    timeout(SOON, all).await.expect("in time");
}

async fn waiting(semaphores: [&Semaphore; 2], count: usize) -> Vec<Acquire> {
    let mut waiters = Vec::new();
    for number in 0..count {
        waiters.push(wait_in_line(semaphores[number % 2]).await);
    }
    waiters
}

/// The first row of the keys, once the replicas answer.
async fn key_row(operator: &Operator) -> KeyRow {
    loop {
        let keys = operator.keys("chat", None).await.unwrap();
        if keys.busy.is_empty() {
            return keys.rows.into_iter().next().expect("a key");
        }
        sleep(QUESTIONS).await;
    }
}

/// The whole limit holds at once: the rise would take four seconds.
async fn admitted(waiters: Vec<Acquire>) -> Vec<Permit> {
    let mut admitted = Vec::new();
    let all = async {
        for waiter in waiters {
            admitted.push(waiter.await.unwrap());
        }
    };
    let at_once = Duration::from_millis(2_500);
    timeout(at_once, all).await.expect("at once");
    admitted
}

#[tokio::test]
async fn a_pause_is_seen_and_ended() {
    for (server, limiters, operator) in scenes().await {
        let [one, other] = limiters.each_ref().map(acme);
        one.pause(&CHAT, LONG).unwrap();
        until_paused(&one).await;
        until_paused(&other).await;
        let waiters = waiting([&one, &other], 8).await;

        let pause = key_row(&operator).await.pause.expect("it is paused");
        assert!((590_000..=600_000).contains(&pause.pause_ends_in_ms));
        assert_eq!(pause.paused_by, "web-0");
        let limit = operator.limits().await.unwrap().rows.remove(0);
        let replicas = if server.is_some() { 2 } else { 1 };
        assert_eq!((limit.paused, limit.paused_keys), (false, replicas));

        let target = Target::key("chat", "acme");
        let ended = operator.resume(&target, &ada()).await.unwrap();
        assert_eq!((ended.answered, ended.rows.len()), (replicas, 1));
        let row = &ended.rows[0];
        assert_eq!(
            (row.waiting, row.replicas, row.pause.is_some()),
            (8, replicas, true)
        );
        let permits = admitted(waiters).await;
        sleep(QUESTIONS).await;
        assert_eq!(key_row(&operator).await.pause, None);
        let log = operator.log().await.unwrap();
        assert_eq!((log[0].what, &*log[0].author), (What::Resumed, "ada"));
        assert_eq!(log[0].subject, Some(target.to_string()));

        // An upstream that still refuses pauses the key again.
        permits[0].pause(&CHAT, LONG).unwrap();
        until_paused(&other).await;
        sleep(QUESTIONS).await;
        operator.resume(&target, &ada()).await.unwrap();
        drop(other.acquire().await.unwrap());
    }
}

/// Other limits stay paused.
#[tokio::test]
async fn all_keys_of_a_limit_are_resumed() {
    const OTHER: Limit = Limit::concurrent("other", 10);
    for (_server, limiters, operator) in scenes().await {
        let keys = ["acme", "globex"].map(|key| limiters[0].semaphore(CHAT, key));
        let other = limiters[0].semaphore(OTHER, "acme");
        for semaphore in keys.iter().chain([&other]) {
            semaphore.pause(semaphore.limit(), LONG).unwrap();
            until_paused(semaphore).await;
        }
        let ended = operator
            .resume(&Target::limit("chat"), &ada())
            .await
            .unwrap();
        assert_eq!(ended.rows.len(), 2);
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
    let server = RedisServer::start();
    let (mut limiters, operator) = replicas(&server, 2).await;
    let stays = acme(&limiters[1]);
    acme(&limiters[0]).pause(&CHAT, LONG).unwrap();
    until_paused(&stays).await;
    limiters.remove(0).shutdown(SOON).await;
    let pause = key_row(&operator).await.pause.expect("it is paused");
    assert_eq!(pause.paused_by, "", "only the other replica knew");
    let target = Target::key("chat", "acme");
    let ended = operator.resume(&target, &ada()).await.unwrap();
    assert_eq!((ended.rows.len(), ended.is_complete()), (1, true));
    drop(stays.acquire().await.unwrap());
}

#[tokio::test]
async fn a_request_of_a_paused_key_is_explained() {
    for (_server, limiters, operator) in scenes().await {
        let (chat, impatient) = (CHAT, Limit::concurrent("impatient", 2));
        let digest = |limit| KeyDigest::of(limit, "acme");
        let explain = async |limit| {
            loop {
                match operator.explain(limit, digest(limit)).await {
                    Err(error) if error.kind() == OperateErrorKind::Busy => sleep(QUESTIONS).await,
                    outcome => break outcome.unwrap(),
                }
            }
        };
        for (limit, verdict) in [(&chat, Verdict::Queued(1)), (&impatient, Verdict::Paused)] {
            let semaphore = limiters[0].semaphore(limit, "acme");
            semaphore.pause(limit, LONG).unwrap();
            until_paused(&semaphore).await;
            let why = explain(limit.name()).await;
            assert_eq!((why.verdict, why.in_use), (Some(verdict), 0));
            let pause = why.pause.expect("it is paused");
            assert!((590_000..=600_000).contains(&pause.pause_ends_in_ms));
            assert_eq!(pause.paused_by, "web-0");
        }
        let target = Target::limit("impatient");
        operator.resume(&target, &ada()).await.unwrap();
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
    assert_eq!(server.cli(&["ZREM", &ledger, "!"]), "1");
    let admitted = async {
        while acme.try_acquire().await.is_err() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, admitted).await.expect("in time");
}

/// The limit rises after a pause, which only the store knows once its replicas are gone.
#[tokio::test]
async fn a_limit_that_rises_is_explained() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let held = acme(&limiters[0]).acquire().await.unwrap();
    let key = KeyDigest::of("chat", "acme");
    let ended_ago = async |ago_ms: u64| loop {
        sleep(QUESTIONS).await;
        let set_at = tokio::time::Instant::now();
        let time = "local time = redis.call('TIME')";
        let over = format!("time[1] * 1000 + time[2] / 1000 + 5000 - {ago_ms} + 2 ^ 51");
        let set = format!("{time} return redis.call('ZADD', KEYS[1], {over}, '!')");
        server.cli(&["EVAL", &set, "1", &format!("turnstile:{{{key}}}")]);
        let why = operator.explain("chat", key).await.unwrap();
        // Later the limit has risen further.
        if set_at.elapsed() < Duration::from_millis(450) {
            break why;
        }
    };
    // More than 3 of 10 slots are in force, and then one, which is held.
    let why = ended_ago(1_600).await;
    assert_eq!((why.verdict, why.pause), (Some(Verdict::Admitted), None));
    let why = ended_ago(0).await;
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
            sleep(QUESTIONS).await;
        }
        assert_eq!(operator.log().await.unwrap(), []);
        // An operator's own pause is no pause of a key.
        let now = operator.overrides().await.unwrap();
        operator.pause(&now, "chat", HOUR, &ada()).await.unwrap();
        let error = operator.resume(&Target::limit("chat"), &ada()).await;
        assert_eq!(error.unwrap_err().kind(), OperateErrorKind::NotFound);
    }
    let server = RedisServer::start();
    let operator = Operator::connect(&server.url()).await.unwrap();
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
    drop(acme(&limiters[0]).acquire().await.unwrap());
    let target = Target::limit("chat");
    let ended = operator.resume(&target, &ada()).await.unwrap();
    let missing = |ended: Answers<KeyRow>| (ended.rows.len(), ended.missing);
    assert_eq!(missing(ended), (0, vec!["web-9".to_owned()]));
    let acme = acme(&limiters[0]);
    acme.pause(&CHAT, LONG).unwrap();
    until_paused(&acme).await;
    let ended = operator.resume(&target, &ada()).await.unwrap();
    assert_eq!(missing(ended), (1, vec!["web-9".to_owned()]));
    drop(acme.acquire().await.unwrap());
}

/// In a cluster the keys of a limit are in many parts.
#[cfg(feature = "cluster")]
#[tokio::test]
async fn in_a_cluster_all_keys_are_resumed() {
    use crate::support::redis_cluster::RedisCluster;

    let cluster = RedisCluster::shared();
    let builder = builder("web-0").namespace("resuming");
    let limiter = builder.connect(&cluster.url()).await.unwrap();
    let operator = Operator::builder().namespace("resuming");
    let operator = operator.connect(&cluster.url()).await.unwrap();
    await_replicas(&operator, 1).await;
    let keys: Vec<_> = (0..20u64).map(|key| limiter.semaphore(CHAT, key)).collect();
    for key in &keys {
        key.pause(&CHAT, LONG).unwrap();
        until_paused(key).await;
    }
    let why = operator
        .explain("chat", KeyDigest::of("chat", 7_u64))
        .await
        .unwrap();
    assert!(
        why.pause
            .is_some_and(|pause| pause.pause_ends_in_ms > 500_000)
    );
    let ended = operator
        .resume(&Target::limit("chat"), &ada())
        .await
        .unwrap();
    assert_eq!(ended.rows.len(), 20);
    for key in &keys {
        drop(key.acquire().await.unwrap());
    }
}
