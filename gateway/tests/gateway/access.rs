//! The access log: who used what, and how it ended.

use std::{collections::BTreeMap, fs};

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt, Empty};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::{
    answers::{ANTHROPIC, ESTIMATE, OPENAI, named},
    authentication::{customers, file_in},
    proxy::send,
    stage::Stage,
    support::{alone, soon},
    tokens::{body, over, request, slow},
};

/// Lines of the log, once there are as many.
async fn lines(path: &str, count: usize) -> Vec<Value> {
    soon(async {
        loop {
            let text = fs::read_to_string(path).expect("a log");
            if text.ends_with('\n') && text.lines().count() >= count {
                let lines = text.lines();
                let lines = lines.map(|line| serde_json::from_str(line).expect("a line of JSON"));
                return lines.collect();
            }
            sleep(std::time::Duration::from_millis(2)).await;
        }
    })
    .await
}

/// The fields of a line that are not times.
fn told(line: &Value) -> Value {
    let fields = line.as_object().expect("an object").iter();
    let is_time = |name: &str| name == "time" || name.ends_with("_ms");
    let told: BTreeMap<_, _> = fields.filter(|(name, _)| !is_time(name)).collect();
    json!(told)
}

fn expected(caller: &str, request: &str, status: u16, counts: [u64; 4], end: &str) -> Value {
    let [input, cached, output, units] = counts;
    let tenant = if caller.starts_with("acme") {
        "acme"
    } else {
        caller
    };
    json!({
        "caller": caller, "tenant": tenant, "request": request, "model": "small", "status": status,
        "input": input, "cached": cached, "output": output, "units": units, "end": end,
    })
}

/// With the keys of known callers, one request after the other.
#[test]
fn each_request_is_a_line_once_it_has_ended() {
    alone(async {
        let folder = TempDir::new().expect("a folder");
        let (log, callers) = (
            folder.path().join("access.log"),
            file_in(&folder, &customers()),
        );
        let log = log.to_str().expect("text");
        let options = [
            "--callers",
            &callers,
            "--access-log",
            log,
            "--weights",
            "output=4",
        ];
        let stage = Stage::with(&options, slow).await;
        let post = |path| format!("POST {path}");
        let prompt = ESTIMATE;
        let mut seen = 0;
        for (key, caller, answer, status, counts, end) in [
            (
                "key-web",
                "acme-web",
                "openai",
                200,
                [1_000, 200, 7, 1_228],
                "complete",
            ),
            (
                "key-batch",
                "acme-batch",
                "openai-document",
                200,
                [1_000, 200, 7, 1_228],
                "complete",
            ),
            (
                "key-bob",
                "bob",
                "anthropic",
                200,
                [1_050, 150, 30, 1_320],
                "complete",
            ),
            (
                "key-bob",
                "bob",
                "anthropic-document",
                200,
                [1_050, 150, 30, 1_320],
                "complete",
            ),
            (
                "key-bob",
                "bob",
                "openai-429",
                429,
                [0, 0, 0, 0],
                "complete",
            ),
            (
                "key-web",
                "acme-web",
                "anthropic-cut",
                200,
                [1_050, 150, 2, 1_208],
                "upstream_broke",
            ),
            (
                "key-web",
                "acme-web",
                "openai-open",
                200,
                [prompt, 0, 3, prompt + 12],
                "client_left",
            ),
        ] {
            let of = named(answer);
            let request = request(of.path, answer, key, body(ESTIMATE as usize));
            let mut response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            let (mut read, whole) = (0, of.passing());
            while read < whole {
                let frame = response.frame().await.expect("more").expect("no error");
                read += frame.into_data().expect("data").len();
            }
            match end {
                "complete" => assert!(response.frame().await.is_none()),
                "client_left" => drop(response),
                _ => {
                    stage.upstream.cut();
                    assert!(response.frame().await.expect("an end").is_err());
                }
            }
            seen += 1;
            let line = lines(log, seen).await.pop().expect("a line");
            let expected = expected(caller, &post(of.path), status, counts, end);
            assert_eq!(told(&line), expected, "{answer}");
            let ms = |name: &str| line[name].as_u64();
            assert!(ms("queued_ms") <= ms("first_byte_ms"), "{line}");
            assert!(
                ms("first_byte_ms").is_some() && ms("first_byte_ms") <= ms("duration_ms"),
                "{line}"
            );
            humantime::parse_rfc3339(line["time"].as_str().expect("text")).expect("a time");
        }
        // Of a known length: a server polls it no further than that.
        stage.pass(0, "key-web").await.expect("it is let in");
        let line = lines(log, seen + 1).await.pop().expect("a line");
        assert_eq!(
            (&line["end"], &line["units"]),
            (&json!("complete"), &json!(0))
        );
        let text = fs::read_to_string(log).expect("a log");
        for secret in ["key-", "a a a"] {
            assert!(!text.contains(secret), "{text}");
        }
    });
}

/// A server that knows that nothing comes does not ask for it.
#[test]
fn an_answer_without_content_is_complete() {
    alone(async {
        let folder = TempDir::new().expect("a folder");
        let log = folder.path().join("access.log");
        let log = log.to_str().expect("text");
        let stage = Stage::with(&["--access-log", log], |policy| policy).await;
        for (seen, version) in [(1, Version::HTTP_11), (2, Version::HTTP_2)] {
            let head = Request::head("/v1/chat/short").header("host", "gateway");
            let head = head.header("x-api-key", "me").body(Empty::<Bytes>::new());
            let head = over(version, head.expect("a request"));
            let response = send(&stage.replicas[0], version, head).await;
            assert_eq!(response.status(), 200, "{version:?}");
            assert_eq!(response.headers()["content-length"], "4", "{version:?}");
            let line = lines(log, seen).await.pop().expect("a line");
            assert_eq!(line["end"], "complete", "{version:?}: {line}");
        }
    });
}

#[test]
fn requests_that_the_gateway_refuses_are_lines_too() {
    alone(async {
        let folder = TempDir::new().expect("a folder");
        let (log, callers) = (
            folder.path().join("access.log"),
            file_in(&folder, &customers()),
        );
        let log = log.to_str().expect("text");
        let stage = Stage::with(&["--callers", &callers, "--access-log", log], slow).await;
        let nobody = json!(null);
        let ask = async |path: &str, answer: &str, key: &str| {
            let request = request(path, answer, key, body(10));
            let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            let status = response.status().as_u16();
            response.into_body().collect().await.expect("whole");
            status
        };
        let mut seen = 0;
        for (path, key, status, caller, end) in [
            (
                "/v1/messages?key=key-canary",
                "key-canary",
                401,
                None,
                "invalid_api_key",
            ),
            (
                "/v1/messages?key=key-canary",
                "",
                401,
                None,
                "missing_api_key",
            ),
            ("/v1/%5Cmessages", "key-web", 400, None, "ambiguous_path"),
            ("/v1/batches", "key-bob", 404, Some("bob"), "unknown_url"),
        ] {
            assert_eq!(ask(path, "anthropic", key).await, status, "{path}");
            seen += 1;
            let line = lines(log, seen).await.pop().expect("a line");
            let caller = caller.map_or(nobody.clone(), Value::from);
            let path = path.split('?').next().expect("a path");
            assert_eq!(
                (&line["caller"], &line["status"], &line["end"]),
                (&caller, &json!(status), &json!(end)),
                "{line}"
            );
            assert_eq!(line["request"], format!("POST {path}"));
            assert_eq!(
                (&line["first_byte_ms"], &line["units"]),
                (&nobody, &json!(0)),
                "{line}"
            );
        }
        // By a limit: the request has queued until then, and its body was not read.
        let open = stage.open_many("key-web", 5).await;
        assert_eq!(ask(OPENAI, "openai", "key-batch").await, 429);
        let line = lines(log, seen + 1).await.pop().expect("a line");
        assert_eq!(
            (&line["tenant"], &line["end"]),
            (&json!("acme"), &json!("rate_limit_exceeded")),
            "{line}"
        );
        assert_eq!(line["queued_ms"], line["duration_ms"]);
        drop(open);
        // Those of the first replica.
        let streams = lines(log, seen + 1 + 5).await;
        let left = streams.iter().filter(|line| line["end"] == "client_left");
        assert_eq!(left.count(), 5);
        stage.until_held(0).await;

        // By the budget, of which all is used up: the model is known by now.
        let long = request(ANTHROPIC, "silent", "key-bob", body(30_000));
        let asked = send(&stage.replicas[0], Version::HTTP_11, long);
        tokio::select! {
            _ = asked => panic!("the upstream is silent"),
            () = stage.upstream.until_calls(1) => {}
        }
        let line = lines(log, seen + 7).await.pop().expect("a line");
        let prompt = expected(
            "bob",
            "POST /v1/messages",
            0,
            [30_000, 0, 0, 30_000],
            "client_left",
        );
        assert_eq!(told(&line)["status"], nobody, "{line}");
        assert_eq!(
            (&line["units"], &line["end"]),
            (&prompt["units"], &prompt["end"]),
            "{line}"
        );
        assert_eq!(ask(ANTHROPIC, "anthropic", "key-bob").await, 429);
        let line = lines(log, seen + 8).await.pop().expect("a line");
        let refused = expected(
            "bob",
            "POST /v1/messages",
            429,
            [0; 4],
            "rate_limit_exceeded",
        );
        assert_eq!(told(&line), refused);
        let text = fs::read_to_string(log).expect("a log");
        assert!(!text.contains("canary") && !text.contains("key-"), "{text}");
    });
}

#[test]
fn a_log_that_is_full_is_an_error_and_no_outage() {
    alone(async {
        let stage = Stage::with(&["--access-log", "/dev/full"], |policy| policy).await;
        for number in 1..=3 {
            stage.pass(0, "me").await.expect("it is let in");
            let lacks = "the access log lacks a request";
            stage.replicas[0].until_logged(lacks, number).await;
        }
    });
}
