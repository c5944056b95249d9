//! How the gateway reads the requests that it charges, and how it changes them.

use std::io;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Request, StatusCode};
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{endpoint::Endpoint, prompt::Prompt};

const MAX_REQUEST: usize = 1024 * 1024;

fn read(endpoint: Endpoint, headers: &HeaderMap, body: &str) -> Result<Prompt, StatusCode> {
    let body = Full::from(body.to_owned());
    let read = Prompt::read(endpoint, headers, body, MAX_REQUEST);
    let mut read = tokio_test::block_on(read).map_err(|(status, _)| status)?;
    read.ask_usage(endpoint);
    Ok(read)
}

fn openai(body: &str) -> Prompt {
    read(Endpoint::Completions, &HeaderMap::new(), body).expect("it is read")
}

#[test]
fn requests_with_tokens_are_known_by_their_paths() {
    for (method, path, expected) in [
        ("POST", "/v1/chat/completions", Some(Endpoint::Completions)),
        ("POST", "/v1/completions?a=b", Some(Endpoint::Completions)),
        (
            "POST",
            "/openai/deployments/large/chat/completions",
            Some(Endpoint::Completions),
        ),
        ("POST", "/v1/responses", Some(Endpoint::Responses)),
        ("POST", "/v1/embeddings", Some(Endpoint::Embeddings)),
        ("POST", "/v1/%65mbeddings", Some(Endpoint::Embeddings)),
        ("POST", "/v1%2Fembeddings", Some(Endpoint::Embeddings)),
        (
            "POST",
            "/v1/embeddings%2Fx%2F..",
            Some(Endpoint::Embeddings),
        ),
        ("POST", "/v1/messages//", Some(Endpoint::Messages)),
        ("POST", "/v1/messages", Some(Endpoint::Messages)),
        ("GET", "/v1/chat/completions", None),
        ("POST", "/v1/messages/count_tokens", None),
        ("POST", "/v1/models", None),
        ("POST", "/", None),
    ] {
        let request = Request::builder().method(method).uri(path);
        let (head, ()) = request.body(()).expect("a request").into_parts();
        let found = Endpoint::of(&head.method, head.uri.path());
        assert_eq!(found, expected, "{method} {path}");
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
        (
            r#"{"stream_options":{"include_usage": false},"stream":true}"#,
            r#"{"stream_options":{"include_usage": true},"stream":true}"#,
        ),
    ] {
        let read = openai(request);
        assert_eq!(read.body, sent);
        assert!(read.is_stream && read.hides_usage, "{request}");
    }
}

#[test]
fn other_requests_are_not_changed() {
    for request in [
        r#"{"stream":false}"#,
        r#"{"messages":[{"stream":true}]}"#,
        r#"{"stream":1}"#,
        r#"{"stream":true,"stream_options":{"include_usage":true}}"#,
        r#"{"stream":true,"stream_options":7}"#,
        r#"{"stream":true"#,
        "[true]",
        "",
    ] {
        let read = openai(request);
        assert_eq!(read.body, request);
        assert!(!read.hides_usage, "{request}");
    }
    let stream = r#"{"stream":true}"#;
    let none = HeaderMap::new();
    for other in [Endpoint::Messages, Endpoint::Responses] {
        let of_another = read(other, &none, stream).expect("it is read");
        assert_eq!(of_another.body, stream);
        assert!(of_another.is_stream && !of_another.hides_usage);
    }
}

/// Nobody knows how long it is.
#[test]
fn a_compressed_request_is_a_415() {
    for (coding, status) in [("gzip", Some(415)), ("identity", None)] {
        let mut headers = HeaderMap::new();
        headers.insert("content-encoding", coding.parse().expect("a value"));
        let read = read(Endpoint::Completions, &headers, "{}");
        assert_eq!(read.err().map(|status| status.as_u16()), status, "{coding}");
    }
}

#[test]
fn a_prompt_is_charged_by_its_text() {
    // A text of this many tokens.
    let text = |tokens| "a ".repeat(tokens);
    for (request, tokens) in [
        (json!({ "prompt": text(100) }), 100),
        // A long word is more than a token.
        (json!({ "prompt": "a".repeat(9) }), 2),
        (json!({ "prompt": "" }), 1),
        (json!({ "prompt": [text(10), text(10)] }), 20),
        (json!({ "prompt": [[1, 22, 333], [4]] }), 4),
        (json!({ "input": text(1), "model": text(100) }), 1),
        (json!({ "input": [text(3), text(4)] }), 7),
        // Around each message are tokens, also around the answer.
        (
            json!({ "system": text(5), "messages": [{ "role": "user", "content": text(4) }] }),
            5 + (3 + 1 + 4) + 3,
        ),
        (
            json!({ "messages": [
                { "role": "user", "content": text(4) }, { "content": text(2), "role": "assistant" },
            ] }),
            (3 + 1 + 4) + (3 + 2 + 2) + 3,
        ),
        (
            json!({ "instructions": text(5), "input": [{ "role": "user", "content": text(4) }] }),
            5 + (3 + 1 + 4) + 3,
        ),
        (
            json!({ "messages": [{ "content": [
                { "type": "text", "text": text(9) },
                { "type": "image_url", "image_url": { "url": text(100) } },
                { "source": { "media_type": "", "data": text(100) } },
            ] }] }),
            9,
        ),
        // The model also reads the names of parameters and their types.
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "find", "parameters": {
                "type": "object", "properties": { "city": { "type": "string" } },
            } } }] }),
            11,
        ),
        (json!({ "max_tokens": 4_000, "stop": text(100) }), 1),
        // Documents in the style of Anthropic: text in a field that has images elsewhere.
        (
            json!({ "messages": [{ "content": [
                { "type": "document", "source": { "type": "text", "media_type": "", "data": text(98) } },
            ] }] }),
            98,
        ),
        (
            json!({ "messages": [{ "content": [
                { "type": "document", "source": { "data": text(98), "media_type": "", "type": "text" } },
                { "type": "document", "source": { "type": "base64", "media_type": "", "data": text(100) } },
            ] }] }),
            98,
        ),
        (
            json!({ "messages": [{ "content": [{ "type": "document", "source": { "type": "content", "content": [
                { "type": "text", "text": text(97) },
            ] } }] }] }),
            97,
        ),
    ] {
        assert_eq!(openai(&request.to_string()).tokens, tokens, "{request}");
    }
    // An unreadable request is charged by its length in bytes.
    assert_eq!(openai(&"a".repeat(400)).tokens, 100);
    assert_eq!(openai("").tokens, 1);
}

#[test]
fn a_request_that_is_too_long_is_a_413() {
    let longest = "a".repeat(MAX_REQUEST);
    assert_eq!(openai(&longest).body, longest);
    let longer = read(Endpoint::Completions, &HeaderMap::new(), &(longest + "a"));
    assert_eq!(longer.expect_err("too long"), 413);
}

/// Its tokens come after the answer.
#[test]
fn a_response_in_the_background_is_a_400() {
    let request = r#"{"input":"a","background":true}"#;
    let none = HeaderMap::new();
    assert_eq!(
        read(Endpoint::Responses, &none, request).expect_err("it cannot be charged"),
        400
    );
    read(Endpoint::Completions, &none, request).expect("elsewhere it means nothing");
    // Upstreams may read what serde does not.
    let deep = format!("{}{}", "[".repeat(130), "]".repeat(130));
    let request = format!(r#"{{"input":"a","background":true,"tools":{deep}}}"#);
    assert_eq!(
        read(Endpoint::Responses, &none, &request).expect_err("it cannot be charged"),
        400
    );
    let request = r#"{"input":"a","background":false}"#;
    read(Endpoint::Responses, &none, request).expect("it is read");
}

#[test]
fn a_request_that_breaks_off_is_a_400() {
    let frames = [Err::<Frame<Bytes>, _>(io::Error::other("gone"))];
    let body = StreamBody::new(stream::iter(frames));
    let headers = HeaderMap::new();
    let read = Prompt::read(Endpoint::Completions, &headers, body, MAX_REQUEST);
    assert_eq!(tokio_test::block_on(read).expect_err("broken").0, 400);
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
