//! The gateway's own answers, in the form that each provider's clients read.

use std::{io, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};

use crate::{
    proxy::send,
    stage::{Stage, changed},
    support::{GUARD, alone, soon},
    tokens::{body, over, request, slow},
};

const PATHS: [(&str, &str); 4] = [
    ("/v1/chat/completions", "openai"),
    ("/v1/responses", "responses"),
    ("/v1/messages", "anthropic"),
    ("/openai/deployments/small/chat/completions", "openai"),
];

/// Status, fields, and body.
async fn answered(response: Response<Incoming>) -> (StatusCode, HeaderMap, Value) {
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("whole").to_bytes();
    let body = serde_json::from_slice(&body).expect("JSON");
    (head.status, head.headers, body)
}

async fn ask(
    stage: &Stage,
    path: &str,
    answer: &str,
    key: &str,
    tokens: usize,
) -> Response<Incoming> {
    let request = request(path, answer, key, body(tokens));
    send(&stage.replicas[0], Version::HTTP_11, request).await
}

/// The type of an error, its code and its message, where this path has them.
fn error<'a>(path: &str, body: &'a Value) -> (&'a Value, &'a Value, &'a str) {
    let error = &body["error"];
    assert_eq!(
        body["type"] == "error",
        path == "/v1/messages",
        "{path}: {body}"
    );
    let message = error["message"].as_str().expect("a message");
    (&error["type"], &error["code"], message)
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    let value = headers
        .get(name)
        .unwrap_or_else(|| panic!("no {name}: {headers:?}"));
    value.to_str().expect("text")
}

/// The fields of a unit: the caller's allowance, the rest of it, and the time until there is more.
fn rate_limits<'a>(path: &str, headers: &'a HeaderMap, unit: &str) -> [&'a str; 3] {
    ["limit", "remaining", "reset"].map(|what| match path {
        "/v1/messages" => text(headers, &format!("anthropic-ratelimit-{unit}-{what}")),
        _ => text(headers, &format!("x-ratelimit-{what}-{unit}")),
    })
}

#[test]
fn a_limit_that_is_reached_is_an_error_of_the_dialect() {
    alone(async {
        let stage = Stage::new().await;
        for (path, _) in PATHS {
            let open = stage.open_many(path, 5).await;
            let (status, headers, body) =
                answered(ask(&stage, path, "openai", path, 10).await).await;
            assert_eq!(status, 429, "{path}");
            assert_eq!(text(&headers, "content-type"), "application/json");
            let (kind, code, message) = error(path, &body);
            assert_eq!(kind, "rate_limit_error", "{path}");
            if path != "/v1/messages" {
                assert_eq!(code, "rate_limit_exceeded", "{path}");
            }
            assert!(
                message.starts_with("chat-key: 5 of 5 slots in use; try again in"),
                "{message}"
            );
            assert_eq!(body["error"]["limit"], "chat-key");
            let number = |name| text(&headers, name).parse::<u64>().expect("a number");
            assert_eq!(
                number("retry-after"),
                number("retry-after-ms").div_ceil(1_000)
            );
            let [limit, remaining, _] = rate_limits(path, &headers, "requests");
            assert_eq!((limit, remaining), ("5", "0"), "{path}");
            drop(open);
            stage.until_held(0).await;
        }
    });
}

#[test]
fn a_budget_that_is_used_up_says_when_it_is_not() {
    alone(async {
        let stage = Stage::with(&[], slow).await;
        for (path, answer) in PATHS {
            let first = ask(&stage, path, answer, path, 15_000).await;
            assert_eq!(first.status(), 200);
            // After the prompt, not before it.
            let [limit, remaining, _] = rate_limits(path, first.headers(), "tokens");
            let remaining: u32 = remaining.parse().expect("a number");
            assert_eq!(limit, "500000", "{path}");
            assert!((5_000..5_400).contains(&remaining), "{remaining}");
            first.into_body().collect().await.expect("whole");
            // The slot is released after the settlement.
            stage.until_held(0).await;
            let (status, headers, body) =
                answered(ask(&stage, path, answer, path, 19_999).await).await;
            assert_eq!(
                (status.as_u16(), &body["error"]["limit"]),
                (429, &json!("tokens")),
                "{path}: {body}"
            );
            let [limit, remaining, reset] = rate_limits(path, &headers, "tokens");
            assert_eq!((limit, remaining), ("500000", "0"), "{path}");
            let retry_after = text(&headers, "retry-after");
            match path {
                "/v1/messages" => {
                    let at = humantime::parse_rfc3339(reset).expect("a time");
                    let wait = at
                        .duration_since(std::time::SystemTime::now())
                        .unwrap_or_default();
                    let seconds: u64 = retry_after.parse().expect("a number");
                    let passed = (seconds + 2).checked_sub(wait.as_secs());
                    assert!(
                        passed.is_some_and(|passed| passed < GUARD.as_secs()),
                        "{reset}"
                    );
                }
                _ => assert_eq!(reset, format!("{retry_after}s")),
            }
        }
    });
}

#[test]
fn a_request_without_a_key_is_a_401() {
    alone(async {
        let stage = Stage::new().await;
        for (path, _) in PATHS {
            let mut request = request(path, "openai", "me", body(10));
            request.headers_mut().remove("x-api-key");
            let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            let (status, headers, body) = answered(response).await;
            assert_eq!(
                (status.as_u16(), text(&headers, "www-authenticate")),
                (401, "Bearer")
            );
            let (kind, code, message) = error(path, &body);
            if path != "/v1/messages" {
                assert_eq!(code, "missing_api_key");
            }
            let expected = match path {
                "/v1/messages" => "authentication_error",
                _ => "invalid_request_error",
            };
            assert_eq!(kind, expected);
            assert!(message.contains("Authorization: Bearer"), "{message}");
            assert!(
                !headers.contains_key("retry-after"),
                "it would be refused again"
            );
        }
        assert!(stage.upstream.has_no_head());
    });
}

/// Each kind of SDK sends the key in a different place, and each caller has separate limits.
#[test]
fn keys_are_found_where_clients_put_them() {
    alone(async {
        let stage = Stage::new().await;
        for (name, value) in [
            ("authorization", "Bearer alice"),
            ("x-api-key", "bob"),
            ("api-key", "carol"),
        ] {
            let mut open = Vec::new();
            for number in 0..6 {
                let mut request = request("/v1/chat/completions", "openai-open", "", body(10));
                request.headers_mut().remove("x-api-key");
                request
                    .headers_mut()
                    .insert(name, value.parse().expect("a value"));
                let response = send(&stage.replicas[number % 2], Version::HTTP_11, request).await;
                assert_eq!(
                    response.status(),
                    if number < 5 { 200 } else { 429 },
                    "{name}"
                );
                open.push(response);
            }
            drop(open);
            stage.until_held(0).await;
        }
    });
}

#[test]
fn a_path_that_no_route_serves_is_a_404() {
    alone(async {
        let mut stage = Stage::new().await;
        for (method, path, kind) in [
            ("POST", "/v1/batches", "invalid_request_error"),
            ("POST", "/v1/images/generations", "invalid_request_error"),
            ("GET", "/v1/responses/resp_1", "invalid_request_error"),
            ("POST", "/v1/messages/batches", "not_found_error"),
        ] {
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", "gateway");
            let request = request
                .header("x-api-key", "me")
                .body(Empty::new())
                .expect("a request");
            let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            let (status, headers, body) = answered(response).await;
            assert_eq!(status, 404, "{path}");
            assert_eq!(body["error"]["type"], kind, "{path}: {body}");
            let message = body["error"]["message"].as_str().expect("a message");
            assert!(message.contains(&format!("{method} {path}")), "{message}");
            let of_limit =
                |name: &&HeaderName| name.as_str().contains("ratelimit") || *name == "retry-after";
            assert_eq!(headers.keys().find(of_limit), None, "{path}");
        }
        // No provider's.
        let request = Request::get("/metrics").header("host", "gateway");
        let request = request
            .header("x-api-key", "me")
            .body(Empty::new())
            .expect("a request");
        let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
        let (status, headers, body) = answered(response).await;
        assert_eq!((status.as_u16(), &body["status"]), (404, &json!(404)));
        assert_eq!(text(&headers, "content-type"), "application/problem+json");
        stage.until_held(0).await;
        // Nor while the store is down.
        stage.redis.stop();
        for _ in 0..2 {
            let response = ask(&stage, "/v1/batches", "openai", "me", 10).await;
            assert_eq!(response.status(), 404);
        }
        assert!(stage.upstream.has_no_head(), "none was passed on");
    });
}

/// It has a key, which another one would not help.
#[test]
fn a_path_that_can_be_read_in_several_ways_is_a_400() {
    alone(async {
        let stage = Stage::new().await;
        let response = ask(&stage, "/v1/chat%2Fcompletions", "openai", "me", 10).await;
        let (status, headers, body) = answered(response).await;
        assert_eq!(
            (status.as_u16(), &body["error"]["code"]),
            (400, &json!("ambiguous_path")),
            "{body}"
        );
        assert!(!headers.contains_key("www-authenticate"));
        assert!(stage.upstream.has_no_head());
    });
}

/// A limit that all share is no fault of the caller.
#[test]
fn a_gateway_that_is_full_is_overloaded() {
    alone(async {
        let stage = Stage::with(&[], |policy| {
            changed(&policy, "concurrent = 200", "concurrent = 4")
        })
        .await;
        let _open = stage.open_many("alice", 4).await;
        for (path, kind) in [
            ("/v1/messages", "overloaded_error"),
            ("/v1/responses", "server_error"),
        ] {
            let (status, _, body) = answered(ask(&stage, path, "openai", "bob", 10).await).await;
            assert_eq!(status, 503);
            assert_eq!(error(path, &body).0, kind);
            assert_eq!(body["error"]["limit"], "chat-all");
        }
    });
}

#[test]
fn failures_are_errors_of_the_dialect() {
    alone(async {
        const LONG: (&str, [&str; 2]) = ("openai", ["request_too_large", "invalid_request_error"]);
        const LATE: (&str, [&str; 2]) = ("silent", ["timeout_error", "server_error"]);
        for (options, tokens, (answer, kinds), expected, words) in [
            (
                ["--max-request", "64KiB"],
                64 * 1024,
                LONG,
                413,
                "65536 bytes",
            ),
            (["--head-timeout", "1s"], 10, LATE, 504, "too long"),
        ] {
            let stage = Stage::with(&options, |policy| policy).await;
            for (path, kind) in ["/v1/messages", "/v1/chat/completions"].iter().zip(kinds) {
                let answer = ask(&stage, path, answer, "me", tokens).await;
                let (status, _, body) = answered(answer).await;
                let (seen, _, message) = error(path, &body);
                assert_eq!((status.as_u16(), seen), (expected, &json!(kind)));
                assert!(message.contains(words), "{message}");
            }
        }
    });
}

/// Over HTTP/2 no server removes the content.
#[test]
fn an_answer_to_head_has_no_content() {
    alone(async {
        let stage = Stage::new().await;
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let head = Request::head("/nowhere").header("host", "gateway");
            let head = head.header("x-api-key", "me").body(Empty::<Bytes>::new());
            let head = over(version, head.expect("a request"));
            let response = send(&stage.replicas[0], version, head).await;
            assert_eq!(response.status(), 404, "{version:?}");
            assert_ne!(text(response.headers(), "content-length"), "0");
            let content = response.into_body().collect().await.expect("whole");
            assert!(content.to_bytes().is_empty(), "{version:?}");
        }
    });
}

/// Unread bytes would reset the connection.
#[test]
fn a_client_that_sends_its_body_first_sees_why_it_is_refused() {
    alone(async {
        let stage = Stage::with(&["--max-request", "100KiB"], |policy| policy).await;
        let _full = stage.open_many("full", 5).await;
        for (path, key, coding, length, status) in [
            ("/v1/%5Cmessages", "me", "identity", 1_000_000, "400"),
            ("/v1/messages", "me", "gzip", 1_000_000, "415"),
            ("/v1/messages", "me", "identity", 1_000_000, "413"),
            ("/v1/messages", "full", "identity", 3_000_000, "429"),
        ] {
            let body = vec![b'a'; length];
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: gateway\r\nx-api-key: {key}\r\ncontent-encoding: {coding}\r\n\
                 content-length: {length}\r\n\r\n"
            );
            let ask = async || {
                let mut client = TcpStream::connect(stage.replicas[0].address()).await?;
                client.write_all(head.as_bytes()).await?;
                // Over a network the body arrives in pieces, the last after the gateway has decided.
                for piece in body.chunks(50_000) {
                    client.write_all(piece).await?;
                    sleep(Duration::from_millis(10)).await;
                }
                let mut answer = [0; 12];
                client.read_exact(&mut answer).await?;
                io::Result::Ok(answer)
            };
            // The gateway reads for a second, and the machine may stand still for as long.
            let asks = async {
                loop {
                    if let Ok(answer) = ask().await {
                        return answer;
                    }
                }
            };
            let answer = soon(asks).await;
            assert_eq!(answer, format!("HTTP/1.1 {status}").as_bytes());
        }
    });
}
