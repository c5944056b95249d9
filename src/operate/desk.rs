//! Answers operators on behalf of this process.

use std::{
    cmp::Reverse,
    sync::{Arc, Weak},
};

use serde::Serialize;
use tokio::time::Instant;

use super::{
    follow::{Applied, Follower},
    revoke::revoke,
    rows::{
        BudgetRow, KeyRow, LimitRow, PaceRow, PauseRow, PermitRow, PermitState, RefusalRow,
        ReplicaRow, TenantRow,
    },
    walk::{self, KeySum, LimitCount, SeenPermit},
    wire::{Answer, Body, Message, Question, Revocation},
};
use crate::{
    keeper::KeeperHandle,
    key::Key,
    leases::Label,
    limiter::Limiter,
    operable::{MAX_REFUSALS, PaceLook, Which},
    overrides::{Change, Changed, KeyDigest, Logged, Record, Target},
};

/// Maximum size of an answer without its rows, in bytes: labels may be escaped.
const HEADER: usize = 1_024;

/// Answers for one process.
#[derive(Debug)]
pub struct Desk {
    pub(super) keeper: Weak<KeeperHandle>,
    pub(super) replica: String,
    pub(super) label: String,
    shows_keys: bool,
    since: Instant,
    /// The record of overrides, as last read by this process.
    pub(super) follower: Option<Follower>,
}

impl Desk {
    /// Answers for a limiter, until it is gone.
    pub fn of(limiter: &Limiter) -> Self {
        let (keeper, identity) = (limiter.keeper(), limiter.identity());
        Self {
            replica: keeper.replica().text(),
            keeper: Arc::downgrade(keeper),
            label: identity.label(),
            shows_keys: identity.shows_keys,
            since: Instant::now(),
            follower: None,
        }
    }

    /// `None` if the limiter is gone or the question has no answer here.
    pub async fn answer(&self, number: u64, question: &Question) -> Option<Answer> {
        let keeper = self.keeper.upgrade()?;
        let (body, left_out) = match question {
            Question::Replicas => (Body::Replicas(vec![self.itself(&keeper)]), 0),
            Question::Limits(name) => fitting(Body::Limits, limits(&keeper, name.as_deref()).await),
            Question::Permits(of) => fitting(Body::Permits, self.permits(&keeper, of).await),
            Question::Keys(of) => fitting(Body::Keys, self.keys(&keeper, of).await),
            Question::Refusals(of) => fitting(Body::Refusals, self.refusals(&keeper, of)),
            Question::Tenants(of) if !is_fair(&keeper, of) => (Body::NotFair, 0),
            Question::Tenants(of) => fitting(Body::Tenants, self.tenants(&keeper, of).await),
            Question::Overrides(_) => {
                let Applied { token, unrecorded } = self.applied();
                let applied = |unrecorded| Body::Overrides { token, unrecorded };
                fitting(applied, Some((unrecorded, 0)))
            }
            Question::Revoke { of, author, reason } => {
                let permits = self.revoke(&keeper, of, (author, reason)).await;
                let runs = |row: &&PermitRow| row.state == PermitState::Held;
                let running = permits.iter().filter(runs).count() as u64;
                let revoked = |permits| Body::Revoked { running, permits };
                fitting(revoked, Some((permits, 0)))
            }
            Question::Resume { of, author, reason } => {
                let keys = self.resume(&keeper, of, (author, reason)).await;
                fitting(Body::Keys, keys)
            }
            Question::ReadAgain => return None,
        };
        Some(self.with(number, body, left_out))
    }

    /// Whether the limiter is gone.
    pub fn is_gone(&self) -> bool {
        self.keeper.strong_count() == 0
    }

    /// The record of overrides of a limiter without a store. `None` if the store has it.
    pub fn record(&self) -> Option<Record> {
        Some(self.keeper.upgrade()?.local_record()?.read())
    }

    /// The log of changes of a limiter without a store, newest first.
    pub fn log(&self) -> Option<Vec<Logged>> {
        Some(self.keeper.upgrade()?.local_record()?.log())
    }

    /// Changes the record of a limiter without a store.
    pub fn change(&self, change: &Change) -> Option<Changed> {
        let keeper = self.keeper.upgrade()?;
        let local = keeper.local_record()?;
        let changed = local.change(change);
        // Of simultaneous changes, the last one recorded must also be applied last.
        loop {
            let record = local.read();
            keeper.steer(record.in_force(Instant::now()));
            if local.read().token() == record.token() {
                return Some(changed);
            }
        }
    }

    /// The overrides in force in this process; none if no store records them for it.
    pub(super) fn applied(&self) -> Applied {
        let follower = self.follower.as_ref();
        follower.map(Follower::applied).unwrap_or_default()
    }

    pub(super) fn with(&self, number: u64, body: Body, left_out: u64) -> Answer {
        Answer {
            v: Message::VERSION,
            number,
            replica: self.replica.clone(),
            label: self.label.clone(),
            left_out,
            body,
        }
    }

    fn itself(&self, keeper: &KeeperHandle) -> ReplicaRow {
        let status = keeper.status();
        let (lease, waiter_ttl) = keeper.lease_and_waiter_ttl();
        ReplicaRow {
            replica: self.replica.clone(),
            label: self.label.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.since.elapsed().as_millis() as u64,
            held: status.held,
            waiting: status.waiting,
            store_up: status.store_up,
            recovering: keeper.is_recovering(),
            lease_ms: lease.as_millis() as u64,
            waiter_ttl_ms: waiter_ttl.as_millis() as u64,
            token: self.applied().token,
        }
    }

    fn key_text(&self, key: &Key) -> Option<String> {
        let is_shown = self.shows_keys || *key == Key::SHARED;
        is_shown.then(|| key.shown())
    }

    /// `limit`: the limit's name.
    fn permit_row(&self, limit: &str, seen: SeenPermit, state: PermitState) -> PermitRow {
        let SeenPermit { key, entry, .. } = seen;
        let tenant = entry.tenant.as_ref();
        PermitRow {
            limit: limit.to_owned(),
            key: KeyDigest::of(limit, &key),
            key_text: self.key_text(&key),
            id: entry.id,
            state,
            weight: entry.id.member().weight(),
            age_ms: age_ms(entry.since, Instant::now()),
            place: entry.place,
            tenant: tenant.map(|tenant| tenant.id.into()),
            tenant_text: tenant.and_then(|tenant| self.key_text(&tenant.name)),
            tenant_ahead: None,
            label: text_of(entry.lease.label(entry.id.tenure())),
            replica: String::new(),
            replica_label: String::new(),
        }
    }

    /// `None` if the limit is unknown, as in the following functions.
    async fn permits(&self, keeper: &KeeperHandle, of: &Target) -> Option<(Vec<PermitRow>, u64)> {
        let (seen, left_out) = walk::permits(keeper, &which(keeper, of)?).await;
        let row = |seen: SeenPermit| {
            let state = if seen.entry.waits {
                PermitState::Waiting
            } else {
                PermitState::Held
            };
            PermitRow {
                limit: String::new(),
                ..self.permit_row(&of.limit, seen, state)
            }
        };
        Some((seen.into_iter().map(row).collect(), left_out))
    }

    async fn revoke(
        &self,
        keeper: &KeeperHandle,
        of: &Revocation,
        (author, reason): (&str, &str),
    ) -> Vec<PermitRow> {
        let which = match of {
            Revocation::Permit(_) => Some(Which::All),
            Revocation::Key { limit, key } => which(keeper, &Target::digest(limit, *key)),
            Revocation::Replica(id) => (*id == self.replica).then_some(Which::All),
        };
        let Some(which) = which else {
            return Vec::new();
        };
        let only = match of {
            Revocation::Permit(id) => Some(*id),
            _ => None,
        };
        let revoked = revoke(keeper, &which, only).await;
        if !revoked.is_empty() {
            tracing::warn!(
                replica = self.label,
                permits = revoked.len(),
                whose = ?of,
                author,
                reason,
                "an operator has revoked permits"
            );
        }
        let limits = keeper.limits();
        let rows = revoked.into_iter().map(|(seen, state)| {
            let limit = limits[seen.limit.0].limit.name();
            tracing::debug!(limit, id = %seen.entry.id, ?state, "revoked");
            PermitRow {
                place: 0,
                ..self.permit_row(limit, seen, state)
            }
        });
        rows.collect()
    }

    async fn keys(&self, keeper: &KeeperHandle, of: &Target) -> Option<(Vec<KeyRow>, u64)> {
        let (seen, left_out) = walk::keys(keeper, &which(keeper, of)?).await;
        Some((self.key_rows(of, seen), left_out))
    }

    async fn tenants(&self, keeper: &KeeperHandle, of: &Target) -> Option<(Vec<TenantRow>, u64)> {
        let limit = keeper.limit_of(&of.limit)?;
        let mut key = None;
        let (seen, left_out) = walk::tenants(keeper, &which(keeper, of)?, &mut key).await;
        let ids: Vec<_> = seen.iter().map(|sum| sum.id).collect();
        let behind_us = key.map(|key| keeper.behind_us(limit, &key, &ids));
        let mut behind_us = behind_us.into_iter().flatten();
        let (overrides, now) = (keeper.overrides(), Instant::now());
        let rows = seen.into_iter().map(|sum| TenantRow {
            limit: String::new(),
            tenant: sum.id.into(),
            tenant_text: self.key_text(&sum.name),
            share: overrides.share_of(&of.limit, sum.id).unwrap_or(sum.share),
            held: sum.count.held,
            waiting: sum.count.waiting,
            oldest_wait_ms: sum.count.oldest.map(|oldest| age_ms(oldest, now)),
            replicas: 0,
            partial: false,
            debt_ms: behind_us.next().flatten().map(|us| us / 1_000),
        });
        Some((rows.collect(), left_out))
    }

    fn key_rows(&self, of: &Target, seen: Vec<KeySum>) -> Vec<KeyRow> {
        let now = Instant::now();
        let rows = seen.into_iter().map(|KeySum { queue, count }| KeyRow {
            limit: String::new(),
            key: KeyDigest::of(&of.limit, &queue.key),
            key_text: self.key_text(&queue.key),
            held: count.held,
            waiting: count.waiting,
            max: queue.max,
            oldest_wait_ms: count.oldest.map(|oldest| age_ms(oldest, now)),
            replicas: 0,
            partial: false,
            budget: queue.budget.map(|budget| BudgetRow {
                remaining: budget.remaining,
                burst: budget.burst,
                next_ms: budget.next_us.div_ceil(1_000),
                charged_ms: age_ms(budget.at, now),
            }),
            pause: queue.pause.map(|pause| PauseRow {
                pause_ends_in_ms: age_ms(now, pause.end),
                paused_by: if pause.own {
                    self.label.clone()
                } else {
                    String::new()
                },
            }),
            pace: queue.pace.as_ref().map(PaceRow::new),
            recovering: queue.recovering,
        });
        rows.collect()
    }

    /// Ends pauses, and returns their keys as they were before.
    async fn resume(
        &self,
        keeper: &KeeperHandle,
        of: &Target,
        (author, reason): (&str, &str),
    ) -> Option<(Vec<KeyRow>, u64)> {
        let limit = keeper.limit_of(&of.limit)?;
        let mut paused = walk::paused_keys(keeper, &which(keeper, of)?).await;
        // Some may have ended meanwhile.
        paused.retain(|sum| keeper.resume(limit, &sum.queue.key));
        if !paused.is_empty() {
            tracing::info!(
                replica = self.label,
                limit = of.limit,
                keys = paused.len(),
                author,
                reason,
                "an operator has ended pauses"
            );
        }
        Some((self.key_rows(of, paused), 0))
    }

    /// Newest first.
    fn refusals(&self, keeper: &KeeperHandle, of: &Target) -> Option<(Vec<RefusalRow>, u64)> {
        let now = Instant::now();
        let mut notes = keeper.refusals(keeper.limit_of(&of.limit)?);
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
                weight: note.weight,
                tenant: note.tenant.as_ref().map(|tenant| tenant.id.into()),
                tenant_text: note.tenant.and_then(|tenant| self.key_text(&tenant.name)),
                label: text_of(note.label),
                replica: String::new(),
                replica_label: String::new(),
            }
        });
        let of_key = |row: &RefusalRow| of.key.is_none() || row.key == of.key;
        Some((rows.filter(of_key).take(MAX_REFUSALS).collect(), 0))
    }
}

/// An unknown limit is not known to be unfair.
fn is_fair(keeper: &KeeperHandle, of: &Target) -> bool {
    let limit = keeper.updated(&of.limit);
    limit.is_none_or(|limit| limit.is_fair())
}

/// The queues and keys of a target. `None`: its limit is unknown.
fn which(keeper: &KeeperHandle, of: &Target) -> Option<Which> {
    Some(Which::Of {
        limit: keeper.limit_of(&of.limit)?,
        name: of.limit.clone(),
        key: of.key.map(|key| (key.bits(), key.to_string())),
    })
}

/// All limits, or the limit of this name.
async fn limits(keeper: &KeeperHandle, name: Option<&str>) -> Option<(Vec<LimitRow>, u64)> {
    let mut counts = walk::limits(keeper).await;
    let now = Instant::now();
    let limits = keeper.limits();
    counts.resize(limits.len(), LimitCount::default());
    let mut rows = limits.into_iter().zip(counts).collect::<Vec<_>>();
    rows.retain(|(look, _)| name.is_none_or(|name| look.limit.name() == name));
    if name.is_some() && rows.is_empty() {
        return None;
    }
    let rows = rows.into_iter().map(|(look, count)| {
        let limit = look.limit;
        let unused = (limit.adapt()).map(|bounds| PaceLook::new(bounds, limit.max()));
        LimitRow {
            limit: limit.name().to_owned(),
            max: count.shared_max().unwrap_or(limit.max()),
            declared_max: look.declared_max,
            paused: look.is_paused,
            period_ms: limit.period().map(|period| period.as_millis() as u64),
            unit: limit.unit_of_rate().map(str::to_owned),
            mode: limit.current_mode().as_str().to_owned(),
            wait_ms: limit.wait().as_millis() as u64,
            max_waiters: limit.waiters(),
            held: count.count.held,
            waiting: count.count.waiting + look.delayed,
            keys: count.keys,
            paused_keys: count.paused_keys,
            recovering: count.recovering,
            shared: count.is_shared(),
            fair: limit.is_fair(),
            oldest_wait_ms: count.count.oldest.map(|oldest| age_ms(oldest, now)),
            pace: (count.pace.or(unused)).as_ref().map(PaceRow::new),
            differs: false,
        }
    });
    Some((rows.collect(), 0))
}

fn text_of(label: Option<Label>) -> String {
    label.map(|label| label.to_string()).unwrap_or_default()
}

fn age_ms(since: Instant, now: Instant) -> u64 {
    now.saturating_duration_since(since).as_millis() as u64
}

/// An answer of this kind without the last rows that do not fit, and the number of rows left out.
fn fitting<T: Serialize>(
    kind: impl FnOnce(Vec<T>) -> Body,
    rows: Option<(Vec<T>, u64)>,
) -> (Body, u64) {
    let Some((mut rows, left_out)) = rows else {
        return (Body::UnknownLimit, 0);
    };
    let mut bytes = HEADER;
    let fits = rows.iter().take_while(|row| {
        // Includes its comma.
        bytes += serde_json::to_vec(row).map_or(Answer::MAX, |text| text.len() + 1);
        bytes <= Answer::MAX
    });
    let fits = fits.count();
    let dropped = (rows.len() - fits) as u64;
    rows.truncate(fits);
    (kind(rows), left_out + dropped)
}
