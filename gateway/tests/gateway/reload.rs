//! The file is reloaded repeatedly while requests arrive.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use futures_util::future::{join, join_all};
use tokio::time::sleep;

use crate::{
    stage::{Stage, changed},
    support::alone,
};

/// Valid files, and between them each broken one.
const RELOADS: usize = 24;

/// Each with a different fault.
fn broken(policy: &str) -> Vec<String> {
    vec![
        format!("{policy}\n[[["),
        changed(policy, "[limits.chat-all]", "[limits.others]"),
        changed(policy, "concurrent = 200", "concurrent = 0"),
        changed(policy, "concurrent = 200", "concurrrent = 200"),
        changed(policy, "concurrent = 200", "rate = 200\nper = \"1s\""),
        changed(policy, "\"gateway\"", "\"other\""),
        changed(policy, "gold = 20", "silver = 20"),
        String::new(),
        policy[..policy.find("[limits.chat-opens]").expect("it")].to_owned(),
        policy[..policy.find("[[routes]]").expect("it")].to_owned(),
        policy[..policy.find("on_lost").expect("it")].to_owned(),
    ]
}

#[test]
fn reloads_under_load_fail_no_request_and_lose_no_slot() {
    alone(async {
        let stage = Stage::new().await;
        let mut held = stage.open_many("alice", 5).await;
        held.extend(stage.open_many("gold-1", 10).await);
        let (over, served) = (Cell::new(false), Cell::new(0));

        let reloads = async {
            for number in 0..RELOADS {
                let before = served.get();
                reload(&stage, number).await;
                while served.get() == before {
                    sleep(Duration::from_millis(1)).await;
                }
            }
            over.set(true);
        };
        let load = join_all((0..6).map(|client| {
            let (stage, over, served) = (&stage, &over, &served);
            async move {
                for number in 0.. {
                    if over.get() {
                        break;
                    }
                    use_one(stage, &format!("client {client} {number}"), client % 2).await;
                    served.set(served.get() + 1);
                }
            }
        }));
        join(reloads, load).await;

        for replica in &stage.replicas {
            let log = replica.log();
            let count = |words| log.matches(words).count();
            assert_eq!(
                (count("reloaded"), count("not reloaded")),
                (RELOADS, RELOADS / 2)
            );
        }

        stage.until_held(15).await;
        // The last valid file says six.
        held.extend(stage.open_many("alice", 1).await);
        stage.assert_refused("alice", 429, "chat-key").await;
        stage.upstream.tell();
        stage.upstream.end();
        for stream in held {
            let rest = stream.rest().await.expect("all of it");
            assert_eq!(rest, "data: 1\n\ndata: 2\n\n");
        }
        stage.until_held(0).await;
    });
}

/// Valid and broken files alternately. Waits until both replicas have read the file.
async fn reload(stage: &Stage, number: usize) {
    let turn = number / 2;
    if number.is_multiple_of(2) {
        let streams = format!("concurrent = {}", 5 + turn % 2);
        stage.write(&changed(&stage.policy, "concurrent = 5", &streams));
    } else {
        let broken = broken(&stage.policy);
        stage.write(&broken[turn % broken.len()]);
    }
    for replica in &stage.replicas {
        replica.hang_up();
    }
    for replica in &stage.replicas {
        replica.until_logged("reloaded", number + 1).await;
        replica
            .until_logged("not reloaded", number.div_ceil(2))
            .await;
    }
}

/// A short request, then a stream whose client disconnects. No limit refuses a new key.
async fn use_one(stage: &Stage, key: &str, replica: usize) {
    stage.pass(replica, key).await.expect("it is let in");
    let mut stream = stage.open(replica, key).await.expect("it is let in");
    assert_eq!(stream.response.status(), 200);
    assert_eq!(stream.event().await, "data: 1\n\n");
}

/// A file that changes all the time is read for two seconds.
#[test]
fn a_reload_does_not_keep_connections_waiting() {
    alone(async {
        let stage = Stage::new().await;
        let over = Cell::new(false);
        let write = async {
            while !over.get() {
                stage.write(&stage.policy);
                sleep(Duration::from_millis(10)).await;
            }
        };
        let ask = async {
            let reloads = || stage.replicas[0].log().matches("reloaded").count();
            for _ in 0..20 {
                let before = reloads();
                stage.replicas[0].hang_up();
                let (began, mut served) = (Instant::now(), 0);
                while began.elapsed() < Duration::from_millis(500) || served < 10 {
                    let request = stage.replicas[0].get("/v1/models");
                    assert_eq!(request.status().await, 200);
                    served += 1;
                }
                // Otherwise this process stood still, and so did the file.
                if reloads() == before {
                    over.set(true);
                    return;
                }
            }
            panic!("no reload took long");
        };
        join(ask, write).await;
        stage.replicas[0].until_logged("reloaded", 1).await;
    });
}

#[test]
fn a_change_holds_at_once_for_newcomers_and_takes_nothing_from_others() {
    alone(async {
        let stage = Stage::new().await;
        let mut open = stage.open_many("alice", 5).await;
        stage.write(&changed(&stage.policy, "concurrent = 5", "concurrent = 3"));
        for replica in &stage.replicas {
            replica.hang_up();
            replica.until_logged("reloaded", 1).await;
        }
        drop(open.drain(3..));
        stage.until_held(3).await;
        stage.assert_refused("alice", 429, "chat-key").await;
        for stream in &mut open {
            stage.upstream.tell();
            assert_eq!(stream.event().await, "data: 1\n\n");
        }
    });
}
