//! The load of an upstream, judged by its responses.
//!
//! Tests: `tests/layer/pauses.rs`.

use std::time::Duration;

use http::{
    HeaderMap, HeaderValue,
    header::{DATE, RETRY_AFTER},
    response::Parts,
};
use httpdate::parse_http_date;

use crate::{error::ConfigError, ranges::MAX_PAUSE};

/// The outcome of a request, as [`Scope::outcome_by`](crate::layer::Scope::outcome_by) judges it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Nothing follows.
    Other,
    /// All replicas pause the key for this time.
    Pause(Duration),
}

/// Judges a response: if it refuses because of overload and states a time, asks for a [pause](Outcome::Pause) of that
/// time.
///
/// The status is 429, 503 or 529, or the response head has the gRPC status RESOURCE_EXHAUSTED or UNAVAILABLE. The time
/// is in the first of `retry-after-ms`, `grpc-retry-pushback-ms` and `Retry-After` (whole seconds, or an HTTP date after
/// the response's own `Date`) that can be read and is not negative. A time that is zero or in the past asks for no pause.
pub fn overload(head: &Parts) -> Outcome {
    const SITE_IS_OVERLOADED: u16 = 529;
    /// RESOURCE_EXHAUSTED, UNAVAILABLE.
    const GRPC_OVERLOADED: [&[u8]; 2] = [b"8", b"14"];
    let status = head.status.as_u16();
    let grpc = head.headers.get("grpc-status").map(HeaderValue::as_bytes);
    let refuses = matches!(status, 429 | 503 | SITE_IS_OVERLOADED)
        || grpc.is_some_and(|code| GRPC_OVERLOADED.contains(&code));
    let time = refuses.then(|| time_of(&head.headers)).flatten();
    match time.filter(|time| !time.is_zero()) {
        Some(time) => Outcome::Pause(time),
        None => Outcome::Other,
    }
}

/// Checks the longest pause of a scope.
pub(crate) fn check_pause(time: Duration) -> Result<(), ConfigError> {
    const SHORTEST: Duration = Duration::from_millis(1);
    if (SHORTEST..=MAX_PAUSE).contains(&time) {
        return Ok(());
    }
    let message = format!("pause_at_most is {time:?}: it must be {SHORTEST:?} to {MAX_PAUSE:?}");
    Err(ConfigError::value(message))
}

fn time_of(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let whole = |text: &str| text.parse::<u64>().ok().filter(|_| !text.starts_with('+'));
    let mut in_ms = ["retry-after-ms", "grpc-retry-pushback-ms"].into_iter();
    if let Some(ms) = in_ms.find_map(|name| text(name).and_then(whole)) {
        return Some(Duration::from_millis(ms));
    }
    let after = text(RETRY_AFTER.as_str())?;
    if let Some(seconds) = whole(after) {
        return Some(Duration::from_secs(seconds));
    }
    let date = |text: &str| parse_http_date(text).ok();
    date(after)?
        .duration_since(date(text(DATE.as_str())?)?)
        .ok()
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    const PAST: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn judged(status: u16, fields: &[(&str, &str)]) -> Option<Duration> {
        let mut response = Response::builder().status(status);
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        let (head, ()) = response.body(()).expect("valid").into_parts();
        match overload(&head) {
            Outcome::Pause(time) => Some(time),
            Outcome::Other => None,
        }
    }

    #[test]
    fn only_a_usable_time_is_a_pause() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (value, time) in [
            ("20", seconds(20)),
            (" 20 ", seconds(20)),
            ("31536000", seconds(31_536_000)),
            ("0", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("", None),
            ("soon", None),
            ("99999999999999999999", None),
            ("Sun, 06 Nov 1994 08:50:37 GMT", seconds(60)),
            ("Tue, 07 Mar 1995 08:49:37 GMT", seconds(121 * 86_400)),
            (PAST, None),
            ("Sun, 06 Nov 1994 08:49:36 GMT", None),
            ("Sun, 06 Nov 0000 08:49:36 GMT", None),
            ("Sun, 00 Nov 1995 08:49:36 GMT", None),
            ("Sun, 06 Nov 1995 24:49:36 GMT", None),
            ("Sun, 06 Nov 1995 08:49 GMT", None),
        ] {
            for status in [429, 503, 529] {
                let fields = [("retry-after", value), ("date", PAST)];
                assert_eq!(judged(status, &fields), time, "{value}");
            }
            assert_eq!(judged(500, &[("retry-after", value)]), None);
        }
        // The clock of this process may be wrong.
        let date = [("retry-after", "Sun, 06 Nov 2094 08:50:37 GMT")];
        assert_eq!(judged(429, &date), None);
        assert_eq!(judged(429, &[]), None);
        let exact = [("retry-after", "2"), ("retry-after-ms", "1500")];
        assert_eq!(judged(429, &exact), Some(Duration::from_millis(1_500)));
        for (code, time) in [
            ("8", seconds(1)),
            ("14", seconds(1)),
            ("0", None),
            ("4", None),
        ] {
            let fields = [("grpc-status", code), ("grpc-retry-pushback-ms", "1000")];
            assert_eq!(judged(200, &fields), time, "{code}");
        }
    }
}
