//! Changes by operators: values, modes and pauses, for a time.
//!
//! Tests: `tests/operate/changes.rs`, `steering.rs`.

use std::time::Duration;

use tokio::time::{Instant, sleep};

#[cfg(feature = "redis")]
use super::record;
use super::{
    answer::{Answers, LimitRow},
    changes::{By, LogEntry, Outcome, Overrides},
    desk::Desk,
    error::{OperateError, OperateErrorKind},
    operator::{Access, Operator, gone},
};
use crate::{
    keeper::Keepers,
    limit::{LimitValue, MAX_LIMIT, Mode},
    overrides::{
        Change, ChangeNote, Changed, MAX_LENGTH_MS, Override, Setting, Target, Token, What,
    },
};

/// Time between two questions whether a limit is in use.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time of an override.
const MIN_LENGTH: Duration = Duration::from_secs(1);

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
        let record = match self.access() {
            Access::Here(desk) => here(desk, |keepers| Some(keepers.local_record()?.read()))?,
            #[cfg(feature = "redis")]
            Access::Store(remote) => {
                let reading = record::read(&remote.control, &remote.names).await?;
                reading.record.unwrap_or_default()
            }
        };
        Ok(Overrides(record))
    }

    /// Sets the value of a limit, or of one of its keys, for a time.
    ///
    /// A raise admits waiters at once. Lowering takes no slot away: newcomers wait until there are fewer holders. In an outage
    /// a lowered value caps [`Fallback::Local`](crate::Fallback::Local) too. Over a limit's value goes that of a key. At the
    /// end, 1 second to 7 days from now, the declared value holds again.
    ///
    /// A value is a number, or for a rate a [`LimitValue`] with a burst. Without one, a limit keeps its declared burst, or has
    /// as much as the value if none is declared; and a key has the burst of its limit.
    ///
    /// A value that a limit cannot have, as is known only to the replicas, is ignored and logged by them: such as a burst of a
    /// limit that is no rate.
    ///
    /// # Errors
    ///
    /// If a value is out of range (a limit has 1 to 1,000,000, a key also 0, a burst is 1 to 1,000,000), another operator was faster
    /// ([`OperateErrorKind::Conflict`]), there are 1,000 overrides, or the store does not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the change may be made all the same.
    pub async fn set(
        &self,
        seen: &Overrides,
        target: &Target,
        value: impl Into<LimitValue>,
        length: Duration,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        let value = value.into();
        if !target.may_have(value) {
            return Err(out_of_range(target, value));
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

    /// Completes once no replica holds a slot of this limit, such as after a [pause](Self::pause).
    ///
    /// It asks each second, and goes on while a replica does not answer.
    ///
    /// # Errors
    ///
    /// If the store does not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn drained(&self, limit: &str) -> Result<(), OperateError> {
        self.drained_with(limit, |_, _| ()).await
    }

    /// As [`drained`](Self::drained). Each answer before is passed to `progress`, with the slots that are held by it.
    ///
    /// # Errors
    ///
    /// As [`drained`](Self::drained).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn drained_with(
        &self,
        limit: &str,
        mut progress: impl FnMut(usize, &Answers<LimitRow>),
    ) -> Result<(), OperateError> {
        loop {
            let answers = self.limits().await?;
            let rows = answers.rows.iter().filter(|row| row.limit == limit);
            let held = rows.map(|row| row.held).sum();
            if answers.is_complete() && held == 0 {
                return Ok(());
            }
            progress(held, &answers);
            sleep(DRAIN_INTERVAL).await;
        }
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
        let log = match self.access() {
            Access::Here(desk) => here(desk, |keepers| Some(keepers.local_record()?.log()))?,
            #[cfg(feature = "redis")]
            Access::Store(remote) => record::log(&remote.control, &remote.names).await?,
        };
        Ok(log.into_iter().map(LogEntry::from).collect())
    }

    /// Whether it has a record of overrides: an operator of one process of several has none.
    #[cfg(feature = "admin")]
    pub(crate) fn has_record(&self) -> bool {
        match self.access() {
            Access::Here(desk) => here(desk, |keepers| keepers.local_record().map(|_| ())).is_ok(),
            #[cfg(feature = "redis")]
            Access::Store(_) => true,
        }
    }

    async fn make(&self, change: &Change) -> Result<Outcome, OperateError> {
        match self.access() {
            Access::Here(desk) => {
                done(here(desk, |keepers| change_here(keepers, change))?)?;
                Ok(Outcome::Done { replicas: 1 })
            }
            #[cfg(feature = "redis")]
            Access::Store(remote) => {
                done(record::change(&remote.control, &remote.names, change).await?)?;
                Ok(self.confirmation(&change.token).await)
            }
        }
    }
}

fn done(changed: Changed) -> Result<(), OperateError> {
    let (kind, message) = match changed {
        Changed::Done => return Ok(()),
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

/// Works on the record of this process.
fn here<T>(desk: &Desk, work: impl FnOnce(&Keepers) -> Option<T>) -> Result<T, OperateError> {
    let keepers = desk.keepers.upgrade().ok_or_else(gone)?;
    work(&keepers).ok_or_else(|| {
        OperateError::new(
            OperateErrorKind::NoStore,
            "the limiter has a store: connect the operator to that",
        )
    })
}

fn change_here(keepers: &Keepers, change: &Change) -> Option<Changed> {
    let local = keepers.local_record()?;
    let changed = local.change(change);
    // Of changes at one time the one that is recorded last is put in force last.
    loop {
        let record = local.read();
        keepers.steer(record.in_force(Instant::now()));
        if local.read().token == record.token {
            return Some(changed);
        }
    }
}

fn out_of_range(target: &Target, value: LimitValue) -> OperateError {
    let of_max = u32::from(target.key_digest().is_none());
    let (what, number, least) = match value {
        LimitValue {
            max,
            burst: Some(burst),
        } if (of_max..=MAX_LIMIT).contains(&max) => ("burst", burst, 1),
        LimitValue { max, .. } => ("value", max, of_max),
    };
    OperateError::value(format!(
        "the {what} of {target} is {number}: it must be {least} to {MAX_LIMIT}"
    ))
}

fn check_target(target: &Target) -> Result<(), OperateError> {
    match target.is_valid() {
        true => Ok(()),
        false => Err(OperateError::value(
            "the name of a limit has 1 to 128 bytes",
        )),
    }
}

fn signed(by: &By, what: What) -> Result<(Token, ChangeNote), OperateError> {
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
