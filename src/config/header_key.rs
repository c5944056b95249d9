//! Keys of callers in request headers: the whole value, or the token after `Bearer`.
//!
//! Tests: `tests/config/reading.rs`, `faults.rs`, `routes.rs`.

use http::{HeaderMap, HeaderName};
use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected},
};

use super::error::Faults;

/// Maximum number of headers in one `any_of`.
pub(super) const MAX_HEADERS: usize = 8;

/// A request header that names the caller: see [`KeyConfig::AnyOf`](super::KeyConfig::AnyOf).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderKey {
    /// The value of this header.
    Header(String),
    /// The token in this header, `authorization` most often, which has the form `Bearer <token>` (RFC 6750).
    Bearer(String),
}

impl HeaderKey {
    /// Returns the name of the header.
    pub fn name(&self) -> &str {
        match self {
            Self::Header(name) | Self::Bearer(name) => name,
        }
    }

    pub(super) fn check(&self, path: &str, faults: &mut Faults) {
        if HeaderName::try_from(self.name()).is_err() {
            let field = match self {
                Self::Header(_) => "header",
                Self::Bearer(_) => "bearer",
            };
            faults.add(format!("{path}.{field}"), "is not a header name");
        }
    }

    /// Returns the key of a request. `None`: it is missing, empty, or of another form.
    pub(super) fn find<'a>(&self, headers: &'a HeaderMap) -> Option<&'a [u8]> {
        match self {
            Self::Header(name) => value(name, headers),
            Self::Bearer(name) => token(name, headers),
        }
    }
}

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

/// Returns the key from the first of these headers that has one.
pub(super) fn find<'a>(keys: &[HeaderKey], headers: &'a HeaderMap) -> Option<&'a [u8]> {
    keys.iter().find_map(|key| key.find(headers))
}

/// Returns the token. The scheme is case-insensitive (RFC 9110, 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer".len())?;
    let is_separated = token.first() == Some(&b' ');
    (scheme.eq_ignore_ascii_case(b"bearer") && is_separated).then(|| token.trim_ascii())
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("minProperties" = 1, "maxProperties" = 1)))]
#[serde(
    deny_unknown_fields,
    expecting = "a table with `header` or with `bearer`"
)]
pub(super) struct HeaderTable {
    /// The value of this request header.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")))]
    header: Option<String>,
    /// The token in this request header, which has the form `Bearer <token>`.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")))]
    bearer: Option<String>,
}

impl<'de> Deserialize<'de> for HeaderKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table = HeaderTable::deserialize(deserializer)?;
        match (table.header, table.bearer) {
            (Some(name), None) => Ok(Self::Header(name)),
            (None, Some(name)) => Ok(Self::Bearer(name)),
            _ => Err(D::Error::invalid_value(
                Unexpected::Map,
                &"either `header` or `bearer`",
            )),
        }
    }
}
