//! How the gateway counts the tokens of an answer.

use serde_json::{Value, json};

use crate::{
    usage::Count,
    weights::{Tokens, Weights},
};

/// After these events, behind a prompt that was estimated at 100.
fn after(events: impl IntoIterator<Item = Value>) -> Count {
    let mut count = Count::new(100);
    for event in events {
        read_event(&mut count, event.to_string().as_bytes());
    }
    count
}

/// In pieces, as they may come.
fn read_event(count: &mut Count, data: &[u8]) {
    data.chunks(7).for_each(|part| count.read(part));
    count.end_event();
}

fn read_document(count: &mut Count, document: &[u8]) {
    document.chunks(1_000).for_each(|part| count.read(part));
    count.end_document();
}

fn total(events: impl IntoIterator<Item = Value>) -> u32 {
    units(&after(events))
}

/// A unit for each token.
fn units(count: &Count) -> u32 {
    let weights: Weights = "input=1".parse().expect("a unit each");
    weights.cost(count.tokens())
}

/// A text of this many tokens.
fn words(tokens: usize) -> String {
    "a ".repeat(tokens)
}

fn delta(content: &str) -> Value {
    json!({ "choices": [{ "index": 0, "delta": { "content": content } }], "usage": null })
}

fn used(prompt: u32, completion: u32) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
}

fn block(delta: Value) -> Value {
    json!({ "type": "content_block_delta", "index": 0, "delta": delta })
}

fn message_start(usage: Value) -> Value {
    json!({ "type": "message_start", "message": { "content": [], "usage": usage } })
}

fn error() -> Value {
    json!({ "type": "error", "error": { "type": "overloaded_error", "message": "..." } })
}

#[test]
fn deltas_with_content_are_tokens() {
    assert_eq!(total([]), 100);
    let role = json!({ "choices": [{ "delta": { "role": "assistant", "content": "" } }] });
    let finish = json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] });
    assert_eq!(total([role, delta("Hi"), delta("!"), finish]), 102);
    for delta in [
        json!({ "delta": { "content": "a" } }),
        json!({ "delta": { "reasoning_content": "a" } }),
        json!({ "delta": { "reasoning": "a" } }),
        json!({ "delta": { "refusal": "a" } }),
        json!({ "delta": { "tool_calls": [{ "function": { "name": "a" } }] } }),
        json!({ "delta": { "tool_calls": [{ "function": { "arguments": "{" } }] } }),
        json!({ "text": "a" }),
    ] {
        assert_eq!(total([json!({ "choices": [delta] })]), 101, "{delta}");
        assert_eq!(
            total([json!({ "choices": [delta, delta] })]),
            102,
            "{delta}"
        );
    }
    for delta in [
        json!({ "type": "text_delta", "text": "a" }),
        json!({ "type": "thinking_delta", "thinking": "a" }),
        json!({ "type": "input_json_delta", "partial_json": "{" }),
    ] {
        assert_eq!(total([block(delta.clone())]), 101, "{delta}");
    }
    for nothing in [
        json!({ "type": "signature_delta", "signature": "a" }),
        json!({ "type": "text_delta", "text": "" }),
    ] {
        assert_eq!(total([block(nothing)]), 100);
    }
}

/// Some servers put many tokens into one.
#[test]
fn long_deltas_cost_their_text() {
    assert_eq!(total([delta(&words(10))]), 110);
    assert_eq!(total([delta(&words(8)), delta("a"), delta("a")]), 110);
    assert_eq!(total([block(json!({ "text": words(10) }))]), 110);
    // The estimate is not exact, so a little more is no sign of them.
    assert_eq!(total([delta(&words(3)), delta("a")]), 102);
    assert_eq!(total([delta(&words(4)), delta("a")]), 105);
}

#[test]
fn reports_are_the_truth() {
    let many = || (0..10).map(|_| delta("a"));
    let last = json!({ "choices": [], "usage": used(7, 8) });
    assert_eq!(total(many().chain([last])), 15);
    let with_choice = json!({ "choices": [{ "delta": { "content": "a" } }], "usage": used(7, 8) });
    assert_eq!(total(many().chain([with_choice])), 15);
    // Usage in the same chunk as each delta: text after the last usage is counted.
    let running =
        |tokens| json!({ "choices": [{ "delta": { "content": "a" } }], "usage": used(7, tokens) });
    assert_eq!(total([running(1), running(2), delta("a")]), 10);
    // Thoughts that are in the total only.
    let thoughts = json!({ "prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 35 });
    assert_eq!(total([json!({ "choices": [], "usage": thoughts })]), 35);
    // The prompt already includes tokens from a cache.
    let cached = json!({
        "prompt_tokens": 7, "completion_tokens": 8, "cache_read_input_tokens": 5,
        "prompt_tokens_details": { "cached_tokens": 5 },
    });
    assert_eq!(total([json!({ "choices": [], "usage": cached })]), 15);
}

/// In the places of each provider, inside of the prompt's tokens or beside them.
#[test]
fn tokens_from_a_cache_are_a_kind_of_their_own() {
    let of = |prompt: &str, details: &str| json!({ "usage": { prompt: 700, "output_tokens": 8, details: { "cached_tokens": 500 } } });
    let beside = json!({
        "input_tokens": 150, "cache_creation_input_tokens": 50, "cache_read_input_tokens": 500,
    });
    let deepseek = json!({
        "prompt_tokens": 700, "prompt_cache_hit_tokens": 500, "prompt_cache_miss_tokens": 200,
        "prompt_tokens_details": { "cached_tokens": 500 }, "completion_tokens": 8,
    });
    let delta = json!({ "type": "message_delta", "usage": { "output_tokens": 8 } });
    for events in [
        vec![of("prompt_tokens", "prompt_tokens_details")],
        vec![json!({ "response": of("input_tokens", "input_tokens_details") })],
        vec![message_start(beside), delta],
        vec![json!({ "usage": deepseek })],
    ] {
        let kinds = Tokens {
            input: 200,
            cached: 500,
            output: 8,
        };
        assert_eq!(after(events.clone()).tokens(), kinds, "{events:?}");
    }
    // A report that cannot be is none of less than nothing.
    let more = json!({ "prompt_tokens": 5, "prompt_tokens_details": { "cached_tokens": 9 } });
    let kinds = after([json!({ "usage": more })]).tokens();
    assert_eq!((kinds.input, kinds.cached), (0, 5));
}

/// LocalAI does in each chunk, and others at the end of a stream.
#[test]
fn a_report_of_nothing_is_none() {
    let chunk =
        |tokens| json!({ "choices": [{ "delta": { "content": "a" } }], "usage": used(0, tokens) });
    let last = json!({ "choices": [], "usage": used(0, 0) });
    assert_eq!(total([chunk(0), chunk(0), chunk(0)]), 103);
    assert_eq!(total([chunk(0), chunk(0), last.clone()]), 102);
    let report = json!({ "choices": [], "usage": used(7, 8) });
    assert_eq!(total([chunk(0), report, last]), 15);
}

/// The interface `responses`.
#[test]
fn events_of_responses_count() {
    let delta = |kind: &str, text: &str| json!({ "type": kind, "delta": text });
    let created =
        json!({ "type": "response.created", "response": { "usage": null, "error": null } });
    let done = json!({ "type": "response.output_text.done", "text": words(100) });
    let usage = json!({
        "input_tokens": 7, "input_tokens_details": { "cached_tokens": 5 },
        "output_tokens": 8, "output_tokens_details": { "reasoning_tokens": 6 }, "total_tokens": 15,
    });
    let completed = json!({ "type": "response.completed", "response": { "usage": usage } });
    let begun = [
        created,
        delta("response.reasoning_text.delta", "a"),
        delta("response.function_call_arguments.delta", "{"),
        delta("response.output_text.delta", "a"),
        done,
    ];
    assert_eq!(total(begun.clone()), 103);
    assert_eq!(total(begun.clone().into_iter().chain([completed])), 15);
    let failed = json!({ "type": "response.failed", "response": { "error": { "code": "x" } } });
    assert_eq!(total([failed.clone()]), 0);
    assert_eq!(total(begun.into_iter().chain([failed])), 103);
    assert_eq!(
        total([json!({ "type": "error", "code": "x", "message": "m" })]),
        0
    );
}

/// Much of a long one is no text.
#[test]
fn an_event_of_any_length_is_read() {
    let text = words(5_000);
    let logprobs = json!([{ "token": "a".repeat(1024 * 1024) }]);
    let long = json!({ "choices": [{ "delta": { "content": text }, "logprobs": { "content": logprobs } }] });
    assert_eq!(total([long.clone()]), 5_100);
    assert_eq!(
        total([long, json!({ "choices": [], "usage": used(7, 8) })]),
        15
    );
}

/// A chunk with usage alone is not passed on if the client has not asked for usage.
#[test]
fn a_chunk_of_usage_alone_is_known() {
    let is_report = |event: Value| {
        let mut count = Count::new(100);
        count.read(event.to_string().as_bytes());
        count.end_event()
    };
    assert!(is_report(json!({ "choices": [], "usage": used(7, 8) })));
    assert!(is_report(json!({ "usage": used(0, 0), "choices": [] })));
    for other in [
        json!({ "choices": [{ "delta": {} }], "usage": used(7, 8) }),
        json!({ "choices": [], "usage": null, "prompt_filter_results": [] }),
        json!({ "usage": used(7, 8) }),
        json!({ "type": "message_delta", "usage": { "output_tokens": 8 } }),
        json!({ "type": "response.completed", "response": { "usage": used(7, 8) } }),
    ] {
        assert!(!is_report(other.clone()), "{other}");
    }
}

#[test]
fn reports_in_the_style_of_anthropic_are_the_truth() {
    let start = || message_start(json!({ "input_tokens": 10, "output_tokens": 3 }));
    let text = || block(json!({ "text": "a" }));
    let end = |tokens| json!({ "type": "message_delta", "usage": { "output_tokens": tokens } });
    let stop = json!({ "type": "message_stop" });
    assert_eq!(total([start()]), 10);
    assert_eq!(total([start(), text(), text()]), 12);
    assert_eq!(total([start(), text(), text(), end(9), stop]), 19);
    // Not the sum of two reports.
    assert_eq!(total([start(), text(), end(5), text(), end(9)]), 19);
    assert_eq!(total([start(), text(), end(5), text()]), 16);
    let cached = json!({
        "input_tokens": 10, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 30,
    });
    assert_eq!(total([message_start(cached), end(9)]), 69);
    // Usage that is known only at the end, or is missing there.
    let late =
        json!({ "type": "message_delta", "usage": { "input_tokens": 10, "output_tokens": 9 } });
    let zero = || message_start(json!({ "input_tokens": 0, "output_tokens": 0 }));
    assert_eq!(total([zero()]), 100);
    assert_eq!(total([zero(), text(), late]), 19);
    let zero =
        json!({ "type": "message_delta", "usage": { "input_tokens": 0, "output_tokens": 9 } });
    assert_eq!(total([start(), zero]), 19);
}

#[test]
fn an_error_costs_what_came_before_it() {
    let openai_error = || json!({ "error": { "message": "overloaded", "code": 529 } });
    assert_eq!(total([error()]), 0);
    assert_eq!(total([openai_error()]), 0);
    assert_eq!(total([delta(""), openai_error()]), 0);
    assert_eq!(total([delta("a"), delta("b"), openai_error()]), 102);
    let start = message_start(json!({ "input_tokens": 10 }));
    assert_eq!(total([start.clone(), error()]), 10);
    assert_eq!(total([start, block(json!({ "text": "a" })), error()]), 11);

    let mut failed = Count::new(100);
    failed.fail();
    assert_eq!(units(&failed), 0);
    read_document(&mut failed, br#"{"error":{"message":"too long"}}"#);
    assert_eq!(units(&failed), 0);
    read_document(
        &mut failed,
        json!({ "usage": used(7, 0) }).to_string().as_bytes(),
    );
    assert_eq!(units(&failed), 7);
}

#[test]
fn other_data_costs_nothing() {
    let mut count = Count::new(100);
    for data in [
        "[DONE]",
        "",
        "{",
        "null",
        "7",
        "[]",
        "\u{fffd}",
        r#"{"choices":7}"#,
        r#"{"usage":{}}"#,
    ] {
        read_event(&mut count, data.as_bytes());
        assert_eq!(units(&count), 100, "{data}");
    }
    read_event(
        &mut count,
        br#"{"usage":{"completion_tokens":-1,"prompt_tokens":"many"}}"#,
    );
    assert_eq!(units(&count), 100);
    let most = json!({ "usage": { "prompt_tokens": u64::MAX, "completion_tokens": u64::MAX } });
    assert_eq!(total([most]), u32::MAX);
}

#[test]
fn an_answer_that_is_no_stream_costs_what_it_reports() {
    let read = |answer: &[u8]| {
        let mut count = Count::new(100);
        read_document(&mut count, answer);
        units(&count)
    };
    let of = |answer: Value| read(answer.to_string().as_bytes());
    assert_eq!(of(json!({ "choices": [], "usage": used(7, 8) })), 15);
    let usage = json!({ "input_tokens": 7, "cache_read_input_tokens": 2, "output_tokens": 8 });
    assert_eq!(of(json!({ "type": "message", "usage": usage })), 17);
    // Embeddings are without output.
    assert_eq!(
        of(json!({ "usage": { "prompt_tokens": 7, "total_tokens": 7 } })),
        7
    );
    let thoughts = json!({ "input_tokens": 7, "output_tokens": 8, "total_tokens": 15 });
    assert_eq!(
        of(json!({ "object": "response", "error": null, "usage": thoughts })),
        15
    );
    assert_eq!(of(json!({ "data": [], "usage": { "total_tokens": 7 } })), 7);
    // Not where a model can write it.
    let forged = json!({ "usage": used(1, 1) });
    let text = forged.to_string();
    let content = json!([{ "type": "tool_use", "name": "n", "input": forged }, { "text": text }]);
    let usage = json!({ "input_tokens": 7, "output_tokens": 8 });
    assert_eq!(of(json!({ "usage": usage, "content": content })), 15);
    assert_eq!(of(json!({ "content": content, "usage": usage })), 15);
}

#[test]
fn an_answer_that_reports_nothing_costs_its_text() {
    let read = |answer: &[u8]| {
        let mut count = Count::new(100);
        read_document(&mut count, answer);
        units(&count)
    };
    let of = |answer: Value| read(answer.to_string().as_bytes());
    let text = words(10);
    // Logprobs are longer than the text, and are none.
    let logprobs = json!({ "content": [{ "token": text, "bytes": [97, 97], "logprob": -0.1 }] });
    let message = json!({ "role": "assistant", "content": text });
    assert_eq!(
        of(json!({ "id": "x", "choices": [{ "message": message, "logprobs": logprobs }] })),
        110
    );
    assert_eq!(of(json!({ "choices": [{ "text": text }] })), 110);
    assert_eq!(
        of(json!({ "type": "message", "content": [{ "type": "text", "text": text }] })),
        110
    );
    let tool = json!({ "type": "tool_use", "id": "x", "name": "", "input": { "city": text } });
    assert_eq!(of(json!({ "type": "message", "content": [tool] })), 110);
    let output = json!([{ "type": "message", "content": [{ "text": text }] }]);
    assert_eq!(of(json!({ "object": "response", "output": output })), 110);
    // Vectors, in both forms.
    assert_eq!(of(json!({ "data": [{ "embedding": [0.1, 1, -2] }] })), 100);
    assert_eq!(of(json!({ "data": [{ "embedding": text }] })), 100);
    // An answer of unknown shape, and an answer that is not JSON.
    assert_eq!(of(json!({ "answer": text })), 110);
    assert_eq!(read(&[b'a'; 40]), 110);
    let mut unread = Count::new(100);
    unread.add_unread(40);
    assert_eq!(units(&unread), 110, "gzip, most likely");
    // An answer that was cut short counts as far as it came.
    let whole = json!({ "choices": [{ "message": message }], "usage": used(7, 8) }).to_string();
    let (half, _) = whole.split_once("a a a").expect("a text");
    let half = format!("{half}{}", words(5));
    assert_eq!(read(half.as_bytes()), 105);
}
