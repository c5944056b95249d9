//! Keys of a limit, which decide which callers count separately.
//!
//! Tests: `tests/config/reading.rs`, `routes.rs`.

use std::fmt;

use http::{HeaderMap, HeaderName, request::Parts};
use serde::{Deserialize, Deserializer};

#[cfg(test)]
use super::schema;
use super::{
    error::Faults,
    optional::if_set,
    word_or_table::{WORD_OR_TABLE, secret, word_or_table},
};
use crate::{key::Key, layer::ClientAddress};

/// Maximum number of headers in one `any_of`.
const MAX_HEADERS: usize = 8;

/// Selects the requests that a limit counts together. Default: all of them.
///
/// In TOML one of `"shared"`, `"route"`, `{ header = "x-api-key" }`, `{ bearer = "authorization" }`,
/// `{ any_of = [{ bearer = "authorization" }, { header = "x-api-key" }] }`, `"client-address"` or
/// `{ client-address = { proxies = 1, header = "x-forwarded-for" } }`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum KeyConfig {
    /// All requests share the limit.
    #[default]
    Shared,
    /// Each route, by its name.
    Route,
    /// Each value of this request header. See [`Limit::by_header`](crate::Limit::by_header).
    Header(String),
    /// Each token in this request header, which has the form `Bearer <token>`.
    ///
    /// A request without a token is refused by default: see [`LimitConfig::require_key`](super::LimitConfig::require_key).
    Bearer(String),
    /// Each key, taken from the first of these headers that has one, for clients that send it in different headers.
    ///
    /// The same text in another header is the same caller. Headers that are empty or have another form are skipped. If a
    /// header is repeated, its first value counts. A client can send several of these headers, so authentication has to
    /// check them in the same order. Requests without a key are refused by default, as with [`Bearer`](Self::Bearer).
    AnyOf(Vec<Self>),
    /// Each client address.
    ClientAddress(AddressConfig),
}

/// The source of a client's address. See [`ClientAddress`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("oneOf" = schema::proxies_and_header())))]
#[serde(default, deny_unknown_fields)]
pub(super) struct AddressConfig {
    /// Number of your own proxies in front of the service. Default: 0.
    ///
    /// With 0 the peer's address is used, which the server provides as [`PeerAddress`](crate::PeerAddress).
    #[cfg_attr(test, schemars(range(max = crate::layer::ClientAddress::MAX_PROXIES)))]
    pub(super) proxies: u8,
    /// The header that all these proxies write. There is no default.
    pub(super) header: Option<AddressHeader>,
    /// Length of the IPv6 prefix of a client. See [`ClientAddress::ipv6_prefix`]. Default: 64 bits.
    #[cfg_attr(test, schemars(range(min = 1, max = 128)))]
    pub(super) ipv6_prefix: Option<u8>,
}

/// Header in which proxies forward a client's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub(super) enum AddressHeader {
    /// `X-Forwarded-For`.
    XForwardedFor,
    /// `Forwarded` (RFC 7239).
    Forwarded,
}

/// Key of one caller as written in the file. It may be a secret, so `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CallerKey(String);

pub(super) fn check_name(name: &str, path: String, faults: &mut Faults) {
    if HeaderName::try_from(name).is_err() {
        faults.add(path, "is not a header name");
    }
}

impl KeyConfig {
    pub(super) fn check(&self, path: &str, faults: &mut Faults) {
        match self {
            Self::Header(name) => check_name(name, format!("{path}.header"), faults),
            Self::Bearer(name) => check_name(name, format!("{path}.bearer"), faults),
            Self::AnyOf(headers) => {
                let path = format!("{path}.any_of");
                if !(1..=MAX_HEADERS).contains(&headers.len()) {
                    faults.add(&path, format!("it must be 1 to {MAX_HEADERS} headers"));
                }
                for (index, header) in headers.iter().enumerate() {
                    let path = format!("{path}[{index}]");
                    match header {
                        Self::Header(_) | Self::Bearer(_) => header.check(&path, faults),
                        _ => faults.add(path, "must be `header` or `bearer`"),
                    }
                }
            }
            Self::ClientAddress(address) => {
                address.check(&format!("{path}.client-address"), faults)
            }
            Self::Shared | Self::Route => {}
        }
    }

    /// Default of [`LimitConfig::require_key`](super::LimitConfig::require_key).
    pub(super) fn is_required_by_default(&self) -> bool {
        matches!(self, Self::Bearer(_) | Self::AnyOf(_))
    }
}

/// Where a key comes from, for people.
impl fmt::Display for KeyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shared => f.write_str("(all callers)"),
            Self::Route => f.write_str("route"),
            Self::Header(name) => f.write_str(name),
            Self::Bearer(name) => write!(f, "{name} (bearer)"),
            Self::AnyOf(headers) => {
                let headers: Vec<_> = headers.iter().map(Self::to_string).collect();
                f.write_str(&headers.join(" or "))
            }
            Self::ClientAddress(_) => f.write_str("client address"),
        }
    }
}

impl KeyConfig {
    /// The key of a caller with its own value.
    pub(super) fn of(&self, caller: &CallerKey) -> Result<Key, &'static str> {
        let text = caller.as_str();
        match self {
            Self::Shared => Err("all requests share this limit: nobody has a value of its own"),
            Self::Route | Self::Header(_) | Self::Bearer(_) | Self::AnyOf(_) => Ok(Key::from(text)),
            Self::ClientAddress(config) => {
                let address = text.parse().map_err(|_| "is no IP address")?;
                Ok(config.address().key_of(address))
            }
        }
    }
}

/// The key of a request.
impl KeyConfig {
    /// The key in the headers, or the client's address. `None` if the request lacks it, or if the key comes from
    /// another source.
    pub(super) fn find(&self, head: &Parts) -> Option<Key> {
        match self {
            Self::ClientAddress(config) => {
                let address = config.address();
                Some(address.key_of(address.find(head)?))
            }
            _ => self.in_headers(&head.headers).map(Key::from),
        }
    }

    pub(super) fn in_headers<'a>(&self, headers: &'a HeaderMap) -> Option<&'a [u8]> {
        match self {
            Self::Header(name) => value(name, headers),
            Self::Bearer(name) => token(name, headers),
            Self::AnyOf(keys) => keys.iter().find_map(|key| key.in_headers(headers)),
            Self::Shared | Self::Route | Self::ClientAddress(_) => None,
        }
    }
}

impl AddressConfig {
    pub(super) fn address(&self) -> ClientAddress {
        let address = match self.header {
            Some(AddressHeader::Forwarded) => ClientAddress::forwarded(self.proxies),
            Some(AddressHeader::XForwardedFor) => ClientAddress::forwarded_for(self.proxies),
            None => ClientAddress::peer(),
        };
        if_set(address, self.ipv6_prefix, ClientAddress::ipv6_prefix)
    }

    fn check(&self, path: &str, faults: &mut Faults) {
        match (self.proxies, self.header) {
            (0, Some(_)) => faults.add(
                format!("{path}.proxies"),
                "is 0 or missing: somebody has to write the header",
            ),
            (1.., None) => faults.add(
                format!("{path}.header"),
                "is missing: the proxies tell the address in `x-forwarded-for` or `forwarded`",
            ),
            _ => {}
        }
        faults.take(path, self.address().check());
    }
}

impl CallerKey {
    /// Returns the key.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for CallerKey {
    fn from(key: &str) -> Self {
        Self(key.to_owned())
    }
}

impl fmt::Debug for CallerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallerKey(..)")
    }
}

impl<'de> Deserialize<'de> for CallerKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        secret(deserializer).map(Self)
    }
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub(super) enum KeyWord {
    /// All requests share the limit.
    Shared,
    /// Each route, by its name.
    Route,
    /// Each address of a peer.
    ClientAddress,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("minProperties" = 1, "maxProperties" = 1)))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct KeyTable {
    /// Each value of this request header.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")))]
    header: Option<String>,
    /// Each token in this request header, which has the form `Bearer <token>`.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")))]
    bearer: Option<String>,
    /// Each key, taken from the first of these headers that has one.
    #[serde(rename = "any_of")]
    #[cfg_attr(test, schemars(length(min = 1, max = MAX_HEADERS), with = "Option<Vec<schema::HeaderTable>>"))]
    any_of: Option<Vec<KeyConfig>>,
    /// Each client address, as forwarded by proxies.
    client_address: Option<AddressConfig>,
}

impl<'de> Deserialize<'de> for KeyConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        word_or_table(
            deserializer,
            WORD_OR_TABLE,
            |word| {
                Ok(match word {
                    KeyWord::Shared => Self::Shared,
                    KeyWord::Route => Self::Route,
                    KeyWord::ClientAddress => Self::ClientAddress(AddressConfig::default()),
                })
            },
            |table: KeyTable| {
                let kinds = [
                    table.header.map(Self::Header),
                    table.bearer.map(Self::Bearer),
                    table.any_of.map(Self::AnyOf),
                    table.client_address.map(Self::ClientAddress),
                ];
                let mut kinds = kinds.into_iter().flatten();
                match (kinds.next(), kinds.next()) {
                    (Some(key), None) => Ok(key),
                    _ => Err("one of `header`, `bearer`, `any_of` and `client-address`"),
                }
            },
        )
    }
}

/// Returns the value of a header. `None`: it is missing or empty.
fn value<'a>(name: &str, headers: &'a HeaderMap) -> Option<&'a [u8]> {
    let value = headers.get(name)?.as_bytes();
    (!value.is_empty()).then_some(value)
}

/// Returns the token in a header. `None`: it is missing or empty, or the header has another form.
fn token<'a>(name: &str, headers: &'a HeaderMap) -> Option<&'a [u8]> {
    let value = headers.get(name)?.as_bytes();
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    // The scheme is case-insensitive (RFC 9110, 11.1).
    let token = scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())?;
    (!token.is_empty()).then_some(token)
}
