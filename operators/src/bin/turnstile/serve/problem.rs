//! Refusals as problem details (RFC 9457): of requests that reach no limit, and of limits.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;
use tower_turnstile::{AcquireError, Refusal};

/// Why a client gets no slot, as a response.
#[derive(Debug)]
pub(super) struct HttpProblem(Response<Bytes>);

impl HttpProblem {
    /// `kind`: for programs. `detail`: for people.
    pub(super) fn new(status: StatusCode, kind: &'static str, detail: impl Into<String>) -> Self {
        Self::of(status, kind, &detail.into(), None)
    }

    /// A fault of this parameter.
    pub(super) fn parameter(name: impl AsRef<str>, message: impl AsRef<str>) -> Self {
        let (name, message) = (name.as_ref(), message.as_ref());
        let detail = format!("`{name}` {message}");
        Self::of(StatusCode::BAD_REQUEST, "parameter", &detail, Some(name))
    }

    pub(super) fn malformed() -> Self {
        let detail = "names and values are UTF-8, percent-encoded";
        Self::new(StatusCode::BAD_REQUEST, "malformed", detail)
    }

    pub(super) fn shut_down() -> Self {
        let detail = "the server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "shut_down", detail)
    }

    fn of(status: StatusCode, kind: &str, detail: &str, parameter: Option<&str>) -> Self {
        let mut problem = json!({
            "type": "about:blank",
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "kind": kind,
            "detail": detail,
        });
        let field = match status {
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            StatusCode::METHOD_NOT_ALLOWED => Some((header::ALLOW, "POST")),
            StatusCode::SERVICE_UNAVAILABLE => Some((header::RETRY_AFTER, "1")),
            _ => None,
        };
        if status == StatusCode::SERVICE_UNAVAILABLE {
            problem["retry_after"] = 1.into();
        }
        if let Some(parameter) = parameter {
            problem["parameter"] = parameter.into();
        }
        let mut response = Response::new(Bytes::from(problem.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        if let Some((name, value)) = field {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let problem = HeaderValue::from_static("application/problem+json");
        headers.insert(header::CONTENT_TYPE, problem);
        Self(response)
    }

    /// The problem details, in one line.
    pub(super) fn body(&self) -> &Bytes {
        self.0.body()
    }

    pub(super) fn into_response(self) -> Response<Bytes> {
        self.0
    }
}

impl From<AcquireError> for HttpProblem {
    fn from(error: AcquireError) -> Self {
        Self(Refusal::from(&error).to_response())
    }
}
