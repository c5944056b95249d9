//! G8: a misconfigured store causes explicit errors, and never opens the gate, whatever the policy. The password never
//! appears in the log, even at the most verbose level.

use std::time::Duration;

use tokio::time::sleep;

use crate::{
    scene::soon,
    support::{
        alone,
        redis_server::RedisServer,
        replica::{Replica, SERVER, command},
    },
};

const CANARY: &str = "canary-in-a-coal-mine";

/// A server with a user of this password, who has all permissions.
fn server() -> (RedisServer, String) {
    let server = RedisServer::start();
    let password = format!(">{CANARY}");
    server.cli(&[
        "ACL", "SETUSER", "app", "on", &password, "~*", "&*", "+@all",
    ]);
    let url = format!("redis://app:{CANARY}@127.0.0.1:{}", server.port());
    (server, url)
}

/// A service that would admit everybody during an outage, with verbose logs.
fn talkative(url: &str) -> std::process::Command {
    let mut command = command(
        SERVER,
        &[
            "--listen",
            "127.0.0.1:0",
            "--store",
            url,
            "--limit",
            "1",
            "--fallback",
            "allow",
            "--store-timeout",
            "20s",
            "--lease",
            "5m",
        ],
    );
    command.env("RUST_LOG", "trace");
    command
}

fn assert_silent_on_the_password(what: &str, log: &str) {
    assert!(
        !log.contains(CANARY),
        "{what}: the password is in the log:\n{log}"
    );
}

/// `begin` makes the configuration wrong for a running service, and `end` repairs it.
async fn is_refused(what: &str, says: &str, begin: &[&[&str]], end: &[&[&str]]) {
    let (server, url) = server();
    let replica = Replica::launch(talkative(&url)).await;
    assert_eq!(replica.get("/work?ms=1").status().await, 200, "{what}");
    begin.iter().for_each(|command| drop(server.cli(command)));
    for _ in 0..3 {
        let status = replica.get("/work?ms=1").status().await;
        assert_eq!(status, 503, "G8: {what} never opens the gate");
        sleep(Duration::from_millis(100)).await;
    }
    soon(replica.until_logged(says, 1)).await;
    let log = replica.log();
    let loud = log
        .lines()
        .find(|line| line.contains("ERROR") && line.contains(says));
    println!("{what}: {}", loud.unwrap_or("nothing"));
    assert!(loud.is_some(), "{what} is loud:\n{log}");
    assert_silent_on_the_password(what, &log);

    end.iter().for_each(|command| drop(server.cli(command)));
    let served = async {
        while replica.get("/work?ms=1").status().await != 200 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(served).await;
    let log = replica.log();
    assert!(log.contains(" TRACE "), "the log is talkative");
    assert_silent_on_the_password(what, &log);
}

const REPLACED: &[&str] = &["ACL", "SETUSER", "app", "resetpass", ">another"];
const RESTORED: &[&str] = &[
    "ACL",
    "SETUSER",
    "app",
    "resetpass",
    ">canary-in-a-coal-mine",
];
const CUT: &[&str] = &["CLIENT", "KILL", "USER", "app"];

#[test]
fn a_password_that_was_changed_is_no_outage() {
    alone(is_refused(
        "WRONGPASS",
        "WRONGPASS",
        &[REPLACED, CUT],
        &[RESTORED],
    ));
}

#[test]
fn a_user_that_was_deleted_is_no_outage() {
    let user = &[
        "ACL",
        "SETUSER",
        "app",
        "on",
        ">canary-in-a-coal-mine",
        "~*",
        "&*",
        "+@all",
    ];
    alone(is_refused(
        "deleted",
        "WRONGPASS",
        &[&["ACL", "DELUSER", "app"]],
        &[user],
    ));
}

#[test]
fn a_permission_that_was_taken_away_is_no_outage() {
    let (less, more) = (
        &["ACL", "SETUSER", "app", "-evalsha", "-eval"],
        &["ACL", "SETUSER", "app", "+@all"],
    );
    alone(is_refused("NOPERM", "NOPERM", &[less], &[more]));
}

/// The server requires a password, but the service does not have it.
#[test]
fn a_missing_password_is_no_outage() {
    alone(async {
        let server = RedisServer::start();
        server.cli(&["CONFIG", "SET", "requirepass", CANARY]);
        let url = server.url();
        let wrong = url.replace("://", &format!("://:not-{CANARY}@"));
        for (url, says) in [(&url, "NOAUTH"), (&wrong, "WRONGPASS")] {
            let output = talkative(url).output().expect("it runs");
            let log = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{log}");
            let last = log.lines().last().unwrap_or_default();
            println!("{says}: {last}");
            assert!(last.starts_with("error: --store"), "{last}");
            assert_silent_on_the_password(says, &log);
        }
    });
}

/// One key has a foreign type: its callers are refused, all others are served.
#[test]
fn a_key_of_another_type_is_no_outage() {
    alone(async {
        let (server, url) = server();
        let replica = Replica::launch(talkative(&url)).await;
        let response = replica.get("/stream?chunks=1000&every=20").send().await;
        let (response, connection) = response.expect("served");
        let ledger = server.keys("demo:*");
        drop((response, connection));
        while server.key_count() != 0 {
            sleep(Duration::from_millis(5)).await;
        }
        server.cli(&["SET", &ledger, "text"]);
        for _ in 0..3 {
            assert_eq!(replica.get("/work?ms=1").status().await, 503, "G8");
            assert_eq!(replica.get("/work?ms=1").key("other").status().await, 200);
        }
        assert_eq!(server.cli(&["GET", &ledger]), "text");
        soon(replica.until_logged("WRONGTYPE", 1)).await;
        let log = replica.log();
        let loud = log
            .lines()
            .find(|line| line.contains("ERROR") && line.contains("WRONGTYPE"));
        println!("WRONGTYPE: {}", loud.unwrap_or("nothing"));
        assert!(loud.is_some(), "it is loud");
        server.cli(&["DEL", &ledger]);
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
        assert_silent_on_the_password("WRONGTYPE", &log);
    });
}
