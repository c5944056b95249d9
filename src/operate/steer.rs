//! Changes by operators: temporary values, modes and pauses.
//!
//! Tests: `tests/operate/changes.rs`, `steering.rs`.

use std::time::Duration;

use tokio::time::{Instant, sleep};

#[cfg(feature = "redis")]
use super::record;
use super::{
    answer::{Answers, LimitRow},
    changes::{By, LogEntry, Outcome, Overrides, Revocation},
    desk::Desk,
    error::{OperateError, OperateErrorKind},
    merge::Collected,
    operator::{Access, Operator, gone},
    wire::{Question, Seen},
};
use crate::{
    keeper::Keepers,
    limit::{LimitValue, MAX_LIMIT, Mode},
    overrides::{
        Change, ChangeNote, Changed, MAX_LENGTH_MS, Override, Record, Setting, Target, Token, What,
    },
};

/// Time between two questions whether a limit is in use.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before the second check that a limit is drained.
const SECOND_LOOK: Duration = Duration::from_millis(300);
/// Minimum length of an override.
const MIN_LENGTH: Duration = Duration::from_secs(1);

impl Operator {
    /// Reads the overrides in force.
    ///
    /// Replicas that have seen another record read it again, and restore any part that the store has lost. The answer
    /// also contains overrides that they may not restore ([`Override::recorded`]): the next change restores them.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses, or has another type of value under the record's key. A replica
    /// that does not answer is not an error.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed except that lost overrides may be restored.
    pub async fn overrides(&self) -> Result<Overrides, OperateError> {
        let record = self.record().await?;
        let token = record.token().cloned().map(String::from);
        if self.is_here() {
            return Ok(record.into());
        }
        let question = Question::Overrides(Seen {
            token: token.clone(),
        });
        let (unrecorded, agree) = match self.ask(question).await {
            Ok(collected) => collected.overrides(token.as_deref()),
            Err(error) if error.kind() == OperateErrorKind::Unavailable => return Err(error),
            // An operator who may not ask sees only the recorded overrides.
            Err(_) => (Vec::new(), true),
        };
        let mut record = match agree {
            true => record,
            false => self.record().await?,
        };
        record.take_told(&unrecorded);
        Ok(record.into())
    }

    /// Like [`overrides`](Self::overrides), given the replicas that have just answered: they are asked again only if
    /// any of them applies another record.
    #[cfg(feature = "admin")]
    pub(crate) async fn overrides_beside(
        &self,
        replicas: &Answers<super::answer::ReplicaRow>,
    ) -> Result<Overrides, OperateError> {
        let record = self.record().await?;
        let token = record.token().map(|token| token.as_str());
        match replicas
            .rows
            .iter()
            .all(|row| row.token.as_deref() == token)
        {
            true => Ok(record.into()),
            false => self.overrides().await,
        }
    }

    /// Reads the record.
    pub(super) async fn record(&self) -> Result<Record, OperateError> {
        match self.access() {
            Access::Here(desk) => here(desk, |keepers| Some(keepers.local_record()?.read())),
            #[cfg(feature = "redis")]
            Access::Store(remote) => Ok(record::read(&remote.control, &remote.names).await?.record),
        }
    }

    /// Sets the value of a limit or of one key, for a limited time.
    ///
    /// A raise admits waiters at once. A lower value revokes no slot: newcomers wait until fewer are held. In an outage
    /// a lower value also caps [`Fallback::Local`](crate::Fallback::Local). A key's value takes precedence over its
    /// limit's. After the given time, 1 second to 7 days, the declared value applies again.
    ///
    /// A value is a number, or for a rate a [`LimitValue`] with a burst. Without a burst, a limit keeps its declared
    /// burst, or uses the value as burst if none is declared; a key uses its limit's burst.
    ///
    /// Only replicas can check whether a value is valid for the limit, such as a burst for a limit that is not a rate.
    /// They ignore and log an invalid value.
    ///
    /// # Errors
    ///
    /// Fails if a value is out of range (1 to 1,000,000 for a limit, also 0 for a key, 1 to 1,000,000 for a burst),
    /// another operator was faster ([`OperateErrorKind::Conflict`]), the record has 1,000 overrides, or the store does
    /// not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the change may still be made.
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

    /// Sets the mode of a limit for a limited time. [`Mode::Off`] and [`Mode::Shadow`] admit everybody.
    ///
    /// # Errors
    ///
    /// See [`set`](Self::set).
    ///
    /// # Cancel safety
    ///
    /// See [`set`](Self::set).
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

    /// Pauses a limit for a limited time: it admits nobody, in any mode, even in an outage.
    ///
    /// Newcomers and waiting requests are refused ([`AcquireErrorKind::Paused`](crate::AcquireErrorKind::Paused)).
    /// Holders finish.
    ///
    /// # Errors
    ///
    /// See [`set`](Self::set).
    ///
    /// # Cancel safety
    ///
    /// See [`set`](Self::set).
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

    /// Completes once no replica holds a slot of this limit, for example after a [pause](Self::pause).
    ///
    /// The method asks every second, and continues while any replica does not answer, or none does. Replicas that
    /// cannot be asked because they are not operable may hold slots of this limit. So it also continues while the store
    /// has slots of such replicas, under any limit, if the operator's user may scan the keys.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn drained(&self, limit: &str) -> Result<(), OperateError> {
        self.drained_with(limit, |_, _| ()).await
    }

    /// Like [`drained`](Self::drained). Each earlier answer is passed to `progress`, with its number of held slots.
    ///
    /// # Errors
    ///
    /// See [`drained`](Self::drained).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn drained_with(
        &self,
        limit: &str,
        mut progress: impl FnMut(usize, &Answers<LimitRow>),
    ) -> Result<(), OperateError> {
        let mut was_drained = false;
        loop {
            let (held, answers) = self.held_of(limit).await?;
            let is_drained = answers.is_complete() && held == 0;
            if is_drained && was_drained {
                return Ok(());
            }
            // Replicas missing from the roster have registered by the second check.
            was_drained = is_drained;
            if is_drained {
                sleep(SECOND_LOOK).await;
                continue;
            }
            progress(held, &answers);
            sleep(DRAIN_INTERVAL).await;
        }
    }

    /// The slots held under a limit, or otherwise the slots of replicas that cannot be asked, under any limit.
    async fn held_of(&self, limit: &str) -> Result<(usize, Answers<LimitRow>), OperateError> {
        let mut collected = self.ask(Question::Limits).await?;
        let held = |answers: &Answers<LimitRow>| -> usize {
            let rows = answers.rows.iter().filter(|row| row.limit == limit);
            rows.map(|row| row.held).sum()
        };
        let answers = collected.clone().limits();
        if !answers.missing.is_empty() || held(&answers) > 0 {
            return Ok((held(&answers), answers));
        }
        let held_by_others = self.miss_holders(&mut collected).await?;
        Ok((held_by_others, collected.limits()))
    }

    /// Compares the replicas that answered with the holders according to the store. Holders that did not answer count
    /// as missing. Returns the number of their slots.
    pub(super) async fn miss_holders(
        &self,
        #[cfg_attr(not(feature = "redis"), allow(unused_variables))] collected: &mut Collected,
    ) -> Result<usize, OperateError> {
        match self.access() {
            Access::Here(_) => Ok(0),
            #[cfg(feature = "redis")]
            Access::Store(remote) => match remote.scanner.holders(&remote.names).await {
                Ok(holders) => Ok(collected.miss(holders)),
                Err(error) if error.is_outage() => Err(error.into()),
                // Without permission to scan, the replicas' answers must suffice.
                Err(_) => Ok(0),
            },
        }
    }

    /// Lists up to twenty namespaces that have keys in the store, so that a wrong namespace is not mistaken for a
    /// service without limits.
    ///
    /// Scans up to 50,000 keys. A namespace exists while any request holds or waits for a slot, or a replica is on its
    /// roster.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses, or if this operator has no store.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn namespaces(&self) -> Result<Vec<String>, OperateError> {
        match self.access() {
            Access::Here(_) => {
                let message = "an operator of one process does not look at its store";
                Err(OperateError::new(OperateErrorKind::NoStore, message))
            }
            #[cfg(feature = "redis")]
            Access::Store(remote) => Ok(remote.scanner.namespaces().await?),
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
        let change = Change::set(seen.record(), target, setting, length_ms, signed);
        let change = change.ok_or_else(|| OperateError::value("a key has a value only"))?;
        self.make(&change).await
    }

    /// Removes all overrides of a limit, but not of its keys; or the override of one key.
    ///
    /// # Errors
    ///
    /// Fails without such an override ([`OperateErrorKind::NotFound`]), if another operator was faster, or if the store
    /// does not answer or refuses.
    ///
    /// # Cancel safety
    ///
    /// See [`set`](Self::set).
    pub async fn unset(
        &self,
        seen: &Overrides,
        target: &Target,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        check_target(target)?;
        let change = Change::unset(seen.record(), target, signed(by, What::Unset)?);
        self.make(&change).await
    }

    /// Undoes a change of the [log](Self::log), unless another change was made to the same override since.
    ///
    /// An earlier override is restored with its author, reason and end, unless it has ended by now.
    ///
    /// # Errors
    ///
    /// See [`unset`](Self::unset).
    ///
    /// # Cancel safety
    ///
    /// See [`set`](Self::set).
    pub async fn undo(&self, entry: &LogEntry, by: &By) -> Result<Outcome, OperateError> {
        let seen = self.overrides().await?;
        let change = Change::undo(seen.record(), &entry.logged, signed(by, What::Undo)?);
        self.make(&change).await
    }

    /// Returns the latest changes, at most 100, newest first. They are kept for 30 days after the last one.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
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

    /// Whether the operator has a record of overrides: with a store, an operator of a single process does not.
    #[cfg(feature = "admin")]
    pub(crate) fn has_record(&self) -> bool {
        match self.access() {
            Access::Here(desk) => here(desk, |keepers| keepers.local_record().map(|_| ())).is_ok(),
            #[cfg(feature = "redis")]
            Access::Store(_) => true,
        }
    }

    /// Logs that permits were revoked. The replicas log it too, so an operator without permission for the log may still
    /// revoke.
    pub(super) async fn note_revoked(&self, whose: &Revocation, by: &By, permits: usize) {
        let some = if permits == 1 { "permit" } else { "permits" };
        let text = match whose {
            Revocation::Permit(id) => format!("permit {id}"),
            whose => format!("{permits} {some} of {whose}"),
        };
        let Ok((token, mut note)) = signed(by, What::Revoked) else {
            return;
        };
        note.revoked = Some(text);
        let change = Change::note((token, note));
        match self.access() {
            Access::Here(desk) => {
                let _ = here(desk, |keepers| {
                    Some(keepers.local_record()?.change(&change))
                });
            }
            #[cfg(feature = "redis")]
            Access::Store(remote) => {
                let _ = record::change(&remote.control, &remote.names, &change).await;
            }
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
            OperateErrorKind::TooManyOverrides,
            "there are 1000 overrides: remove some first".to_owned(),
        ),
        Changed::Same => (
            OperateErrorKind::NotFound,
            "there is no override to remove".to_owned(),
        ),
    };
    Err(OperateError::new(kind, message))
}

/// Uses the record of this process.
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
    // Of simultaneous changes, the last one recorded must also be applied last.
    loop {
        let record = local.read();
        keepers.steer(record.in_force(Instant::now()));
        if local.read().latest == record.latest {
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
