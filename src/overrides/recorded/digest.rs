//! Digests of keys and tenants: how operators name a caller or a tenant without its key.

use std::{fmt, str::FromStr};

use crate::{
    key::Key,
    ledger::TenantId,
    permit_id::{ParseIdError, PermitId, impl_text},
};

/// Length of the hexadecimal text of a digest or a token.
const HEX: usize = 32;

/// The digest of a caller's key under one limit.
///
/// Keys are often credentials, so operators only see digests. As text a digest has 32 hexadecimal digits, which are
/// also in the key's name in the store (see [Inspecting a key](crate::guide::redis#inspecting-a-key)).
///
/// ```
/// use tower_turnstile::operate::KeyDigest;
///
/// let acme = KeyDigest::of("chat", "acme");
/// assert_eq!(acme.to_string().parse(), Ok(acme));
/// assert_ne!(acme, KeyDigest::of("search", "acme"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyDigest(u128);

impl KeyDigest {
    /// Returns the digest of a key under the limit of this name.
    pub fn of(limit: &str, key: impl Into<Key>) -> Self {
        Self(key.into().digest(limit))
    }

    pub(crate) fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0HEX$x}", self.0)
    }
}

impl FromStr for KeyDigest {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let is_digest = is_hex(&text.to_ascii_lowercase());
        let bits = is_digest.then(|| u128::from_str_radix(text, 16).ok());
        let fault = ParseIdError("the digest of a key is 32 hexadecimal digits");
        bits.flatten().map(Self).ok_or(fault)
    }
}

impl_text!(KeyDigest);

/// The digest of a tenant of [fair](crate::Limit::fair) limits.
///
/// Tenants, like keys, are often hidden from operators. As text a digest has eight letters, digits, hyphens and
/// underscores. The store names a tenant by the same text.
///
/// ```
/// use tower_turnstile::operate::TenantDigest;
///
/// let acme = TenantDigest::of("acme");
/// assert_eq!(acme.to_string().parse(), Ok(acme));
/// assert_ne!(acme, TenantDigest::of("globex"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantDigest(TenantId);

impl TenantDigest {
    /// Returns the digest of a tenant. All requests without a tenant are the tenant with an empty name.
    pub fn of(tenant: impl Into<Key>) -> Self {
        Self(TenantId::of(&tenant.into()))
    }

    pub(crate) fn id(self) -> TenantId {
        self.0
    }
}

impl From<TenantId> for TenantDigest {
    fn from(id: TenantId) -> Self {
        Self(id)
    }
}

impl fmt::Display for TenantDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl FromStr for TenantDigest {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let fault = ParseIdError("the digest of a tenant is 8 letters, digits, `-` and `_`");
        let id = TenantId::parse(text.as_bytes());
        id.map(Self).ok_or(fault)
    }
}

impl_text!(TenantDigest);

/// Whether a text is a digest or a token as we write it.
pub(super) fn is_hex(text: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == HEX && text.bytes().all(digit)
}
/// Writes and reads an id as its text.
macro_rules! impl_serde {
    ($id:ident) => {
        impl serde::Serialize for $id {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $id {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

impl_serde!(KeyDigest);
impl_serde!(TenantDigest);
impl_serde!(PermitId);
