//! A refusal: the answer to a request that got no slot.

use std::{fmt::Write, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};

use super::gate::Gate;
use crate::{
    error::{AcquireError, AcquireErrorKind},
    limit::Limit,
};

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const PROBLEM_TYPES: &str = "https://iana.org/assignments/http-problem-types";
/// In seconds, and never 0, which clients take for "at once". When a slot comes free nobody knows.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Why a request was answered in place of the service.
///
/// It is in the extensions of every such response. There it tells an outer layer that the response is no answer of
/// the service, and a client-side layer's caller that the request was never sent.
#[derive(Clone, Debug)]
pub struct Refusal {
    limit: Limit,
    kind: RefusalKind,
    status: StatusCode,
    /// The limit is the caller's own, and others may still be let in.
    own: bool,
    in_use: u32,
    waiting: u32,
    waited: Duration,
}

/// The reason of a [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalKind {
    /// All slots are taken, and the limit does not wait.
    Full,
    /// All slots are taken, and as many requests wait as may.
    LineFull,
    /// No slot came free within the wait.
    TimedOut,
    /// The slot was lost before the service answered. The call was cancelled; only with
    /// [`OnLost::Abort`](super::OnLost::Abort).
    Lost,
    /// The store is down or too slow, and the limit's policy is to reject.
    Unavailable,
    /// The store refuses to work, or there is no Tokio runtime. The log says more.
    Misconfigured,
    /// The limiter is shutting down.
    ShutDown,
}

impl Refusal {
    pub(super) fn new(gate: &Gate, error: &AcquireError) -> Self {
        Self {
            in_use: error.in_use(),
            waiting: error.waiting(),
            waited: error.waited(),
            ..Self::of_kind(gate, error.kind().into())
        }
    }

    pub(super) fn lost(gate: &Gate) -> Self {
        Self::of_kind(gate, RefusalKind::Lost)
    }

    fn of_kind(gate: &Gate, kind: RefusalKind) -> Self {
        let status = if kind.is_limited() {
            gate.limited_status
        } else {
            gate.unavailable_status
        };
        Self {
            limit: gate.limit().clone(),
            kind,
            status,
            own: kind.is_limited() && !gate.scope.is_shared(),
            in_use: 0,
            waiting: 0,
            waited: Duration::ZERO,
        }
    }

    /// The reason.
    pub fn kind(&self) -> RefusalKind {
        self.kind
    }

    /// The limit that refused.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The status that the layer's settings give to such a refusal.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Slots in use under the limit and key, across all replicas, when this process last heard; 0 if it did not ask.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Waiters under the limit and key, across all replicas, when this process last heard; 0 if it did not ask.
    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    /// How long the request waited in line.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The response that is sent unless [`LimitLayer::refuse_with`](super::LimitLayer::refuse_with) builds another:
    /// problem details (RFC 9457) in JSON, and `Retry-After`, which is never 0.
    pub fn to_response(&self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::from(self.problem()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
        headers.insert(header::RETRY_AFTER, RETRY_AFTER);
        response
    }

    /// The types are those of draft-ietf-httpapi-ratelimit-headers.
    fn problem(&self) -> String {
        let (problem, title) = if self.own {
            ("quota-exceeded", "Too many requests at a time")
        } else {
            ("temporary-reduced-capacity", "No capacity at the moment")
        };
        let status = self.status.as_u16();
        let detail = self.detail();
        let policy = json_string(self.limit.name());
        format!(
            r#"{{"type":"{PROBLEM_TYPES}#{problem}","title":"{title}","status":{status},"detail":"{detail}","violated-policies":[{policy}]}}"#
        )
    }

    fn detail(&self) -> String {
        let max = self.limit.max();
        match self.kind {
            RefusalKind::Full => format!("all {max} slots are in use"),
            RefusalKind::LineFull => format!("all {max} slots are in use and the line is full"),
            RefusalKind::TimedOut => {
                format!("none of {max} slots came free in {:.1?}", self.waited)
            }
            RefusalKind::Lost => "the slot was lost before the response was ready".into(),
            RefusalKind::Unavailable | RefusalKind::Misconfigured => {
                "slots cannot be given at the moment".into()
            }
            RefusalKind::ShutDown => "the service is shutting down".into(),
        }
    }
}

impl RefusalKind {
    /// Whether the limit was reached: no slot, no place in the line, or none in time.
    pub fn is_limited(self) -> bool {
        matches!(self, Self::Full | Self::LineFull | Self::TimedOut)
    }
}

impl From<AcquireErrorKind> for RefusalKind {
    fn from(kind: AcquireErrorKind) -> Self {
        match kind {
            AcquireErrorKind::Full => Self::Full,
            AcquireErrorKind::LineFull => Self::LineFull,
            AcquireErrorKind::TimedOut => Self::TimedOut,
            AcquireErrorKind::Unavailable => Self::Unavailable,
            AcquireErrorKind::Misconfigured | AcquireErrorKind::NoRuntime => Self::Misconfigured,
            AcquireErrorKind::ShutDown => Self::ShutDown,
        }
    }
}

/// A JSON string: quotes, backslashes and control characters are escaped, the rest of Unicode stands for itself.
fn json_string(raw: &str) -> String {
    let mut json = String::with_capacity(raw.len() + 2);
    json.push('"');
    for character in raw.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            '\0'..='\x1f' => {
                // Writing to a string does not fail.
                let _ = write!(json, "\\u{:04x}", u32::from(character));
            }
            _ => json.push(character),
        }
    }
    json.push('"');
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_is_a_json_string() {
        let every_ascii = (0..=0x7f).map(char::from).collect::<String>();
        for raw in ["", "chat", "a\"b\\c/d", "\u{2028}ü😀", &every_ascii] {
            let parsed = serde_json::from_str::<String>(&json_string(raw));
            assert_eq!(parsed.ok().as_deref(), Some(raw));
        }
    }
}
