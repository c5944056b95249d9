//! A change of the record: what an operator asks for, and what comes of it.
//!
//! Tests: `tests/operate/`, by theme.

use serde::{Deserialize, Serialize};

use super::{
    entry::token_in,
    record::{Lost, Record},
    setting::{Override, Setting, Target, Token},
};

/// Changes that are kept in the log.
pub(crate) const MAX_LOGGED: usize = 100;
/// Most edits of what is written back that are logged.
pub(super) const MAX_RESTORED_EDITS: usize = 50;
/// Time for which the log is kept after the last change, in ms: 30 days.
pub(crate) const LOG_MS: u64 = 30 * 24 * 3_600_000;

/// A change to be made: all of its edits, or none.
///
/// Before them, what the store has lost is written back. Without edits that is all.
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
    /// The token that the operator has seen there; `None` if there was no override.
    pub(crate) seen: Option<Token>,
    pub(crate) to: New,
}

#[derive(Clone, Debug)]
pub(crate) enum New {
    /// An override of this length from now, with this [JSON](Override::json).
    For { length_ms: u64, json: String },
    /// A whole text that was there before.
    Text(String),
    /// No override.
    Nothing,
}

/// The log's note of a change, besides its edits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChangeNote {
    pub(crate) author: String,
    pub(crate) reason: String,
    pub(crate) what: What,
    /// The permits that were revoked, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) revoked: Option<String>,
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
    /// The change before was taken back.
    Undo,
    /// A replica has written overrides back that the store had lost.
    Restored,
    /// Permits were revoked, which cannot be taken back.
    Revoked,
}

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    Done,
    /// Another operator was faster at this field.
    Meanwhile {
        field: String,
        text: String,
    },
    /// There would be too many overrides.
    Full,
    /// There is nothing to remove, or nothing was lost.
    Same,
}

/// A change in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Logged {
    pub(crate) at_ms: u64,
    pub(crate) token: Token,
    pub(crate) note: ChangeNote,
    /// Field, text before and text after, which are empty where there was no override.
    pub(crate) edits: Vec<[String; 3]>,
}

impl Change {
    /// Sets something, in place of what the operator has seen. `None`: a key cannot have that.
    pub(crate) fn set(
        seen: &Record,
        target: &Target,
        setting: Setting,
        length_ms: u64,
        (token, note): (Token, ChangeNote),
    ) -> Option<Self> {
        let field = target.field(setting)?;
        let json = Override::json(setting, &note.author, &note.reason);
        let edit = Edit {
            seen: seen.token_at(&field),
            field,
            to: New::For { length_ms, json },
        };
        Some(Self {
            token,
            lost: seen.lost(),
            edits: vec![edit],
            note,
        })
    }

    /// Removes all overrides of a target that the operator has seen.
    pub(crate) fn unset(
        seen: &Record,
        target: &Target,
        (token, note): (Token, ChangeNote),
    ) -> Self {
        let fields = target.fields().into_iter();
        let edits = fields.map(|field| Edit {
            seen: seen.token_at(&field),
            field,
            to: New::Nothing,
        });
        Self {
            token,
            lost: seen.lost(),
            edits: edits.collect(),
            note,
        }
    }

    /// Takes back a change, unless something was changed there since.
    pub(crate) fn undo(seen: &Record, logged: &Logged, (token, note): (Token, ChangeNote)) -> Self {
        let edits = logged.edits.iter().map(|[field, before, after]| Edit {
            field: field.clone(),
            seen: token_in(after),
            to: match before.is_empty() {
                true => New::Nothing,
                false => New::Text(before.clone()),
            },
        });
        Self {
            token,
            lost: seen.lost(),
            edits: edits.collect(),
            note,
        }
    }

    /// Writes back what the store has lost of this record, as far as it has.
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

    /// Notes in the log what changes no override.
    pub(crate) fn note((token, note): (Token, ChangeNote)) -> Self {
        Self {
            token,
            lost: Lost::default(),
            edits: Vec::new(),
            note,
        }
    }

    /// Whether it is logged although it changes no override.
    pub(super) fn is_noted(&self) -> bool {
        self.note.what == What::Revoked
    }
}
