//! Canonical paths, so that limits, prices and the upstream all see the same path.
//!
//! Tests: `tests/gateway/paths.rs`.

use http::{Uri, uri::PathAndQuery};
use percent_encoding::percent_decode_str;

/// Returns the URI with a canonical path: no empty segments, no `.` or `..`, no trailing slash, and no needless encoding.
///
/// `None`: servers interpret the path differently, because it has a backslash or an invalid `%`, or a dot segment once escaped
/// slashes are decoded: `/v1/models/..%2Ffiles`.
pub(crate) fn canonical(uri: &Uri) -> Option<Uri> {
    let decoded = uri.path().split('/').map(decoded);
    let segments = resolved(decoded.collect::<Option<Vec<_>>>()?);
    let mut text = format!("/{}", segments.join("/"));
    if may_have_dots(&text) {
        return None;
    }
    if let Some(query) = uri.query() {
        text.push('?');
        text.push_str(query);
    }
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(text).ok()?);
    Uri::from_parts(parts).ok()
}

/// Returns the last segment, as seen by a server that also decodes slashes.
pub(crate) fn last_segment(path: &str) -> String {
    let path = decode(path);
    let mut segments = path.rsplit('/').filter(|segment| !segment.is_empty());
    segments.next().unwrap_or_default().to_owned()
}

/// Whether a server may find a dot segment, also one that decodes twice, or drops parameters such as in `..;a`.
fn may_have_dots(path: &str) -> bool {
    let plain = decode(&decode(path));
    let mut segments = plain.split(['/', '\\']);
    decode(&plain) != plain
        || segments.any(|name| matches!(name.split(';').next(), Some("." | "..")))
}

fn decode(path: &str) -> String {
    percent_decode_str(path).decode_utf8_lossy().into_owned()
}

fn resolved(segments: Vec<String>) -> Vec<String> {
    let mut resolved = Vec::new();
    for segment in segments {
        match segment.as_str() {
            "" | "." => {}
            ".." => drop(resolved.pop()),
            _ => resolved.push(segment),
        }
    }
    resolved
}

/// Decodes unreserved characters only (RFC 3986, 2.3). An encoded slash remains part of its segment.
fn decoded(segment: &str) -> Option<String> {
    let mut decoded = String::with_capacity(segment.len());
    let mut rest = segment;
    while let Some((before, encoded)) = rest.split_once('%') {
        decoded.push_str(before);
        let digits = encoded.get(..2)?;
        let byte = u8::from_str_radix(digits, 16)
            .ok()
            .filter(|_| !digits.starts_with('+'))?;
        match byte {
            b'\\' => return None,
            _ if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => {
                decoded.push(byte.into());
            }
            _ => decoded.push_str(&format!("%{byte:02X}")),
        }
        rest = &encoded[2..];
    }
    decoded.push_str(rest);
    (!decoded.contains('\\')).then_some(decoded)
}
