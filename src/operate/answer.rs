//! Answers for operators: rows, and the number of replicas behind them.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::{
    overrides::{KeyDigest, TenantDigest},
    permit_id::PermitId,
    reason::Reason,
};

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
    /// out may be in the rows of another: see [`KeyRow::partial`].
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

/// A replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReplicaRow {
    /// The replica's id: random, and new at each start.
    pub replica: String,
    /// Its label, by default the host's name.
    pub label: String,
    /// Its version of this library.
    pub version: String,
    /// Time since its limiter was created, in milliseconds.
    pub uptime_ms: u64,
    /// Slots it holds: one for each concurrent limit of a permit.
    pub held: usize,
    /// Number of its queued requests.
    pub waiting: usize,
    /// Whether the store works, as far as the replica knows; after a recurring outage, only once the store has worked
    /// for some seconds.
    pub store_up: bool,
    /// Whether newcomers under strict limits wait because permits return to a store that has [lost
    /// them](crate::guide::store_failures#held-permits), or was down.
    #[serde(default)]
    pub recovering: bool,
    /// Its lease, in milliseconds. All replicas should have the same settings.
    pub lease_ms: u64,
    /// Its waiter TTL, in milliseconds.
    pub waiter_ttl_ms: u64,
    /// The version of the operators' record in force. `None`: it has not read the record.
    pub token: Option<String>,
}

/// A limit, over all replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LimitRow {
    /// The limit's name.
    pub limit: String,
    /// Its value; if replicas differ, the largest, which applies to concurrency limits.
    pub max: u32,
    /// Its value without an operator's override: as declared in code or in the configuration file.
    pub declared_max: u32,
    /// Whether an operator has paused the limit.
    pub paused: bool,
    /// The period of a rate, in milliseconds.
    pub period_ms: Option<u64>,
    /// The unit of a rate. See [`Limit::unit`](crate::Limit::unit).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// `enforce`, `shadow` or `off`: [`Mode::as_str`](crate::Mode::as_str).
    pub mode: String,
    /// How long a request may queue, in milliseconds; if uses of the limit differ, the longest.
    pub wait_ms: u64,
    /// Longest queue of a key; if replicas differ, the longest.
    pub max_waiters: u32,
    /// Slots in use, over all keys. A heavy permit holds several.
    pub held: usize,
    /// Requests queued or delayed, over all keys.
    pub waiting: usize,
    /// Keys with permits or waiters on some replica, or paused; for a rate, keys with part of the burst used. A key on
    /// several replicas is counted once for each, unless all callers share one key.
    pub keys: usize,
    /// Keys that are paused for an overloaded upstream, counted like `keys`.
    #[serde(default)]
    pub paused_keys: usize,
    /// Whether newcomers of a key wait on some replica because permits return to a store that has [lost
    /// them](crate::guide::store_failures#held-permits), or was down.
    #[serde(default)]
    pub recovering: bool,
    /// Whether all callers share the value, as far as known: replicas know the shared key and no other.
    #[serde(default)]
    pub shared: bool,
    /// Whether its slots are shared fairly among [tenants](super::Operator::tenants).
    #[serde(default)]
    pub fair: bool,
    /// Age of the oldest waiter, in milliseconds.
    pub oldest_wait_ms: Option<u64>,
    /// Whether replicas differ in the value, the mode or the fairness, for example during a rollout.
    pub differs: bool,
}

/// A held permit or a waiting request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PermitRow {
    /// The limit's name.
    #[serde(default)]
    pub limit: String,
    /// The caller.
    pub key: KeyDigest,
    /// The caller's key, if its replica [shows keys](crate::LimiterBuilder::show_keys). Bytes other than text are
    /// escaped. Empty for the key that all callers share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_text: Option<String>,
    /// Its id, which is also in the store, in logs and in [`Permit::id`](crate::Permit::id).
    pub id: PermitId,
    /// Whether it is held, waiting, or ended.
    pub state: PermitState,
    /// Number of slots that it has or waits for. See [`Semaphore::acquire_many`](crate::Semaphore::acquire_many).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: u32,
    /// How long it has been held or has waited, in milliseconds.
    pub age_ms: u64,
    /// For a waiter: the place at which it joined the queue; 0 if unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub place: u32,
    /// Under a [fair](crate::Limit::fair) limit, its tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantDigest>,
    /// The tenant's name: see [`TenantRow::tenant_text`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_text: Option<String>,
    /// For a waiter in an [`Explanation`]: the number of its tenant's requests that wait before it, at most. An estimate if
    /// a replica has not answered, or may have left the tenant out ([`TenantRow::partial`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_ahead: Option<usize>,
    /// Its label: by default the method and the route.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// The id of its replica.
    #[serde(default)]
    pub replica: String,
    /// The label of its replica.
    #[serde(default)]
    pub replica_label: String,
}

/// The state of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PermitState {
    /// Holds its slots.
    Held,
    /// Waiting for a slot.
    Waiting,
    /// Held until an operator revoked it.
    Ended,
}

impl PermitState {
    /// Returns the state in a word, such as `waiting`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Waiting => "waiting",
            Self::Ended => "ended",
        }
    }
}

/// A key of a limit, over all replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyRow {
    /// The limit's name.
    #[serde(default)]
    pub limit: String,
    /// The caller.
    pub key: KeyDigest,
    /// The caller's key: see [`PermitRow::key_text`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_text: Option<String>,
    /// Slots in use. A heavy permit holds several.
    pub held: usize,
    /// Queued requests.
    pub waiting: usize,
    /// The limit's value for this key; if replicas differ, the largest.
    pub max: u32,
    /// Age of the oldest waiter, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_wait_ms: Option<u64>,
    /// Replicas with permits or waiters of this key; for a rate, replicas that have charged it lately.
    #[serde(default)]
    pub replicas: usize,
    /// Whether a replica may have left out this key, because its answer was too small for all keys. Then `held`, `waiting`,
    /// `oldest_wait_ms` and `replicas` are lower bounds, and the remaining budget of a rate is an upper bound. The answer for
    /// a single key is exact.
    #[serde(default, skip_serializing_if = "is_false")]
    pub partial: bool,
    /// The key's budget at a rate, according to the replica that charged it last.
    #[serde(default, flatten)]
    pub budget: Option<BudgetRow>,
    /// The key's pause for an overloaded upstream.
    #[serde(default, flatten)]
    pub pause: Option<PauseRow>,
    /// Whether newcomers wait on some replica because permits return to a store that has [lost
    /// them](crate::guide::store_failures#held-permits), or was down.
    #[serde(default)]
    pub recovering: bool,
}

/// A tenant of a [fair](crate::Limit::fair) limit, over all replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TenantRow {
    /// The limit's name.
    #[serde(default)]
    pub limit: String,
    /// The tenant.
    pub tenant: TenantDigest,
    /// The tenant's name, if its replica [shows keys](crate::LimiterBuilder::show_keys). Bytes other than text are escaped.
    /// Empty for the requests that have no tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_text: Option<String>,
    /// Its share: that of an operator's override, or else of its requests; if these differ, the largest.
    pub share: u32,
    /// Slots in use. A heavy permit holds several.
    pub held: usize,
    /// Queued requests.
    pub waiting: usize,
    /// Age of the oldest waiter, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_wait_ms: Option<u64>,
    /// Replicas with permits or waiters of this tenant.
    #[serde(default)]
    pub replicas: usize,
    /// Whether a replica may have left out this tenant, because its answer was too small for all tenants. Then `held`,
    /// `waiting`, `oldest_wait_ms` and `replicas` are lower bounds.
    #[serde(default, skip_serializing_if = "is_false")]
    pub partial: bool,
    /// How far it is behind the other tenants of its key, in milliseconds: see
    /// [Tenants](crate::guide::tenants#for-operators). 0 if it is not behind; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub behind_ms: Option<u64>,
}

/// A pause of a key for an overloaded upstream. See [`Scope::outcome_by`](crate::Scope::outcome_by).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PauseRow {
    /// Time until the pause ends, in milliseconds. The limit then rises from 0 over five seconds.
    pub pause_ends_in_ms: u64,
    /// The label of the replica that started the pause. Empty if unknown: other replicas know only the end.
    pub paused_by: String,
}

/// A key's remaining budget at a rate.
///
/// Calculated from the latest charge that any replica knows, and the units drained since. It excludes charges of
/// replicas that are gone, and spending not reported yet. If the store loses its data, the old budget is shown until a
/// replica charges the key again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BudgetRow {
    /// Units available at once. 0 if the rate is in debt.
    pub remaining: u32,
    /// Maximum number of units available at once.
    pub burst: u32,
    /// Time until the rate admits a request of one unit, in milliseconds.
    pub next_ms: u64,
    /// Time since the latest charge, in milliseconds.
    pub charged_ms: u64,
}

/// A refusal, with the numbers at the moment of the decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RefusalRow {
    /// The limit's name.
    #[serde(default)]
    pub limit: String,
    /// The caller, if it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyDigest>,
    /// The caller's key: see [`PermitRow::key_text`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_text: Option<String>,
    /// The code of the reason: [`AcquireErrorKind::as_str`](crate::AcquireErrorKind::as_str).
    pub reason: String,
    /// Time since then, in milliseconds.
    pub age_ms: u64,
    /// The limit's value for the key.
    pub max: u32,
    /// Slots in use.
    pub in_use: u32,
    /// Queued requests.
    pub waiting: u32,
    /// How long the request had waited, in milliseconds.
    pub waited_ms: u64,
    /// The request's label, like a permit's label.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// The id of its replica.
    #[serde(default)]
    pub replica: String,
    /// The label of its replica.
    #[serde(default)]
    pub replica_label: String,
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
    /// The outcome of a request now; at a rate, of one unit. `None` for a rate that no replica has charged lately.
    pub verdict: Option<Verdict>,
    /// The caller's permits and queued requests.
    pub permits: Answers<PermitRow>,
    /// Under a [fair](crate::Limit::fair) limit: the tenants of these permits and requests.
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
    /// [Metrics and logs](crate::guide::metrics#reason-codes) has a table of all codes.
    pub fn as_str(self) -> &'static str {
        let reason = match self {
            Self::Paused => Reason::Paused,
            Self::Recovering => Reason::Recovering,
            Self::Admitted => Reason::Admitted,
            Self::Delayed(_) => Reason::Delayed,
            Self::TooSoon(_) => Reason::TooSoon,
            Self::Queued(_) => Reason::Queued,
            Self::Full => Reason::Full,
            Self::QueueFull => Reason::QueueFull,
        };
        reason.code()
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
/// Its replica has crashed, does not answer, or is not operable. Under [`Limit::reuse`](crate::Limit::reuse) the slot
/// may also be idle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UnclaimedRow {
    /// Its name in the store, which begins with its replica's id.
    pub id: String,
    /// Time until its lease ends, unless it is renewed, in milliseconds.
    pub ends_in_ms: u64,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Mode;

    #[test]
    fn a_state_and_a_mode_are_the_same_words_in_json() {
        for state in [PermitState::Held, PermitState::Waiting, PermitState::Ended] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        for mode in [Mode::Enforce, Mode::Shadow, Mode::Off] {
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.as_str());
        }
    }
}
