//! The record of overrides, as it is read.
//!
//! Tests: below; `tests/operate/`, by theme.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::{
    in_force::{Decision, InForce},
    setting::{FieldFault, Override, Setting, Token},
};

/// Most overrides in force.
pub(crate) const MAX_OVERRIDES: usize = 1_000;
/// Longest time of an override, in ms: seven days.
pub(crate) const MAX_LENGTH_MS: u64 = 7 * 24 * 3_600_000;
/// Furthest end that counts, in ms from now. A day more: after a failover, or a step of its clock, the server that reads
/// an end may be behind the one that wrote it.
pub(super) const MAX_REST_MS: u64 = MAX_LENGTH_MS + 24 * 3_600_000;
/// The field of the latest token.
const TOKEN: &[u8] = b"token";

/// The record of overrides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// That of the latest change.
    pub(crate) token: Option<Token>,
    pub(crate) overrides: Vec<Override>,
    /// Fields that are ignored.
    pub(crate) faults: Vec<FieldFault>,
    /// The store's time when it was read, in ms.
    pub(crate) now_ms: u64,
}

/// Too many fields to be a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLarge;

impl Record {
    /// Reads the fields of the hash. `None`: there is no record.
    pub(crate) fn read(
        fields: &BTreeMap<Vec<u8>, Vec<u8>>,
        now_ms: u64,
    ) -> Result<Option<Self>, TooLarge> {
        if fields.is_empty() {
            return Ok(None);
        }
        if fields.len() > MAX_OVERRIDES + 1 {
            return Err(TooLarge);
        }
        let mut record = Self {
            now_ms,
            ..Self::default()
        };
        for (field, text) in fields {
            if field == TOKEN {
                let token = String::from_utf8(text.clone()).ok();
                record.token = token.and_then(|token| token.try_into().ok());
                continue;
            }
            match Override::read(field, text) {
                // Further away than any end that we write.
                Ok(read) if read.until_ms.saturating_sub(now_ms) > MAX_REST_MS => {
                    record.faults.push(FieldFault::Range);
                }
                Ok(read) if read.until_ms > now_ms => record.overrides.push(read),
                Ok(_) => {}
                Err(fault) => record.faults.push(fault),
            }
        }
        Ok(Some(record))
    }

    /// The overrides of a process that began to read the record at this moment. The process's own wall clock does not
    /// matter.
    pub(crate) fn in_force(&self, since: Instant) -> InForce {
        let mut in_force = InForce::default();
        for one in &self.overrides {
            let decision = match (one.setting, one.target.digest_bits()) {
                (Setting::Value(value), Some(digest)) => Decision::KeyValue(digest, value),
                (Setting::Value(value), None) => Decision::Value(value),
                (Setting::Mode(mode), _) => Decision::Mode(mode),
                (Setting::Pause, _) => Decision::Pause,
            };
            let rest = Duration::from_millis(one.until_ms.saturating_sub(self.now_ms));
            in_force.add(one.target.limit_name(), decision, since + rest);
        }
        in_force
    }

    pub(super) fn token_at(&self, field: &str) -> Option<Token> {
        let at = |one: &&Override| one.target.field(one.setting).as_deref() == Some(field);
        let found = self.overrides.iter().find(at);
        found.map(|found| found.token.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{key::Key, limit::Limit, overrides::Target};

    const OF: &str = "0123456789abcdef0123456789abcdef";
    const NOW_MS: u64 = 1_700_000_000_000;

    fn field(target: &Target, setting: Setting, length_ms: u64) -> (Vec<u8>, Vec<u8>) {
        let field = target.field(setting).unwrap();
        let json = Override::json(setting, "ada", "");
        let text = format!("{NOW_MS} {} {OF} {json}", NOW_MS + length_ms);
        (field.into_bytes(), text.into_bytes())
    }

    #[test]
    fn no_field_is_no_record() {
        assert_eq!(Record::read(&BTreeMap::new(), NOW_MS), Ok(None));
        let token = BTreeMap::from([(TOKEN.to_vec(), OF.into())]);
        let record = Record::read(&token, NOW_MS).unwrap().unwrap();
        assert_eq!(record.token.unwrap().as_str(), OF);
    }

    #[test]
    fn faults_leave_the_rest_in_force() {
        let chat = Target::limit("chat");
        let fields = BTreeMap::from([
            (b"hello".to_vec(), vec![0xff; 10]),
            (TOKEN.to_vec(), b"none".to_vec()),
            field(&chat, Setting::Value(8.into()), 1),
            field(&chat, Setting::Pause, 0),
            field(&Target::limit("far"), Setting::Pause, MAX_REST_MS + 1),
        ]);
        let record = Record::read(&fields, NOW_MS).unwrap().unwrap();
        assert_eq!(record.token, None);
        assert_eq!(record.faults, [FieldFault::Name, FieldFault::Range]);
        let in_force: Vec<_> = record.overrides.iter().map(|one| one.setting).collect();
        assert_eq!(in_force, [Setting::Value(8.into())]);
    }

    #[test]
    fn a_thousand_overrides_and_no_more() {
        let limits = (0..=MAX_OVERRIDES).map(|number| Target::limit(format!("limit-{number}")));
        let fields = limits.map(|limit| field(&limit, Setting::Value(8.into()), 1));
        let mut fields: BTreeMap<_, _> = fields.collect();
        let record = Record::read(&fields, NOW_MS).unwrap().unwrap();
        assert_eq!(record.overrides.len(), MAX_OVERRIDES + 1);
        fields.insert(TOKEN.to_vec(), OF.into());
        assert_eq!(Record::read(&fields, NOW_MS), Err(TooLarge));
    }

    /// Overrides last for as long as the store says, however wrong the clock of this machine is.
    #[tokio::test(start_paused = true)]
    async fn ends_are_local() {
        let gold = Key::from("gold");
        let fields = BTreeMap::from([
            field(&Target::limit("chat"), Setting::Value(8.into()), 2_000),
            field(&Target::key("chat", &gold), Setting::Value(9.into()), 3_000),
        ]);
        let now_ms = NOW_MS + 500;
        let record = Record::read(&fields, now_ms).unwrap().unwrap();
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
}
