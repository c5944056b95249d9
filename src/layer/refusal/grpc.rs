//! A refusal for gRPC clients: a status in the response head, and no message.
//!
//! The details are a `google.rpc.Status` with a `RetryInfo` and a `QuotaFailure`. This module encodes these few dozen bytes
//! of protocol buffers without a library.

use base64::{Engine, prelude::BASE64_STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};

use super::{fields::printable, kind::RefusalKind, problem, refusal::Refusal};
use crate::error::LostErrorKind;

const MEDIA_TYPE: &str = "application/grpc";
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
/// Metadata with the code of the reason.
const KIND: HeaderName = HeaderName::from_static("turnstile-kind");

const RESOURCE_EXHAUSTED: u8 = 8;
const UNAVAILABLE: u8 = 14;
const CANCELLED: u8 = 1;
const INVALID_ARGUMENT: u8 = 3;
const INTERNAL: u8 = 13;

/// Whether a request is a gRPC call: `application/grpc`, with or without a format as in `application/grpc+proto`.
///
/// gRPC-Web is excluded. A browser shows a page the status in the head only if the server permits it, and a refusal without
/// a visible status looks like success. gRPC-Web clients understand the HTTP status of a plain refusal.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let parts = content_type.and_then(|text| text.split_at_checked(MEDIA_TYPE.len()));
    parts.is_some_and(|(media_type, rest)| {
        media_type.eq_ignore_ascii_case(MEDIA_TYPE.as_bytes())
            && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}

impl Refusal {
    /// Builds the default response to gRPC clients: a gRPC status with details.
    ///
    /// The layer sends this response unless [`LimitLayer::refuse_with`](crate::layer::LimitLayer::refuse_with) builds another. The
    /// HTTP status is 200, as for every gRPC response, and there is no body. The gRPC status is
    ///
    /// - `RESOURCE_EXHAUSTED` (8) if the limit was reached, whether it is the caller's own or shared;
    /// - `CANCELLED` (1) for [`RefusalKind::BodyFailed`];
    /// - `INVALID_ARGUMENT` (3) for [`RefusalKind::NoKey`], [`RefusalKind::AmbiguousPath`],
    ///   [`RefusalKind::InvalidWeight`] and [`RefusalKind::InvalidCost`], since a retry is pointless;
    /// - `INTERNAL` (13) for [`RefusalKind::UnknownRate`] and [`RefusalKind::UnknownLimit`];
    /// - `UNAVAILABLE` (14) otherwise: the store is unavailable, the limiter is shutting down, the slot was lost.
    ///
    /// The details are a `google.rpc.RetryInfo` with [`retry_after`](Self::retry_after), if a retry may succeed, and,
    /// if the limit was reached, a `google.rpc.QuotaFailure` with the subject `limit:<name>`. The metadata has the code
    /// of the reason as `turnstile-kind`, such as `queue_full` ([`RefusalKind::as_str`]).
    pub fn to_grpc_response(&self) -> Response<Bytes> {
        // "Trailers-Only": the trailers are the head of a response without a body.
        let (code, message) = match self.kind() {
            kind if kind.is_limited() => (RESOURCE_EXHAUSTED, self.to_string()),
            RefusalKind::BodyFailed => (CANCELLED, problem::detail(self)),
            kind if kind.is_invalid() => (INVALID_ARGUMENT, problem::detail(self)),
            kind if kind.is_of_handler() => (INTERNAL, problem::detail(self)),
            _ => (UNAVAILABLE, problem::detail(self)),
        };
        let details = BASE64_STANDARD_NO_PAD.encode(status(self, code, &message));
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        headers.insert(STATUS, u16::from(code).into());
        let kind = HeaderValue::from_static(self.kind().as_str());
        headers.insert(KIND, kind);
        for (name, text) in [
            (MESSAGE, printable(&message).to_string()),
            (DETAILS, details),
        ] {
            // Printable ASCII is always a valid value.
            if let Ok(value) = HeaderValue::try_from(text) {
                headers.insert(name, value);
            }
        }
        response
    }
}

/// The trailers of a call whose slot has ended before its response.
pub(in crate::layer) fn trailers(kind: LostErrorKind, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(3);
    trailers.insert(STATUS, u16::from(UNAVAILABLE).into());
    trailers.insert(KIND, HeaderValue::from_static(kind.as_str()));
    // Printable ASCII is always a valid value.
    if let Ok(message) = HeaderValue::try_from(printable(message).to_string()) {
        trailers.insert(MESSAGE, message);
    }
    trailers
}

/// `google.rpc.Status`.
fn status(refusal: &Refusal, code: u8, message: &str) -> Vec<u8> {
    let mut status = Proto::default()
        .number(1, code.into())
        .bytes(2, message.as_bytes());
    if refusal.kind().is_worth_a_retry() || refusal.kind() == RefusalKind::BodyFailed {
        status = status.bytes(3, &any("google.rpc.RetryInfo", retry_info(refusal)));
    }
    if refusal.kind().is_limited() {
        status = status.bytes(3, &any("google.rpc.QuotaFailure", quota_failure(refusal)));
    }
    status.0
}

fn retry_info(refusal: &Refusal) -> Proto {
    let delay = Proto::default()
        .number(1, refusal.retry_after.as_secs())
        .number(2, refusal.retry_after.subsec_nanos().into());
    Proto::default().bytes(1, &delay.0)
}

fn quota_failure(refusal: &Refusal) -> Proto {
    let violation = Proto::default()
        .bytes(1, format!("limit:{}", refusal.limit_name()).as_bytes())
        .bytes(2, problem::detail(refusal).as_bytes());
    Proto::default().bytes(1, &violation.0)
}

/// `google.protobuf.Any`.
fn any(name: &str, message: Proto) -> Vec<u8> {
    let name = format!("type.googleapis.com/{name}");
    let any = Proto::default().bytes(1, name.as_bytes());
    any.bytes(2, &message.0).0
}

/// An encoder for a protocol buffers message with field numbers below 16.
#[derive(Default)]
struct Proto(Vec<u8>);

impl Proto {
    fn number(mut self, field: u8, value: u64) -> Self {
        self.0.push(field << 3);
        self.varint(value);
        self
    }

    /// Writes bytes, a string or a message.
    fn bytes(mut self, field: u8, value: &[u8]) -> Self {
        self.0.push(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_is_recognized_by_its_media_type() {
        let accepted = |content_type| {
            let value = HeaderValue::from_static(content_type);
            is_grpc(&HeaderMap::from_iter([(header::CONTENT_TYPE, value)]))
        };
        for grpc in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc;charset=utf-8",
            "application/grpc ; charset=utf-8",
            "Application/gRPC+json",
        ] {
            assert!(accepted(grpc), "{grpc}");
        }
        for other in [
            "",
            "application/json",
            "application/grp",
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/grpc-web-text",
            "application/grpcs",
            "text/plain; application/grpc",
        ] {
            assert!(!accepted(other), "{other}");
        }
        assert!(!is_grpc(&HeaderMap::new()));
    }
}
