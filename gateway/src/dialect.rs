//! The provider whose API a path belongs to: the form of its errors, and the header with its key.

use http::{HeaderMap, HeaderName, HeaderValue, header};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");

/// The provider whose API a path follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    /// OpenAI's API with Azure's paths and header.
    Azure,
    Anthropic,
    /// Any other path.
    Other,
}

impl Dialect {
    pub(crate) fn of(path: &str) -> Self {
        let is_below = |folder: &str| {
            let rest = path.strip_prefix(folder);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        match path {
            _ if is_below("/v1/messages") || is_below("/v1/complete") => Self::Anthropic,
            _ if is_below("/openai/deployments") => Self::Azure,
            _ if is_below("/v1") || is_below("/openai") => Self::OpenAi,
            _ => Self::Other,
        }
    }

    /// Replaces the caller's credentials with the gateway's own key. The upstream never sees the caller's.
    pub(crate) fn set_key(self, headers: &mut HeaderMap, key: Option<&HeaderValue>) {
        let names = [
            header::AUTHORIZATION,
            header::COOKIE,
            X_API_KEY,
            API_KEY,
            HeaderName::from_static("x-goog-api-key"),
        ];
        for name in names {
            headers.remove(name);
        }
        let Some(key) = key else { return };
        let (name, value) = match self {
            Self::Anthropic => (X_API_KEY, Some(key.clone())),
            Self::Azure => (API_KEY, Some(key.clone())),
            Self::OpenAi | Self::Other => {
                let value = [b"Bearer ", key.as_bytes()].concat();
                (header::AUTHORIZATION, HeaderValue::from_bytes(&value).ok())
            }
        };
        if let Some(mut value) = value {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
}
