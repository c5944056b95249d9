//! The view of users of the real SDKs. `.ci/sdks` installs the SDKs and runs these tests.

use std::{collections::BTreeMap, path::PathBuf};

use tokio::process::Command;

use crate::{
    estimates::TEXTS,
    stage::{Stage, changed},
    support::alone,
};

/// By the SDK and the case.
type Seen = BTreeMap<(String, String), String>;

/// Runs a program on three gateways, and one whose upstream must not be silent. Each line is the view of a user.
async fn seen(stage: &Stage, program: &str, script: &str) -> Seen {
    let address =
        |replica: &crate::support::replica::Replica| format!("http://{}", replica.address());
    let upstream = format!("http://{}", stage.upstream.address());
    let impatient = stage.replica(&upstream, &["--silence", "300ms"]).await;
    let gateways: Vec<_> = stage.replicas.iter().map(address).collect();
    let mut command = command(program, script);
    command.env("GATEWAYS", gateways.join(","));
    command.env("IMPATIENT", address(&impatient));
    let lines = output(command).await;
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let field = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        println!(
            "| {} | {} | {} |",
            field("sdk"),
            field("case"),
            field("seen")
        );
        ((field("sdk"), field("case")), field("seen"))
    };
    lines.lines().map(line).collect()
}

/// A script that uses the SDKs.
fn command(program: &str, script: &str) -> Command {
    let sdks = std::env::var("SDKS").expect("the folder where `.ci/sdks` installs them");
    let sdks = PathBuf::from(sdks);
    let scripts = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/sdks");
    let mut command = Command::new(match program {
        "python" => sdks.join("venv/bin/python"),
        _ => program.into(),
    });
    command.arg(scripts.join(script)).env("MODULES", sdks);
    command
}

async fn output(mut command: Command) -> String {
    let output = command.output().await.expect("it runs");
    let lines = String::from_utf8(output.stdout).expect("text");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{lines}\n{errors}");
    lines
}

fn assert_seen(seen: &Seen, sdk: &str, expected: &[(&str, &[&str])]) {
    for (case, words) in expected {
        let seen = seen.get(&(sdk.to_owned(), (*case).to_owned()));
        let seen = seen.unwrap_or_else(|| panic!("{sdk} did not show {case}"));
        for words in *words {
            assert!(
                seen.contains(words),
                "{sdk}, {case}: {seen}, without {words}"
            );
        }
    }
    let of_sdk = seen.keys().filter(|(of, _)| of == sdk).count();
    assert_eq!(of_sdk, expected.len(), "{seen:#?}");
}

/// Each case is under one limit: the starts do not use up the tokens first.
fn roomy(policy: String) -> String {
    changed(&policy, "burst = 20_000", "burst = 40_000")
}

/// With a third gateway.
async fn stage() -> Stage {
    let mut stage = Stage::with(&[], roomy).await;
    let upstream = format!("http://{}", stage.upstream.address());
    stage.replicas.push(stage.replica(&upstream, &[]).await);
    stage
}

const TEXT: &str = "Grüß € 𝄞!";

#[test]
#[ignore = "needs the SDKs: .ci/sdks"]
fn users_of_python() {
    alone(async {
        let stage = stage().await;
        let seen = seen(&stage, "python", "clients.py").await;
        assert_seen(
            &seen,
            "openai (Python)",
            &[
                ("answer", &[TEXT, " 1207"]),
                ("stream", &[TEXT]),
                ("stream_with_usage", &["0 choices, 1207"]),
                ("tools", &[r#"weather{"city":"Kyiv"}"#]),
                ("responses", &[TEXT, " 1207"]),
                ("embeddings", &["120"]),
                (
                    "full",
                    &[
                        "RateLimitError: Error code: 429",
                        "chat-key: 5 of 5 slots in use",
                        "rate_limit_exceeded",
                    ],
                ),
                ("cancelled", &["10 streams"]),
                ("retried", &["1207, in time"]),
                (
                    "budget",
                    &[
                        "RateLimitError",
                        "tokens: the rate of",
                        "is used up; try again in",
                    ],
                ),
                ("too_long", &["413", "longer than 4194304 bytes"]),
                ("no_key", &["AuthenticationError", "no API key: send it as"]),
                (
                    "unknown",
                    &[
                        "NotFoundError",
                        "the gateway does not serve POST /v1/images/generations",
                    ],
                ),
                (
                    "silent",
                    &["APIError: the upstream has sent nothing for too long"],
                ),
                (
                    "silent_response",
                    &["APIError: the upstream has sent nothing for too long"],
                ),
                (
                    "two_hundred",
                    &[
                        "200 open, then InternalServerError: Error code: 503",
                        "200 of 200 slots in use",
                        "1 text of 200",
                        TEXT,
                    ],
                ),
            ],
        );
        assert_seen(
            &seen,
            "anthropic (Python)",
            &[
                ("answer", &["1000 30"]),
                ("stream", &[TEXT]),
                ("tools", &[TEXT]),
                ("token", &[TEXT]),
                (
                    "full",
                    &[
                        "RateLimitError: Error code: 429",
                        "chat-key: 5 of 5 slots in use",
                        "rate_limit_error",
                    ],
                ),
                ("retried", &["30, in time"]),
                ("budget", &["RateLimitError", "tokens: the rate of"]),
                ("too_long", &["413", "longer than 4194304 bytes"]),
                ("no_key", &["AuthenticationError", "no API key: send it as"]),
                (
                    "unknown",
                    &[
                        "NotFoundError",
                        "the gateway does not serve GET /v1/messages/batches",
                    ],
                ),
                ("silent", &["the upstream has sent nothing for too long"]),
            ],
        );
        stage.until_held(0).await;
    });
}

#[test]
#[ignore = "needs the SDKs: .ci/sdks"]
fn users_of_node() {
    alone(async {
        let stage = stage().await;
        let seen = seen(&stage, "node", "clients.mjs").await;
        assert_seen(
            &seen,
            "openai (npm)",
            &[
                ("answer", &[TEXT, " 1207"]),
                ("stream", &[TEXT]),
                ("stream_with_usage", &["0 choices, 1207"]),
                ("tools", &[r#"weather{"city":"Kyiv"}"#]),
                ("responses", &[TEXT, " 1207"]),
                (
                    "full",
                    &["RateLimitError: 429 chat-key: 5 of 5 slots in use"],
                ),
                ("cancelled", &["10 streams"]),
                ("retried", &["1207, in time"]),
                (
                    "no_key",
                    &["AuthenticationError: 401 no API key: send it as"],
                ),
                (
                    "unknown",
                    &["NotFoundError: 404 the gateway does not serve POST /v1/images/generations"],
                ),
                (
                    "silent",
                    &["APIError", "the upstream has sent nothing for too long"],
                ),
            ],
        );
        assert_seen(
            &seen,
            "anthropic (npm)",
            &[
                ("answer", &["1000 30"]),
                ("stream", &[TEXT]),
                ("tools", &[TEXT]),
                (
                    "full",
                    &[
                        "RateLimitError: 429",
                        "chat-key: 5 of 5 slots in use",
                        "rate_limit_error",
                    ],
                ),
                ("retried", &["30, in time"]),
                (
                    "no_key",
                    &["AuthenticationError: 401", "no API key: send it as"],
                ),
                (
                    "unknown",
                    &[
                        "NotFoundError: 404",
                        "the gateway does not serve GET /v1/messages/batches",
                    ],
                ),
                ("silent", &["the upstream has sent nothing for too long"]),
            ],
        );
        stage.until_held(0).await;
    });
}

/// The truth that estimates are compared with.
#[test]
#[ignore = "needs a tokenizer: .ci/sdks"]
fn the_texts_have_as_many_tokens() {
    alone(async {
        let counted = output(command("node", "counts.mjs")).await;
        let texts = TEXTS.map(|(name, _, tokens)| format!("{name} {tokens}\n"));
        assert_eq!(counted, texts.concat());
    });
}
