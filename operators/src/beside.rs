//! A process that holds slots beside the other replicas of its namespace, such as `turnstile run`: the value that they
//! declare for a limit, and what is left of its refusals when it ends.
//!
//! Tests: `tests/operate/running/beside.rs`.

use std::time::Duration;

use redis::cmd;
use tower_turnstile::{
    AcquireErrorKind, ConfigError, Limiter,
    operate::Target,
    operate::seam::{
        Body, ControlConnection, Declared, Desk, Names, Others, Question, RefusalRow, Registration,
        StoreError, StoreTarget,
    },
};

use crate::OperateError;

/// Time limit for a command of the store.
const PATIENCE: Duration = Duration::from_secs(2);
/// In the name of a key: the latest refusals of processes that have ended.
const REFUSALS: &str = "refusals";
/// Number of refusals kept for each limit.
const MAX_KEPT: isize = 20;
/// Maximum length of one, in bytes.
const MAX_TEXT: usize = 4_096;
/// How long they are kept after the latest one.
const KEPT_MS: u64 = 24 * 3_600_000;

/// A limiter beside the other replicas of its namespace.
#[derive(Debug)]
pub struct Beside {
    desk: Desk,
    control: ControlConnection,
    names: Names,
}

impl Beside {
    /// Connects at the first use, to the store of the limiter.
    ///
    /// # Errors
    ///
    /// See [`OperatorBuilder::connect`](crate::OperatorBuilder::connect), except for errors of the store.
    pub fn new(limiter: &Limiter, url: &str, namespace: &str) -> Result<Self, ConfigError> {
        let target = StoreTarget::open(url)?;
        let (names, _) = Names::of_service(namespace, PATIENCE, &target)?;
        Ok(Self {
            desk: Desk::of(limiter),
            control: ControlConnection::new(&target, PATIENCE),
            names,
        })
    }

    /// Returns the value of one of the limiter's concurrency limits, without overrides.
    pub fn declared(&self, limit: &str) -> Option<Declared> {
        let declared = self.desk.declared().into_iter();
        { declared }.find_map(|(name, declared)| declared.filter(|_| name == limit))
    }

    /// Declares a value for a concurrency limit, or none. Returns what other replicas declare. [`Registration::Leave`] does
    /// nothing unless there is a connection: a store that does not answer would only cause a delay.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
    pub async fn declare(
        &self,
        how: Registration,
        limit: &str,
        declared: Option<Declared>,
    ) -> Result<Others, OperateError> {
        if matches!(how, Registration::Leave) && !self.control.is_connected() {
            return Ok(Others::default());
        }
        let (store, limits) = ((&self.control, &self.names), [(limit.to_owned(), declared)]);
        let (_, _, others) = self.desk.register(store, how, &limits).await?;
        Ok(others.into_iter().next().unwrap_or_default())
    }

    /// Keeps the limiter's refusals of a limit in the store, for operators who ask when this process has ended.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
    pub async fn keep_refusals(&self, limit: &str) -> Result<(), OperateError> {
        let question = Question::Refusals(Target::limit(limit));
        let answer = self.desk.answer(0, &question).await;
        let Some((Body::Refusals(mut rows), replica, label)) =
            answer.map(|answer| (answer.body, answer.replica, answer.label))
        else {
            return Ok(());
        };
        // A store that is down keeps nothing.
        rows.retain(|row| row.reason != AcquireErrorKind::Unavailable.as_str());
        if rows.is_empty() {
            return Ok(());
        }
        let (key, now_ms) = (
            self.names.about(limit, REFUSALS),
            self.control.time_ms().await?,
        );
        let mut add = cmd("ZADD");
        add.arg(&key);
        for mut row in rows {
            (row.replica, row.replica_label) = (replica.clone(), label.clone());
            add.arg(now_ms.saturating_sub(row.age_ms));
            add.arg(serde_json::to_string(&row).expect("texts and numbers"));
        }
        let mut trim = cmd("ZREMRANGEBYRANK");
        trim.arg(&key).arg(0).arg(-MAX_KEPT - 1);
        let mut expire = cmd("PEXPIRE");
        expire.arg(&key).arg(KEPT_MS);
        for command in [add, expire, trim] {
            self.control.run::<i64>(&command).await?;
        }
        Ok(())
    }
}

/// The refusals of a limit whose processes have ended, by the store's clock.
pub(super) async fn kept_refusals(
    control: &ControlConnection,
    names: &Names,
    limit: &str,
) -> Result<Vec<RefusalRow>, StoreError> {
    let mut range = cmd("ZRANGE");
    range
        .arg(names.about(limit, REFUSALS))
        .arg(0)
        .arg(MAX_KEPT - 1);
    range.arg("REV").arg("WITHSCORES");
    let kept: Vec<(Vec<u8>, f64)> = control.run(&range).await?;
    if kept.is_empty() {
        return Ok(Vec::new());
    }
    let now_ms = control.time_ms().await?;
    Ok(read_kept(&kept, limit, now_ms))
}

/// Everybody who may write a ledger may write these too.
pub(super) fn read_kept(kept: &[(Vec<u8>, f64)], limit: &str, now_ms: u64) -> Vec<RefusalRow> {
    let kept = kept.iter().filter(|(text, _)| text.len() <= MAX_TEXT);
    let rows = kept.filter_map(|(text, at_ms)| {
        let mut row: RefusalRow = serde_json::from_slice(text).ok()?;
        row.age_ms = now_ms.saturating_sub(*at_ms as u64);
        limit.clone_into(&mut row.limit);
        Some(row)
    });
    rows.collect()
}
