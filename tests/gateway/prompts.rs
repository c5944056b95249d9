//! How the gateway reads the requests that it charges, and how it changes them.

use std::io;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Request, StatusCode};
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::prompt::{Dialect, MAX_REQUEST, Prompt};

fn read(dialect: Dialect, headers: &HeaderMap, body: &str) -> Result<Prompt, StatusCode> {
    let body = Full::from(body.to_owned());
    tokio_test::block_on(Prompt::read(dialect, headers, body))
}

fn openai(body: &str) -> Prompt {
    read(Dialect::OpenAi, &HeaderMap::new(), body).expect("it is read")
}

#[test]
fn requests_with_tokens_are_known_by_their_paths() {
    for (method, path, expected) in [
        ("POST", "/v1/chat/completions", Some(Dialect::OpenAi)),
        ("POST", "/v1/completions?a=b", Some(Dialect::OpenAi)),
        (
            "POST",
            "/openai/deployments/large/chat/completions",
            Some(Dialect::OpenAi),
        ),
        ("POST", "/v1/embeddings", Some(Dialect::OpenAi)),
        ("POST", "/v1/%65mbeddings", Some(Dialect::OpenAi)),
        ("POST", "/v1/messages//", Some(Dialect::Anthropic)),
        ("POST", "/v1/messages", Some(Dialect::Anthropic)),
        ("GET", "/v1/chat/completions", None),
        ("POST", "/v1/messages/count_tokens", None),
        ("POST", "/v1/models", None),
        ("POST", "/", None),
    ] {
        let request = Request::builder().method(method).uri(path);
        let (head, ()) = request.body(()).expect("a request").into_parts();
        assert_eq!(Dialect::of(&head), expected, "{method} {path}");
    }
}

/// Unchanged byte by byte, except the insertion.
#[test]
fn a_stream_is_asked_for_its_usage() {
    for (request, sent) in [
        (
            r#"{"stream":true}"#,
            r#"{"stream_options":{"include_usage":true},"stream":true}"#,
        ),
        (
            " { \"stream\" : true,\n\"seed\":1.50e1, \"a\":[1.0]}",
            " {\"stream_options\":{\"include_usage\":true}, \"stream\" : true,\n\"seed\":1.50e1, \"a\":[1.0]}",
        ),
        (
            r#"{"stream":true,"stream_options":{}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (
            r#"{"stream_options": {"include_obfuscation": false},"stream":true}"#,
            r#"{"stream_options": {"include_usage":true,"include_obfuscation": false},"stream":true}"#,
        ),
        (
            r#"{"a":null,"stream_options":null,"stream":true}"#,
            r#"{"a":null,"stream_options":{"include_usage":true},"stream":true}"#,
        ),
    ] {
        assert_eq!(openai(request).body, sent);
    }
}

#[test]
fn other_requests_are_not_changed() {
    for request in [
        r#"{"stream":false}"#,
        r#"{"messages":[{"stream":true}]}"#,
        r#"{"stream":1}"#,
        r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
        r#"{"stream":true,"stream_options":{"include_usage":false}}"#,
        r#"{"stream":true,"stream_options":7}"#,
        r#"{"stream":true"#,
        "[true]",
        "",
    ] {
        assert_eq!(openai(request).body, request);
    }
    let stream = r#"{"stream":true}"#;
    let none = HeaderMap::new();
    let of_another = read(Dialect::Anthropic, &none, stream).expect("it is read");
    assert_eq!(of_another.body, stream);
    let mut encoded = HeaderMap::new();
    encoded.insert("content-encoding", "gzip".parse().expect("a value"));
    let encoded = read(Dialect::OpenAi, &encoded, stream).expect("it is read");
    assert_eq!(encoded.body, stream);
}

#[test]
fn a_prompt_is_charged_by_the_length_of_its_text() {
    let text = |length| "a".repeat(length);
    for (request, tokens) in [
        (json!({ "prompt": text(400) }), 100),
        (json!({ "prompt": text(401) }), 101),
        (json!({ "prompt": "" }), 1),
        (json!({ "prompt": [text(40), text(40)] }), 20),
        (json!({ "prompt": [[1, 22, 333], [4]] }), 4),
        (json!({ "input": text(4), "model": text(400) }), 1),
        (
            json!({ "system": text(20), "messages": [{ "role": "user", "content": text(16) }] }),
            10,
        ),
        (
            json!({ "messages": [{ "content": [
                { "type": "text", "text": text(36) },
                { "type": "png!", "image_url": { "url": text(400) } },
                { "source": { "media_type": "", "data": text(400) } },
            ] }] }),
            11,
        ),
        (
            json!({ "tools": [{ "name": "find", "description": text(36) }] }),
            10,
        ),
        (json!({ "max_tokens": 4_000, "stop": text(400) }), 1),
    ] {
        assert_eq!(openai(&request.to_string()).tokens, tokens, "{request}");
    }
    // An unreadable request is charged by its length in bytes.
    assert_eq!(openai(&text(400)).tokens, 100);
    assert_eq!(openai("").tokens, 1);
}

#[test]
fn a_request_that_is_too_long_is_a_413() {
    let longest = "a".repeat(MAX_REQUEST);
    assert_eq!(openai(&longest).body, longest);
    let longer = read(Dialect::OpenAi, &HeaderMap::new(), &(longest + "a"));
    assert_eq!(longer.expect_err("too long"), 413);
}

#[test]
fn a_request_that_breaks_off_is_a_400() {
    let frames = [Err::<Frame<Bytes>, _>(io::Error::other("gone"))];
    let body = StreamBody::new(stream::iter(frames));
    let headers = HeaderMap::new();
    let read = Prompt::read(Dialect::OpenAi, &headers, body);
    assert_eq!(tokio_test::block_on(read).expect_err("broken"), 400);
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z{}\"]{0,4}", inner, 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_is_in_a_request_stays(
        fields in prop::collection::btree_map("[a-z{}\"]{0,4}", value(), 0..4),
        options in prop::option::of(prop::collection::btree_map("[a-z{}\"]{0,4}", value(), 0..4)),
        is_pretty: bool,
    ) {
        let mut request = Value::Object(fields.into_iter().collect());
        request["stream"] = true.into();
        if let Some(options) = options {
            request["stream_options"] = Value::Object(options.into_iter().collect());
        }
        let text = if is_pretty { format!("{request:#}") } else { request.to_string() };
        let sent = openai(&text).body;
        let added = if request["stream_options"].is_null() {
            request["stream_options"] = json!({});
            r#""stream_options":{"include_usage":true},"#
        } else {
            r#""include_usage":true"#
        };
        request["stream_options"]["include_usage"] = true.into();
        prop_assert_eq!(&serde_json::from_slice::<Value>(&sent).expect("JSON"), &request);
        let sent = std::str::from_utf8(&sent).expect("text");
        let cut = sent.replacen(added, "", 1);
        prop_assert!(cut == text || cut.replacen("{,", "{", 1) == text, "{} {}", cut, text);
    }
}
