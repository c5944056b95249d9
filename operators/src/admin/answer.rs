//! The answers for each path.

use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use tokio::time::Instant;

use super::{
    json::to_json,
    problem::Cause,
    view::Latest,
    views::{Details, Overview, Subject},
};
use crate::{
    Answers, BudgetRow, Explanation, KeyDigest, KeyRow, LimitRow, LogEntry, OperateErrorKind,
    Override, PaceRow, PauseRow, PermitRow, PermitState, RefusalRow, ReplicaRow, Revoked,
    TenantRow, UnclaimedRow, Verdict,
};

/// Maximum number of rows in a list.
pub(super) const MAX_ROWS: usize = 500;
/// Default number of rows in a list.
pub(super) const ROWS: usize = 100;

/// The answers with some of their rows; the others count as left out.
fn some<T>(answers: &Answers<T>, keeps: impl FnMut(&&T) -> bool) -> Answers<&T> {
    let rows: Vec<&T> = answers.rows.iter().filter(keeps).collect();
    let left_out = (answers.rows.len() - rows.len()) as u64;
    Answers {
        rows,
        answered: answers.answered,
        replicas: answers.replicas,
        missing: cut(&answers.missing),
        busy: cut(&answers.busy),
        left_out: answers.left_out.saturating_add(left_out),
    }
}

fn first<T>(answers: &Answers<T>, count: usize) -> Answers<&T> {
    let mut left = count;
    some(answers, |_| take(&mut left))
}

fn take(left: &mut usize) -> bool {
    let takes = *left > 0;
    *left = left.saturating_sub(1);
    takes
}

fn cut(labels: &[String]) -> Vec<String> {
    labels[..labels.len().min(ROWS)].to_vec()
}

/// When the replicas were asked, and why the answers are not newer.
#[derive(Serialize)]
struct Age {
    age_ms: u64,
    problem: Option<Cause>,
}

impl Age {
    fn of<T>(latest: &Latest<T>) -> Self {
        Self {
            age_ms: Instant::now().duration_since(latest.asked).as_millis() as u64,
            problem: latest.failed.as_ref().map(Cause::from),
        }
    }
}

#[derive(Serialize)]
struct StatusAnswer<'a> {
    #[serde(flatten)]
    age: Age,
    version: &'static str,
    /// The author of changes by requests like this one, if allowed.
    author: Option<String>,
    store: StoreSummary,
    replicas: Answers<&'a ReplicaRow>,
    limits: Answers<&'a LimitRow>,
    overrides: Option<OverridesAnswer<'a>>,
    /// Why the overrides are unknown.
    overrides_problem: Option<Cause>,
    /// The namespaces in use in the store, if no replica answered. `null` if unknown.
    namespaces: Option<&'a [String]>,
}

/// Whether the store answers.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum StoreSummary {
    Up,
    /// Only some replicas get answers.
    Partly,
    Down,
}

#[derive(Serialize)]
struct OverridesAnswer<'a> {
    rows: &'a [Override],
    read_at_ms: u64,
    ignored: usize,
}

pub(super) fn status(latest: &Latest<Overview>, author: Option<String>) -> Bytes {
    let Overview {
        replicas,
        limits,
        overrides,
        namespaces,
    } = &*latest.data;
    to_json(&StatusAnswer {
        age: Age::of(latest),
        version: env!("CARGO_PKG_VERSION"),
        author,
        store: store_summary(latest),
        replicas: first(replicas, MAX_ROWS),
        limits: first(limits, MAX_ROWS),
        overrides: overrides.as_ref().ok().map(|overrides| OverridesAnswer {
            rows: overrides.all(),
            read_at_ms: overrides.read_at_ms(),
            ignored: overrides.ignored(),
        }),
        overrides_problem: overrides.as_ref().err().map(Cause::from),
        namespaces: namespaces.as_deref(),
    })
}

fn store_summary(latest: &Latest<Overview>) -> StoreSummary {
    let is_down = |kind| kind == OperateErrorKind::Unavailable;
    let mut replicas = latest.data.replicas.rows.iter();
    match &latest.failed {
        Some(error) if is_down(error.kind()) => StoreSummary::Down,
        _ if replicas.clone().all(|replica| replica.store_up) => StoreSummary::Up,
        _ if replicas.any(|replica| replica.store_up) => StoreSummary::Partly,
        _ => StoreSummary::Down,
    }
}

#[derive(Serialize)]
struct DetailsAnswer<'a> {
    #[serde(flatten)]
    age: Age,
    limit: &'a str,
    key: Option<KeyDigest>,
    keys: Answers<&'a KeyRow>,
    permits: Answers<&'a PermitRow>,
    refusals: Answers<&'a RefusalRow>,
    tenants: Option<Answers<&'a TenantRow>>,
}

/// At most `count` keys, holders, waiters, refusals and tenants.
pub(super) fn details(latest: &Latest<Details>, subject: &Subject, count: usize) -> Bytes {
    let Details {
        keys,
        permits,
        refusals,
        tenants,
    } = &*latest.data;
    let tenants = tenants.as_ref();
    let (mut holders, mut waiters) = (count, count);
    let permits = some(permits, |row| match row.state {
        PermitState::Held => take(&mut holders),
        PermitState::Waiting => take(&mut waiters),
        PermitState::Ended => false,
    });
    to_json(&DetailsAnswer {
        age: Age::of(latest),
        limit: &subject.0,
        key: subject.1,
        keys: first(keys, count),
        permits,
        refusals: first(refusals, count),
        tenants: tenants.map(|tenants| first(tenants, count)),
    })
}

#[derive(Serialize)]
struct ExplanationAnswer<'a> {
    #[serde(flatten)]
    age: Age,
    limit: &'a str,
    mode: &'a str,
    key: KeyDigest,
    max: u32,
    in_use: u32,
    waiting: u32,
    verdict: Option<&'static str>,
    /// The place in the queue of such a request.
    place: Option<u32>,
    /// How long a rate would delay or refuse it.
    wait_ms: Option<u64>,
    /// The unit of a rate.
    unit: Option<&'a str>,
    budget: Option<BudgetRow>,
    pause: Option<&'a PauseRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pace: Option<&'a PaceRow>,
    permits: Answers<&'a PermitRow>,
    /// Under a fair limit.
    tenants: Option<Answers<&'a TenantRow>>,
    unclaimed: &'a [UnclaimedRow],
    refusals: Answers<&'a RefusalRow>,
}

/// At most `count` permits, tenants, refusals, and slots that no replica reports.
pub(super) fn explanation(latest: &Latest<Explanation>, count: usize) -> Bytes {
    let why = &*latest.data;
    to_json(&ExplanationAnswer {
        age: Age::of(latest),
        limit: &why.limit.limit,
        mode: &why.limit.mode,
        key: why.key,
        max: why.max,
        in_use: why.in_use,
        waiting: why.waiting,
        verdict: why.verdict.map(Verdict::as_str),
        place: why.verdict.and_then(Verdict::place),
        wait_ms: why.verdict.and_then(Verdict::wait_ms),
        unit: why.limit.unit.as_deref(),
        budget: why.budget,
        pause: why.pause.as_ref(),
        pace: why.pace.as_ref(),
        permits: first(&why.permits, count),
        tenants: { why.tenants.as_ref() }.map(|tenants| first(tenants, count)),
        unclaimed: &why.unclaimed[..why.unclaimed.len().min(count)],
        refusals: first(&why.refusals, count),
    })
}

#[derive(Serialize)]
struct LogAnswer<'a> {
    #[serde(flatten)]
    age: Age,
    rows: &'a [LogEntry],
}

pub(super) fn log(latest: &Latest<Vec<LogEntry>>) -> Bytes {
    to_json(&LogAnswer {
        age: Age::of(latest),
        rows: &latest.data,
    })
}

/// The result of an order to revoke permits.
pub(super) fn revoked(revoked: &Revoked) -> Bytes {
    to_json(&json!({
        "outcome": "revoked",
        "ended": revoked.ended,
        "running": revoked.running,
        "permits": first(&revoked.permits, MAX_ROWS),
    }))
}

/// The result of an order to end pauses: the keys as they were before.
pub(super) fn resumed(answers: &Answers<KeyRow>) -> Bytes {
    to_json(&json!({"outcome": "resumed", "keys": first(answers, MAX_ROWS)}))
}
