//! Faults of a store or its replicas, as found by the doctor.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::{join, join_all};
use tower_turnstile::{AcquireError, ConfigError, Fallback, Limit, Limiter};
use tower_turnstile_operate::{Check, Finding, Health, Operator};

use crate::support::redis_cluster::RedisCluster;
use crate::{
    scene::{CHAT, GUARD, builder, replicas, steady, strangers},
    support::{
        clock::Clock,
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

const PATIENCE: Duration = Duration::from_secs(9);

/// Diagnoses until the findings are like this: the store is at fault for as long as the machine stalls.
async fn diagnose(
    url: &str,
    patience: Duration,
    is_so: impl Fn(&[Finding]) -> bool,
) -> Vec<Finding> {
    let began = Instant::now();
    loop {
        let doctor = Operator::builder().store_timeout(patience);
        let findings = Box::pin(doctor.diagnose(url)).await.unwrap();
        if is_so(&findings) {
            return findings;
        }
        assert!(began.elapsed() < GUARD, "{findings:#?}");
    }
}

/// Whether a check has this result, and a text with all these words.
fn says(findings: &[Finding], check: Check, health: Health, words: &[&str]) -> bool {
    let is_it = |one: &Finding| {
        (one.check, one.health) == (check, health)
            && words.iter().all(|word| one.text.contains(word))
    };
    findings.iter().any(is_it)
}

/// Diagnoses until a check has this result.
async fn finds(url: &str, check: Check, health: Health, words: &[&str]) -> Vec<Finding> {
    diagnose(url, PATIENCE, |findings| {
        says(findings, check, health, words)
    })
    .await
}

fn of(findings: &[Finding], check: Check) -> &Finding {
    let mut findings = findings.iter();
    findings
        .find(|one| one.check == check)
        .expect("it is looked at")
}

/// All findings that are not good. On a slow machine each store is far away.
fn bad(findings: &[Finding]) -> Vec<(Check, Health)> {
    let is_bad = |one: &&Finding| one.health != Health::Good && one.check != Check::Latency;
    let bad = findings.iter().filter(is_bad);
    bad.map(|one| (one.check, one.health)).collect()
}

#[tokio::test]
async fn a_server_and_replicas_that_are_well() {
    let server = RedisServer::start();
    let nobody = (Check::Replicas, Health::Note);
    let old = (Check::Version, Health::Note);
    let is_known =
        |findings: &[Finding]| [&[nobody][..], &[old, nobody]].contains(&&*bad(findings));
    let mut expected = bad(&diagnose(&server.url(), PATIENCE, is_known).await);
    // The doctor leaves nothing behind.
    assert_eq!(server.key_count(), 0);

    let (limiters, _operator) = replicas(&server, 2).await;
    let held = limiters[0]
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    expected.pop();
    let is_well = |findings: &[Finding]| {
        bad(findings) == expected && of(findings, Check::Replicas).text == "2 of 2 answered"
    };
    diagnose(&server.url(), PATIENCE, is_well).await;
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
    let (check, words) = (Check::Eviction, ["allkeys-lru"]);
    let findings = finds(&server.url(), check, Health::Fault, &words).await;
    assert_eq!(of(&findings, Check::Buffers).health, Health::Warning);
}

/// A round trip of 12 ms, most of it on the way there.
#[tokio::test]
async fn a_server_that_is_far_away() {
    let server = RedisServer::start();
    let _replicas = replicas(&server, 1).await;
    let proxy = FaultProxy::start(server.port());
    proxy.delay(Way::Requests, Duration::from_millis(8));
    proxy.delay(Way::Replies, Duration::from_millis(4));
    // Latency is not mistaken for a clock difference.
    let is_so = |findings: &[Finding]| {
        let is_far = says(findings, Check::Latency, Health::Warning, &["Limit::reuse"]);
        is_far && of(findings, Check::Clock).health == Health::Good
    };
    diagnose(&proxy.url(), PATIENCE, is_so).await;
}

#[tokio::test]
async fn a_server_whose_clock_is_off() {
    let is_found = async |seconds, text| {
        let clock = Clock::new();
        let server = clock.server();
        clock.step(&server, seconds).await;
        finds(&server.url(), Check::Clock, Health::Warning, &[text]).await;
    };
    join(is_found(3_600, "ahead of"), is_found(-3_600, "behind")).await;
}

/// A user without these rights.
fn user_without(server: &RedisServer, name: &str, rights: &str) -> String {
    let all = format!("ACL SETUSER {name} reset on >pw ~* &* +@all {rights}");
    server.cli(&all.split(' ').collect::<Vec<_>>());
    server.url().replace("://", &format!("://{name}:pw@"))
}

/// Users who lack one permission each, derived from the guide's lists.
#[tokio::test]
async fn the_right_that_is_lacking_is_named() {
    let server = RedisServer::start();
    let _replicas = replicas(&server, 1).await;
    let cases = [
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
    ];
    let named = cases.iter().enumerate().map(async |(number, case)| {
        let &(rights, check, health) = case;
        let url = user_without(&server, &format!("user-{number}"), rights);
        let words: Vec<_> = rights.split(' ').map(|right| &right[1..]).collect();
        // Without this right no wake-up comes, however long the doctor waits.
        let patience = if rights == "-publish" {
            SHORT
        } else {
            PATIENCE
        };
        let is_named = |findings: &[Finding]| says(findings, check, health, &words);
        diagnose(&url, patience, is_named).await;
    });
    join_all(named).await;
    // A service that may neither subscribe nor ask.
    let url = user_without(&server, "mute", "resetchannels");
    let (service, words) = (Check::ServiceRights, ["publish, subscribe"]);
    let findings = diagnose(&url, SHORT, |findings| {
        says(findings, service, Health::Fault, &words)
    });
    let asking = of(&findings.await, Check::AskingRights).health;
    assert_eq!(asking, Health::Note);
    // Only keys of another namespace.
    let url = user_without(&server, "other", "resetkeys ~other:*");
    finds(&url, service, Health::Fault, &["zadd"]).await;
}

/// Why a service fails.
#[derive(Debug)]
#[allow(dead_code, reason = "to be printed")]
enum Fails {
    AtConnect(ConfigError),
    ByRequest(AcquireError),
}

/// The life of a service with two replicas, which admits nobody without its store.
async fn serve(url: &str, namespace: &str) -> Result<(), Fails> {
    let one = Limit::concurrent("one", 1).fallback(Fallback::Reject);
    // Without `ZREM` it waits in vain.
    let one = one.wait_up_to(Duration::from_secs(2));
    let rate = Limit::rate("rate", 10, Duration::from_secs(1)).fallback(Fallback::Reject);
    let connect = async || {
        let builder = steady().poll_interval(Duration::from_millis(50));
        let builder = builder.namespace(namespace).require_store();
        let limiter = builder.connect(url).await;
        limiter.map_err(Fails::AtConnect)
    };
    let (first, second) = (connect().await?, connect().await?);
    let held = first.semaphore(&one, "key").unwrap().acquire().await;
    let held = held.map_err(Fails::ByRequest)?;
    let semaphore = second.semaphore(&one, "key").unwrap();
    let mut waiter = semaphore.acquire();
    while waiter.position().is_none_or(|position| position == 0) {
        let once = tokio::time::timeout(Duration::from_millis(1), &mut waiter).await;
        if let Ok(Err(error)) = once {
            return Err(Fails::ByRequest(error));
        }
    }
    drop(held);
    drop(waiter.await.map_err(Fails::ByRequest)?);
    let charged = first.semaphore(&rate, "key").unwrap().acquire().await;
    drop(charged.map_err(Fails::ByRequest)?);
    Ok(())
}

/// The doctor's patience where it waits in vain: for a wake-up that never comes.
const SHORT: Duration = Duration::from_secs(2);
/// Commands without which no wake-up comes.
const WAKES: [&str; 2] = ["PUBLISH", "SUBSCRIBE"];

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
    let began = Instant::now();
    while let Err(fault) = try_see(url, command).await {
        assert!(began.elapsed() < GUARD, "{command} {how}: {fault}");
    }
}

async fn try_see(url: &str, command: &str) -> Result<(), String> {
    let name = command.to_lowercase();
    let served = serve(url, &format!("served-{name}")).await;
    let patience = if WAKES.contains(&command) {
        SHORT
    } else {
        PATIENCE
    };
    let builder = Operator::builder().namespace(&name).store_timeout(patience);
    let findings = match builder.diagnose(url).await {
        Ok(findings) => findings,
        Err(error) if served.is_err() && error.to_string().contains(&name) => return Ok(()),
        Err(error) => return Err(format!("{served:?}: {error}")),
    };
    let is_fault = findings.iter().any(|one| one.health == Health::Fault);
    let is_right = is_fault == served.is_err() || is_fault && RARE.contains(&command);
    // A command that is unneeded, or detected in another way, is not a finding.
    let is_needed = !["CLIENT", "HGETALL", "INFO"].contains(&command);
    let mut bad = findings.iter().filter(|one| one.health != Health::Good);
    let is_named = bad.any(|one| one.text.contains(&name));
    let is_each_made = findings.len() >= 11;
    if is_right && (is_named || !is_needed) && is_each_made {
        Ok(())
    } else {
        Err(format!("{served:?}: {findings:#?}"))
    }
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
    let seen = COMMANDS.map(async |command| {
        let server = RedisServer::start_with(&["--rename-command", command, ""]);
        Box::pin(is_seen(&server.url(), command, "renamed")).await;
        // All acquired slots are released, or expire.
        if command == "PEXPIRE" {
            assert_eq!(server.keys("pexpire:*"), "");
        }
    });
    join_all(seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_the_user_may_not_run_is_named_where_it_is_needed() {
    let server = RedisServer::start();
    // All users may run `HELLO`.
    let commands = COMMANDS.into_iter().filter(|command| *command != "HELLO");
    let seen = commands.chain(["INFO"]).map(async |command| {
        let name = command.to_lowercase();
        let url = user_without(&server, &name, &format!("-{name}"));
        Box::pin(is_seen(&url, command, "denied")).await;
    });
    join_all(seen).await;
}

/// A replica of a server accepts no writes.
#[tokio::test]
async fn a_server_that_takes_no_writes_is_a_fault_of_the_service() {
    let server = RedisServer::start();
    server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let (check, words) = (Check::Service, ["NOREPLICAS"]);
    let findings = finds(&server.url(), check, Health::Fault, &words).await;
    assert_eq!(of(&findings, Check::ServiceRights).health, Health::Good);
}

/// Hosted servers lack `CONFIG`, and most of them evict keys.
#[tokio::test]
async fn eviction_is_seen_without_config() {
    let arguments = ["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"];
    let renamed = ["--rename-command", "CONFIG", ""];
    let server = RedisServer::start_with(&[&arguments[..], &renamed].concat());
    let _replicas = replicas(&server, 1).await;
    let (check, words) = (Check::Eviction, ["volatile-lru"]);
    let findings = finds(&server.url(), check, Health::Fault, &words).await;
    assert_eq!(of(&findings, Check::Buffers).health, Health::Note);
}

/// The script keeps a generation of the data under a key of its own.
#[tokio::test]
async fn a_user_without_the_key_of_the_generation_is_found() {
    let server = RedisServer::start();
    let digest = "?".repeat(32);
    let keys = format!("resetkeys ~turnstile:{{{digest}* ~turnstile:{{turnstile:control}}:*");
    let url = user_without(&server, "old", &keys);
    let (check, words) = (Check::ServiceRights, ["it lacks the generation's key"]);
    let findings = finds(&url, check, Health::Fault, &words).await;
    assert_eq!(of(&findings, Check::Service).health, Health::Fault);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_a_cluster_that_cannot_be_reached_is_a_fault_of_the_service() {
    let mut cluster = RedisCluster::start(3, 0);
    let url = cluster.url();
    let said = "a slot was acquired";
    finds(&url, Check::Service, Health::Good, &[said]).await;
    // Not of the first part, which is in hash slot 512.
    let gone = (cluster.owner(512) + 1) % 3;
    let address = format!("127.0.0.1:{}", cluster.primaries[gone].port());
    cluster.primaries[gone].stop();
    let words = [" of 16 parts of the cluster a service cannot ", &address];
    finds(&url, Check::Service, Health::Fault, &words).await;
}

/// Everybody who may write a ledger may write the roster too.
#[tokio::test]
async fn many_strangers_on_the_roster_are_counted() {
    let server = RedisServer::start();
    let _replicas = replicas(&server, 1).await;
    strangers(&server, 1_100);
    let words = ["1 of 1101 answered; no answer from ", " and 1080 more"];
    finds(&server.url(), Check::Replicas, Health::Warning, &words).await;
}

#[tokio::test]
async fn keys_without_an_end_are_not_this_crates() {
    let server = RedisServer::start();
    let _replicas = replicas(&server, 1).await;
    server.cli(&["SET", "turnstile:left", "x"]);
    finds(&server.url(), Check::Keys, Health::Warning, &["1 of "]).await;
}

#[tokio::test]
async fn a_key_that_cannot_be_read_is_named() {
    let server = RedisServer::start();
    let shares = "turnstile:{0}:shares";
    server.cli(&["ZADD", shares, "-inf", "x"]);
    finds(&server.url(), Check::Keys, Health::Fault, &[shares]).await;
}

#[tokio::test]
async fn replicas_that_differ_or_do_not_answer() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let other = builder("slow").lease(2 * GUARD);
    let other: Limiter = other.connect(&server.url()).await.unwrap();
    crate::scene::await_replicas(&operator, 2).await;
    let _one = limiters[0].semaphore(CHAT, "acme").unwrap();
    let _more = other
        .semaphore(Limit::concurrent("chat", 11), "acme")
        .unwrap();
    let (check, warning) = (Check::Replicas, Health::Warning);
    finds(&server.url(), check, warning, &["lease differs"]).await;
    finds(&server.url(), Check::Limits, warning, &["chat"]).await;
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
    let words = ["2 of 3 answered; no answer from gone"];
    finds(&server.url(), check, warning, &words).await;
}
