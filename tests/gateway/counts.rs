//! How the gateway counts an answer.

use serde_json::{Value, json};

use crate::usage::Count;

/// The count after these events, with a prompt estimated at 100.
fn after(events: impl IntoIterator<Item = Value>) -> Count {
    let mut count = Count::new(100);
    for event in events {
        count.read_event(event.to_string().as_bytes());
    }
    count
}

fn total(events: impl IntoIterator<Item = Value>) -> u32 {
    after(events).total()
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

/// Some servers put many tokens into one delta.
#[test]
fn long_deltas_are_a_token_for_four_bytes() {
    assert_eq!(total([delta(&"a".repeat(40))]), 110);
    assert_eq!(total([delta(&"a".repeat(38)), delta("a"), delta("a")]), 110);
    let text = "a".repeat(40);
    assert_eq!(total([block(json!({ "text": text }))]), 110);
}

#[test]
fn reports_are_the_truth() {
    let many = || (0..10).map(|_| delta("a"));
    let last = json!({ "choices": [], "usage": used(7, 8) });
    assert_eq!(total(many().chain([last])), 15);
    let with_choice = json!({ "choices": [{ "delta": { "content": "a" } }], "usage": used(7, 8) });
    assert_eq!(total(many().chain([with_choice])), 15);
    // In the same chunk as each delta: any text after the last report is counted.
    let running =
        |tokens| json!({ "choices": [{ "delta": { "content": "a" } }], "usage": used(7, tokens) });
    assert_eq!(total([running(1), running(2), delta("a")]), 10);
    // Reasoning tokens that only the total contains.
    let thoughts = json!({ "prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 35 });
    assert_eq!(total([json!({ "choices": [], "usage": thoughts })]), 35);
    // Cached tokens are already included in the prompt.
    let cached = json!({
        "prompt_tokens": 7, "completion_tokens": 8, "cache_read_input_tokens": 5,
        "prompt_tokens_details": { "cached_tokens": 5 },
    });
    assert_eq!(total([json!({ "choices": [], "usage": cached })]), 15);
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
    // Known only at the end, or replaced by zero.
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
    assert_eq!(failed.total(), 0);
    failed.read_answer(br#"{"error":{"message":"too long"}}"#);
    assert_eq!(failed.total(), 0);
    failed.read_answer(json!({ "usage": used(7, 0) }).to_string().as_bytes());
    assert_eq!(failed.total(), 7);
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
        count.read_event(data.as_bytes());
        assert_eq!(count.total(), 100, "{data}");
    }
    count.read_event(br#"{"usage":{"completion_tokens":-1,"prompt_tokens":"many"}}"#);
    assert_eq!(count.total(), 100);
    let most = json!({ "usage": { "prompt_tokens": u64::MAX, "completion_tokens": u64::MAX } });
    assert_eq!(total([most]), u32::MAX);
}

#[test]
fn an_answer_that_is_no_stream_costs_what_it_reports() {
    let read = |answer: &[u8]| {
        let mut count = Count::new(100);
        count.read_answer(answer);
        count.total()
    };
    let of = |answer: Value| read(answer.to_string().as_bytes());
    assert_eq!(of(json!({ "choices": [], "usage": used(7, 8) })), 15);
    let usage = json!({ "input_tokens": 7, "cache_read_input_tokens": 2, "output_tokens": 8 });
    assert_eq!(of(json!({ "type": "message", "usage": usage })), 17);
    // Embeddings have no output.
    assert_eq!(
        of(json!({ "usage": { "prompt_tokens": 7, "total_tokens": 7 } })),
        7
    );
    // Without a report the length counts, and also if the answer was cut short.
    assert_eq!(read(&[b'a'; 40]), 110);
    let whole = json!({ "usage": used(7, 8), "text": "a" }).to_string();
    let half = &whole.as_bytes()[..40];
    assert_eq!(read(half), 110);
}
