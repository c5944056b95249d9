//! A change of the record: an operator's request, and its result.
//!
//! Tests: `tests/operate/`, by theme.

use serde::{Deserialize, Serialize};

use super::{
    entry::token_in,
    record::{Lost, Record},
    setting::{Override, Setting, Target, Token},
};

/// Number of changes kept in the log.
pub(crate) const MAX_LOGGED: usize = 100;
/// Maximum number of restored edits that are logged.
pub(super) const MAX_RESTORED_EDITS: usize = 50;
/// How long the log is kept after the last change, in ms: 30 days.
pub(crate) const LOG_MS: u64 = 30 * 24 * 3_600_000;

/// A change to make. Its edits are applied together or not at all.
///
/// Overrides that the store has lost are restored first. A change without edits only restores.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) token: Token,
    pub(crate) lost: Lost,
    pub(crate) edits: Vec<Edit>,
    pub(crate) note: ChangeNote,
}

#[derive(Clone, Debug)]
pub(crate) struct Edit {
    pub(crate) field: String,
    /// The token that the operator has seen in this field; `None` if no override was in force.
    pub(crate) seen: Option<Token>,
    pub(crate) to: New,
}

#[derive(Clone, Debug)]
pub(crate) enum New {
    /// An override of this length from now on, with this [JSON](Override::json).
    For { length_ms: u64, json: String },
    /// A complete earlier text.
    Text(String),
    /// No override.
    Nothing,
}

/// The log's note of a change, in addition to its edits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChangeNote {
    pub(crate) author: String,
    pub(crate) reason: String,
    pub(crate) what: What,
    /// The revoked permits or the resumed keys, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) subject: Option<String>,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum What {
    /// An override was set.
    Set,
    /// Overrides were removed.
    Unset,
    /// The previous change was undone.
    Undo,
    /// A replica has restored overrides that the store had lost.
    Restored,
    /// Permits were revoked, which cannot be undone.
    Revoked,
    /// Pauses of keys were ended, which cannot be undone.
    Resumed,
}

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    Done,
    /// Another operator changed this field first.
    Meanwhile {
        field: String,
        text: String,
    },
    /// The record would have too many overrides.
    Full,
    /// Nothing to remove, or nothing was lost.
    Same,
}

/// A change in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Logged {
    pub(crate) at_ms: u64,
    pub(crate) token: Token,
    pub(crate) note: ChangeNote,
    /// Field, text before and text after; a text is empty for a missing override.
    pub(crate) edits: Vec<[String; 3]>,
}

impl Change {
    /// A change that also restores the overrides of this record that the store has lost.
    fn new(seen: &Record, edits: Vec<Edit>, (token, note): (Token, ChangeNote)) -> Self {
        Self {
            token,
            lost: seen.lost(),
            edits,
            note,
        }
    }

    /// Sets an override in place of the one seen by the operator. `None`: the target cannot have this setting.
    pub(crate) fn set(
        seen: &Record,
        target: &Target,
        setting: Setting,
        length_ms: u64,
        signed: (Token, ChangeNote),
    ) -> Option<Self> {
        let field = target.field(setting)?;
        let (_, note) = &signed;
        let json = Override::json(setting, &note.author, &note.reason);
        let edit = Edit {
            seen: seen.token_at(&field),
            field,
            to: New::For { length_ms, json },
        };
        Some(Self::new(seen, vec![edit], signed))
    }

    /// Removes all overrides of a target that the operator has seen.
    pub(crate) fn unset(seen: &Record, target: &Target, signed: (Token, ChangeNote)) -> Self {
        let fields = target.fields().into_iter();
        let edits = fields.map(|field| Edit {
            seen: seen.token_at(&field),
            field,
            to: New::Nothing,
        });
        Self::new(seen, edits.collect(), signed)
    }

    /// Undoes a change, unless a field has changed since.
    pub(crate) fn undo(seen: &Record, logged: &Logged, signed: (Token, ChangeNote)) -> Self {
        let edits = logged.edits.iter().map(|[field, before, after]| Edit {
            field: field.clone(),
            seen: token_in(after),
            to: if before.is_empty() {
                New::Nothing
            } else {
                New::Text(before.clone())
            },
        });
        Self::new(seen, edits.collect(), signed)
    }

    /// Restores the overrides of this record that the store has lost.
    pub(crate) fn restore(seen: &Record, (token, note): (Token, ChangeNote)) -> Self {
        Self {
            token,
            lost: Lost {
                latest: seen.latest.clone(),
                ..seen.lost()
            },
            edits: Vec::new(),
            note,
        }
    }

    /// Logs an event that changes no override.
    pub(crate) fn note((token, note): (Token, ChangeNote)) -> Self {
        Self {
            token,
            lost: Lost::default(),
            edits: Vec::new(),
            note,
        }
    }

    /// Whether the change is logged although it changes no override.
    pub(super) fn is_noted(&self) -> bool {
        matches!(self.note.what, What::Revoked | What::Resumed)
    }
}
