//! The refusal of a handler that acquires its permits by itself: as the layer's.
//!
//! Tests: `tests/layer/acquire_errors.rs`.

use http::StatusCode;

use super::refusal::{Refusal, RefusalKind};
use crate::{
    error::AcquireError,
    limit::{Limit, MAX_LIMIT},
};

/// Converts into the refusal of a layer, for handlers that acquire by themselves.
///
/// Its status is 429, or 503 if the limit is not the caller's own ([`Key::SHARED`](crate::Key::SHARED)), or if it was not
/// reached: the store is down, the limiter is shutting down. It is 400 for a weight or a cost that could
/// never be admitted. Its [`limit`](Refusal::limit) has the name and the value of the one that refused, and no other settings.
/// With the feature `axum` the error is a response by itself.
///
/// ```
/// use http::StatusCode;
/// use tower_turnstile::{Limit, Limiter, Refusal};
///
/// const EXPORT: Limit = Limit::concurrent("export", 1);
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let export = Limiter::in_memory().semaphore(&EXPORT, "acme");
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
        let kind = RefusalKind::from(error.kind());
        let status = match kind {
            _ if kind.is_invalid() => StatusCode::BAD_REQUEST,
            _ if kind.is_limited() => RefusalKind::limited_status(error.details.is_shared),
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(&limit(error), !error.details.is_shared, kind, status).because(error)
    }
}

/// The limit, as far as the error knows it. A key may have a value of 0, which a limit has not.
fn limit(error: &AcquireError) -> Limit {
    let details = &*error.details;
    let (name, max) = (details.limit_name.clone(), details.max.clamp(1, MAX_LIMIT));
    let limit = match details.period {
        Some(period) => Limit::try_rate(name, max, period),
        None => Limit::try_concurrent(name, max),
    };
    limit.expect("a limit has this name and period")
}
