//! What a replica answers to operators, in rows.

use serde::{Deserialize, Serialize};

use crate::{
    ledger::{PacePast, PaceState},
    operable::PaceLook,
    overrides::{KeyDigest, TenantDigest},
    permit_id::PermitId,
};

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
    /// How long a request may queue, in milliseconds. If uses of the limit differ: in a replica that of the first, of the latest
    /// file, or of a longer update; over all replicas the longest.
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
    /// Whether its slots are shared fairly among tenants.
    #[serde(default)]
    pub fair: bool,
    /// Age of the oldest waiter, in milliseconds.
    pub oldest_wait_ms: Option<u64>,
    /// What an [adaptive](crate::Scope::adapt) limit has found: over all keys, or if all callers share the value, for these. Then
    /// `max` is the value that was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<PaceRow>,
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
    #[serde(default, skip_serializing_if = "is_default")]
    pub place: u32,
    /// Under a [fair](crate::Limit::fair) limit, its tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantDigest>,
    /// The tenant's name: see [`TenantRow::tenant_text`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_text: Option<String>,
    /// For a waiter in an `Explanation`: the number of its tenant's requests that wait before it, at most. An estimate if
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
    #[serde(default, skip_serializing_if = "is_default")]
    pub partial: bool,
    /// The key's budget at a rate, according to the replica that charged it last.
    #[serde(default, flatten)]
    pub budget: Option<BudgetRow>,
    /// The key's pause for an overloaded upstream.
    #[serde(default, flatten)]
    pub pause: Option<PauseRow>,
    /// How an [adaptive](crate::Scope::adapt) limit has found the value of the key, which is `max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<PaceRow>,
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
    #[serde(default, skip_serializing_if = "is_default")]
    pub partial: bool,
    /// What it owes the other tenants of its key because it has used more than its share, in milliseconds: see
    /// [Tenants](crate::guide::tenants#for-operators). 0 if it owes nothing; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub debt_ms: Option<u64>,
}

/// A pause of a key for an overloaded upstream. See [`Scope::outcome_by`](crate::Scope::outcome_by).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseRow {
    /// Time until the pause ends, in milliseconds. The limit then rises from 0 over five seconds.
    pub pause_ends_in_ms: u64,
    /// The label of the replica that started the pause. Empty if unknown: other replicas know only the end.
    pub paused_by: String,
}

/// How an [adaptive](crate::Scope::adapt) limit has found its value.
///
/// The wall and the last cut are known of a key, or of a limit whose callers share one, if the operator may read them in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PaceRow {
    /// The smallest value.
    pub floor: u32,
    /// The largest value.
    pub ceiling: u32,
    /// The value with which it began.
    pub declared: u32,
    /// Number of cuts, which is the generation of the value.
    pub cuts: u64,
    /// Overloaded requests that these replicas have counted.
    pub overloaded: u64,
    /// Slots in use at the last cut, below which the limit stays for a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall: Option<u32>,
    /// Rest of this time, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_ends_in_ms: Option<u64>,
    /// Time since the last cut, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_ms: Option<u64>,
    /// The value before this cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_from: Option<u32>,
    /// The value after this cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_to: Option<u32>,
}

impl PaceRow {
    pub(super) fn new(look: &PaceLook) -> Self {
        let mut row = Self {
            floor: look.bounds.floor,
            ceiling: look.bounds.ceiling,
            declared: look.declared,
            cuts: look.cuts,
            overloaded: look.overloaded,
            wall: None,
            wall_ends_in_ms: None,
            cut_ms: None,
            cut_from: None,
            cut_to: None,
        };
        if let Some(past) = look.past {
            row.recall(past);
        }
        row
    }

    /// Reads the state of the key in the store. Returns the value that was found.
    #[doc(hidden)]
    pub fn read(&mut self, state: &[u8], now_ms: u64) -> Option<u32> {
        let state = PaceState::parse(state)?;
        self.recall(state.past(now_ms));
        self.cuts = state.generation;
        Some(state.limit.min(self.ceiling).max(self.floor))
    }

    fn recall(&mut self, past: PacePast) {
        (self.wall, self.wall_ends_in_ms) = past.wall.unzip();
        self.cut_ms = past.cut.map(|cut| cut.at_ms);
        (self.cut_from, self.cut_to) = past.cut.map(|cut| (cut.from, cut.to)).unzip();
    }
}

/// A key's remaining budget at a rate.
///
/// Calculated from the latest charge that any replica knows, and the units drained since; of two charges almost at once, the
/// earlier may count. It excludes charges of
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
    /// Number of slots that it asked for.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: u32,
    /// Under a [fair](crate::Limit::fair) limit, its tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantDigest>,
    /// The tenant's name: see [`TenantRow::tenant_text`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_text: Option<String>,
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

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
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
