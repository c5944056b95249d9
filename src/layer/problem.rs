//! Problem details (RFC 9457) of a refusal. The types are those of draft-ietf-httpapi-ratelimit-headers.

use std::fmt::{self, Display, Write};

use super::{
    fields::{quoted_name, whole_seconds},
    refusal::{Refusal, RefusalKind},
};

const TYPES: &str = "https://iana.org/assignments/http-problem-types";

/// The object in JSON.
pub(super) fn json(refusal: &Refusal) -> String {
    let mut json = String::with_capacity(512);
    // Writing to a string does not fail.
    let _ = write(&mut json, refusal);
    json
}

/// For people. Printable text without quotes or backslashes.
pub(super) fn detail(refusal: &Refusal) -> String {
    let max = refusal.max();
    match refusal.kind() {
        RefusalKind::Full => format!("all {max} slots are in use"),
        RefusalKind::LineFull => format!("all {max} slots are in use and the line is full"),
        RefusalKind::TimedOut => {
            format!("none of {max} slots came free in {:.1?}", refusal.waited())
        }
        RefusalKind::TooSoon => {
            let period = refusal.limit().period().unwrap_or_default();
            format!("no more than {max} requests in {period:?}")
        }
        RefusalKind::Lost => "the slot was lost before the response was ready".into(),
        RefusalKind::HeldTooLong => "the response was not ready in time".into(),
        RefusalKind::Unavailable | RefusalKind::Misconfigured => {
            "slots cannot be given at the moment".into()
        }
        RefusalKind::ShutDown => "the service is shutting down".into(),
        RefusalKind::BodyFailed => "the request's body failed".into(),
    }
}

fn write(json: &mut String, refusal: &Refusal) -> fmt::Result {
    let (problem, title) = if refusal.is_own() {
        ("quota-exceeded", "Quota Exceeded")
    } else {
        ("temporary-reduced-capacity", "Temporary Reduced Capacity")
    };
    write!(json, r#"{{"type":"{TYPES}#{problem}","title":"{title}""#)?;
    member(json, "status", refusal.status().as_u16())?;
    member(json, "detail", format_args!(r#""{}""#, detail(refusal)))?;
    if refusal.kind().is_limited() {
        let name = quoted_name(refusal.limit());
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

fn write_standing(json: &mut String, refusal: &Refusal) -> fmt::Result {
    if let Some(period) = refusal.limit().period() {
        member(json, "period", period.as_secs_f64())?;
    } else {
        member(json, "in_use", refusal.in_use())?;
        member(json, "waiting", refusal.waiting())?;
    }
    if let Some(place) = refusal.place() {
        member(json, "place", place)?;
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
