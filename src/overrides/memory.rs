//! The record of a limiter without a store: the steps of `record.lua`.
//!
//! Tests: `tests.rs`.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use tokio::time::Instant;

use super::{
    change::{Change, Changed, Edit, Logged, MAX_LOGGED, MAX_RESTORED_EDITS, New},
    entry::{Entries, Entry},
    record::{Latest, MAX_OVERRIDES, Record},
    setting::Token,
};

/// The record of a process without a store.
#[derive(Debug)]
pub(crate) struct LocalRecord {
    record: Mutex<MemoryRecord>,
    /// Time of creation, in ms since 1970. Its value only matters for display: ends are counted from it.
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

/// The record and the log, with a clock that is passed in.
#[derive(Debug, Default)]
pub(super) struct MemoryRecord {
    latest: Option<Latest>,
    entries: Entries,
    log: VecDeque<Logged>,
}

/// The result of restoring lost overrides.
#[derive(Default)]
struct Restored {
    is_any: bool,
    edits: Vec<[String; 3]>,
}

/// A change in preparation, with the resulting record.
struct Draft<'a> {
    change: &'a Change,
    now_ms: u64,
    version: u64,
    entries: Entries,
    edits: Vec<[String; 3]>,
}

impl MemoryRecord {
    pub(super) fn read(&self, now_ms: u64) -> Record {
        let known = self.entries.iter();
        let known = known.filter(|(_, entry)| entry.is_known(now_ms));
        let known = known.map(|(field, entry)| (field.clone(), entry.clone()));
        Record::of(self.latest.clone(), known.collect(), now_ms)
    }

    /// Simulates a store that has lost its data.
    #[cfg(all(test, feature = "redis"))]
    pub(super) fn lose(&mut self) {
        (self.latest, self.entries) = Default::default();
    }

    /// The latest changes, newest first.
    pub(super) fn log(&self) -> impl Iterator<Item = &Logged> {
        self.log.iter()
    }

    pub(super) fn change(&mut self, change: &Change, now_ms: u64) -> Changed {
        let mut entries = self.entries.clone();
        entries.retain(|_, entry| entry.is_known(now_ms));
        let restored = write_back(&mut entries, &change.lost.entries, now_ms);
        let lost = change.lost.latest.as_ref();
        let version = |latest: Option<&Latest>| latest.map_or(0, |latest| latest.version);
        let mut latest = self.latest.clone();
        if version(lost) > version(latest.as_ref()) {
            latest = lost.cloned();
        }
        let versions = entries.values().map(|entry| entry.version);
        let newest = versions.fold(version(latest.as_ref()), u64::max);
        let mut draft = Draft {
            change,
            now_ms,
            version: now_ms.max(newest + 1),
            entries,
            edits: Vec::new(),
        };
        if change.edits.is_empty() {
            draft.edits = restored.edits;
        } else {
            latest = Some(Latest {
                version: draft.version,
                token: change.token.clone(),
            });
        }
        for edit in &change.edits {
            if let Err(meanwhile) = draft.edit(edit) {
                return meanwhile;
            }
        }
        let is_nothing = if change.edits.is_empty() {
            !restored.is_any
        } else {
            draft.edits.is_empty()
        };
        if is_nothing && !change.is_noted() {
            return Changed::Same;
        }
        if !draft.fits() {
            return Changed::Full;
        }
        (self.latest, self.entries) = (latest, draft.entries);
        if !draft.edits.is_empty() || change.is_noted() {
            self.log.push_front(Logged {
                at_ms: now_ms,
                token: change.token.clone(),
                note: change.note.clone(),
                edits: draft.edits,
            });
            self.log.truncate(MAX_LOGGED);
        }
        Changed::Done
    }
}

/// For each field the newer text wins. Returns the texts before and after of restored overrides.
fn write_back(entries: &mut Entries, lost: &Entries, now_ms: u64) -> Restored {
    let mut restored = Restored::default();
    for (field, entry) in lost {
        let known = entries.get(field);
        if !entry.is_known(now_ms) || known.is_some_and(|known| known.version >= entry.version) {
            continue;
        }
        let text = |entry: &Entry| {
            if entry.is_in_force(now_ms) {
                entry.text.clone()
            } else {
                String::new()
            }
        };
        let (before, after) = (known.map(text).unwrap_or_default(), text(entry));
        restored.is_any = true;
        if after != before && restored.edits.len() < MAX_RESTORED_EDITS {
            restored.edits.push([field.clone(), before, after]);
        }
        entries.insert(field.clone(), entry.clone());
    }
    restored
}

impl Draft<'_> {
    fn edit(&mut self, edit: &Edit) -> Result<(), Changed> {
        let now_ms = self.now_ms;
        let was = self.entries.get(&edit.field);
        let in_force = was.filter(|was| was.is_in_force(now_ms));
        let before = in_force.map_or(String::new(), |was| was.text.clone());
        if in_force.map(|was| &was.one.token) != edit.seen.as_ref() {
            return Err(Changed::Meanwhile {
                field: edit.field.clone(),
                text: before,
            });
        }
        let known_ms = was.map_or(0, |was| was.known_ms);
        let text = match &edit.to {
            New::For { length_ms, json } => {
                let times = [now_ms, now_ms + length_ms, known_ms];
                Some(self.text(times, &self.change.token, json))
            }
            New::Text(text) => match self.put_back(&edit.field, text) {
                Some(to) if in_force.is_some_and(|was| was.one.token == to.one.token) => {
                    return Ok(());
                }
                to => to.map(|to| self.text_of(&to, to.one.until_ms, known_ms.max(to.known_ms))),
            },
            New::Nothing => None,
        };
        let is_removed = text.is_none();
        let text = text.or_else(|| Some(self.text_of(in_force?, 0, known_ms)));
        let to = text.and_then(|text| Entry::read(edit.field.as_bytes(), text.as_bytes()).ok());
        if let Some(to) = to {
            let after = if is_removed {
                String::new()
            } else {
                to.text.clone()
            };
            self.edits.push([edit.field.clone(), before, after]);
            self.entries.insert(edit.field.clone(), to);
        }
        Ok(())
    }

    /// An earlier override, unless it has ended meanwhile.
    fn put_back(&self, field: &str, text: &str) -> Option<Entry> {
        let to = Entry::read(field.as_bytes(), text.as_bytes()).ok()?;
        (to.is_known(self.now_ms) && to.is_in_force(self.now_ms)).then_some(to)
    }

    fn text_of(&self, entry: &Entry, end_ms: u64, known_ms: u64) -> String {
        let times = [entry.one.since_ms, end_ms, known_ms];
        self.text(times, &entry.one.token, entry.json())
    }

    fn text(&self, [since_ms, end_ms, known_ms]: [u64; 3], token: &Token, json: &str) -> String {
        let (known_ms, version) = (known_ms.max(end_ms), self.version);
        let token = token.as_str();
        format!("{since_ms} {end_ms} {known_ms} {version} {token} {json}")
    }

    /// Forgets the oldest entries that are not in force, if the record is too large. Returns whether it fits
    /// afterwards.
    fn fits(&mut self) -> bool {
        let now_ms = self.now_ms;
        let known = self.entries.iter();
        let known = known.filter(|(_, entry)| !entry.is_in_force(now_ms));
        let mut known: Vec<_> = known
            .map(|(field, entry)| (entry.version, field.clone()))
            .collect();
        let in_force = self.entries.len() - known.len();
        known.sort();
        known.truncate(known.len().saturating_sub(MAX_OVERRIDES));
        for (_, field) in known {
            self.entries.remove(&field);
        }
        in_force <= MAX_OVERRIDES
    }
}
