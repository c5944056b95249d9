//! What is wrong with a store or the replicas.

use std::time::Duration;

use tower_turnstile::{
    Limit, Limiter,
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

/// Whatever is not good.
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
    // It leaves nothing behind.
    assert_eq!(server.cli(&["DBSIZE"]), "0");

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

/// 100 ms for a round trip, most of it on the way there.
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
    // The way is no difference of the clocks.
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

/// Users who lack a right each, by the lists of the guide.
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
        ("-zmscore", Check::ServiceRights, Health::Note),
        ("-eval", Check::ServiceRights, Health::Note),
        ("-evalsha", Check::ServiceRights, Health::Note),
        ("-zcount", Check::AskingRights, Health::Note),
        ("-hgetall", Check::ChangingRights, Health::Note),
        ("-config", Check::Eviction, Health::Note),
        ("-scan", Check::Keys, Health::Note),
    ] {
        let findings = diagnose(&user(&[right])).await;
        let finding = of(&findings, check);
        assert_eq!(finding.health, health, "{right}: {findings:?}");
        assert!(
            finding.text.contains(&right[1..]),
            "{right}: {}",
            finding.text
        );
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
    // Keys of another namespace only.
    let findings = diagnose(&user(&["resetkeys", "~other:*"])).await;
    assert_eq!(of(&findings, Check::ServiceRights).health, Health::Fault);
    assert!(of(&findings, Check::ServiceRights).text.contains("zadd"));
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
    // It has crashed: it is on the roster for a while.
    server.cli(&[
        "ZADD",
        "turnstile:{turnstile:control}:roster",
        "99999999999999",
        "0123456789abcdefgone",
    ]);
    let findings = diagnose(&server.url()).await;
    let missing = of(&findings, Check::Replicas);
    assert!(
        missing.text.contains("no answer from gone"),
        "{}",
        missing.text
    );
}
