//! The unit of a rate, such as requests or tokens.
//!
//! Tests: `tests/semaphore/rates.rs`, `tests/config/faults.rs`.

use std::fmt;

/// Longest unit, in bytes.
pub(crate) const MAX_UNIT_LEN: usize = 32;

/// The unit of a limit, such as `requests` or `tokens`: a letter, then letters, digits, `-`, `_` and `.`.
///
/// These characters need no escape in structured fields, JSON, logs and tables. `Copy`, so that a `const` limit can change
/// its unit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unit {
    bytes: [u8; MAX_UNIT_LEN],
    len: u8,
}

impl Unit {
    /// The default unit of a rate.
    pub(crate) const REQUESTS: Self = Self::of("requests");
    /// The unit of a limit with slots, registered for the `RateLimit` fields.
    pub(crate) const CONCURRENT_REQUESTS: Self = Self::of("concurrent-requests");

    /// `None` if the text is empty, too long, or has other characters.
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
        Self::new(text).expect("it is one")
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
