//! Answers of language models in two dialects, with their quirks, and what each of them costs.

use std::{io::Write, mem, sync::OnceLock};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};

use crate::unreported;

/// Estimated tokens of the prompt before each of them.
pub(crate) const ESTIMATE: u64 = 1_000;
/// As the upstream reports it.
const PROMPT: u64 = 1_200;
pub(crate) const OPENAI: &str = "/v1/chat/completions";
pub(crate) const ANTHROPIC: &str = "/v1/messages";
/// Longer than a proxy's buffer for an answer.
pub(crate) const MIB: usize = 1024 * 1024;

/// An answer, which the upstream gives to requests with its name in `x-answer`.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, &'static str)>,
    /// Each is a chunk of HTTP/1.
    pub(crate) pieces: Vec<Bytes>,
    /// The body as the client receives it, if it differs.
    pub(crate) decoded: Option<Bytes>,
    pub(crate) end: End,
    /// The settled cost, including the prompt.
    pub(crate) tokens: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Whole,
    /// The connection breaks when the test says so.
    Cut,
    /// Nothing more comes, and no end.
    Open,
}

impl Answer {
    pub(crate) fn new(
        name: &'static str,
        path: &'static str,
        pieces: Vec<Bytes>,
        tokens: u64,
    ) -> Self {
        Self {
            name,
            path,
            status: 200,
            headers: vec![("content-type", "text/event-stream; charset=utf-8")],
            pieces,
            decoded: None,
            end: End::Whole,
            tokens,
        }
    }

    pub(crate) fn document(
        name: &'static str,
        path: &'static str,
        document: Value,
        tokens: u64,
    ) -> Self {
        let pieces = cut(&document.to_string(), 100);
        Self {
            headers: vec![("content-type", "application/json")],
            ..Self::new(name, path, pieces, tokens)
        }
    }

    fn ending(self, end: End) -> Self {
        Self { end, ..self }
    }

    fn with_status(self, status: u16) -> Self {
        Self { status, ..self }
    }

    fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.retain(|(other, _)| *other != name);
        self.headers.push((name, value));
        self
    }

    /// Compresses each piece on its own.
    fn gzipped(mut self) -> Self {
        self.decoded = Some(self.pieces.concat().into());
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        for piece in &mut self.pieces {
            encoder.write_all(piece).expect("memory");
            encoder.flush().expect("memory");
            *piece = mem::take(encoder.get_mut()).into();
        }
        if self.end == End::Whole {
            self.pieces.push(encoder.finish().expect("memory").into());
        }
        self.with_header("content-encoding", "gzip")
    }

    /// The body as the client receives it.
    pub(crate) fn body(&self) -> Vec<u8> {
        match &self.decoded {
            Some(decoded) => decoded.to_vec(),
            None => self.pieces.concat(),
        }
    }

    pub(crate) fn is_stream(&self) -> bool {
        let (_, media) = self.headers[0];
        media.starts_with("text/event-stream") && self.headers.len() == 1
    }

    /// Length of what passes before the end: an event that is cut waits for its end.
    pub(crate) fn passing(&self) -> usize {
        let body = self.body();
        let mut ends = body.windows(2).rev();
        let unfinished = if self.is_stream() && self.end != End::Whole {
            ends.position(|end| end == b"\n\n")
        } else {
            None
        };
        body.len() - unfinished.unwrap_or(0)
    }
}

pub(crate) fn named(name: &str) -> Answer {
    let mut all = all().iter();
    let answer = all.find(|answer| answer.name == name);
    answer.unwrap_or_else(|| panic!("no answer {name}")).clone()
}

/// Some are long: they are made once.
pub(crate) fn all() -> &'static [Answer] {
    static ALL: OnceLock<Vec<Answer>> = OnceLock::new();
    ALL.get_or_init(made)
}

fn made() -> Vec<Answer> {
    let answers = [
        openai(),
        openai_others(),
        openai_failing(),
        anthropic(),
        unread(),
        unreported::answers(),
    ];
    answers.into_iter().flatten().collect()
}

/// Text of five deltas, with characters of one to four bytes.
const DELTAS: [&str; 5] = ["Gr", "üß", " €", " 𝄞", "!"];

fn openai() -> Vec<Answer> {
    let text = openai_stream("\n");
    let used = PROMPT + 7;
    let of = |name, pieces, tokens| Answer::new(name, OPENAI, pieces, tokens);
    let long_document = json!({ "text": "a".repeat(MIB), "usage": openai_usage()["usage"] });
    let (unfinished, _) = text.split_once("\ndata: [DONE]").expect("an end");
    let unfinished = unfinished.to_owned();
    let pretty = |data: Value| {
        let text = format!("{data:#}").replace('\n', "\ndata: ");
        Bytes::from(format!("data: {text}\n\n"))
    };
    vec![
        of("openai", events(&text), used),
        of("openai-crlf", events(&openai_stream("\r\n")), used),
        of("openai-cr", events(&openai_stream("\r")), used),
        of("openai-split", cut(&text, 1), used),
        of("openai-split-crlf", cut(&openai_stream("\r\n"), 1), used),
        of("openai-merged", vec![text.clone().into()], used),
        of(
            "openai-without-the-last-line",
            vec![unfinished.into()],
            used,
        ),
        of(
            "openai-comments",
            [
                vec![": PROCESSING\n\n:\n\n".into()],
                events(&text.replace("data: ", ": keep-alive\ndata: ")),
            ]
            .concat(),
            used,
        ),
        of(
            "openai-lines",
            vec![
                pretty(chunk(&json!({ "content": "a" }))),
                pretty(openai_usage()),
            ],
            used,
        ),
        of(
            "openai-usage-in-the-last-chunk",
            deltas(5)
                .chain([usage_beside_a_choice()])
                .map(event)
                .chain([DONE.into()])
                .collect(),
            used,
        ),
        of(
            "openai-without-usage",
            deltas(5).map(event).chain([DONE.into()]).collect(),
            ESTIMATE + 5,
        ),
        of(
            "openai-long-event",
            vec![
                event(chunk(&json!({ "content": "a".repeat(MIB) }))),
                event(openai_usage()),
            ],
            used,
        ),
        of("openai-open", deltas(3).map(event).collect(), ESTIMATE + 3).ending(End::Open),
        Answer::document("openai-document", OPENAI, openai_document(), used),
        Answer::document(
            "openai-document-without-usage",
            OPENAI,
            Value::from("a ".repeat(100)),
            ESTIMATE + 100,
        ),
        Answer::document("openai-long-document", OPENAI, long_document, used),
    ]
}

/// Other interfaces in the style of OpenAI, and other servers.
fn openai_others() -> Vec<Answer> {
    let of = |name, path, events: Vec<Bytes>, tokens| Answer::new(name, path, events, tokens);
    let usage = || openai_usage()["usage"].clone();
    let response = |kind: &str, usage: Value| {
        let event = json!({ "type": kind, "response": { "error": null, "usage": usage } });
        Bytes::from(named_event("\n", &event))
    };
    let text = |text: &str| {
        let event = json!({ "type": "response.output_text.delta", "delta": text });
        Bytes::from(named_event("\n", &event))
    };
    let begun = || {
        let begin = [response("response.created", Value::Null)];
        begin.into_iter().chain(DELTAS.map(text))
    };
    let used = json!({ "input_tokens": PROMPT, "output_tokens": 7, "total_tokens": PROMPT + 7 });
    let completed = response("response.completed", used.clone());
    let completion = |text: &str| event(json!({ "choices": [{ "index": 0, "text": text }] }));
    let nothing = json!({ "prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0 });
    let with_nothing = |mut chunk: Value| {
        chunk["usage"] = nothing.clone();
        event(chunk)
    };
    let logprobs = json!([{ "token": "a".repeat(MIB) }]);
    let mut long = chunk(&json!({ "content": "a ".repeat(5_000) }));
    long["choices"][0]["logprobs"] = json!({ "content": logprobs });
    let vector = vec![0.123_456_789; 1_536];
    let vectors: Vec<_> = (0..100)
        .map(|index| json!({ "index": index, "embedding": vector }))
        .collect();
    let call = |call: Value| {
        event(chunk(
            &json!({ "tool_calls": [{ "index": 0, "function": call }] }),
        ))
    };
    let tools = vec![
        call(json!({ "name": "weather", "arguments": "" })),
        call(json!({ "arguments": r#"{"city":"# })),
        call(json!({ "arguments": r#""Kyiv"}"# })),
        event(openai_usage()),
        DONE.into(),
    ];
    let of_prompt = json!({ "prompt_tokens": 120, "total_tokens": 120 });
    let embeddings = json!({ "data": vectors, "model": "small", "usage": of_prompt });
    assert!(embeddings.to_string().len() > MIB);
    vec![
        of(
            "responses",
            "/v1/responses",
            begun().chain([completed]).collect(),
            PROMPT + 7,
        ),
        of(
            "responses-open",
            "/v1/responses",
            begun().collect(),
            ESTIMATE + 5,
        )
        .ending(End::Open),
        Answer::document(
            "responses-document",
            "/v1/responses",
            json!({ "object": "response", "error": null, "output": [], "usage": used }),
            PROMPT + 7,
        ),
        of("openai-tools", OPENAI, tools, PROMPT + 7),
        of(
            "completions",
            "/v1/completions",
            DELTAS
                .map(completion)
                .into_iter()
                .chain([event(openai_usage()), DONE.into()])
                .collect(),
            PROMPT + 7,
        ),
        Answer::document("embeddings", "/v1/embeddings", embeddings, 120),
        // LocalAI.
        of(
            "openai-zero-in-each-chunk",
            OPENAI,
            deltas(5).map(with_nothing).chain([DONE.into()]).collect(),
            ESTIMATE + 5,
        ),
        of(
            "openai-zero-at-the-end",
            OPENAI,
            [
                event(usage_beside_a_choice()),
                event(json!({ "choices": [], "usage": nothing })),
            ]
            .into(),
            PROMPT + 7,
        ),
        of(
            "openai-long-event-without-usage",
            OPENAI,
            vec![event(long)],
            ESTIMATE + 5_000,
        ),
        Answer::document(
            "openai-usage-first",
            OPENAI,
            json!({ "a": usage(), "usage": usage(), "z": "a".repeat(MIB) }),
            PROMPT + 7,
        ),
    ]
}

fn openai_failing() -> Vec<Answer> {
    let of = |name, pieces, tokens| Answer::new(name, OPENAI, pieces, tokens);
    let error = || json!({ "error": { "message": "The engine is overloaded", "code": 503 } });
    let half = event(chunk(&json!({ "content": "never seen" })));
    let half = half.slice(..half.len() / 2);
    let half_document = Bytes::from(format!("{{\"choices\": [\"{}", "a ".repeat(43)));
    assert_eq!(half_document.len(), 100);
    vec![
        of("openai-error-first", vec![event(error())], 0),
        of(
            "openai-error-later",
            deltas(2).chain([error()]).map(event).collect(),
            ESTIMATE + 2,
        ),
        of(
            "openai-cut-in-an-event",
            deltas(3).map(event).chain([half]).collect(),
            ESTIMATE + 3,
        )
        .ending(End::Cut),
        of("openai-cut-before-the-first-event", vec![], 0).ending(End::Cut),
        of("openai-document-cut", vec![half_document], ESTIMATE + 43)
            .with_header("content-type", "application/json")
            .ending(End::Cut),
        Answer::document("openai-400", OPENAI, error(), 0).with_status(400),
        Answer::document("openai-401", OPENAI, error(), 0).with_status(401),
        Answer::document("openai-429", OPENAI, error(), 0).with_status(429),
        of("openai-503", vec!["no server".into()], 0)
            .with_header("content-type", "text/plain")
            .with_status(503),
        of("openai-empty", vec![], ESTIMATE),
    ]
}

fn anthropic() -> Vec<Answer> {
    let text = anthropic_stream("\n");
    let used = PROMPT + 30;
    let of = |name, pieces, tokens| Answer::new(name, ANTHROPIC, pieces, tokens);
    let begun = |deltas: usize| {
        // The start of the message and of a block, a ping, and deltas.
        let events: Vec<_> = events(&text).into_iter().take(3 + deltas).collect();
        assert!(events.last().expect("one").ends_with(b"\n\n"));
        events
    };
    let error = json!({ "type": "error", "error": { "type": "overloaded_error" } });
    let failing = |deltas| [begun(deltas), vec![named_event("\n", &error).into()]].concat();
    let usage = json!({
        "input_tokens": 1_000, "cache_creation_input_tokens": 50, "cache_read_input_tokens": 150,
        "output_tokens": 30,
    });
    let document = json!({ "type": "message", "content": [], "usage": usage });
    let tools = anthropic_stream("\n").replace("text_delta", "input_json_delta");
    let tools = events(&tools.replace(r#""text":"#, r#""partial_json":"#));
    vec![
        of("anthropic", events(&text), used),
        of("anthropic-crlf", cut(&anthropic_stream("\r\n"), 7), used),
        of("anthropic-merged", vec![text.clone().into()], used),
        of("anthropic-open", begun(3), PROMPT + 3).ending(End::Open),
        of("anthropic-cut", begun(2), PROMPT + 2).ending(End::Cut),
        of("anthropic-error-later", failing(2), PROMPT + 2),
        of(
            "anthropic-error-first",
            vec![named_event("\n", &error).into()],
            0,
        ),
        of("anthropic-tools", tools, used),
        Answer::document("anthropic-document", ANTHROPIC, document, used),
        Answer::document(
            "anthropic-document-without-usage",
            ANTHROPIC,
            json!({ "type": "message", "content": [{ "type": "text", "text": "a ".repeat(100) }] }),
            ESTIMATE + 100,
        ),
        Answer::document("anthropic-529", ANTHROPIC, error.clone(), 0).with_status(529),
    ]
}

/// Nobody has asked for gzip. The length of what cannot be read counts.
fn unread() -> Vec<Answer> {
    let text = openai_stream("\n");
    let used = PROMPT + 7;
    let open = deltas(3).map(event).collect();
    vec![
        Answer::new("openai-gzip", OPENAI, events(&text), used).gzipped(),
        Answer::new("openai-gzip-merged", OPENAI, vec![text.into()], used).gzipped(),
        Answer::new("openai-gzip-open", OPENAI, open, ESTIMATE + 3)
            .ending(End::Open)
            .gzipped(),
        Answer::document("openai-gzip-document", OPENAI, openai_document(), used).gzipped(),
        Answer::new(
            "openai-unknown-coding",
            OPENAI,
            vec!["?".repeat(400).into()],
            ESTIMATE + 100,
        )
        .with_header("content-encoding", "x-unknown"),
        Answer::new("openai-text", OPENAI, vec!["hello".into()], ESTIMATE + 1)
            .with_header("content-type", "text/plain"),
    ]
}

const DONE: &str = "data: [DONE]\n\n";

pub(crate) fn event(data: Value) -> Bytes {
    format!("data: {data}\n\n").into()
}

fn named_event(line_end: &str, data: &Value) -> String {
    let name = data["type"].as_str().expect("a type");
    format!("event: {name}{line_end}data: {data}{line_end}{line_end}")
}

/// A chunk for each event.
fn events(stream: &str) -> Vec<Bytes> {
    let blank = ["\r\n\r\n", "\n\n", "\r\r"];
    let blank = blank.into_iter().find(|blank| stream.contains(blank));
    let events = stream.split_inclusive(blank.expect("events"));
    events.map(|event| Bytes::from(event.to_owned())).collect()
}

/// Chunks of this length, wherever that cuts characters.
fn cut(text: &str, length: usize) -> Vec<Bytes> {
    let pieces = text.as_bytes().chunks(length.max(text.len() / 10_000));
    pieces.map(Bytes::copy_from_slice).collect()
}

pub(crate) fn chunk(delta: &Value) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "usage": null,
        "choices": [{ "index": 0, "delta": delta, "finish_reason": null }],
    })
}

/// The first deltas, after the chunk that begins each stream.
fn deltas(count: usize) -> impl Iterator<Item = Value> {
    let role = json!({ "role": "assistant", "content": "" });
    let texts = DELTAS.into_iter().take(count);
    let texts = texts.map(|text| json!({ "content": text }));
    [role].into_iter().chain(texts).map(|delta| chunk(&delta))
}

fn openai_usage() -> Value {
    let usage = json!({
        "prompt_tokens": PROMPT, "completion_tokens": 7, "total_tokens": PROMPT + 7,
        "prompt_tokens_details": { "cached_tokens": 200 },
    });
    json!({ "object": "chat.completion.chunk", "choices": [], "usage": usage })
}

fn usage_beside_a_choice() -> Value {
    let mut last = chunk(&json!({}));
    last["choices"][0]["finish_reason"] = "stop".into();
    last["usage"] = openai_usage()["usage"].clone();
    last
}

fn openai_stream(line_end: &str) -> String {
    let mut finish = chunk(&json!({}));
    finish["choices"][0]["finish_reason"] = "stop".into();
    let events = deltas(5).chain([finish, openai_usage()]);
    let data = events.map(|event| event.to_string());
    let data = data.chain(["[DONE]".to_owned()]);
    data.map(|data| format!("data: {data}{line_end}{line_end}"))
        .collect()
}

fn openai_document() -> Value {
    let message = json!({ "role": "assistant", "content": DELTAS.concat() });
    json!({
        "object": "chat.completion", "usage": openai_usage()["usage"],
        "choices": [{ "index": 0, "message": message, "finish_reason": "stop" }],
    })
}

fn anthropic_stream(line_end: &str) -> String {
    let usage = json!({
        "input_tokens": 1_000, "cache_creation_input_tokens": 50, "cache_read_input_tokens": 150,
        "output_tokens": 2,
    });
    let text = |text: &str| {
        let delta = json!({ "type": "text_delta", "text": text });
        json!({ "type": "content_block_delta", "index": 0, "delta": delta })
    };
    let block = json!({ "type": "text", "text": "" });
    let begin = [
        json!({ "type": "message_start", "message": { "content": [], "usage": usage } }),
        json!({ "type": "content_block_start", "index": 0, "content_block": block }),
        json!({ "type": "ping" }),
    ];
    let end = [
        json!({ "type": "content_block_stop", "index": 0 }),
        json!({
            "type": "message_delta", "delta": { "stop_reason": "end_turn" },
            "usage": { "output_tokens": 30 },
        }),
        json!({ "type": "message_stop" }),
    ];
    let events = begin.into_iter().chain(DELTAS.map(text)).chain(end);
    events.map(|event| named_event(line_end, &event)).collect()
}
