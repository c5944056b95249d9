//! Answers operators on behalf of this process.

use std::{
    cmp::Reverse,
    collections::HashSet,
    sync::{Arc, OnceLock, Weak},
};

use serde::Serialize;
use tokio::time::Instant;

use super::{
    answer::{BudgetRow, KeyRow, LimitRow, PermitRow, PermitState, RefusalRow, ReplicaRow},
    changes::Revocation,
    digest::KeyDigest,
    hook::Hook,
    revoke::{PermitSelector, revoke},
    walk::{Keys, LimitCount, LimitCounts, Permits, Which, walk},
    wire::{Answer, Applied, Body, Of, Question, RevokeOrder, VERSION},
};
use crate::{
    keeper::Keepers, key::Key, leases::Label, limit::LimitId, operable::MAX_REFUSALS,
    permit_id::PermitId,
};

/// Maximum size of an answer, in bytes.
pub(super) const MAX_ANSWER: usize = 16 * 1_024;
/// Maximum size of an answer without its rows, in bytes: labels may be escaped.
const HEADER: usize = 1_024;

/// Answers for one process.
pub(super) struct Desk {
    pub(super) keepers: Weak<Keepers>,
    /// One id for all parts of a cluster.
    replica: String,
    label: String,
    parts: Vec<String>,
    shows_keys: bool,
    since: Instant,
    /// The record of overrides, as last read by this process.
    pub(super) record: OnceLock<Arc<dyn Hook>>,
}

impl Desk {
    pub(super) fn new(keepers: &Arc<Keepers>, label: String, shows_keys: bool) -> Self {
        Self {
            replica: keepers.replica().text(),
            keepers: Arc::downgrade(keepers),
            parts: keepers.replicas().skip(1).map(|part| part.text()).collect(),
            label,
            shows_keys,
            since: Instant::now(),
            record: OnceLock::new(),
        }
    }

    pub(super) fn replica(&self) -> &str {
        &self.replica
    }

    pub(super) fn label(&self) -> &str {
        &self.label
    }

    /// `None` if the limiter is gone or the question has no answer here.
    pub(super) async fn answer(&self, number: u64, question: &Question) -> Option<Answer> {
        let keepers = self.keepers.upgrade()?;
        let mut left_out = 0;
        let body = match question {
            Question::Replicas => Body::Replicas(vec![self.itself(&keepers)]),
            Question::Limits => Body::Limits(fitting(limits(&keepers).await, &mut left_out)),
            Question::Permits(of) => match keepers.limit_id(&of.limit) {
                Some(limit) => {
                    let (rows, more) = self.permits(&keepers, limit, of).await;
                    left_out = more;
                    Body::Permits(fitting(rows, &mut left_out))
                }
                None => Body::UnknownLimit,
            },
            Question::Keys(of) => match keepers.limit_id(&of.limit) {
                Some(limit) => {
                    let (rows, more) = self.keys(&keepers, limit, of).await;
                    left_out = more;
                    Body::Keys(fitting(rows, &mut left_out))
                }
                None => Body::UnknownLimit,
            },
            Question::Refusals(of) => match keepers.limit_id(&of.limit) {
                Some(limit) => {
                    Body::Refusals(fitting(self.refusals(&keepers, limit, of), &mut left_out))
                }
                None => Body::UnknownLimit,
            },
            Question::Overrides(_) => {
                let record = self.record.get();
                let unrecorded = record.map(|record| record.unrecorded());
                Body::Overrides(Applied {
                    token: record.and_then(|record| record.token()),
                    unrecorded: fitting(unrecorded.unwrap_or_default(), &mut left_out),
                })
            }
            Question::Revoke(order) => {
                Body::Permits(fitting(self.revoke(&keepers, order).await, &mut left_out))
            }
            Question::ReadAgain => return None,
        };
        Some(Answer {
            left_out,
            ..self.with(number, body)
        })
    }

    /// The answer to a question that comes too soon after others.
    pub(super) fn busy(&self, number: u64) -> Answer {
        self.with(number, Body::Busy)
    }

    fn with(&self, number: u64, body: Body) -> Answer {
        Answer {
            v: VERSION,
            number,
            replica: self.replica.clone(),
            label: self.label.clone(),
            parts: self.parts.clone(),
            left_out: 0,
            body,
        }
    }

    fn itself(&self, keepers: &Keepers) -> ReplicaRow {
        let status = keepers.status();
        let (lease, waiter_ttl) = keepers.lease_and_waiter_ttl();
        ReplicaRow {
            replica: self.replica.clone(),
            label: self.label.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.since.elapsed().as_millis() as u64,
            held: status.held,
            waiting: status.waiting,
            store_up: status.store_up,
            lease_ms: lease.as_millis() as u64,
            waiter_ttl_ms: waiter_ttl.as_millis() as u64,
            token: self.record.get().and_then(|record| record.token()),
        }
    }

    fn key_text(&self, key: &Key) -> Option<String> {
        let is_shown = self.shows_keys || *key == Key::SHARED;
        is_shown.then(|| key.shown())
    }

    async fn permits(&self, keepers: &Keepers, limit: LimitId, of: &Of) -> (Vec<PermitRow>, u64) {
        let mut permits = Permits::new(limit, of);
        walk(keepers, &mut permits).await;
        let now = Instant::now();
        let (seen, left_out) = permits.finish();
        let rows = seen.into_iter().map(|permit| PermitRow {
            limit: String::new(),
            key: KeyDigest::of(&of.limit, &permit.key),
            key_text: self.key_text(&permit.key),
            id: PermitId::new(permit.member, permit.tenure),
            state: if permit.waits {
                PermitState::Waiting
            } else {
                PermitState::Held
            },
            weight: permit.member.weight(),
            age_ms: age_ms(permit.since, now),
            place: permit.place,
            label: text_of(permit.label),
            replica: String::new(),
            replica_label: String::new(),
        });
        (rows.collect(), left_out)
    }

    async fn revoke(&self, keepers: &Keepers, order: &RevokeOrder) -> Vec<PermitRow> {
        let selector = match &order.whose {
            Revocation::Permit(id) => PermitSelector::Among(HashSet::from([*id])),
            Revocation::Key { limit, key } => match keepers.limit_id(limit) {
                Some(number) => {
                    let (limit, key) = (limit.clone(), Some(*key));
                    PermitSelector::OfKey(Which::new(number, &Of { limit, key }))
                }
                None => return Vec::new(),
            },
            Revocation::Replica(id) if *id == self.replica => PermitSelector::Everybody,
            Revocation::Replica(_) => return Vec::new(),
        };
        let revoked = revoke(keepers, selector).await;
        if !revoked.is_empty() {
            tracing::warn!(
                replica = self.label,
                permits = revoked.len(),
                whose = ?order.whose,
                author = order.author,
                reason = order.reason,
                "an operator has revoked permits"
            );
        }
        let limits = keepers.limits();
        let now = Instant::now();
        let rows = revoked.into_iter().map(|(held, state)| {
            let limit = limits[held.limit.0].limit.name();
            let id = held.id;
            tracing::debug!(limit, %id, ?state, "revoked");
            PermitRow {
                limit: limit.to_owned(),
                key: KeyDigest::of(limit, &held.key),
                key_text: self.key_text(&held.key),
                id,
                state,
                weight: id.member().weight(),
                age_ms: age_ms(held.since, now),
                place: 0,
                label: text_of(held.lease.label(id.tenure())),
                replica: String::new(),
                replica_label: String::new(),
            }
        });
        rows.collect()
    }

    async fn keys(&self, keepers: &Keepers, limit: LimitId, of: &Of) -> (Vec<KeyRow>, u64) {
        let mut keys = Keys::new(limit, of);
        walk(keepers, &mut keys).await;
        let now = Instant::now();
        let (seen, left_out) = keys.finish();
        let rows = seen.into_iter().map(|sum| KeyRow {
            limit: String::new(),
            key: KeyDigest::of(&of.limit, &sum.key),
            key_text: self.key_text(&sum.key),
            held: sum.held,
            waiting: sum.waiting,
            max: sum.max,
            oldest_wait_ms: sum.oldest.map(|oldest| age_ms(oldest, now)),
            replicas: 0,
            budget: sum.budget.map(|budget| BudgetRow {
                remaining: budget.remaining,
                burst: budget.burst,
                next_ms: budget.next_us.div_ceil(1_000),
                charged_ms: age_ms(budget.at, now),
            }),
        });
        (rows.collect(), left_out)
    }

    /// Newest first.
    fn refusals(&self, keepers: &Keepers, limit: LimitId, of: &Of) -> Vec<RefusalRow> {
        let now = Instant::now();
        let mut notes = keepers.refusals(limit);
        notes.sort_by_key(|note| Reverse(note.at));
        let rows = notes.into_iter().map(|note| {
            let key = note.key.as_ref();
            RefusalRow {
                limit: String::new(),
                key: key.map(|key| KeyDigest::of(&of.limit, key)),
                key_text: key.and_then(|key| self.key_text(key)),
                reason: note.kind.as_str().to_owned(),
                age_ms: age_ms(note.at, now),
                max: note.max,
                in_use: note.in_use,
                waiting: note.waiting,
                waited_ms: note.waited.as_millis() as u64,
                label: text_of(note.label),
                replica: String::new(),
                replica_label: String::new(),
            }
        });
        let of_key = |row: &RefusalRow| of.key.is_none() || row.key == of.key;
        rows.filter(of_key).take(MAX_REFUSALS).collect()
    }
}

async fn limits(keepers: &Keepers) -> Vec<LimitRow> {
    let mut counts = LimitCounts::default();
    walk(keepers, &mut counts).await;
    let now = Instant::now();
    let limits = keepers.limits();
    counts
        .by_limit
        .resize_with(limits.len(), LimitCount::default);
    let rows = limits.into_iter().zip(counts.by_limit);
    rows.map(|(look, count)| {
        let limit = look.limit;
        LimitRow {
            limit: limit.name().to_owned(),
            max: limit.max(),
            declared_max: look.declared_max,
            paused: look.is_paused,
            period_ms: limit.period().map(|period| period.as_millis() as u64),
            unit: limit.period().map(|_| limit.counted().to_string()),
            mode: limit.current_mode().as_str().to_owned(),
            wait_ms: limit.wait().as_millis() as u64,
            max_waiters: limit.waiters(),
            held: count.held,
            waiting: count.waiting + look.delayed,
            keys: count.keys,
            shared: count.is_shared(),
            oldest_wait_ms: count.oldest.map(|oldest| age_ms(oldest, now)),
            differs: false,
        }
    })
    .collect()
}

fn text_of(label: Option<Label>) -> String {
    label.map(|label| label.to_string()).unwrap_or_default()
}

fn age_ms(since: Instant, now: Instant) -> u64 {
    now.saturating_duration_since(since).as_millis() as u64
}

/// Drops the last rows that do not fit into an answer, and counts them.
fn fitting<T: Serialize>(mut rows: Vec<T>, left_out: &mut u64) -> Vec<T> {
    let mut bytes = HEADER;
    let fits = rows.iter().take_while(|row| {
        // Includes its comma.
        bytes += serde_json::to_vec(row).map_or(MAX_ANSWER, |text| text.len() + 1);
        bytes <= MAX_ANSWER
    });
    let fits = fits.count();
    *left_out += (rows.len() - fits) as u64;
    rows.truncate(fits);
    rows
}
