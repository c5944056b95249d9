//! The unread rest of requests that are refused.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use http::Version;
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use tokio::time::timeout;
use tower_turnstile::BoxError;

/// How much is read, and for how long.
const MOST: usize = 8 * 1024 * 1024;
const FOR: Duration = Duration::from_secs(1);

/// Reads the rest: over HTTP/1, bytes that nobody has read reset the connection, and a client that sends its body first would
/// not see why it is refused.
pub(crate) async fn discard<B>(version: Version, body: B)
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    if version >= Version::HTTP_2 {
        return;
    }
    let mut rest = pin!(Limited::new(body, MOST));
    let all = async { while let Some(Ok(_)) = rest.frame().await {} };
    let _ = timeout(FOR, all).await;
}
