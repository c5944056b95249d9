//! The unit of a rate: what it counts.
//!
//! Tests: `tests/semaphore/rates.rs`, `tests/config/faults.rs`.

use std::fmt;

/// Longest unit, in bytes.
pub(crate) const MAX_UNIT_LEN: usize = 32;

/// What a limit counts, such as `requests` or `tokens`: a letter, then letters, digits, `-`, `_` and `.`.
///
/// So it needs no escape in structured fields, JSON, logs and tables. It is `Copy`, so that a `const` limit can be given another one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unit {
    bytes: [u8; MAX_UNIT_LEN],
    len: u8,
}

impl Unit {
    /// Of a rate, unless it has another one.
    pub(crate) const REQUESTS: Self = Self::of("requests");
    /// Of a limit with slots: registered for the fields of rate limits.
    pub(crate) const CONCURRENT_REQUESTS: Self = Self::of("concurrent-requests");

    /// `None`: it is empty, too long, or has other characters.
    pub(crate) const fn new(text: &str) -> Option<Self> {
        let text = text.as_bytes();
        if text.is_empty() || text.len() > MAX_UNIT_LEN || !text[0].is_ascii_alphabetic() {
            return None;
        }
        let (mut bytes, mut at) = ([0; MAX_UNIT_LEN], 0);
        while at < text.len() {
            let byte = text[at];
            if !byte.is_ascii_alphanumeric() && !matches!(byte, b'-' | b'_' | b'.') {
                return None;
            }
            bytes[at] = byte;
            at += 1;
        }
        let len = text.len() as u8;
        Some(Self { bytes, len })
    }

    const fn of(text: &str) -> Self {
        match Self::new(text) {
            Some(unit) => unit,
            None => panic!("it is one"),
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        let text = &self.bytes[..usize::from(self.len)];
        str::from_utf8(text).expect("a unit is ASCII")
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}
