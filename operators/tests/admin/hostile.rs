//! Keys, labels, names and reasons with markup, terminal escapes and marks of direction.

use http::Request;
use serde_json::json;
use tower_turnstile::{Limit, Limiter};
use tower_turnstile_operate::admin::Admin;

use crate::scene::{HOUR_MS, call, get, in_memory, json_of, post};

pub(crate) const HOSTILE: &str =
    "</script><img src=x onerror=alert(1)>&amp;\u{202e}\u{2066}\u{9b}31m\u{feff}";

#[tokio::test]
async fn the_api_escapes_all_but_loses_nothing() {
    let scene = in_memory();
    let limiter = &scene.limiters[0];
    let name: String = HOSTILE.chars().take(40).collect();
    let limit = Limit::try_concurrent(name.clone(), 2).unwrap();
    let key = format!("{HOSTILE}\u{1b}[2J");
    let layer = limiter
        .layer(limit.by_key({
            let key = key.clone();
            move |_| Some(key.clone())
        }))
        .unwrap();
    let layer = layer.label_by(|_| HOSTILE);
    let service = tower::service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(
            http_body_util::Full::<bytes::Bytes>::from("x"),
        ))
    });
    let service = tower::Layer::layer(&layer, service);
    let held = tower::ServiceExt::oneshot(service, Request::new(()))
        .await
        .unwrap();
    // `json_of` checks that the text is printable ASCII.
    let status = scene.get("/api/status").await;
    assert_eq!(status["limits"]["rows"][0]["limit"], name);
    let encoded: String = name.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let answer = scene.get(&format!("/api/limit?limit={encoded}")).await;
    let row = &answer["permits"]["rows"][0];
    let shown = row["key_text"].as_str().unwrap();
    assert!(shown.starts_with("</script><img"), "{shown}");
    assert!(
        row["label"].as_str().unwrap().starts_with("</script>"),
        "{row}"
    );
    let reason = "<b>\u{202e}reason</b>";
    let order =
        json!({"do": "set", "limit": name, "value": 8, "for_ms": HOUR_MS, "reason": reason});
    scene.changed(order).await;
    let log = scene.get("/api/changes").await;
    assert_eq!(log["rows"][0]["reason"], reason);
    drop(held);
}

/// Errors may quote parts of a request.
#[tokio::test]
async fn problems_are_escaped() {
    let scene = in_memory();
    let unknown = call(&scene.admin, get("/api/limit?limit=%e2%80%ae%1b[2J"), "").await;
    let (status, body) = json_of(unknown).await;
    assert_eq!(
        (status.as_u16(), &body["kind"]),
        (404, &"unknown_limit".into())
    );
    let kind = json!({"do": "\u{202e}\u{1b}[2J", "reason": "x"}).to_string();
    let (status, _) = json_of(call(&scene.admin, post("/api/changes"), &kind).await).await;
    assert_eq!(status, 400);
    let author = Limiter::in_memory();
    let admin = Admin::of(&author)
        .authors(|_| Some("\u{1b}[2J".to_owned()))
        .build()
        .unwrap();
    let pause =
        json!({"do": "pause", "limit": "chat", "for_ms": HOUR_MS, "reason": "x"}).to_string();
    let (status, body) = json_of(call(&admin, post("/api/changes"), &pause).await).await;
    assert_eq!((status.as_u16(), &body["kind"]), (400, &"value".into()));
}
