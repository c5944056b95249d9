//! An operator: the replicas that it asks, and its questions.

use std::fmt;

use super::ask::{Remote, StoredPace};
use super::{
    KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow, TenantRow,
    answer::Answers,
    changes::Overrides,
    error::{OperateError, OperateErrorKind},
    merge::{Collected, MergedRow},
};
use tower_turnstile::{
    Key, Limiter,
    operate::seam::{Desk, Question},
    operate::{KeyDigest, Target},
};

/// An operator of a service: asks its replicas about their permits and waiting requests.
///
/// [`connect`](Self::connect) asks all replicas of a store, [`of`](Self::of) one process. An operator acquires
/// nothing, and never delays a request. The store keeps neither its questions nor the answers.
///
/// Each question goes to all replicas at once and takes a few round trips. Replicas that do not answer within half a
/// second are listed ([`Answers::missing`]). An operator asks one question at a time.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_turnstile::{Limit, Limiter};
/// use tower_turnstile_operate::Operator;
///
/// let limiter = Limiter::in_memory();
/// let permit = limiter.semaphore(Limit::concurrent("jobs", 5), "acme")?.acquire().await?;
///
/// let operator = Operator::of(&limiter); // or Operator::connect("redis://127.0.0.1").await?
/// let permits = operator.permits("jobs", None).await?;
/// assert_eq!(permits.rows[0].id, permit.id().unwrap());
/// # Ok(())
/// # }
/// ```
pub struct Operator(Access);

/// How an operator reaches replicas: this one directly, or all of them through the store.
pub(super) enum Access {
    Here(Box<Desk>),
    Store(Box<Remote>),
}

impl Operator {
    /// Returns an operator that asks only the process of this limiter.
    ///
    /// In memory, this covers everything. With a store, other replicas are left out: see [`connect`](Self::connect).
    pub fn of(limiter: &Limiter) -> Self {
        Self(Access::Here(Box::new(Desk::of(limiter))))
    }

    pub(super) fn of_store(remote: Remote) -> Self {
        Self(Access::Store(Box::new(remote)))
    }

    /// Whether the operator asks only its own process.
    pub(super) fn is_here(&self) -> bool {
        matches!(self.0, Access::Here(_))
    }

    pub(super) fn access(&self) -> &Access {
        &self.0
    }

    /// Lists the replicas.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses. A replica that does not answer is not an error.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like all methods here: dropping the future changes nothing.
    pub async fn replicas(&self) -> Result<Answers<ReplicaRow>, OperateError> {
        Ok(self.ask(Question::Replicas).await?.rows(""))
    }

    /// Lists the limits, with the usage on all replicas.
    ///
    /// # Errors
    ///
    /// See [`replicas`](Self::replicas).
    pub async fn limits(&self) -> Result<Answers<LimitRow>, OperateError> {
        let mut limits: Answers<LimitRow> = self.ask(Question::Limits(None)).await?.rows("");
        let is_unused = |row: &LimitRow| row.pace.is_some() && row.keys == 0;
        let overrides = if limits.rows.iter().any(is_unused) {
            self.record().await.map(Overrides::from).unwrap_or_default()
        } else {
            Overrides::default()
        };
        // No replica knows who shares the value of an unused limit, but the store has it only if all callers do.
        let paces = limits.rows.iter_mut().filter_map(|row| {
            let key = KeyDigest::of(&row.limit, Key::SHARED);
            let (is_unused, is_shared) = (is_unused(row), row.shared);
            let is_found = is_unused && overrides.value_of(&row.limit, key).is_none();
            let pace = row.pace.as_mut().filter(|_| is_unused || is_shared)?;
            Some((key, pace, is_found.then_some(&mut row.max)))
        });
        self.read_paces(paces).await;
        Ok(limits)
    }

    /// What the store knows of adaptive limits, unless it is down; without a store, the rows have it.
    pub(super) async fn read_paces<'a>(&self, rows: impl Iterator<Item = StoredPace<'a>>) {
        if let Access::Store(remote) = &self.0 {
            remote.read_paces(rows).await;
        }
    }

    /// Lists the holders and waiters of a limit, under all keys or one.
    ///
    /// Holders come first, then waiters, each oldest first. A rate has no holders.
    ///
    /// # Errors
    ///
    /// See [`replicas`](Self::replicas); and [`OperateErrorKind::UnknownLimit`] if all replicas have answered and none has
    /// the limit.
    pub async fn permits(
        &self,
        limit: &str,
        key: Option<KeyDigest>,
    ) -> Result<Answers<PermitRow>, OperateError> {
        self.rows_of(limit, key, Question::Permits).await
    }

    /// Lists the keys of a limit in use, longest queues first.
    ///
    /// # Errors
    ///
    /// See [`permits`](Self::permits).
    pub async fn keys(
        &self,
        limit: &str,
        key: Option<KeyDigest>,
    ) -> Result<Answers<KeyRow>, OperateError> {
        let mut keys: Answers<KeyRow> = self.rows_of(limit, key, Question::Keys).await?;
        let rows = keys.rows.iter_mut();
        let paces = rows.filter_map(|row| Some((row.key, row.pace.as_mut()?, None)));
        self.read_paces(paces).await;
        Ok(keys)
    }

    /// Lists the latest refusals of a limit, newest first, up to 20 per replica; and up to 20 of the commands of
    /// `turnstile run` that have ended, for a day.
    ///
    /// # Errors
    ///
    /// See [`permits`](Self::permits).
    pub async fn refusals(
        &self,
        limit: &str,
        key: Option<KeyDigest>,
    ) -> Result<Answers<RefusalRow>, OperateError> {
        let mut kept = self.kept_refusals(limit).await?;
        kept.retain(|row| key.is_none() || row.key == key);
        let collected = match self.ask_of(limit, key, Question::Refusals).await {
            Err(error) if error.kind() == OperateErrorKind::UnknownLimit && !kept.is_empty() => {
                self.ask(Question::Replicas).await?
            }
            collected => collected?,
        };
        // Those of replicas that are still there are in their own answers.
        kept.retain(|row| {
            !collected
                .answers
                .iter()
                .any(|answer| answer.replica == row.replica)
        });
        let mut refusals: Answers<RefusalRow> = collected.rows(limit);
        refusals.rows.extend(kept);
        refusals.rows = RefusalRow::merge(refusals.rows);
        Ok(refusals)
    }

    /// The refusals of processes that have ended.
    async fn kept_refusals(&self, limit: &str) -> Result<Vec<RefusalRow>, OperateError> {
        let Access::Store(remote) = &self.0 else {
            return Ok(Vec::new());
        };
        match remote.kept_refusals(limit).await {
            Err(error) if error.is_outage() => Err(error.into()),
            // The user lacks the permission.
            kept => Ok(kept.unwrap_or_default()),
        }
    }

    /// Lists the tenants of a [fair](tower_turnstile::Limit::fair) limit that hold slots or wait, longest queues first.
    ///
    /// How far they are behind ([`TenantRow::debt_ms`]) is read from the store, by one command for the first 200 tenants:
    /// for this key, or without one for the key that all callers share. It is unknown if nobody has waited for a while, or
    /// if the operator's user may not read it.
    ///
    /// # Errors
    ///
    /// See [`permits`](Self::permits); and [`OperateErrorKind::NotFair`] if the limit has no tenants.
    pub async fn tenants(
        &self,
        limit: &str,
        key: Option<KeyDigest>,
    ) -> Result<Answers<TenantRow>, OperateError> {
        let mut tenants = self.rows_of(limit, key, Question::Tenants).await?;
        if let Access::Store(remote) = &self.0 {
            let key = key.unwrap_or_else(|| KeyDigest::of(limit, Key::SHARED));
            remote.read_behind(key, &mut tenants.rows).await?;
        }
        Ok(tenants)
    }

    /// The limit of this name, as [`limits`](Self::limits) lists it, however many there are.
    pub(super) async fn ask_limit(&self, limit: &str) -> Result<Collected, OperateError> {
        let question = |of: Target| Question::Limits(Some(of.limit));
        self.ask_of(limit, None, question).await
    }

    async fn rows_of<T: MergedRow>(
        &self,
        limit: &str,
        key: Option<KeyDigest>,
        question: fn(Target) -> Question,
    ) -> Result<Answers<T>, OperateError> {
        Ok(self.ask_of(limit, key, question).await?.rows(limit))
    }

    /// Asks about a limit that a replica must have.
    async fn ask_of(
        &self,
        limit: &str,
        key: Option<KeyDigest>,
        question: fn(Target) -> Question,
    ) -> Result<Collected, OperateError> {
        if limit.len() > MAX_LIMIT_NAME {
            return Err(unknown(limit));
        }
        let of = Target {
            key,
            ..Target::limit(limit)
        };
        let collected = self.ask(question(of)).await?;
        if collected.is_unknown_limit() {
            return Err(unknown(limit));
        }
        if collected.is_not_fair() {
            return Err(not_fair(limit));
        }
        Ok(collected)
    }

    pub(super) async fn ask(&self, question: Question) -> Result<Collected, OperateError> {
        match &self.0 {
            Access::Here(desk) => {
                let answer = desk.answer(0, &question).await.ok_or_else(gone)?;
                Ok(Collected {
                    answers: vec![answer],
                    missing: Vec::new(),
                })
            }
            Access::Store(remote) => Ok(remote.ask(question).await?),
        }
    }
}

/// Maximum length of a limit's name in a question, in bytes: a question has 4 KiB, and a byte may take six of them.
const MAX_LIMIT_NAME: usize = 512;

pub(super) fn unknown(limit: &str) -> OperateError {
    let limit = shown(limit);
    OperateError::new(
        OperateErrorKind::UnknownLimit,
        format!("no replica has a limit `{limit}`"),
    )
}

/// The replicas that have answered do not have the limit, but others may.
pub(super) fn no_answer<T>(limit: &str, answers: &Answers<T>) -> OperateError {
    let (answered, replicas) = (answers.answered, answers.replicas);
    let limit = shown(limit);
    OperateError::new(
        OperateErrorKind::NoAnswer,
        format!(
            "no replica that answers has a limit `{limit}`: {answered} of {replicas} have answered"
        ),
    )
}

pub(super) fn not_fair(limit: &str) -> OperateError {
    let fault = format!("limit `{}` is not fair, so it has no tenants", shown(limit));
    OperateError::new(OperateErrorKind::NotFair, fault)
}

pub(super) fn too_often() -> OperateError {
    let fault = "the replicas are asked too often";
    OperateError::new(OperateErrorKind::Busy, fault)
}

/// The name of a limit in an error.
pub(super) fn shown(limit: &str) -> String {
    let start = limit.chars().take(64);
    start.flat_map(char::escape_debug).collect()
}

pub(super) fn gone() -> OperateError {
    OperateError::new(OperateErrorKind::Unavailable, "the limiter was dropped")
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operator").finish_non_exhaustive()
    }
}
