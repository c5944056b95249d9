//! The record of a limiter without a store: the same steps as in `record.lua`.
//!
//! Tests: `tests.rs`.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use tokio::time::Instant;

use super::{
    change::{Change, Changed, Edit, Logged, MAX_LOGGED, New, token_in},
    record::{MAX_OVERRIDES, MAX_REST_MS, Record},
};

/// The record of a process without a store.
#[derive(Debug)]
pub(crate) struct LocalRecord {
    record: Mutex<MemoryRecord>,
    /// The time at which it was made, in ms since 1970: only to be shown, since ends are counted from there.
    made_ms: u64,
    made: Instant,
}

impl LocalRecord {
    pub(crate) fn new() -> Self {
        let since = SystemTime::UNIX_EPOCH.elapsed();
        Self {
            record: Mutex::default(),
            made_ms: since.map_or(0, |since| since.as_millis() as u64),
            made: Instant::now(),
        }
    }

    pub(crate) fn read(&self) -> Record {
        self.lock().read(self.now_ms())
    }

    /// The latest changes, newest first.
    pub(crate) fn log(&self) -> Vec<Logged> {
        self.lock().log().cloned().collect()
    }

    pub(crate) fn change(&self, change: &Change) -> Changed {
        self.lock().change(change, self.now_ms())
    }

    fn now_ms(&self) -> u64 {
        self.made_ms + self.made.elapsed().as_millis() as u64
    }

    fn lock(&self) -> MutexGuard<'_, MemoryRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The record and the log, by a clock that is passed in.
#[derive(Debug, Default)]
pub(super) struct MemoryRecord {
    /// As in the store.
    fields: BTreeMap<Vec<u8>, Vec<u8>>,
    log: VecDeque<Logged>,
}

impl MemoryRecord {
    pub(super) fn read(&self, now_ms: u64) -> Record {
        let read = Record::read(&self.fields, now_ms);
        read.ok().flatten().unwrap_or_default()
    }

    /// The latest changes, newest first.
    pub(super) fn log(&self) -> impl Iterator<Item = &Logged> {
        self.log.iter()
    }

    pub(super) fn change(&mut self, change: &Change, now_ms: u64) -> Changed {
        let lasts = |text: &[u8]| {
            let end_ms = end_in(&String::from_utf8_lossy(text));
            end_ms > now_ms && end_ms <= now_ms + MAX_REST_MS
        };
        let mut fields = self.fields.clone();
        fields.retain(|field, text| field == b"token" || lasts(text));
        let mut edits = Vec::new();
        for edit in &change.edits {
            let before = fields.get(edit.field.as_bytes());
            let before = before.map_or(String::new(), |text| String::from_utf8_lossy(text).into());
            if token_in(&before) != edit.seen {
                return Changed::Meanwhile {
                    field: edit.field.clone(),
                    text: before,
                };
            }
            let after = text_of(change, edit, now_ms);
            if after != before {
                edits.push([edit.field.clone(), before, after]);
            }
        }
        if edits.is_empty() {
            return Changed::Same;
        }
        for [field, _, after] in &edits {
            match after.is_empty() {
                true => fields.remove(field.as_bytes()),
                false => fields.insert(field.clone().into_bytes(), after.clone().into_bytes()),
            };
        }
        fields.insert(b"token".to_vec(), change.token.as_str().into());
        if fields.len() > MAX_OVERRIDES + 1 {
            return Changed::Full;
        }
        self.fields = fields;
        self.log.push_front(Logged {
            at_ms: now_ms,
            token: change.token.clone(),
            note: change.note.clone(),
            edits,
        });
        self.log.truncate(MAX_LOGGED);
        Changed::Done
    }
}

/// The field that an edit leaves: empty if that has no override, or one that has ended.
fn text_of(change: &Change, edit: &Edit, now_ms: u64) -> String {
    let text = match &edit.to {
        New::For { length_ms, json } => {
            let token = change.token.as_str();
            format!("{now_ms} {} {token} {json}", now_ms + length_ms)
        }
        New::Text(text) => text.clone(),
        New::Nothing => String::new(),
    };
    match end_in(&text) > now_ms {
        true => text,
        false => String::new(),
    }
}

fn end_in(text: &str) -> u64 {
    let end_ms = text.split(' ').nth(1).and_then(|end| end.parse().ok());
    end_ms.unwrap_or(0)
}
