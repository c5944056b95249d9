//! The formats in which replicas and operators of two versions meet: `formats.txt` has every question, the answer of a replica,
//! and the record.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use serde_json::Value;
use tower_turnstile::Limit;
use tower_turnstile_operate::{KeyDigest, Order, Outcome, Revocation, Target, TenantDigest};

use crate::{
    scene::{HOUR, Orders as _, Patient, ada, again_while, await_replicas, builder, seen, soon},
    support::{queue::wait_in_line, redis_server::RedisServer},
};

const GOLDEN: &str = include_str!("formats.txt");

/// A message in which all that differs from run to run is the same.
fn golden(mut message: Value) -> String {
    fn normalize(value: &mut Value) {
        match value {
            Value::Number(_) => *value = 0.into(),
            Value::Array(rows) => rows.iter_mut().for_each(normalize),
            Value::Object(fields) => {
                for (name, value) in fields {
                    let ids = [
                        "from",
                        "id",
                        "overrides",
                        "permit",
                        "replica",
                        "token",
                        "version",
                    ];
                    if value.is_string() && ids.contains(&&**name) {
                        *value = "".into();
                    } else if name != "v" {
                        normalize(value);
                    }
                }
            }
            _ => {}
        }
    }
    normalize(&mut message);
    message.to_string()
}

/// A field of the record without its numbers and its token.
fn golden_field(field: &str, text: &str) -> String {
    let mut words: Vec<_> = text.splitn(6, ' ').collect();
    for word in &mut words {
        if word.parse::<u64>().is_ok() {
            *word = "0";
        } else if word.len() == 32 {
            *word = "token";
        }
    }
    format!("{field} = {}", words.join(" "))
}

/// If this fails, replicas and operators of the last version would misread each other. Increase `wire::VERSION`, so that they say
/// so, and replace the golden text. The record and the message `read-again` stay as they are: replicas of all versions follow
/// overrides.
#[tokio::test]
async fn questions_answers_and_the_record_have_the_format_of_this_version() {
    let server = RedisServer::start();
    let limiter = builder("web-0").show_keys().connect(&server.url()).await;
    let limiter = limiter.unwrap();
    let jobs = Limit::concurrent("jobs", 1).wait_up_to(HOUR).fair();
    let jobs = limiter.semaphore(&jobs, "acme").unwrap();
    let starts = limiter
        .semaphore(Limit::rate("starts", 1, HOUR), "acme")
        .unwrap();
    let upstream = limiter
        .semaphore(Limit::concurrent("upstream", 1), "acme")
        .unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut heard = client.get_async_pubsub().await.unwrap();
    heard.psubscribe("turnstile:control*").await.unwrap();
    heard.psubscribe("turnstile:answer*").await.unwrap();

    let held = jobs
        .clone()
        .tenant("big")
        .unwrap()
        .label("GET /")
        .acquire()
        .await
        .unwrap();
    let waits = wait_in_line(&jobs.tenant("small").unwrap()).await;
    drop(starts.acquire().await.unwrap());
    starts.acquire().await.unwrap_err();
    drop(upstream.acquire().await.unwrap());
    upstream.pause("upstream", HOUR).unwrap();
    let (acme, small) = (KeyDigest::of("jobs", "acme"), TenantDigest::of("small"));
    operator.replicas().await.unwrap();
    operator.limits().await.unwrap();
    operator.explain("jobs", acme).await.unwrap();
    operator.permits("starts", None).await.unwrap();
    operator.keys("starts", None).await.unwrap();
    operator.keys("upstream", None).await.unwrap();
    operator.refusals("starts", None).await.unwrap();
    operator.tenants("jobs", Some(acme)).await.unwrap();
    operator.tenants("starts", None).await.unwrap_err();
    operator.permits("nothing", None).await.unwrap_err();
    for target in [Target::limit("jobs"), Target::digest("jobs", acme)] {
        // A replica that is busy or late does not confirm the change.
        let is_late = |outcome: &Outcome| !matches!(outcome, Outcome::Done { .. });
        let set = async || {
            let now = seen(&operator).await;
            let outcome = operator.0.set(&now, &target, 1, HOUR, &ada()).await;
            outcome.unwrap()
        };
        again_while(is_late, set).await;
    }
    let share = Order::Share {
        limit: "jobs".to_owned(),
        tenant: small,
        share: 2,
        length: HOUR,
        seen: None,
    };
    operator.order(&share, &ada()).await.unwrap();
    operator
        .resume(&Target::limit("upstream"), &ada())
        .await
        .unwrap();
    let whose = Revocation::Permit(held.id().unwrap());
    operator.revoke(&whose, &ada()).await.unwrap();

    let record = server.cli(&["HGETALL", "turnstile:control"]);
    let record: Vec<_> = record.lines().collect();
    let record = record.chunks(2).map(|pair| golden_field(pair[0], pair[1]));
    let mut lines: BTreeSet<_> = record.collect();
    server.cli(&["PUBLISH", "turnstile:answer:end", "{}"]);
    let mut heard = heard.on_message();
    loop {
        let message = soon(heard.next()).await.unwrap();
        let message: Value = serde_json::from_slice(message.get_payload_bytes()).unwrap();
        match (message.get("ask"), message.get("body")) {
            (None, None) => break,
            // The replica may be asked too often.
            (None, Some(body)) if *body == "busy" => {}
            _ => drop(lines.insert(golden(message))),
        }
    }
    drop((waits, held));
    let now: String = lines.iter().map(|line| format!("{line}\n")).collect();
    assert!(now == GOLDEN, "the formats are now:\n{now}");
}
