//! The record of overrides as operators use it, and waiting until a limit is drained.
//!
//! Tests: `tests/operate/changes.rs`, `steering.rs`.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{
    LimitRow,
    answer::Answers,
    changes::{LogEntry, Outcome, Overrides},
    error::{OperateError, OperateErrorKind},
    merge::Collected,
    operator::{Access, Operator, gone},
};
use tower_turnstile::{
    operate::Override,
    operate::seam::{Change, Changed, Desk, Logged, Question, Record},
};

/// Shortest time between two questions whether a limit is in use.
const DRAIN_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before the second check that a limit is drained.
const SECOND_LOOK: Duration = Duration::from_millis(300);

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
        let token = record.token().map(str::to_owned);
        if self.is_here() {
            return Ok(record.into());
        }
        let question = Question::Overrides(token.clone());
        let (unrecorded, agree) = match self.ask(question).await {
            Ok(collected) => collected.overrides(token.as_deref()),
            Err(error) if error.kind() == OperateErrorKind::Unavailable => return Err(error),
            // An operator who may not ask sees only the recorded overrides.
            Err(_) => (Vec::new(), true),
        };
        let mut record = if agree { record } else { self.record().await? };
        record.take_told(&unrecorded);
        Ok(record.into())
    }

    /// Like [`overrides`](Self::overrides), given the replicas that have just answered: they are asked again only if
    /// any of them applies another record.
    #[cfg(feature = "admin")]
    pub(crate) async fn overrides_beside(
        &self,
        replicas: &Answers<super::ReplicaRow>,
    ) -> Result<Overrides, OperateError> {
        let record = self.record().await?;
        let token = record.token();
        if replicas
            .rows
            .iter()
            .all(|row| row.token.as_deref() == token)
        {
            Ok(record.into())
        } else {
            self.overrides().await
        }
    }

    /// Reads the record.
    pub(super) async fn record(&self) -> Result<Record, OperateError> {
        match self.access() {
            Access::Here(desk) => here(desk, Desk::record),
            Access::Store(remote) => Ok(Record::of_store(&remote.control, &remote.names).await?),
        }
    }

    /// Completes once no replica holds a slot of this limit, for example after a [pause](super::Order::Pause). If the limit is
    /// paused, the pause must last until then.
    ///
    /// The method checks once a second; if a check takes longer than that, it pauses for as long as the check took. It
    /// continues while a replica does not answer, or if there is none. Replicas that cannot be asked because they are
    /// not operable may hold slots of this limit. So it also continues while the store has slots of such replicas,
    /// under any limit, if the operator's user may scan the keys. Up to two million keys of the database are looked at
    /// (in a cluster, for each of sixteen parts); the method also continues as long as there are more keys than that.
    /// Each earlier answer is passed to `progress`, with its number of held slots.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses, if all replicas have answered and none has a limit of this name
    /// ([`OperateErrorKind::UnknownLimit`]), or if the limit was paused and is not paused any longer
    /// ([`OperateErrorKind::NotFound`]).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed.
    pub async fn drained(
        &self,
        limit: &str,
        mut progress: impl FnMut(usize, &Answers<LimitRow>),
    ) -> Result<(), OperateError> {
        let (mut was_drained, mut was_paused) = (false, false);
        loop {
            let began = Instant::now();
            let (held, answers) = self.held_of(limit).await?;
            let took = began.elapsed();
            // Replicas that do not answer may still pause the limit.
            let is_paused = answers.rows.iter().any(|row| row.paused);
            if was_paused && !is_paused && !answers.rows.is_empty() {
                let fault =
                    format!("the pause of limit `{limit}` has ended with {held} slots held");
                return Err(OperateError::new(OperateErrorKind::NotFound, fault));
            }
            was_paused |= is_paused;
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
            // So a large store is scanned for half of the time at most.
            sleep(DRAIN_INTERVAL.max(took)).await;
        }
    }

    /// The slots held under a limit, or otherwise the slots of replicas that cannot be asked, under any limit.
    async fn held_of(&self, limit: &str) -> Result<(usize, Answers<LimitRow>), OperateError> {
        let mut collected = self.ask_limit(limit).await?;
        let answers = collected.clone().rows(limit);
        let held = answers.rows.iter().map(|row: &LimitRow| row.held).sum();
        if !answers.missing.is_empty() || held > 0 {
            return Ok((held, answers));
        }
        let held_by_others = self.miss_holders(&mut collected).await?;
        Ok((held_by_others, collected.rows(limit)))
    }

    /// Compares the replicas that answered with the holders according to the store. Holders that did not answer count
    /// as missing, and so do keys beyond the reach of a scan. Returns the number of their slots.
    pub(super) async fn miss_holders(
        &self,
        collected: &mut Collected,
    ) -> Result<usize, OperateError> {
        match self.access() {
            Access::Here(_) => Ok(0),
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
            Access::Store(remote) => Ok(remote.scanner.namespaces().await?),
        }
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
            Access::Here(desk) => here(desk, Desk::log)?,
            Access::Store(remote) => Logged::of_store(&remote.control, &remote.names).await?,
        };
        Ok(log.into_iter().filter_map(LogEntry::of).collect())
    }

    /// Whether the operator has a record of overrides: with a store, an operator of a single process does not.
    #[cfg(feature = "admin")]
    pub(crate) fn has_record(&self) -> bool {
        match self.access() {
            Access::Here(desk) => desk.record().is_some(),
            Access::Store(_) => true,
        }
    }

    pub(super) async fn make(&self, change: &Change) -> Result<Outcome, OperateError> {
        done(self.write(change).await?)?;
        match self.access() {
            Access::Here(_) => Ok(Outcome::Done { replicas: 1 }),
            Access::Store(_) => Ok(self.confirmation(change.token()).await),
        }
    }

    /// Writes a change to the record.
    pub(super) async fn write(&self, change: &Change) -> Result<Changed, OperateError> {
        match self.access() {
            Access::Here(desk) => here(desk, |desk| desk.change(change)),
            Access::Store(remote) => Ok(change.make(&remote.control, &remote.names).await?),
        }
    }
}

fn done(changed: Changed) -> Result<(), OperateError> {
    let (kind, message) = match changed {
        Changed::Done => return Ok(()),
        Changed::Meanwhile { field, text } => {
            return Err(conflict(
                Override::read(field.as_bytes(), text.as_bytes()).as_ref(),
            ));
        }
        Changed::Full => (
            OperateErrorKind::TooManyOverrides,
            "there are 1000 overrides: remove some first",
        ),
        Changed::Same => (OperateErrorKind::NotFound, "there is no override to remove"),
    };
    Err(OperateError::new(kind, message))
}

/// Uses the record of this process.
fn here<T>(desk: &Desk, work: impl FnOnce(&Desk) -> Option<T>) -> Result<T, OperateError> {
    work(desk).ok_or_else(|| {
        if desk.is_gone() {
            return gone();
        }
        let fault = "the limiter has a store: connect the operator to that";
        OperateError::new(OperateErrorKind::NoStore, fault)
    })
}

/// Another operator was faster.
pub(super) fn conflict(other: Option<&Override>) -> OperateError {
    let message = match other {
        Some(Override {
            target,
            setting,
            author,
            ..
        }) => format!("changed meanwhile by {author}: {target} is now {setting}"),
        None => "changed meanwhile: the override has ended or was removed".to_owned(),
    };
    OperateError::new(OperateErrorKind::Conflict, message)
}
