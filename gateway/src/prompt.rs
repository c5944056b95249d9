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
    /// Beginning of the model's name.
    pub(crate) model: Option<String>,
    /// The client wants a stream.
    pub(crate) is_stream: bool,
    /// Only the gateway has asked for the stream's usage, not the client.
    pub(crate) hides_usage: bool,
}

/// Longest name of a type, in bytes. Anything longer is text.
const MAX_TYPE: usize = 32;
/// Cost of the tokens that begin and end a message, beside its role.
const FRAME: u64 = 3 * PER_TOKEN;

/// The parts of a request that matter to the gateway.
#[derive(Debug, Default)]
struct Asked {
    is_stream: bool,
    model: Option<String>,
    /// The reason why the request cannot be charged.
    fault: Option<&'static str>,
    /// Estimated cost of the text for the model.
    cost: u64,
    /// Cost of the `data` of a `source`, which are media if the only type of the source is `base64`.
    data: u64,
    is_base64: Option<bool>,
    has_messages: bool,
}

impl Prompt {
    /// Reads the body.
    ///
    /// # Errors
    ///
    /// Status and message, if the body is too long, compressed, incomplete or not in UTF-8, or asks for a response that cannot
    /// be charged.
    pub(crate) async fn read<B>(
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: B,
        max_bytes: usize,
    ) -> Result<Self, (StatusCode, String)>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
    {
        let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
        if !codings.all(|coding| coding == "identity") {
            let message = "a compressed request cannot be charged: send it as it is";
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, message.to_owned()));
        }
        let mut frames = pin!(Limited::new(body, max_bytes));
        // Copied, since each of many tiny frames would keep its buffer.
        let mut body = Vec::new();
        while let Some(frame) = frames.frame().await {
            let frame = frame.map_err(|error| {
                if error.is::<LengthLimitError>() {
                    let message = format!("the request is longer than {max_bytes} bytes");
                    (StatusCode::PAYLOAD_TOO_LARGE, message)
                } else {
                    (StatusCode::BAD_REQUEST, "the request broke off".to_owned())
                }
            })?;
            if let Some(data) = frame.data_ref() {
                body.extend_from_slice(data);
            }
        }
        let body = Bytes::from(body);
        let seen = Asked::of(&body);
        let is_json = serde_json::from_slice::<IgnoredAny>(&body).is_ok();
        let fault = match seen.fault {
            // UTF-16 and UTF-32, which some servers recognise, have zeros.
            _ if str::from_utf8(&body).is_err() || body.contains(&0) => Some("it is not in UTF-8"),
            None if !is_json && endpoint == Endpoint::Responses => Some("it is not JSON"),
            fault => fault,
        };
        if let Some(fault) = fault {
            let message = format!("the request cannot be charged: {fault}");
            return Err((StatusCode::BAD_REQUEST, message));
        }
        let cost = if is_json {
            seen.cost
        } else {
            UNREAD_BYTE * body.len() as u64
        };
        Ok(Self {
            tokens: tokens(cost),
            model: seen.model,
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

impl Asked {
    fn of(request: &[u8]) -> Self {
        let (mut seen, mut scanner) = (Self::default(), Scanner::default());
        scanner.read(request, |place, item| seen.note(place, item));
        scanner.finish(|place, item| seen.note(place, item));
        seen
    }

    fn note(&mut self, place: &str, item: Item<'_>) {
        let is_off = matches!(item, Item::Other(b'f' | b'n'));
        // Servers in Go ignore the case of names.
        let is = |name: &str| place.chars().flat_map(char::to_lowercase).eq(name.chars());
        match place {
            ".stream" if is_off => self.is_stream = false,
            ".stream" if item == Item::Other(b't') => self.is_stream = true,
            ".stream" => self.fault = Some("`stream` must be true or false"),
            // At each endpoint, since some upstreams translate requests into those of the responses API.
            _ if is(".background") && is_off => {}
            _ if is(".background") => self.fault = Some("leave out `background`"),
            ".model" => {
                if let Item::Text(_, name) = item {
                    self.model = Some(String::from_utf8_lossy(name).into_owned());
                }
            }
            _ if is_setting(place) => {}
            _ => self.note_read(place, item),
        }
    }

    /// Counts texts and the frames of messages, but not media.
    fn note_read(&mut self, place: &str, item: Item<'_>) {
        let name = place.rsplit('.').next().unwrap_or_default();
        let is_argument = place.contains(".input.") || place.contains(".arguments.");
        // The model reads the names of an earlier call's arguments too, and those of objects in descriptions of tools.
        if !name.ends_with("[]") && (is_argument || item == Item::End && is_of_tools(place)) {
            self.cost += Estimate::of(name.as_bytes());
        }
        let blocks = [".messages[]", ".input[]", ".system[]"];
        let is_block = !is_argument && blocks.iter().any(|list| place.starts_with(list));
        match item {
            Item::Text(_, text)
                if matches!(name, "type" | "media_type") && text.len() < MAX_TYPE && is_block =>
            {
                if place.ends_with(".source.type") {
                    self.is_base64 = Some(text == b"base64" && self.is_base64 != Some(false));
                }
            }
            Item::Text(cost, text) if is_block && is_media(name, text) => {
                self.data += if name == "data" { cost } else { 0 };
            }
            Item::Text(cost, _) => {
                self.cost += cost;
                if [".messages[].role", ".input[].role"].contains(&place) {
                    let is_first = !mem::replace(&mut self.has_messages, true);
                    // The answer is a message too.
                    self.cost += FRAME * (1 + u64::from(is_first));
                }
            }
            // A prompt may be a list of tokens.
            Item::Number(_) | Item::Other(b'-' | b'0'..=b'9') if place.ends_with("[]") => {
                self.cost += PER_TOKEN;
            }
            Item::End => {
                if place.ends_with(".source") {
                    let (is_base64, data) = (take(&mut self.is_base64), take(&mut self.data));
                    self.cost += if is_base64 == Some(true) { 0 } else { data };
                }
            }
            Item::Number(_) | Item::Other(_) => {}
        }
    }
}

/// Whether the model does not read the value at this path. It may read any field that is not known here.
fn is_setting(place: &str) -> bool {
    let field = place.trim_start_matches('.').split(['.', '[']).next();
    let field = field.unwrap_or_default();
    matches!(
        field,
        "model" | "stop" | "stop_sequences" | "user" | "metadata"
    )
}

/// Whether the text is an image, a recording or a PDF, or its URL, by its name and beginning.
fn is_media(name: &str, text: &[u8]) -> bool {
    let mut begins =
        "https: http: data:image/ data:audio/ data:video/ data:application/pdf".split(' ');
    match name {
        "url" | "image_url" | "file_url" | "file_data" => {
            begins.any(|begin| text.starts_with(begin.as_bytes()))
        }
        // Base64.
        "data" => text
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+/=-_\r\n".contains(byte)),
        _ => false,
    }
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
    struct StreamOptions<'a> {
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
    let is_included = serde_json::from_str::<StreamOptions<'_>>(options).ok()?;
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
