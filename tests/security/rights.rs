//! The permissions of the store's user.

use std::time::Duration;

use futures_util::{StreamExt, future::join, stream};
use tokio::time::sleep;
use tower_turnstile::{
    AcquireError, AcquireErrorKind, ConfigError, ConfigErrorKind, Fallback, Limit, Limiter,
};

use crate::{
    output::is_refused,
    support::{GUARD, log::log, redis_server::RedisServer, soon},
};

const PATIENT: Duration = Duration::from_secs(600);
/// An outage would admit everybody.
const ONE: Limit = Limit::concurrent("one", 1)
    .wait_up_to(PATIENT)
    .fallback(Fallback::Allow);
const ALL: Limit = Limit::concurrent("all", 5).fallback(Fallback::Allow);
const FAIR: Limit = Limit::concurrent("fair", 1)
    .wait_up_to(PATIENT)
    .max_waiters(5)
    .fallback(Fallback::Allow)
    .fair();
const RATE: Limit = Limit::rate("rate", 10_000, Duration::from_secs(1)).fallback(Fallback::Allow);
/// Longer than a test takes: waiters learn of their slots only through wake-ups.
const RARELY: Duration = Duration::from_secs(600);
const OFTEN: Duration = Duration::from_millis(50);

/// The guide's list, for this namespace: `ACL SETUSER` and its arguments.
fn documented(namespace: &str) -> Vec<String> {
    let text = include_str!("../../src/guide/redis.md");
    let (_, list) = text.split_once("\nACL SETUSER").expect("the list");
    let (list, _) = list.split_once("\n```").expect("its end");
    let list = list.replace("turnstile:", &format!("{namespace}:"));
    list.split_whitespace().map(str::to_owned).collect()
}

/// Creates a user with the documented permissions, and changes; returns the URL.
fn user(server: &RedisServer, namespace: &str, changes: &[&str]) -> String {
    let documented = documented(namespace);
    let mut command = vec!["ACL", "SETUSER"];
    command.extend(documented.iter().map(String::as_str));
    command.extend(changes);
    server.cli(&command);
    server.url().replace("://", "://turnstile:password@")
}

/// How a missing permission was noticed.
#[derive(Debug)]
enum Noticed {
    AtConnect(ConfigErrorKind),
    ByRequest(AcquireErrorKind),
    InLog,
}

impl From<ConfigError> for Noticed {
    fn from(error: ConfigError) -> Self {
        Self::AtConnect(error.kind())
    }
}

impl From<AcquireError> for Noticed {
    fn from(error: AcquireError) -> Self {
        Self::ByRequest(error.kind())
    }
}

async fn connect(
    url: &str,
    namespace: &str,
    poll: Duration,
    lease: Duration,
) -> Result<Limiter, ConfigError> {
    let builder = Limiter::builder().namespace(namespace);
    let builder = builder.lease(lease).store_timeout(lease * 3 / 10);
    let builder = builder.poll_interval(poll).waiter_ttl(3 * poll);
    builder.connect(url).await
}

/// Waits until the condition holds, or until the log reports that the store refuses.
async fn until(namespace: &str, done: impl Fn() -> bool) -> Result<(), Noticed> {
    let wait = async {
        while !done() {
            if is_refused(namespace) {
                return Err(Noticed::InLog);
            }
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    };
    soon(wait).await
}

/// The life of a service with two replicas, which exercises every permission of the store's user. Returns an error as
/// soon as anything but a full limit interferes.
async fn live(
    server: &RedisServer,
    url: &str,
    namespace: &str,
    poll: Duration,
) -> Result<(), Noticed> {
    // Renewed every four seconds.
    let one = connect(url, namespace, poll, Duration::from_secs(12)).await?;
    let other = connect(url, namespace, poll, PATIENT).await?;
    let held = one.semaphore(&ONE, "key").unwrap().acquire().await?;
    let key = server.keys(&format!("{namespace}:*"));

    // Whatever is forbidden, nobody else may get the slot.
    let semaphore = other.semaphore(&ONE, "key").unwrap();
    match semaphore.try_acquire().await {
        Ok(_) => panic!("the gate is open"),
        Err(error) if error.kind() == AcquireErrorKind::Full => {}
        Err(error) => return Err(error.into()),
    }
    let waiter = tokio::spawn(async move { semaphore.acquire().await });
    let waits = || server.cli(&["ZCOUNT", &key, "-inf", "(0"]) == "1";
    until(namespace, || waits() || waiter.is_finished()).await?;
    if waiter.is_finished() {
        return Err(waiter
            .await
            .expect("no panic")
            .expect_err("the gate is open")
            .into());
    }
    let deadline = || {
        server.cli(&[
            "ZRANGE",
            &key,
            "(0",
            "(2251799813685248",
            "BYSCORE",
            "WITHSCORES",
        ])
    };
    let before = deadline();
    until(namespace, || deadline() != before).await?;
    // Another holder has crashed.
    server.cli(&["ZADD", &key, "1", "crashed"]);
    drop(held);
    until(namespace, || waiter.is_finished()).await?;
    drop(waiter.await.expect("no panic")?);
    until(namespace, || server.key_count() == 0).await?;

    let several = one
        .semaphore(&ONE, "key")
        .unwrap()
        .and(&ALL, "key")
        .unwrap()
        .and(&RATE, "key")
        .unwrap();
    drop(several.acquire().await?);
    until(namespace, || server.key_count() == 0).await?;
    flood(&one, server, namespace).await?;
    let _held = other.semaphore(&ALL, "key").unwrap().acquire().await?;
    assert_eq!(other.shutdown(Duration::ZERO).await.lost, 1);
    one.shutdown(GUARD).await;
    until(namespace, || server.key_count() == 0).await?;
    if is_refused(namespace) {
        return Err(Noticed::InLog);
    }
    Ok(())
}

/// One tenant of a fair limit fills the queue, as far as it may.
async fn flood(limiter: &Limiter, server: &RedisServer, namespace: &str) -> Result<(), Noticed> {
    let fair = limiter
        .semaphore(&FAIR, "fair")
        .unwrap()
        .tenant("acme")
        .unwrap();
    let held = fair.acquire().await?;
    let key = server.keys(&format!("{namespace}:*}}"));
    let waiting: Vec<_> = (0..4).map(|_| tokio::spawn(fair.acquire())).collect();
    let waits = || server.cli(&["ZCOUNT", &key, "-inf", "(0"]) == "4";
    until(namespace, waits).await?;
    // One place is left, for another tenant.
    match fair.acquire().await {
        Ok(_) => panic!("the gate is open"),
        Err(error) if error.kind() == AcquireErrorKind::QueueFull => {}
        Err(error) => return Err(error.into()),
    }
    drop(held);
    for waiter in waiting {
        drop(waiter.await.expect("no panic")?);
    }
    until(namespace, || server.key_count() == 0).await
}

#[tokio::test]
async fn the_documented_rights_are_enough_from_the_first_request_to_the_shutdown() {
    log();
    let run = async |namespace, changes: &[&str]| {
        let server = RedisServer::start();
        let url = user(&server, namespace, changes);
        let outcome = live(&server, &url, namespace, RARELY).await;
        outcome.expect(namespace);
    };
    join(run("rights", &[]), run("rights-config", &["+config|get"])).await;
}

#[tokio::test]
async fn without_publish_the_queue_moves_by_polls() {
    log();
    let server = RedisServer::start();
    let url = user(&server, "rights-publish", &["-publish"]);
    live(&server, &url, "rights-publish", OFTEN)
        .await
        .expect("all goes on");
}

/// In this case waiters of a crashed replica are not passed over.
#[tokio::test]
async fn without_pubsub_all_goes_on() {
    log();
    let server = RedisServer::start();
    let url = user(&server, "rights-pubsub", &["-pubsub"]);
    live(&server, &url, "rights-pubsub", RARELY)
        .await
        .expect("all goes on");
}

/// Commands whose absence only reduces comfort, as the tests above show.
const OPTIONAL: [&str; 2] = ["publish", "pubsub"];

#[tokio::test]
async fn each_documented_right_is_needed_and_without_it_the_gate_stays_shut() {
    log();
    let rights = documented("any");
    let rights = rights.iter().filter_map(|word| word.strip_prefix('+'));
    let is_needed = |right: &&str| !OPTIONAL.contains(right);
    let rights: Vec<_> = rights.filter(is_needed).collect();
    assert!(rights.len() > 10, "{rights:?}");
    let without = rights.iter().map(|right| format!("-{right}"));
    let missing = without.chain(["resetkeys".into(), "resetchannels".into()]);
    let tries = missing.map(async |missing| {
        let server = RedisServer::start();
        let namespace = format!("without-{}", missing.trim_start_matches('-'));
        let url = user(&server, &namespace, &[&missing]);
        match live(&server, &url, &namespace, OFTEN).await {
            Ok(()) => panic!("{missing}: nobody noticed"),
            Err(Noticed::AtConnect(kind)) => {
                assert_eq!(kind, ConfigErrorKind::Permission, "{missing}")
            }
            Err(Noticed::ByRequest(kind)) => {
                assert_eq!(kind, AcquireErrorKind::Misconfigured, "{missing}");
            }
            Err(Noticed::InLog) => {}
        }
    });
    stream::iter(tries).for_each_concurrent(7, |one| one).await;
}
