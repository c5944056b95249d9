//! What the kinds of tokens cost.

use http::Version;
use http_body_util::BodyExt;

use crate::{
    answers::{ANTHROPIC, ESTIMATE, OPENAI},
    proxy::send,
    stage::Stage,
    support::alone,
    tokens::{body, request, slow},
    weights::{Tokens, Weights},
};

fn weights(text: &str) -> Weights {
    text.parse()
        .unwrap_or_else(|fault| panic!("{text}: {fault}"))
}

#[test]
fn kinds_of_tokens_have_weights() {
    let tokens = Tokens {
        input: 1_000,
        cached: 205,
        output: 7,
    };
    for (text, units) in [
        ("input=1", 1_212),
        ("cached=0.1,output=4", 1_049),
        ("input=1,cached=0,output=0", 1_000),
        ("output=0.001,input=2.5,cached=1000", 207_501),
    ] {
        assert_eq!(weights(text).cost(tokens), units, "{text}");
    }
    let many = Tokens {
        input: u64::MAX,
        cached: u64::MAX,
        output: u64::MAX,
    };
    assert_eq!(weights("input=1000,output=1000").cost(many), u32::MAX);
}

#[test]
fn weights_that_cannot_be_are_refused_by_name() {
    for (text, named) in [
        ("", "`` is none of input, cached, output"),
        ("inptu=1", "`inptu`"),
        ("input", "input: it must be 0.001 to 1000"),
        ("output=-1", "output: it must be 0 to 1000"),
        ("output=1001", "output: it must"),
        ("cached=0.0001", "cached: it must"),
        ("cached=0.1005", "cached: it must"),
        ("cached=nan", "cached: it must"),
        ("input=1,cached=0.1,", "`` is none"),
        ("input=0,output=1", "input: it must be 0.001 to 1000"),
    ] {
        let fault = text.parse::<Weights>().expect_err(text);
        assert!(fault.contains(named), "{text}: {fault}");
    }
}

/// The prompt in advance, the deltas while they pass, and the report at the end.
#[test]
fn answers_are_charged_by_their_weights() {
    alone(async {
        let stage = Stage::with(&["--weights", "input=2,cached=0.5,output=4"], slow).await;
        let mut used = 0;
        for (path, answer, units) in [
            // 1,000 tokens of input, 200 from a cache, and 7 of output.
            (OPENAI, "openai", 2_000 + 100 + 28),
            (OPENAI, "openai-document", 2_000 + 100 + 28),
            // 1,050 tokens of input, 150 from a cache, and 30 of output.
            (ANTHROPIC, "anthropic", 2_100 + 75 + 120),
            (ANTHROPIC, "anthropic-document", 2_100 + 75 + 120),
        ] {
            let request = request(path, answer, answer, body(ESTIMATE as usize));
            let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            response.into_body().collect().await.expect("whole");
            used += units;
            stage.until_tokens(used, answer).await;
        }
        let open = request(OPENAI, "openai-open", "me", body(ESTIMATE as usize));
        let response = send(&stage.replicas[0], Version::HTTP_11, open).await;
        // Three deltas, and no report yet.
        stage
            .until_tokens(used + 2 * ESTIMATE + 4 * 3, "an open stream")
            .await;
        drop(response);
    });
}
