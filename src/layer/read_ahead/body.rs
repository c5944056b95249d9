//! The request's body: keeps the data that was read ahead, and replays it.
//!
//! Tests: `tests/layer/replay.rs`.

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

/// Maximum number of bytes to discard of a refused request's body, unless more are read ahead.
const DISCARDED: usize = 8 * 1024 * 1024;

/// Maximum number of frames read in one poll, since a client may send any number of tiny or empty frames.
const FRAMES_A_POLL: usize = 32;

pin_project! {
    /// Request body of a [`ReadAhead`](super::ReadAhead) service: the data that was read ahead, then the rest of the body.
    ///
    /// The data that was read while the request waited is one frame.
    pub struct ReadAheadBody<B> {
        // Copied, since many tiny frames that each keep the server's buffer alive would take far more memory than their
        // data.
        data: Vec<u8>,
        // Trailers, replayed after the data.
        last: Option<Frame<Bytes>>,
        ended: bool,
        bound: usize,
        #[pin]
        rest: B,
    }
}

impl<B> ReadAheadBody<B> {
    pub(super) fn new(rest: B, bound: usize) -> Self {
        Self {
            data: Vec::new(),
            last: None,
            ended: false,
            bound,
            rest,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> ReadAheadBody<B> {
    /// Whether the body is read to its end, or the buffer is full.
    pub(super) fn is_read(&self) -> bool {
        self.is_over() || self.data.len() >= self.bound
    }

    /// Reads until [`is_read`](Self::is_read), or until the body fails.
    pub(super) fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), B::Error>> {
        for _ in 0..FRAMES_A_POLL {
            if self.is_read() {
                return Poll::Ready(Ok(()));
            }
            let Some(frame) = ready!(Pin::new(&mut self.rest).poll_frame(cx)?) else {
                self.ended = true;
                continue;
            };
            match frame.into_data() {
                Ok(data) => self.keep(&data),
                Err(last) => self.last = Some(last),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Number of bytes to [discard](Self::poll_discard) at most. 0: the body is at its end, or is certainly longer.
    pub(super) fn discardable(&self) -> usize {
        let most = self.bound.max(DISCARDED);
        let is_longer = self.rest.size_hint().lower() > most as u64;
        if self.is_over() || is_longer { 0 } else { most }
    }

    /// Reads and discards this much of the rest, to its end if possible.
    pub(super) fn poll_discard(&mut self, left: &mut usize, cx: &mut Context<'_>) -> Poll<()> {
        self.data = Vec::new();
        for _ in 0..FRAMES_A_POLL {
            if self.is_over() || *left == 0 {
                return Poll::Ready(());
            }
            match ready!(Pin::new(&mut self.rest).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    *left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len))
                }
                Some(Err(_)) | None => self.ended = true,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Whether the client has sent its whole body.
    fn is_over(&self) -> bool {
        self.ended || self.last.is_some() || self.rest.is_end_stream()
    }

    /// Doubles the buffer, but not beyond the bound unless a single frame is larger.
    fn keep(&mut self, data: &[u8]) {
        let length = self.data.len() + data.len();
        if length > self.data.capacity() {
            let capacity = self.bound.min(2 * self.data.capacity()).max(length);
            self.data.reserve_exact(capacity - self.data.len());
        }
        self.data.extend_from_slice(data);
    }
}

impl<B: Body<Data = Bytes>> Body for ReadAheadBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        if !this.data.is_empty() {
            let data = Bytes::from(mem::take(this.data));
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Some(last) = this.last.take() {
            return Poll::Ready(Some(Ok(last)));
        }
        if *this.ended {
            return Poll::Ready(None);
        }
        this.rest.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.last.is_none() && (self.ended || self.rest.is_end_stream())
    }

    /// The hint of the rest plus the kept data. If the length of the rest is unknown, so is the total: a proxy may take a
    /// known length as a reason not to send trailers.
    fn size_hint(&self) -> SizeHint {
        let (kept, rest) = (self.data.len() as u64, self.rest.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(kept));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(kept));
        }
        hint
    }
}

impl<B> fmt::Debug for ReadAheadBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadAheadBody")
            .field("data", &self.data.len())
            .finish_non_exhaustive()
    }
}
