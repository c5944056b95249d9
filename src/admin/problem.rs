//! Errors as problem details (RFC 9457).

use http::{HeaderValue, Response, StatusCode, header};
use serde::Serialize;

use super::{body::AdminBody, json::to_json};
use crate::operate::{OperateError, OperateErrorKind};

/// Why a request is not answered as it asks.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    status: StatusCode,
    /// For programs.
    kind: &'static str,
    /// For people.
    detail: String,
    /// Methods that the path takes.
    allow: Option<&'static str>,
}

#[derive(Serialize)]
struct ProblemDetails<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    kind: &'static str,
    detail: &'a str,
}

impl Problem {
    pub(super) fn new(status: StatusCode, kind: &'static str, detail: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            detail: detail.into(),
            allow: None,
        }
    }

    pub(super) fn malformed(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed", detail)
    }

    pub(super) fn too_large(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", detail)
    }

    pub(super) fn forbidden(kind: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, kind, detail)
    }

    pub(super) fn busy(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", detail)
    }

    pub(super) fn not_found() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "no-such-path",
            "there is nothing at this path",
        )
    }

    /// A path that takes these methods only.
    pub(super) fn method(
        kind: &'static str,
        allow: &'static str,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            allow: Some(allow),
            ..Self::new(StatusCode::METHOD_NOT_ALLOWED, kind, detail)
        }
    }

    pub(super) fn respond(&self) -> Response<AdminBody> {
        let details = ProblemDetails {
            r#type: "about:blank",
            title: self.status.canonical_reason().unwrap_or_default(),
            status: self.status.as_u16(),
            kind: self.kind,
            detail: &self.detail,
        };
        let mut response = Response::new(to_json(&details).into());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        let problem = HeaderValue::from_static("application/problem+json");
        headers.insert(header::CONTENT_TYPE, problem);
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Why replicas or the store did not answer.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cause {
    pub(super) kind: &'static str,
    detail: String,
}

impl From<&OperateError> for Cause {
    fn from(error: &OperateError) -> Self {
        Self {
            kind: kind_and_status(error).0,
            detail: error.to_string(),
        }
    }
}

impl From<OperateError> for Problem {
    fn from(error: OperateError) -> Self {
        let (kind, status) = kind_and_status(&error);
        Self::new(status, kind, error.to_string())
    }
}

fn kind_and_status(error: &OperateError) -> (&'static str, StatusCode) {
    match error.kind() {
        OperateErrorKind::Unavailable => ("unavailable", StatusCode::SERVICE_UNAVAILABLE),
        OperateErrorKind::Busy => ("busy", StatusCode::SERVICE_UNAVAILABLE),
        OperateErrorKind::Permission => ("permission", StatusCode::BAD_GATEWAY),
        OperateErrorKind::Store => ("store", StatusCode::BAD_GATEWAY),
        OperateErrorKind::NoStore => ("no-store", StatusCode::CONFLICT),
        OperateErrorKind::UnknownLimit => ("unknown-limit", StatusCode::NOT_FOUND),
        OperateErrorKind::Value => ("value", StatusCode::BAD_REQUEST),
        OperateErrorKind::Conflict => ("conflict", StatusCode::CONFLICT),
        OperateErrorKind::Full => ("full", StatusCode::CONFLICT),
        OperateErrorKind::NotFound => ("not-found", StatusCode::NOT_FOUND),
    }
}
