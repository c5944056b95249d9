//! Refusals as problem details (RFC 9457): of requests that reach no limit, and of limits.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;
use tower_turnstile::{AcquireError, Refusal};

/// Why a client gets no slot, as a response.
#[derive(Debug)]
pub(super) struct HttpProblem(Box<Response<Bytes>>);

impl HttpProblem {
    /// `kind`: for programs. `detail`: for people.
    pub(super) fn new(status: u16, kind: &'static str, detail: impl AsRef<str>) -> Self {
        Self::of(status, kind, detail.as_ref(), None)
    }

    /// A fault of this parameter.
    pub(super) fn parameter(name: impl AsRef<str>, message: impl AsRef<str>) -> Self {
        let (name, message) = (name.as_ref(), message.as_ref());
        let detail = format!("`{name}`: {message}");
        Self::of(400, "parameter", &detail, Some(name))
    }

    pub(super) fn malformed() -> Self {
        let detail = "names and values are UTF-8, percent-encoded";
        Self::new(400, "malformed", detail)
    }

    pub(super) fn shut_down() -> Self {
        let detail = "the server is shutting down";
        Self::new(503, "shut_down", detail)
    }

    fn of(status: u16, kind: &str, detail: &str, parameter: Option<&str>) -> Self {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = StatusCode::from_u16(status).expect("a status");
        let mut problem = json!({
            "type": "about:blank",
            "title": response.status().canonical_reason(),
            "status": status,
            "kind": kind,
            "detail": detail,
        });
        if let Some(parameter) = parameter {
            problem["parameter"] = parameter.into();
        }
        let mut set = |name, value| {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        };
        set(header::CONTENT_TYPE, "application/problem+json");
        match status {
            401 => set(header::WWW_AUTHENTICATE, "Bearer"),
            405 => set(header::ALLOW, "POST"),
            503 => {
                set(header::RETRY_AFTER, "1");
                problem["retry_after"] = 1.into();
            }
            _ => {}
        }
        *response.body_mut() = problem.to_string().into();
        Self(Box::new(response))
    }

    /// The problem details, in one line.
    pub(super) fn body(&self) -> &Bytes {
        self.0.body()
    }

    pub(super) fn into_response(self) -> Response<Bytes> {
        *self.0
    }
}

impl From<AcquireError> for HttpProblem {
    fn from(error: AcquireError) -> Self {
        Self(Box::new(Refusal::from(&error).to_response()))
    }
}
