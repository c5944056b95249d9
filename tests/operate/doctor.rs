//! Faults of a store or its replicas, as found by the doctor.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tower_turnstile::{
    AcquireError, ConfigError, Fallback, Limit, Limiter,
    operate::{Check, Finding, Health, Operator},
};

use crate::{
    scene::{CHAT, builder, replicas},
    support::{
        clock::Clock,
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

async fn diagnose(url: &str) -> Vec<Finding> {
    Operator::builder().diagnose(url).await.unwrap()
}

fn of(findings: &[Finding], check: Check) -> &Finding {
    let mut findings = findings.iter();
    findings
        .find(|one| one.check == check)
        .expect("it is looked at")
}

/// All findings that are not good.
fn bad(findings: &[Finding]) -> Vec<(Check, Health)> {
    let bad = findings.iter().filter(|one| one.health != Health::Good);
    bad.map(|one| (one.check, one.health)).collect()
}

#[tokio::test]
async fn a_server_and_replicas_that_are_well() {
    let server = RedisServer::start();
    let findings = diagnose(&server.url()).await;
    let nobody = (Check::Replicas, Health::Note);
    let version = of(&findings, Check::Version);
    let mut expected = vec![nobody];
    if version.health == Health::Note {
        expected.insert(0, (Check::Version, Health::Note));
    }
    assert_eq!(bad(&findings), expected, "{findings:?}");
    // The doctor leaves nothing behind.
    assert_eq!(server.key_count(), 0);

    let (limiters, _operator) = replicas(&server, 2).await;
    let held = limiters[0].semaphore(CHAT, "acme").acquire().await.unwrap();
    let findings = diagnose(&server.url()).await;
    expected.pop();
    assert_eq!(bad(&findings), expected, "{findings:?}");
    assert_eq!(of(&findings, Check::Replicas).text, "2 of 2 answered");
    assert!(!held.is_lost());
}

#[tokio::test]
async fn a_server_that_evicts_and_ends_connections() {
    let arguments = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let server = RedisServer::start_with(&arguments);
    server.cli(&[
        "CONFIG",
        "SET",
        "client-output-buffer-limit",
        "pubsub 1kb 1kb 1",
    ]);
    let findings = diagnose(&server.url()).await;
    let eviction = of(&findings, Check::Eviction);
    assert_eq!(eviction.health, Health::Fault);
    assert!(eviction.text.contains("allkeys-lru"), "{}", eviction.text);
    assert_eq!(of(&findings, Check::Buffers).health, Health::Warning);
}

/// A round trip of 100 ms, most of it on the way there.
#[tokio::test]
async fn a_server_that_is_far_away() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    proxy.delay(Way::Requests, Duration::from_millis(70));
    proxy.delay(Way::Replies, Duration::from_millis(30));
    let findings = diagnose(&proxy.url()).await;
    let latency = of(&findings, Check::Latency);
    assert_eq!(latency.health, Health::Warning, "{}", latency.text);
    assert!(
        latency.text.starts_with("a round trip takes 1"),
        "{}",
        latency.text
    );
    // Latency is not mistaken for a clock difference.
    assert_eq!(of(&findings, Check::Clock).health, Health::Good);
}

#[tokio::test]
async fn a_server_whose_clock_is_off() {
    let clock = Clock::new();
    let server = clock.server();
    for (seconds, text) in [(3_600, "ahead of"), (-3_600, "behind")] {
        clock.step(&server, seconds).await;
        let findings = diagnose(&server.url()).await;
        let found = of(&findings, Check::Clock);
        assert_eq!(found.health, Health::Warning, "{}", found.text);
        assert!(found.text.contains(text), "{}", found.text);
    }
    clock.step(&server, 0).await;
    let findings = diagnose(&server.url()).await;
    assert_eq!(of(&findings, Check::Clock).health, Health::Good);
}

/// Users who lack one permission each, derived from the guide's lists.
#[tokio::test]
async fn the_right_that_is_lacking_is_named() {
    let server = RedisServer::start();
    let user = |rights: &[&str]| {
        let all = [
            "ACL", "SETUSER", "ada", "reset", "on", ">pw", "~*", "&*", "+@all",
        ];
        server.cli(&[&all, rights].concat());
        server.url().replace("://", "://ada:pw@")
    };
    for (right, check, health) in [
        ("-zmscore", Check::ServiceRights, Health::Fault),
        ("-eval", Check::ServiceRights, Health::Fault),
        ("-evalsha", Check::ServiceRights, Health::Fault),
        ("-evalsha -zadd", Check::ServiceRights, Health::Note),
        ("-publish", Check::ServiceRights, Health::Warning),
        ("-time", Check::Latency, Health::Note),
        ("-time", Check::Clock, Health::Note),
        ("-zcount", Check::AskingRights, Health::Note),
        ("-hgetall", Check::ChangingRights, Health::Note),
        ("-config", Check::Buffers, Health::Note),
        ("-config -info", Check::Eviction, Health::Note),
        ("-scan", Check::Keys, Health::Note),
    ] {
        let rights: Vec<_> = right.split(' ').collect();
        let findings = diagnose(&user(&rights)).await;
        let finding = of(&findings, check);
        assert_eq!(finding.health, health, "{right}: {findings:?}");
        for right in rights {
            let text = &finding.text;
            assert!(text.contains(&right[1..]), "{right}: {text}");
        }
    }
    // A service that may neither subscribe nor ask.
    let findings = diagnose(&user(&["resetchannels"])).await;
    let service = of(&findings, Check::ServiceRights);
    assert_eq!(service.health, Health::Fault, "{findings:?}");
    assert!(
        service.text.contains("publish, subscribe"),
        "{}",
        service.text
    );
    assert_eq!(of(&findings, Check::AskingRights).health, Health::Note);
    // Only keys of another namespace.
    let findings = diagnose(&user(&["resetkeys", "~other:*"])).await;
    assert_eq!(of(&findings, Check::ServiceRights).health, Health::Fault);
    assert!(of(&findings, Check::ServiceRights).text.contains("zadd"));
}

/// Why a service fails.
#[derive(Debug)]
#[allow(dead_code, reason = "to be printed")]
enum Fails {
    AtConnect(ConfigError),
    ByRequest(AcquireError),
}

/// The life of a service with two replicas, which admits nobody without its store.
async fn serve(url: &str) -> Result<(), Fails> {
    let one = Limit::concurrent("one", 1).fallback(Fallback::Reject);
    let one = one.wait_up_to(Duration::from_secs(10));
    let rate = Limit::rate("rate", 10, Duration::from_secs(1)).fallback(Fallback::Reject);
    let connect = async || {
        let builder = Limiter::builder().poll_interval(Duration::from_millis(50));
        let builder = builder.namespace("served").require_store();
        let limiter = builder.connect(url).await;
        limiter.map_err(Fails::AtConnect)
    };
    let (first, second) = (connect().await?, connect().await?);
    let held = first.semaphore(&one, "key").acquire().await;
    let held = held.map_err(Fails::ByRequest)?;
    let semaphore = second.semaphore(&one, "key");
    let mut waiter = semaphore.acquire();
    while waiter.position().is_none_or(|position| position == 0) {
        let once = tokio::time::timeout(Duration::from_millis(1), &mut waiter).await;
        if let Ok(Err(error)) = once {
            return Err(Fails::ByRequest(error));
        }
    }
    drop(held);
    drop(waiter.await.map_err(Fails::ByRequest)?);
    let charged = first.semaphore(&rate, "key").acquire().await;
    drop(charged.map_err(Fails::ByRequest)?);
    Ok(())
}

/// Commands that two replicas do not need until a lease ends, a clock is stepped, a heavy permit arrives, or requests wait
/// under a fair limit.
const RARE: [&str; 6] = [
    "ZLEXCOUNT",
    "ZMSCORE",
    "ZRANK",
    "ZREMRANGEBYRANK",
    "ZREMRANGEBYSCORE",
    "ZSCORE",
];

/// The doctor must find a fault if and only if a service fails, and must name the command.
async fn is_seen(url: &str, command: &str, how: &str) {
    let served = serve(url).await;
    let builder = Operator::builder().store_timeout(Duration::from_millis(500));
    let name = command.to_lowercase();
    let what = format!("{command} {how}: {served:?}");
    let findings = match builder.diagnose(url).await {
        Ok(findings) => findings,
        Err(error) => {
            assert!(served.is_err(), "{what}: {error}");
            assert!(error.to_string().contains(&name), "{what}: {error}");
            return;
        }
    };
    let is_fault = findings.iter().any(|one| one.health == Health::Fault);
    let is_rare = RARE.contains(&command);
    assert!(
        is_fault == served.is_err() || is_fault && is_rare,
        "{what}: {findings:#?}"
    );
    // A command that is unneeded, or detected in another way, is not a finding.
    let is_needed = !["CLIENT", "HGETALL", "INFO"].contains(&command);
    let mut bad = findings.iter().filter(|one| one.health != Health::Good);
    let is_named = bad.any(|one| one.text.contains(&name));
    assert!(is_named || !is_needed, "{what}: {findings:#?}");
    assert!(
        findings.len() >= 11,
        "each check is made: {what}: {findings:#?}"
    );
}

/// Commands of a service, of operators, and of the doctor itself.
const COMMANDS: [&str; 28] = [
    "CLIENT",
    "CONFIG",
    "EVAL",
    "EVALSHA",
    "GET",
    "HELLO",
    "HGETALL",
    "HSCAN",
    "LRANGE",
    "PEXPIRE",
    "PTTL",
    "PUBLISH",
    "PUBSUB",
    "SCAN",
    "SET",
    "SUBSCRIBE",
    "TIME",
    "ZADD",
    "ZCARD",
    "ZCOUNT",
    "ZLEXCOUNT",
    "ZMSCORE",
    "ZRANGE",
    "ZRANK",
    "ZREM",
    "ZREMRANGEBYRANK",
    "ZREMRANGEBYSCORE",
    "ZSCORE",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_the_server_does_not_know_is_named_where_it_is_needed() {
    for command in COMMANDS {
        let server = RedisServer::start_with(&["--rename-command", command, ""]);
        is_seen(&server.url(), command, "renamed").await;
        // All acquired slots are released, or expire.
        if command == "PEXPIRE" {
            assert_eq!(server.keys("turnstile:*"), "");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_the_user_may_not_run_is_named_where_it_is_needed() {
    let server = RedisServer::start();
    for command in COMMANDS.into_iter().chain(["INFO"]) {
        // All users may run `HELLO`.
        if command == "HELLO" {
            continue;
        }
        server.cli(&["FLUSHALL"]);
        let right = format!("-{}", command.to_lowercase());
        let user = [
            "ACL", "SETUSER", "ada", "reset", "on", ">pw", "~*", "&*", "+@all",
        ];
        server.cli(&[&user[..], &[&right]].concat());
        let url = server.url().replace("://", "://ada:pw@");
        is_seen(&url, command, "denied").await;
    }
}

/// A replica of a server accepts no writes.
#[tokio::test]
async fn a_server_that_takes_no_writes_is_a_fault_of_the_service() {
    let server = RedisServer::start();
    server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let findings = diagnose(&server.url()).await;
    let service = of(&findings, Check::Service);
    assert_eq!(service.health, Health::Fault, "{findings:#?}");
    assert!(service.text.contains("NOREPLICAS"), "{}", service.text);
    assert_eq!(of(&findings, Check::ServiceRights).health, Health::Good);
}

/// Hosted servers lack `CONFIG`, and most of them evict keys.
#[tokio::test]
async fn eviction_is_seen_without_config() {
    let arguments = ["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"];
    let renamed = ["--rename-command", "CONFIG", ""];
    let server = RedisServer::start_with(&[&arguments[..], &renamed].concat());
    let findings = diagnose(&server.url()).await;
    let eviction = of(&findings, Check::Eviction);
    assert_eq!(eviction.health, Health::Fault, "{findings:#?}");
    assert!(eviction.text.contains("volatile-lru"), "{}", eviction.text);
    assert_eq!(of(&findings, Check::Buffers).health, Health::Note);
}

#[tokio::test]
async fn keys_without_an_end_are_not_this_crates() {
    let server = RedisServer::start();
    server.cli(&["SET", "turnstile:left", "x"]);
    let findings = diagnose(&server.url()).await;
    let keys = of(&findings, Check::Keys);
    assert_eq!(keys.health, Health::Warning);
    assert!(keys.text.contains("1 of 1"), "{}", keys.text);
}

#[tokio::test]
async fn replicas_that_differ_or_do_not_answer() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let other = builder("slow").lease(Duration::from_secs(20));
    let other: Limiter = other.connect(&server.url()).await.unwrap();
    crate::scene::await_replicas(&operator, 2).await;
    let _one = _limiters[0].semaphore(CHAT, "acme");
    let _more = other.semaphore(Limit::concurrent("chat", 11), "acme");
    let findings = diagnose(&server.url()).await;
    let differs = of(&findings, Check::Replicas);
    assert_eq!(differs.health, Health::Warning);
    assert!(differs.text.contains("lease differs"), "{}", differs.text);
    let limits = of(&findings, Check::Limits);
    assert_eq!(limits.health, Health::Warning, "{}", limits.text);
    assert!(limits.text.contains("chat"), "{}", limits.text);
    // This replica has crashed, but stays on the roster for a while. The other one was there before the store's clock went
    // back, and cannot be known to be there.
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now_ms = now_ms.as_millis().to_string();
    for (added_ms, replica) in [
        (&*now_ms, "0123456789abcdefgone"),
        ("99999999999999", "0123456789abcdeffar"),
    ] {
        let roster = "turnstile:{turnstile:control}:roster";
        server.cli(&["ZADD", roster, added_ms, replica]);
    }
    let findings = diagnose(&server.url()).await;
    let missing = of(&findings, Check::Replicas);
    assert!(
        missing
            .text
            .contains("2 of 3 answered; no answer from gone"),
        "{}",
        missing.text
    );
}
