//! What an answer has cost so far, in tokens: as the upstream reports it, else estimated.
//!
//! It reads answers by their shape, and needs not know who asked how: the chat completions and completions of OpenAI have
//! `choices`, its responses `response` or `output`, the messages of Anthropic `delta` or `content`. Tests:
//! `tests/gateway/counts.rs`.

use std::mem;

use crate::json::{Item, Scanner};

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
    scanner: Scanner,
    seen: Seen,
}

/// What an event, or an answer that is no stream, has in it so far.
#[derive(Debug, Default)]
struct Seen {
    usage: Usage,
    /// At the beginning of a message: its few tokens of output come again as deltas.
    first_usage: Usage,
    deltas: u64,
    /// Of texts that the model has written.
    bytes: u64,
    /// `bytes` when the last choice ended.
    counted: u64,
    /// Of texts in an answer of unknown shape.
    others: u64,
    choices: Option<u64>,
    has_error: bool,
    has_encoded: bool,
    length: u64,
}

#[derive(Debug, Default)]
struct Usage {
    prompt: Option<u64>,
    /// What is read from a cache, or written into one. It is in `prompt`, but not in `input`.
    cached: u64,
    input: Option<u64>,
    answer: Option<u64>,
    total: Option<u64>,
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
            scanner: Scanner::default(),
            seen: Seen::default(),
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

    /// Reads the next part of an event's data, or of an answer that is no stream.
    pub(crate) fn read(&mut self, part: &[u8]) {
        let seen = &mut self.seen;
        seen.length += part.len() as u64;
        self.scanner
            .read(part, |place, item| seen.note(place, item));
    }

    /// The event is whole. Returns whether it has the usage of the stream and nothing else.
    pub(crate) fn end_event(&mut self) -> bool {
        let seen = self.end();
        let is_report = seen.choices == Some(0) && seen.usage.is_known();
        self.add(seen.deltas, seen.bytes);
        self.report(&seen);
        is_report
    }

    /// An answer that is no stream has ended, or was cut off. Without a report its texts count.
    pub(crate) fn end_document(&mut self) {
        let seen = self.end();
        self.report(&seen);
        if !seen.usage.is_known() && !seen.has_error {
            self.bytes += seen.texts();
        }
    }

    /// Counts bytes of an answer that nobody can read.
    pub(crate) fn add_unread(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    fn end(&mut self) -> Seen {
        let mut seen = mem::take(&mut self.seen);
        self.scanner.finish(|place, item| seen.note(place, item));
        seen
    }

    fn add(&mut self, deltas: u64, bytes: u64) {
        self.has_begun |= bytes > 0;
        self.deltas += deltas;
        self.bytes += bytes;
    }

    fn report(&mut self, seen: &Seen) {
        self.report_prompt(&seen.first_usage);
        self.report_prompt(&seen.usage);
        self.report_answer(&seen.usage);
        if seen.has_error {
            self.fail();
        }
    }

    fn report_prompt(&mut self, usage: &Usage) {
        let input = usage.input.map(|input| input.saturating_add(usage.cached));
        let only_total = usage.total.filter(|_| usage.answer.is_none());
        let Some(reported) = usage.prompt.or(input).or(only_total) else {
            return;
        };
        self.has_begun = true;
        // Servers that do not know it yet, or any more, report 0.
        if reported > 0 {
            self.prompt = reported;
        }
    }

    /// Reports add up all that was before.
    fn report_answer(&mut self, usage: &Usage) {
        // Some count thoughts in the total only.
        let rest = usage.total.map(|total| total.saturating_sub(self.prompt));
        let Some(reported) = usage.answer.max(rest) else {
            return;
        };
        self.has_begun = true;
        // Some report 0 in each chunk, or once more at the end.
        if reported > 0 {
            (self.answer, self.deltas, self.bytes) = (reported, 0, 0);
        }
    }
}

impl Seen {
    /// Length of the texts in an answer that is no stream.
    fn texts(&self) -> u64 {
        match (self.bytes, self.others) {
            (0, 0) if self.has_encoded => 0,
            // It is no JSON.
            (0, 0) => self.length,
            (0, others) => others,
            (written, _) => written,
        }
    }

    fn note(&mut self, place: &str, item: Item<'_>) {
        match item {
            Item::Number(_) | Item::Other(_) if is_encoded(place) => self.has_encoded = true,
            Item::Number(number) => self.note_number(place, number),
            Item::Text(bytes, text) => {
                if place == ".type" && text == b"error" || place == ".error" {
                    self.has_error = true;
                } else if is_written(place) {
                    self.bytes += bytes;
                } else if is_encoded(place) {
                    self.has_encoded = true;
                } else {
                    self.others += bytes;
                }
                // It is that of a response, and no object.
                self.deltas += u64::from(place == ".delta" && bytes > 0);
            }
            Item::End => match place {
                ".choices[]" => {
                    *self.choices.get_or_insert(0) += 1;
                    self.deltas += u64::from(self.bytes > self.counted);
                    self.counted = self.bytes;
                }
                ".choices" => drop(self.choices.get_or_insert(0)),
                ".delta" => self.deltas += u64::from(self.bytes > 0),
                ".error" | ".response.error" => self.has_error = true,
                _ => {}
            },
            Item::Other(_) => {}
        }
    }

    fn note_number(&mut self, place: &str, number: u64) {
        let Some((parent, name)) = place.rsplit_once('.') else {
            return;
        };
        let usage = match parent {
            ".usage" | ".response.usage" => &mut self.usage,
            ".message.usage" => &mut self.first_usage,
            _ => return,
        };
        match name {
            "prompt_tokens" => usage.prompt = Some(number),
            "input_tokens" => usage.input = Some(number),
            "completion_tokens" | "output_tokens" => usage.answer = Some(number),
            "total_tokens" => usage.total = Some(number),
            "cache_creation_input_tokens" | "cache_read_input_tokens" => {
                usage.cached = usage.cached.saturating_add(number);
            }
            _ => {}
        }
    }
}

impl Usage {
    fn is_known(&self) -> bool {
        let known = [self.prompt, self.input, self.answer, self.total];
        known.iter().any(Option::is_some)
    }
}

/// Whether the model has written the text at this place.
fn is_written(place: &str) -> bool {
    let message = [".choices[].delta.", ".choices[].message."];
    let message = message
        .into_iter()
        .find_map(|begin| place.strip_prefix(begin));
    if let Some(rest) = message {
        return [
            "content",
            "content[].text",
            "content[].thinking[].text",
            "reasoning_content",
            "reasoning",
            "refusal",
            "tool_calls[].function.name",
            "tool_calls[].function.arguments",
            "function_call.name",
            "function_call.arguments",
        ]
        .contains(&rest);
    }
    [
        // Completions.
        ".choices[].text",
        // Events of responses, and their documents.
        ".delta",
        ".output[].content[].text",
        ".output[].content[].refusal",
        ".output[].summary[].text",
        ".output[].name",
        ".output[].arguments",
        // Events of messages, and their documents.
        ".delta.text",
        ".delta.thinking",
        ".delta.partial_json",
        ".content[].text",
        ".content[].thinking",
        ".content[].name",
    ]
    .contains(&place)
        || place.starts_with(".content[].input.")
}

/// Vectors and images have no tokens of text.
fn is_encoded(place: &str) -> bool {
    let name = place.rsplit('.').next().unwrap_or_default();
    let name = name.trim_end_matches("[]");
    ["embedding", "b64_json", "data", "url"].contains(&name)
}
