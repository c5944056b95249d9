//! Reads `X-Forwarded-For` and `Forwarded` from the right.
//!
//! Entries to the left of the trusted entry may be forged. This module never reads forged entries, not even to find the
//! start of quotes: an open quote would swallow the entries that follow.
//!
//! Tests: `tests/layer/addresses.rs`, `src/fuzzing.rs`.

use std::net::{IpAddr, Ipv6Addr};

use http::{HeaderMap, HeaderName, header::FORWARDED};

/// The longest entry of a list, in bytes. An address needs 48; the rest is for other parameters of `Forwarded`.
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const MAX_ENTRY: usize = 512;

/// The separators of a header's entries: commas, in `Forwarded` only outside of quotes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Syntax {
    Plain,
    Quoted,
}

impl Syntax {
    /// The address in the n-th entry from the right.
    pub(super) fn find(self, headers: &HeaderMap, n: u8) -> Option<IpAddr> {
        match self {
            Self::Plain => address(self.nth_back(headers, &X_FORWARDED_FOR, n)?),
            Self::Quoted => address(node(self.nth_back(headers, &FORWARDED, n)?)?),
        }
    }

    /// The n-th entry from the right, across all lines of the header. `None` if there are fewer entries, or one is too
    /// long. Empty entries count: skipping one would go too far to the left.
    fn nth_back<'a>(
        self,
        headers: &'a HeaderMap,
        name: &HeaderName,
        mut n: u8,
    ) -> Option<&'a [u8]> {
        for line in headers.get_all(name).iter().rev() {
            let mut rest = Some(line.as_bytes());
            while let Some(line) = rest {
                let comma = self.last(b',', line);
                let entry = &line[comma.map_or(0, |comma| comma + 1)..];
                if entry.len() > MAX_ENTRY {
                    return None;
                }
                n = n.checked_sub(1)?;
                if n == 0 {
                    return Some(entry.trim_ascii());
                }
                rest = comma.map(|comma| &line[..comma]);
            }
        }
        None
    }

    /// The last position of this separator, searched no further than the longest entry.
    fn last(self, separator: u8, line: &[u8]) -> Option<usize> {
        let mut quoted = false;
        for (index, &byte) in line.iter().enumerate().rev().take(MAX_ENTRY + 1) {
            if self == Self::Quoted && byte == b'"' {
                let before = line[..index].iter().rev().take(MAX_ENTRY);
                let escapes = before.take_while(|byte| **byte == b'\\').count();
                quoted ^= escapes % 2 == 0;
            } else if byte == separator && !quoted {
                return Some(index);
            }
        }
        None
    }
}

/// The value of `for` in an entry of `Forwarded`. `None` if the entry has no `for`, or several.
fn node(entry: &[u8]) -> Option<&[u8]> {
    let (mut rest, mut found) = (Some(entry), None);
    while let Some(pairs) = rest {
        let semicolon = Syntax::Quoted.last(b';', pairs);
        let pair = &pairs[semicolon.map_or(0, |semicolon| semicolon + 1)..];
        rest = semicolon.map(|semicolon| &pairs[..semicolon]);
        let mut sides = pair.splitn(2, |byte| *byte == b'=');
        let (name, value) = (sides.next()?.trim_ascii(), sides.next());
        if name.eq_ignore_ascii_case(b"for") {
            let value = unquoted(value?.trim_ascii())?;
            if found.replace(value).is_some() {
                return None;
            }
        }
    }
    found
}

/// Removes quotes. A value with an escape is rejected: no address needs escapes.
fn unquoted(value: &[u8]) -> Option<&[u8]> {
    match value {
        [b'"', value @ .., b'"'] => Some(value),
        [b'"', ..] | [.., b'"'] => None,
        _ => Some(value),
    }
}

/// Parses an address, with or without a port, and IPv6 with or without brackets. Names are rejected.
fn address(entry: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(entry).ok()?;
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    if let Some(text) = text.strip_prefix('[') {
        let (address, port) = text.split_once(']')?;
        let address = address.parse::<Ipv6Addr>().ok()?;
        let port = port.is_empty() || is_port(port.strip_prefix(':')?);
        return port.then_some(address.into());
    }
    let (address, port) = text.split_once(':')?;
    let address = address.parse().ok().filter(IpAddr::is_ipv4)?;
    is_port(port).then_some(address)
}

/// A port is a number, or in `Forwarded` an obfuscated name.
fn is_port(port: &str) -> bool {
    match port.strip_prefix('_') {
        Some(name) => !name.is_empty(),
        None => port.parse::<u16>().is_ok(),
    }
}
