//! Reports for operators: one warning for the duration of a store's fault, and one line for an event with many keys.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_turnstile::{Fallback, Limit, Limiter, LimiterBuilder, Permit};

use crate::{
    scene::{LONG, POLL, quick, soon, steady},
    support::{log::log, redis_server::RedisServer},
};

const DOWN: &str = "the store is down";
const BACK: &str = "the store is back";
const RESTORED: &str = "permits that the store had lost were put back";
const ENTERED: &str = "permits that a fallback had admitted were entered";
/// Number of keys, each with one permit.
const KEYS: usize = 100;
/// A stall of the machine may divide what is entered together.
const MOST_LINES: usize = 3;
/// Longer than events are gathered.
const GATHERED: Duration = Duration::from_millis(1_200);

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

async fn limiter(builder: LimiterBuilder, server: &RedisServer, namespace: &str) -> Limiter {
    log();
    let limiter = builder.namespace(namespace).connect(&server.url()).await;
    limiter.expect("valid settings")
}

/// Sends a request, as a service does throughout; the fallback admits it.
async fn ask(limiter: &Limiter) {
    drop(soon(limiter.semaphore(local("asked"), "key").unwrap().acquire()).await);
    sleep(Duration::from_millis(5)).await;
}

async fn until(is_so: impl Fn() -> bool) {
    soon(async {
        while !is_so() {
            sleep(POLL).await;
        }
    })
    .await;
}

async fn until_store_is(limiter: &Limiter, is_up: bool) {
    soon(async {
        while limiter.status().store_up != is_up {
            ask(limiter).await;
        }
    })
    .await;
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
async fn is_reported_once(state: &str, begin: Commands<'_>, end: Commands<'_>, words: &str) {
    let server = RedisServer::start();
    let namespace = format!("state-{}", state.to_lowercase().replace(' ', "-"));
    let limiter = limiter(steady(), &server, &namespace).await;
    ask(&limiter).await;
    if state == "MISCONF" {
        cannot_save(&server);
    }
    begin.iter().for_each(|command| drop(server.cli(command)));
    until_store_is(&limiter, false).await;
    // Some probes.
    for _ in 0..300 {
        ask(&limiter).await;
        assert!(!limiter.status().store_up, "{state}: it seems to be back");
    }
    assert_eq!(events(&namespace, words).len(), 1, "{state}");
    assert_eq!(events(&namespace, BACK).len(), 0, "{state}");
    end.iter().for_each(|command| drop(server.cli(command)));
    until_store_is(&limiter, true).await;
    until(|| !events(&namespace, BACK).is_empty()).await;
    sleep(POLL).await;
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

#[tokio::test]
async fn a_state_in_which_some_commands_work_is_reported_once() {
    let deny = |command| ["ACL", "SETUSER", "default", command];
    let cases: [(&str, Commands, Commands, &str); 5] = [
        (
            "READONLY",
            // Nobody listens there.
            &[&["REPLICAOF", "127.0.0.1", "1"]],
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
    let cases = cases.map(|(state, begin, end, words)| is_reported_once(state, begin, end, words));
    join_all(cases).await;
}

/// Acquires one permit of each key.
async fn fill(limiter: &Limiter, limit: &Limit, keys: std::ops::Range<usize>) -> Vec<Permit> {
    let acquire = |key| {
        limiter
            .semaphore(limit, format!("key-{key}"))
            .unwrap()
            .acquire()
    };
    let acquired = soon(join_all(keys.map(acquire))).await.into_iter();
    acquired.map(|permit| permit.expect("free")).collect()
}

/// A server restarted without its data.
#[tokio::test]
async fn data_that_the_store_has_lost_is_reported_with_counts_and_not_by_key() {
    let mut server = RedisServer::start();
    let namespace = "lost-data";
    let limiter = limiter(steady(), &server, namespace).await;
    let permits = fill(&limiter, &local("restored"), 0..KEYS).await;
    server.restart();
    let sums = |name: &str| -> usize {
        let lines = events(namespace, RESTORED);
        lines.iter().map(|line| field(line, name)).sum()
    };
    until(|| sums("count") >= KEYS).await;
    sleep(GATHERED).await;
    assert_eq!((sums("keys"), sums("count")), (KEYS, KEYS));
    assert!(events(namespace, RESTORED).len() <= MOST_LINES);
    assert!(events(namespace, ENTERED).is_empty());
    assert!(permits.iter().all(|permit| !permit.is_lost()));
}

/// A server that stalled has lost nothing, although it does not know the permits admitted meanwhile.
#[tokio::test]
async fn permits_of_a_fallback_are_no_evidence_of_lost_data() {
    let server = RedisServer::start();
    let namespace = "stood-still";
    let builder = quick().lease(LONG).waiter_ttl(LONG);
    let limiter = limiter(builder, &server, namespace).await;
    let before = fill(&limiter, &local("entered"), 0..10).await;
    server.pause();
    let meanwhile = fill(&limiter, &local("entered"), 10..10 + KEYS).await;
    until(|| !limiter.status().store_up).await;
    server.resume();
    until(|| !events(namespace, ENTERED).is_empty()).await;
    sleep(GATHERED).await;
    let lines = events(namespace, ENTERED);
    assert!(lines.len() <= MOST_LINES, "{lines:?}");
    assert!(field(&lines[0], "keys") > 1, "{lines:?}");
    assert!(
        events(namespace, RESTORED).is_empty(),
        "it has lost nothing"
    );
    drop((before, meanwhile));
}
