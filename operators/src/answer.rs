//! Answers for operators: the number of replicas behind them, and what follows from them.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use tower_turnstile::{AcquireErrorKind, operate::KeyDigest};

use crate::{BudgetRow, LimitRow, PaceRow, PauseRow, PermitRow, RefusalRow, TenantRow};

/// The answers of all replicas to one question.
///
/// "7 of 8 replicas answered" is `answered` of `replicas`: the replicas on the store's roster, and any other replica
/// that answered. A crashed replica stays on the roster for up to three minutes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Answers<T> {
    /// The rows of all replicas.
    pub rows: Vec<T>,
    /// Replicas that answered.
    pub answered: usize,
    /// Replicas that were asked.
    pub replicas: usize,
    /// Labels of replicas that did not answer in time. Replicas that hold slots but are not on the roster (not
    /// operable, or the store has lost the roster) are listed by id where they matter: by
    /// [`drained`](super::Operator::drained) and for a [revocation](super::Order::Revoke). So are keys of a large store
    /// that were not looked at for such holders. A replica that answers in the format of another version is named as such.
    pub missing: Vec<String>,
    /// Labels of replicas that refused to answer because they are asked too often.
    pub busy: Vec<String>,
    /// Rows that did not fit into the answers, which have up to 16 KiB each. The last rows of each replica's order are left
    /// out, such as the youngest permits, or the keys with the shortest queues. A key or tenant that one replica has left
    /// out may be in the rows of another: see [`KeyRow::partial`](crate::KeyRow::partial).
    pub left_out: u64,
}

impl<T> Answers<T> {
    /// Returns whether all replicas answered in full. Without any answer, for example if no replica is operable, the
    /// result is incomplete.
    pub fn is_complete(&self) -> bool {
        self.are_all() && self.left_out == 0
    }

    /// Counts replicas as missing that did not answer another question.
    pub(super) fn miss_those_of<U>(&mut self, other: &Answers<U>) {
        let mut known: HashSet<String> = self.missing.iter().cloned().collect();
        for label in &other.missing {
            if known.insert(label.clone()) {
                self.missing.push(label.clone());
                self.answered = self.answered.saturating_sub(1);
            }
        }
    }

    /// Returns whether all replicas answered, even if rows are [left out](Self::left_out).
    pub fn are_all(&self) -> bool {
        self.answered > 0 && self.answered == self.replicas && self.busy.is_empty()
    }
}

/// The prospects of a caller's next request, and the reasons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The limit.
    pub limit: LimitRow,
    /// The caller.
    pub key: KeyDigest,
    /// The limit's value for this caller.
    pub max: u32,
    /// Slots in use, according to the store.
    pub in_use: u32,
    /// Queued requests, according to the store.
    pub waiting: u32,
    /// The caller's remaining budget at a rate. `None` if no replica has charged it lately.
    pub budget: Option<BudgetRow>,
    /// The caller's pause for an overloaded upstream.
    #[serde(default)]
    pub pause: Option<PauseRow>,
    /// How an adaptive limit has found its value for this caller, if the caller is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<PaceRow>,
    /// The outcome of a request now; at a rate, of one unit. `None` for a rate that no replica has charged lately.
    pub verdict: Option<Verdict>,
    /// The caller's permits and queued requests.
    pub permits: Answers<PermitRow>,
    /// Under a [fair](tower_turnstile::Limit::fair) limit: the tenants of these permits and requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Answers<TenantRow>>,
    /// Slots in use that no replica reports.
    pub unclaimed: Vec<UnclaimedRow>,
    /// The caller's latest refusals.
    pub refusals: Answers<RefusalRow>,
}

/// The outcome of a request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// An operator has paused the limit; or an overloaded upstream has paused the key, and requests do not queue.
    Paused,
    /// The store has lost its data, or was down, and newcomers wait for about a second until permits have returned. Requests
    /// that do not queue are refused as unavailable.
    Recovering,
    /// A slot is free, the rate has a unit left, or the limit is not enforced.
    Admitted,
    /// The rate is used up. The request would wait for this many milliseconds.
    Delayed(u64),
    /// The rate is used up for this many milliseconds, which is longer than requests wait.
    TooSoon(u64),
    /// The request would queue, at this place.
    Queued(u32),
    /// All slots are in use, and requests do not queue.
    Full,
    /// All slots are in use, and the queue is full.
    QueueFull,
}

impl Verdict {
    #[cfg(test)]
    pub(crate) const EACH: [Self; 8] = [
        Self::Paused,
        Self::Recovering,
        Self::Admitted,
        Self::Delayed(1),
        Self::TooSoon(1),
        Self::Queued(1),
        Self::Full,
        Self::QueueFull,
    ];

    /// Returns the code of this verdict, in snake case. A refusal has the same code as the error of such a request.
    ///
    /// [Metrics and logs](https://docs.rs/tower-turnstile/latest/tower_turnstile/guide/metrics/index.html#reason-codes) has a table of all codes.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Paused => AcquireErrorKind::Paused.as_str(),
            Self::Recovering => "recovering",
            Self::Admitted => "admitted",
            Self::Delayed(_) => "delayed",
            Self::TooSoon(_) => AcquireErrorKind::TooSoon.as_str(),
            Self::Queued(_) => "queued",
            Self::Full => AcquireErrorKind::Full.as_str(),
            Self::QueueFull => AcquireErrorKind::QueueFull.as_str(),
        }
    }

    /// Returns the place at which the request would queue.
    pub fn place(self) -> Option<u32> {
        match self {
            Self::Queued(place) => Some(place),
            _ => None,
        }
    }

    /// Returns for how long the rate would delay or refuse the request, in milliseconds.
    pub fn wait_ms(self) -> Option<u64> {
        match self {
            Self::Delayed(ms) | Self::TooSoon(ms) => Some(ms),
            _ => None,
        }
    }
}

/// A slot in use that no replica reports.
///
/// Its replica has crashed, does not answer, or is not operable. Under [`Limit::reuse`](tower_turnstile::Limit::reuse) the slot
/// may also be idle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UnclaimedRow {
    /// Its name in the store, which begins with its replica's id.
    pub id: String,
    /// Time until its lease ends, unless it is renewed, in milliseconds.
    pub ends_in_ms: u64,
}
