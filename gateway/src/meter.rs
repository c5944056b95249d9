//! Charges a language model's response while it passes.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http::{header, response::Parts};
use http_body::{Body, Frame, SizeHint};
use tower_turnstile::{AcquireError, Budget, Hold};

use crate::{
    access::Entry,
    sse::{End, EventReader, is_event_stream},
    usage::Count,
    weights::Weights,
};

/// Longest event that is held until its end. A longer event is never only a usage report, and passes as it arrives.
const MAX_HELD: usize = 64 * 1024;

/// Charges one request: the prompt before the upstream is called, the response while it passes.
///
/// Holds the slot. On drop it settles the cost: as reported by the upstream, or else estimated from the delivered part.
#[derive(Debug)]
pub(crate) struct Meter {
    budget: Budget,
    _hold: Hold,
    count: Count,
    weights: Weights,
    /// Learns the tokens and their cost.
    entry: Entry,
    /// Charged or spent so far.
    spent: u32,
    reader: Reader,
}

/// Reader for the response's content type.
#[derive(Debug)]
enum Reader {
    /// A stream of server-sent events.
    Events(EventReader, Held),
    /// A JSON document. True once it has begun.
    Document(bool),
    /// An unknown or compressed form, charged by its length. True once it has begun.
    Unread(bool),
}

/// Holds back each event of a stream until it is complete, so that the client gets all of it or nothing.
#[derive(Debug, Default)]
struct Held {
    event: BytesMut,
    /// The current event is too long to be held.
    is_passing: bool,
    /// The client has not asked for the usage report.
    hides_usage: bool,
    /// The last event was hidden: the LF of its last CRLF may come alone.
    has_hidden: bool,
}

impl Meter {
    /// Charges the prompt.
    pub(crate) async fn charge(
        hold: Hold,
        budget: &str,
        prompt: u32,
        weights: Weights,
        entry: Entry,
    ) -> Result<Self, AcquireError> {
        let budget = hold.budget(budget)?;
        let count = Count::new(prompt);
        let cost = weights.cost(count.tokens());
        let charged = budget.charge(cost).await?;
        // A prompt beyond the burst is in debt from now on.
        budget.spend(cost.saturating_sub(charged));
        Ok(Self {
            budget,
            _hold: hold,
            count,
            weights,
            entry,
            spent: cost,
            reader: Reader::Unread(false),
        })
    }

    /// The upstream has not answered.
    pub(crate) fn fail(mut self) {
        self.count.fail();
    }

    /// The response begins.
    pub(crate) fn begin(&mut self, head: &Parts, hides_usage: bool) {
        if !head.status.is_success() {
            self.count.fail();
        }
        self.reader = Reader::of(head, hides_usage);
    }

    /// Reads a part of the response, and returns the bytes to pass on.
    fn read(&mut self, data: Bytes) -> Bytes {
        let count = &mut self.count;
        let passing = match &mut self.reader {
            Reader::Events(events, held) => held.read(&data, events, count),
            Reader::Document(has_begun) => {
                *has_begun = true;
                count.read(&data);
                data
            }
            Reader::Unread(has_begun) => {
                *has_begun = true;
                count.add_unread(data.len() as u64);
                data
            }
        };
        let cost = self.weights.cost(self.count.tokens());
        let due = cost.saturating_sub(self.spent);
        if due > 0 {
            self.budget.spend(due);
            self.spent += due;
        }
        passing
    }

    /// The response has ended. Returns the last event if it lacks its empty line, since some clients read by lines.
    fn end(&mut self) -> Bytes {
        match &mut self.reader {
            Reader::Events(_, held) if !held.event.is_empty() => {
                let event = mem::take(&mut held.event).freeze();
                let is_whole = !mem::take(&mut held.is_passing);
                if self.count.end_event() && held.hides_usage && is_whole {
                    Bytes::new()
                } else {
                    event
                }
            }
            _ => Bytes::new(),
        }
    }

    /// The upstream broke off. A document that had begun is charged, an empty response is not.
    fn cut(mut self) {
        if !matches!(self.reader, Reader::Document(true) | Reader::Unread(true)) {
            self.count.fail();
        }
    }
}

impl Held {
    fn read(&mut self, mut data: &[u8], events: &mut EventReader, count: &mut Count) -> Bytes {
        let mut passing = BytesMut::with_capacity(self.event.len() + data.len());
        while !data.is_empty() {
            let (length, end) = events.read(data, |data| count.read(data));
            self.event.extend_from_slice(&data[..length]);
            data = &data[length..];
            let is_usage = end == Some(End::Event) && count.end_event();
            let hides = is_usage && self.hides_usage && !self.is_passing;
            if mem::replace(&mut self.has_hidden, hides) && self.event == b"\n"[..] || hides {
                self.event.clear();
            }
            if end.is_some() || self.event.len() > MAX_HELD {
                self.is_passing = end.is_none();
                passing.extend_from_slice(&self.event);
                self.event.clear();
            }
        }
        passing.freeze()
    }
}

impl Reader {
    fn of(head: &Parts, hides_usage: bool) -> Self {
        let text = |name| head.headers.get(name)?.to_str().ok();
        let is_plain = text(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity");
        let media = text(header::CONTENT_TYPE).unwrap_or_default();
        let media = media.split(';').next().unwrap_or_default().trim();
        match media {
            _ if !is_plain => Self::Unread(false),
            _ if is_event_stream(&head.headers) => {
                let held = Held {
                    hides_usage,
                    ..Held::default()
                };
                Self::Events(EventReader::default(), held)
            }
            _ if media.eq_ignore_ascii_case("application/json") => Self::Document(false),
            _ => Self::Unread(false),
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        match &self.reader {
            Reader::Document(_) => self.count.end_document(),
            // Its beginning was delivered.
            Reader::Events(_, held) if held.is_passing => drop(self.count.end_event()),
            Reader::Events(..) | Reader::Unread(_) => {}
        }
        let tokens = self.count.tokens();
        let units = self.weights.cost(tokens);
        self.entry
            .note(|line| (line.tokens, line.units) = (tokens, units));
        self.budget.settle(units.into());
    }
}

/// Response body, charged by its meter if it has one.
#[derive(Debug)]
pub(crate) struct MeteredBody<B: Body> {
    pub(crate) body: B,
    pub(crate) meter: Option<Meter>,
    /// The first frame, if it has been read already, or the end of the body, after an unfinished event.
    pub(crate) next: Option<Option<Result<Frame<Bytes>, B::Error>>>,
}

impl<B> Body for MeteredBody<B>
where
    B: Body<Data = Bytes, Error: Unpin> + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            let frame = match self.next.take() {
                Some(next) => next,
                None => ready!(Pin::new(&mut self.body).poll_frame(cx)),
            };
            let Some(meter) = &mut self.meter else {
                return Poll::Ready(frame);
            };
            match frame {
                Some(Ok(frame)) if frame.is_data() => {
                    let passing = meter.read(frame.into_data().unwrap_or_default());
                    if !passing.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(passing))));
                    }
                }
                last => {
                    // An unfinished event of a broken stream is dropped.
                    let waiting = match &last {
                        Some(Err(_)) => Bytes::new(),
                        _ => meter.end(),
                    };
                    if !waiting.is_empty() {
                        self.next = Some(last);
                        return Poll::Ready(Some(Ok(Frame::data(waiting))));
                    }
                    match &last {
                        Some(Err(_)) => self.meter.take().map_or((), Meter::cut),
                        Some(Ok(_)) => {}
                        None => self.meter = None,
                    }
                    return Poll::Ready(last);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.meter.is_none() && self.next.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.meter {
            Some(meter) if matches!(meter.reader, Reader::Events(..)) => SizeHint::default(),
            _ if self.next.is_some() => SizeHint::default(),
            _ => self.body.size_hint(),
        }
    }
}
