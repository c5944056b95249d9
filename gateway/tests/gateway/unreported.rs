//! Answers without a usage report: the estimate is close to the count of an upstream with a tokenizer.

use bytes::Bytes;
use http::Version;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::{
    answers::{ANTHROPIC, Answer, ESTIMATE, MIB, OPENAI, chunk, event},
    estimate::{Estimate, PER_TOKEN},
    estimates::{TEXTS, assert_within_a_tenth, text},
    proxy::send,
    stage::Stage,
    support::alone,
    tokens::{request, stage},
};

/// Number of times that the text of a long answer is repeated.
const REPEATED: usize = 40;

/// Answers with the text of a sample.
pub(crate) fn answers() -> Vec<Answer> {
    let nothing = json!({ "prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0 });
    // LocalAI reports nothing in each chunk, and some servers put many tokens into each.
    let zeros = text("french").0.split_inclusive(". ").map(|sentence| {
        let mut chunk = chunk(&json!({ "content": sentence }));
        chunk["usage"] = nothing.clone();
        event(chunk)
    });
    let mut long = chunk(&json!({ "content": text("chat").0.repeat(REPEATED) }));
    long["choices"][0]["logprobs"] = json!({ "content": [{ "token": "a".repeat(MIB) }] });
    let of = |name, path, text: &str, events: Vec<Bytes>| {
        let tokens = Estimate::of(text.as_bytes()) / PER_TOKEN;
        Answer::new(name, path, events, ESTIMATE + tokens)
    };
    let document = |name, path, text: &str, document: Value| {
        let tokens = Estimate::of(text.as_bytes()) / PER_TOKEN;
        Answer::document(name, path, document, ESTIMATE + tokens)
    };
    let (python, rust, json) = (text("python").0, text("rust").0, text("json").0);
    let chat = text("chat").0.repeat(REPEATED);
    let vectors = json!([{ "embedding": [0.1, 0.2] }]);
    vec![
        of(
            "unreported-zeros",
            OPENAI,
            text("french").0,
            zeros.collect(),
        ),
        of("unreported-long-event", OPENAI, &chat, vec![event(long)]),
        document(
            "unreported-message",
            ANTHROPIC,
            python,
            json!({ "type": "message", "content": [{ "type": "text", "text": python }] }),
        ),
        document(
            "unreported-response",
            "/v1/responses",
            rust,
            json!({ "object": "response", "output": [{ "content": [{ "text": rust }] }] }),
        ),
        document(
            "unreported-completion",
            "/v1/completions",
            json,
            json!({ "choices": [{ "text": json }] }),
        ),
        document(
            "unreported-embeddings",
            "/v1/embeddings",
            "",
            json!({ "data": vectors }),
        ),
    ]
}

/// Sends the request, and returns the tokens that are charged for it once its answer has come, or the client has left.
async fn charged(stage: &Stage, path: &str, answer: &str, request_body: &Value) -> u64 {
    let before = stage.tokens();
    let asked = request(path, answer, answer, request_body.to_string());
    let asked = send(&stage.replicas[0], Version::HTTP_11, asked);
    if answer == "silent" {
        tokio::select! {
            _ = asked => panic!("it is not answered"),
            () = stage.upstream.until_calls(1) => {}
        }
    } else {
        let response = asked.await;
        assert_eq!(response.status(), 200, "{answer}");
        response.into_body().collect().await.expect("whole");
    }
    // A slot is released after the settlement.
    stage.until_held(0).await;
    stage.tokens() - before
}

#[test]
fn what_is_not_reported_is_charged_within_a_tenth() {
    alone(async {
        let stage = stage().await;
        let (english, tokens) = text("english");
        let messages = json!([{ "role": "user", "content": english }]);
        // Three tokens are around a message, one is its role, and three begin the answer.
        let chat = (json!({ "messages": messages }), 3 + 1 + tokens + 3);
        let prompt = (json!({ "prompt": english }), tokens);
        let input = (json!({ "input": english }), tokens);
        let many: Vec<_> = TEXTS.iter().map(|(_, text, _)| text).collect();
        let inputs = (
            json!({ "input": many }),
            TEXTS.iter().map(|text| text.2).sum(),
        );
        let source =
            json!({ "type": "text", "media_type": "text/plain", "data": text("german").0 });
        let attached = json!([
            { "type": "document", "source": source },
            { "type": "text", "text": "Who reads the newspapers?" },
        ]);
        let attached = json!({ "messages": [{ "role": "user", "content": attached }] });
        let attached = (attached, 3 + 1 + text("german").1 + 5 + 3);
        let of = |name: &str| text(name).1;
        for (what, path, answer, (body, prompt), of_answer) in [
            (
                "0 in each chunk",
                OPENAI,
                "unreported-zeros",
                &chat,
                of("french"),
            ),
            (
                "an event of 1 MiB",
                OPENAI,
                "unreported-long-event",
                &chat,
                REPEATED as u64 * of("chat"),
            ),
            (
                "a message",
                ANTHROPIC,
                "unreported-message",
                &chat,
                of("python"),
            ),
            (
                "a response",
                "/v1/responses",
                "unreported-response",
                &input,
                of("rust"),
            ),
            (
                "a completion",
                "/v1/completions",
                "unreported-completion",
                &prompt,
                of("json"),
            ),
            (
                "embeddings",
                "/v1/embeddings",
                "unreported-embeddings",
                &inputs,
                0,
            ),
            (
                "a document in the prompt",
                ANTHROPIC,
                "silent",
                &attached,
                0,
            ),
        ] {
            let charged = charged(&stage, path, answer, body).await;
            assert_within_a_tenth(what, charged, prompt + of_answer);
        }
    });
}
