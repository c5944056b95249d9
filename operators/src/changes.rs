//! The author and reason of a change, and its outcome.

use serde::{Deserialize, Serialize};

use super::{KeyRow, PermitRow, answer::Answers, error::OperateError};
use tower_turnstile::{
    operate::seam::{Logged, Names, Record, Revocation, Signed},
    operate::{KeyDigest, Override, Setting, Target},
};

/// The author of a change, and the reason for it. Both are kept with the change and shown to all operators.
///
/// Neither is verified: the store knows only the user that an operator is logged in as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct By {
    author: String,
    reason: String,
}

/// The overrides in force, as seen by an operator.
///
/// A change states what its operator has seen, and is refused if that has changed meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    all: Vec<Override>,
    record: Record,
}

/// How far an order has been carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// In force in all replicas.
    Done {
        /// Number of replicas.
        replicas: usize,
    },
    /// In force in all replicas, none of which has a limit of this name: a typo, or a limit under which there was no request
    /// yet. Or, for a share, none of which has a request of this tenant now.
    Unused {
        /// Number of replicas.
        replicas: usize,
    },
    /// Recorded, but not confirmed by all replicas. The others apply the change once they read the record: within a
    /// minute, or when they connect.
    Recorded {
        /// Number of replicas that have confirmed it.
        confirmed: usize,
        /// Number of known replicas.
        of: usize,
        /// Labels of the replicas that have not confirmed it.
        missing: Vec<String>,
    },
    /// Permits were revoked.
    Revoked(Revoked),
    /// Pauses were ended: the keys as they were before.
    Resumed(Answers<KeyRow>),
}

/// Revoked permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Revoked {
    /// Number of permits that have ended.
    pub ended: u64,
    /// Number of permits that keep their slots until their tasks drop them.
    pub running: u64,
    /// The state of each permit, running ones first, as far as they fit into the answers.
    pub permits: Answers<PermitRow>,
}

impl Revoked {
    /// Returns whether no revoked permit is still held, as far as replicas can be asked. Without any answer, the result is
    /// `false`.
    pub fn is_done(&self) -> bool {
        self.running == 0 && self.permits.are_all()
    }
}

/// A change in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LogEntry {
    /// Identifies the change: 32 hexadecimal digits, random.
    pub id: String,
    /// When it was made, in milliseconds since 1970 on the store's clock.
    pub at_ms: u64,
    /// Its author, as given by the operator.
    pub author: String,
    /// Its reason, as given by the operator.
    pub reason: String,
    /// The kind of change.
    pub what: What,
    /// Each changed override, before and after; at most the first 50 restored ones.
    pub edits: Vec<Edited>,
    /// The revoked permits or the resumed keys, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum What {
    /// An override was set.
    // Earlier versions could also undo a change.
    #[serde(alias = "undo")]
    Set,
    /// Overrides were removed.
    Unset,
    /// A replica has restored overrides that the store had lost.
    Restored,
    /// Permits were revoked.
    Revoked,
    /// Pauses of keys were ended.
    Resumed,
}

impl What {
    fn as_str(self) -> &'static str {
        match self {
            Self::Set => "set",
            Self::Unset => "unset",
            Self::Restored => "restored",
            Self::Revoked => "revoked",
            Self::Resumed => "resumed",
        }
    }
}

/// One override before and after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Edited {
    /// The limit or key.
    #[serde(flatten)]
    pub target: Target,
    /// `None` if there was no override.
    pub before: Option<Setting>,
    /// `None` if no override is left.
    pub after: Option<Setting>,
}

/// Checks what is to be revoked.
pub(super) fn check_revocation(whose: &Revocation) -> Result<(), OperateError> {
    match whose {
        Revocation::Key { limit, .. } => check(&Target::limit(limit)),
        Revocation::Replica(id) if !Names::is_id(id) => {
            Err(OperateError::value("the id of a replica has 16 characters"))
        }
        _ => Ok(()),
    }
}

pub(super) fn check(target: &Target) -> Result<(), OperateError> {
    let fault = || OperateError::value("the name of a limit has 1 to 128 bytes");
    target.is_valid().then_some(()).ok_or_else(fault)
}

impl By {
    /// Creates an author (1 to 64 bytes) with a reason (1 to 256 bytes), both without control characters.
    ///
    /// # Errors
    ///
    /// Fails if the author or the reason is out of these bounds.
    pub fn new(author: impl Into<String>, reason: impl Into<String>) -> Result<Self, OperateError> {
        let (author, reason) = (author.into(), reason.into());
        for (what, text, most) in [
            ("author", &author, Override::MAX_AUTHOR),
            ("reason", &reason, Override::MAX_REASON),
        ] {
            let is_blank = text.trim().is_empty();
            if is_blank || text.len() > most || text.contains(char::is_control) {
                return Err(OperateError::value(format!(
                    "the {what} must be 1 to {most} bytes without control characters"
                )));
            }
        }
        Ok(Self { author, reason })
    }

    pub(super) fn texts(&self) -> (String, String) {
        (self.author.clone(), self.reason.clone())
    }

    pub(super) fn signed(&self, what: What) -> Result<Signed, OperateError> {
        let (author, reason) = self.texts();
        Signed::new(what.as_str(), author, reason).map_err(OperateError::value)
    }
}

impl From<Record> for Overrides {
    fn from(record: Record) -> Self {
        let all = record.overrides().collect();
        Self { all, record }
    }
}

impl Overrides {
    /// Returns all overrides, including any that the store has lost but replicas still have in force
    /// ([`Override::recorded`]).
    pub fn all(&self) -> &[Override] {
        &self.all
    }

    pub(super) fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the overrides of a limit or key.
    pub fn of<'a>(&'a self, target: &'a Target) -> impl Iterator<Item = &'a Override> {
        self.all().iter().filter(move |one| one.target == *target)
    }

    /// The value that operators have set for a key, or for its limit.
    pub(super) fn value_of(&self, limit: &str, key: KeyDigest) -> Option<u32> {
        let of_key = self.value(&Target::digest(limit, key));
        of_key.or_else(|| self.value(&Target::limit(limit)))
    }

    pub(super) fn value(&self, target: &Target) -> Option<u32> {
        self.of(target).find_map(|one| match one.setting {
            Setting::Value(value) => Some(value.max),
            _ => None,
        })
    }

    /// Returns the tokens of the overrides of a limit or key, which an [order](super::Order) may require.
    pub fn tokens(&self, target: &Target) -> Vec<String> {
        let tokens = self.of(target).map(|one| one.token().to_owned());
        tokens.collect()
    }

    /// Returns the number of unreadable entries in the record, which are ignored.
    pub fn ignored(&self) -> usize {
        self.record.ignored()
    }

    /// Returns when the record was read, in milliseconds since 1970 on the store's clock.
    pub fn read_at_ms(&self) -> u64 {
        self.record.now_ms
    }
}

impl LogEntry {
    /// `None` if the change is of a kind that this version does not know.
    pub(super) fn of(logged: Logged) -> Option<Self> {
        let edits = logged.edits.iter().filter_map(|[field, before, after]| {
            let read = |text: &str| Override::read(field.as_bytes(), text.as_bytes());
            let (before, after) = (read(before), read(after));
            let target = before.as_ref().or(after.as_ref())?.target.clone();
            Some(Edited {
                target,
                before: before.map(|before| before.setting),
                after: after.map(|after| after.setting),
            })
        });
        let (id, at_ms) = (logged.token().to_owned(), logged.at_ms);
        let edits = edits.collect();
        let note = logged.note;
        Some(Self {
            id,
            at_ms,
            author: note.author,
            reason: note.reason,
            what: serde_json::from_value(note.what.into()).ok()?,
            edits,
            subject: note.subject,
        })
    }
}
