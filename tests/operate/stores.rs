//! Clusters, and primaries that are replaced.

use std::time::Duration;

use tokio::{
    task::block_in_place,
    time::{sleep, timeout},
};
use tower_turnstile::{
    Limit,
    operate::{KeyDigest, Operator},
};

use crate::{
    scene::{CHAT, await_replicas, builder},
    support::{alone, redis_cluster::RedisCluster, sentinel::Watched},
};

/// A process has sixteen connections to a cluster, and one for operators.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_each_process_answers_once_for_all_its_parts() {
    let cluster = RedisCluster::shared();
    let namespace = "operate-cluster";
    let replica = async |label| {
        let builder = builder(label).namespace(namespace);
        builder.connect(&cluster.url()).await.expect("it is up")
    };
    let limiters = [replica("one").await, replica("other").await];
    let operator = Operator::builder().namespace(namespace);
    let operator = operator.connect(&cluster.url()).await.expect("it is up");
    await_replicas(&operator, 2).await;
    let mut held = Vec::new();
    for number in 0..40u64 {
        let semaphore = limiters[number as usize % 2].semaphore(CHAT, number);
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
    let heard = |node: &crate::support::redis_server::RedisServer| {
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
    let cluster = RedisCluster::shared();
    let namespace = "operate-reuse";
    let limiter = builder("web").namespace(namespace);
    let limiter = limiter.connect(&cluster.url()).await.expect("it is up");
    let semaphore = limiter.semaphore(Limit::concurrent("one", 1).reuse(), "a");
    let mut is_reused = false;
    while !is_reused {
        drop(semaphore.acquire().await.expect("a slot"));
        let permit = semaphore.acquire().await.expect("a slot");
        let id = permit.id().expect("it has a slot");
        let permits = limiter.operator().permits("one", None).await.unwrap();
        let ids: Vec<_> = permits.rows.iter().map(|row| row.id).collect();
        assert_eq!(ids, [id]);
        is_reused = id.to_string().contains('.');
    }
}

/// Each part of a process decides on its own keys.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_the_delays_and_refusals_of_all_parts_are_seen() {
    const KEYS: u64 = 12;
    let cluster = RedisCluster::shared();
    let namespace = "operate-parts";
    let limiter = builder("web").namespace(namespace);
    let limiter = limiter.connect(&cluster.url()).await.expect("it is up");
    let operator = Operator::builder().namespace(namespace);
    let operator = operator.connect(&cluster.url()).await.expect("it is up");
    await_replicas(&operator, 1).await;
    let hour = Duration::from_secs(3_600);
    let starts = Limit::rate("starts", 1, hour).wait_up_to(2 * hour);
    let mut delayed = Vec::new();
    for key in 0..KEYS {
        let semaphore = limiter.semaphore(&starts, key);
        drop(semaphore.acquire().await.expect("the first of an hour"));
        semaphore.try_acquire().await.expect_err("the second");
        delayed.push(tokio::spawn(semaphore.acquire()));
    }
    let refusals = operator.refusals("starts", None).await.unwrap();
    assert_eq!(refusals.rows.len(), KEYS as usize);
    let all_wait = async {
        while operator.limits().await.unwrap().rows[0].waiting < KEYS as usize {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), all_wait)
        .await
        .expect("all wait, and are seen");
    delayed.iter().for_each(|waits| waits.abort());
}

/// Operators and replicas both follow the sentinels to the next primary.
#[test]
fn operators_and_replicas_follow_a_failover() {
    alone(async {
        let watched = block_in_place(Watched::start);
        let _limiter = builder("web").connect(&watched.url()).await.expect("a URL");
        let operator = Operator::connect(&watched.url()).await.expect("it is up");
        await_replicas(&operator, 1).await;
        block_in_place(|| {
            watched.servers[0].pause();
            watched.until_replaced(0)
        });
        let answered = async {
            loop {
                if let Ok(replicas) = operator.replicas().await
                    && replicas.answered == 1
                {
                    break;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(Duration::from_secs(20), answered)
            .await
            .expect("in time");
        watched.servers[0].resume();
    });
}
