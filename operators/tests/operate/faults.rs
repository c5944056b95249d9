//! Messages that no operator would send, floods, replays, and users without permissions.

use std::time::Duration;

use futures_util::{StreamExt, future::join_all};
use redis::aio::PubSub;
use serde_json::{Value, json};
use tokio::time::timeout;
use tower_turnstile::Limit;
use tower_turnstile_operate::{Answers, KeyDigest, Operator, PermitRow, ReplicaRow};

use crate::{
    scene::{
        CHAT, GUARD, HOUR, Patient, again_while, await_replicas, builder, connection, replica,
        replicas, soon, steady, strangers, until,
    },
    support::{log::log, queue::wait_in_line, redis_server::RedisServer},
};

const CONTROL: &str = "turnstile:control:0";
const OPERATOR: &str = "AAAAAAAAAAAAAAAA";
const QUIET: Duration = Duration::from_millis(300);

/// Receives all answers.
async fn ear(server: &RedisServer) -> PubSub {
    let client = redis::Client::open(server.url()).unwrap();
    let mut ear = client.get_async_pubsub().await.unwrap();
    ear.psubscribe("turnstile:answer*").await.unwrap();
    ear
}

async fn next(ear: &mut PubSub) -> Option<Value> {
    let mut messages = ear.on_message();
    let message = timeout(QUIET, messages.next()).await.ok()??;
    Some(serde_json::from_slice(message.get_payload_bytes()).unwrap())
}

/// The store's time, in milliseconds.
fn now_ms(server: &RedisServer) -> u64 {
    let time = server.cli(&["TIME"]);
    let mut numbers = time.lines().map(|line| line.parse::<u64>().unwrap());
    let [seconds, micros] = [(); 2].map(|()| numbers.next().unwrap());
    seconds * 1_000 + micros / 1_000
}

/// A valid time that no stall of the machine exceeds.
fn later_ms(server: &RedisServer) -> u64 {
    now_ms(server) + 50_000
}

fn question(number: u64, not_after_ms: u64) -> Value {
    json!({
        "v": 2, "from": OPERATOR, "number": number, "not_after_ms": not_after_ms,
        "replicas": 1, "expected": 1, "ask": "replicas",
    })
}

fn publish(server: &RedisServer, message: &Value) {
    server.cli(&["PUBLISH", CONTROL, &message.to_string()]);
}

#[tokio::test]
async fn messages_that_no_operator_sends_are_ignored() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let mut ear = ear(&server).await;
    let good = question(1, later_ms(&server));
    let with = |name: &str, value: Value| {
        let mut message = good.clone();
        message[name] = value;
        message.to_string()
    };
    let deep = format!("{}{}", "[".repeat(2_000), "]".repeat(2_000));
    let bad = [
        String::new(),
        "null".to_owned(),
        "{".to_owned(),
        deep,
        "\u{0}\u{1b}[2J".to_owned(),
        with("from", json!("")),
        with("from", json!("../../../turnstile")),
        with("from", json!("AAAAAAAAAAAAAAA*")),
        with("from", json!("AAAAAAAAAAAAAAAAA")),
        with("number", json!(-1)),
        with("ask", json!("drop-everything")),
        with("ask", json!({"permits": {"limit": 1}})),
        with("ask", json!({"permits": {"limit": "chat", "key": "0"}})),
        with("not_after_ms", json!(0)),
        with("not_after_ms", json!(u64::MAX)),
        with("not_after_ms", json!(later_ms(&server) + 120_000)),
        // Longer than 4 KiB, though otherwise valid.
        format!("{}{}", good, " ".repeat(4_096)),
    ];
    for message in &bad {
        server.cli(&["PUBLISH", CONTROL, message]);
    }
    assert_eq!(next(&mut ear).await, None);
    publish(&server, &good);
    let answer = soon(ear.on_message().next()).await.unwrap();
    let answer: Value = serde_json::from_slice(answer.get_payload_bytes()).unwrap();
    assert_eq!(answer["number"], 1);
    await_replicas(&operator, 1).await;
}

/// A replica answers in its own format, whatever else there may be in another one.
#[tokio::test]
async fn an_operator_of_another_version_gets_an_answer() {
    let server = RedisServer::start();
    let (_limiters, _operator) = replicas(&server, 1).await;
    let mut ear = ear(&server).await;
    let mut other = question(1, later_ms(&server));
    (other["v"], other["ask"]) = (json!(3), json!({ "news": [1] }));
    publish(&server, &other);
    let answer = soon(ear.on_message().next()).await.unwrap();
    let answer: Value = serde_json::from_slice(answer.get_payload_bytes()).unwrap();
    assert_eq!((&answer["v"], &answer["number"]), (&json!(2), &json!(1)));
}

/// Its answer is not read, but it is there, and no stranger.
#[tokio::test]
async fn a_replica_of_another_version_is_named() {
    let server = RedisServer::start();
    let _replicas = replicas(&server, 1).await;
    let operator = Operator::connect(&server.url()).await.unwrap();
    strangers(&server, 1);
    let client = redis::Client::open(server.url()).unwrap();
    let mut questions = client.get_async_pubsub().await.unwrap();
    questions.subscribe(CONTROL).await.unwrap();
    let answering = async {
        let mut questions = questions.on_message();
        while let Some(question) = questions.next().await {
            let question: Value = serde_json::from_slice(question.get_payload_bytes()).unwrap();
            let channel = format!("turnstile:answer:{}", question["from"].as_str().unwrap());
            let answer = json!({ "v": 3, "replica": "0000000000000001", "news": [1] });
            server.cli(&["PUBLISH", &channel, &answer.to_string()]);
        }
    };
    let is_late = |answers: &Answers<ReplicaRow>| {
        answers.answered != 1 || answers.missing != ["stranger-1 (of another version)"]
    };
    let ask = async || operator.replicas().await.expect("it is up");
    tokio::select! {
        _ = again_while(is_late, ask) => {}
        () = answering => unreachable!("the server goes on"),
    }
}

/// A recorded message cannot be replayed: neither at once, nor after it has expired.
#[tokio::test]
async fn a_message_counts_once_and_for_a_while() {
    let server = RedisServer::start();
    let (_limiters, _operator) = replicas(&server, 1).await;
    let mut ear = ear(&server).await;
    let mut number = 0;
    let answered = async {
        loop {
            number += 1;
            let until_ms = now_ms(&server) + 1_000;
            let recorded = question(number, until_ms);
            publish(&server, &recorded);
            // After a stall of the machine it has expired.
            while let Some(answer) = next(&mut ear).await {
                if answer["number"] == number {
                    return (recorded, until_ms);
                }
            }
        }
    };
    let (recorded, until_ms) = soon(answered).await;
    for _ in 0..10 {
        publish(&server, &recorded);
    }
    assert_eq!(next(&mut ear).await, None);
    until(async || now_ms(&server) > until_ms).await;
    let expired = async {
        loop {
            // So many other messages that the first one is forgotten. A busy replica answers too.
            let mut answers = 0;
            while answers < 65 {
                number += 1;
                publish(&server, &question(number, later_ms(&server)));
                // More than fifty messages a second are not read.
                let mut messages = ear.on_message();
                let answer = timeout(Duration::from_millis(20), messages.next()).await;
                answers += usize::from(answer.is_ok());
            }
            while next(&mut ear).await.is_some() {}
            publish(&server, &recorded);
            // To the replica it is earlier, by the time that the store's answer took.
            if next(&mut ear).await.is_none() {
                return;
            }
        }
    };
    soon(expired).await;
}

/// A flood delays no request and loses no wake-up, and operators get answers once it is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_messages_touches_no_request() {
    let server = RedisServer::start();
    let mut limiters = Vec::new();
    for label in ["web-0", "web-1"] {
        let rarely = builder(label)
            .poll_interval(2 * GUARD)
            .waiter_ttl(6 * GUARD);
        limiters.push(rarely.connect(&server.url()).await.unwrap());
    }
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 2).await;
    let one = Limit::concurrent("one", 1).wait_up_to(HOUR);
    let semaphores = [0, 1].map(|number: usize| limiters[number].semaphore(&one, "acme").unwrap());
    let mut flood = connection(&server.url()).await;
    let until_ms = later_ms(&server);
    let flooding = tokio::spawn(async move {
        for round in 0..100 {
            let mut pipe = redis::pipe();
            for number in 0..100 {
                let message = question(round * 100 + number, until_ms).to_string();
                pipe.cmd("PUBLISH").arg(CONTROL).arg(message).ignore();
            }
            pipe.query_async::<()>(&mut flood).await.unwrap();
        }
    });
    let mut held = semaphores[0].acquire().await.unwrap();
    let mut handoffs = 0;
    while !flooding.is_finished() {
        let next = wait_in_line(&semaphores[(handoffs + 1) % 2]).await;
        drop(held);
        // Not by polling.
        held = soon(next).await.unwrap();
        handoffs += 1;
    }
    flooding.await.unwrap();
    assert!(handoffs > 0);
    drop(held);
    await_replicas(&operator, 2).await;
}

/// More questions per second than are answered: the others get the answer that the replica is busy.
#[tokio::test]
async fn a_replica_that_is_asked_too_often_is_busy() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let mut number = 0;
    let is_busy = async {
        loop {
            for _ in 0..10 {
                number += 1;
                publish(&server, &question(number, later_ms(&server)));
            }
            let replicas = operator.0.replicas().await.unwrap();
            if replicas.busy == ["web-0"] {
                return replicas;
            }
        }
    };
    let replicas = soon(is_busy).await;
    assert_eq!((replicas.rows.len(), replicas.is_complete()), (0, false));
    await_replicas(&operator, 1).await;
}

/// Without permissions a service works as before, and logs once that operators cannot ask it.
#[tokio::test]
async fn without_rights_a_replica_works_and_says_so_once() {
    let works = ["answer", "control"].map(async |channels| {
        let server = RedisServer::start();
        let operator = Patient::connect(&server.url()).await.0;
        let user = format!(
            "ACL SETUSER web on >secret ~* +@all resetchannels &turnstile:wake:* &turnstile:{channels}:*"
        );
        server.cli(&user.split(' ').collect::<Vec<_>>());
        let url = server.url().replace("redis://", "redis://web:secret@");
        let label = format!("without-rights-{channels}");
        log();
        let limiter = builder(&label).connect(&url).await.unwrap();
        let chat = limiter.semaphore(CHAT, "acme").unwrap();
        drop(chat.acquire().await.unwrap());
        for _ in 0..2 {
            let replicas = operator.replicas().await.unwrap();
            assert_eq!(replicas.answered, 0);
        }
        let warning = ["WARN", "operators cannot ask this replica", &label];
        soon(log().until(&warning)).await;
        let lines = log().lines_with(&label);
        let mut warnings = lines.iter().filter(|line| line.contains("WARN"));
        assert!(warnings.next().is_some_and(|line| line.contains("operators")));
        assert_eq!(warnings.next(), None);
        drop(chat.acquire().await.unwrap());
    });
    join_all(works).await;
}

/// A limiter is a replica for the store, but operators cannot ask it unless it is operable.
#[tokio::test]
async fn by_default_operators_are_not_listened_to() {
    let server = RedisServer::start();
    let limiter = steady().connect(&server.url()).await.unwrap();
    drop(
        limiter
            .semaphore(CHAT, "acme")
            .unwrap()
            .acquire()
            .await
            .unwrap(),
    );
    let operable = replica(&server, "web").await;
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let clients = server.cli(&["CLIENT", "LIST"]);
    let named = clients
        .lines()
        .filter(|line| line.contains(" sub=") && !line.contains(" sub=0"))
        .count();
    assert_eq!(
        named, 4,
        "two limiters, one of them with a listener, and the operator"
    );
    drop(operable);
}

/// Each answer has the maximum size, and all arrive at the same moment.
#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_answers_at_once() {
    const REPLICAS: usize = 500;

    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let mut publisher = connection(&server.url()).await;
    let mut roster = redis::pipe();
    for number in 0..REPLICAS {
        let mut add = redis::cmd("ZADD");
        add.arg("turnstile:{turnstile:control}:roster");
        let member = format!("{number:016}web-{number}");
        roster.add_command(add.arg(later_ms(&server)).arg(member).to_owned());
    }
    let () = roster.query_async(&mut publisher).await.unwrap();
    let mut replicas = client.get_async_pubsub().await.unwrap();
    replicas.subscribe(CONTROL).await.unwrap();
    // Made before the question, as an operator waits for answers only so long.
    let digest = KeyDigest::of("chat", "acme");
    let rows: Vec<_> = (0..75)
        .map(|number| {
            json!({
                "key": digest, "id": format!("{number:026}"), "state": "held", "age_ms": 1,
                "label": "x".repeat(80),
            })
        })
        .collect();
    let body = json!({"permits": rows}).to_string();
    let answering = tokio::spawn(async move {
        let mut questions = replicas.on_message();
        while let Some(question) = questions.next().await {
            let question: Value = serde_json::from_slice(question.get_payload_bytes()).unwrap();
            let asked = &question["number"];
            let channel = format!("turnstile:answer:{}", question["from"].as_str().unwrap());
            let mut answers = redis::pipe();
            for number in 0..REPLICAS {
                let answer = format!(
                    r#"{{"v":2,"number":{asked},"replica":"{number:016}","label":"web-{number}","left_out":1,"body":{body}}}"#
                );
                assert!(
                    (14_000..=16_384).contains(&answer.len()),
                    "{}",
                    answer.len()
                );
                let mut publish = redis::cmd("PUBLISH");
                answers.add_command(publish.arg(&channel).arg(answer).to_owned());
            }
            let () = answers.query_async(&mut publisher).await.unwrap();
        }
    });
    let operator = Patient::connect(&server.url()).await.0;
    // On a busy machine some answers are too late.
    let are_late = |permits: &Answers<PermitRow>| permits.answered < REPLICAS;
    let ask = async || operator.permits("chat", None).await.unwrap();
    let permits = again_while(are_late, ask).await;
    assert_eq!(permits.replicas, REPLICAS);
    assert_eq!(permits.rows.len(), 75 * REPLICAS);
    assert_eq!(permits.left_out, REPLICAS as u64);
    answering.abort();
}
