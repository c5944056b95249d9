//! Streams through a tower service, in this process.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::StreamBody;
use hyper::body::Frame;
use tower::{Service, ServiceExt};

use crate::{ALLOCATOR, layout::HEADER};

/// Number of streams opened at once.
const AT_ONCE: usize = 256;
const PAGE_BYTES: f64 = 4_096.0;

pub(crate) type Endless = StreamBody<stream::Pending<Result<Frame<Bytes>, Infallible>>>;

/// A handler whose response never ends.
pub(crate) async fn endless(_: Request<()>) -> Result<Response<Endless>, Infallible> {
    Ok(Response::new(StreamBody::new(stream::pending())))
}

/// Opens a stream; `None` if it is refused.
pub(crate) async fn open<S, B>(service: S, key: &str) -> Option<Response<B>>
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    let request = Request::builder().header(HEADER, key).body(());
    let response = service.oneshot(request.expect("a request")).await;
    let response = response.expect("infallible");
    (response.status() == StatusCode::OK).then_some(response)
}

/// Opens one stream per key, and leaves out refused streams.
pub(crate) async fn open_all<S, B>(
    service: S,
    keys: impl ExactSizeIterator<Item = String>,
) -> Vec<Response<B>>
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible> + Clone,
{
    let mut opened = Vec::with_capacity(keys.len());
    let opening = keys.map(|key| {
        let service = service.clone();
        async move { open(service, &key).await }
    });
    let mut opening = stream::iter(opening).buffer_unordered(AT_ONCE);
    while let Some(response) = opening.next().await {
        opened.extend(response);
    }
    opened
}

/// Bytes that this process has allocated and not freed.
pub(crate) fn allocated_bytes() -> f64 {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as f64 - stats.bytes_deallocated as f64
}

/// Resident memory of this process, in bytes.
pub(crate) fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).expect("the second field");
    pages.parse::<f64>().expect("a number") * PAGE_BYTES
}
