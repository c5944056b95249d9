//! The load of an upstream, judged by its responses.
//!
//! Tests: `tests/layer/pauses.rs`, `adaptive.rs`.

use std::time::Duration;

use http::{
    HeaderMap,
    header::{DATE, RETRY_AFTER},
    response::Parts,
};
use httpdate::parse_http_date;

use crate::{error::ConfigError, limit::Verdict, permit::Share, ranges::MAX_PAUSE};

/// The outcome of a request, as [`Scope::outcome_by`](crate::layer::Scope::outcome_by) judges it. The order is that of
/// gravity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Outcome {
    /// The upstream took the request: an [adaptive](crate::layer::Scope::adapt) limit may grow.
    Accepted,
    /// The response says nothing of the load.
    Other,
    /// The upstream is overloaded: an adaptive limit counts it, and is cut if there are several.
    Overloaded,
    /// All replicas pause the key for this time. An adaptive limit counts it as overloaded too.
    Pause(Duration),
}

impl Outcome {
    /// Tells a limit of the slots. Returns whether they have one of this name that heeds the outcome.
    pub(in crate::layer) fn apply(self, share: &Share, limit_name: &str) -> bool {
        match self {
            Self::Other => false,
            Self::Accepted => share.report(limit_name, Verdict::Accepted),
            Self::Overloaded => share.report(limit_name, Verdict::Overloaded),
            Self::Pause(time) => {
                share.report(limit_name, Verdict::Overloaded);
                share.pause(limit_name, time)
            }
        }
    }
}

/// Time from the admission of a request to the head of its response, in the head's extensions.
#[derive(Clone, Copy)]
pub(in crate::layer) struct TimeToHead(pub Duration);

/// Judges a response by its status: an upstream that refuses because of overload is [overloaded](Outcome::Overloaded), and
/// if the response states a time, asks for a [pause](Outcome::Pause) of that time.
///
/// The status is 429, 503 or 529, or the response head has the gRPC status RESOURCE_EXHAUSTED or UNAVAILABLE. The time
/// is in the first of `retry-after-ms`, `grpc-retry-pushback-ms` and `Retry-After` (whole seconds, or an HTTP date after
/// the response's own `Date`) that can be read and is not negative. A time that is zero or in the past asks for no pause.
///
/// A status from 100 to 399 without a gRPC error in the head is [accepted](Outcome::Accepted). Any other error tells nothing of
/// the load.
pub fn overload(head: &Parts) -> Outcome {
    const SITE_IS_OVERLOADED: u16 = 529;
    let refuses = match head.headers.get("grpc-status") {
        // RESOURCE_EXHAUSTED, UNAVAILABLE.
        Some(code) if matches!(code.as_bytes(), b"8" | b"14") => true,
        _ => matches!(head.status.as_u16(), 429 | 503 | SITE_IS_OVERLOADED),
    };
    if !refuses {
        return accepted_or_other(head);
    }
    match time_of(&head.headers).filter(|time| !time.is_zero()) {
        Some(time) => Outcome::Pause(time),
        None => Outcome::Overloaded,
    }
}

/// Judges a response by the time from the admission of its request to its head, for an upstream that takes every request and
/// gets slower: a later head is [overloaded](Outcome::Overloaded), whatever its status.
///
/// An earlier head is [accepted](Outcome::Accepted), unless its status is an error, which may be early because the upstream did
/// no work. Choose a time that the upstream keeps for 97 to 99 of 100 requests while it is healthy: an
/// [adaptive](crate::layer::Scope::adapt) limit settles where about one head in nine is late. Only
/// [`Scope::outcome_by`](crate::layer::Scope::outcome_by) knows the time: elsewhere the outcome is [`Other`](Outcome::Other).
///
/// ```
/// use std::time::Duration;
/// use tower_turnstile::{Limit, Limiter, layer};
///
/// const GPU: Limit = Limit::concurrent("gpu", 64).wait_up_to(Duration::from_secs(30));
/// let gpu = GPU.by_header("x-model").outcome_by(layer::slower_than(Duration::from_secs(2))).adapt(16..=256);
/// let layer = Limiter::in_memory().layer(gpu)?;
/// # Ok::<(), tower_turnstile::ConfigError>(())
/// ```
///
/// # Panics
///
/// If the time is zero.
#[track_caller]
pub fn slower_than(target: Duration) -> impl Fn(&Parts) -> Outcome + Clone + Send + Sync {
    assert!(!target.is_zero(), "no head comes within no time");
    move |head| match head.extensions.get() {
        Some(TimeToHead(time)) if *time > target => Outcome::Overloaded,
        Some(_) => accepted_or_other(head),
        None => Outcome::Other,
    }
}

fn accepted_or_other(head: &Parts) -> Outcome {
    let grpc = head.headers.get("grpc-status");
    let is_error = head.status.as_u16() >= 400 || grpc.is_some_and(|code| code != "0");
    if is_error {
        Outcome::Other
    } else {
        Outcome::Accepted
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

    fn head(status: u16, fields: &[(&str, &str)]) -> Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in fields {
            response = response.header(*name, *value);
        }
        response.body(()).expect("valid").into_parts().0
    }

    fn judged(status: u16, fields: &[(&str, &str)]) -> Option<Duration> {
        match overload(&head(status, fields)) {
            Outcome::Pause(time) => Some(time),
            _ => None,
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
    #[test]
    fn only_what_tells_of_the_load_is_more_than_other() {
        use Outcome::{Accepted, Other, Overloaded};
        for (status, code, outcome) in [
            (101, None, Accepted),
            (200, None, Accepted),
            (302, None, Accepted),
            (200, Some("0"), Accepted),
            (200, Some("8"), Overloaded),
            (200, Some("14"), Overloaded),
            (200, Some("4"), Other),
            (200, Some(""), Other),
            (429, None, Overloaded),
            (503, None, Overloaded),
            (529, None, Overloaded),
            (503, Some("2"), Overloaded),
            (404, None, Other),
            (500, None, Other),
            (502, None, Other),
            (504, None, Other),
        ] {
            let code = code.map(|code| ("grpc-status", code));
            let mut head = head(status, code.as_slice());
            assert_eq!(overload(&head), outcome, "{status} {code:?}");
            // Whatever its status, a late head is a sign of load, and an early refusal is none of speed.
            let late = slower_than(Duration::from_secs(2));
            assert_eq!(late(&head), Other, "outside of a layer");
            head.extensions
                .insert(TimeToHead(Duration::from_millis(2_001)));
            assert_eq!(late(&head), Overloaded);
            head.extensions.insert(TimeToHead(Duration::from_secs(2)));
            let expected = outcome.min(Other);
            assert_eq!(late(&head), expected, "{status} {code:?}");
        }
    }

    #[test]
    fn the_gravest_counts() {
        let all = [
            Outcome::Accepted,
            Outcome::Other,
            Outcome::Overloaded,
            Outcome::Pause(Duration::from_secs(1)),
            Outcome::Pause(Duration::from_secs(2)),
        ];
        assert!(all.is_sorted());
    }
}
