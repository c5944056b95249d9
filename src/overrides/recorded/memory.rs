//! The overrides of a limiter without a store.
//!
//! Tests: `tests.rs`, which compares it with `record.lua`.

use std::{collections::VecDeque, sync::Mutex, time::SystemTime};

use tokio::time::Instant;

use super::{
    change::{Change, Changed, Logged, MAX_LOGGED},
    entry::{Entries, RecordEntry},
    record::{MAX_OVERRIDES, Record},
    setting::Token,
};
use crate::sync::locked;

/// The record of a process without a store.
#[derive(Debug)]
pub(crate) struct LocalRecord {
    kept: Mutex<Kept>,
    /// Time of creation, in ms since 1970. Its value only matters for display: ends are counted from it.
    made_ms: u64,
    made: Instant,
}

/// The overrides in force, and the latest changes, newest first.
#[derive(Debug, Default)]
struct Kept {
    token: Option<Token>,
    entries: Entries,
    log: VecDeque<Logged>,
}

impl Default for LocalRecord {
    fn default() -> Self {
        let since = SystemTime::UNIX_EPOCH.elapsed();
        Self {
            kept: Mutex::default(),
            made_ms: since.map_or(0, |since| since.as_millis() as u64),
            made: Instant::now(),
        }
    }
}

impl LocalRecord {
    pub(crate) fn read(&self) -> Record {
        let (now_ms, kept) = (self.now_ms(), locked(&self.kept));
        Record {
            token: kept.token.clone(),
            entries: kept.entries.clone(),
            now_ms,
            ..Record::default()
        }
    }

    /// The latest changes, newest first.
    pub(crate) fn log(&self) -> Vec<Logged> {
        locked(&self.kept).log.iter().cloned().collect()
    }

    pub(crate) fn change(&self, change: &Change) -> Changed {
        let (now_ms, mut kept) = (self.now_ms(), locked(&self.kept));
        kept.entries.retain(|_, entry| entry.is_in_force(now_ms));
        let (mut entries, mut edits) = (kept.entries.clone(), Vec::new());
        for edit in &change.edits {
            let field = edit.field.clone();
            let was = entries.remove(&field);
            let is_seen = was.as_ref().map(|was| &was.one.token) == edit.seen.as_ref();
            let text = was.map_or(String::new(), |was| was.text);
            if !is_seen {
                return Changed::Meanwhile { field, text };
            }
            let to = edit.to.as_ref().map(|new| new.text(now_ms, &change.token));
            let after = to.unwrap_or_default();
            if let Some(entry) = RecordEntry::read(field.as_bytes(), after.as_bytes()) {
                entries.insert(field.clone(), entry);
            }
            if after != text {
                edits.push([field, text, after]);
            }
        }
        if edits.is_empty() && !change.is_noted() {
            return Changed::Same;
        }
        if entries.len() > MAX_OVERRIDES {
            return Changed::Full;
        }
        if !change.edits.is_empty() {
            kept.token = Some(change.token.clone());
        }
        kept.entries = entries;
        kept.log.push_front(Logged {
            at_ms: now_ms,
            token: change.token.clone(),
            note: change.note.clone(),
            edits,
        });
        kept.log.truncate(MAX_LOGGED);
        Changed::Done
    }

    fn now_ms(&self) -> u64 {
        self.made_ms + self.made.elapsed().as_millis() as u64
    }
}
