//! An override as operators see it, and as a field of the record.
//!
//! Tests: below.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    key::Key,
    limit::{LimitValue, MAX_LIMIT, Mode},
};

/// Longest name of a limit, in bytes.
const MAX_NAME: usize = 128;
/// Hexadecimal digits of a token, and of a key's digest.
const HEX: usize = 32;
/// Most bytes of an author's name.
pub(crate) const MAX_AUTHOR: usize = 64;
/// Most bytes of a reason.
pub(crate) const MAX_REASON: usize = 256;
/// Most bytes of an override's text in the store. JSON may need six for one.
const MAX_TEXT: usize = 6 * (MAX_AUTHOR + MAX_REASON) + 256;

/// The subject of an override: a limit, or one of its keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Target {
    limit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

/// A decision of an operator, for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
#[non_exhaustive]
pub enum Setting {
    /// The value: slots, or requests in a period, and their burst.
    ///
    /// Of a limit it applies to all keys that have no override of their own, also to those with declared
    /// [values](crate::Scope::values), except that a key with a declared value of 0 stays blocked.
    Value(LimitValue),
    /// Whether the limit is enforced. [`Mode::Off`] admits everybody.
    Mode(Mode),
    /// The limit admits nobody. Holders finish; requests that wait are refused.
    Pause,
}

/// A setting in JSON. The burst is beside the value: who knows of none reads the rest.
#[derive(Serialize, Deserialize)]
struct Written {
    #[serde(flatten)]
    kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    burst: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "setting", content = "to", rename_all = "kebab-case")]
enum Kind {
    Value(u32),
    Mode(Mode),
    Pause,
}

/// A decision of an operator that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Override {
    /// The limit or key.
    #[serde(flatten)]
    pub target: Target,
    /// The decision.
    #[serde(flatten)]
    pub setting: Setting,
    /// Its author, as they said.
    pub author: String,
    /// The reason for it, as they said.
    pub reason: String,
    /// When it was set, in milliseconds since 1970 by the store's clock.
    pub since_ms: u64,
    /// When it ends.
    pub until_ms: u64,
    pub(crate) token: Token,
}

/// Identifies a change. Random: a number would start anew with a store that has lost its data.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Token(String);

/// Why a field of the record is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldFault {
    /// Its name is none of ours.
    Name,
    /// Its text is too long.
    Length,
    /// Its text cannot be read.
    Text,
    /// Its value is out of range.
    Range,
}

/// The JSON in a text.
#[derive(Serialize, Deserialize)]
pub(super) struct Signed {
    #[serde(flatten)]
    setting: Setting,
    author: String,
    reason: String,
}

impl Target {
    /// A limit, by its name.
    pub fn limit(name: impl Into<String>) -> Self {
        let limit = name.into();
        Self { limit, key: None }
    }

    /// One key of a limit. Only its digest leaves this process.
    pub fn key(limit: impl Into<String>, key: impl Into<Key>) -> Self {
        let limit = limit.into();
        let digest = key.into().digest(&limit);
        Self::of_digest(limit, digest)
    }

    /// One key of a limit, by its digest.
    pub(crate) fn of_digest(limit: impl Into<String>, digest: u128) -> Self {
        let (limit, key) = (limit.into(), Some(hex(digest)));
        Self { limit, key }
    }

    /// Returns the limit's name.
    pub fn limit_name(&self) -> &str {
        &self.limit
    }

    /// Returns the digest of the key; `None` if it is about the whole limit.
    pub fn key_digest(&self) -> Option<&str> {
        self.key.as_deref()
    }

    pub(crate) fn digest_bits(&self) -> Option<u128> {
        u128::from_str_radix(self.key.as_deref()?, 16).ok()
    }

    /// Whether a limit may have this name.
    pub(crate) fn is_valid(&self) -> bool {
        (1..=MAX_NAME).contains(&self.limit.len())
    }

    /// Whether the numbers are in range. Only a key may be blocked by a value of 0.
    pub(crate) fn may_have(&self, value: LimitValue) -> bool {
        let least = u32::from(self.key.is_none());
        let in_range = |least, number| (least..=MAX_LIMIT).contains(&number);
        in_range(least, value.max) && value.burst.is_none_or(|burst| in_range(1, burst))
    }

    /// The fields that are about it.
    pub(crate) fn fields(&self) -> Vec<String> {
        let limit = &self.limit;
        match &self.key {
            Some(key) => vec![format!("key:{key}:{limit}")],
            None => ["value", "mode", "pause"]
                .map(|kind| format!("{kind}:{limit}"))
                .into(),
        }
    }

    /// The field that has this setting. A key has a value only.
    pub(crate) fn field(&self, setting: Setting) -> Option<String> {
        let limit = &self.limit;
        match (&self.key, setting) {
            (Some(key), Setting::Value(_)) => Some(format!("key:{key}:{limit}")),
            (Some(_), _) => None,
            (None, Setting::Value(_)) => Some(format!("value:{limit}")),
            (None, Setting::Mode(_)) => Some(format!("mode:{limit}")),
            (None, Setting::Pause) => Some(format!("pause:{limit}")),
        }
    }

    /// The subject of a field.
    fn of_field(field: &str) -> Option<Self> {
        let (kind, rest) = field.split_once(':')?;
        let target = match kind {
            "value" | "mode" | "pause" => Self::limit(rest),
            "key" => {
                let (digest, limit) = rest.split_once(':')?;
                let key = Some(digest.to_owned()).filter(|digest| is_hex(digest));
                let limit = limit.to_owned();
                Self {
                    key: Some(key?),
                    limit,
                }
            }
            _ => return None,
        };
        target.is_valid().then_some(target)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            None => write!(f, "limit `{}`", self.limit),
            Some(key) => write!(f, "key {key} of limit `{}`", self.limit),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(LimitValue { max, burst: None }) => write!(f, "value {max}"),
            Self::Value(LimitValue {
                max,
                burst: Some(burst),
            }) => write!(f, "value {max}, burst {burst}"),
            Self::Mode(Mode::Enforce) => f.write_str("enforced"),
            Self::Mode(Mode::Shadow) => f.write_str("in shadow mode"),
            Self::Mode(Mode::Off) => f.write_str("off: everybody is admitted"),
            Self::Pause => f.write_str("paused: nobody is admitted"),
        }
    }
}

impl From<Written> for Setting {
    fn from(Written { kind, burst }: Written) -> Self {
        match kind {
            Kind::Value(max) => Self::Value(LimitValue { max, burst }),
            Kind::Mode(mode) => Self::Mode(mode),
            Kind::Pause => Self::Pause,
        }
    }
}

impl From<Setting> for Written {
    fn from(setting: Setting) -> Self {
        let (kind, burst) = match setting {
            Setting::Value(LimitValue { max, burst }) => (Kind::Value(max), burst),
            Setting::Mode(mode) => (Kind::Mode(mode), None),
            Setting::Pause => (Kind::Pause, None),
        };
        Self { kind, burst }
    }
}

impl Token {
    pub(crate) fn random() -> Result<Self, getrandom::Error> {
        let mut bits = [0; 16];
        getrandom::fill(&mut bits)?;
        Ok(Self(hex(u128::from_be_bytes(bits))))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Token {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match is_hex(&text) {
            true => Ok(Self(text)),
            false => Err("a token has 32 hexadecimal digits"),
        }
    }
}

impl From<Token> for String {
    fn from(token: Token) -> Self {
        token.0
    }
}

impl Override {
    /// Reads a field of the record.
    pub(crate) fn read(field: &[u8], text: &[u8]) -> Result<Self, FieldFault> {
        if text.len() > MAX_TEXT {
            return Err(FieldFault::Length);
        }
        let field = str::from_utf8(field).map_err(|_| FieldFault::Name)?;
        let target = Target::of_field(field).ok_or(FieldFault::Name)?;
        let text = str::from_utf8(text).map_err(|_| FieldFault::Text)?;
        let read = parse(target, text).ok_or(FieldFault::Text)?;
        // The name of the field is what changes go by.
        if read.target.field(read.setting).as_deref() != Some(field) {
            return Err(FieldFault::Text);
        }
        match read.setting {
            Setting::Value(value) if !read.target.may_have(value) => Err(FieldFault::Range),
            _ => Ok(read),
        }
    }

    /// The text from behind the token on.
    pub(crate) fn json(setting: Setting, author: &str, reason: &str) -> String {
        let (author, reason) = (author.to_owned(), reason.to_owned());
        let signed = Signed {
            setting,
            author,
            reason,
        };
        serde_json::to_string(&signed).expect("texts and numbers")
    }
}

fn parse(target: Target, text: &str) -> Option<Override> {
    let mut parts = text.splitn(4, ' ');
    let (since_ms, until_ms) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let token = Token::try_from(parts.next()?.to_owned()).ok()?;
    let Signed {
        setting,
        author,
        reason,
    } = serde_json::from_str(parts.next()?).ok()?;
    Some(Override {
        target,
        setting,
        author,
        reason,
        since_ms,
        until_ms,
        token,
    })
}

fn hex(bits: u128) -> String {
    format!("{bits:0HEX$x}")
}

fn is_hex(text: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == HEX && text.bytes().all(digit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn text(json: &str) -> Vec<u8> {
        format!("1 2 {TOKEN} {json}").into_bytes()
    }

    fn fault(field: &str, text: &[u8]) -> Option<FieldFault> {
        Override::read(field.as_bytes(), text).err()
    }

    #[test]
    fn what_cannot_be_read_has_a_fault() {
        let good = Override::json(Setting::Value(8.into()), "ada", "");
        assert_eq!(fault("value:chat", &text(&good)), None);
        let other_kind = Override::json(Setting::Pause, "ada", "");
        let key = format!("key:{TOKEN}:chat");
        let nothing = Override::json(Setting::Value(0.into()), "ada", "");
        assert_eq!(fault(&key, &text(&nothing)), None);
        let too_much = Override::json(Setting::Value((MAX_LIMIT + 1).into()), "ada", "");
        let no_burst = Override::json(Setting::Value(LimitValue::new(8).burst(0)), "ada", "");
        let long_name = format!("value:{}", "x".repeat(129));
        let long = Override::json(Setting::Value(8.into()), &"x".repeat(MAX_TEXT), "");
        for (field, text, expected) in [
            ("chat", text(&good), FieldFault::Name),
            ("value:", text(&good), FieldFault::Name),
            ("key:chat", text(&good), FieldFault::Name),
            ("key:0:chat", text(&good), FieldFault::Name),
            ("other:chat", text(&good), FieldFault::Name),
            (&long_name, text(&good), FieldFault::Name),
            ("value:chat", text(&long), FieldFault::Length),
            ("value:chat", text("{}"), FieldFault::Text),
            ("value:chat", text(&other_kind), FieldFault::Text),
            ("value:chat", b"1 2 3 {}".to_vec(), FieldFault::Text),
            ("value:chat", b"-1 2".to_vec(), FieldFault::Text),
            ("value:chat", b"\xff".to_vec(), FieldFault::Text),
            ("value:chat", text(&nothing), FieldFault::Range),
            ("value:chat", text(&too_much), FieldFault::Range),
            (&key, text(&too_much), FieldFault::Range),
            (&key, text(&no_burst), FieldFault::Range),
        ] {
            assert_eq!(fault(field, &text), Some(expected), "{field}");
        }
        assert_eq!(Override::read(b"\xff", b"").err(), Some(FieldFault::Name));
    }

    #[test]
    fn an_override_is_one_flat_object() {
        let json = Override::json(Setting::Mode(Mode::Shadow), "ada", "");
        let read = Override::read(b"mode:chat", &text(&json)).unwrap();
        let expected = serde_json::json!({
            "limit": "chat", "setting": "mode", "to": "shadow", "author": "ada", "reason": "",
            "since_ms": 1, "until_ms": 2, "token": TOKEN,
        });
        let value = serde_json::to_value(&read).unwrap();
        assert_eq!(value, expected);
        assert_eq!(serde_json::from_value::<Override>(value).unwrap(), read);
    }

    /// A reader that knows of no burst has the value, and one that does reads a value without.
    #[test]
    fn a_burst_is_beside_the_value() {
        let value = LimitValue::new(100).burst(20);
        let json = Override::json(Setting::Value(value), "ada", "");
        let expected = r#"{"setting":"value","to":100,"burst":20,"author":"ada","reason":""}"#;
        assert_eq!(json, expected);
        let read = Override::read(b"value:chat", &text(&json)).unwrap();
        assert_eq!(read.setting, Setting::Value(value));
        let plain = Override::json(Setting::Value(100.into()), "ada", "");
        assert_eq!(plain, expected.replace(r#""burst":20,"#, ""));
    }

    proptest! {
        #[test]
        fn hostile_fields_are_read_or_have_a_fault(field: Vec<u8>, text: Vec<u8>) {
            let _ = Override::read(&field, &text);
            let _ = Override::read(b"value:chat", &text);
            let text = [&b"1 2 0123456789abcdef0123456789abcdef "[..], &text].concat();
            let _ = Override::read(b"value:chat", &text);
        }

        #[test]
        fn any_name_key_and_texts_come_back(
            limit in "(?s).{1,32}",
            key: Option<Vec<u8>>,
            max in 1..=MAX_LIMIT,
            burst in prop::option::of(1..=MAX_LIMIT),
            author in "(?s).{1,16}",
            reason in "(?s).{0,64}",
        ) {
            let target = match key {
                Some(key) => Target::key(&limit, key),
                None => Target::limit(&limit),
            };
            let setting = Setting::Value(LimitValue { max, burst });
            let field = target.field(setting).unwrap();
            let json = Override::json(setting, &author, &reason);
            let read = Override::read(field.as_bytes(), &text(&json)).unwrap();
            prop_assert_eq!(read.target, target);
            prop_assert_eq!(read.setting, setting);
            prop_assert_eq!((read.author, read.reason), (author, reason));
        }
    }
}
