//! Bodies of requests, with limits on their size and time.
//!
//! Tests: `tests/admin/guards.rs`.

use std::{future::poll_fn, pin::pin, time::Duration};

use bytes::Buf;
use http_body::Body;
use tokio::time::timeout;

use super::problem::Problem;

/// Maximum size of a request body, in bytes. A change has a limit's name, a reason, and tokens.
const MAX_BODY: usize = 4 * 1_024;
/// How long a client may take to send the body.
const MAX_TIME: Duration = Duration::from_secs(10);

/// Reads a body.
pub(super) async fn receive<B: Body>(body: B) -> Result<Vec<u8>, Problem> {
    if body.size_hint().lower() > MAX_BODY as u64 {
        return Err(too_large());
    }
    let read = timeout(MAX_TIME, read_all(body)).await;
    read.unwrap_or_else(|_| Err(Problem::malformed("the body did not come in time")))
}

async fn read_all<B: Body>(body: B) -> Result<Vec<u8>, Problem> {
    let (mut body, mut bytes) = (pin!(body), Vec::new());
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        let frame = frame.map_err(|_| Problem::malformed("the body has ended early"))?;
        let Ok(mut data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.remaining() > MAX_BODY {
            return Err(too_large());
        }
        while data.has_remaining() {
            let part = data.chunk();
            bytes.extend_from_slice(part);
            let length = part.len();
            data.advance(length);
        }
    }
    Ok(bytes)
}

fn too_large() -> Problem {
    Problem::too_large(format!("a body has at most {MAX_BODY} bytes"))
}
