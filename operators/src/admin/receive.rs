//! Bodies of requests, with limits on their size and time.
//!
//! Tests: `tests/admin/guards.rs`.

use std::time::Duration;

use axum::body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::time::timeout;

use super::problem::{ApiFault, Problem};
use crate::Order;

/// Maximum size of a request body, in bytes. A change has a limit's name, a reason, and tokens.
const MAX_BODY: usize = 4 * 1_024;
/// How long a client may take to send the body.
const MAX_TIME: Duration = Duration::from_secs(10);

/// The body of a change.
#[derive(Debug, Deserialize)]
pub(super) struct Change {
    pub(super) reason: String,
    #[serde(flatten)]
    pub(super) order: Order,
}

/// The body of a request for the digest of a key or of a tenant, which is in the body so that it never occurs in a log of
/// URLs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DigestOf {
    pub(super) limit: String,
    pub(super) key: Option<String>,
    pub(super) tenant: Option<String>,
}

/// Reads a body.
pub(super) async fn receive<T: DeserializeOwned>(body: Body) -> Result<T, Problem> {
    let body = timeout(MAX_TIME, Limited::new(body, MAX_BODY).collect()).await;
    let body = body.map_err(|_| Problem::malformed("the body did not come in time"))?;
    let body = body.map_err(|error| {
        if error.is::<LengthLimitError>() {
            let detail = format!("a body has at most {MAX_BODY} bytes");
            Problem::of(ApiFault::TooLarge, detail)
        } else {
            Problem::malformed("the body has ended early")
        }
    })?;
    let parsed = serde_json::from_slice(&body.to_bytes());
    parsed.map_err(|error| Problem::malformed(format!("the body cannot be read: {error}")))
}
