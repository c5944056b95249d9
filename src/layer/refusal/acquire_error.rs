//! The refusal of a handler that acquires its own permits, in the form of the layer's.
//!
//! Tests: `tests/layer/acquire_errors.rs`.

use http::StatusCode;

use super::{kind::RefusalKind, refusal::Refusal};
use crate::{error::AcquireError, limit::Limit};

/// Converts into a refusal like a layer's, for handlers that acquire their own permits. The settings of layers do not
/// apply.
///
/// The status is 429, or 503 if all callers share the limit ([`Key::SHARED`](crate::Key::SHARED)) or no limit was reached:
/// the store is down, the limiter is shutting down. The status is 400 for a weight or a cost that could never be admitted,
/// and 500 for a budget at a rate, or a pause of a limit, that the request does not have. The refusal's [`limit`](Refusal::limit) has the name and
/// the value of the limit that refused, and no other settings. With the feature `axum`, the error itself implements
/// `IntoResponse`.
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
        let kind = RefusalKind::from(error.kind());
        let status = match kind {
            _ if kind.is_of_handler() => StatusCode::INTERNAL_SERVER_ERROR,
            _ if kind.is_invalid() => StatusCode::BAD_REQUEST,
            _ if kind.is_limited() => RefusalKind::limited_status(error.details.is_shared),
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        let limit = Limit::of_error(&error.details);
        Self::new(&limit, !error.details.is_shared, kind, status).because(error)
    }
}
