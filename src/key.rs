//! Keys: the caller, tenant or route to which a limit applies.

use std::{
    cmp, fmt,
    hash::{Hash, Hasher},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hmac_sha256::Hash as Sha256;
use http::HeaderValue;

/// Maximum length of a raw key, in bytes. Longer keys are kept as a digest, so that callers cannot fill the memory.
const MAX_RAW_LEN: usize = 64;
/// Maximum length of a key stored inline, in bytes: IPv4 addresses and most IPv6 networks, numbers, short names. Clones of a
/// longer key share an allocation.
const MAX_SHORT_LEN: usize = 22;

/// Identifies the subject of a limit: a caller, a tenant, a route.
///
/// Create a key [from](#trait-implementations) bytes of any length, a string, a header value, a number or an address.
/// Numbers and addresses become keys as text, so that operators can type them; for a UUID, use `uuid.to_string()`. Keys
/// never appear in the data of the store, in logs or in `Debug` output; a long key is kept as its SHA-256 digest.
///
/// ```
/// use tower_turnstile::Key;
///
/// let tenant = Key::from("acme");
/// let tenant_and_region = Key::from_parts(["acme", "eu"]);
/// assert_ne!(tenant_and_region, Key::from_parts(["ac", "meeu"]));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Raw);

#[derive(Clone, PartialEq, Eq)]
enum Raw {
    Short { len: u8, bytes: [u8; MAX_SHORT_LEN] },
    Long(Arc<[u8]>),
}

impl Key {
    /// Key of a limit that all callers share.
    pub const SHARED: Key = Key(Raw::Short {
        len: 0,
        bytes: [0; MAX_SHORT_LEN],
    });

    /// Creates a key from several parts, without ambiguity: `["a", "bc"]` and `["ab", "c"]` differ.
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut joined = Vec::new();
        for part in parts {
            let part = part.as_ref();
            joined.extend_from_slice(&(part.len() as u64).to_be_bytes());
            joined.extend_from_slice(part);
        }
        Self::from(joined)
    }

    /// The name of this key's ledger in the store: `<namespace>:{<128 bits of SHA-256 in hex>}`.
    pub(crate) fn ledger_name(&self, namespace: &str, limit_name: &str) -> String {
        format!("{namespace}:{{{:032x}}}", self.digest(limit_name))
    }

    /// 128 bits of SHA-256 over the limit's name and the key.
    pub(crate) fn digest(&self, limit_name: &str) -> u128 {
        let mut hash = Sha256::new();
        for text in [limit_name.as_bytes(), self.bytes()] {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
        let bits = hash.finalize().into_iter().take(16);
        bits.fold(0u128, |bits, byte| bits << 8 | u128::from(byte))
    }

    /// The key's text, with bytes that are not text escaped. For operators who may see keys.
    pub(crate) fn shown(&self) -> String {
        match str::from_utf8(self.bytes()) {
            Ok(text) => text.to_owned(),
            Err(_) => self.bytes().escape_ascii().to_string(),
        }
    }

    fn bytes(&self) -> &[u8] {
        match &self.0 {
            Raw::Short { len, bytes } => &bytes[..usize::from(*len)],
            Raw::Long(bytes) => bytes,
        }
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        self.bytes().cmp(other.bytes())
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes().hash(state);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl From<&[u8]> for Key {
    fn from(raw: &[u8]) -> Self {
        let len = raw.len();
        if len <= MAX_SHORT_LEN {
            let mut bytes = [0; MAX_SHORT_LEN];
            bytes[..len].copy_from_slice(raw);
            let len = len as u8;
            Self(Raw::Short { len, bytes })
        } else if len <= MAX_RAW_LEN {
            Self(Raw::Long(raw.into()))
        } else {
            // Longer than any raw key, so the two kinds never meet.
            let digest = Sha256::hash(raw).map(|byte| format!("{byte:02x}"));
            let text = format!("sha256:{}", digest.concat());
            Self(Raw::Long(text.as_bytes().into()))
        }
    }
}

impl<const N: usize> From<[u8; N]> for Key {
    fn from(raw: [u8; N]) -> Self {
        Self::from(&raw[..])
    }
}

impl From<HeaderValue> for Key {
    fn from(value: HeaderValue) -> Self {
        Self::from(value.as_bytes())
    }
}

impl From<&HeaderValue> for Key {
    fn from(value: &HeaderValue) -> Self {
        Self::from(value.as_bytes())
    }
}

impl From<&String> for Key {
    fn from(raw: &String) -> Self {
        Self::from(raw.as_bytes())
    }
}

impl From<&Key> for Key {
    fn from(key: &Key) -> Self {
        key.clone()
    }
}

impl From<Vec<u8>> for Key {
    fn from(raw: Vec<u8>) -> Self {
        Self::from(&raw[..])
    }
}

impl From<&str> for Key {
    fn from(raw: &str) -> Self {
        Self::from(raw.as_bytes())
    }
}

impl From<String> for Key {
    fn from(raw: String) -> Self {
        Self::from(raw.into_bytes())
    }
}

/// The text of the address. An IPv4 address makes the same key as its IPv4-mapped IPv6 address.
impl From<IpAddr> for Key {
    fn from(address: IpAddr) -> Self {
        Self::from(address.to_canonical().to_string())
    }
}

/// The address without the port: a client's connections share a key.
impl From<SocketAddr> for Key {
    fn from(address: SocketAddr) -> Self {
        Self::from(address.ip())
    }
}

// Numbers become keys as decimal digits, so equal numbers of any type make the same key.
macro_rules! from_numbers {
    ($($number:ty),*) => {
        $(
            impl From<$number> for Key {
                fn from(number: $number) -> Self {
                    Self::from(number.to_string())
                }
            }
        )*
    };
}

from_numbers!(u8, u16, u32, u64, usize, i8, i16, i32, i64, isize);

#[cfg(test)]
mod tests {
    use super::*;

    /// As the guide says (`redis.md`): versions of this crate share the ledgers. The digests were not computed by it.
    #[test]
    fn names_are_those_of_the_guide() {
        let name = |key: Key| key.ledger_name("turnstile", "chat");
        for (key, digest) in [
            (Key::from("acme"), "c928da96f598f3a76ce77b5a8b9a1edb"),
            (Key::from(""), "61364772710417fb42a0e5fdaea2e59c"),
            (Key::from(7u64), "721f557ad0335f0f55fc377b77e6ed72"),
            (
                Key::from(std::net::IpAddr::from([10, 0, 0, 1])),
                "c3c648973a052989a1d0983dc47f95bc",
            ),
            (
                Key::from("x".repeat(65)),
                "4b639a8d7d8379b4aff2f9d70ad091e2",
            ),
        ] {
            assert_eq!(name(key), format!("turnstile:{{{digest}}}"));
        }
    }

    #[test]
    fn hostile_keys_have_names_of_one_length_and_one_slot() {
        let long = "x".repeat(1 << 20);
        let hostile = ["", "}", "{", "{}", "x}{y", "a\0b", "a\r\nb", "ü", &long];
        let names: std::collections::BTreeSet<_> = hostile
            .iter()
            .map(|key| Key::from(*key).ledger_name("turnstile", "chat"))
            .collect();
        assert_eq!(names.len(), hostile.len());
        for name in names {
            assert_eq!(name.len(), "turnstile:{}".len() + 32);
            assert!(
                name["turnstile:{".len()..name.len() - 1]
                    .bytes()
                    .all(|byte| byte.is_ascii_hexdigit())
            );
        }
    }

    #[test]
    fn limit_name_and_key_are_kept_apart() {
        let one = Key::from("bc").ledger_name("n", "a");
        let other = Key::from("c").ledger_name("n", "ab");
        assert_ne!(one, other);
    }

    #[test]
    fn a_long_key_is_kept_short_and_differs_from_its_own_digest() {
        let long = Key::from(vec![7; 65]);
        assert!(long.bytes().len() < 80);
        assert_ne!(Key::from(long.bytes()), long);
    }

    #[test]
    fn keys_of_all_lengths_are_equal_to_themselves_only() {
        let keys = |fill: u8| (0..=MAX_RAW_LEN + 1).map(move |len| Key::from(vec![fill; len]));
        let mut all: Vec<Key> = keys(0).chain(keys(1).skip(1)).collect();
        for (key, same) in all.iter().zip(keys(0)) {
            assert_eq!(*key, same);
        }
        all.sort();
        assert_eq!(all[0], Key::SHARED);
        assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn a_value_is_one_key_in_all_its_forms() {
        let text = Key::from("acme");
        let header = HeaderValue::from_static("acme");
        for same in [
            Key::from(&header),
            Key::from(header),
            Key::from("acme".to_owned()),
            Key::from(&"acme".to_owned()),
            Key::from(&b"acme"[..]),
            Key::from(*b"acme"),
            Key::from(&text),
        ] {
            assert_eq!(same, text);
        }
        let seven = Key::from(7u64);
        for same in [
            Key::from(7u32),
            Key::from(7i64),
            Key::from(7),
            Key::from(7usize),
        ] {
            assert_eq!(same, seven);
        }
        assert_ne!(Key::from(-1), Key::from(1));
        let address: IpAddr = [192, 0, 2, 7].into();
        let mapped: IpAddr = "::ffff:192.0.2.7".parse().expect("an address");
        for same in [Key::from(mapped), Key::from("192.0.2.7")] {
            assert_eq!(Key::from(address), same);
        }
        assert_eq!(seven, Key::from("7"));
        assert_eq!(Key::from(i64::MIN), Key::from("-9223372036854775808"));
        let uuid = [0xa7; 16];
        assert_eq!(Key::from(uuid), Key::from(&uuid[..]));
    }

    #[test]
    fn debug_shows_no_key() {
        assert_eq!(format!("{:?}", Key::from("secret")), "Key(..)");
    }
}
