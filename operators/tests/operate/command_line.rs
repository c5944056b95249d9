//! The command `turnstile`.

use std::{
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::sleep,
};
use tower_turnstile::{Fallback, Key, Limit};
use tower_turnstile_operate::{KeyDigest, TenantDigest};

use crate::{
    scene::{
        BETWEEN_CALLS, CHAT, GUARD, Patient, again_while, await_replicas, builder, replicas, soon,
        until, until_max,
    },
    support::{
        queue::wait_in_line,
        redis_server::{RedisServer, free_port},
    },
    tenants::GPU,
};

/// The author of a change, and the reason.
const BY: [&str; 4] = ["--author", "ada", "--reason", "launch"];

pub(crate) async fn turnstile(url: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnstile"));
    command.env("TURNSTILE_STORE", url).args(arguments);
    command.output().await.expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// Runs a command until it ends so: its exit code and its errors. A replica may be busy, and on a machine that stalls, replicas
/// and the store may answer too late. Returns its output and its errors.
async fn until_ends(
    url: &str,
    arguments: &[&str],
    is_so: impl Fn(i32, &str) -> bool,
) -> (String, String) {
    let began = Instant::now();
    loop {
        let output = turnstile(url, arguments).await;
        let code = output.status.code().expect("a code");
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        if is_so(code, &errors) {
            return (said, errors);
        }
        assert!(began.elapsed() < GUARD, "{arguments:?}: {code}: {errors}");
        sleep(BETWEEN_CALLS).await;
    }
}

async fn ends(url: &str, arguments: &[&str], expected: i32) -> (String, String) {
    until_ends(url, arguments, |code, _| code == expected).await
}

/// Changes something, and returns the errors. Replicas may confirm the change too late.
async fn change(server: &RedisServer, arguments: &[&str]) -> String {
    let is_made = |code, errors: &str| code == 0 || code == 4 && errors.contains("recorded, ");
    let arguments = [arguments, &BY].concat();
    until_ends(&server.url(), &arguments, is_made).await.1
}

/// Tries to change something. Returns the errors.
async fn order(server: &RedisServer, arguments: &[&str], expected: i32) -> String {
    let arguments = [arguments, &BY].concat();
    ends(&server.url(), &arguments, expected).await.1
}

/// The output of a successful command.
pub(crate) async fn says(server: &RedisServer, arguments: &[&str]) -> String {
    ends(&server.url(), arguments, 0).await.0
}

async fn rows(server: &RedisServer, arguments: &[&str]) -> Vec<Value> {
    let arguments = [&["--json"], arguments].concat();
    serde_json::from_str(&says(server, &arguments).await).expect("an array")
}

#[tokio::test(flavor = "multi_thread")]
async fn each_command_says_what_the_clients_know() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let acme = limiters[0].semaphore(CHAT, "acme").unwrap();
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(acme.acquire().await.unwrap());
    }
    let waiter = wait_in_line(&limiters[1].semaphore(CHAT, "acme").unwrap()).await;
    acme.try_acquire().await.unwrap_err();

    let digest = KeyDigest::of("chat", "acme").to_string();
    assert_eq!(
        says(&server, &["digest", "chat", "--key", "acme"])
            .await
            .trim(),
        digest
    );
    let limits = rows(&server, &["limits"]).await;
    assert_eq!(
        (&limits[0]["held"], &limits[0]["waiting"]),
        (&10.into(), &1.into())
    );
    let permits = rows(&server, &["permits", "chat", "--key", "acme"]).await;
    assert_eq!(
        (permits.len(), &permits[10]["state"]),
        (11, &"waiting".into())
    );
    assert_eq!(permits[0]["id"], held[0].id().unwrap().to_string());
    assert_eq!(permits[0]["replica_label"], "web-0");
    assert!(permits.iter().all(|row| row["key"] == *digest));
    assert!(
        rows(&server, &["permits", "chat", "--key", "other"])
            .await
            .is_empty()
    );
    let keys = rows(&server, &["keys", "chat"]).await;
    assert_eq!(
        (&keys[0]["held"], &keys[0]["replicas"]),
        (&10.into(), &2.into())
    );
    let refusals = rows(&server, &["refusals", "chat", "--digest", &digest]).await;
    assert_eq!(
        (refusals.len(), &refusals[0]["reason"]),
        (1, &"full".into())
    );
    assert_eq!(rows(&server, &["replicas"]).await.len(), 2);
    let why = rows(&server, &["explain", "chat", "--key", "acme"]).await;
    assert_eq!(
        (&why[0]["verdict"], &why[0]["place"]),
        (&"queued".into(), &2.into())
    );

    let status = says(&server, &["status"]).await;
    assert!(
        status.contains("web-1") && status.contains("chat"),
        "{status}"
    );
    let why = says(&server, &["explain", "chat", "--key", "acme"]).await;
    assert!(
        why.starts_with(
            "limit chat (enforce): 10 of 10 slots in use, 1 waiting; a request would queue at place 2"
        ),
        "{why}"
    );
    let permits = says(&server, &["permits", "chat"]).await;
    assert_eq!(permits.lines().count(), 12, "{permits}");
    drop((held, waiter));
}

/// One of 64 ids does, and any key may.
#[tokio::test(flavor = "multi_thread")]
async fn ids_and_keys_may_begin_with_a_hyphen() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    let _held = limiters[0]
        .semaphore(CHAT, "-acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let permits = says(&server, &["permits", "chat", "--key", "-acme"]).await;
    assert_eq!(permits.lines().count(), 2, "{permits}");
    let (permit, replica) = ("-7fz9CtE08Ngqc0_---------0", "-7fz9CtE08Ngqc0_");
    for whose in [&[permit][..], &["--replica", replica]] {
        // It is not found.
        order(&server, &[&["revoke"], whose].concat(), 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_is_told_in_its_unit() {
    let tokens = Limit::rate("tokens", 100, Duration::from_secs(86_400)).burst(50);
    let tokens = tokens.unit("tokens");
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    let permit = limiters[0]
        .semaphore(&tokens, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    permit.budget(&tokens).unwrap().charge(9).await.unwrap();
    let explain = ["explain", "tokens", "--key", "acme"];
    assert_eq!(
        says(&server, &explain).await,
        "limit tokens (enforce): 100 tokens per 1d00h, left 40 of 50; a request would be admitted\n"
    );
    let why = rows(&server, &explain).await;
    let facts = ["unit", "remaining", "burst"].map(|name| why[0][name].clone());
    assert_eq!(facts, [json!("tokens"), json!(40), json!(50)]);
    let unused = says(&server, &["explain", "tokens", "--key", "other"]).await;
    assert!(
        unused.contains("no replica has charged this key lately"),
        "{unused}"
    );
    permit.budget(&tokens).unwrap().charge(40).await.unwrap();
    let used_up = says(&server, &explain).await;
    let expected = "left 0 of 50, more in 14m";
    assert!(used_up.contains(expected), "{used_up}");
    assert!(
        used_up.contains("a request would be refused: the rate is used up for 14m"),
        "{used_up}"
    );
    let keys = says(&server, &["keys", "tokens"]).await;
    assert!(
        keys.contains("LEFT") && keys.contains("0 of 50, more in 14m"),
        "{keys}"
    );
    let keys = rows(&server, &["keys", "tokens"]).await;
    assert_eq!(
        (&keys[0]["remaining"], &keys[0]["burst"]),
        (&json!(0), &json!(50))
    );
    let limits = says(&server, &["limits"]).await;
    assert!(limits.contains("100 tokens per 1d00h"), "{limits}");
}

/// No text chosen by a caller moves a cursor, or reverses the direction of text.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_texts_are_escaped() {
    let server = RedisServer::start();
    let limiter = builder("a\u{202e}b")
        .show_keys()
        .connect(&server.url())
        .await
        .unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let key = "\u{1b}[2Jacme\r\n\u{2066}\u{9b}x";
    let held = limiter
        .semaphore(CHAT, key)
        .unwrap()
        .acquire()
        .await
        .unwrap();
    for arguments in [
        &["permits", "chat"][..],
        &["keys", "chat"],
        &["explain", "chat", "--key", key],
        &["--json", "permits", "chat"],
        &["status"],
    ] {
        let shown = says(&server, arguments).await;
        let is_plain = |c: char| c == '\n' || (' '..='~').contains(&c);
        assert!(shown.chars().all(is_plain), "{shown:?}");
    }
    let permits = rows(&server, &["permits", "chat"]).await;
    assert_eq!(permits[0]["key_text"], key, "JSON loses nothing");
    drop(held);
}

#[tokio::test]
async fn exit_codes_say_what_happened() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    let held = limiters[0]
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let ends = async |url: &str, arguments: &[&str], code| {
        let (_, errors) = ends(url, arguments, code).await;
        assert!(!errors.contains("canary"), "{errors}");
        errors
    };
    let url = server.url();
    ends(&url, &["permits", "chat"], 0).await;
    let errors = ends(&url, &["permits", "other\u{1b}[2J"], 1).await;
    assert!(
        errors.contains("no replica has a limit") && !errors.contains('\u{1b}'),
        "{errors}"
    );
    let login = url.replace("://", "://nobody:canary@");
    ends(&login, &["limits"], 1).await;
    for wrong in [
        &["permits"][..],
        &["permits", "chat", "--digest", "0"],
        &["explain", "chat"],
        &["explain", "chat", "--key", "acme", "--digest", "0"],
        &["unknown"],
        &["--namespace", "a b", "limits"],
    ] {
        ends(&url, wrong, 2).await;
    }
    ends("http://canary@host", &["limits"], 2).await;
    let nobody = format!("redis://user:canary@127.0.0.1:{}", free_port());
    let errors = ends(&nobody, &["limits"], 3).await;
    let address = nobody.rsplit('@').next().expect("an address");
    assert!(errors.contains(address), "{errors}");
    // A replica that crashed a moment ago.
    let roster = "turnstile:{turnstile:control}:roster";
    let now_ms = server.cli(&["EVAL", "return redis.call('TIME')[1] * 1000", "0"]);
    server.cli(&["ZADD", roster, &now_ms, "AAAAAAAAAAAAAAAAweb-9"]);
    let is_partial = |code, errors: &str| {
        let words = ["1 of 2 replicas answered", "no answer: web-9"];
        code == 4 && words.iter().all(|words| errors.contains(words))
    };
    until_ends(&url, &["limits"], is_partial).await;
    // It may have a limit that the other does not have.
    for questions in [
        &["permits", "other"][..],
        &["explain", "other", "--key", ""],
    ] {
        ends(&url, questions, 4).await;
    }
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_changed() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let acme = limiters[0].semaphore(CHAT, "acme").unwrap();
    let set = ["set", "chat", "12", "--for", "1h"];
    let says_so = order(&server, &set, 0).await;
    assert!(says_so.ends_with("done on 2 of 2\n"), "{says_so}");
    assert_eq!(acme.usage().await.unwrap().max, 12);
    let before = change(&server, &["set", "chat", "13", "--for", "1h"]).await;
    assert!(
        before.contains("before: limit `chat` is value 12, by ada"),
        "{before}"
    );
    change(
        &server,
        &["set", "chat", "3", "--key", "acme", "--for", "1h"],
    )
    .await;
    until_max(&acme, 3).await;
    let overrides = rows(&server, &["overrides"]).await;
    assert_eq!((overrides.len(), &overrides[1]["to"]), (2, &13.into()));
    let key = ["unset", "chat", "--key", "acme"];
    change(&server, &key).await;
    until_max(&acme, 13).await;
    let limits = says(&server, &["limits"]).await;
    assert!(limits.contains("13 (declared 10)"), "{limits}");
    let log = rows(&server, &["log"]).await;
    assert!(log.len() >= 4, "{log:?}");
    assert_eq!(log[0]["before"], "value 3");
    change(&server, &["mode", "chat", "off", "--for", "1h"]).await;
    change(&server, &["unset", "chat"]).await;
    order(&server, &["unset", "chat"], 1).await;
    until_max(&acme, 10).await;
    change(&server, &["pause", "chat", "--for", "10m", "--wait"]).await;
    let why = says(&server, &["explain", "chat", "--key", "acme"]).await;
    assert_eq!(why.lines().count(), 1, "{why}");
    acme.acquire().await.unwrap_err();
    // The pause is recorded: not 1, which says that nothing was changed.
    let typo = ["pause", "caht", "--for", "10m", "--wait"];
    let says_so = order(&server, &typo, 4).await;
    assert!(
        says_so.contains("no replica has a limit `caht`"),
        "{says_so}"
    );
    let burst = ["set", "tokens", "100", "--burst", "20", "--for", "1h"];
    let is_unused = |code, errors: &str| code == 4 && errors.contains("none has such a limit yet");
    until_ends(&server.url(), &[&burst[..], &BY].concat(), is_unused).await;
    let overrides = says(&server, &["overrides"]).await;
    assert!(overrides.contains("value 100, burst 20"), "{overrides}");
    for wrong in [
        &["set", "chat", "0", "--for", "1h"][..],
        &["set", "chat", "8", "--burst", "0", "--for", "1h"],
        &["set", "chat", "8", "--for", "8d"],
        &["set", "chat", "8", "--for", "1"],
        &["set", "chat", "8"],
        &["mode", "chat", "on", "--for", "1h"],
    ] {
        order(&server, wrong, 2).await;
    }
}

/// The command reports its progress, and ends with the last holder.
#[tokio::test]
async fn a_pause_waits_for_holders() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let held = limiters[0]
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnstile"));
    command.env("TURNSTILE_STORE", server.url());
    command.args(["pause", "chat", "--for", "10m", "--wait"]);
    command.args(["--author", "ada", "--reason", "migration"]);
    command.stderr(Stdio::piped()).kill_on_drop(true);
    let mut pausing = command.spawn().expect("it runs");
    let mut lines = BufReader::new(pausing.stderr.take().expect("a pipe")).lines();
    let mut until_said = async |text: &str| {
        soon(async { while lines.next_line().await.unwrap().expect("more") != text {} }).await;
    };
    until_said("waiting: 1 slots held; 2 of 2 replicas answered").await;
    held.release().await.unwrap();
    until_said("nobody holds a slot").await;
    soon(pausing.wait()).await.unwrap();
}

#[tokio::test]
async fn permits_are_revoked() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let mut held = Vec::new();
    for key in ["acme", "acme", "other"] {
        held.push(
            limiters[0]
                .semaphore(CHAT, key)
                .unwrap()
                .acquire()
                .await
                .unwrap(),
        );
    }
    let id = held[2].id().unwrap().to_string();
    let revoke = ["--json", "revoke", &id];
    let revoke = [&revoke[..], &BY].concat();
    // Jobs continue until they stop.
    let runs_on = |code, errors: &str| code == 4 && errors.contains("1 still run");
    let (rows, _) = until_ends(&server.url(), &revoke, runs_on).await;
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    assert_eq!(
        (&rows[0]["id"], &rows[0]["state"]),
        (&id.clone().into(), &"held".into())
    );
    assert!(held.pop().unwrap().is_lost());
    // Nobody holds it any more.
    ends(&server.url(), &revoke, 1).await;
    order(&server, &["revoke", "--limit", "chat", "--key", "acme"], 4).await;
    until(async || held.iter().all(|permit| permit.is_lost())).await;
    for wrong in [
        &["--limit", "chat"][..],
        &["--key", "acme"],
        &["no-id"],
        &[&id, "--key", "acme"],
        &[&id, "--replica", "0123456789abcdef"],
    ] {
        order(&server, &[&["revoke"], wrong].concat(), 2).await;
    }
}

/// Newcomers under a strict limit wait until permits are back, here for forty seconds.
#[tokio::test]
async fn a_store_that_has_lost_its_data_is_shown() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let acme = limiters[0]
        .semaphore(CHAT.fallback(Fallback::Reject), "acme")
        .unwrap();
    let held = acme.acquire().await.unwrap();
    let commands = [&["replicas"][..], &["limits"], &["keys", "chat"]];
    let is_shown = async |expected: bool| {
        for command in commands {
            let (table, rows) = (says(&server, command).await, rows(&server, command).await);
            assert_eq!(table.contains("recovering"), expected, "{table}");
            assert_eq!(rows[0]["recovering"], expected, "{rows:?}");
        }
    };
    is_shown(false).await;
    server.cli(&["FLUSHALL"]);
    // A newcomer finds the loss, and then the replica is back on the roster.
    until(async || acme.try_acquire().await.is_err()).await;
    await_replicas(&operator, 1).await;
    is_shown(true).await;
    drop(held);
}

#[tokio::test]
async fn a_pause_for_an_upstream_is_shown_and_ended() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let acme = limiters[0].semaphore(CHAT, "acme").unwrap();
    acme.pause(CHAT, Duration::from_secs(600)).unwrap();
    let waiter = wait_in_line(&acme).await;
    let keys = says(&server, &["keys", "chat"]).await;
    assert!(
        keys.contains("PAUSED FOR") && keys.contains("by the upstream of web-0"),
        "{keys}"
    );
    assert!(says(&server, &["limits"]).await.contains("1 key paused"));
    let why = says(&server, &["explain", "chat", "--key", "acme"]).await;
    let shown = "0 of 10 slots in use, 1 waiting, paused for 9m";
    assert!(
        why.contains(shown) && why.contains("queue at place 2"),
        "{why}"
    );
    let why = rows(&server, &["explain", "chat", "--key", "acme"]).await;
    assert!(why[0]["pause_ends_in_ms"].as_u64() > Some(500_000));
    assert_eq!(why[0]["paused_by"], "web-0");

    drop(waiter);
    let resume = ["--json", "resume", "chat", "--key", "acme"];
    let resume = [&resume[..], &BY].concat();
    let resumed = async || {
        acme.pause(CHAT, Duration::from_secs(600)).unwrap();
        let waiter = wait_in_line(&acme).await;
        let output = turnstile(&server.url(), &resume).await;
        drop(soon(waiter).await.unwrap());
        output
    };
    // A replica that answers too late has no row.
    let is_late = |output: &Output| output.status.code() == Some(4);
    let output = again_while(is_late, resumed).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let shown: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&shown[0]["waiting"], &shown[0]["paused_by"]),
        (&1.into(), &"web-0".into())
    );
    for (limit, error) in [
        (
            "chat",
            "turnstile: no replica knows a pause of limit `chat`\n",
        ),
        ("other", "turnstile: no replica has a limit `other`\n"),
    ] {
        assert_eq!(order(&server, &["resume", limit], 1).await, error);
    }
    let log = says(&server, &["log"]).await;
    let key = KeyDigest::of("chat", "acme");
    assert!(
        log.contains(&format!("resumed key {key} of limit `chat`")),
        "{log}"
    );
}

#[tokio::test]
async fn the_doctor_says_what_is_wrong() {
    let server = RedisServer::start();
    let _replicas = replicas(&server, 1).await;
    let found = says(&server, &["doctor"]).await;
    assert!(
        found.lines().any(|line| line.starts_with("eviction")),
        "{found}"
    );
    server.cli(&["CONFIG", "SET", "maxmemory", "100mb"]);
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let (found, _) = ends(&server.url(), &["--json", "doctor"], 1).await;
    let found: Vec<Value> = serde_json::from_str(&found).unwrap();
    let eviction = found.iter().find(|one| one["check"] == "eviction").unwrap();
    assert_eq!(eviction["health"], "fault");
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    ends(&nobody, &["doctor"], 3).await;
}

/// Why the output is lost: nobody reads it, or it cannot be written.
#[derive(Clone, Copy, Debug)]
enum Sink {
    Unread,
    Full,
}

impl Sink {
    fn open(self) -> Stdio {
        match self {
            Self::Unread => {
                let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
                drop(ours);
                std::os::fd::OwnedFd::from(theirs).into()
            }
            Self::Full => {
                let full = std::fs::File::options().write(true).open("/dev/full");
                full.expect("a device of Linux").into()
            }
        }
    }
}

/// The exit code reports the outcome, even if nobody reads the output; only output that could not be written counts as
/// a failure.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn output_that_nobody_reads_changes_no_exit_code() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    drop(limiters[0].semaphore(CHAT, "acme").unwrap());
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let ends = async |url: &str, arguments: &[&str], [out, err]: [Option<Sink>; 2], expected| {
        let run = async || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_turnstile"));
            command.env("TURNSTILE_STORE", url).args(arguments);
            let open = |sink: Option<Sink>| sink.map_or_else(Stdio::null, Sink::open);
            command.stdin(Stdio::null());
            command.stdout(open(out)).stderr(open(err));
            command.status().await.expect("it runs").code()
        };
        // A replica may be busy, or late.
        let mut code = None;
        for _ in 0..20 {
            code = run().await;
            if code == Some(expected) {
                return;
            }
            sleep(BETWEEN_CALLS).await;
        }
        panic!("{arguments:?} with output {out:?}, errors {err:?}: {code:?}");
    };
    let set = [&["set", "chat", "12", "--for", "1h"], &BY[..]].concat();
    let pause = [&["pause", "chat", "--for", "1h", "--wait"], &BY[..]].concat();
    for (url, arguments, expected) in [
        (&server.url(), &["limits"][..], 0),
        (&server.url(), &["--json", "status"], 0),
        (&server.url(), &["explain", "none", "--key", "acme"], 1),
        (&server.url(), &["doctor"], 0),
        (&server.url(), &["overrides"], 0),
        (&server.url(), &set, 0),
        (&server.url(), &pause, 0),
        (&server.url(), &["unknown"], 2),
        (&server.url(), &["--help"], 0),
        (&nobody, &["limits"], 3),
    ] {
        for err in [Sink::Unread, Sink::Full] {
            ends(url, arguments, [None, Some(err)], expected).await;
        }
        for err in [None, Some(Sink::Full)] {
            ends(url, arguments, [Some(Sink::Unread), err], expected).await;
        }
    }
    let full = Some(Sink::Full);
    ends(&server.url(), &["limits"], [full, full], 5).await;
    // The command has failed anyway.
    ends(&nobody, &["limits"], [full, None], 3).await;
}

/// A shell's prompt starts on a new line.
#[tokio::test]
async fn each_table_ends_with_its_line() {
    let server = RedisServer::start();
    let (_limiters, _operator) = replicas(&server, 1).await;
    for command in ["limits", "replicas", "overrides", "log", "status", "doctor"] {
        for arguments in [&[command][..], &["--json", command]] {
            let shown = says(&server, arguments).await;
            assert!(
                shown.ends_with('\n') && !shown.ends_with("\n\n"),
                "{shown:?}"
            );
        }
    }
}

/// A wrong namespace is not reported as a service without limits.
#[tokio::test]
async fn a_namespace_without_a_replica_is_named_with_those_that_there_are() {
    let server = RedisServer::start();
    let of_shop = async |command: &str, code| {
        ends(&server.url(), &[command, "--namespace", "shop"], code).await
    };
    // Nobody has answered.
    let (_, none) = of_shop("status", 4).await;
    assert!(none.contains("0 of 0 replicas answered"), "{none}");
    assert!(
        none.contains("no namespace is in use in this database"),
        "{none}"
    );
    let (_limiters, _operator) = replicas(&server, 1).await;
    let (_, other) = of_shop("limits", 4).await;
    assert!(
        other.contains("no operable replica is in namespace `shop`"),
        "{other}"
    );
    assert!(
        other.contains("in use in this database: turnstile"),
        "{other}"
    );
    says(&server, &["status"]).await;
    let (found, _) = of_shop("doctor", 0).await;
    assert!(
        found.contains("namespaces in use in this database: turnstile"),
        "{found}"
    );
}

#[tokio::test]
async fn what_was_revoked_is_in_the_log_and_is_not_taken_back() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    let acme = limiters[0].semaphore(CHAT, "acme").unwrap();
    let held = [acme.acquire().await.unwrap(), acme.acquire().await.unwrap()];
    change(&server, &["set", "chat", "12", "--for", "1h"]).await;
    let id = held[0].id().unwrap().to_string();
    for (whose, running) in [
        (&[&*id][..], "1 still run"),
        (&["--limit", "chat", "--key", "acme"], "2 still run"),
    ] {
        let revoke = [&["revoke"], whose, &BY].concat();
        let run_on = |code, errors: &str| code == 4 && errors.contains(running);
        until_ends(&server.url(), &revoke, run_on).await;
    }
    let log = rows(&server, &["log"]).await;
    let key = KeyDigest::of("chat", "acme");
    let texts: Vec<_> = log.iter().map(|row| row["subject"].as_str()).collect();
    let expected = [
        Some(format!("2 permits of key {key} of limit `chat`")),
        Some(format!("permit {id}")),
        None,
    ];
    assert_eq!(texts, expected.each_ref().map(Option::as_deref));
    assert_eq!(log[0]["what"], "revoked");
    assert_eq!(
        (&log[0]["author"], &log[0]["reason"]),
        (&"ada".into(), &"launch".into())
    );
    let shown = says(&server, &["log"]).await;
    assert!(shown.contains(&format!("revoked permit {id}")), "{shown}");
    change(&server, &["unset", "chat"]).await;
    until_max(&acme, 10).await;
}

/// The record has its digest.
#[tokio::test]
async fn changes_name_a_tenant_that_a_replica_shows() {
    let server = RedisServer::start();
    let limiter = builder("web-0").show_keys().connect(&server.url()).await;
    let limiter = limiter.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let gpu = limiter.semaphore(GPU, Key::SHARED).unwrap();
    let acme = gpu.clone().tenant("acme").unwrap().acquire().await.unwrap();
    for tenant in ["acme", "globex"] {
        let set = [
            "set", "gpu", "--tenant", tenant, "--share", "5", "--for", "2h",
        ];
        let arguments = [&set[..], &BY].concat();
        // Nobody may be that tenant.
        until_ends(&server.url(), &arguments, |code, _| [0, 4].contains(&code)).await;
    }
    let globex = TenantDigest::of("globex").to_string();
    for command in ["log", "overrides"] {
        let said = says(&server, &[command]).await;
        assert!(said.contains("acme") && said.contains(&globex), "{said}");
    }
    let log = says(&server, &["log"]).await;
    assert!(
        log.contains("tenant acme of limit `gpu`: as declared -> share 5"),
        "{log}"
    );
    // Its last refusal has its name too.
    let refused = gpu.clone().tenant("globex").unwrap();
    refused.try_acquire().await.unwrap_err();
    until(async || says(&server, &["log"]).await.contains("tenant globex of")).await;
    // Nobody shows its name any more.
    drop(acme);
    let digest = TenantDigest::of("acme").to_string();
    until(async || says(&server, &["log"]).await.contains(&digest)).await;
}

#[tokio::test]
async fn an_explanation_may_be_of_one_tenant() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 1).await;
    let gpu = limiters[0].semaphore(GPU, Key::SHARED).unwrap();
    let of = |tenant| gpu.clone().tenant(tenant).unwrap();
    let _held = of("acme").acquire().await.unwrap();
    let _waiters = [
        wait_in_line(&of("acme")).await,
        wait_in_line(&of("globex")).await,
    ];
    let _chat = limiters[0].semaphore(CHAT, Key::SHARED).unwrap();
    let _chat = _chat.acquire().await.unwrap();
    let [acme, globex] = ["acme", "globex"].map(|name| TenantDigest::of(name).to_string());
    let all = says(&server, &["explain", "gpu"]).await;
    assert!(all.contains(&acme) && all.contains(&globex), "{all}");
    for tenant in [["--tenant", "acme"], ["--tenant-digest", &acme]] {
        let arguments = [&["explain", "gpu"][..], &tenant].concat();
        let why = says(&server, &arguments).await;
        assert!(
            why.starts_with("limit gpu (enforce): 1 of 1 slots in use, 2 waiting"),
            "{why}"
        );
        assert!(why.contains(&acme) && !why.contains(&globex), "{why}");
        let why = rows(&server, &arguments).await;
        assert_eq!(
            (&why[0]["waiting"], &why[0]["tenants"]),
            (&2.into(), &1.into())
        );
    }
    let nobody = ["explain", "gpu", "--tenant", "acne"];
    let is_said = |code, errors: &str| code == 4 && errors.contains("is its name right?");
    until_ends(&server.url(), &nobody, is_said).await;
    let not_fair = ["explain", "chat", "--key", "", "--tenant", "acme"];
    let is_said = |code, errors: &str| code == 1 && errors.contains("limit `chat` is not fair");
    until_ends(&server.url(), &not_fair, is_said).await;
}

#[tokio::test]
async fn shares_of_tenants_are_shown_and_changed() {
    let server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let acme = limiters[0]
        .semaphore(GPU, Key::SHARED)
        .unwrap()
        .tenant("acme")
        .unwrap();
    let globex = limiters[1]
        .semaphore(GPU, Key::SHARED)
        .unwrap()
        .tenant("globex")
        .unwrap();
    let _chat = limiters[0]
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let _held = acme.acquire().await.unwrap();
    let _waiters = [
        wait_in_line(&acme).await,
        wait_in_line(&acme).await,
        wait_in_line(&globex).await,
    ];
    let digest = TenantDigest::of("acme").to_string();
    let shown = says(&server, &["digest", "gpu", "--tenant", "acme"]).await;
    assert_eq!(shown.trim(), digest);
    let tenants = says(&server, &["tenants", "gpu"]).await;
    assert!(
        tenants.contains("DEBT") && tenants.contains(&digest),
        "{tenants}"
    );
    assert!(says(&server, &["limits"]).await.contains("fair"));
    let tenants = rows(&server, &["tenants", "gpu", "--key", ""]).await;
    let facts = |row: &Value| {
        ["tenant", "share", "held", "waiting", "debt_ms"].map(|name| row[name].clone())
    };
    let expected = [json!(digest), json!(1), json!(1), json!(2), json!(0)];
    assert_eq!((tenants.len(), facts(&tenants[0])), (2, expected));

    let set = |limit, share| {
        [
            "set", limit, "--tenant", "acme", "--share", share, "--for", "2h",
        ]
    };
    change(&server, &set("gpu", "5")).await;
    let share = async || rows(&server, &["tenants", "gpu"]).await[0]["share"].clone();
    until(async || share().await == 5).await;
    let digested = ["--tenant-digest", &digest, "--share", "6", "--for", "2h"];
    let before = change(&server, &[&["set", "gpu"][..], &digested].concat()).await;
    let expected = format!("before: tenant {digest} of limit `gpu` is share 5, by ada");
    assert!(before.contains(&expected), "{before}");
    let overrides = says(&server, &["overrides"]).await;
    assert!(
        overrides.contains(&digest) && overrides.contains("share 6"),
        "{overrides}"
    );
    let why = says(&server, &["explain", "gpu", "--key", ""]).await;
    let ahead = format!("waits behind 1 request of {digest}");
    assert!(
        why.contains("its tenants:") && why.contains(&ahead),
        "{why}"
    );
    let why = rows(&server, &["explain", "gpu", "--key", ""]).await;
    assert_eq!(why[0]["tenants"], 2);
    // Overrides of the limit are others.
    order(&server, &["unset", "gpu"], 1).await;
    let before = change(&server, &["unset", "gpu", "--tenant", "acme"]).await;
    let expected = "before: tenant acme of limit `gpu` is share 6, by ada";
    assert!(before.contains(expected), "{before}");
    let log = rows(&server, &["log"]).await;
    assert_eq!(
        (&log[0]["tenant"], &log[0]["before"], &log[0]["after"]),
        (&json!(digest), &json!("share 6"), &Value::Null)
    );

    // It is in force, for a tenant that may come, or for a typo.
    let typo = [
        "set", "gpu", "--tenant", "acne", "--share", "5", "--for", "2h",
    ];
    let is_nobodys = |code, errors: &str| {
        code == 4 && errors.contains("none has a request of this tenant now: is its name right?")
    };
    until_ends(&server.url(), &[&typo[..], &BY].concat(), is_nobodys).await;

    for (limit, error) in [("chat", "is not fair"), ("other", "no replica has a limit")] {
        let arguments = [&set(limit, "5")[..], &BY].concat();
        let is_refused = |code, errors: &str| code == 1 && errors.contains(error);
        until_ends(&server.url(), &arguments, is_refused).await;
    }
    ends(&server.url(), &["tenants", "chat"], 1).await;
    for wrong in [
        &set("gpu", "0")[..],
        &set("gpu", "1001"),
        &["set", "gpu", "--share", "5", "--for", "2h"],
        &["set", "gpu", "--tenant", "acme", "--for", "2h"],
        &["set", "gpu", "5", "--tenant", "acme", "--for", "2h"],
        &[&set("gpu", "5")[..], &["--key", "a"]].concat(),
        &[&set("gpu", "5")[..], &["--burst", "5"]].concat(),
        &[&set("gpu", "5")[..], &["--tenant-digest", &digest]].concat(),
        &["set", "gpu", "--tenant", "", "--share", "5", "--for", "2h"],
        &["set", "gpu", "--for", "2h"],
        &["unset", "gpu", "--tenant", "acme", "--key", "a"],
        &["digest", "gpu"],
        &["digest", "gpu", "--key", "a", "--tenant", "acme"],
    ] {
        order(&server, wrong, 2).await;
    }
}
