//! Answers of language models pass unchanged, and are charged to the token.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, Version};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::json;
use tokio::{sync::mpsc::unbounded_channel, time::sleep};

use crate::{
    answers::{self, Answer, ESTIMATE, End, named},
    proxy::{body_of, send},
    stage::{Stage, changed},
    support::{GUARD, alone, soon},
};

/// Time that a token takes to drain: none drains during a test.
const SPACING_US: u64 = 5_356_800;

pub(crate) fn slow(policy: String) -> String {
    changed(
        &policy,
        "rate = 60_000\nper = \"1m\"",
        "rate = 500_000\nper = \"744h\"",
    )
}

pub(crate) async fn stage() -> Stage {
    Stage::with(&[], slow).await
}

/// A body whose prompt has this many tokens. The client wants to see the usage of the stream.
pub(crate) fn body(tokens: usize) -> String {
    let options = r#""stream_options":{"include_usage":true},"#;
    format!("{{{options}{}", &body_without_usage(tokens)[1..])
}

fn body_without_usage(tokens: usize) -> String {
    let text = "a ".repeat(tokens);
    json!({ "model": "small", "stream": true, "messages": [{ "content": text }] }).to_string()
}

pub(crate) fn request(path: &str, answer: &str, key: &str, body: String) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", "gateway")
        .header("content-type", "application/json")
        .header("accept-encoding", "gzip")
        .header("x-api-key", key)
        .header("x-answer", answer)
        .body(Full::from(body))
        .expect("a request")
}

/// The request as this version needs it.
pub(crate) fn over<B>(version: Version, mut request: Request<B>) -> Request<B> {
    if version == Version::HTTP_2 {
        let host = request.headers_mut().remove("host").expect("a host");
        let host = host.to_str().expect("text");
        let uri = format!("http://{host}{}", request.uri());
        *request.uri_mut() = uri.parse().expect("a URI");
    }
    request
}

async fn ask(stage: &Stage, answer: &Answer, key: &str) -> Response<Incoming> {
    let request = request(answer.path, answer.name, key, body(ESTIMATE as usize));
    soon(send(&stage.replicas[0], Version::HTTP_11, request)).await
}

/// Reads the answer as far as it goes. An endless answer is dropped there.
async fn read(stage: &Stage, answer: &Answer, mut response: Response<Incoming>) -> (Vec<u8>, End) {
    let (mut body, whole) = (Vec::new(), answer.body());
    loop {
        match answer.end {
            End::Open if body == whole => return (body, End::Open),
            End::Cut if body.len() == answer.passing() => stage.upstream.cut(),
            _ => {}
        }
        match soon(response.frame()).await {
            Some(Ok(frame)) => body.extend(frame.into_data().expect("data")),
            Some(Err(_)) => return (body, End::Cut),
            None => return (body, End::Whole),
        }
    }
}

impl Stage {
    /// Tokens that all keys have used.
    pub(crate) fn tokens(&self) -> u64 {
        let of = |state: &str| {
            let parts: Vec<&str> = state.split(' ').collect();
            let is_of_tokens = parts.get(2)?.contains("/20000/");
            let [until_us, since_us] =
                [0, 4].map(|part| parts[part].parse::<u64>().expect("a number"));
            is_of_tokens.then(|| (until_us - since_us) / SPACING_US)
        };
        let states = self.contents();
        states.values().filter_map(|state| of(state)).sum()
    }

    pub(crate) async fn until_tokens(&self, tokens: u64, what: &str) {
        let began = Instant::now();
        while self.tokens() != tokens {
            let found = self.contents();
            assert!(began.elapsed() < GUARD, "{what}: not {tokens}: {found:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

#[test]
fn answers_pass_unchanged_and_cost_what_they_report() {
    alone(async {
        let stage = stage().await;
        let mut tokens = 0;
        for answer in answers::all() {
            let name = answer.name;
            let response = ask(&stage, answer, name).await;
            assert_eq!(response.status(), answer.status, "{name}");
            for (header, value) in &answer.headers {
                let is_passed = answer.decoded.is_none() || *header == "content-type";
                let passed = response.headers().get(*header);
                assert_eq!(passed.is_some(), is_passed, "{name}");
                assert!(passed.is_none_or(|passed| passed == value), "{name}");
            }
            let (body, end) = read(&stage, answer, response).await;
            assert!(
                body == answer.body()[..answer.passing()],
                "{name}: {}",
                String::from_utf8_lossy(&body)
            );
            assert!(end == answer.end, "{name}");
            tokens += answer.tokens;
            stage.until_tokens(tokens, name).await;
            println!("{name}: {} tokens", answer.tokens);
        }
        stage.until_held(0).await;
        assert_eq!(stage.tokens(), tokens, "and nothing twice");
    });
}

/// A client that has not asked for usage expects a choice in each chunk.
#[test]
fn the_usage_that_only_the_gateway_has_asked_for_is_not_passed_on() {
    alone(async {
        let stage = stage().await;
        let mut tokens = 0;
        for answer in answers::all() {
            if !answer.is_stream() || answer.end != End::Whole || answer.path == "/v1/messages" {
                continue;
            }
            let name = answer.name;
            let request = request(
                answer.path,
                name,
                name,
                body_without_usage(ESTIMATE as usize),
            );
            let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            let (body, _) = read(&stage, answer, response).await;
            let body = String::from_utf8(body).expect("text");
            let whole = String::from_utf8(answer.body()).expect("text");
            assert!(!body.contains(r#""choices":[]"#), "{name}: {body}");
            // But for that chunk all of it has passed.
            let kept = |event: &String| {
                let data: String = event.replace("data:", "").split_whitespace().collect();
                let is_usage = data.contains(r#""choices":[]"#) && data.contains(r#""usage":{"#);
                !data.is_empty() && !is_usage
            };
            let events = |text: &str| {
                let text = text.replace("\r\n", "\n").replace('\r', "\n");
                let lines: Vec<_> = text
                    .split('\n')
                    .filter(|line| !line.starts_with(':'))
                    .collect();
                let events: Vec<_> = lines.join("\n").split("\n\n").map(str::to_owned).collect();
                events.into_iter().filter(kept).collect::<Vec<_>>()
            };
            assert!(events(&body) == events(&whole), "{name}: {body}");
            tokens += answer.tokens;
            stage.until_tokens(tokens, name).await;
        }
    });
}

#[test]
fn a_client_that_leaves_is_charged_for_what_was_delivered() {
    alone(async {
        let stage = stage().await;
        let mut tokens = 0;
        for (name, version) in [
            ("openai-open", Version::HTTP_11),
            ("anthropic-open", Version::HTTP_11),
            ("openai-open", Version::HTTP_2),
        ] {
            let answer = named(name);
            let request = request(answer.path, name, "me", body(ESTIMATE as usize));
            let mut response = send(&stage.replicas[0], version, over(version, request)).await;
            let mut body = Vec::new();
            while body != answer.body() {
                let frame = response.frame().await.expect("more to come");
                body.extend(frame.expect("no error").into_data().expect("data"));
            }
            stage.upstream.until_calls(1).await;
            stage.until_held(1).await;
            drop(response);
            stage.upstream.until_calls(0).await;
            stage.until_held(0).await;
            tokens += answer.tokens;
            stage.until_tokens(tokens, name).await;
        }
    });
}

#[test]
fn a_client_that_leaves_before_the_answer_is_charged_for_its_prompt() {
    alone(async {
        let stage = stage().await;
        let request = request("/v1/messages", "silent", "me", body(ESTIMATE as usize));
        let asked = send(&stage.replicas[0], Version::HTTP_11, request);
        tokio::select! {
            _ = asked => panic!("it is not answered"),
            () = stage.upstream.until_calls(1) => {}
        }
        stage.upstream.until_calls(0).await;
        stage.until_held(0).await;
        stage.until_tokens(ESTIMATE, "the prompt").await;
    });
}

#[test]
fn an_answer_is_spent_while_it_passes() {
    alone(async {
        let stage = stage().await;
        let answer = named("openai-open");
        let response = ask(&stage, &answer, "me").await;
        stage.until_tokens(answer.tokens, "three deltas").await;
        stage.upstream.until_calls(1).await;
        drop(response);
    });
}

#[test]
fn a_prompt_beyond_the_budget_is_refused_before_the_upstream_is_called() {
    alone(async {
        let stage = stage().await;
        let answer = named("openai");
        let long = |answer: &str| request("/v1/chat/completions", answer, "me", body(19_000));
        let response = send(
            &stage.replicas[0],
            Version::HTTP_11,
            long("openai-without-usage"),
        )
        .await;
        let used = 19_005;
        read(&stage, &named("openai-without-usage"), response).await;
        stage.until_tokens(used, "the first one").await;
        drop(stage.upstream.head());

        let mut refused = send(&stage.replicas[1], Version::HTTP_11, long("openai")).await;
        assert_eq!(refused.status(), 429);
        let retry_after = refused.headers()["retry-after"].to_str().expect("text");
        let retry_after: u64 = retry_after.parse().expect("whole seconds");
        // 18,005 tokens have to drain.
        let exact = 18_005 * SPACING_US / 1_000_000;
        assert!(
            (exact - 60..=exact + 1).contains(&retry_after),
            "{retry_after}"
        );
        let problem = refused
            .body_mut()
            .collect()
            .await
            .expect("whole")
            .to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&problem).expect("JSON");
        assert_eq!(problem["error"]["limit"], "tokens");
        assert_eq!(problem["error"]["code"], "rate_limit_exceeded");
        assert!(stage.upstream.has_no_head(), "it was not called");
        stage.until_held(0).await;
        assert_eq!(stage.tokens(), used);

        // Another key has a budget of its own.
        let response = ask(&stage, &answer, "other").await;
        assert_eq!(response.status(), 200);
        read(&stage, &answer, response).await;
        stage
            .until_tokens(used + answer.tokens, "the other key")
            .await;
    });
}

#[test]
fn a_prompt_longer_than_the_burst_is_admitted_and_settled_in_full() {
    alone(async {
        let stage = stage().await;
        let answer = named("openai-open");
        let long = request(answer.path, answer.name, "me", body(30_000));
        let response = send(&stage.replicas[0], Version::HTTP_11, long).await;
        assert_eq!(response.status(), 200);
        read(&stage, &answer, response).await;
        stage.until_tokens(30_003, "what was delivered").await;
    });
}

/// Otherwise the key's next requests would be admitted as if the rest of the prompt were free.
#[test]
fn a_prompt_longer_than_the_burst_is_debt_at_once() {
    alone(async {
        let stage = stage().await;
        let path = named("openai-open").path;
        let request = request(path, "silent", "me", body(30_000));
        let answer = send(&stage.replicas[0], Version::HTTP_11, request);
        tokio::select! {
            _ = answer => panic!("the upstream is silent"),
            () = stage.until_tokens(30_000, "the prompt") => {}
        }
    });
}

#[test]
fn an_upstream_that_does_not_answer_costs_nothing() {
    alone(async {
        let stage = Stage::with(&["--head-timeout", "1s"], slow).await;
        let unreachable = stage.replica("http://127.0.0.1:1", &[]).await;
        // More than the five slots of a key.
        let failures = [(&unreachable, 502); 8];
        for (replica, status) in failures.into_iter().chain([(&stage.replicas[0], 504)]) {
            let request = request(
                "/v1/chat/completions",
                "silent",
                "me",
                body(ESTIMATE as usize),
            );
            let response = send(replica, Version::HTTP_11, request).await;
            assert_eq!(response.status(), status);
            stage.until_held(0).await;
            stage.until_tokens(0, "nothing").await;
        }
        stage.upstream.until_calls(0).await;
    });
}

#[test]
fn a_request_that_is_too_long_is_refused_and_costs_nothing() {
    alone(async {
        let stage = stage().await;
        let request = request(
            "/v1/chat/completions",
            "openai",
            "me",
            body(4 * 1024 * 1024),
        );
        let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
        assert_eq!(response.status(), 413);
        stage.until_held(0).await;
        assert_eq!(stage.tokens(), 0);
    });
}

/// The upstream reports the tokens of images, which are longer than texts.
#[test]
fn a_prompt_with_images_may_be_longer_by_an_option() {
    alone(async {
        let stage = Stage::with(&["--max-request", "8MiB"], slow).await;
        let answer = named("openai");
        let image =
            json!({ "type": "image_url", "image_url": { "url": "A".repeat(5 * 1024 * 1024) } });
        let messages =
            json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, image] }]);
        let vision = json!({ "messages": messages, "stream": true }).to_string();
        let vision = request(answer.path, answer.name, "me", vision);
        let response = send(&stage.replicas[0], Version::HTTP_11, vision).await;
        assert_eq!(response.status(), 200);
        response.into_body().collect().await.expect("whole");
        stage.until_tokens(answer.tokens, "as reported").await;
    });
}

#[test]
fn a_prompt_that_does_not_come_is_a_408() {
    alone(async {
        let stage = Stage::with(&["--head-timeout", "200ms"], slow).await;
        let (parts, frames) = unbounded_channel();
        parts.send(Bytes::from("{")).expect("it is read");
        let request = request("/v1/messages", "anthropic", "me", String::new());
        let request = request.map(|_| body_of(frames));
        let response = send(&stage.replicas[0], Version::HTTP_11, request);
        assert_eq!(soon(response).await.status(), 408);
        stage.until_held(0).await;
        assert_eq!(stage.tokens(), 0);
    });
}

/// But for the wish to see the usage of a stream, and for encodings.
#[test]
fn requests_pass_unchanged() {
    alone(async {
        let stage = stage().await;
        for version in [Version::HTTP_11, Version::HTTP_2] {
            for (path, answer) in [
                ("/v1/chat/completions", "openai"),
                ("/v1/messages", "anthropic"),
            ] {
                let sent = body_without_usage(10);
                let request = over(version, request(path, answer, "me", sent.clone()));
                let response = send(&stage.replicas[0], version, request).await;
                assert_eq!(response.status(), 200);
                let received = stage.upstream.body();
                let wish = r#""stream_options":{"include_usage":true},"#;
                let expected = match answer {
                    "openai" => format!("{{{wish}{}", &sent[1..]),
                    _ => sent,
                };
                assert_eq!(received, expected);
                let head = stage.upstream.head();
                assert_eq!(head.headers["content-length"], expected.len().to_string());
                assert_eq!(head.headers["accept-encoding"], "identity");
                assert_eq!(head.headers["content-type"], "application/json");
            }
        }
    });
}

/// The call is a start, but charges no prompt.
#[test]
fn to_count_tokens_is_free() {
    alone(async {
        let stage = stage().await;
        for number in 0..21 {
            let request = request(
                "/v1/messages/count_tokens",
                "anthropic-document",
                "me",
                body(400),
            );
            let response = send(&stage.replicas[number % 2], Version::HTTP_11, request).await;
            assert_eq!(response.status(), if number < 20 { 200 } else { 429 });
        }
        assert_eq!(stage.tokens(), 0);
    });
}

/// Most likely it was forgotten.
#[test]
fn routes_without_the_budget_are_logged() {
    alone(async {
        let without = |policy: String| {
            let limits = r#"limits = ["chat-key", "chat-opens", "chat-all", "tokens"]"#;
            let policy = policy.replacen(limits, r#"limits = ["chat-opens", "chat-all"]"#, 1);
            let others = r#"match = ["/v1/batches", "POST /v2/{*rest}"]"#;
            changed(&policy, r#"match = ["*"]"#, others)
        };
        let stage = Stage::with(&[], without).await;
        let replica = &stage.replicas[0];
        replica.until_logged("requests are not charged", 8).await;
        replica.until_logged("neither limited nor charged", 1).await;
        let whole = Stage::new().await;
        assert!(!whole.replicas[0].log().contains("charged"));
    });
}

#[test]
fn a_budget_may_have_another_name() {
    alone(async {
        let renamed = |policy: String| {
            slow(policy)
                .replace("[limits.tokens]", "[limits.budget]")
                .replace("\"tokens\"]", "\"budget\"]")
        };
        let stage = Stage::with(&["--budget", "budget"], renamed).await;
        let answer = named("openai");
        let response = ask(&stage, &answer, "me").await;
        read(&stage, &answer, response).await;
        stage.until_tokens(answer.tokens, "the budget").await;
    });
}

/// Its text is counted as it stands there.
#[cfg(target_os = "linux")]
#[test]
fn a_prompt_takes_little_more_memory_than_its_length() {
    alone(async {
        let stage = stage().await;
        let peak_mib = || {
            let status = format!("/proc/{}/status", stage.replicas[0].pid());
            let status = std::fs::read_to_string(status).expect("it runs");
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kib = peak.expect("a line").trim().trim_end_matches(" kB");
            kib.parse::<u64>().expect("a number") / 1024
        };
        let before = peak_mib();
        // As a tree of values each object would take a hundred times its length.
        let objects = r#"{"":0},"#.repeat(4 * 1024 * 1024 / 7 - 10);
        let body = format!(r#"{{"messages":[{objects}0]}}"#);
        let request = request("/v1/messages", "anthropic-document", "gold-1", body);
        let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
        assert_eq!(response.status(), 200);
        let grown = peak_mib() - before;
        println!("{grown} MiB for a prompt of 4 MiB");
        assert!(grown < 32, "{grown} MiB");
    });
}

#[test]
fn a_large_model_takes_four_slots() {
    alone(async {
        let stage = stage().await;
        let open = async |model: &str| {
            let path = format!("/openai/deployments/{model}/chat/completions");
            let request = request(&path, "openai-open", "me", body(10));
            send(&stage.replicas[0], Version::HTTP_11, request).await
        };
        let _large = open("large").await;
        assert_eq!(open("large").await.status(), 429);
        let _small = open("small").await;
        assert_eq!(open("small").await.status(), 429);
        stage.until_held(5).await;
    });
}
