//! Authentication. Decides who sent a request, by its keys, and what the limits see in their place: the name of a tenant.
//!
//! Tests: `tests/gateway/authentication.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    env, fmt,
    fs::File,
    io::Read,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
};

use hmac_sha256::Hash;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use serde::Deserialize;

/// Code and message of the error: the request has no key.
pub(crate) const NO_KEY: (&str, &str) = (
    "missing_api_key",
    "no API key: send it as `Authorization: Bearer <key>`, or as `x-api-key`",
);
const UNKNOWN: (&str, &str) = ("invalid_api_key", "unknown API key");
const SEVERAL: (&str, &str) = ("invalid_api_key", "API keys of several callers: send one");

/// Headers with a key, besides `Authorization`.
const PLAIN: [&str; 2] = ["x-api-key", "api-key"];
const MAX_BYTES: u64 = 1 << 20;

/// The callers of a file. Cheap to clone; clones share them.
///
/// Without a file the gateway accepts any key: then something in front of it has to authenticate callers.
#[derive(Clone, Default)]
pub(crate) struct Callers(Option<Arc<Known>>);

struct Known {
    path: PathBuf,
    /// Where limits and upstreams find the caller's name.
    header: Option<HeaderName>,
    keys: RwLock<Keys>,
}

/// The caller of each key, by the key's hash.
pub(crate) type Keys = HashMap<String, Arc<Caller>>;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) name: String,
    /// Callers of one tenant are one to the limits.
    pub(crate) tenant: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CallersFile {
    callers: BTreeMap<Name, Section>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    /// Default: the caller's name.
    tenant: Option<Name>,
    keys: Vec<KeyHash>,
}

#[derive(Clone, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(try_from = "String")]
struct Name(String);

/// SHA-256 in hexadecimal digits.
#[derive(Deserialize)]
#[serde(try_from = "KeySource")]
struct KeyHash(String);

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum KeySource {
    Sha256(String),
    /// An environment variable with the key.
    Env(String),
}

/// Why a file of callers cannot be used, and where. It has no text of the file, in which a key may be in the wrong place.
#[derive(Debug)]
pub(crate) struct CallersError {
    place: String,
    message: String,
}

impl fmt::Display for CallersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

impl Callers {
    pub(crate) fn from_file(path: PathBuf, header: Option<HeaderName>) -> Result<Self, String> {
        let keys = RwLock::default();
        let callers = Self(Some(Arc::new(Known { path, header, keys })));
        callers.replace(callers.read()?);
        Ok(callers)
    }

    pub(crate) fn are_known(&self) -> bool {
        self.0.is_some()
    }

    /// Reads the file again.
    pub(crate) fn read(&self) -> Result<Keys, String> {
        let Some(known) = &self.0 else {
            return Ok(Keys::new());
        };
        let failed =
            |error: &dyn fmt::Display| format!("--callers {}: {error}", known.path.display());
        let mut text = String::new();
        let file = File::open(&known.path);
        match file.and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text)) {
            Ok(length) if length as u64 > MAX_BYTES => Err(failed(&"it is larger than 1 MiB")),
            Ok(_) => parse(&text).map_err(|error| failed(&error)),
            Err(error) => Err(failed(&error)),
        }
    }

    pub(crate) fn replace(&self, keys: Keys) {
        if let Some(known) = &self.0 {
            *known.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        }
    }

    /// Finds the caller, and puts the tenant in the place of its keys, wherever a limit may look. `None`: any key is accepted.
    ///
    /// # Errors
    ///
    /// Code and message, if the request has no key, an unknown one, or keys of several callers.
    pub(crate) fn admit(
        &self,
        headers: &mut HeaderMap,
    ) -> Result<Option<Arc<Caller>>, (&'static str, &'static str)> {
        let Some(known) = &self.0 else {
            return Ok(None);
        };
        let caller = known.find(headers)?;
        // Names have only characters of values.
        let value = |text: &str| HeaderValue::from_str(text).map_err(|_| UNKNOWN);
        for name in PLAIN {
            headers.insert(name, value(&caller.tenant)?);
        }
        let bearer = format!("Bearer {}", caller.tenant);
        headers.insert(header::AUTHORIZATION, value(&bearer)?);
        if let Some(name) = &known.header {
            headers.insert(name, value(&caller.name)?);
        }
        Ok(Some(caller))
    }
}

impl Known {
    fn find(&self, headers: &HeaderMap) -> Result<Arc<Caller>, (&'static str, &'static str)> {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let plain = PLAIN.map(|name| headers.get_all(name).iter());
        let plain = plain.into_iter().flatten().map(HeaderValue::as_bytes);
        let sent = plain.chain(headers.get_all(header::AUTHORIZATION).iter().map(token));
        let sent = sent.filter(|key| !key.is_empty());
        let mut callers = sent.map(|key| keys.get(&hash(key)));
        let caller = callers.next().ok_or(NO_KEY)?.ok_or(UNKNOWN)?;
        for other in callers {
            if other.ok_or(UNKNOWN)? != caller {
                return Err(SEVERAL);
            }
        }
        Ok(caller.clone())
    }
}

/// The token of a value of `Authorization`. Of another scheme than `Bearer`, all of the value: a key that nobody has.
fn token(value: &HeaderValue) -> &[u8] {
    let value = value.as_bytes();
    let length = value.iter().position(|byte| *byte == b' ');
    let (scheme, token) = value.split_at(length.unwrap_or(value.len()));
    if scheme.eq_ignore_ascii_case(b"bearer") {
        token.trim_ascii()
    } else {
        value
    }
}

fn hash(key: &[u8]) -> String {
    let bytes = Hash::hash(key);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses a file. It ends with the end of a line: otherwise it may have been cut.
pub(crate) fn parse(text: &str) -> Result<Keys, CallersError> {
    let fault = |at: usize, message: &str| CallersError {
        place: format!("line {}", text[..at].matches('\n').count() + 1),
        message: message.to_owned(),
    };
    let within = |error: toml::de::Error| {
        let at = error.span().map_or(0, |span| span.start);
        fault(at, &without_values(error.message()))
    };
    if !text.ends_with('\n') {
        return Err(fault(text.len(), "it has no end: it may be cut"));
    }
    let file = toml::Deserializer::parse(text).and_then(CallersFile::deserialize);
    let mut keys = Keys::new();
    for (Name(name), section) in file.map_err(within)?.callers {
        let place = format!("callers.{name}.keys");
        let tenant = section.tenant.map(|Name(tenant)| tenant);
        let tenant = tenant.unwrap_or_else(|| name.clone());
        let caller = Arc::new(Caller { name, tenant });
        for KeyHash(hash) in section.keys {
            if let Some(other) = keys.insert(hash, caller.clone()) {
                let message = format!("`{}` has one of these keys too", other.name);
                return Err(CallersError { place, message });
            }
        }
    }
    if keys.is_empty() {
        return Err(fault(0, "nobody has a key"));
    }
    Ok(keys)
}

impl TryFrom<String> for Name {
    type Error = &'static str;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        let is_name =
            (1..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        is_name
            .then_some(Self(name))
            .ok_or("no name, expected 1 to 64 visible characters of ASCII")
    }
}

impl TryFrom<KeySource> for KeyHash {
    type Error = &'static str;

    fn try_from(source: KeySource) -> Result<Self, Self::Error> {
        let hash = match source {
            KeySource::Sha256(digits) => digits.to_ascii_lowercase(),
            KeySource::Env(name) => hash(env::var(name).unwrap_or_default().trim().as_bytes()),
        };
        let is_hash = hash.len() == 64 && hash.bytes().all(|digit| digit.is_ascii_hexdigit());
        if !is_hash {
            Err("no hash, expected 64 hexadecimal digits")
        } else if hash == self::hash(b"") {
            Err(
                "no key, expected one: the variable is empty or not set, or the hash is that of nothing",
            )
        } else {
            Ok(Self(hash))
        }
    }
}

/// Removes values and unknown names from a message: what is expected comes last. TOML's own messages have none.
fn without_values(message: &str) -> String {
    match message.rsplit_once(", expected ") {
        Some((_, expected)) => format!("expected {expected}"),
        None if message.starts_with("invalid") || message.starts_with("un") => {
            "a value that cannot be read".to_owned()
        }
        None => message.to_owned(),
    }
}
