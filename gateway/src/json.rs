//! A streaming JSON reader that reports values with their paths, in bounded memory for documents of any length.
//!
//! Tests: `tests/gateway/scans.rs`.

use std::{mem, str};

use crate::estimate::Estimate;

/// Bytes kept of a key, and of the beginning of a string.
const MAX_KEPT: usize = 64;
/// Depth of objects and arrays beyond which values, and keys as texts, are reported at the place of this depth.
const MAX_DEPTH: usize = 128;

/// A value at some path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Item<'a> {
    /// A string, or a key or number too long to be known: its estimated tokens, in the unit of [`Estimate`], and its beginning.
    Text(u64, &'a [u8]),
    /// A non-negative integer.
    Number(u64),
    /// `null`, a boolean, or any other number: its first byte.
    Other(u8),
    /// The end of an object or array.
    End,
}

/// Reads a document that arrives in pieces of any length.
///
/// Paths look like `.choices[].delta.content`. The grammar is not checked: for input that is not JSON, the reported values
/// are arbitrary.
#[derive(Debug, Default)]
pub(crate) struct Scanner {
    place: String,
    levels: Vec<Level>,
    /// Number of open objects and arrays beyond `MAX_DEPTH`.
    deeper: usize,
    token: Token,
    escape: Escape,
    /// First half of a character that is escaped as two UTF-16 code units.
    high: u16,
    /// Beginning of the current token, and the estimate of the whole.
    kept: Vec<u8>,
    estimate: Estimate,
}

#[derive(Debug)]
struct Level {
    /// Length of the path of this object or array.
    place: usize,
    /// The next string is a key.
    expects_key: bool,
    is_object: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Token {
    #[default]
    None,
    Key,
    Text,
    /// A number, boolean or `null`.
    Bare,
}

#[derive(Clone, Copy, Debug, Default)]
enum Escape {
    #[default]
    None,
    Backslash,
    /// The number of digits still missing, and the code unit so far.
    Unicode(u8, u16),
}

impl Scanner {
    /// Reads the next bytes, and reports the values that end in them.
    pub(crate) fn read(&mut self, mut bytes: &[u8], mut on_item: impl FnMut(&str, Item<'_>)) {
        while let Some((&byte, rest)) = bytes.split_first() {
            match self.token {
                Token::Key | Token::Text => bytes = self.read_string(bytes, &mut on_item),
                Token::Bare if b" \t\r\n,:]}[{\"".contains(&byte) => self.end_bare(&mut on_item),
                Token::Bare => {
                    self.keep(&[byte]);
                    bytes = rest;
                }
                Token::None => {
                    self.read_mark(byte, &mut on_item);
                    bytes = rest;
                }
            }
        }
    }

    /// Ends the document, and reports a string or number that was cut short. The scanner is ready for the next document.
    pub(crate) fn finish(&mut self, mut on_item: impl FnMut(&str, Item<'_>)) {
        match self.token {
            Token::Text => self.end_string(&mut on_item),
            Token::Bare => self.end_bare(&mut on_item),
            Token::Key | Token::None => {}
        }
        self.place.clear();
        self.levels.clear();
        (self.deeper, self.token, self.escape) = (0, Token::None, Escape::None);
    }

    fn read_mark(&mut self, byte: u8, on_item: &mut impl FnMut(&str, Item<'_>)) {
        let level = self.levels.last_mut();
        match byte {
            b'{' | b'[' => self.open(byte == b'{'),
            b'}' | b']' => self.close(on_item),
            b'"' => {
                let is_key = self.deeper == 0 && level.is_some_and(|level| level.expects_key);
                self.begin(if is_key { Token::Key } else { Token::Text });
            }
            b',' => {
                if let Some(level) = level {
                    level.expects_key = level.is_object;
                }
            }
            b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
            _ => {
                self.begin(Token::Bare);
                self.keep(&[byte]);
            }
        }
    }

    fn open(&mut self, is_object: bool) {
        if self.levels.len() == MAX_DEPTH {
            self.deeper += 1;
            return;
        }
        self.levels.push(Level {
            place: self.place.len(),
            expects_key: is_object,
            is_object,
        });
        if !is_object {
            self.place.push_str("[]");
        }
    }

    fn close(&mut self, on_item: &mut impl FnMut(&str, Item<'_>)) {
        if self.deeper > 0 {
            self.deeper -= 1;
        } else if let Some(level) = self.levels.pop() {
            self.place.truncate(level.place);
            on_item(&self.place, Item::End);
        }
    }

    fn begin(&mut self, token: Token) {
        self.token = token;
        self.kept.clear();
        self.estimate = Estimate::default();
    }

    fn keep(&mut self, part: &[u8]) {
        let room = MAX_KEPT.saturating_sub(self.kept.len());
        self.kept.extend_from_slice(&part[..part.len().min(room)]);
        self.estimate.read(part);
    }

    /// Reads a part of a string, and returns the rest of the bytes.
    fn read_string<'a>(
        &mut self,
        bytes: &'a [u8],
        on_item: &mut impl FnMut(&str, Item<'_>),
    ) -> &'a [u8] {
        match self.escape {
            Escape::None => {
                let mark = bytes.iter().position(|byte| b"\"\\".contains(byte));
                let Some(at) = mark else {
                    self.keep(bytes);
                    return &[];
                };
                self.keep(&bytes[..at]);
                match bytes[at] {
                    b'"' => self.end_string(on_item),
                    _ => self.escape = Escape::Backslash,
                }
                return &bytes[at + 1..];
            }
            Escape::Backslash if bytes[0] == b'u' => self.escape = Escape::Unicode(4, 0),
            Escape::Backslash => {
                self.escape = Escape::None;
                let unescaped = match bytes[0] {
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'r' => b'\r',
                    b'b' => 8,
                    b'f' => 12,
                    other => other,
                };
                self.keep(&[unescaped]);
            }
            Escape::Unicode(digits, unit) => {
                let digit = char::from(bytes[0]).to_digit(16).unwrap_or(0) as u16;
                let unit = unit << 4 | digit;
                self.escape = match digits {
                    1 => {
                        self.keep_unit(unit);
                        Escape::None
                    }
                    _ => Escape::Unicode(digits - 1, unit),
                };
            }
        }
        &bytes[1..]
    }

    /// Keeps a UTF-16 code unit in UTF-8.
    fn keep_unit(&mut self, unit: u16) {
        if (0xd800..0xdc00).contains(&unit) {
            self.high = unit;
            return;
        }
        let units = [mem::take(&mut self.high), unit];
        let units = if units[0] > 0 {
            &units[..]
        } else {
            &units[1..]
        };
        for char in char::decode_utf16(units.iter().copied()) {
            let char = char.unwrap_or(char::REPLACEMENT_CHARACTER);
            self.keep(char.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }

    fn end_string(&mut self, on_item: &mut impl FnMut(&str, Item<'_>)) {
        if self.token == Token::Key
            && let Some(level) = self.levels.last_mut()
        {
            level.expects_key = false;
            self.place.truncate(level.place);
            self.place.push('.');
            self.place.push_str(&String::from_utf8_lossy(&self.kept));
        }
        if self.token == Token::Text || self.is_long() {
            on_item(&self.place, Item::Text(self.estimate.cost(), &self.kept));
        }
        (self.token, self.escape) = (Token::None, Escape::None);
    }

    fn end_bare(&mut self, on_item: &mut impl FnMut(&str, Item<'_>)) {
        self.token = Token::None;
        let text = str::from_utf8(&self.kept).unwrap_or_default();
        let item = match text.parse() {
            _ if self.is_long() => Item::Text(self.estimate.cost(), &self.kept),
            Ok(number) => Item::Number(number),
            Err(_) => Item::Other(self.kept[0]),
        };
        on_item(&self.place, item);
    }

    fn is_long(&self) -> bool {
        self.kept.len() == MAX_KEPT
    }
}
