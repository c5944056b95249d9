//! Clusters.

use std::sync::Arc;

use tower_turnstile::{Limit, Limiter};
use tower_turnstile_operate::{KeyDigest, Operator, Target};

use crate::{
    resuming::resumed,
    scene::{
        CHAT, HOUR, JOBS, Orders as _, Patient, acme, ada, await_replicas, builder, jobs, seen,
        set, until, until_max, until_paused,
    },
    support::{queue::wait_in_line, redis_cluster::RedisCluster, redis_server::RedisServer},
    tenants::GPU,
};

/// A replica `web` in a cluster, and its operator.
async fn in_cluster(namespace: &str) -> (Arc<RedisCluster>, Limiter, Patient) {
    let cluster = RedisCluster::shared();
    let builder = builder("web").namespace(namespace);
    let limiter = builder.connect(&cluster.url()).await.expect("it is up");
    let operator = Patient::in_namespace(&cluster.url(), namespace).await;
    await_replicas(&operator, 1).await;
    (cluster, limiter, operator)
}

/// A process has sixteen connections to a cluster, and one for operators.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_each_process_answers_once_for_all_its_parts() {
    let namespace = "operate-cluster";
    let (cluster, limiter, operator) = in_cluster(namespace).await;
    let other = builder("other").namespace(namespace);
    let other = other.connect(&cluster.url()).await.expect("it is up");
    await_replicas(&operator, 2).await;
    let limiters = [limiter, other];
    let mut held = Vec::new();
    for number in 0..40u64 {
        let semaphore = limiters[number as usize % 2]
            .semaphore(CHAT, number)
            .unwrap();
        held.push(semaphore.acquire().await.expect("a free slot"));
    }
    let permits = operator.permits("chat", None).await.unwrap();
    assert!(permits.is_complete(), "{permits:?}");
    let mut ids: Vec<_> = held.iter().filter_map(|permit| permit.id()).collect();
    let mut rows: Vec<_> = permits.rows.iter().map(|row| row.id).collect();
    ids.sort();
    rows.sort();
    assert_eq!(rows, ids);
    let replicas = operator.replicas().await.unwrap().rows;
    assert_eq!(replicas.iter().map(|row| row.held).sum::<usize>(), 40);
    // Ledgers are on all nodes, but the roster is on one.
    for number in 0..4u64 {
        let why = operator
            .explain("chat", KeyDigest::of("chat", number))
            .await
            .unwrap();
        let rows = why.permits.rows.len();
        assert_eq!((why.in_use, rows, why.unclaimed.len()), (1, 1, 0));
    }
    let channel = format!("{namespace}:control:0");
    let heard = |node: &RedisServer| {
        let count = node.cli(&["PUBSUB", "NUMSUB", &channel]);
        count
            .lines()
            .nth(1)
            .and_then(|count| count.parse::<usize>().ok())
    };
    assert_eq!(cluster.nodes().filter_map(heard).sum::<usize>(), 2);
}

/// A slot that served a single limit now serves a permit with several: its id is the id seen by operators.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_a_permit_with_a_reused_slot_has_the_id_that_operators_see() {
    let (_cluster, limiter, _operator) = in_cluster("operate-reuse").await;
    let semaphore = limiter
        .semaphore(Limit::concurrent("one", 1).reuse(), "a")
        .unwrap();
    let mut is_reused = false;
    while !is_reused {
        drop(semaphore.acquire().await.expect("a slot"));
        let permit = semaphore.acquire().await.expect("a slot");
        let id = permit.id().expect("it has a slot");
        let permits = Operator::of(&limiter).permits("one", None).await.unwrap();
        let ids: Vec<_> = permits.rows.iter().map(|row| row.id).collect();
        assert_eq!(ids, [id]);
        is_reused = id.to_string().contains('.');
    }
}

/// Each part of a process decides on its own keys.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_the_delays_and_refusals_of_all_parts_are_seen() {
    const KEYS: u64 = 12;
    let (_cluster, limiter, operator) = in_cluster("operate-parts").await;
    let starts = Limit::rate("starts", 1, HOUR).wait_up_to(2 * HOUR);
    let mut delayed = Vec::new();
    for key in 0..KEYS {
        let semaphore = limiter.semaphore(&starts, key).unwrap();
        drop(semaphore.acquire().await.expect("the first of an hour"));
        semaphore.try_acquire().await.expect_err("the second");
        delayed.push(tokio::spawn(semaphore.acquire()));
    }
    let refusals = operator.refusals("starts", None).await.unwrap();
    assert_eq!(refusals.rows.len(), KEYS as usize);
    until(async || operator.limits().await.unwrap().rows[0].waiting == KEYS as usize).await;
    delayed.iter().for_each(|waits| waits.abort());
}

/// A single node has the record, but many have the keys of a limit.
#[tokio::test]
async fn in_a_cluster_one_record_is_for_all_nodes() {
    let namespace = "operate-record";
    let (cluster, limiter, operator) = in_cluster(namespace).await;
    let semaphores: Vec<_> = (0..40u64)
        .map(|key| limiter.semaphore(&JOBS, key).unwrap())
        .collect();
    set(&operator, 5, HOUR, 1).await;
    for semaphore in &semaphores {
        assert_eq!(semaphore.usage().await.unwrap().max, 5);
    }
    let late = builder("late").namespace(namespace);
    let late = late.connect(&cluster.url()).await.unwrap();
    assert_eq!(acme(&late).usage().await.unwrap().max, 5);
    assert_eq!(operator.log().await.unwrap()[0].author, "ada");
    let now = seen(&operator).await;
    operator.unset(&now, &jobs(), &ada()).await.unwrap();
    for semaphore in &semaphores {
        until_max(semaphore, 2).await;
    }
}

/// The keys of a limit are in many parts.
#[tokio::test]
async fn in_a_cluster_all_keys_are_resumed() {
    let (_cluster, limiter, operator) = in_cluster("operate-resume").await;
    let keys: Vec<_> = (0..20u64)
        .map(|key| limiter.semaphore(CHAT, key).unwrap())
        .collect();
    let ended = resumed(async || {
        for key in &keys {
            key.pause(&CHAT, HOUR).unwrap();
            until_paused(key).await;
        }
        let why = operator.explain("chat", KeyDigest::of("chat", 7_u64));
        assert!(why.await.unwrap().pause.is_some());
        let target = Target::limit("chat");
        operator.0.resume(&target, &ada()).await.unwrap()
    });
    assert_eq!(ended.await.rows.len(), 20);
    for key in &keys {
        drop(key.acquire().await.unwrap());
    }
}

/// The payments of a key are where the key is.
#[tokio::test]
async fn in_a_cluster_tenants_are_behind_too() {
    let (_cluster, limiter, operator) = in_cluster("operate-tenants").await;
    for key in ["a", "b", "c"] {
        let acme = limiter.semaphore(GPU, key).unwrap().tenant("acme").unwrap();
        let _kept = (acme.acquire().await.unwrap(), wait_in_line(&acme).await);
        let digest = KeyDigest::of("gpu", key);
        let tenants = operator.tenants("gpu", Some(digest)).await.unwrap().rows;
        assert_eq!((tenants[0].waiting, tenants[0].debt_ms), (1, Some(0)));
    }
}
