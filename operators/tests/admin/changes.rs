//! Changes through the API.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_turnstile::{Key, Limit};
use tower_turnstile_operate::{KeyDigest, TenantDigest};

use crate::{
    scene::{
        CHAT, HOUR_MS, QUESTIONS, call, in_memory, is_whole, json_of, on_redis, post, scenes, used,
    },
    support::{queue::wait_in_line, soon},
};

fn set(value: u32) -> Value {
    json!({"do": "set", "limit": "chat", "value": value, "for_ms": HOUR_MS, "reason": "launch"})
}

fn with(mut order: Value, name: &str, value: impl Into<Value>) -> Value {
    order[name] = value.into();
    order
}

#[tokio::test]
async fn limits_are_set_paused_and_restored() {
    for scene in scenes().await {
        let (_held, waiter) = used(&scene.limiters[0], "acme").await;
        scene.get("/api/status").await;
        scene.changed(set(8)).await;
        let admitted = waiter.await.expect("a raise admits it");
        let status = scene.get("/api/status").await;
        let limit = &status["limits"]["rows"][0];
        assert_eq!(
            (&limit["max"], &limit["declared_max"]),
            (&8.into(), &2.into()),
            "it is asked again"
        );
        let one = &status["overrides"]["rows"][0];
        assert_eq!(
            (&one["author"], &one["reason"], &one["to"]),
            (&"ada".into(), &"launch".into(), &8.into())
        );
        drop(admitted);
        let mode = json!({"do": "mode", "limit": "chat", "mode": "off", "for_ms": HOUR_MS, "reason": "alarm"});
        scene.changed(mode).await;
        let pause =
            json!({"do": "pause", "limit": "chat", "for_ms": HOUR_MS, "reason": "migration"});
        scene.changed(pause).await;
        assert_eq!(
            scene.get("/api/status").await["limits"]["rows"][0]["paused"],
            true
        );
        let unset = json!({"do": "unset", "limit": "chat", "reason": "calm"});
        scene.changed(unset.clone()).await;
        assert_eq!(scene.max("acme").await, 2);
        let (status, body) = scene.change(&unset).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::NOT_FOUND, &"not_found".into())
        );
    }
}

#[tokio::test]
async fn a_value_may_have_a_burst() {
    for scene in scenes().await {
        let tokens = Limit::rate("tokens", 10, Duration::from_secs(60));
        drop(scene.limiters[0].semaphore(tokens, "").unwrap());
        let of_a_rate = with(with(set(100), "limit", "tokens"), "burst", 20);
        scene.changed(of_a_rate.clone()).await;
        let status = scene.get("/api/status").await;
        let one = &status["overrides"]["rows"][0];
        let expected = (&json!("tokens"), &json!(100), &json!(20));
        assert_eq!((&one["limit"], &one["to"], &one["burst"]), expected);
        let (status, body) = scene.change(&with(of_a_rate, "burst", 0)).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::BAD_REQUEST, &"value".into())
        );
    }
}

#[tokio::test]
async fn a_key_is_named_by_its_digest() {
    for scene in scenes().await {
        let (_held, _waiter) = used(&scene.limiters[0], "acme").await;
        let body = json!({"limit": "chat", "key": "acme"}).to_string();
        let (_, digest) = json_of(call(&scene.admin, post("/api/digest"), &body).await).await;
        assert_eq!(digest["key"], KeyDigest::of("chat", "acme").to_string());
        scene
            .changed(with(set(5), "key", digest["key"].clone()))
            .await;
        assert_eq!((scene.max("acme").await, scene.max("other").await), (5, 2));
    }
}

/// Two operators look at the same page: the second one's change is refused.
#[tokio::test]
async fn a_change_is_refused_if_something_else_was_seen() {
    for scene in scenes().await {
        assert_eq!(scene.max("acme").await, 2);
        let seen_nothing = json!([]);
        scene
            .changed(with(set(8), "seen", seen_nothing.clone()))
            .await;
        let token = scene.get("/api/status").await["overrides"]["rows"][0]["token"].clone();
        let (status, body) = scene.change(&with(set(9), "seen", seen_nothing)).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::CONFLICT, &"conflict".into())
        );
        let detail = body["detail"].as_str().unwrap();
        assert_eq!(
            detail,
            "changed meanwhile by ada: limit `chat` is now value 8"
        );
        scene.changed(with(set(9), "seen", json!([token]))).await;
        let (status, _) = scene.change(&with(set(10), "seen", json!([token]))).await;
        assert_eq!(status, StatusCode::CONFLICT);
        assert_eq!(scene.max("acme").await, 9);
        let unset = json!({"do": "unset", "limit": "chat", "reason": "calm", "seen": [token]});
        assert_eq!(scene.change(&unset).await.0, StatusCode::CONFLICT);
    }
}

#[tokio::test]
async fn values_out_of_range_change_nothing() {
    let scene = in_memory();
    assert_eq!(scene.max("acme").await, 2);
    for order in [
        set(0),
        set(1_000_001),
        with(set(8), "for_ms", 999),
        with(set(8), "for_ms", 7 * 24 * HOUR_MS + 1),
        with(set(8), "reason", " "),
        with(set(8), "reason", "x".repeat(257)),
        with(set(8), "reason", "a\u{1b}[2J"),
        with(set(8), "limit", ""),
        with(set(8), "limit", "x".repeat(129)),
    ] {
        let (status, body) = scene.change(&order).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::BAD_REQUEST, &"value".into()),
            "{order}"
        );
    }
    assert_eq!(scene.max("acme").await, 2);
}

/// A replica that died a moment ago is still on the roster.
#[tokio::test]
async fn a_change_that_not_all_have_confirmed_is_accepted() {
    let scene = on_redis(1).await;
    let server = scene.server.as_ref().unwrap();
    let now_ms = server.cli(&["EVAL", "return redis.call('TIME')[1] * 1000", "0"]);
    server.cli(&[
        "ZADD",
        "turnstile:{turnstile:control}:roster",
        &now_ms,
        "AAAAAAAAAAAAAAAAweb-9",
    ]);
    let is_late = |body: &Value| body["confirmed"] == 0;
    let (status, body) = scene.change_while(is_late, &set(8)).await;
    let recorded = json!({"outcome": "recorded", "confirmed": 1, "of": 2, "missing": ["web-9"]});
    assert_eq!((status, body), (StatusCode::ACCEPTED, recorded));
}

/// It is in force on all replicas, so there is nothing to wait for.
#[tokio::test]
async fn a_change_of_a_limit_without_requests_is_done() {
    for scene in scenes().await {
        let is_late = |body: &Value| body["outcome"] == "recorded";
        let (status, body) = scene.change_while(is_late, &set(8)).await;
        let unused = json!({"outcome": "unused", "replicas": scene.limiters.len()});
        assert_eq!((status, body), (StatusCode::OK, unused));
    }
}

/// A job is notified, and runs until it stops; only then has its permit ended.
#[tokio::test]
async fn permits_are_revoked() {
    for scene in scenes().await {
        let jobs = scene.limiters[0].semaphore(CHAT, "acme").unwrap();
        let other = jobs.acquire().await.unwrap();
        let is_late = |body: &Value| !is_whole(body);
        // The job has a quarter of a second, too little on a machine that stalls: then there is another one.
        let revoked = async {
            loop {
                let one = jobs.acquire().await.unwrap();
                let id = one.id().unwrap().to_string();
                let stops = tokio::spawn(async move {
                    one.lost().await;
                    drop(one);
                });
                let revoke = json!({"do": "revoke", "permit": id, "reason": "runaway"});
                let (status, body) = scene.change(&revoke).await;
                stops.await.unwrap();
                if status == StatusCode::OK {
                    return (id, revoke, body);
                }
                assert_eq!(status, StatusCode::ACCEPTED, "{body}");
            }
        };
        let (id, revoke, body) = soon(revoked).await;
        assert_eq!(
            (&body["ended"], &body["running"]),
            (&1.into(), &0.into()),
            "{body}"
        );
        assert_eq!(body["permits"]["rows"][0]["id"], id);
        let (status, body) = scene.change_while(is_late, &revoke).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::NOT_FOUND, &"not_found".into())
        );
        let key = json!({"limit": "chat", "key": KeyDigest::of("chat", "acme")});
        let revoke = json!({"do": "revoke", "key": key, "reason": "all"});
        let (status, body) = scene.change_while(is_late, &revoke).await;
        assert_eq!(
            (status, &body["ended"], &body["running"]),
            (StatusCode::ACCEPTED, &0.into(), &1.into()),
            "{body}"
        );
        other.lost().await;
        for order in [
            json!({"do": "revoke", "reason": "none"}),
            json!({"do": "revoke", "permit": "x", "reason": "no id"}),
            json!({"do": "revoke", "replica": "web-0", "reason": "a label"}),
        ] {
            assert_eq!(
                scene.change(&order).await.0,
                StatusCode::BAD_REQUEST,
                "{order}"
            );
        }
    }
}

#[tokio::test]
async fn pauses_for_upstreams_are_shown_and_ended() {
    for scene in scenes().await {
        let acme = scene.limiters[0].semaphore(CHAT, "acme").unwrap();
        let pause = || acme.pause(CHAT, Duration::from_secs(600)).unwrap();
        pause();
        let status = scene.get("/api/status").await;
        assert_eq!(status["limits"]["rows"][0]["paused_keys"], 1);
        let limit = scene.get("/api/limit?limit=chat").await;
        let row = &limit["keys"]["rows"][0];
        assert!(row["pause_ends_in_ms"].as_u64() > Some(500_000), "{limit}");
        let digest = KeyDigest::of("chat", "acme");
        let why = scene
            .get(&format!("/api/explain?limit=chat&key={digest}"))
            .await;
        assert_eq!(why["pause"]["paused_by"], row["paused_by"]);
        let resume = json!({"do": "resume", "limit": "chat", "key": digest, "reason": "calm"});
        // If only the answers were late, the pause has ended.
        let is_late = |body: &Value| {
            !is_whole(body) && {
                pause();
                true
            }
        };
        let (status, body) = scene.change_while(is_late, &resume).await;
        assert_eq!(
            (status, &body["outcome"]),
            (StatusCode::OK, &"resumed".into()),
            "{body}"
        );
        assert_eq!(body["keys"]["rows"][0]["key"], digest.to_string());
        drop(acme.acquire().await.unwrap());
        let status = scene.get("/api/status").await;
        assert_eq!(status["limits"]["rows"][0]["paused_keys"], 0);
        let is_late = |body: &Value| !is_whole(body);
        let (status, body) = scene.change_while(is_late, &resume).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::NOT_FOUND, &"not_found".into())
        );
        let log = scene.get("/api/changes").await;
        assert_eq!(
            log["rows"][0]["subject"],
            format!("key {digest} of limit `chat`")
        );
        let unknown = json!({"do": "resume", "limit": "other", "reason": "calm"});
        let (status, body) = scene.change_while(is_late, &unknown).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::NOT_FOUND, &"unknown_limit".into())
        );
    }
}

#[tokio::test]
async fn shares_of_tenants_are_shown_and_set() {
    const GPU: Limit = Limit::concurrent("gpu", 1)
        .wait_up_to(Duration::from_secs(60))
        .fair();
    for scene in scenes().await {
        let acme = scene.limiters[0]
            .semaphore(GPU, Key::SHARED)
            .unwrap()
            .tenant("acme")
            .unwrap();
        let _held = acme.acquire().await.unwrap();
        let _waiter = wait_in_line(&acme).await;
        let digest = async |body: Value| {
            let answer = call(&scene.admin, post("/api/digest"), &body.to_string()).await;
            json_of(answer).await
        };
        let (_, tenant) = digest(json!({"limit": "gpu", "tenant": "acme"})).await;
        assert_eq!(
            tenant,
            json!({"tenant": TenantDigest::of("acme").to_string()})
        );
        let tenant = tenant["tenant"].clone();
        for wrong in [
            json!({"limit": "gpu"}),
            json!({"limit": "gpu", "key": "acme", "tenant": "acme"}),
        ] {
            assert_eq!(digest(wrong).await.0, StatusCode::BAD_REQUEST);
        }

        let order = json!({
            "do": "share", "limit": "gpu", "tenant": tenant, "share": 5, "for_ms": HOUR_MS,
            "reason": "launch", "seen": [],
        });
        scene.changed(order.clone()).await;
        let status = scene.get("/api/status").await;
        assert_eq!(status["limits"]["rows"][0]["fair"], true);
        let one = &status["overrides"]["rows"][0];
        assert_eq!(
            (&one["tenant"], &one["setting"], &one["to"]),
            (&tenant, &"share".into(), &5.into())
        );
        let limit = scene.get("/api/limit?limit=gpu").await;
        let row = &limit["tenants"]["rows"][0];
        let facts = ["tenant_text", "share", "held", "waiting", "debt_ms"];
        let facts = facts.map(|name| row[name].clone());
        let expected = [json!("acme"), json!(5), json!(1), json!(1), json!(0)];
        assert_eq!(facts, expected);
        let key = KeyDigest::of("gpu", Key::SHARED);
        let why = scene
            .get(&format!("/api/explain?limit=gpu&key={key}"))
            .await;
        assert_eq!(why["tenants"]["rows"][0]["share"], 5);
        assert_eq!(why["permits"]["rows"][1]["tenant_ahead"], 0);

        sleep(QUESTIONS).await;
        let (status, body) = scene.change(&with(order.clone(), "share", 6)).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::CONFLICT, &"conflict".into())
        );
        let (status, body) = scene.change(&with(order.clone(), "share", 1_001)).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::BAD_REQUEST, &"value".into())
        );
        let unset = json!({"do": "unset", "limit": "gpu", "tenant": tenant, "reason": "calm"});
        sleep(QUESTIONS).await;
        scene.changed(unset).await;
        sleep(QUESTIONS).await;
        drop(used(&scene.limiters[0], "acme").await);
        let limit = scene.get("/api/limit?limit=chat").await;
        assert_eq!(limit["tenants"], Value::Null);
        sleep(QUESTIONS).await;
        let (status, body) = scene.change(&with(order, "limit", "chat")).await;
        assert_eq!(
            (status, &body["kind"]),
            (StatusCode::CONFLICT, &"not_fair".into())
        );
    }
}
