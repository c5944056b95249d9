//! The script that changes the record in Redis, and the shape of its arguments and replies.
//!
//! Tests: below.

use serde::Deserialize;

use super::{
    change::{Change, ChangeNote, Changed, LOG_MS, Logged, MAX_LOGGED},
    entry::MAX_REST_MS,
    record::MAX_OVERRIDES,
};

/// `record.lua` describes the format.
pub(crate) const RECORD_LUA: &str = include_str!("record.lua");

/// The arguments of a change. `message` is published after it.
pub(crate) fn arguments(change: &Change, channel: &str, message: &str) -> Vec<String> {
    let note = serde_json::to_string(&change.note).expect("texts");
    let mut arguments = vec![
        change.token.as_str().to_owned(),
        note,
        channel.to_owned(),
        message.to_owned(),
        MAX_OVERRIDES.to_string(),
        MAX_LOGGED.to_string(),
        MAX_REST_MS.to_string(),
        LOG_MS.to_string(),
        change.lost.len().to_string(),
        change.edits.len().to_string(),
        u8::from(change.is_noted()).to_string(),
    ];
    for (field, entry) in &change.lost {
        arguments.extend([field.clone(), entry.text.clone()]);
    }
    for edit in &change.edits {
        let seen = edit.seen.as_ref().map_or("", |seen| seen.as_str());
        let new = edit.to.as_ref();
        let (length, json) = new.map_or_else(Default::default, |new| {
            (new.length_ms.to_string(), new.json.clone())
        });
        arguments.extend([edit.field.clone(), seen.to_owned(), length, json]);
    }
    arguments
}

/// Parses the reply. `None`: not a reply of the script.
pub(crate) fn reply(words: &[String]) -> Option<Changed> {
    let words: Vec<&str> = words.iter().map(|word| &**word).collect();
    Some(match words[..] {
        ["done", _now_ms] => Changed::Done,
        ["changed", field, text] => Changed::Meanwhile {
            field: field.to_owned(),
            text: text.to_owned(),
        },
        ["full"] => Changed::Full,
        ["same"] => Changed::Same,
        _ => return None,
    })
}

/// An entry of the log as written by the script.
#[derive(Deserialize)]
struct RawLogEntry {
    at_ms: String,
    token: String,
    note: String,
    #[serde(default)]
    edits: Vec<[String; 3]>,
}

/// Maximum size of a log entry in bytes: fifty restored overrides, with each text in JSON.
const MAX_ENTRY: usize = 256 * 1_024;

/// Parses an entry of the log. `None`: not an entry of the script.
pub(crate) fn logged(entry: &[u8]) -> Option<Logged> {
    if entry.len() > MAX_ENTRY {
        return None;
    }
    let entry: RawLogEntry = serde_json::from_slice(entry).ok()?;
    let note: ChangeNote = serde_json::from_str(&entry.note).ok()?;
    Some(Logged {
        at_ms: entry.at_ms.parse().ok()?,
        token: entry.token.try_into().ok()?,
        note,
        edits: entry.edits,
    })
}
