//! The record of overrides, as read by replicas.
//!
//! Tests: below; `operators/tests/operate/`, by theme.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    entry::{Entries, RecordEntry},
    setting::{Override, Setting, Target, Token},
};
use crate::overrides::in_force::{InForce, SettingInForce};

/// Maximum number of overrides in force.
pub(crate) const MAX_OVERRIDES: usize = 1_000;
/// Maximum number of entries in a record, half of which may be ended or removed overrides.
pub(crate) const MAX_ENTRIES: usize = 2 * MAX_OVERRIDES;
/// The field of the latest change.
pub(super) const LATEST: &str = "token";

/// The record of overrides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The latest change. `None`: the record was never changed, or lost since.
    pub(super) token: Option<Token>,
    /// All known entries, by field.
    pub(super) entries: Entries,
    /// Fields in force in replicas but missing from the record.
    pub(super) lost: BTreeSet<String>,
    /// Number of fields that are ignored: they cannot be read, or their times are too far ahead.
    pub(crate) ignored: usize,
    /// The store's time of the read, in ms.
    pub now_ms: u64,
}

impl Record {
    /// Parses the fields of the hash. `None`: there are too many for a record.
    pub(crate) fn read(fields: &BTreeMap<Vec<u8>, Vec<u8>>, now_ms: u64) -> Option<Self> {
        if fields.len() > MAX_ENTRIES + 1 {
            return None;
        }
        let mut record = Self {
            now_ms,
            ..Self::default()
        };
        for (field, text) in fields {
            if field == LATEST.as_bytes() {
                let text = str::from_utf8(text).unwrap_or_default();
                let (_version, token) = text.split_once(' ').unwrap_or_default();
                record.token = token.to_owned().try_into().ok();
                continue;
            }
            match RecordEntry::read(field, text) {
                Some(entry) if entry.is_known(now_ms) => {
                    let field = String::from_utf8_lossy(field).into_owned();
                    record.entries.insert(field, entry);
                }
                // It has ended.
                Some(entry) if entry.is_plausible(now_ms) => {}
                _ => record.ignored += 1,
            }
        }
        Some(record)
    }

    /// Adopts newer fields and texts reported by a replica. Unreadable texts are skipped.
    pub fn take_told(&mut self, texts: &[[String; 2]]) {
        let read = |[field, text]: &[String; 2]| {
            let entry = RecordEntry::read(field.as_bytes(), text.as_bytes())?;
            Some((field.clone(), entry))
        };
        self.take_newer(&Self {
            entries: texts.iter().filter_map(read).collect(),
            ..Self::default()
        });
    }

    /// Adopts overrides in force of another record that are newer: the store has lost them.
    pub(crate) fn take_newer(&mut self, other: &Self) {
        for (field, entry) in &other.entries {
            let known = self.entries.get(field);
            let is_newer = known.is_none_or(|known| known.version < entry.version);
            let fits = known.is_some() || self.entries.len() < MAX_ENTRIES;
            let is_in_force = entry.is_plausible(self.now_ms) && entry.is_in_force(self.now_ms);
            if is_newer && fits && is_in_force {
                self.entries.insert(field.clone(), entry.clone());
                self.lost.insert(field.clone());
            }
        }
    }

    /// The entries that the store has lost.
    pub(crate) fn lost(&self) -> Entries {
        let entry = |field: &String| Some((field.clone(), self.entries.get(field)?.clone()));
        self.lost.iter().filter_map(entry).collect()
    }

    /// The token of the latest change. `None`: the record was never changed, or was lost since.
    pub fn token(&self) -> Option<&str> {
        self.token.as_ref().map(Token::as_str)
    }

    /// Number of fields that cannot be read.
    pub fn ignored(&self) -> usize {
        self.ignored
    }

    /// The overrides in force, in the order of their fields.
    pub fn overrides(&self) -> impl Iterator<Item = Override> {
        let entries = self.in_force_entries();
        entries.map(|(field, entry)| Override {
            recorded: !self.lost.contains(field),
            ..entry.one.clone()
        })
    }

    fn in_force_entries(&self) -> impl Iterator<Item = (&String, &RecordEntry)> {
        let entries = self.entries.iter();
        entries.filter(|(_, entry)| entry.is_in_force(self.now_ms))
    }

    /// The overrides of a process that began to read the record at `since`. The process's own wall clock does not
    /// matter.
    pub(crate) fn in_force(&self, since: Instant) -> InForce {
        let mut in_force = InForce::default();
        for (_, RecordEntry { one, .. }) in self.in_force_entries() {
            let rest = Duration::from_millis(one.until_ms.saturating_sub(self.now_ms));
            add(&mut in_force, one, since + rest);
        }
        in_force
    }

    pub(super) fn token_at(&self, field: &str) -> Option<Token> {
        let entry = self.entries.get(field)?;
        let token = || entry.one.token.clone();
        entry.is_in_force(self.now_ms).then(token)
    }
}

/// The fields of the record have no share without a tenant.
fn add(in_force: &mut InForce, one: &Override, end: Instant) {
    let Target { key, tenant, .. } = one.target;
    let decision = match (one.setting, key, tenant) {
        (Setting::Value(value), Some(key), _) => SettingInForce::KeyValue(key.bits(), value),
        (Setting::Value(value), None, _) => SettingInForce::Value(value),
        (Setting::Mode(mode), ..) => SettingInForce::Mode(mode),
        (Setting::Pause, ..) => SettingInForce::Pause,
        (Setting::Share(share), _, Some(tenant)) => SettingInForce::Share(tenant.id(), share),
        (Setting::Share(_), _, None) => return,
    };
    in_force.add(&one.target.limit, decision, end);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{key::Key, limit::Limit, overrides::recorded::entry::MAX_REST_MS};

    const OF: &str = "0123456789abcdef0123456789abcdef";
    const NOW_MS: u64 = 1_700_000_000_000;

    fn field(target: &Target, setting: Setting, length_ms: u64) -> (Vec<u8>, Vec<u8>) {
        let field = target.field(setting).unwrap();
        let json = Override::json(setting, "ada", "");
        let end_ms = NOW_MS + length_ms;
        let text = format!("{NOW_MS} {end_ms} {end_ms} {NOW_MS} {OF} {json}");
        (field.into_bytes(), text.into_bytes())
    }

    #[test]
    fn no_field_is_no_record() {
        let nothing = Record::read(&BTreeMap::new(), NOW_MS).unwrap();
        assert_eq!((nothing.token(), nothing.entries.len()), (None, 0));
        let latest = format!("7 {OF}").into_bytes();
        let latest = BTreeMap::from([(LATEST.into(), latest)]);
        let record = Record::read(&latest, NOW_MS).unwrap();
        assert_eq!(record.token(), Some(OF));
    }

    #[test]
    fn faults_leave_the_rest_in_force() {
        let chat = Target::limit("chat");
        let fields = BTreeMap::from([
            (b"hello".to_vec(), vec![0xff; 10]),
            (LATEST.into(), b"none".to_vec()),
            field(&chat, Setting::Value(8.into()), 1),
            field(&chat, Setting::Pause, 0),
            field(&Target::limit("far"), Setting::Pause, MAX_REST_MS + 1),
        ]);
        let record = Record::read(&fields, NOW_MS).unwrap();
        assert_eq!(record.token(), None);
        assert_eq!(record.ignored(), 2);
        let in_force: Vec<_> = record.overrides().map(|one| one.setting).collect();
        assert_eq!(in_force, [Setting::Value(8.into())]);
    }

    #[test]
    fn so_many_entries_and_no_more() {
        let limits = (0..=MAX_ENTRIES).map(|number| Target::limit(format!("limit-{number}")));
        let fields = limits.map(|limit| field(&limit, Setting::Value(8.into()), 1));
        let mut fields: BTreeMap<_, _> = fields.collect();
        let record = Record::read(&fields, NOW_MS).unwrap();
        assert_eq!(record.overrides().count(), MAX_ENTRIES + 1);
        fields.insert(LATEST.into(), OF.into());
        assert_eq!(Record::read(&fields, NOW_MS), None);
    }

    /// Overrides last as long as the store says, regardless of this machine's wall clock.
    #[tokio::test(start_paused = true)]
    async fn ends_are_local() {
        let gold = Key::from("gold");
        let fields = BTreeMap::from([
            field(&Target::limit("chat"), Setting::Value(8.into()), 2_000),
            field(&Target::key("chat", &gold), Setting::Value(9.into()), 3_000),
        ]);
        let now_ms = NOW_MS + 500;
        let record = Record::read(&fields, now_ms).unwrap();
        let start = Instant::now();
        let mut in_force = record.in_force(start);
        let millis = Duration::from_millis;
        assert_eq!(in_force.next_end(), Some(start + millis(1_500)));
        assert!(!in_force.end(start + millis(1_499)));
        assert!(in_force.end(start + millis(1_500)));
        let chat = Limit::concurrent("chat", 5);
        assert_eq!(
            in_force.for_key(&chat, &gold).own_value(None),
            Some(9.into())
        );
        assert_eq!(in_force.next_end(), Some(start + millis(2_500)));
    }

    /// Replicas' knowledge is restored to a record that has lost it, but never replaces newer entries.
    #[test]
    fn of_what_was_known_before_the_newer_counts() {
        let entry = |version: u64, length_ms: u64, end: bool| {
            let json = Override::json(Setting::Value((version as u32).into()), "ada", "");
            let known_ms = NOW_MS + length_ms;
            let end_ms = if end { 0 } else { known_ms };
            format!("{NOW_MS} {end_ms} {known_ms} {version} {OF} {json}").into_bytes()
        };
        let record = |fields: &[(&str, Vec<u8>)]| {
            let fields = fields
                .iter()
                .map(|(field, text)| (field.as_bytes().to_vec(), text.clone()));
            Record::read(&fields.collect(), NOW_MS).unwrap()
        };
        let before = record(&[
            ("value:lost", entry(1, 9, false)),
            ("value:newer", entry(3, 9, false)),
            ("value:older", entry(1, 9, false)),
            ("value:removed", entry(1, 9, false)),
            ("value:ended", entry(1, 1, false)),
        ]);
        let mut now = record(&[
            ("value:newer", entry(2, 9, false)),
            ("value:older", entry(2, 9, false)),
            ("value:removed", entry(2, 9, true)),
        ]);
        now.now_ms += 1;
        now.take_newer(&before);
        let values: Vec<_> = now
            .overrides()
            .map(|one| (one.target.limit.clone(), one.setting, one.recorded))
            .collect();
        let value = |name: &str, value: u32, recorded| {
            (name.to_owned(), Setting::Value(value.into()), recorded)
        };
        let expected = [
            value("lost", 1, false),
            value("newer", 3, false),
            value("older", 2, true),
        ];
        assert_eq!(values, expected);
        let lost = now.lost();
        let lost: Vec<_> = lost.keys().collect();
        assert_eq!(lost, ["value:lost", "value:newer"]);
    }
}
