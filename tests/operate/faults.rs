//! Messages that no operator would send, floods, replays, and users without permissions.

use std::time::Duration;

use redis::aio::PubSub;
use serde_json::{Value, json};
use tokio::time::timeout;
use tower_turnstile::{
    Limit,
    operate::{KeyDigest, Operator},
};

use crate::{
    scene::{CHAT, SOON, await_replicas, builder, replica, replicas},
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
    use futures_util::StreamExt;
    let mut messages = ear.on_message();
    let message = timeout(QUIET, messages.next()).await.ok()??;
    Some(serde_json::from_slice(message.get_payload_bytes()).unwrap())
}

/// An answer that has to come.
async fn answer(ear: &mut PubSub) -> Value {
    let answer = async {
        loop {
            if let Some(answer) = next(ear).await {
                return answer;
            }
        }
    };
    timeout(SOON, answer).await.expect("an answer")
}

/// A time one to two seconds ahead, by the store's clock.
fn soon_ms(server: &RedisServer) -> u64 {
    let time = server.cli(&["TIME"]);
    let seconds: u64 = time.lines().next().unwrap().parse().unwrap();
    seconds * 1_000 + 2_000
}

fn question(number: u64, not_after_ms: u64) -> Value {
    json!({
        "v": 1, "from": OPERATOR, "number": number, "not_after_ms": not_after_ms,
        "replicas": 1, "ask": "replicas",
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
    let good = question(1, soon_ms(&server));
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
        with("v", json!(2)),
        with("from", json!("")),
        with("from", json!("../../../turnstile")),
        with("from", json!("AAAAAAAAAAAAAAA*")),
        with("from", json!("AAAAAAAAAAAAAAAAA")),
        with("number", json!(-1)),
        with("ask", json!("drop-everything")),
        with("ask", json!({"permits": {"limit": 1}})),
        with("ask", json!({"permits": {"limit": "chat", "key": "0"}})),
        with("extra", json!(1)),
        with("not_after_ms", json!(0)),
        with("not_after_ms", json!(u64::MAX)),
        with("not_after_ms", json!(soon_ms(&server) + 120_000)),
        // Longer than 4 KiB, though otherwise valid.
        format!("{}{}", good, " ".repeat(4_096)),
    ];
    for message in &bad {
        server.cli(&["PUBLISH", CONTROL, message]);
    }
    assert_eq!(next(&mut ear).await, None);
    publish(&server, &question(1, soon_ms(&server)));
    assert_eq!(answer(&mut ear).await["number"], 1);
    await_replicas(&operator, 1).await;
}

/// A recorded message cannot be replayed: neither at once, nor after it has expired.
#[tokio::test]
async fn a_message_counts_once_and_for_a_while() {
    let server = RedisServer::start();
    let (_limiters, _operator) = replicas(&server, 1).await;
    let mut ear = ear(&server).await;
    let recorded = question(1, soon_ms(&server));
    publish(&server, &recorded);
    answer(&mut ear).await;
    for _ in 0..10 {
        publish(&server, &recorded);
    }
    assert_eq!(next(&mut ear).await, None);
    // So many other messages that the first one is forgotten.
    for number in 2..=70 {
        publish(&server, &question(number, soon_ms(&server)));
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    // A busy replica answers too.
    while answer(&mut ear).await["number"] != 70 {}
    publish(&server, &recorded);
    assert_eq!(next(&mut ear).await, None);
}

/// A flood delays no request and loses no wake-up, and operators get answers once it is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_messages_touches_no_request() {
    let server = RedisServer::start();
    let mut limiters = Vec::new();
    for label in ["web-0", "web-1"] {
        let rarely = builder(label).poll_interval(SOON).waiter_ttl(3 * SOON);
        limiters.push(rarely.connect(&server.url()).await.unwrap());
    }
    let operator = Operator::connect(&server.url()).await.unwrap();
    await_replicas(&operator, 2).await;
    let one = Limit::concurrent("one", 1).wait_up_to(Duration::from_secs(60));
    let semaphores = [0, 1].map(|number: usize| limiters[number].semaphore(&one, "acme"));
    let client = redis::Client::open(server.url()).unwrap();
    let mut flood = client.get_multiplexed_async_connection().await.unwrap();
    let until = soon_ms(&server) + 30_000;
    let flooding = tokio::spawn(async move {
        for round in 0..100 {
            let mut pipe = redis::pipe();
            for number in 0..100 {
                let message = question(round * 100 + number, until).to_string();
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
        let granted = timeout(SOON / 2, next).await;
        held = granted.expect("a wake-up").unwrap();
        handoffs += 1;
    }
    assert!(handoffs > 0);
    drop(held);
    await_replicas(&operator, 2).await;
}

/// More questions per second than are answered: the others get the answer that the replica is busy.
#[tokio::test]
async fn a_replica_that_is_asked_too_often_is_busy() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let mut busy = false;
    for _ in 0..100 {
        let replicas = operator.replicas().await.unwrap();
        if replicas.busy == ["web-0"] {
            assert!((replicas.rows.is_empty(), replicas.is_complete()) == (true, false));
            busy = true;
            break;
        }
    }
    assert!(busy);
    await_replicas(&operator, 1).await;
}

/// Without permissions a service works as before, and logs once that operators cannot ask it.
#[tokio::test]
async fn without_rights_a_replica_works_and_says_so_once() {
    for (number, missing) in [
        vec!["resetchannels", "&turnstile:wake:*", "&turnstile:answer:*"],
        vec!["resetchannels", "&turnstile:wake:*", "&turnstile:control:*"],
    ]
    .into_iter()
    .enumerate()
    {
        let server = RedisServer::start();
        let operator = Operator::connect(&server.url()).await.unwrap();
        let user = [
            &["ACL", "SETUSER", "web", "on", ">secret", "~*", "+@all"],
            &missing[..],
        ];
        server.cli(&user.concat());
        let url = server.url().replace("redis://", "redis://web:secret@");
        let label = format!("without-rights-{number}");
        log();
        let limiter = builder(&label).connect(&url).await.unwrap();
        let chat = limiter.semaphore(CHAT, "acme");
        drop(chat.acquire().await.unwrap());
        for _ in 0..3 {
            let replicas = operator.replicas().await.unwrap();
            assert_eq!(replicas.answered, 0);
        }
        log()
            .until(&["WARN", "operators cannot ask this replica", &label])
            .await;
        let text = log().text();
        let warnings = text.lines().filter(|line| {
            line.contains("WARN") && line.contains(&label) && line.contains("operators")
        });
        assert_eq!(warnings.count(), 1);
        drop(chat.acquire().await.unwrap());
    }
}

/// A limiter is a replica for the store, but operators cannot ask it unless it is operable.
#[tokio::test]
async fn by_default_operators_are_not_listened_to() {
    let server = RedisServer::start();
    let limiter = tower_turnstile::Limiter::connect(&server.url())
        .await
        .unwrap();
    drop(limiter.semaphore(CHAT, "acme").acquire().await.unwrap());
    let operable = replica(&server, "web").await;
    let operator = Operator::connect(&server.url()).await.unwrap();
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
    use futures_util::StreamExt;
    const REPLICAS: usize = 500;

    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let mut publisher = client.get_multiplexed_async_connection().await.unwrap();
    let mut roster = redis::pipe();
    for number in 0..REPLICAS {
        let mut add = redis::cmd("ZADD");
        add.arg("turnstile:{turnstile:control}:roster");
        let member = format!("{number:016}web-{number}");
        roster.add_command(add.arg(soon_ms(&server)).arg(member).to_owned());
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
                    r#"{{"v":1,"number":{asked},"replica":"{number:016}","label":"web-{number}","left_out":1,"body":{body}}}"#
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
    let operator = Operator::connect(&server.url()).await.unwrap();
    // On a busy machine some answers are too late.
    let all = async {
        loop {
            let permits = operator.permits("chat", None).await.unwrap();
            if permits.answered == REPLICAS {
                return permits;
            }
        }
    };
    let permits = timeout(SOON, all).await.expect("in time");
    assert_eq!(permits.replicas, REPLICAS);
    assert_eq!(permits.rows.len(), 75 * REPLICAS);
    assert_eq!(permits.left_out, REPLICAS as u64);
    answering.abort();
}
