//! The form of what the layer itself answers to a request: a refusal, or the end of a response with its slot.

use http::{HeaderValue, Method, Response, header::CONTENT_LENGTH, request::Parts};
use http_body::Body;
use http_body_util::Full;

use super::{body::RefusalBody, grpc::is_grpc};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::layer) enum Form {
    #[default]
    Http,
    /// Without content: over HTTP/2, no server removes it.
    Head,
    Grpc,
}

impl Form {
    pub(in crate::layer) fn of(head: &Parts) -> Self {
        match head.method {
            _ if is_grpc(&head.headers) => Self::Grpc,
            Method::HEAD => Self::Head,
            _ => Self::Http,
        }
    }
}

/// The response to a HEAD request: the length stays.
pub(in crate::layer) fn without_content(response: Response<RefusalBody>) -> Response<RefusalBody> {
    let (mut head, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        let length = HeaderValue::from(length);
        head.headers.entry(CONTENT_LENGTH).or_insert(length);
    }
    Response::from_parts(head, RefusalBody::Left(Full::default()))
}
