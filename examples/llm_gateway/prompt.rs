//! Reads a request that costs tokens, so that its prompt can be charged before the upstream is called.
//!
//! Tests: `tests/gateway/prompts.rs`.

use std::{
    error::Error,
    mem::{self, take},
    pin::pin,
};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Deserialize, Deserializer, de::IgnoredAny};
use serde_json::value::RawValue;

use crate::{
    endpoint::Endpoint,
    estimate::{Estimate, PER_TOKEN, UNREAD_BYTE},
    json::{Item, Scanner},
};

/// A request's body, and the estimated tokens of its prompt.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) body: Bytes,
    /// Estimate, by the text.
    pub(crate) tokens: u32,
    /// The client wants a stream.
    pub(crate) is_stream: bool,
    /// Only the gateway has asked for the stream's usage, not the client.
    pub(crate) hides_usage: bool,
}

/// Cost of the tokens that begin and end a message, beside its role.
const FRAME: u64 = 3 * PER_TOKEN;

/// The parts of a request that matter to the gateway.
#[derive(Debug, Default)]
struct Seen {
    is_stream: bool,
    /// The response is produced in the background, and fetched by another request.
    is_background: bool,
    /// Estimated cost of the text for the model.
    cost: u64,
    /// Cost of the last `data` field: encoded media, or text if its `source` has the type `text`.
    data: u64,
    has_text_type: bool,
    has_messages: bool,
}

impl Prompt {
    /// Reads the body.
    ///
    /// # Errors
    ///
    /// Status and message, if the body is too long, compressed or incomplete, or asks for a response that cannot be charged.
    pub(crate) async fn read<B>(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: B,
        max_bytes: usize,
    ) -> Result<Self, (StatusCode, String)>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
    {
        let coding = headers.get(header::CONTENT_ENCODING);
        if coding.is_some_and(|coding| coding != "identity") {
            let message = "a compressed request cannot be charged: send it as it is";
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, message.to_owned()));
        }
        let mut frames = pin!(Limited::new(body, max_bytes));
        // Copied, since each of many tiny frames would keep its buffer.
        let mut body = Vec::new();
        while let Some(frame) = frames.frame().await {
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => {
                    let message = format!("the request is longer than {max_bytes} bytes");
                    (StatusCode::PAYLOAD_TOO_LARGE, message)
                }
                false => (StatusCode::BAD_REQUEST, "the request broke off".to_owned()),
            })?;
            if let Some(data) = frame.data_ref() {
                body.extend_from_slice(data);
            }
        }
        let body = Bytes::from(body);
        let seen = Seen::of(&body);
        if seen.is_background && endpoint == Endpoint::Responses {
            let message = "responses in the background cannot be charged: leave out `background`";
            return Err((StatusCode::BAD_REQUEST, message.to_owned()));
        }
        let cost = match serde_json::from_slice::<IgnoredAny>(&body) {
            Ok(_) => seen.cost,
            // Left to the upstream, which may understand more.
            Err(_) => UNREAD_BYTE * body.len() as u64,
        };
        Ok(Self {
            tokens: tokens(cost),
            is_stream: seen.is_stream,
            hides_usage: false,
            body,
        })
    }

    /// Adds the wish for a usage report to a request for a stream, and changes nothing else.
    pub(crate) fn ask_usage(&mut self, endpoint: Endpoint) {
        let asks = self.is_stream && endpoint == Endpoint::Completions;
        if let Some(asking) = asks.then(|| with_usage(&self.body)).flatten() {
            self.body = asking.into();
            self.hides_usage = true;
        }
    }
}

fn tokens(cost: u64) -> u32 {
    let tokens = cost.div_ceil(PER_TOKEN).max(1);
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

impl Seen {
    fn of(request: &[u8]) -> Self {
        let (mut seen, mut scanner) = (Self::default(), Scanner::default());
        scanner.read(request, |place, item| seen.note(place, item));
        scanner.finish(|place, item| seen.note(place, item));
        seen
    }

    fn note(&mut self, place: &str, item: Item<'_>) {
        match place {
            ".stream" => self.is_stream = item == Item::Other(b't'),
            ".background" => self.is_background = item == Item::Other(b't'),
            _ if is_read(place) => self.note_read(place, item),
            _ => {}
        }
    }

    /// Counts texts and the frames of messages, but not images, whose tokens have little to do with their length.
    fn note_read(&mut self, place: &str, item: Item<'_>) {
        let name = place.rsplit('.').next().unwrap_or_default();
        match item {
            Item::Text(cost, _) if name == "data" => self.data = cost,
            Item::Text(_, text)
                if ["type", "media_type"].contains(&name) && !is_of_tools(place) =>
            {
                self.has_text_type |= place.ends_with(".source.type") && text == b"text";
            }
            Item::Text(_, _) if ["url", "file_data", "image_url"].contains(&name) => {}
            Item::Text(cost, _) => {
                self.cost += cost;
                if [".messages[].role", ".input[].role"].contains(&place) {
                    let is_first = !mem::replace(&mut self.has_messages, true);
                    // The answer is a message too.
                    self.cost += FRAME * (1 + u64::from(is_first));
                }
            }
            // A prompt may be a list of tokens.
            Item::Number(_) => self.cost += PER_TOKEN,
            Item::End => {
                let (is_text, data) = (take(&mut self.has_text_type), take(&mut self.data));
                self.cost += if is_text { data } else { 0 };
                if is_of_tools(place) && !name.ends_with("[]") {
                    self.cost += Estimate::of(name.as_bytes());
                }
            }
            Item::Other(_) => {}
        }
    }
}

/// Whether the value at this path goes to the model: messages, and descriptions of tools.
fn is_read(place: &str) -> bool {
    let field = place.trim_start_matches('.');
    let field = field.split(['.', '[']).next().unwrap_or_default();
    [
        "messages",
        "system",
        "prompt",
        "suffix",
        "input",
        "instructions",
        "tools",
        "functions",
        "response_format",
        "text",
    ]
    .contains(&field)
}

/// Whether the value belongs to the description of a tool, whose names of parameters and types the model reads too.
fn is_of_tools(place: &str) -> bool {
    [".tools", ".functions"]
        .iter()
        .any(|field| place.starts_with(field))
}

/// Returns the request with `stream_options.include_usage` inserted. `None`: it has it already.
fn with_usage(request: &[u8]) -> Option<Vec<u8>> {
    #[derive(Deserialize)]
    struct Request<'a> {
        #[serde(borrow, default, deserialize_with = "present")]
        stream_options: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Options<'a> {
        #[serde(borrow, default, deserialize_with = "present")]
        include_usage: Option<&'a RawValue>,
    }

    let text = str::from_utf8(request).ok()?;
    let request = serde_json::from_str::<Request<'_>>(text).ok()?;
    let Some(options) = request.stream_options.map(RawValue::get) else {
        return inserted(text, 0, r#""stream_options":{"include_usage":true}"#);
    };
    if options == "null" {
        return Some(replaced(text, options, r#"{"include_usage":true}"#));
    }
    let is_included = serde_json::from_str::<Options<'_>>(options).ok()?;
    match is_included.include_usage.map(RawValue::get) {
        None if options.starts_with('{') => {
            inserted(text, offset(text, options), r#""include_usage":true"#)
        }
        Some(other @ ("false" | "null")) => Some(replaced(text, other, "true")),
        _ => None,
    }
}

/// Distinguishes `null` from a missing field.
fn present<'de, D: Deserializer<'de>>(value: D) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(value).map(Some)
}

fn offset(text: &str, part: &str) -> usize {
    part.as_ptr().addr() - text.as_ptr().addr()
}

fn replaced(text: &str, part: &str, other: &str) -> Vec<u8> {
    let at = offset(text, part);
    let (before, after) = (&text[..at], &text[at + part.len()..]);
    [before, other, after].concat().into_bytes()
}

/// Inserts a first field into the object that begins at or after `at`.
fn inserted(json: &str, at: usize, field: &str) -> Option<Vec<u8>> {
    let begin = at + json[at..].find('{')? + 1;
    let (before, after) = json.split_at(begin);
    let comma = if after.trim_start().starts_with('}') {
        ""
    } else {
        ","
    };
    Some([before, field, comma, after].concat().into_bytes())
}
