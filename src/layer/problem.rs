//! Problem details (RFC 9457) of a refusal, with the types of draft-ietf-httpapi-ratelimit-headers.
//!
//! Tests: `refusal.rs`, `tests/layer/refusals.rs`.

use std::fmt::{self, Display, Write};

use bytes::Bytes;
use http::{HeaderValue, Response, header};

use super::{
    fields::{quoted_name, whole_seconds},
    refusal::{Refusal, RefusalKind},
};
use crate::limit::MAX_WEIGHT;

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const TYPES: &str = "https://iana.org/assignments/http-problem-types";

impl Refusal {
    /// Builds the default response: problem details (RFC 9457) and `Retry-After`.
    ///
    /// The layer sends this response to all clients but gRPC clients, unless
    /// [`LimitLayer::refuse_with`](super::LimitLayer::refuse_with) builds another. `Retry-After` has whole seconds, rounded
    /// up. [`RefusalKind::BodyFailed`] has only a status, because there is hardly ever a client left to read more.
    /// [`RefusalKind::NoKey`], [`RefusalKind::InvalidWeight`], [`RefusalKind::InvalidCost`] and
    /// [`RefusalKind::UnknownRate`] have problem details of the type `about:blank`, with the status, `kind` and
    /// a detail (`InvalidWeight` also with `limit` and `weight`), and no `Retry-After`.
    ///
    /// The problem's type is, as in draft-ietf-httpapi-ratelimit-headers,
    /// `https://iana.org/assignments/http-problem-types#quota-exceeded` if the limit is the caller's own, and otherwise
    /// `#temporary-reduced-capacity`. Besides `type`, `title`, `status` and `detail` there are
    ///
    /// | member | value | present if |
    /// | --- | --- | --- |
    /// | `kind` | the code of the reason: [`RefusalKind::as_str`] | always |
    /// | `violated-policies` | a list with the limit's name, as in [`RateLimit`]; empty if no limit was reached | always |
    /// | `retry_after` | [`retry_after`](Self::retry_after), in seconds, as in `Retry-After` | always |
    /// | `limit` | [`max`](Self::max) | the limit was reached |
    /// | `weight` | [`weight`](Self::weight) | the limit was reached, and the weight is more than 1 |
    /// | `in_use`, `waiting` | slots and queued requests, across all replicas | the limit was reached, and is not a rate |
    /// | `period` | in seconds | the limit was reached, and is a rate |
    /// | `unit` | the unit of the rate: [`Limit::unit`](crate::Limit::unit) | the limit was reached, and is a rate |
    /// | `position` | [`position`](Self::position) | the request queued |
    /// | `waited` | in seconds | the request waited |
    ///
    /// [`RateLimit`]: super::LimitLayer::rate_limit_fields
    pub fn to_response(&self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = self.status();
        if self.kind() == RefusalKind::BodyFailed {
            return response;
        }
        *response.body_mut() = Bytes::from(json(self));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
        if self.kind().is_worth_a_retry() {
            let seconds = whole_seconds(self.retry_after());
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl Refusal {
    /// Adds `Retry-After` to a refusal built by a closure, unless it has the field already, or its status is not an error.
    pub(super) fn complete<B>(&self, mut response: Response<B>) -> Response<B> {
        let status = response.status();
        let is_error = status.is_client_error() || status.is_server_error();
        let is_known = response.headers().contains_key(header::RETRY_AFTER);
        if is_error && !is_known && self.kind().is_worth_a_retry() {
            let seconds = whole_seconds(self.retry_after());
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, seconds.into());
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

/// The problem details as a JSON object.
fn json(refusal: &Refusal) -> String {
    let mut json = String::with_capacity(512);
    // Writing to a string does not fail.
    let _ = write(&mut json, refusal);
    json
}

/// The detail for people: printable text without quotes or backslashes.
pub(super) fn detail(refusal: &Refusal) -> String {
    let (max, unit) = (refusal.max(), refusal.limit().counted());
    // While the store is down, or before it has answered, we only know that no slot is free.
    let slots = match refusal.weight() {
        1 => format!("{} of {max} slots in use", refusal.in_use().max(max)),
        weight => format!(
            "{weight} slots needed, {} of {max} in use",
            refusal.in_use()
        ),
    };
    match refusal.kind() {
        RefusalKind::Full => slots,
        RefusalKind::QueueFull => format!("{slots}, and the queue is full"),
        RefusalKind::TimedOut => {
            let waited = refusal.waited();
            format!("no slot became free within {waited:.1?}: {slots}")
        }
        RefusalKind::TooSoon => {
            let period = refusal.limit().period().unwrap_or_default();
            format!("the rate of {max} {unit} in {period:?} is used up")
        }
        RefusalKind::Lost => "the slot was lost before the response was ready".into(),
        RefusalKind::HeldTooLong => "the response was not ready in time".into(),
        RefusalKind::Revoked => "an operator has ended the call".into(),
        RefusalKind::Unavailable | RefusalKind::Misconfigured | RefusalKind::NoRuntime => {
            "the limit cannot be checked at the moment".into()
        }
        RefusalKind::ShutDown => "the service is shutting down".into(),
        RefusalKind::Paused => "newcomers are not admitted at the moment".into(),
        RefusalKind::InvalidWeight => {
            let weight = refusal.weight();
            match (1..=MAX_WEIGHT).contains(&weight) {
                true => format!("the request takes {weight} slots, and there are {max}"),
                false => format!("a request takes 1 to {MAX_WEIGHT} slots, not {weight}"),
            }
        }
        RefusalKind::InvalidCost => {
            format!("the request costs more than the {max} {unit} that the rate has at once")
        }
        // Only the log has the name.
        RefusalKind::UnknownRate => "the request cannot be charged".into(),
        RefusalKind::NoKey => "the request has no key to be counted by".into(),
        RefusalKind::BodyFailed => "the request's body failed".into(),
    }
}

fn write(json: &mut String, refusal: &Refusal) -> fmt::Result {
    if refusal.kind().is_invalid() || refusal.kind() == RefusalKind::UnknownRate {
        return write_invalid(json, refusal);
    }
    let (problem, title) = if refusal.is_own() {
        ("quota-exceeded", "Quota Exceeded")
    } else {
        ("temporary-reduced-capacity", "Temporary Reduced Capacity")
    };
    write!(json, r#"{{"type":"{TYPES}#{problem}","title":"{title}""#)?;
    write_reason(json, refusal)?;
    if refusal.kind().is_limited() {
        let name = quoted_name(refusal.limit_name());
        member(json, "violated-policies", format_args!("[{name}]"))?;
        member(json, "limit", refusal.max())?;
        write_standing(json, refusal)?;
    } else {
        // No policy was violated. The member is part of both types.
        member(json, "violated-policies", "[]")?;
    }
    member(json, "retry_after", whole_seconds(refusal.retry_after()))?;
    json.write_char('}')
}

/// Writes the problem details for a fault of the request or its handler, to which neither type applies. A retry is
/// pointless.
fn write_invalid(json: &mut String, refusal: &Refusal) -> fmt::Result {
    let status = refusal.status();
    let title = status.canonical_reason().unwrap_or_default();
    write!(json, r#"{{"type":"about:blank","title":"{title}""#)?;
    write_reason(json, refusal)?;
    if refusal.kind() == RefusalKind::InvalidWeight {
        member(json, "limit", refusal.max())?;
        member(json, "weight", refusal.weight())?;
    }
    json.write_char('}')
}

/// For clients, for programs and for people.
fn write_reason(json: &mut String, refusal: &Refusal) -> fmt::Result {
    member(json, "status", refusal.status().as_u16())?;
    member(
        json,
        "kind",
        format_args!(r#""{}""#, refusal.kind().as_str()),
    )?;
    member(json, "detail", format_args!(r#""{}""#, detail(refusal)))
}

fn write_standing(json: &mut String, refusal: &Refusal) -> fmt::Result {
    if let Some(period) = refusal.limit().period() {
        member(json, "period", period.as_secs_f64())?;
        let unit = refusal.limit().counted();
        member(json, "unit", format_args!(r#""{unit}""#))?;
    } else {
        if refusal.weight() != 1 {
            member(json, "weight", refusal.weight())?;
        }
        member(json, "in_use", refusal.in_use())?;
        member(json, "waiting", refusal.waiting())?;
    }
    if let Some(position) = refusal.position() {
        member(json, "position", position)?;
    }
    if !refusal.waited().is_zero() {
        let waited = refusal.waited().as_secs_f64();
        member(json, "waited", format_args!("{waited:.3}"))?;
    }
    Ok(())
}

fn member(json: &mut String, name: &str, value: impl Display) -> fmt::Result {
    write!(json, r#","{name}":{value}"#)
}
