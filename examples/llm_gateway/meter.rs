//! Follows an answer of a language model, and charges what it costs.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{header, response::Parts};
use http_body::{Body, Frame, SizeHint};
use tower_turnstile::{AcquireError, Hold};

use crate::{sse::EventReader, usage::Count};

/// Name of the limit that is charged, in the file.
pub(crate) const LIMIT: &str = "tokens";
/// Bytes of an answer that are copied, to be read when it is whole. Longer ones are charged by their length.
const MAX_ANSWER: usize = 1024 * 1024;

/// The tokens of one request: its prompt is charged before the upstream is called, its answer while it passes.
///
/// Dropped, it settles the true cost: as the upstream has reported it, else as much as was delivered. It keeps the slot until
/// then.
#[derive(Debug)]
pub(crate) struct Meter {
    hold: Hold,
    count: Count,
    /// Charged or spent so far.
    spent: u32,
    reader: Reader,
}

/// How the bytes of an answer are read.
#[derive(Debug)]
enum Reader {
    /// A stream of server-sent events.
    Events(EventReader),
    /// A JSON document, copied up to a bound, and its length.
    Document(Vec<u8>, u64),
    /// Another form, or encoded: what it costs is not known.
    Unread,
}

impl Meter {
    /// Charges the prompt.
    pub(crate) async fn charge(hold: Hold, prompt: u32) -> Result<Self, AcquireError> {
        hold.charge(LIMIT, prompt).await?;
        Ok(Self {
            hold,
            count: Count::new(prompt),
            spent: prompt,
            reader: Reader::Unread,
        })
    }

    /// There is no answer.
    pub(crate) fn fail(mut self) {
        self.count.fail();
    }

    /// The upstream has cut the answer off. Of a document that has begun its length counts.
    fn cut(mut self) {
        if !matches!(self.reader, Reader::Document(_, 1..)) {
            self.count.fail();
        }
    }

    /// The answer begins.
    pub(crate) fn begin(&mut self, head: &Parts) {
        if !head.status.is_success() {
            self.count.fail();
        }
        self.reader = Reader::of(head);
    }

    /// Reads what passes.
    fn read(&mut self, data: &[u8]) {
        match &mut self.reader {
            Reader::Events(events) => {
                let count = &mut self.count;
                events.read(data, |data| count.read_event(data));
            }
            Reader::Document(copy, length) => {
                *length += data.len() as u64;
                if *length <= MAX_ANSWER as u64 {
                    copy.extend_from_slice(data);
                } else {
                    *copy = Vec::new();
                }
            }
            Reader::Unread => {}
        }
        let due = self.count.total().saturating_sub(self.spent);
        if due > 0 {
            self.hold.spend(LIMIT, due);
            self.spent += due;
        }
    }
}

impl Reader {
    fn of(head: &Parts) -> Self {
        let text = |name| head.headers.get(name)?.to_str().ok();
        let is_plain = text(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity");
        let media = text(header::CONTENT_TYPE).unwrap_or_default();
        let media = media.split(';').next().unwrap_or_default().trim();
        match media {
            _ if !is_plain => Self::Unread,
            _ if media.eq_ignore_ascii_case("text/event-stream") => {
                Self::Events(EventReader::default())
            }
            _ if media.eq_ignore_ascii_case("application/json") => Self::Document(Vec::new(), 0),
            _ => Self::Unread,
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Reader::Document(copy, length) = &self.reader {
            match copy.is_empty() {
                true => self.count.add_unread(*length),
                false => self.count.read_answer(copy),
            }
        }
        self.hold.settle(LIMIT, self.count.total());
    }
}

/// A body that passes unchanged, under a meter if it has one.
#[derive(Debug)]
pub(crate) struct MeteredBody<B> {
    body: B,
    meter: Option<Meter>,
}

impl<B> MeteredBody<B> {
    pub(crate) fn new(body: B, meter: Option<Meter>) -> Self {
        Self { body, meter }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for MeteredBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(meter), Some(data)) = (&mut self.meter, frame.data_ref()) {
                    meter.read(data);
                }
            }
            // What was delivered is settled.
            Some(Err(_)) => self.meter.take().map_or((), Meter::cut),
            None => self.meter = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
