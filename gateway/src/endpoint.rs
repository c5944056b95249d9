//! The requests to a language model that cost tokens.
//!
//! Tests: `tests/gateway/prompts.rs`, `paths.rs`.

use http::Method;

use crate::path::last_segment;

/// The kind of a request that costs tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Chat completions, and the older text completions.
    Completions,
    Responses,
    Embeddings,
    Messages,
}

impl Endpoint {
    /// Recognises the kind by the last segment of the path. `None`: the request costs no tokens.
    pub(crate) fn of(method: &Method, path: &str) -> Option<Self> {
        if method != Method::POST {
            return None;
        }
        match last_segment(path).as_str() {
            "completions" => Some(Self::Completions),
            "responses" => Some(Self::Responses),
            "embeddings" => Some(Self::Embeddings),
            "messages" => Some(Self::Messages),
            _ => None,
        }
    }
}
