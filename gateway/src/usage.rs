//! Counts the tokens of a response: as reported by the upstream, or else estimated.
//!
//! Responses are recognised by their members: OpenAI's completions have `choices`, its responses API `response` or `output`,
//! and Anthropic's messages `delta` or `content`. Tests:
//! `tests/gateway/counts.rs`.

use std::mem;

use crate::{
    estimate::{PER_TOKEN, UNREAD_BYTE},
    json::{Item, Scanner},
    weights::Tokens,
};

/// Tokens of a prompt and its response.
///
/// The upstream's reports are exact. Between reports each delta counts as one token, which most servers send, or as the
/// estimate of the text if that is much more, since some servers put many tokens into a delta.
#[derive(Debug, Default)]
pub(crate) struct Count {
    /// Estimate until reported.
    prompt: u64,
    /// Part of the prompt that was read from a cache.
    cached: u64,
    /// Last report.
    answer: u64,
    /// Since the last report.
    deltas: u64,
    /// Estimated cost of the text since the last report.
    cost: u64,
    has_begun: bool,
    has_failed: bool,
    scanner: Scanner,
    seen: Answered,
}

/// The relevant content of the current event or document.
#[derive(Debug, Default)]
struct Answered {
    usage: Usage,
    /// Usage at the beginning of a message. Its output tokens are not used, since they come again as deltas.
    first_usage: Usage,
    deltas: u64,
    /// Cost of the texts written by the model.
    cost: u64,
    /// Value of `cost` at the end of the last choice.
    counted: u64,
    /// Cost of all other strings, for documents of an unknown form.
    others: u64,
    choices: Option<u64>,
    has_error: bool,
    has_encoded: bool,
    length: u64,
}

#[derive(Debug, Default)]
struct Usage {
    prompt: Option<u64>,
    input: Option<u64>,
    /// Anthropic's tokens written to a cache or read from it, which `prompt` includes and `input` does not.
    written: u64,
    read: u64,
    /// Tokens read from a cache, which both include.
    cached: u64,
    answer: Option<u64>,
    total: Option<u64>,
}

impl Count {
    /// Starts with an estimate of the prompt.
    pub(crate) fn new(prompt: u32) -> Self {
        Self {
            prompt: prompt.into(),
            ..Self::default()
        }
    }

    /// Returns the tokens so far: none if the upstream failed before the response began.
    pub(crate) fn tokens(&self) -> Tokens {
        if self.has_failed && !self.has_begun {
            return Tokens::default();
        }
        let estimate = self.cost / PER_TOKEN;
        let has_long_deltas = estimate > 2 * self.deltas;
        let unreported = if has_long_deltas {
            estimate
        } else {
            self.deltas
        };
        let cached = self.cached.min(self.prompt);
        Tokens {
            input: self.prompt - cached,
            cached,
            output: self.answer.saturating_add(unreported),
        }
    }

    /// The upstream failed. Later reports still count.
    pub(crate) fn fail(&mut self) {
        self.has_failed = true;
    }

    /// Reads the next part of an event's data or of a document.
    pub(crate) fn read(&mut self, part: &[u8]) {
        let seen = &mut self.seen;
        seen.length += part.len() as u64;
        self.scanner
            .read(part, |place, item| seen.note(place, item));
    }

    /// Ends an event. Returns whether it is only a report of the usage.
    pub(crate) fn end_event(&mut self) -> bool {
        let seen = self.end();
        let is_report = seen.choices == Some(0) && seen.usage.is_known();
        self.add(seen.deltas, seen.cost);
        self.report(&seen);
        is_report
    }

    /// Ends a document, which may be incomplete. Without a report its texts count.
    pub(crate) fn end_document(&mut self) {
        let seen = self.end();
        self.report(&seen);
        if !seen.usage.is_known() && !seen.has_error {
            self.cost += seen.texts();
        }
    }

    /// Counts bytes that cannot be read.
    pub(crate) fn add_unread(&mut self, bytes: u64) {
        self.cost += UNREAD_BYTE * bytes;
    }

    fn end(&mut self) -> Answered {
        let mut seen = mem::take(&mut self.seen);
        self.scanner.finish(|place, item| seen.note(place, item));
        seen
    }

    fn add(&mut self, deltas: u64, cost: u64) {
        self.has_begun |= cost > 0;
        self.deltas += deltas;
        self.cost += cost;
    }

    fn report(&mut self, seen: &Answered) {
        self.report_prompt(&seen.first_usage);
        self.report_prompt(&seen.usage);
        self.report_answer(&seen.usage);
        if seen.has_error {
            self.fail();
        }
    }

    fn report_prompt(&mut self, usage: &Usage) {
        let beside = usage.written.saturating_add(usage.read);
        let input = usage.input.map(|input| input.saturating_add(beside));
        let only_total = usage.total.filter(|_| usage.answer.is_none());
        let Some(reported) = usage.prompt.or(input).or(only_total) else {
            return;
        };
        self.has_begun = true;
        // Some servers report 0 while the number is unknown.
        if reported > 0 {
            (self.prompt, self.cached) = (reported, usage.cached.max(usage.read));
        }
    }

    /// Reports are cumulative.
    fn report_answer(&mut self, usage: &Usage) {
        // Some servers count reasoning only in the total.
        let rest = usage.total.map(|total| total.saturating_sub(self.prompt));
        let Some(reported) = usage.answer.max(rest) else {
            return;
        };
        self.has_begun = true;
        // Some servers report 0 in every chunk, or again at the end.
        if reported > 0 {
            (self.answer, self.deltas, self.cost) = (reported, 0, 0);
        }
    }
}

impl Answered {
    /// Cost of the texts of a document.
    fn texts(&self) -> u64 {
        match (self.cost, self.others) {
            (0, 0) if self.has_encoded => 0,
            // Not JSON.
            (0, 0) => UNREAD_BYTE * self.length,
            (0, others) => others,
            (written, _) => written,
        }
    }

    fn note(&mut self, place: &str, item: Item<'_>) {
        match item {
            Item::Number(_) | Item::Other(_) if is_encoded(place) => self.has_encoded = true,
            Item::Number(number) => self.note_number(place, number),
            Item::Text(cost, text) => {
                if place == ".type" && text == b"error" || place == ".error" {
                    self.has_error = true;
                } else if is_written(place) {
                    self.cost += cost;
                } else if is_encoded(place) {
                    self.has_encoded = true;
                } else {
                    self.others += cost;
                }
                // An event of the responses API, whose delta is a string.
                self.deltas += u64::from(place == ".delta" && cost > 0);
            }
            Item::End => match place {
                ".choices[]" => {
                    *self.choices.get_or_insert(0) += 1;
                    self.deltas += u64::from(self.cost > self.counted);
                    self.counted = self.cost;
                }
                ".choices" => drop(self.choices.get_or_insert(0)),
                ".delta" => self.deltas += u64::from(self.cost > 0),
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
        let details = [".prompt_tokens_details", ".input_tokens_details"];
        let within = details.iter().find_map(|part| parent.strip_suffix(part));
        let usage = match within.unwrap_or(parent) {
            ".usage" | ".response.usage" => &mut self.usage,
            ".message.usage" => &mut self.first_usage,
            _ => return,
        };
        match name {
            "prompt_tokens" => usage.prompt = Some(number),
            "input_tokens" => usage.input = Some(number),
            "completion_tokens" | "output_tokens" => usage.answer = Some(number),
            "total_tokens" => usage.total = Some(number),
            "cache_creation_input_tokens" => usage.written = number,
            "cache_read_input_tokens" => usage.read = number,
            "cached_tokens" | "prompt_cache_hit_tokens" => usage.cached = number,
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

/// Texts of the model in a message or delta of OpenAI's completions.
const IN_MESSAGE: &str = "content content[].text content[].thinking[].text reasoning_content reasoning refusal \
                          tool_calls[].function.name tool_calls[].function.arguments function_call.name \
                          function_call.arguments";
/// Texts of the model elsewhere: in text completions, and in events and documents of the responses API and of messages.
const WRITTEN: &str = ".choices[].text \
                       .delta .output[].content[].text .output[].content[].refusal .output[].summary[].text \
                       .output[].name .output[].arguments \
                       .delta.text .delta.thinking .delta.partial_json .content[].text .content[].thinking .content[].name";

/// Whether the model wrote the text at this path.
fn is_written(place: &str) -> bool {
    let message = place.strip_prefix(".choices[].delta.");
    let message = message.or_else(|| place.strip_prefix(".choices[].message."));
    let (known, place) = message.map_or((WRITTEN, place), |rest| (IN_MESSAGE, rest));
    known.split(' ').any(|known| known == place) || place.starts_with(".content[].input.")
}

/// Embeddings and media, whose length says nothing about tokens.
fn is_encoded(place: &str) -> bool {
    let name = place.rsplit('.').next().unwrap_or_default();
    let name = name.trim_end_matches("[]");
    ["embedding", "b64_json", "data", "url"].contains(&name)
}
