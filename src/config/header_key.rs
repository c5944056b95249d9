//! Keys of callers in request headers: the whole value, or the token after `Bearer`.
//!
//! Tests: `tests/config/reading.rs`, `faults.rs`, `routes.rs`.

use http::HeaderMap;

/// Returns the value of a header. `None`: it is missing or empty.
pub(super) fn value<'a>(name: &str, headers: &'a HeaderMap) -> Option<&'a [u8]> {
    let value = headers.get(name)?.as_bytes();
    (!value.is_empty()).then_some(value)
}

/// Returns the token in a header. `None`: it is missing or empty, or the header has another form.
pub(super) fn token<'a>(name: &str, headers: &'a HeaderMap) -> Option<&'a [u8]> {
    let token = bearer(headers.get(name)?.as_bytes())?;
    (!token.is_empty()).then_some(token)
}

/// Returns the token. The scheme is case-insensitive (RFC 9110, 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer".len())?;
    let is_separated = token.first() == Some(&b' ');
    (scheme.eq_ignore_ascii_case(b"bearer") && is_separated).then(|| token.trim_ascii())
}
