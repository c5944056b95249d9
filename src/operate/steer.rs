//! What operators change: values, modes and pauses, for a time.
//!
//! Tests: `tests/operate/`, by theme.

use std::time::Duration;

use serde::Serialize;

use super::{
    error::{OperateError, OperateErrorKind},
    operator::Operator,
    record,
};
use crate::{
    limit::{MAX_LIMIT, Mode},
    overrides::{
        Change, Changed, Logged, MAX_AUTHOR, MAX_LENGTH_MS, MAX_REASON, Note, Override, Record,
        Setting, Target, Token, What,
    },
};

/// Shortest time of an override.
const MIN_LENGTH: Duration = Duration::from_secs(1);

/// Who makes a change, and why. Both are kept with it, and are shown to all operators.
///
/// They are claims: the store knows only the user that an operator is logged in as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct By {
    author: String,
    reason: String,
}

/// The overrides in force, as an operator has seen them.
///
/// A change names what its operator has seen, and is refused if that has changed meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrides(Record);

/// How far a change has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// It is in force in all replicas.
    Done {
        /// How many there are.
        replicas: usize,
    },
    /// It is recorded. Replicas that have not confirmed it apply it once they read the record: within a minute, or when they
    /// connect.
    Recorded {
        /// Replicas that have confirmed it.
        confirmed: usize,
        /// Replicas that are known.
        of: usize,
        /// The labels of those that have not.
        missing: Vec<String>,
    },
}

/// A change in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LogEntry {
    /// When it was made, in milliseconds since 1970 by the store's clock.
    pub at_ms: u64,
    /// Who has made it, as they said.
    pub author: String,
    /// Why, as they said.
    pub reason: String,
    /// What was done.
    pub what: What,
    /// What was changed, in each case before and after.
    pub edits: Vec<Edited>,
    #[serde(skip)]
    logged: Logged,
}

/// One override before and after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Edited {
    /// What it is about.
    #[serde(flatten)]
    pub target: Target,
    /// `None`: there was no override.
    pub before: Option<Setting>,
    /// `None`: there is no override.
    pub after: Option<Setting>,
}

impl By {
    /// An author (1 to 64 bytes) with a reason (1 to 256 bytes), both without control characters.
    ///
    /// # Errors
    ///
    /// If one of them is not.
    pub fn new(author: impl Into<String>, reason: impl Into<String>) -> Result<Self, OperateError> {
        let (author, reason) = (author.into(), reason.into());
        for (what, text, most) in [
            ("author", &author, MAX_AUTHOR),
            ("reason", &reason, MAX_REASON),
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

    fn note(&self, what: What) -> Note {
        Note {
            author: self.author.clone(),
            reason: self.reason.clone(),
            what,
        }
    }
}

impl Overrides {
    /// Returns all of them.
    pub fn all(&self) -> &[Override] {
        &self.0.overrides
    }

    /// Returns those of a limit or key.
    pub fn of<'a>(&'a self, target: &'a Target) -> impl Iterator<Item = &'a Override> {
        self.all().iter().filter(move |one| one.target == *target)
    }

    /// Returns how many entries of the record cannot be read, and are ignored.
    pub fn ignored(&self) -> usize {
        self.0.faults.len()
    }

    /// Returns when they were read, in milliseconds since 1970 by the store's clock.
    pub fn read_at_ms(&self) -> u64 {
        self.0.now_ms
    }
}

impl Operator {
    /// Reads the overrides in force.
    ///
    /// # Errors
    ///
    /// If the store does not answer or refuses, or has something else under the record's key.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn overrides(&self) -> Result<Overrides, OperateError> {
        let reading = record::read(self.control(), self.names()).await?;
        Ok(Overrides(reading.record.unwrap_or_default()))
    }

    /// Sets the value of a limit, or of one of its keys, for a time.
    ///
    /// A raise admits waiters at once. Lowering takes no slot away: newcomers wait until there are fewer holders. In an outage
    /// a lowered value caps [`Fallback::Local`](crate::Fallback::Local) too. Over a limit's value goes that of a key. At the
    /// end, 1 second to 7 days from now, the declared value holds again.
    ///
    /// A value that a limit cannot have, as is known only to the replicas, is ignored and logged by them.
    ///
    /// # Errors
    ///
    /// If a value is out of range (a limit has 1 to 1,000,000, a key also 0), another operator was faster
    /// ([`OperateErrorKind::Conflict`]), there are 1,000 overrides, or the store does not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the change may be made all the same.
    pub async fn set(
        &self,
        seen: &Overrides,
        target: &Target,
        value: u32,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let least = u32::from(target.key_digest().is_none());
        if !(least..=MAX_LIMIT).contains(&value) {
            return Err(OperateError::value(format!(
                "the value of {target} is {value}: it must be {least} to {MAX_LIMIT}"
            )));
        }
        let setting = Setting::Value(value);
        self.set_for(seen, target, setting, length, by).await
    }

    /// Sets the mode of a limit for a time. [`Mode::Off`] admits everybody, and so does [`Mode::Shadow`].
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    ///
    /// # Cancel safety
    ///
    /// As [`set`](Self::set).
    pub async fn mode(
        &self,
        seen: &Overrides,
        limit: &str,
        mode: Mode,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let setting = Setting::Mode(mode);
        self.set_for(seen, &Target::limit(limit), setting, length, by)
            .await
    }

    /// Pauses a limit for a time: it admits nobody, in any mode, and in an outage too.
    ///
    /// Newcomers and requests that wait are refused ([`AcquireErrorKind::Paused`](crate::AcquireErrorKind::Paused)). Holders
    /// finish.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    ///
    /// # Cancel safety
    ///
    /// As [`set`](Self::set).
    pub async fn pause(
        &self,
        seen: &Overrides,
        limit: &str,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        self.set_for(seen, &Target::limit(limit), Setting::Pause, length, by)
            .await
    }

    async fn set_for(
        &self,
        seen: &Overrides,
        target: &Target,
        setting: Setting,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        check_target(target)?;
        let longest = Duration::from_millis(MAX_LENGTH_MS);
        if !(MIN_LENGTH..=longest).contains(&length) {
            return Err(OperateError::value(
                "an override lasts for 1 second to 7 days",
            ));
        }
        let (length_ms, signed) = (length.as_millis() as u64, signed(by, What::Set)?);
        let change = Change::set(&seen.0, target, setting, length_ms, signed);
        let change = change.ok_or_else(|| OperateError::value("a key has a value only"))?;
        self.make(&change).await
    }

    /// Removes all overrides of a limit, but not those of its keys; or that of one key.
    ///
    /// # Errors
    ///
    /// If there is none ([`OperateErrorKind::NotFound`]), another operator was faster, or the store does not answer or
    /// refuses.
    ///
    /// # Cancel safety
    ///
    /// As [`set`](Self::set).
    pub async fn unset(
        &self,
        seen: &Overrides,
        target: &Target,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        check_target(target)?;
        let change = Change::unset(&seen.0, target, signed(by, What::Unset)?);
        self.make(&change).await
    }

    /// Takes back a change of the [log](Self::log), unless another change was made to the same since then.
    ///
    /// An override that was there before is put back with its author, reason and end, unless that has passed.
    ///
    /// # Errors
    ///
    /// As [`unset`](Self::unset).
    ///
    /// # Cancel safety
    ///
    /// As [`set`](Self::set).
    pub async fn undo(&self, entry: &LogEntry, by: &By) -> Result<Outcome, OperateError> {
        let change = Change::undo(&entry.logged, signed(by, What::Undo)?);
        self.make(&change).await
    }

    /// Returns the latest changes, at most 100, newest first. They are kept for 30 days after the last one.
    ///
    /// # Errors
    ///
    /// If the store does not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn log(&self) -> Result<Vec<LogEntry>, OperateError> {
        let log = record::log(self.control(), self.names()).await?;
        Ok(log.into_iter().map(LogEntry::from).collect())
    }

    async fn make(&self, change: &Change) -> Result<Outcome, OperateError> {
        let changed = record::change(self.control(), self.names(), change).await?;
        let (kind, message) = match changed {
            Changed::Done => return Ok(self.confirmation(&change.token).await),
            Changed::Meanwhile { field, text } => (
                OperateErrorKind::Conflict,
                meanwhile(Override::read(field.as_bytes(), text.as_bytes()).ok()),
            ),
            Changed::Full => (
                OperateErrorKind::Full,
                "there are 1000 overrides: remove some first".to_owned(),
            ),
            Changed::Same => (
                OperateErrorKind::NotFound,
                "there is no override to remove".to_owned(),
            ),
        };
        Err(OperateError::new(kind, message))
    }

    /// Which replicas have put a change in force.
    async fn confirmation(&self, _token: &Token) -> Outcome {
        Outcome::Recorded {
            confirmed: 0,
            of: 0,
            missing: Vec::new(),
        }
    }
}

fn check_target(target: &Target) -> Result<(), OperateError> {
    match target.is_valid() {
        true => Ok(()),
        false => Err(OperateError::value(
            "the name of a limit has 1 to 128 bytes",
        )),
    }
}

fn signed(by: &By, what: What) -> Result<(Token, Note), OperateError> {
    let token =
        Token::random().map_err(|error| OperateError::value(format!("no randomness: {error}")));
    Ok((token?, by.note(what)))
}

fn meanwhile(other: Option<Override>) -> String {
    match other {
        Some(Override {
            target,
            setting,
            author,
            ..
        }) => format!("changed meanwhile by {author}: {target} is now {setting}"),
        None => "changed meanwhile: the override has ended or was removed".to_owned(),
    }
}

impl From<Logged> for LogEntry {
    fn from(logged: Logged) -> Self {
        let edits = logged.edits.iter().filter_map(|[field, before, after]| {
            let read = |text: &str| Override::read(field.as_bytes(), text.as_bytes()).ok();
            let (before, after) = (read(before), read(after));
            let target = before.as_ref().or(after.as_ref())?.target.clone();
            Some(Edited {
                target,
                before: before.map(|before| before.setting),
                after: after.map(|after| after.setting),
            })
        });
        Self {
            at_ms: logged.at_ms,
            author: logged.note.author.clone(),
            reason: logged.note.reason.clone(),
            what: logged.note.what,
            edits: edits.collect(),
            logged,
        }
    }
}
