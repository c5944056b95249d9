//! Server-sent events, read from a body that passes by.
//!
//! Tests: `tests/gateway/events.rs`.

use std::mem;

use http::{HeaderMap, header};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const DATA: &[u8] = b"data:";

/// Whether a response is a stream of events.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let media = headers.get(header::CONTENT_TYPE);
    let media = media.and_then(|media| media.to_str().ok());
    let media = media.unwrap_or_default().split(';').next();
    media.is_some_and(|media| media.trim().eq_ignore_ascii_case("text/event-stream"))
}

/// Finds events in bytes that arrive in pieces of any length. The data is not buffered.
///
/// Parses as a browser does ([HTML, 9.2.6]): lines end in LF, CRLF or CR, comments and unknown fields are skipped, lines of
/// data are joined by LF, and an incomplete event is ignored. The names of events are skipped too, since the data of
/// language models contains its type.
///
/// [HTML, 9.2.6]: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    line: Line,
    /// Beginning of the line, until its kind is known.
    begin: Vec<u8>,
    /// The event has data.
    has_data: bool,
    /// The event has a line that is not a comment.
    has_fields: bool,
    /// The last byte was CR, so LF would belong to the same line end.
    after_cr: bool,
    after_first_line: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Begin,
    /// After `data:`, where a space does not belong to the value.
    AfterColon,
    Data,
    Comment,
    Other,
}

/// The reason why [`EventReader::read`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// An event with data.
    Event,
    /// A comment, or an event without data, which clients ignore.
    Nothing,
}

impl EventReader {
    /// Reads up to the end of the event, or all bytes if it does not end in them. Passes its data to the closure, in pieces,
    /// and returns the number of bytes read.
    pub(crate) fn read(
        &mut self,
        bytes: &[u8],
        mut on_data: impl FnMut(&[u8]),
    ) -> (usize, Option<End>) {
        let mut at = 0;
        while at < bytes.len() {
            if mem::take(&mut self.after_cr) && bytes[at] == b'\n' {
                at += 1;
                // Clients that wait for CRLF get the end of an event at once, and not with the next, which has not begun.
                if !self.has_fields && self.line == Line::Begin && self.begin.is_empty() {
                    return (at, Some(End::Nothing));
                }
                continue;
            }
            let rest = &bytes[at..];
            let Some(length) = rest.iter().position(|byte| b"\r\n".contains(byte)) else {
                self.read_line(rest, &mut on_data);
                return (bytes.len(), None);
            };
            self.read_line(&rest[..length], &mut on_data);
            self.after_cr = rest[length] == b'\r';
            at += length + 1;
            if let Some(end) = self.end_line(&mut on_data) {
                if self.after_cr && bytes.get(at) == Some(&b'\n') {
                    self.after_cr = false;
                    at += 1;
                }
                return (at, Some(end));
            }
        }
        (at, None)
    }

    fn read_line(&mut self, mut part: &[u8], on_data: &mut impl FnMut(&[u8])) {
        while let (Line::Begin, Some((first, rest))) = (self.line, part.split_first()) {
            self.begin.push(*first);
            part = rest;
            let is_mark = |begin: &[u8]| BYTE_ORDER_MARK.starts_with(begin);
            if !self.after_first_line && self.begin == BYTE_ORDER_MARK {
                self.after_first_line = true;
                self.begin.clear();
            } else if self.begin == DATA {
                self.begin_data(on_data);
                self.line = Line::AfterColon;
            } else if self.begin == b":" {
                self.line = Line::Comment;
            } else if !DATA.starts_with(&self.begin)
                && (self.after_first_line || !is_mark(&self.begin))
            {
                self.line = Line::Other;
            }
        }
        if let (Line::AfterColon, Some((first, rest))) = (self.line, part.split_first()) {
            self.line = Line::Data;
            part = if *first == b' ' { rest } else { part };
        }
        if self.line == Line::Data && !part.is_empty() {
            on_data(part);
        }
    }

    fn begin_data(&mut self, on_data: &mut impl FnMut(&[u8])) {
        if mem::replace(&mut self.has_data, true) {
            on_data(b"\n");
        }
    }

    fn end_line(&mut self, on_data: &mut impl FnMut(&[u8])) -> Option<End> {
        self.after_first_line = true;
        let (line, begin) = (mem::take(&mut self.line), mem::take(&mut self.begin));
        match line {
            Line::Begin if begin.is_empty() => {
                self.has_fields = false;
                return Some(if mem::take(&mut self.has_data) {
                    End::Event
                } else {
                    End::Nothing
                });
            }
            // The field without a colon.
            Line::Begin if begin == DATA[..4] => self.begin_data(on_data),
            Line::Comment => return (!self.has_fields).then_some(End::Nothing),
            _ => {}
        }
        self.has_fields = true;
        None
    }
}
