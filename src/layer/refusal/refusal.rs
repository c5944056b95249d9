//! A refusal: the layer's answer to a request that got no slot.

use std::time::Duration;

use http::StatusCode;

use super::{fields, kind::RefusalKind};
use crate::{
    error::{AcquireError, AcquireErrorDetails},
    limit::Limit,
    status::Quota,
};

/// Time until a retry, if unknown. Never zero, which clients take for "at once".
const RETRY_SOME_TIME: Duration = Duration::from_secs(1);

/// Reason and numbers of a request that the layer refused.
///
/// Every such response has the refusal in its extensions, so that an outer layer, or the caller of a layered client, can
/// distinguish a refusal from a response of the service.
#[derive(Clone, Debug)]
pub struct Refusal {
    kind: RefusalKind,
    status: StatusCode,
    pub(super) details: Box<AcquireErrorDetails>,
    /// Whether the limit has tenants.
    pub(super) is_fair: bool,
    /// Set even if a retry is pointless.
    pub(super) retry_after: Duration,
}

/// Converts into a refusal like a layer's, for handlers that acquire their own permits. The settings of layers do not
/// apply.
///
/// The status is 429, or 503 if all callers share the limit ([`Key::SHARED`](crate::Key::SHARED)) or no limit was reached:
/// the store is down, the limiter is shutting down. The status is 400 for a weight or a cost that could never be admitted,
/// and 500 for a budget at a rate, or a pause of a limit, that the request does not have. With the feature `axum`, the error
/// itself implements `IntoResponse`.
///
/// ```
/// use http::StatusCode;
/// use tower_turnstile::{Limit, Limiter, Refusal};
///
/// const EXPORT: Limit = Limit::concurrent("export", 1);
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let export = Limiter::in_memory().semaphore(&EXPORT, "acme")?;
/// let _permit = export.acquire().await?;
/// let error = export.acquire().await.unwrap_err();
/// let response = Refusal::from(&error).to_response(); // or `to_grpc_response`
/// assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
/// assert!(response.headers().contains_key("retry-after"));
/// # Ok(())
/// # }
/// ```
impl From<&AcquireError> for Refusal {
    fn from(error: &AcquireError) -> Self {
        let (kind, details) = (RefusalKind::from(error.kind()), error.details.clone());
        let refusal = Self {
            kind,
            status: kind.status(details.is_shared),
            details,
            is_fair: false,
            retry_after: RETRY_SOME_TIME,
        };
        refusal.because(error)
    }
}

impl Refusal {
    /// A refusal with no numbers but the limit's.
    pub(in crate::layer) fn new(
        limit: &Limit,
        is_shared: bool,
        kind: RefusalKind,
        status: StatusCode,
    ) -> Self {
        let details = AcquireErrorDetails {
            is_shared,
            ..limit.error_details()
        };
        Self {
            kind,
            status,
            details: Box::new(details),
            is_fair: limit.is_fair(),
            retry_after: RETRY_SOME_TIME,
        }
    }

    /// Takes the numbers of the error. If a limit was reached, the retry waits until none of the request's limits is used
    /// up, since an earlier retry would be refused by the next limit.
    pub(in crate::layer) fn because(mut self, error: &AcquireError) -> Self {
        let is_shared = self.details.is_shared;
        self.details.clone_from(&error.details);
        self.details.is_shared = is_shared;
        self.retry_after = retry_after(self.kind, error.details.period, error.retry_after());
        if self.kind.is_limited() || self.kind == RefusalKind::Paused {
            let wait = fields::until_none_is_used_up(self.quotas()).unwrap_or_default();
            self.retry_after = self.retry_after.max(wait);
        }
        self
    }

    pub(in crate::layer) fn quotas(&self) -> &[Quota] {
        &self.details.quotas
    }

    /// Whether the caller's own limit was reached, so that other callers may still be admitted.
    pub(super) fn is_own(&self) -> bool {
        self.kind.is_limited() && !self.details.is_shared
    }

    /// Returns the reason.
    pub fn kind(&self) -> RefusalKind {
        self.kind
    }

    /// Returns the name of the limit that refused.
    pub fn limit_name(&self) -> &str {
        &self.details.limit_name
    }

    /// Returns the limit's value for this key.
    pub fn max(&self) -> u32 {
        self.details.max
    }

    /// Returns the status for this refusal, by the layer's settings.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the units of slots that the request would have taken. See [`Scope::weight_by`](crate::layer::Scope::weight_by).
    pub fn weight(&self) -> u32 {
        self.details.weight
    }

    /// Returns the slots in use for this limit and key, across all replicas, as last reported.
    pub fn in_use(&self) -> u32 {
        self.details.in_use
    }

    /// Returns the number of queued requests for this limit and key, across all replicas, as last reported.
    ///
    /// The number may include the refused request, if it queued.
    pub fn waiting(&self) -> u32 {
        self.details.waiting
    }

    /// Returns the last known queue position: 1 at the head. `None` if the request did not queue.
    pub fn position(&self) -> Option<u32> {
        self.details.place
    }

    /// Returns the unit of the rate that refused, such as `requests`. `None` if the limit is not a rate.
    pub fn unit(&self) -> Option<&str> {
        self.period().map(|_| self.details.unit.as_str())
    }

    /// Returns the period of the rate that refused. `None` if the limit is not a rate.
    pub fn period(&self) -> Option<Duration> {
        self.details.period
    }

    /// Returns the time that the request waited.
    pub fn waited(&self) -> Duration {
        self.details.waited
    }

    /// Returns the time after which the client should retry, never zero, or `None` if a retry is pointless:
    /// [`RefusalKind::NoKey`], [`RefusalKind::AmbiguousPath`], [`RefusalKind::InvalidWeight`], [`RefusalKind::InvalidCost`],
    /// [`RefusalKind::BodyFailed`], [`RefusalKind::UnknownRate`], [`RefusalKind::UnknownLimit`].
    ///
    /// For a rate the time is exact: a request after this time is admitted, unless another request comes first. For a
    /// pause the time is exact too: its end. For slots the time is an estimate of at most 1 h, with jitter of up to a
    /// quarter, so that clients refused together do not come back together. If another limit of the request is used up
    /// for longer, its time counts. If the time is unknown, as in an outage or a shutdown, it is 1 s.
    pub fn retry_after(&self) -> Option<Duration> {
        let is_worth_it = self.kind.is_worth_a_retry();
        is_worth_it.then_some(self.retry_after)
    }

    /// Returns [`retry_after`](Self::retry_after) in whole seconds, rounded up: the value of the header `Retry-After`.
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after().map(fields::whole_seconds)
    }
}

fn retry_after(kind: RefusalKind, period: Option<Duration>, hint: Option<Duration>) -> Duration {
    let Some(time) = hint.filter(|time| !time.is_zero()) else {
        return RETRY_SOME_TIME;
    };
    match kind {
        // No request is admitted before the pause ends, however long it is.
        RefusalKind::Paused => time,
        RefusalKind::TooSoon => fields::bounded(period, time),
        // Jitter, so that clients that were refused together do not come back together.
        _ => fields::bounded(period, time).mul_f64(1.0 + fastrand::f64() / 4.0),
    }
}

#[cfg(test)]
mod tests {
    use http::{StatusCode, header};
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tonic::{Code, Status};
    use tonic_types::StatusExt;

    use super::*;
    use crate::error::AcquireErrorKind;

    const CHAT: Limit = Limit::concurrent("chat", 5);
    const OPENS: Limit = Limit::rate("opens", 60, Duration::from_secs(90));
    const HOUR: Duration = Duration::from_secs(3_600);

    fn refusal(limit: &Limit, kind: AcquireErrorKind, hint: Option<Duration>) -> Refusal {
        let quota = Quota {
            reset: hint,
            ..limit.quota(limit.max())
        };
        let details = AcquireErrorDetails {
            retry_after: hint,
            quotas: vec![quota],
            ..limit.error_details()
        };
        refused(limit, &AcquireError::new(kind, details))
    }

    fn refused(limit: &Limit, error: &AcquireError) -> Refusal {
        let kind = error.kind().into();
        Refusal::new(limit, false, kind, StatusCode::TOO_MANY_REQUESTS).because(error)
    }

    fn problem(refusal: &Refusal) -> Value {
        serde_json::from_slice(refusal.to_response().body()).unwrap()
    }

    fn seconds(refusal: &Refusal) -> u64 {
        let header = refusal.to_response().headers()[header::RETRY_AFTER].clone();
        header.to_str().unwrap().parse().unwrap()
    }

    #[test]
    fn each_refusal_shows_its_code() {
        for &kind in RefusalKind::ALL {
            let refusal = Refusal::new(&CHAT, false, kind, StatusCode::SERVICE_UNAVAILABLE);
            let grpc = refusal.to_grpc_response();
            let status = Status::from_header_map(grpc.headers()).unwrap();
            let code = status.metadata().get("turnstile-kind").unwrap();
            assert_eq!(code.to_str().unwrap(), kind.as_str());
            // It has no body.
            if kind != RefusalKind::BodyFailed {
                assert_eq!(problem(&refusal)["kind"], kind.as_str());
            }
        }
    }

    #[test]
    fn a_request_that_left_the_queue_has_its_last_numbers() {
        let details = AcquireErrorDetails {
            max: 7,
            in_use: 7,
            waiting: 4,
            place: Some(3),
            waited: Duration::from_millis(1_500),
            retry_after: None,
            ..CHAT.error_details()
        };
        let error = AcquireError::new(AcquireErrorKind::TimedOut, details);
        let refusal = refused(&CHAT, &error);
        assert_eq!((refusal.max(), refusal.position()), (7, Some(3)));
        let expected = json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Quota Exceeded",
            "status": 429,
            "kind": "timed_out",
            "detail": "no slot became free within 1.5s: 7 of 7 slots in use",
            "violated-policies": ["chat"],
            "limit": 7,
            "in_use": 7,
            "waiting": 4,
            "position": 3,
            "waited": 1.5,
            "retry_after": 1,
        });
        assert_eq!(problem(&refusal), expected);
    }

    #[test]
    fn the_retry_of_a_used_up_rate_is_exact() {
        let exact = Duration::from_micros(2_000_001);
        let refusal = refusal(&OPENS, AcquireErrorKind::TooSoon, Some(exact));
        assert_eq!(refusal.kind(), RefusalKind::TooSoon);
        assert_eq!(refusal.retry_after(), Some(exact));
        assert_eq!(seconds(&refusal), 3);
        let expected = json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Quota Exceeded",
            "status": 429,
            "kind": "too_soon",
            "detail": "the rate of 60 requests in 90s is used up",
            "violated-policies": ["opens"],
            "limit": 60,
            "period": 90,
            "unit": "requests",
            "retry_after": 3,
        });
        assert_eq!(problem(&refusal), expected);
    }

    #[test]
    fn a_rate_is_of_its_unit() {
        let tokens = OPENS.unit("tokens");
        let used_up = refusal(&tokens, AcquireErrorKind::TooSoon, None);
        let detail = "the rate of 60 tokens in 90s is used up";
        assert_eq!(problem(&used_up)["detail"], detail);
        assert_eq!(problem(&used_up)["unit"], "tokens");
        let head = used_up.to_grpc_response().headers().clone();
        let status = Status::from_header_map(&head).unwrap();
        assert_eq!(status.message(), format!("opens: {detail}"));
        let too_dear = refusal(&tokens, AcquireErrorKind::InvalidCost, None);
        let detail = "the request costs more than the 60 tokens that the rate has at once";
        assert_eq!(problem(&too_dear)["detail"], detail);
        // A handler knows the limit only from its error; its refusal has the unit too.
        let details = tokens.error_details();
        let error = AcquireError::new(AcquireErrorKind::TooSoon, details);
        assert_eq!(error.to_string(), "rate `opens` of 60 tokens is used up");
        let mut details = tokens.error_details();
        details.quotas = vec![Quota {
            remaining: 50,
            ..tokens.quota(60)
        }];
        let some_left = AcquireError::new(AcquireErrorKind::TooSoon, details);
        let (text, detail) = (some_left.to_string(), problem(&Refusal::from(&some_left)));
        let left = "has 50 left, fewer than the request costs";
        assert_eq!(text, format!("rate `opens` of 60 tokens {left}"));
        let expected = format!("the rate of 60 tokens in 90s {left}");
        assert_eq!(detail["detail"], expected);
        let by_handler = Refusal::from(&error);
        assert_eq!(problem(&by_handler)["unit"], "tokens");
    }

    #[test]
    fn a_refusal_without_a_limit_at_fault_violates_no_policy() {
        for kind in [AcquireErrorKind::Unavailable, AcquireErrorKind::ShutDown] {
            let problem = problem(&refusal(&CHAT, kind, None));
            let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
            assert_eq!(problem["type"], kind);
            assert_eq!(problem["violated-policies"], json!([]));
            assert_eq!(problem.get("limit"), None);
        }
    }

    /// An estimate is at most an hour, but before the end of a pause every retry is in vain.
    #[test]
    fn the_retry_of_a_paused_limit_is_its_end() {
        let end = 5 * HOUR + Duration::from_millis(1);
        let refusal = refusal(&CHAT, AcquireErrorKind::Paused, Some(end));
        assert_eq!(refusal.retry_after(), Some(end));
        assert_eq!(seconds(&refusal), 5 * 3_600 + 1);
        let problem = problem(&refusal);
        assert_eq!(problem["detail"], "the limit is paused");
        assert_eq!(problem["violated-policies"], json!([]));
    }

    #[test]
    fn an_unknown_retry_is_one_second() {
        for hint in [None, Some(Duration::ZERO)] {
            for (limit, kind) in [
                (&CHAT, AcquireErrorKind::Full),
                (&OPENS, AcquireErrorKind::TooSoon),
            ] {
                let refusal = refusal(limit, kind, hint);
                assert_eq!(refusal.retry_after(), Some(RETRY_SOME_TIME));
                assert_eq!(seconds(&refusal), 1);
            }
        }
    }

    #[test]
    fn a_retry_meets_no_other_limit_that_is_used_up() {
        let hint = Some(Duration::from_secs(2));
        let other = Quota {
            reset: Some(Duration::from_secs(9)),
            ..CHAT.quota(5)
        };
        let details = AcquireErrorDetails {
            retry_after: hint,
            quotas: vec![other],
            ..OPENS.error_details()
        };
        let error = AcquireError::new(AcquireErrorKind::TooSoon, details);
        assert_eq!(seconds(&refused(&OPENS, &error)), 9);
    }

    #[test]
    fn estimates_differ() {
        let of = || refusal(&CHAT, AcquireErrorKind::Full, Some(HOUR)).retry_after();
        let first = of();
        assert!((0..20).any(|_| of() != first));
    }

    proptest! {
        #[test]
        fn a_retry_is_never_too_early(hint: Duration) {
            let full = refusal(&CHAT, AcquireErrorKind::Full, Some(hint));
            let too_soon = refusal(&OPENS, AcquireErrorKind::TooSoon, Some(hint));
            for refusal in [&full, &too_soon] {
                prop_assert!(seconds(refusal) >= 1);
                prop_assert_eq!(problem(refusal)["retry_after"].as_u64(), Some(seconds(refusal)));
                let mut headers = http::HeaderMap::new();
                fields::append(&mut headers, refusal.quotas());
                let field = headers["ratelimit"].to_str().unwrap();
                let (_, t) = field.split_once("r=0;t=").unwrap();
                prop_assert!(seconds(refusal) >= t.parse::<u64>().unwrap());
            }
            let estimate = hint.min(HOUR);
            let retry = full.retry_after().unwrap();
            prop_assert!(retry >= estimate.min(RETRY_SOME_TIME));
            prop_assert!(retry <= (estimate * 5 / 4).max(RETRY_SOME_TIME));
        }

        #[test]
        fn a_grpc_client_reads_any_name_and_time(
            name in "\\PC{1,32}|[\\x00-\\x7f]{1,128}",
            hint: Duration,
        ) {
            let limit = Limit::try_rate(name.clone(), 60, HOUR).unwrap();
            let refusal = refusal(&limit, AcquireErrorKind::TooSoon, Some(hint));
            let head = refusal.to_grpc_response().headers().clone();
            let status = Status::from_header_map(&head).unwrap();
            prop_assert_eq!(status.code(), Code::ResourceExhausted);
            let detail = "the rate of 60 requests in 3600s is used up";
            prop_assert_eq!(status.message(), format!("{name}: {detail}"));
            let details = status.get_error_details();
            let delay = details.retry_info().unwrap().retry_delay;
            prop_assert_eq!(delay, refusal.retry_after());
            let violation = &details.quota_failure().unwrap().violations[0];
            prop_assert_eq!(&violation.subject, &format!("limit:{name}"));
            prop_assert_eq!(&violation.description, detail);
        }
    }
}
