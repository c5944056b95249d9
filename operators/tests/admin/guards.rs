//! Refused requests, which change nothing.

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, Method, Request, StatusCode, request::Builder};
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::json;
use tower::ServiceExt;
use tower_turnstile::Limiter;
use tower_turnstile_operate::Operator;
use tower_turnstile_operate::admin::Admin;

use crate::scene::{CHAT, HOST, HOUR_MS, Scene, call, get, in_memory, json_of, post, problem};

fn order() -> String {
    json!({"do": "set", "limit": "chat", "value": 8, "for_ms": HOUR_MS, "reason": "launch"})
        .to_string()
}

/// Sends a valid change in another form. Checks that nothing has changed unless it was accepted.
async fn outcome(
    scene: &Scene,
    change: impl FnOnce(&mut Request<()>),
) -> Result<(), (u16, String)> {
    drop(scene.limiters[0].semaphore(CHAT, "").unwrap());
    let mut request = post("/api/changes").body(()).unwrap();
    change(&mut request);
    let (head, ()) = request.into_parts();
    let mut builder = Builder::new().method(head.method).uri(head.uri);
    *builder.headers_mut().unwrap() = head.headers;
    let response = call(&scene.admin, builder, &order()).await;
    let is_taken = response.status() == StatusCode::OK;
    let log = Operator::of(&scene.limiters[0]).log().await.unwrap();
    assert_eq!(log.len(), usize::from(is_taken));
    if is_taken {
        Ok(())
    } else {
        Err(problem(response).await)
    }
}

fn header(name: &'static str, value: &'static str) -> impl FnOnce(&mut Request<()>) {
    move |request| {
        let value = HeaderValue::from_static(value);
        request.headers_mut().insert(name, value);
    }
}

fn without(name: &'static str) -> impl FnOnce(&mut Request<()>) {
    move |request| drop(request.headers_mut().remove(name))
}

#[tokio::test]
async fn what_another_site_sends_is_refused() {
    for (name, value, expected) in [
        ("origin", "http://evil.example", (403, "cross_site")),
        ("origin", "null", (403, "cross_site")),
        ("origin", "http://127.0.0.1:3001", (403, "cross_site")),
        (
            "origin",
            "http://127.0.0.1:3000.evil.example",
            (403, "cross_site"),
        ),
        ("sec-fetch-site", "cross-site", (403, "cross_site")),
        ("sec-fetch-site", "same-site", (403, "cross_site")),
        // A foreign name that leads here.
        ("host", "evil.example:3000", (421, "wrong_host")),
        ("host", "", (400, "malformed")),
        ("content-type", "text/plain", (415, "content_type")),
        (
            "content-type",
            "application/x-www-form-urlencoded",
            (415, "content_type"),
        ),
        (
            "content-type",
            "multipart/form-data; application/json",
            (415, "content_type"),
        ),
    ] {
        let refused = outcome(&in_memory(), header(name, value))
            .await
            .unwrap_err();
        assert_eq!((refused.0, &*refused.1), expected, "{name}: {value}");
    }
    for (name, expected) in [
        ("x-turnstile", (403, "no_header")),
        ("content-type", (415, "content_type")),
        ("host", (400, "malformed")),
    ] {
        let refused = outcome(&in_memory(), without(name)).await.unwrap_err();
        assert_eq!((refused.0, &*refused.1), expected, "without {name}");
    }
    let twice = |request: &mut Request<()>| {
        let evil = HeaderValue::from_static("http://evil.example");
        request.headers_mut().append("origin", evil);
    };
    assert_eq!(outcome(&in_memory(), twice).await.unwrap_err().0, 400);
}

#[tokio::test]
async fn what_the_page_and_programs_send_is_taken() {
    outcome(&in_memory(), |_| {}).await.unwrap();
    outcome(
        &in_memory(),
        header("content-type", "Application/JSON; charset=utf-8"),
    )
    .await
    .unwrap();
    outcome(&in_memory(), header("sec-fetch-site", "none"))
        .await
        .unwrap();
    // Requests of programs have neither header.
    outcome(&in_memory(), |request| {
        without("origin")(request);
        let _ = request.headers_mut().remove("sec-fetch-site");
    })
    .await
    .unwrap();
    outcome(&in_memory(), |request| {
        header("host", "localhost")(request);
        header("origin", "https://localhost")(request);
    })
    .await
    .unwrap();
    // HTTP/2 has the host in the URI.
    outcome(&in_memory(), |request| {
        without("host")(request);
        *request.uri_mut() = format!("http://{HOST}/api/changes").parse().unwrap();
    })
    .await
    .unwrap();
}

/// Another site cannot even read, whatever the application allows in general.
#[tokio::test]
async fn other_sites_read_nothing() {
    let scene = in_memory();
    for path in ["/api/status", "/api/limit?limit=chat", "/api/changes"] {
        for (name, value, expected) in [
            ("host", "evil.example", 421),
            ("sec-fetch-site", "cross-site", 403),
            ("origin", "http://evil.example", 403),
        ] {
            let mut request = get(path);
            request
                .headers_mut()
                .unwrap()
                .insert(name, HeaderValue::from_static(value));
            let answer = problem(call(&scene.admin, request, "").await).await;
            assert_eq!(answer.0, expected, "{path} {name}");
        }
    }
}

#[tokio::test]
async fn origins_are_those_that_are_named() {
    let admin = |limiter: &Limiter| {
        let builder = Admin::of(limiter).authors(|_| Some("ada".to_owned()));
        builder
            .origin("https://ops.example.com")
            .origin("http://10.0.0.1:8080")
            .build()
            .unwrap()
    };
    for (host, origin, expected) in [
        ("ops.example.com", "https://ops.example.com", 200),
        ("ops.example.com:443", "https://ops.example.com", 200),
        ("OPS.example.com", "https://ops.example.com", 200),
        ("10.0.0.1:8080", "http://10.0.0.1:8080", 200),
        ("ops.example.com", "http://ops.example.com", 403),
        ("ops.example.com", "https://ops.example.com:444", 403),
        ("ops.example.com:444", "https://ops.example.com", 421),
        ("10.0.0.1", "http://10.0.0.1", 421),
        ("localhost", "http://localhost", 421),
        ("user@ops.example.com", "https://ops.example.com", 421),
    ] {
        let limiter = Limiter::in_memory();
        drop(limiter.semaphore(CHAT, "").unwrap());
        let mut request = post("/api/changes");
        let headers = request.headers_mut().unwrap();
        headers.insert("host", host.parse().unwrap());
        headers.insert("origin", origin.parse().unwrap());
        let response = call(&admin(&limiter), request, &order()).await;
        assert_eq!(response.status(), expected, "{host} {origin}");
    }
    let error = Admin::of(&Limiter::in_memory())
        .origin("ops.example.com")
        .build()
        .unwrap_err();
    assert!(error.to_string().contains("must have a scheme"), "{error}");
}

#[tokio::test]
async fn a_read_only_page_takes_no_change() {
    let limiter = Limiter::in_memory();
    let admin = Admin::of(&limiter).build().unwrap();
    let response = call(&admin, post("/api/changes"), &order()).await;
    assert_eq!(response.headers()["allow"], "GET, HEAD");
    assert_eq!(problem(response).await, (405, "read_only".to_owned()));
    assert!(Operator::of(&limiter).log().await.unwrap().is_empty());
    let digest = json!({"limit": "chat", "key": "acme"}).to_string();
    let (status, _) = json_of(call(&admin, post("/api/digest"), &digest).await).await;
    assert_eq!(status, 200, "this is no change");
}

/// The application determines authors by the request extensions that its own layers have set.
#[tokio::test]
async fn only_authors_change_something() {
    let limiter = Limiter::in_memory();
    drop(limiter.semaphore(CHAT, "").unwrap());
    let name =
        |head: &http::request::Parts| Some(head.headers.get("x-user")?.to_str().ok()?.to_owned());
    let admin = Admin::of(&limiter).authors(name).build().unwrap();
    let response = call(&admin, post("/api/changes"), &order()).await;
    assert_eq!(problem(response).await, (403, "no_author".to_owned()));
    let (_, status) = json_of(call(&admin, get("/api/status"), "").await).await;
    assert_eq!(status["author"], serde_json::Value::Null);
    let post = post("/api/changes").header("x-user", "bob");
    assert_eq!(call(&admin, post, &order()).await.status(), 200);
    let log = Operator::of(&limiter).log().await.unwrap();
    assert_eq!(log[0].author, "bob");
    let (_, status) =
        json_of(call(&admin, get("/api/status").header("x-user", "bob"), "").await).await;
    assert_eq!(status["author"], "bob");
}

#[tokio::test]
async fn other_methods_are_refused() {
    let scene = in_memory();
    for (method, path, allow) in [
        (Method::POST, "/", "GET, HEAD"),
        (Method::POST, "/api/status", "GET, HEAD"),
        (Method::PUT, "/api/changes", "GET, HEAD, POST"),
        (Method::DELETE, "/api/changes", "GET, HEAD, POST"),
        (Method::OPTIONS, "/api/changes", "GET, HEAD, POST"),
        (Method::GET, "/api/digest", "POST"),
    ] {
        let request = Request::builder()
            .method(&method)
            .uri(path)
            .header("host", HOST);
        let response = call(&scene.admin, request, "").await;
        assert_eq!(response.headers()["allow"], allow, "{method} {path}");
        assert!(
            !response
                .headers()
                .contains_key("access-control-allow-origin")
        );
        assert_eq!(problem(response).await.0, 405);
    }
}

#[tokio::test]
async fn bodies_that_cannot_be_read_change_nothing() {
    let scene = in_memory();
    let nested = "[".repeat(4_000);
    for body in [
        "",
        "{",
        "null",
        "[]",
        "\u{0}",
        &nested,
        r#"{"do": "revoke-all", "reason": "x"}"#,
        r#"{"do": "set", "limit": "chat"}"#,
        r#"{"do": "set", "limit": "chat", "value": -1, "for_ms": 1000, "reason": "x"}"#,
        r#"{"do": "set", "limit": "chat", "value": 8, "for_ms": 1e99, "reason": "x"}"#,
        r#"{"do": "set", "limit": "chat", "value": 8, "for_ms": 1000, "reason": "x", "other": 1}"#,
        r#"{"do": "set", "limit": "chat", "key": "acme", "value": 8, "for_ms": 1000, "reason": "x"}"#,
        r#"{"do": "mode", "limit": "chat", "mode": "on", "for_ms": 1000, "reason": "x"}"#,
    ] {
        let response = call(&scene.admin, post("/api/changes"), body).await;
        assert_eq!(
            problem(response).await,
            (400, "malformed".to_owned()),
            "{body}"
        );
    }
    assert!(
        Operator::of(&scene.limiters[0])
            .log()
            .await
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn large_bodies_are_not_read() {
    let scene = in_memory();
    let large = format!("{}{}", order(), " ".repeat(4_096));
    let response = call(&scene.admin, post("/api/changes"), &large).await;
    assert_eq!(problem(response).await, (413, "too_large".to_owned()));
    // A body of unknown size that never ends.
    let endless = stream::repeat(Bytes::from_static(&[b' '; 64]));
    let endless = endless.map(|part| Ok::<_, std::io::Error>(Frame::data(part)));
    let request = post("/api/changes").body(StreamBody::new(endless)).unwrap();
    let response = Admin::oneshot(scene.admin.clone(), request).await.unwrap();
    assert_eq!(problem(response).await, (413, "too_large".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn slow_and_broken_bodies_are_given_up() {
    let scene = in_memory();
    let broken = stream::once(async { Err::<Frame<Bytes>, _>(std::io::Error::other("reset")) });
    let request = post("/api/changes")
        .body(StreamBody::new(broken.boxed()))
        .unwrap();
    let response = scene.admin.clone().oneshot(request).await.unwrap();
    assert_eq!(problem(response).await, (400, "malformed".to_owned()));
    let slow = stream::pending::<Result<Frame<Bytes>, std::io::Error>>();
    let request = post("/api/changes").body(StreamBody::new(slow)).unwrap();
    let response = scene.admin.clone().oneshot(request).await.unwrap();
    assert_eq!(problem(response).await, (400, "malformed".to_owned()));
}
