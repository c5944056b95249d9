//! What an answer has cost so far, in tokens: as the upstream reports it, else estimated.
//!
//! It reads answers by their shape, and needs not know who asked how: those in the style of OpenAI have `choices`, those in
//! the style of Anthropic a `type`. Tests: `tests/gateway/counts.rs`.

use serde_json::Value;

/// Bytes of text of one token, roughly, in English; the common rule of thumb.
pub(crate) const BYTES_PER_TOKEN: u64 = 4;

/// Tokens of a prompt and its answer.
///
/// The upstream's reports are the truth. Between them each delta with content counts as a token, which it is for most models,
/// but at least one for four bytes: some servers put many tokens into a delta. (By bytes alone, a stream of digits or symbols
/// would count too little.)
#[derive(Debug)]
pub(crate) struct Count {
    /// Estimated until it is reported.
    prompt: u64,
    /// As last reported.
    answer: u64,
    /// Since the last report.
    deltas: u64,
    bytes: u64,
    has_begun: bool,
    has_failed: bool,
}

impl Count {
    /// With an estimate of the prompt.
    pub(crate) fn new(prompt: u32) -> Self {
        Self {
            prompt: prompt.into(),
            answer: 0,
            deltas: 0,
            bytes: 0,
            has_begun: false,
            has_failed: false,
        }
    }

    /// Tokens so far. None if the upstream failed before it had begun.
    pub(crate) fn total(&self) -> u32 {
        if self.has_failed && !self.has_begun {
            return 0;
        }
        let unreported = self.deltas.max(self.bytes / BYTES_PER_TOKEN);
        let total = self.prompt.saturating_add(self.answer);
        let total = total.saturating_add(unreported);
        u32::try_from(total).unwrap_or(u32::MAX)
    }

    /// The upstream failed. Later reports count nevertheless.
    pub(crate) fn fail(&mut self) {
        self.has_failed = true;
    }

    /// Reads the data of an event of a stream.
    pub(crate) fn read_event(&mut self, data: &[u8]) {
        // There is data that is not JSON: `[DONE]`.
        let Ok(event) = serde_json::from_slice::<Value>(data) else {
            return;
        };
        for choice in event["choices"].as_array().into_iter().flatten() {
            self.add_delta(openai_bytes(choice));
        }
        if event["type"] == "content_block_delta" {
            self.add_delta(anthropic_bytes(&event["delta"]));
        }
        if event["type"] == "message_start" {
            // The few tokens of output that it reports come again as deltas.
            self.report_prompt(&event["message"]["usage"]);
        }
        self.read_report(&event);
    }

    /// Reads a whole answer that is no stream. Without a report its length counts.
    pub(crate) fn read_answer(&mut self, answer: &[u8]) {
        let parsed = serde_json::from_slice(answer).unwrap_or(Value::Null);
        self.read_report(&parsed);
        if !self.has_begun {
            self.add_unread(answer.len() as u64);
        }
    }

    /// Counts bytes of an answer that nobody reads.
    pub(crate) fn add_unread(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    fn add_delta(&mut self, bytes: u64) {
        if bytes > 0 {
            self.has_begun = true;
            self.deltas += 1;
            self.bytes += bytes;
        }
    }

    fn read_report(&mut self, value: &Value) {
        self.report_prompt(&value["usage"]);
        self.report_answer(&value["usage"]);
        if !value["error"].is_null() {
            self.fail();
        }
    }

    fn report_prompt(&mut self, usage: &Value) {
        let count = |name: &str| usage[name].as_u64();
        let uncached = || {
            // Beside what is read from a cache, or written into one.
            let cached = ["cache_creation_input_tokens", "cache_read_input_tokens"];
            let cached = cached.into_iter().filter_map(count);
            Some(cached.fold(count("input_tokens")?, u64::saturating_add))
        };
        let Some(reported) = count("prompt_tokens").or_else(uncached) else {
            return;
        };
        self.has_begun = true;
        // Servers that do not know it yet, or any more, report 0.
        if reported > 0 {
            self.prompt = reported;
        }
    }

    /// Reports add up all that was before.
    fn report_answer(&mut self, usage: &Value) {
        let count = |name: &str| usage[name].as_u64();
        let answer = count("completion_tokens").or_else(|| count("output_tokens"));
        // Some count thoughts in the total only.
        let total = count("total_tokens");
        let rest = total.map(|total| total.saturating_sub(self.prompt));
        let Some(reported) = answer.max(rest) else {
            return;
        };
        self.has_begun = true;
        (self.answer, self.deltas, self.bytes) = (reported, 0, 0);
    }
}

/// Text in a choice of a chunk.
fn openai_bytes(choice: &Value) -> u64 {
    let delta = &choice["delta"];
    let names = ["content", "reasoning_content", "reasoning", "refusal"];
    let texts = names.into_iter().map(|name| &delta[name]);
    let calls = delta["tool_calls"].as_array().into_iter().flatten();
    let calls = calls.flat_map(|call| [&call["function"]["name"], &call["function"]["arguments"]]);
    // The older kind of completions has no deltas.
    texts.chain(calls).chain([&choice["text"]]).map(bytes).sum()
}

/// Text in a delta of a content block.
fn anthropic_bytes(delta: &Value) -> u64 {
    let names = ["text", "thinking", "partial_json"];
    names.into_iter().map(|name| bytes(&delta[name])).sum()
}

fn bytes(text: &Value) -> u64 {
    text.as_str().map_or(0, |text| text.len() as u64)
}
