//! The permissions listed in the guide: sufficient for each user, and no more than necessary.

use std::time::Duration;

use redis::RedisResult;
use tower_turnstile_operate::{By, KeyDigest, Outcome, Target, What};

use crate::{
    lost_data::seen_all,
    resuming::resumed,
    scene::{CHAT, Orders as _, Patient, await_replicas, builder, connection},
    support::redis_server::RedisServer,
};

/// The guide's lists about operators, in order: arguments of `ACL`.
fn lists() -> Vec<Vec<String>> {
    let text = include_str!("../../../src/guide/redis.md");
    let (_, text) = text.split_once("### Operators").expect("the part");
    let (text, _) = text
        .split_once("**The store is trusted.**")
        .expect("its end");
    let lists = text.split("\nACL ").skip(1);
    let list = |list: &str| {
        let (list, _) = list.split_once("\n```").expect("its end");
        list.split_whitespace().map(str::to_owned).collect()
    };
    lists.map(list).collect()
}

/// Redis expects a selector as a single argument.
fn acl(server: &RedisServer, list: &[String]) {
    let mut arguments = vec!["ACL".to_owned()];
    for word in list {
        let last = arguments.last_mut().expect("one at least");
        if last.starts_with('(') && !last.ends_with(')') {
            *last = format!("{last} {word}")
        } else {
            arguments.push(word.clone())
        }
    }
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    server.cli(&arguments);
}

fn has_selectors(server: &RedisServer) -> bool {
    let info = server.cli(&["INFO", "server"]);
    let version = info
        .lines()
        .find_map(|line| line.strip_prefix("redis_version:"));
    version.is_some_and(|version| !version.starts_with('6'))
}

#[tokio::test]
async fn the_documented_rights_are_enough_and_services_cannot_ask() {
    let server = RedisServer::start();
    if !has_selectors(&server) {
        return;
    }
    let lists = lists();
    let [_, service, operator, changing] = &lists[..] else {
        panic!("{lists:?}");
    };
    acl(&server, service);
    acl(&server, operator);
    let url = |user: &str| server.url().replace("://", &format!("://{user}:password@"));
    let limiter = builder("web").connect(&url("turnstile")).await.unwrap();
    let held = limiter
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let asking = Patient::connect(&url("operator")).await;
    await_replicas(&asking, 1).await;
    let acme = KeyDigest::of("chat", "acme");
    let why = asking.explain("chat", acme).await.unwrap();
    assert_eq!(
        (why.in_use, why.permits.rows[0].id),
        (1, held.id().unwrap())
    );

    let ledger = format!("turnstile:{{{acme}}}");
    for (user, forbidden) in [
        ("turnstile", vec!["PUBLISH", "turnstile:control:0", "x"]),
        ("turnstile", vec!["SUBSCRIBE", "turnstile:answer:x"]),
        ("turnstile", vec!["DEL", "turnstile:control"]),
        ("turnstile", vec!["ZADD", "turnstile:control", "1", "x"]),
        (
            "turnstile",
            vec!["LRANGE", "{turnstile:control}:log", "0", "0"],
        ),
        ("operator", vec!["HSET", "turnstile:control", "x", "1"]),
        ("operator", vec!["ZREM", &ledger, "x"]),
        ("operator", vec!["DEL", &ledger]),
        ("operator", vec!["EVAL", "return 1", "0"]),
        ("operator", vec!["PUBLISH", "turnstile:wake:x", "x"]),
    ] {
        let mut connection = connection(&url(user)).await;
        let mut command = redis::cmd(forbidden[0]);
        let command = command.arg(&forbidden[1..]);
        let outcome: RedisResult<redis::Value> = command.query_async(&mut connection).await;
        let error = outcome.expect_err("forbidden");
        assert_eq!(
            error.code(),
            Some("NOPERM"),
            "{user} {forbidden:?}: {error}"
        );
    }
    // The replica reads changes by an operator with more permissions.
    acl(&server, changing);
    let (hour, ada) = (
        Duration::from_secs(3_600),
        By::new("ada", "launch").unwrap(),
    );
    // Ends of pauses need no right but to ask.
    let acme = Target::key("chat", "acme");
    let ended = resumed(async || {
        limiter
            .semaphore(CHAT, "acme")
            .unwrap()
            .pause(CHAT, hour)
            .unwrap();
        asking.0.resume(&acme, &ada).await.unwrap()
    });
    assert_eq!(ended.await.rows.len(), 1);
    let (chat, seen) = (Target::limit("chat"), asking.overrides().await.unwrap());
    let outcome = asking.set(&seen, &chat, 12, hour, &ada).await.unwrap();
    assert_eq!(outcome, Outcome::Done { replicas: 1 });
    let seen = asking.overrides().await.unwrap();
    let outcome = asking.unset(&seen, &chat, &ada).await.unwrap();
    assert_eq!(outcome, Outcome::Done { replicas: 1 });

    // The replica restores overrides that the store has lost.
    let seen = asking.overrides().await.unwrap();
    asking.set(&seen, &chat, 11, hour, &ada).await.unwrap();
    server.cli(&["FLUSHALL"]);
    let now = seen_all(&asking, 1).await;
    assert!(now.all()[0].recorded, "{now:?}");
    assert_eq!(asking.log().await.unwrap()[0].what, What::Restored);
    assert_eq!(asking.namespaces().await.unwrap(), ["turnstile"]);
    drop(held);
}

/// Overrides of a service that may only read the record.
#[tokio::test]
async fn what_a_replica_may_not_write_back_is_shown_and_ended() {
    let server = RedisServer::start();
    if !has_selectors(&server) {
        return;
    }
    let service = "SETUSER reads on >password ~turnstile:{* %R~turnstile:control &* +@all";
    acl(
        &server,
        &service.split(' ').map(str::to_owned).collect::<Vec<_>>(),
    );
    let url = server.url().replace("://", "://reads:password@");
    let limiter = builder("web").connect(&url).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let (hour, ada) = (
        Duration::from_secs(3_600),
        By::new("ada", "launch").unwrap(),
    );
    let (chat, other) = (Target::limit("chat"), Target::limit("other"));
    let semaphore = limiter.semaphore(CHAT, "acme").unwrap();
    let max = async || semaphore.usage().await.unwrap().max;
    let recorded = async |count| -> Vec<_> {
        let now = seen_all(&operator, count).await;
        now.all().iter().map(|one| one.recorded).collect()
    };
    for target in [&chat, &other] {
        let seen = operator.overrides().await.unwrap();
        operator.set(&seen, target, 3, hour, &ada).await.unwrap();
    }
    server.cli(&["FLUSHALL"]);
    assert_eq!(recorded(2).await, [false, false]);
    assert_eq!(max().await, 3);
    let seen = seen_all(&operator, 2).await;
    let outcome = operator.unset(&seen, &chat, &ada).await.unwrap();
    assert_eq!(outcome, Outcome::Done { replicas: 1 });
    assert_eq!(max().await, 10);
    // The change has also restored the other overrides.
    assert_eq!(recorded(1).await, [true]);
}

/// With only the channels added to a service's list, on any version.
#[tokio::test]
async fn the_channels_are_all_that_a_replica_needs_more() {
    let server = RedisServer::start();
    let lists = lists();
    let plain = include_str!("../../../src/guide/redis.md")
        .split("\nACL ")
        .nth(1)
        .unwrap();
    let (plain, _) = plain.split_once("\n```").unwrap();
    let plain: Vec<String> = plain.split_whitespace().map(str::to_owned).collect();
    acl(&server, &plain);
    acl(&server, &lists[0]);
    let url = server.url().replace("://", "://turnstile:password@");
    let limiter = builder("web").connect(&url).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    limiter.shutdown(Duration::ZERO).await;
    await_replicas(&operator, 0).await;
}
