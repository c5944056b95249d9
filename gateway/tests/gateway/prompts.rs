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

#[test]
fn the_model_is_known_by_its_name_or_the_beginning_of_it() {
    let long = format!(r#"{{"model":"{}"}}"#, "m".repeat(100));
    let begin = "m".repeat(64);
    for (request, model) in [
        (r#"{"stream":true,"model":"small\u00e9"}"#, Some("smallé")),
        (r#"{"messages":[{"model":"other"}],"model":null}"#, None),
        (r#"{"model":"old","model":"new"}"#, Some("new")),
        (&long, Some(&*begin)),
        ("{}", None),
    ] {
        assert_eq!(openai(request).model.as_deref(), model, "{request}");
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
        r#"{"stream":null}"#,
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
        headers.insert("content-encoding", "identity".parse().expect("a value"));
        headers.append("content-encoding", coding.parse().expect("a value"));
        let read = read(Endpoint::Completions, &headers, "{}");
        assert_eq!(read.err().map(|status| status.as_u16()), status, "{coding}");
    }
}

#[test]
fn a_prompt_is_charged_by_its_text() {
    // A text of this many tokens.
    let text = |tokens| "a ".repeat(tokens);
    let base64 = "iVBORw0K".repeat(100);
    let image = format!("data:image/png;base64,{base64}");
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
                { "type": "image_url", "image_url": { "url": image } },
                { "type": "image_url", "image_url": "https://images.test/1.png" },
                { "type": "input_audio", "input_audio": { "data": base64 } },
                { "type": "image", "source": { "type": "base64", "media_type": "", "data": base64 } },
                { "type": "document", "source": { "type": "url", "url": "https://images.test/1.pdf" } },
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
                { "type": "document", "source": { "type": "base64", "media_type": "", "data": base64 } },
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

/// Whatever the gateway does not know for media counts, wherever it is.
#[test]
fn no_name_hides_a_text() {
    let long = "a ".repeat(5_000);
    let block = |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
    let argument =
        |name: &str, value: Value| block(json!({ "type": "tool_use", "input": { name: value } }));
    let nested = |depth: usize| {
        let inner = format!("{}{long:?}{}", "[\"x\",".repeat(depth), "]".repeat(depth));
        format!(r#"{{"messages":[{{"content":{inner}}}]}}"#)
    };
    let objects = |depth: usize| {
        let inner = format!(
            r#"{}{{"y":0,{long:?}:0}}{}"#,
            r#"{"x":"#.repeat(depth),
            "}".repeat(depth)
        );
        format!(r#"{{"tools":{inner}}}"#)
    };
    let base64_first = format!("{}{long}", "AAAA".repeat(16));
    let url_first = format!("https://images.test/ {long}");
    let source =
        |data: &str| format!(r#"{{"messages":[{{"content":[{{"source":{{{data}}}}}]}}]}}"#);
    for request in [
        block(json!({ "type": "image_url", "image_url": { "url": long } })).to_string(),
        block(json!({ "type": "image_url", "image_url": long })).to_string(),
        block(json!({ "type": "file", "file": { "file_data": long } })).to_string(),
        block(
            json!({ "type": "file", "file": { "file_data": format!("data:text/plain,{long}") } }),
        )
        .to_string(),
        block(json!({ "type": "text", "data": long })).to_string(),
        block(json!({ "type": "input_audio", "input_audio": { "data": long } })).to_string(),
        block(json!({ "type": long })).to_string(),
        block(json!({ "source": { "type": "text", "data": base64_first } })).to_string(),
        block(json!({ "source": { "data": base64_first } })).to_string(),
        block(json!({ "source": { "type": "base64", "data": long } })).to_string(),
        source(&format!(
            r#""type":"text","type":"base64","data":{base64_first:?}"#
        )),
        source(&format!(
            r#""type":"base64","type":"text","data":{base64_first:?}"#
        )),
        source(&format!(
            r#""data":{base64_first:?},"x":{{}},"data":"AAAA","type":"text""#
        )),
        argument("url", url_first.clone().into()).to_string(),
        argument("data", base64_first.clone().into()).to_string(),
        argument(
            "type",
            json!(
                (0..2_500)
                    .map(|_| json!({ "type": "a a " }))
                    .collect::<Vec<_>>()
            ),
        )
        .to_string(),
        argument("list", json!((0..5_000).map(|_| -1.5).collect::<Vec<_>>())).to_string(),
        argument(&long, true.into()).to_string(),
        argument(
            "names",
            json!(
                (0..5_000)
                    .map(|n| (format!("a{n}"), 1))
                    .collect::<std::collections::BTreeMap<_, _>>()
            ),
        )
        .to_string(),
        json!({ "tools": [{ "url": url_first }] }).to_string(),
        json!({ "documents": [{ "text": long }] }).to_string(),
        json!({ "documents": [{ "url": url_first, "data": base64_first }] }).to_string(),
        json!({ "Messages": [{ "Content": long }] }).to_string(),
        format!(
            r#"{{"messages":[{{"content":[{{"input":{{"x":{}}}}}]}}]}}"#,
            "7".repeat(40_000)
        ),
        nested(124),
        nested(1_000),
        objects(126),
        objects(1_000),
    ] {
        let tokens = openai(&request).tokens;
        assert!(
            tokens >= 5_000,
            "{tokens}: {}",
            &request[..request.len().min(300)]
        );
    }
}

/// Servers may read another spelling of `true`. And the tokens come after the answer.
#[test]
fn a_response_in_the_background_is_a_400() {
    let none = HeaderMap::new();
    for value in [
        "true",
        "1",
        r#""true""#,
        "1e0",
        "[]",
        "{}",
        r#"{"a":false}"#,
        "true,\"background\":false",
    ] {
        for name in [
            "background",
            "b\\u0061ckground",
            "Background",
            "bac\u{212a}ground",
        ] {
            let request = format!(r#"{{"input":"a","{name}":{value}}}"#);
            for endpoint in [Endpoint::Responses, Endpoint::Completions] {
                let read = read(endpoint, &none, &request);
                assert_eq!(read.expect_err("it cannot be charged"), 400, "{request}");
            }
        }
    }
    for value in ["false", "null"] {
        let request = format!(r#"{{"input":"a","background":{value}}}"#);
        read(Endpoint::Responses, &none, &request).expect("it is read");
    }
    // Servers may read what is nearly JSON, or a form.
    for request in [
        "{'background':true}",
        "{input:1,background:true,}",
        "input=a&background=true",
    ] {
        read(Endpoint::Responses, &none, request).expect_err("it is not JSON");
    }
    // Upstreams may read what serde does not.
    let deep = format!("{}{}", "[".repeat(130), "]".repeat(130));
    let request = format!(r#"{{"input":"a","background":true,"tools":{deep}}}"#);
    assert_eq!(
        read(Endpoint::Responses, &none, &request).expect_err("it cannot be charged"),
        400
    );
}

/// Some servers take other values for true, and others refuse them.
#[test]
fn a_stream_is_asked_for_with_true() {
    for value in ["1", "0", r#""true""#, "{}", "[]"] {
        let request = format!(r#"{{"stream":{value}}}"#);
        let read = read(Endpoint::Completions, &HeaderMap::new(), &request);
        assert_eq!(
            read.expect_err("it is neither true nor false"),
            400,
            "{value}"
        );
    }
}

/// Servers recognise UTF-16 and UTF-32.
#[test]
fn a_request_in_another_encoding_is_a_400() {
    let request = r#"{"background":true,"input":"ä"}"#;
    let utf16 = request.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let utf32 = request
        .chars()
        .flat_map(|char| u32::from(char).to_be_bytes())
        .collect();
    let latin1 = request.chars().map(|char| char as u8).collect();
    for body in [utf16, utf32, latin1] {
        let body: Vec<u8> = body;
        for endpoint in [Endpoint::Responses, Endpoint::Completions] {
            let headers = HeaderMap::new();
            let read = Prompt::read(endpoint, &headers, Full::from(body.clone()), MAX_REQUEST);
            let (status, message) = tokio_test::block_on(read).expect_err("it is not UTF-8");
            assert_eq!(status, 400);
            assert!(message.ends_with("it is not in UTF-8"), "{message}");
        }
    }
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
            r#""stream_options":{"include_usage":true}"#
        } else {
            r#""include_usage":true"#
        };
        request["stream_options"]["include_usage"] = true.into();
        prop_assert_eq!(&serde_json::from_slice::<Value>(&sent).expect("JSON"), &request);
        let sent = std::str::from_utf8(&sent).expect("text");
        let is_all = sent.match_indices(added).any(|(at, _)| {
            let rest = &sent[at + added.len()..];
            let rest = rest.strip_prefix(',').unwrap_or(rest);
            [&sent[..at], rest].concat() == text
        });
        prop_assert!(is_all, "{} {}", sent, text);
    }
}
