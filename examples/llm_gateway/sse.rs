//! Server-sent events, read from a body that passes by.
//!
//! Tests: `tests/gateway/events.rs`.

use std::mem;

/// Bytes of an event that are kept: its data, and the line that is being read. Longer events pass unread.
pub(crate) const MAX_EVENT: usize = 256 * 1024;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Finds events in bytes that arrive in pieces of any length.
///
/// It reads as a browser does ([HTML, 9.2.6]): lines end in LF, CRLF or CR, comments and unknown fields are skipped, lines of
/// data are joined by LF, and an event that the stream cuts short is none. The names of events are not kept, since the data
/// of language models says its type itself.
///
/// [HTML, 9.2.6]: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    line: Vec<u8>,
    /// Each line of data with LF.
    data: Vec<u8>,
    is_too_long: bool,
    /// An LF would belong to the line end before it.
    after_cr: bool,
    after_first_line: bool,
}

impl EventReader {
    /// Reads the next bytes, and passes on the data of each event that ends in them.
    pub(crate) fn read(&mut self, mut bytes: &[u8], mut on_data: impl FnMut(&[u8])) {
        while let Some(first) = bytes.first() {
            if mem::take(&mut self.after_cr) && *first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| b"\r\n".contains(byte)) else {
                return self.keep(bytes);
            };
            self.keep(&bytes[..end]);
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(&mut on_data);
        }
    }

    fn keep(&mut self, part: &[u8]) {
        if self.data.len() + self.line.len() + part.len() > MAX_EVENT {
            self.is_too_long = true;
            self.data = Vec::new();
            // A comment: the line is not empty, which would end the event.
            self.line = vec![b':'];
        } else {
            self.line.extend_from_slice(part);
        }
    }

    fn end_line(&mut self, on_data: &mut impl FnMut(&[u8])) {
        let mut line = self.line.as_slice();
        if !mem::replace(&mut self.after_first_line, true) {
            line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
        }
        if line.is_empty() {
            if let Some((_, data)) = self.data.split_last()
                && !self.is_too_long
            {
                on_data(data);
            }
            self.data.clear();
            self.is_too_long = false;
        } else if let Some(value) = data_of(line) {
            self.data.extend_from_slice(value);
            self.data.push(b'\n');
        }
        self.line.clear();
    }
}

/// The value of a field `data`.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"data")?;
    match rest.strip_prefix(b":") {
        Some(value) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        None => rest.is_empty().then_some(rest),
    }
}
