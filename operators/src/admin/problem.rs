//! Errors as problem details (RFC 9457).

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::json;

use super::json::to_json;
use crate::{OperateError, OperateErrorKind, kinds::kinds};

kinds! {
    /// Why the API does not understand or accept a request.
    pub(super) enum ApiFault {
        Malformed = "malformed",
        TooLarge = "too_large",
        ContentType = "content_type",
        Method = "method",
        NoSuchPath = "no_such_path",
        ReadOnly = "read_only",
        NoAuthor = "no_author",
        NoHeader = "no_header",
        CrossSite = "cross_site",
        WrongHost = "wrong_host",
    }
}

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

impl Problem {
    pub(super) fn of(fault: ApiFault, detail: impl Into<String>) -> Self {
        Self {
            status: fault.status(),
            kind: fault.as_str(),
            detail: detail.into(),
            allow: None,
        }
    }

    pub(super) fn malformed(detail: impl Into<String>) -> Self {
        Self::of(ApiFault::Malformed, detail)
    }

    pub(super) fn busy(detail: impl Into<String>) -> Self {
        OperateError::new(OperateErrorKind::Busy, detail).into()
    }

    /// A path that takes these methods only.
    pub(super) fn method(fault: ApiFault, allow: &'static str, detail: impl Into<String>) -> Self {
        Self {
            allow: Some(allow),
            ..Self::of(fault, detail)
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let details = json!({
            "type": "about:blank",
            "title": self.status.canonical_reason().unwrap_or_default(),
            "status": self.status.as_u16(),
            "kind": self.kind,
            "detail": self.detail,
        });
        let mut response = (self.status, to_json(&details)).into_response();
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
            kind: error.kind().as_str(),
            detail: error.to_string(),
        }
    }
}

impl From<OperateError> for Problem {
    fn from(error: OperateError) -> Self {
        let kind = error.kind();
        Self {
            status: status_of(kind),
            kind: kind.as_str(),
            detail: error.to_string(),
            allow: None,
        }
    }
}

impl ApiFault {
    fn status(self) -> StatusCode {
        match self {
            Self::Malformed => StatusCode::BAD_REQUEST,
            Self::ReadOnly | Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::NoAuthor | Self::NoHeader | Self::CrossSite => StatusCode::FORBIDDEN,
            Self::NoSuchPath => StatusCode::NOT_FOUND,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::WrongHost => StatusCode::MISDIRECTED_REQUEST,
        }
    }
}

fn status_of(kind: OperateErrorKind) -> StatusCode {
    match kind {
        OperateErrorKind::Unavailable | OperateErrorKind::NoAnswer | OperateErrorKind::Busy => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        OperateErrorKind::Permission | OperateErrorKind::Store => StatusCode::BAD_GATEWAY,
        OperateErrorKind::NoStore
        | OperateErrorKind::Conflict
        | OperateErrorKind::NotFair
        | OperateErrorKind::TooManyOverrides => StatusCode::CONFLICT,
        OperateErrorKind::UnknownLimit | OperateErrorKind::NotFound => StatusCode::NOT_FOUND,
        OperateErrorKind::Value => StatusCode::BAD_REQUEST,
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::Value;

    use super::*;

    #[tokio::test]
    async fn a_problem_has_the_code_of_its_error() {
        for kind in OperateErrorKind::ALL.iter().copied() {
            let error = OperateError::new(kind, "why");
            let cause = serde_json::to_value(Cause::from(&error)).unwrap();
            let body = Problem::from(error).into_response().into_body();
            let body = body.collect().await.unwrap().to_bytes();
            let problem: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(
                (&problem["kind"], &problem["detail"]),
                (&cause["kind"], &cause["detail"])
            );
            assert_eq!(problem["kind"], kind.as_str());
        }
    }

    #[test]
    fn the_table_of_codes_in_the_guide_has_those_of_the_api() {
        let page = include_str!("../../../src/guide/metrics.md");
        for fault in ApiFault::ALL {
            let code = format!("| `{}` |", fault.as_str());
            assert!(page.contains(&code), "{code}");
        }
    }
}
