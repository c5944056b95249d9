//! What is asked of a language model.
//!
//! Tests: `tests/gateway/prompts.rs`, `paths.rs`.

use http::Method;

use crate::path::last_segment;

/// What is asked of a language model that costs tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Of chats or texts.
    Completions,
    Responses,
    Embeddings,
    Messages,
}

impl Endpoint {
    /// By the end of the path. `None`: the request asks no model, or asks for something that has no tokens.
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
