//! A change of the record: an operator's request, and its result.
//!
//! Tests: `operators/tests/operate/`, by theme.

use serde::{Deserialize, Serialize};

use super::{
    entry::Entries,
    record::Record,
    setting::{Override, Setting, Target, Token},
};

/// Number of changes kept in the log.
pub(crate) const MAX_LOGGED: usize = 100;
/// How long the log is kept after the last change, in ms: 30 days.
pub(super) const LOG_MS: u64 = 30 * 24 * 3_600_000;

/// A change to make. Its edits are applied together or not at all.
///
/// Overrides that the store has lost are restored first. A change without edits only restores.
#[derive(Clone, Debug)]
pub struct Change {
    pub(super) token: Token,
    pub(super) lost: Entries,
    pub(super) edits: Vec<Edit>,
    pub(super) note: ChangeNote,
}

#[derive(Clone, Debug)]
pub(super) struct Edit {
    pub field: String,
    /// The token that the operator has seen in this field; `None` if no override was in force.
    pub seen: Option<Token>,
    /// `None` to remove the override.
    pub to: Option<New>,
}

/// An override of this length from now on, with this [JSON](Override::json).
#[derive(Clone, Debug)]
pub(super) struct New {
    pub length_ms: u64,
    pub json: String,
}

/// Who makes a change, why, and the token of the change.
#[derive(Clone, Debug)]
pub struct Signed {
    pub(super) token: Token,
    pub(super) note: ChangeNote,
}

/// The log's note of a change, in addition to its edits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeNote {
    /// Its author, as given by the operator.
    pub author: String,
    /// Its reason, as given by the operator.
    pub reason: String,
    /// The kind of the change, in a word.
    pub what: String,
    /// The revoked permits or the resumed keys, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
}

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// It is made.
    Done,
    /// Another operator changed this field first.
    Meanwhile {
        /// The field.
        field: String,
        /// What it has now.
        text: String,
    },
    /// The record would have too many overrides.
    Full,
    /// Nothing to remove, or nothing was lost.
    Same,
}

/// A change in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    /// When, in milliseconds since 1970 on the store's clock.
    pub at_ms: u64,
    pub(crate) token: Token,
    /// Who made it, and why.
    pub note: ChangeNote,
    /// Field, text before and text after; a text is empty for a missing override.
    pub edits: Vec<[String; 3]>,
}

impl Signed {
    /// Draws a token.
    ///
    /// # Errors
    ///
    /// Says so if there is no randomness.
    pub fn new(what: impl Into<String>, author: String, reason: String) -> Result<Self, String> {
        let token = Token::random().map_err(|error| format!("no randomness: {error}"))?;
        let note = ChangeNote {
            author,
            reason,
            what: what.into(),
            subject: None,
        };
        Ok(Self { token, note })
    }
}

impl New {
    /// The text of a change at this time.
    pub(super) fn text(&self, now_ms: u64, token: &Token) -> String {
        let (end_ms, token, json) = (now_ms + self.length_ms, token.as_str(), &self.json);
        format!("{now_ms} {end_ms} {end_ms} {now_ms} {token} {json}")
    }
}

impl Logged {
    /// Identifies the change.
    pub fn token(&self) -> &str {
        self.token.as_str()
    }
}

impl Change {
    /// A change that also restores the overrides of this record that the store has lost.
    fn new(seen: &Record, edits: Vec<Edit>, Signed { token, note }: Signed) -> Self {
        Self {
            token,
            lost: seen.lost(),
            edits,
            note,
        }
    }

    /// Sets an override in place of the one seen by the operator. `None`: the target cannot have this setting.
    pub fn set(
        seen: &Record,
        target: &Target,
        setting: Setting,
        length_ms: u64,
        signed: Signed,
    ) -> Option<Self> {
        let field = target.field(setting)?;
        let ChangeNote { author, reason, .. } = &signed.note;
        let json = Override::json(setting, author, reason);
        let edit = Edit {
            seen: seen.token_at(&field),
            field,
            to: Some(New { length_ms, json }),
        };
        Some(Self::new(seen, vec![edit], signed))
    }

    /// Removes all overrides of a target that the operator has seen.
    pub fn unset(seen: &Record, target: &Target, signed: Signed) -> Self {
        let fields = target.fields().into_iter();
        let edits = fields.map(|field| Edit {
            seen: seen.token_at(&field),
            field,
            to: None,
        });
        Self::new(seen, edits.collect(), signed)
    }

    /// Restores the overrides of this record that the store has lost.
    pub fn restore(seen: &Record, signed: Signed) -> Self {
        Self::new(seen, Vec::new(), signed)
    }

    /// Logs an event that changes no override.
    pub fn note(Signed { token, note }: Signed, subject: String) -> Self {
        Self {
            token,
            lost: Entries::new(),
            edits: Vec::new(),
            note: ChangeNote {
                subject: Some(subject),
                ..note
            },
        }
    }

    /// Identifies the change.
    pub fn token(&self) -> &str {
        self.token.as_str()
    }

    /// Whether the change is logged although it changes no override.
    pub(super) fn is_noted(&self) -> bool {
        self.note.subject.is_some()
    }
}
