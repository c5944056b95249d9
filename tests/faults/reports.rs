//! Reports for operators: one warning for the duration of a store's fault, and one line for an event with many keys.

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_turnstile::{Fallback, Limit, Limiter, Permit};

use crate::{
    scene::{LEASE, POLL, STORE_TIMEOUT, quick, soon},
    support::{
        log::log,
        redis_server::{RedisServer, free_port},
    },
};

const DOWN: &str = "the store is down";
const BACK: &str = "the store is back";
const RESTORED: &str = "permits that the store had lost were put back";
const ENTERED: &str = "permits that a fallback had admitted were entered";
/// Number of keys, each with one permit.
const KEYS: usize = 200;

/// Events of one namespace that contain these words.
fn events(namespace: &str, words: &str) -> Vec<String> {
    let namespace = format!("namespace=\"{namespace}\"");
    let lines = log().lines_with(&namespace).into_iter();
    lines.filter(|line| line.contains(words)).collect()
}

/// The number in this field of an event.
fn field(line: &str, name: &str) -> usize {
    let value = line.split(&format!(" {name}=")).nth(1);
    let value = value.and_then(|rest| rest.split_whitespace().next());
    let value = value.and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {line}"))
}

async fn limiter(server: &RedisServer, namespace: &str) -> Limiter {
    log();
    // Longer than a server takes to restart while other tests run.
    let builder = quick().namespace(namespace).lease(10 * LEASE);
    builder
        .connect(&server.url())
        .await
        .expect("valid settings")
}

async fn is_up(limiter: &Limiter) {
    soon(async {
        while !limiter.status().store_up {
            sleep(POLL / 10).await;
        }
    })
    .await;
}

/// Sends requests throughout, like a service; the fallback admits them.
async fn ask_for(limiter: &Limiter, time: Duration) {
    let semaphore = limiter.semaphore(local("asked"), "key");
    let began = Instant::now();
    while began.elapsed() < time {
        drop(soon(semaphore.acquire()).await);
        sleep(Duration::from_millis(5)).await;
    }
}

fn local(name: &'static str) -> Limit {
    let limit = Limit::try_concurrent(name, 3).expect("a number of slots");
    limit.fallback(Fallback::Local(3))
}

type Commands<'a> = &'a [&'a [&'a str]];

/// Removes the server's folder, because as root the tests ignore file permissions.
fn cannot_save(server: &RedisServer) {
    let folder = server.cli(&["CONFIG", "GET", "dir"]);
    let folder = folder.lines().nth(1).expect("a folder");
    std::fs::remove_dir_all(folder).expect("it is there");
}

/// G8: a server that answers but does not work is reported at the beginning and at the end of this state, and
/// `store_up` is 0 in between.
#[tokio::test]
async fn a_state_in_which_some_commands_work_is_reported_once() {
    let nobody = free_port().to_string();
    let replicaof = ["REPLICAOF", "127.0.0.1", &nobody];
    let deny = |command| ["ACL", "SETUSER", "default", command];
    let cases: [(&str, Commands, Commands, &str); 5] = [
        (
            "READONLY",
            &[&replicaof],
            &[&["REPLICAOF", "NO", "ONE"]],
            DOWN,
        ),
        (
            "NOREPLICAS",
            &[&["CONFIG", "SET", "min-replicas-to-write", "1"]],
            &[&["CONFIG", "SET", "min-replicas-to-write", "0"]],
            DOWN,
        ),
        (
            "MISCONF",
            &[
                &["CONFIG", "SET", "save", "3600 1"],
                &["CONFIG", "SET", "stop-writes-on-bgsave-error", "yes"],
                &["SET", "unsaved", "1"],
                &["BGSAVE"],
            ],
            &[&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"]],
            DOWN,
        ),
        (
            "a right of the script",
            &[&deny("-zcard")],
            &[&deny("+zcard")],
            "the store is misconfigured",
        ),
        (
            "the right to run scripts",
            &[&["ACL", "SETUSER", "default", "-eval", "-evalsha"]],
            &[&["ACL", "SETUSER", "default", "+eval", "+evalsha"]],
            "the store is misconfigured",
        ),
    ];
    for (state, begin, end, words) in cases {
        let server = RedisServer::start();
        let namespace = format!("state-{}", state.to_lowercase().replace(' ', "-"));
        let limiter = limiter(&server, &namespace).await;
        ask_for(&limiter, POLL).await;
        if state == "MISCONF" {
            cannot_save(&server);
        }
        begin.iter().for_each(|command| drop(server.cli(command)));
        soon(async {
            while limiter.status().store_up {
                ask_for(&limiter, POLL / 4).await;
            }
        })
        .await;
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(4) {
            ask_for(&limiter, POLL / 10).await;
            assert!(!limiter.status().store_up, "{state}: it seems to be back");
        }
        assert_eq!(events(&namespace, words).len(), 1, "{state}");
        assert_eq!(events(&namespace, BACK).len(), 0, "{state}");
        end.iter().for_each(|command| drop(server.cli(command)));
        is_up(&limiter).await;
        ask_for(&limiter, POLL).await;
        soon(log().until(&[BACK, &namespace])).await;
        assert_eq!(events(&namespace, words).len(), 1, "{state}");
        assert_eq!(events(&namespace, BACK).len(), 1, "{state}");
        let all = events(&namespace, "the store ");
        assert_eq!(all.len(), 2, "{state}: {all:?}");
        let address = format!("127.0.0.1:{}", server.port());
        let is_named = |line: &String| line.contains(&format!("store=\"{address}\""));
        assert!(all.iter().all(is_named), "{state}: {all:?}");
        let begun = &events(&namespace, words)[0];
        assert!(begun.contains(&format!("error=\"{address}: ")), "{begun}");
    }
}

/// Acquires one permit of each key.
async fn fill(limiter: &Limiter, limit: &Limit, keys: std::ops::Range<usize>) -> Vec<Permit> {
    let mut permits = Vec::new();
    for key in keys {
        let acquired = soon(limiter.semaphore(limit, format!("key-{key}")).acquire()).await;
        permits.push(acquired.expect("free"));
    }
    permits
}

/// A server restarted without its data.
#[tokio::test]
async fn data_that_the_store_has_lost_is_reported_with_counts_and_not_by_key() {
    let mut server = RedisServer::start();
    let namespace = "lost-data";
    let limiter = limiter(&server, namespace).await;
    let permits = fill(&limiter, &local("restored"), 0..KEYS).await;
    server.restart();
    soon(log().until(&[RESTORED, namespace])).await;
    sleep(LEASE).await;
    let lines = events(namespace, RESTORED);
    println!("{lines:?}");
    assert_eq!(lines.len(), 1);
    assert_eq!(
        (field(&lines[0], "keys"), field(&lines[0], "count")),
        (KEYS, KEYS)
    );
    assert!(events(namespace, ENTERED).is_empty());
    assert!(permits.iter().all(|permit| !permit.is_lost()));
}

/// A server that stalled has lost nothing, although it does not know the permits admitted meanwhile.
#[tokio::test]
async fn permits_of_a_fallback_are_no_evidence_of_lost_data() {
    let server = RedisServer::start();
    let namespace = "stood-still";
    let limiter = limiter(&server, namespace).await;
    let before = fill(&limiter, &local("entered"), 0..10).await;
    server.pause();
    let meanwhile = fill(&limiter, &local("entered"), 10..10 + KEYS).await;
    assert!(!limiter.status().store_up);
    sleep(STORE_TIMEOUT).await;
    server.resume();
    soon(log().until(&[ENTERED, namespace])).await;
    sleep(LEASE).await;
    let lines = events(namespace, ENTERED);
    println!("{lines:?}");
    assert_eq!(lines.len(), 1);
    assert_eq!(
        (field(&lines[0], "keys"), field(&lines[0], "count")),
        (KEYS, KEYS)
    );
    assert!(
        events(namespace, RESTORED).is_empty(),
        "it has lost nothing"
    );
    drop((before, meanwhile));
}
