//! A field of the record: an override, which may have ended or been removed.
//!
//! Tests: below.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::setting::{Override, Setting, Target, Token};

/// Maximum length of an override, in ms: seven days.
pub(super) const MAX_LENGTH_MS: u64 = Override::MAX_LENGTH.as_millis() as u64;
/// The furthest end that counts, in ms from now. It includes an extra day: after a failover, or a step of its clock,
/// the server that reads an end may be behind the server that wrote it.
pub(super) const MAX_REST_MS: u64 = MAX_LENGTH_MS + 24 * 3_600_000;
/// Maximum size of a field's text in the store, in bytes. JSON may need six bytes for one.
const MAX_TEXT: usize = 6 * (Override::MAX_AUTHOR + Override::MAX_REASON) + 256;

/// Entries by the names of their fields.
pub(crate) type Entries = BTreeMap<String, RecordEntry>;

/// A field of the record. `record.lua` describes its text.
///
/// An entry outlives its override: as long as a disconnected replica may have the override in force, the record
/// remembers its removal or replacement. So an override in force that the record lacks was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordEntry {
    /// The text in the store.
    pub(crate) text: String,
    pub(crate) version: u64,
    /// Until when the entry is kept: the latest end that any override in this field has had.
    pub(crate) known_ms: u64,
    /// The override. After its end it is in force nowhere. A removed override has the end 0.
    pub(crate) one: Override,
}

/// The JSON in a text.
#[derive(Serialize, Deserialize)]
struct EntryJson {
    #[serde(flatten)]
    setting: Setting,
    author: String,
    reason: String,
}

impl RecordEntry {
    /// Parses a field of the record. `None`: its name, its text or a number in it is none of ours.
    pub(crate) fn read(field: &[u8], text: &[u8]) -> Option<Self> {
        let (field, text) = (str::from_utf8(field).ok()?, str::from_utf8(text).ok()?);
        let target = Target::of_field(field).filter(|_| text.len() <= MAX_TEXT)?;
        let mut parts = text.splitn(6, ' ');
        let mut number = || parts.next()?.parse().ok();
        let (since_ms, until_ms, known_ms, version) = (number()?, number()?, number()?, number()?);
        let token = Token::try_from(parts.next()?.to_owned()).ok()?;
        let json: EntryJson = serde_json::from_str(parts.next()?).ok()?;
        // Changes refer to the field by its name.
        let is_own = target.field(json.setting).as_deref() == Some(field);
        if !is_own || !target.may_have(json.setting) {
            return None;
        }
        Some(Self {
            text: text.to_owned(),
            version,
            known_ms,
            one: Override {
                target,
                setting: json.setting,
                author: json.author,
                reason: json.reason,
                since_ms,
                until_ms,
                recorded: true,
                token,
            },
        })
    }

    /// Whether the entry is valid at this store time: no time in it is further ahead than we would write.
    pub(super) fn is_plausible(&self, now_ms: u64) -> bool {
        let furthest_ms = now_ms.saturating_add(MAX_REST_MS);
        self.one.until_ms <= self.known_ms
            && self.known_ms <= furthest_ms
            && self.version <= furthest_ms
    }

    pub(super) fn is_known(&self, now_ms: u64) -> bool {
        self.known_ms > now_ms && self.is_plausible(now_ms)
    }

    pub(super) fn is_in_force(&self, now_ms: u64) -> bool {
        self.one.until_ms > now_ms
    }
}

impl Override {
    /// Parses an override from a field of the record, whether or not it has ended.
    #[doc(hidden)]
    pub fn read(field: &[u8], text: &[u8]) -> Option<Self> {
        RecordEntry::read(field, text).map(|entry| entry.one)
    }

    /// The part of the text after the token.
    pub(crate) fn json(setting: Setting, author: &str, reason: &str) -> String {
        let signed = EntryJson {
            setting,
            author: author.to_owned(),
            reason: reason.to_owned(),
        };
        serde_json::to_string(&signed).expect("texts and numbers")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        limit::{LimitValue, Mode},
        overrides::TenantDigest,
        ranges::MAX_RATE,
    };

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn text(json: &str) -> Vec<u8> {
        format!("1 2 3 4 {TOKEN} {json}").into_bytes()
    }

    fn is_read(field: &str, text: &[u8]) -> bool {
        Override::read(field.as_bytes(), text).is_some()
    }

    #[test]
    fn what_is_not_ours_is_not_read() {
        let good = Override::json(Setting::Value(8.into()), "ada", "");
        assert!(is_read("value:chat", &text(&good)));
        let other_kind = Override::json(Setting::Pause, "ada", "");
        let key = format!("key:{TOKEN}:chat");
        let nothing = Override::json(Setting::Value(0.into()), "ada", "");
        assert!(is_read(&key, &text(&nothing)));
        let too_much = Override::json(Setting::Value((MAX_RATE + 1).into()), "ada", "");
        let no_burst = Override::json(Setting::Value(LimitValue::new(8).burst(0)), "ada", "");
        let tenant = format!("share:{}:chat", TenantDigest::of("acme"));
        let share = |share| text(&Override::json(Setting::Share(share), "ada", ""));
        assert!(is_read(&tenant, &share(1_000)));
        let long_name = format!("value:{}", "x".repeat(129));
        let long = Override::json(Setting::Value(8.into()), &"x".repeat(MAX_TEXT), "");
        for (field, text) in [
            ("chat", text(&good)),
            ("value:", text(&good)),
            ("key:chat", text(&good)),
            ("key:0:chat", text(&good)),
            ("other:chat", text(&good)),
            (&long_name, text(&good)),
            ("value:chat", text(&long)),
            ("value:chat", text("{}")),
            ("value:chat", text(&other_kind)),
            ("value:chat", b"1 2 3 4 5 {}".to_vec()),
            ("value:chat", b"1 2 -3 4".to_vec()),
            ("value:chat", b"\xff".to_vec()),
            ("value:chat", text(&nothing)),
            ("value:chat", text(&too_much)),
            (&key, text(&too_much)),
            (&key, text(&no_burst)),
            (&tenant, share(0)),
            (&tenant, share(1_001)),
            (&tenant, text(&good)),
            ("value:chat", share(1)),
            (&key, share(1)),
            ("share:chat", share(1)),
            ("share:acme:chat", share(1)),
            ("share:acme-acme:chat", share(1)),
        ] {
            assert!(!is_read(field, &text), "{field}");
        }
        assert_eq!(Override::read(b"\xff", &text(&good)), None);
    }

    #[test]
    fn an_override_is_one_flat_object() {
        let json = Override::json(Setting::Mode(Mode::Shadow), "ada", "");
        let read = Override::read(b"mode:chat", &text(&json)).unwrap();
        let expected = serde_json::json!({
            "limit": "chat", "setting": "mode", "to": "shadow", "author": "ada", "reason": "",
            "since_ms": 1, "until_ms": 2, "recorded": true, "token": TOKEN,
        });
        let value = serde_json::to_value(&read).unwrap();
        assert_eq!(value, expected);
        assert_eq!(serde_json::from_value::<Override>(value).unwrap(), read);
    }

    #[test]
    fn a_share_is_of_a_tenant() {
        let target = Target::tenant("a:b", TenantDigest::of("acme"));
        let field = target.field(Setting::Share(5)).unwrap();
        assert_eq!(target.fields(), std::slice::from_ref(&field));
        assert!(!Target::limit("a:b").fields().contains(&field));
        let json = Override::json(Setting::Share(5), "ada", "");
        let read = Override::read(field.as_bytes(), &text(&json)).unwrap();
        assert_eq!((read.target, read.setting), (target, Setting::Share(5)));
    }

    /// A reader without bursts still gets the value, and a reader with bursts accepts a value without one.
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
        fn hostile_fields_are_read_or_ignored(field: Vec<u8>, text: Vec<u8>) {
            let _ = Override::read(&field, &text);
            let _ = Override::read(b"value:chat", &text);
            let text = [&b"1 2 3 4 0123456789abcdef0123456789abcdef "[..], &text].concat();
            let _ = Override::read(b"value:chat", &text);
        }

        #[test]
        fn any_name_key_and_texts_come_back(
            limit in "(?s).{1,32}",
            key: Option<Vec<u8>>,
            max in 1..=MAX_RATE,
            burst in prop::option::of(1..=MAX_RATE),
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
