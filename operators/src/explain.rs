//! The prospects of a caller's next request, derived from the answers of the replicas and the store.

use std::collections::HashMap;
use std::collections::HashSet;

use super::ledger::LedgerLook;
use super::{
    BudgetRow, KeyRow, LimitRow, PaceRow, PauseRow, PermitRow, PermitState, TenantRow,
    answer::{Answers, Explanation, UnclaimedRow, Verdict},
    changes::Overrides,
    error::OperateError,
    operator::{Access, Operator, no_answer, shown, too_often},
};
use tower_turnstile::{
    Key, Mode,
    operate::seam::layout::{ID_CHARS, ramped},
    operate::{KeyDigest, Target, TenantDigest},
};

impl Operator {
    /// Explains what would happen to a request of this caller now, according to the replicas and the store. Without a key:
    /// under a limit that all callers share.
    ///
    /// The method asks four questions one after another, and a fifth under a [fair](tower_turnstile::Limit::fair) limit, so the parts
    /// may stem from different moments. A value declared for this caller alone is known only while the caller is in use. A request
    /// whose caller shortens its wait ([`Scope::wait_by`](tower_turnstile::Scope::wait_by)) may be refused where this one waits.
    ///
    /// # Errors
    ///
    /// See [`permits`](Self::permits); [`OperateErrorKind::Value`](super::OperateErrorKind::Value) if no key is given and
    /// the replicas know keys of single callers;
    /// [`OperateErrorKind::Busy`](super::OperateErrorKind::Busy) if the replicas are asked too often;
    /// and [`OperateErrorKind::NoAnswer`](super::OperateErrorKind::NoAnswer) if the only replicas that may have the limit do not
    /// answer, or there is no replica.
    pub async fn explain(
        &self,
        limit: &str,
        key: impl Into<Option<KeyDigest>>,
    ) -> Result<Explanation, OperateError> {
        let given = key.into();
        let key = given.unwrap_or_else(|| KeyDigest::of(limit, Key::SHARED));
        let mut permits = self.permits(limit, Some(key)).await?;
        let refusals = self.refusals(limit, Some(key)).await?;
        let mut keys = self.keys(limit, Some(key)).await?;
        let mut limits: Answers<LimitRow> = self.ask_limit(limit).await?.rows(limit);
        let row = limits.rows.pop();
        let tenants = if row.as_ref().is_some_and(|row| row.fair) {
            Some(self.tenants(limit, Some(key)).await?)
        } else {
            None
        };
        let of_tenants = tenants.as_ref().map_or(&[][..], |tenants| &tenants.busy);
        let busy = [&permits.busy, &refusals.busy, &keys.busy, &limits.busy];
        // A row missing from one answer would look like an unclaimed slot.
        if busy.iter().any(|busy| !busy.is_empty()) || !of_tenants.is_empty() {
            return Err(too_often());
        }
        let row = row.ok_or_else(|| no_answer(limit, &limits))?;
        if given.is_none() && !row.shared && row.keys > 0 {
            let limit = shown(limit);
            let fault = format!("limit `{limit}` counts by key: name the caller's key");
            return Err(OperateError::value(fault));
        }
        let own = keys.rows.pop();
        let (max, pace) = match &own {
            Some(own) => (own.max, own.pace.clone()),
            None => self.unused(&row, key).await,
        };
        let usage = self.usage(key, &permits, own.as_ref()).await?;
        let verdict = usage.verdict(&row, max, own.as_ref());
        count_ahead(&mut permits.rows, tenants.as_ref());
        permits.miss_those_of(&refusals);
        permits.miss_those_of(&keys);
        permits.miss_those_of(&limits);
        if let Some(tenants) = &tenants {
            permits.miss_those_of(tenants);
        }
        Ok(Explanation {
            limit: row,
            key,
            max,
            in_use: usage.in_use,
            waiting: usage.waiting,
            budget: own.as_ref().and_then(|own| own.budget),
            pause: usage.pause,
            pace,
            verdict,
            permits,
            tenants,
            unclaimed: usage.unclaimed,
            refusals,
        })
    }

    /// The value of a key that no replica uses, and how an adaptive limit has found it. Without the right to read the record or
    /// the state, as if there were none.
    async fn unused(&self, row: &LimitRow, key: KeyDigest) -> (u32, Option<PaceRow>) {
        let overrides = self.record().await.map(Overrides::from).unwrap_or_default();
        let (mut max, mut pace) = (row.max, row.pace.clone().filter(|_| !self.is_here()));
        if let Some(pace) = &mut pace {
            // What the replicas know is of other keys.
            max = if row.shared { pace.declared } else { max };
            (pace.declared, pace.cuts, pace.overloaded) = (max, 0, 0);
            self.read_paces([(key, pace, Some(&mut max))].into_iter())
                .await;
        }
        let set = match &pace {
            Some(_) => overrides.value_of(&row.limit, key),
            // The limit's value has what operators have set for it.
            None => overrides.value(&Target::digest(&row.limit, key)),
        };
        (set.unwrap_or(max), pace)
    }

    /// The usage of a key, according to the store; in memory, according to this process.
    async fn usage(
        &self,
        key: KeyDigest,
        permits: &Answers<PermitRow>,
        own: Option<&KeyRow>,
    ) -> Result<KeyUsage, OperateError> {
        match self.access() {
            Access::Here(_) => Ok(KeyUsage::of(own)),
            Access::Store(remote) => {
                let ledger = remote.ledger(key).await?;
                Ok(KeyUsage::in_store(ledger, permits, own))
            }
        }
    }
}

/// The usage of a key: units, waiters, holders unknown to all replicas, and its pause.
pub(super) struct KeyUsage {
    in_use: u32,
    waiting: u32,
    unclaimed: Vec<UnclaimedRow>,
    pause: Option<PauseRow>,
    /// Time since the end of a pause, in milliseconds; known from the store, until the ramp is over.
    ramp_ms: Option<u64>,
}

impl KeyUsage {
    /// In memory: according to this process. The list of permits may lack some.
    fn of(own: Option<&KeyRow>) -> Self {
        Self {
            in_use: own.map_or(0, |own| own.held as u32),
            waiting: own.map_or(0, |own| own.waiting as u32),
            unclaimed: Vec::new(),
            pause: own.and_then(|own| own.pause.clone()),
            ramp_ms: None,
        }
    }

    pub(super) fn in_store(
        ledger: LedgerLook,
        permits: &Answers<PermitRow>,
        own: Option<&KeyRow>,
    ) -> Self {
        let known = permits.rows.iter().map(|row| {
            let mut name = row.id.to_string();
            name.truncate(ID_CHARS);
            name
        });
        let known: HashSet<String> = known.collect();
        let unclaimed = ledger.holders.into_iter().filter_map(|(id, until_ms)| {
            let ends_in_ms = (until_ms as u64).saturating_sub(ledger.now_ms);
            // A heavy permit has one member per unit; only the first is a plain name, the others are longer.
            let is_name = id.len() == ID_CHARS;
            let id = String::from_utf8_lossy(&id).into_owned();
            (is_name && !known.contains(&id)).then_some(UnclaimedRow { id, ends_in_ms })
        });
        let pause_end_ms = ledger.pause_end_ms;
        let left_ms = pause_end_ms.map(|end_ms| end_ms.saturating_sub(ledger.now_ms));
        let known = own.and_then(|own| own.pause.as_ref());
        let paused_by = known.map(|known| known.paused_by.clone());
        Self {
            in_use: ledger.in_use,
            waiting: ledger.waiting,
            pause: left_ms
                .filter(|left_ms| *left_ms > 0)
                .map(|left_ms| PauseRow {
                    pause_ends_in_ms: left_ms,
                    paused_by: paused_by.unwrap_or_default(),
                }),
            ramp_ms: pause_end_ms.map(|end_ms| ledger.now_ms.saturating_sub(end_ms)),
            // If answers were truncated, the other holders are unknown rather than unclaimed.
            unclaimed: match permits.left_out {
                0 => unclaimed.collect(),
                _ => Vec::new(),
            },
        }
    }

    /// The outcome of a request now. `own`: the key's state in the replicas.
    fn verdict(&self, limit: &LimitRow, max: u32, own: Option<&KeyRow>) -> Option<Verdict> {
        let in_force = match (&self.pause, self.ramp_ms) {
            (Some(_), _) => 0,
            (None, Some(ramp_ms)) => ramped(max, 0, ramp_ms),
            (None, None) => max,
        };
        let is_recovering = own.is_some_and(|own| own.recovering);
        let budget = own.and_then(|own| own.budget);
        match limit.period_ms {
            _ if limit.paused => Some(Verdict::Paused),
            Some(period_ms) => budget.map(|budget| rate_verdict(limit, (max, period_ms), &budget)),
            None => match verdict(limit, (max, in_force), self.in_use, self.waiting) {
                _ if is_recovering && limit.mode == Mode::Enforce.as_str() => {
                    Some(Verdict::Recovering)
                }
                Verdict::Full if self.pause.is_some() => Some(Verdict::Paused),
                verdict => Some(verdict),
            },
        }
    }
}

/// Counts for each waiter the requests of its tenant that wait before it: all that wait, except those known to be
/// younger. Rows are sorted by age, and the youngest may be left out. Replicas may be missing from the tenant's count.
fn count_ahead(permits: &mut [PermitRow], tenants: Option<&Answers<TenantRow>>) {
    let rows = tenants.iter().flat_map(|tenants| &tenants.rows);
    let mut left: HashMap<TenantDigest, usize> =
        rows.map(|row| (row.tenant, row.waiting)).collect();
    let waiters = permits.iter_mut().rev();
    for row in waiters.filter(|row| row.state == PermitState::Waiting) {
        let left = row.tenant.and_then(|tenant| left.get_mut(&tenant));
        row.tenant_ahead = left.map(|left| {
            *left = left.saturating_sub(1);
            *left
        });
    }
}

/// As for a request of one unit, which waits behind at most `max_waiters` others.
fn rate_verdict(limit: &LimitRow, (max, period_ms): (u32, u64), budget: &BudgetRow) -> Verdict {
    let of_all = period_ms.saturating_mul(limit.max_waiters.into());
    let wait_ms = limit.wait_ms.min(of_all / u64::from(max.max(1)));
    if budget.remaining > 0 || limit.mode != Mode::Enforce.as_str() {
        Verdict::Admitted
    } else if budget.next_ms <= wait_ms {
        Verdict::Delayed(budget.next_ms)
    } else {
        Verdict::TooSoon(budget.next_ms)
    }
}

/// `in_force`: the part of the value that a pause and its ramp leave.
fn verdict(limit: &LimitRow, (max, in_force): (u32, u32), in_use: u32, waiting: u32) -> Verdict {
    let is_free = in_use < in_force && waiting == 0;
    if is_free || limit.mode != Mode::Enforce.as_str() {
        Verdict::Admitted
    } else if limit.wait_ms == 0 || max == 0 {
        Verdict::Full
    } else if waiting >= limit.max_waiters {
        Verdict::QueueFull
    } else {
        Verdict::Queued(waiting + 1)
    }
}
