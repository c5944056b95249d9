//! A request to a language model: its body is read, to charge it before the upstream is called.
//!
//! Tests: `tests/gateway/prompts.rs`.

use std::error::Error;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header, request::Parts};
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, value::RawValue};

use crate::usage::BYTES_PER_TOKEN;

/// Bytes of a request. Longer ones are refused.
pub(crate) const MAX_REQUEST: usize = 4 * 1024 * 1024;

/// Whose style a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
}

impl Dialect {
    /// By the end of the path. `None`: the request asks no model, or asks for something that has no tokens.
    pub(crate) fn of(head: &Parts) -> Option<Self> {
        if head.method != Method::POST {
            return None;
        }
        // As the upstream may read it.
        let path = percent_decode_str(head.uri.path()).decode_utf8_lossy();
        match path.trim_end_matches('/').rsplit('/').next()? {
            "completions" | "embeddings" => Some(Self::OpenAi),
            "messages" => Some(Self::Anthropic),
            _ => None,
        }
    }
}

/// What the upstream gets, and what that costs.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) body: Bytes,
    /// Estimated by its length.
    pub(crate) tokens: u32,
}

impl Prompt {
    /// Reads the body. A stream is asked to report its usage, if its client has not decided that; nothing else is changed.
    ///
    /// # Errors
    ///
    /// The status of the answer: 413 if the body is too long, 400 if it fails.
    pub(crate) async fn read<B>(
        dialect: Dialect,
        headers: &HeaderMap,
        body: B,
    ) -> Result<Self, StatusCode>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>,
    {
        let body = Limited::new(body, MAX_REQUEST).collect().await;
        let body = body.map_err(|error| match error.is::<LengthLimitError>() {
            true => StatusCode::PAYLOAD_TOO_LARGE,
            false => StatusCode::BAD_REQUEST,
        })?;
        let body = body.to_bytes();
        let is_plain = !headers.contains_key(header::CONTENT_ENCODING);
        let request = serde_json::from_slice::<Value>(&body).ok();
        let Some(request) = request.filter(|_| is_plain) else {
            // For the upstream to judge.
            let tokens = tokens(body.len() as u64);
            return Ok(Self { body, tokens });
        };
        let tokens = tokens(prompt_bytes(&request));
        let asks = dialect == Dialect::OpenAi && request["stream"] == true;
        let asking = asks.then(|| with_usage(&body)).flatten();
        let body = asking.map_or(body, Bytes::from);
        Ok(Self { body, tokens })
    }
}

fn tokens(bytes: u64) -> u32 {
    let tokens = bytes.div_ceil(BYTES_PER_TOKEN).max(1);
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Length of what the model reads: texts, and descriptions of tools.
fn prompt_bytes(request: &Value) -> u64 {
    let fields = ["messages", "system", "prompt", "input", "tools"];
    fields
        .into_iter()
        .map(|field| text_bytes(&request[field]))
        .sum()
}

/// Media are not counted: how many tokens they are has little to do with their length. Nor is the structure of the JSON.
fn text_bytes(value: &Value) -> u64 {
    let is_media = |name: &str| ["url", "data", "file_data"].contains(&name);
    match value {
        Value::String(text) => text.len() as u64,
        // A prompt may be a list of tokens.
        Value::Number(_) => BYTES_PER_TOKEN,
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(fields) => {
            let texts = fields.iter().filter(|(name, _)| !is_media(name));
            texts.map(|(_, value)| text_bytes(value)).sum()
        }
        Value::Null | Value::Bool(_) => 0,
    }
}

/// The request with `stream_options.include_usage`, which is put between its bytes. `None`: it has that already.
fn with_usage(request: &[u8]) -> Option<Vec<u8>> {
    #[derive(Deserialize)]
    struct Request<'a> {
        #[serde(borrow, default, deserialize_with = "present")]
        stream_options: Option<&'a RawValue>,
    }

    let text = str::from_utf8(request).ok()?;
    let Some(options) = serde_json::from_str::<Request<'_>>(text)
        .ok()?
        .stream_options
    else {
        return inserted(text, 0, r#""stream_options":{"include_usage":true}"#);
    };
    let options = options.get();
    let at = options.as_ptr().addr() - text.as_ptr().addr();
    match serde_json::from_str(options).ok()? {
        Value::Null => {
            let (before, after) = (&text[..at], &text[at + options.len()..]);
            Some(
                [before, r#"{"include_usage":true}"#, after]
                    .concat()
                    .into_bytes(),
            )
        }
        Value::Object(fields) if !fields.contains_key("include_usage") => {
            inserted(text, at, r#""include_usage":true"#)
        }
        _ => None,
    }
}

/// `null` is a value too.
fn present<'de, D: Deserializer<'de>>(value: D) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(value).map(Some)
}

/// With one more field, the first one, in the object that begins at this place or after white space.
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
