//! Problem details (RFC 9457) of a refusal, with the types of draft-ietf-httpapi-ratelimit-headers.
//!
//! Tests: `refusal.rs`, `tests/layer/refusals.rs`.

use std::fmt::{self, Display, Write};

use bytes::Bytes;
use http::{HeaderValue, Response, header};

use super::{fields::quoted_name, kind::RefusalKind, refusal::Refusal};
use crate::limit::MAX_WEIGHT;

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

impl Refusal {
    /// Builds the default response: problem details (RFC 9457) and `Retry-After`.
    ///
    /// The layer sends this response to all clients but gRPC clients, unless
    /// [`LimitLayer::refuse_with`](crate::layer::LimitLayer::refuse_with) builds another. `Retry-After` has whole seconds, rounded
    /// up. [`RefusalKind::BodyFailed`] has only a status, because there is hardly ever a client left to read more.
    /// [`RefusalKind::NoKey`], [`RefusalKind::AmbiguousPath`], [`RefusalKind::InvalidWeight`], [`RefusalKind::InvalidCost`],
    /// [`RefusalKind::UnknownRate`] and [`RefusalKind::UnknownLimit`] have problem details of the type `about:blank`, with the status, `kind` and
    /// a detail (`InvalidWeight` also with `limit` and `weight`), and no `Retry-After`.
    ///
    /// The problem's type is, as in draft-ietf-httpapi-ratelimit-headers,
    /// `https://iana.org/assignments/http-problem-types#quota-exceeded` if the limit is the caller's own, and otherwise
    /// `#temporary-reduced-capacity`. Besides `type`, `title`, `status` and `detail` there are
    ///
    /// | member | value | present if |
    /// | --- | --- | --- |
    /// | `kind` | the code of the reason: [`RefusalKind::as_str`] | always |
    /// | `violated-policies` | a list with the limit's name, as in [`RateLimit`]; empty if no limit was reached | the type is not `about:blank` |
    /// | `retry_after` | [`retry_after`](Self::retry_after), in seconds, as in `Retry-After` | the type is not `about:blank` |
    /// | `limit` | [`max`](Self::max) | the limit was reached |
    /// | `weight` | [`weight`](Self::weight) | the limit was reached, and the weight is more than 1 |
    /// | `in_use`, `waiting` | slots and queued requests, across all replicas | the limit was reached, and is not a rate |
    /// | `period` | in seconds | the limit was reached, and is a rate |
    /// | `unit` | the unit of the rate: [`Limit::unit`](crate::Limit::unit) | the limit was reached, and is a rate |
    /// | `position` | [`position`](Self::position) | the request queued |
    /// | `waited` | in seconds | the request waited |
    ///
    /// [`RateLimit`]: crate::layer::LimitLayer::rate_limit_fields
    pub fn to_response(&self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = self.status();
        if self.kind() == RefusalKind::BodyFailed {
            return response;
        }
        *response.body_mut() = Bytes::from(json(self));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
        if let Some(seconds) = self.retry_after_secs() {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }

    /// Adds `Retry-After` to a refusal built by a closure, unless it has the field already, or its status is not an error.
    pub(in crate::layer) fn complete<B>(&self, mut response: Response<B>) -> Response<B> {
        let status = response.status();
        let is_error = status.is_client_error() || status.is_server_error();
        if is_error && let Some(seconds) = self.retry_after_secs() {
            let field = response.headers_mut().entry(header::RETRY_AFTER);
            field.or_insert(seconds.into());
        }
        response
    }
}

/// Shows a text for people, such as `chat: 5 of 5 slots in use`: the limit's name, and the `detail` of the [default
/// response](Refusal::to_response).
impl Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.limit_name(), detail(self))
    }
}

/// The problem details as a JSON object. None of the texts needs an escape.
fn json(refusal: &Refusal) -> String {
    let (kind, status) = (refusal.kind(), refusal.status());
    // A fault of the request or its handler, to which neither type applies.
    let is_fault = kind.is_invalid() || kind.is_of_handler();
    let (problem, title) = if is_fault {
        ("about:blank", status.canonical_reason().unwrap_or_default())
    } else if refusal.is_own() {
        (QUOTA_EXCEEDED, "Quota Exceeded")
    } else {
        (REDUCED_CAPACITY, "Temporary Reduced Capacity")
    };
    let mut json = Object(String::with_capacity(512));
    json.text("type", problem);
    json.text("title", title);
    json.member("status", status.as_u16());
    json.text("kind", kind.as_str());
    json.text("detail", detail(refusal));
    if kind == RefusalKind::InvalidWeight {
        json.member("limit", refusal.max());
        json.member("weight", refusal.weight());
    }
    if kind.is_limited() {
        let name = quoted_name(refusal.limit_name());
        json.member("violated-policies", format_args!("[{name}]"));
        json.member("limit", refusal.max());
        if let Some((period, unit)) = refusal.period().zip(refusal.unit()) {
            json.member("period", period.as_secs_f64());
            json.text("unit", unit);
        } else {
            if refusal.weight() != 1 {
                json.member("weight", refusal.weight());
            }
            json.member("in_use", refusal.in_use());
            json.member("waiting", refusal.waiting());
        }
        if let Some(position) = refusal.position() {
            json.member("position", position);
        }
        if !refusal.waited().is_zero() {
            let waited = refusal.waited().as_secs_f64();
            json.member("waited", format_args!("{waited:.3}"));
        }
    } else if !is_fault {
        // No policy was violated. The member is part of both types.
        json.member("violated-policies", "[]");
    }
    if let Some(seconds) = refusal.retry_after_secs() {
        json.member("retry_after", seconds);
    }
    json.0.push('}');
    json.0
}

/// The members of a JSON object so far.
struct Object(String);

impl Object {
    fn member(&mut self, name: &str, value: impl Display) {
        let separator = if self.0.is_empty() { '{' } else { ',' };
        // Writing to a string does not fail.
        let _ = write!(self.0, r#"{separator}"{name}":{value}"#);
    }

    fn text(&mut self, name: &str, text: impl Display) {
        self.member(name, format_args!(r#""{text}""#));
    }
}

/// The detail for people: printable text without quotes or backslashes.
pub(super) fn detail(refusal: &Refusal) -> String {
    let details = &*refusal.details;
    let (max, unit) = (details.max, details.unit);
    match refusal.kind() {
        RefusalKind::Full => details.slots(),
        RefusalKind::QueueFull => format!("{}, and the queue is full", details.slots()),
        RefusalKind::TimedOut => {
            let (waited, slots) = (details.waited, details.slots());
            format!("no slot became free within {waited:.1?}: {slots}")
        }
        RefusalKind::TooSoon => {
            let period = details.period.unwrap_or_default();
            let rest = details.rest_of_rate();
            format!("the rate of {max} {unit} in {period:?} {rest}")
        }
        RefusalKind::Lost => "the slot was lost before the response was ready".into(),
        RefusalKind::HeldTooLong => "the response was not ready in time".into(),
        RefusalKind::Revoked => "an operator has ended the call".into(),
        RefusalKind::Unavailable | RefusalKind::Misconfigured | RefusalKind::NoRuntime => {
            "the limit cannot be checked at the moment".into()
        }
        RefusalKind::ShutDown => "the service is shutting down".into(),
        RefusalKind::Paused => "the limit is paused".into(),
        RefusalKind::InvalidWeight => {
            let weight = refusal.weight();
            if (1..=MAX_WEIGHT).contains(&weight) {
                format!("the request takes {weight} slots, and there are {max}")
            } else {
                format!("a request takes 1 to {MAX_WEIGHT} slots, not {weight}")
            }
        }
        RefusalKind::InvalidCost => {
            format!("the request costs more than the {max} {unit} that the rate has at once")
        }
        // Only the log has the name.
        RefusalKind::UnknownRate => "the request cannot be charged".into(),
        RefusalKind::UnknownLimit => "the request is not under this limit".into(),
        RefusalKind::NoKey if refusal.is_fair => {
            "the request has no key or no tenant for this limit".into()
        }
        RefusalKind::NoKey => "the request has no key for this limit".into(),
        RefusalKind::AmbiguousPath => "the path is ambiguous".into(),
        RefusalKind::BodyFailed => "the request's body failed".into(),
    }
}
