//! The answers of the API.

use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use tokio::time::advance;
use tower_turnstile::{Limit, Limiter};
use tower_turnstile_operate::{KeyDigest, admin::Admin};

use crate::{
    scene::{
        CHAT, Scene, call, get, in_memory, json_of, on_redis, operator, problem, scenes, text, used,
    },
    support::{redis_server::RedisServer, soon},
};

fn len(list: &Value) -> usize {
    list["rows"].as_array().expect("rows").len()
}

#[tokio::test]
async fn the_status_has_replicas_limits_and_overrides() {
    for scene in scenes().await {
        let _used = used(&scene.limiters[0], "acme").await;
        let status = scene.get("/api/status").await;
        let replicas = scene.limiters.len();
        assert_eq!(
            (&status["store"], &status["author"]),
            (&"up".into(), &"ada".into())
        );
        assert_eq!(status["problem"], Value::Null);
        assert!(status["age_ms"].is_u64());
        assert_eq!(
            (len(&status["replicas"]), len(&status["limits"])),
            (replicas, 1)
        );
        assert_eq!(status["limits"]["answered"], replicas);
        let limit = &status["limits"]["rows"][0];
        let numbers = [
            &limit["max"],
            &limit["declared_max"],
            &limit["held"],
            &limit["waiting"],
        ];
        assert_eq!(numbers, [2, 2, 2, 1]);
        assert_eq!(status["overrides"]["rows"], json!([]));
    }
}

#[tokio::test]
async fn a_limit_has_its_keys_holders_waiters_and_refusals() {
    for scene in scenes().await {
        let limiter = &scene.limiters[0];
        let (held, _waiter) = used(limiter, "acme").await;
        let _other = limiter
            .semaphore(CHAT, "other")
            .unwrap()
            .acquire()
            .await
            .unwrap();
        limiter
            .semaphore(CHAT, "acme")
            .unwrap()
            .try_acquire()
            .await
            .unwrap_err();
        let limit = scene.get("/api/limit?limit=chat").await;
        assert_eq!((len(&limit["keys"]), len(&limit["refusals"])), (2, 1));
        let acme = KeyDigest::of("chat", "acme");
        let key = &limit["keys"]["rows"][0];
        assert_eq!(
            (&key["key"], &key["key_text"]),
            (&acme.to_string().into(), &"acme".into())
        );
        let permits = limit["permits"]["rows"].as_array().unwrap();
        let states: Vec<_> = permits
            .iter()
            .map(|row| row["state"].as_str().unwrap())
            .collect();
        assert_eq!(states, ["held", "held", "held", "waiting"]);
        let one = scene
            .get(&format!("/api/limit?limit=chat&key={acme}&count=1"))
            .await;
        assert_eq!(
            (len(&one["keys"]), len(&one["permits"])),
            (1, 2),
            "of each state"
        );
        assert_eq!(one["permits"]["left_out"], 1);
        let ids: Vec<_> = held
            .iter()
            .map(|permit| permit.id().unwrap().to_string())
            .collect();
        let id = one["permits"]["rows"][0]["id"].as_str().unwrap();
        assert!(ids.iter().any(|other| other == id));
    }
}

#[tokio::test]
async fn what_a_key_has_left_of_a_rate_is_shown() {
    const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(86_400)).burst(50);
    let tokens = TOKENS.unit("tokens");
    for scene in scenes().await {
        let acme = scene.limiters[0].semaphore(&tokens, "acme").unwrap();
        let permit = acme.acquire().await.unwrap();
        permit.budget(&tokens).unwrap().charge(48).await.unwrap();
        let limit = scene.get("/api/limit?limit=tokens").await;
        let key = &limit["keys"]["rows"][0];
        let facts = ["key_text", "remaining", "burst"].map(|name| key[name].clone());
        assert_eq!(facts, [json!("acme"), json!(1), json!(50)]);
        let digest = KeyDigest::of("tokens", "acme");
        let path = format!("/api/explain?limit=tokens&key={digest}");
        let why = scene.get(&path).await;
        let facts = ["verdict", "unit", "wait_ms"].map(|name| why[name].clone());
        assert_eq!(facts, [json!("admitted"), json!("tokens"), Value::Null]);
        assert_eq!(why["budget"]["remaining"], 1);
    }
}

/// Including a caller whose slots belong to a replica that cannot be asked.
#[tokio::test]
async fn a_key_is_explained() {
    let explain = async |scene: &Scene, key: &str, more: &str| {
        let digest = KeyDigest::of("chat", key);
        let path = format!("/api/explain?limit=chat&key={digest}{more}");
        scene.get(&path).await
    };
    for scene in scenes().await {
        let limiter = &scene.limiters[0];
        let _used = used(limiter, "acme").await;
        let acme = limiter.semaphore(CHAT, "acme").unwrap();
        acme.try_acquire().await.unwrap_err();
        let why = explain(&scene, "acme", "").await;
        assert_eq!(
            (&why["verdict"], &why["place"]),
            (&"queued".into(), &2.into())
        );
        let numbers = [&why["max"], &why["in_use"], &why["waiting"]];
        assert_eq!(numbers, [2, 2, 1]);
        assert_eq!((len(&why["permits"]), len(&why["refusals"])), (3, 1));
        assert_eq!(
            (&why["mode"], &why["unclaimed"]),
            (&"enforce".into(), &json!([]))
        );
        assert_eq!(why["problem"], Value::Null);
        let one = explain(&scene, "acme", "&count=1").await;
        assert_eq!(
            (len(&one["permits"]), &one["permits"]["left_out"]),
            (1, &2.into())
        );
        let free = explain(&scene, "nobody", "").await;
        assert_eq!(
            (&free["verdict"], &free["place"]),
            (&"admitted".into(), &Value::Null)
        );
        if let Some(server) = &scene.server {
            let builder = Limiter::builder().lease(Duration::from_secs(600));
            let builder = builder.store_timeout(Duration::from_secs(20));
            let other = builder.connect(&server.url()).await.unwrap();
            let _held = other
                .semaphore(CHAT, "globex")
                .unwrap()
                .acquire()
                .await
                .unwrap();
            let why = explain(&scene, "globex", "").await;
            assert_eq!((&why["in_use"], len(&why["permits"])), (&1.into(), 0));
            let unclaimed = &why["unclaimed"][0];
            assert!(unclaimed["ends_in_ms"].as_u64() > Some(0), "{unclaimed}");
        }
        let without = call(&scene.admin, get("/api/explain?limit=chat"), "").await;
        assert_eq!(problem(without).await, (400, "value".to_owned()));
        let path = format!("/api/explain?limit=x&key={}", KeyDigest::of("x", "acme"));
        let unknown = call(&scene.admin, get(&path), "").await;
        assert_eq!(problem(unknown).await, (404, "unknown_limit".to_owned()));
    }
}

/// Lists have a maximum size, and report how many rows are omitted.
#[tokio::test]
async fn ten_thousand_permits_are_cut() {
    let scene = in_memory();
    let many = scene.limiters[0]
        .semaphore(Limit::concurrent("many", 10_000), "acme")
        .unwrap();
    let mut held = Vec::new();
    for _ in 0..10_000 {
        held.push(many.acquire().await.unwrap());
    }
    let limit = scene.get("/api/limit?limit=many&count=50").await;
    assert_eq!(
        (len(&limit["permits"]), &limit["permits"]["left_out"]),
        (50, &9_950.into())
    );
    let status = scene.get("/api/status").await;
    assert_eq!(status["limits"]["rows"][0]["held"], 10_000);
}

#[tokio::test]
async fn questions_that_cannot_be_read_are_refused() {
    let scene = in_memory();
    let long = format!("limit={}", "x".repeat(129));
    for query in [
        "",
        "limit=",
        &long,
        "limit=%ff",
        "limit=chat&key=acme",
        "limit=chat&count=0",
        "limit=chat&count=501",
        "limit=chat&count=all",
        "limit=chat&other=1",
    ] {
        let path = format!("/api/limit?{query}");
        let answer = problem(call(&scene.admin, get(&path), "").await).await;
        assert_eq!(answer, (400, "malformed".to_owned()), "{query}");
    }
    let unknown = call(&scene.admin, get("/api/limit?limit=chat"), "").await;
    assert_eq!(problem(unknown).await, (404, "unknown_limit".to_owned()));
    for path in [
        "/api",
        "/api/",
        "/api/other",
        "/index.html",
        "/../api/status",
    ] {
        let answer = problem(call(&scene.admin, get(path), "").await).await;
        assert_eq!(answer, (404, "no_such_path".to_owned()), "{path}");
    }
}

/// Limit names may contain any characters.
#[tokio::test]
async fn names_are_percent_encoded() {
    let scene = in_memory();
    let limiter = &scene.limiters[0];
    let limit = Limit::try_concurrent("a b/\u{e4}&c", 1).unwrap();
    let _held = limiter
        .semaphore(&limit, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    for encoded in ["a%20b%2f%c3%a4%26c", "a+b/%C3%A4%26c"] {
        let answer = scene.get(&format!("/api/limit?limit={encoded}")).await;
        assert_eq!(
            (&answer["limit"], len(&answer["permits"])),
            (&limit.name().into(), 1)
        );
    }
}

/// The page of a single process says that it shows only this process, and cannot have authors.
#[tokio::test]
async fn a_page_of_one_process_changes_nothing() {
    let server = RedisServer::start();
    let limiter = Limiter::connect(&server.url()).await.unwrap();
    let error = Admin::of(&limiter).authors(|_| None).build().unwrap_err();
    assert!(error.to_string().contains("Operator::connect"), "{error}");
    let admin = Admin::of(&limiter).build().unwrap();
    let (_, status) = json_of(call(&admin, get("/api/status"), "").await).await;
    assert_eq!(
        (&status["overrides"], &status["author"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(status["overrides_problem"]["kind"], "no_store");
}

#[tokio::test]
async fn a_store_that_goes_away_leaves_the_last_answer() {
    let mut scene = on_redis(1).await;
    let _used = used(&scene.limiters[0], "acme").await;
    scene.get("/api/status").await;
    scene.server.as_mut().unwrap().stop();
    let until = async |scene: &Scene, is_away: bool| {
        loop {
            let status = scene.get("/api/status").await;
            if is_away != status["problem"].is_null() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let status = soon(until(&scene, true)).await;
    assert_eq!(
        (&status["store"], &status["problem"]["kind"]),
        (&"down".into(), &"unavailable".into())
    );
    assert_eq!(status["limits"]["rows"][0]["held"], 2, "as it was");
    assert!(status["age_ms"].as_u64().unwrap() >= 1_000, "{status}");
    // Data that was never known is an error.
    let log = problem(call(&scene.admin, get("/api/changes"), "").await).await;
    assert_eq!(log, (503, "unavailable".to_owned()));
    scene.server.as_mut().unwrap().restart();
    soon(until(&scene, false)).await;
}

#[tokio::test(start_paused = true)]
async fn a_limiter_that_was_dropped_answers_nothing() {
    let mut scene = in_memory();
    scene.get("/api/status").await;
    scene.limiters.clear();
    advance(Duration::from_secs(2)).await;
    let status = scene.get("/api/status").await;
    assert_eq!(
        (&status["store"], &status["problem"]["kind"]),
        (&"down".into(), &"unavailable".into())
    );
}

#[tokio::test]
async fn the_page_loads_nothing_and_is_in_no_frame() {
    let scene = in_memory();
    for path in ["/", "//"] {
        let page = call(&scene.admin, get(path), "").await;
        let header = |name: &str| page.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header("content-type"), "text/html; charset=utf-8");
        assert_eq!(header("cache-control"), "no-store");
        let policy = header("content-security-policy");
        for part in [
            "default-src 'none'",
            "connect-src 'self'",
            "frame-ancestors 'none'",
            "script-src 'sha256-",
        ] {
            assert!(policy.contains(part), "{policy}");
        }
        assert!(
            !policy.contains("unsafe") && !policy.contains('*'),
            "{policy}"
        );
        assert!(text(page).await.starts_with("<!doctype html>"));
    }
    let answer = call(&scene.admin, get("/api/status"), "").await;
    assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
    assert_eq!(
        answer.headers()["cross-origin-resource-policy"],
        "same-origin"
    );
}

/// Nested into an axum router below a path, with and without a trailing slash.
#[tokio::test]
async fn it_is_nested_into_routers() {
    use tower::ServiceExt;

    let app = axum::Router::<()>::new().nest_service("/limits", in_memory().admin);
    for (path, expected) in [
        ("/limits", 200),
        ("/limits/", 200),
        ("/limits/api/other", 404),
        ("/other", 404),
    ] {
        let request = Request::get(path).header("host", "localhost");
        let request = request.body(axum::body::Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), expected, "{path}");
    }
}

/// An operator whose user may not read the record sees everything else.
#[tokio::test]
async fn missing_rights_are_told() {
    let mut scene = on_redis(1).await;
    let limiter = &scene.limiters[0];
    let _held = limiter
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let server = scene.server.as_ref().unwrap();
    server.cli(&[
        "ACL", "SETUSER", "asker", "on", ">secret", "~*", "&*", "+@all", "-hscan",
    ]);
    let url = server.url().replace("://", "://asker:secret@");
    let operator = operator(&url, 1).await;
    scene.admin = Admin::builder(operator).build().unwrap();
    let status = scene.get("/api/status").await;
    assert_eq!(
        status["overrides_problem"]["kind"], "permission",
        "{status}"
    );
    assert_eq!(status["limits"]["rows"][0]["held"], 1);
}
