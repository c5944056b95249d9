//! The columns of each kind of row.

use tower_turnstile_operate::{
    BudgetRow, Finding, KeyDigest, KeyRow, LimitRow, PaceRow, PauseRow, PermitRow, RefusalRow,
    ReplicaRow, TenantDigest, TenantRow, UnclaimedRow,
};

use crate::{
    output::{Column, Row},
    text::duration,
};

/// The note on a row whose newcomers wait because permits return to a store that has lost its data.
const RECOVERING: &str = "recovering";

/// The caller of a row, as far as it may be shown; some refusals have none.
fn caller(key: Option<KeyDigest>, text: &Option<String>) -> String {
    match (key, text.as_deref()) {
        (None, _) => String::new(),
        (Some(_), Some("")) => "(all callers)".to_owned(),
        (Some(_), Some(text)) => text.to_owned(),
        (Some(key), None) => key.to_string(),
    }
}

/// The tenant, as far as it may be shown.
pub(crate) fn tenant_name(tenant: TenantDigest, text: Option<&str>) -> String {
    match text {
        Some("") => "(no tenant)".to_owned(),
        Some(text) => text.to_owned(),
        None => tenant.to_string(),
    }
}

/// The tenant of a row; none unless the limit is fair.
fn tenant(tenant: Option<TenantDigest>, text: &Option<String>) -> String {
    tenant.map_or_else(String::new, |tenant| tenant_name(tenant, text.as_deref()))
}

/// A time that not every row has.
fn time(ms: Option<u64>) -> String {
    ms.map(duration).unwrap_or_default()
}

/// A number of a key or tenant, without the part of any replica that has left the row out.
fn at_least(number: usize, partial: bool) -> String {
    if partial {
        format!("at least {number}")
    } else {
        number.to_string()
    }
}

impl Row for ReplicaRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("REPLICA", |row| row.replica.clone()),
        ("LABEL", |row| row.label.clone()),
        ("VERSION", |row| row.version.clone()),
        ("UP", |row| duration(row.uptime_ms)),
        ("HELD", |row| row.held.to_string()),
        ("WAITING", |row| row.waiting.to_string()),
        ("STORE", |row| {
            let state = match (row.store_up, row.recovering) {
                (false, _) => "down",
                (true, true) => RECOVERING,
                (true, false) => "up",
            };
            state.to_owned()
        }),
        ("LEASE", |row| duration(row.lease_ms)),
    ];
}

impl Row for LimitRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("LIMIT", |row| row.limit.clone()),
        ("VALUE", value),
        ("MODE", |row| {
            if row.paused { "paused" } else { &row.mode }.to_owned()
        }),
        ("HELD", |row| row.held.to_string()),
        ("WAITING", |row| row.waiting.to_string()),
        ("OLDEST WAIT", |row| time(row.oldest_wait_ms)),
        ("KEYS", |row| row.keys.to_string()),
        ("", notes),
    ];
}

fn notes(row: &LimitRow) -> String {
    let paused = match row.paused_keys {
        0 => None,
        1 => Some("1 key paused".to_owned()),
        keys => Some(format!("{keys} keys paused")),
    };
    let fair = row.fair.then(|| "fair".to_owned());
    let recovering = row.recovering.then(|| RECOVERING.to_owned());
    let differs = row.differs.then(|| "replicas differ".to_owned());
    let notes = [
        fair,
        row.pace.as_ref().map(found),
        paused,
        recovering,
        differs,
    ];
    Vec::from_iter(notes.into_iter().flatten()).join(", ")
}

fn value(row: &LimitRow) -> String {
    let value = match row.period_ms {
        Some(period_ms) => {
            let unit = row.unit.as_deref().unwrap_or("requests");
            format!("{} {unit} per {}", row.max, duration(period_ms))
        }
        None => row.max.to_string(),
    };
    if row.max == row.declared_max {
        value
    } else {
        format!("{value} (declared {})", row.declared_max)
    }
}

impl Row for PermitRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("ID", |row| row.id.to_string()),
        ("STATE", |row| row.state.as_str().to_owned()),
        ("FOR", |row| duration(row.age_ms)),
        ("PLACE", |row| match row.place {
            0 => String::new(),
            place => place.to_string(),
        }),
        ("KEY", |row| caller(Some(row.key), &row.key_text)),
        ("TENANT", |row| tenant(row.tenant, &row.tenant_text)),
        ("WEIGHT", |row| row.weight.to_string()),
        ("REPLICA", |row| row.replica_label.clone()),
        ("LABEL", |row| row.label.clone()),
    ];
}

impl Row for TenantRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("TENANT", |row| tenant(Some(row.tenant), &row.tenant_text)),
        ("SHARE", |row| row.share.to_string()),
        ("HELD", |row| at_least(row.held, row.partial)),
        ("WAITING", |row| at_least(row.waiting, row.partial)),
        ("OLDEST WAIT", |row| time(row.oldest_wait_ms)),
        ("DEBT", |row| time(row.debt_ms)),
        ("REPLICAS", |row| row.replicas.to_string()),
    ];
}

impl Row for Finding {
    const COLUMNS: &'static [Column<Self>] = &[
        ("CHECK", |row| row.check.as_str().to_owned()),
        ("HEALTH", |row| row.health.as_str().to_owned()),
        ("WHAT WAS SEEN", |row| row.text.clone()),
    ];
}

impl Row for KeyRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("KEY", |row| caller(Some(row.key), &row.key_text)),
        ("HELD", |row| at_least(row.held, row.partial)),
        ("VALUE", |row| row.max.to_string()),
        ("LEFT", |row| {
            let left = row.budget.as_ref().map(left).unwrap_or_default();
            if row.partial && !left.is_empty() {
                format!("at most {left}")
            } else {
                left
            }
        }),
        ("WAITING", |row| at_least(row.waiting, row.partial)),
        ("OLDEST WAIT", |row| time(row.oldest_wait_ms)),
        ("REPLICAS", |row| row.replicas.to_string()),
        ("PAUSED FOR", |row| {
            row.pause.as_ref().map(paused_for).unwrap_or_default()
        }),
        ("", |row| {
            let recovering = row.recovering.then(|| RECOVERING.to_owned());
            let notes = [row.pace.as_ref().map(found), recovering];
            Vec::from_iter(notes.into_iter().flatten()).join(", ")
        }),
    ];
}

/// The rest of a key's pause, and the replica that started it.
pub(crate) fn paused_for(pause: &PauseRow) -> String {
    let left = duration(pause.pause_ends_in_ms);
    match &*pause.paused_by {
        "" => format!("{left}, by an upstream"),
        replica => format!("{left}, by the upstream of {replica}"),
    }
}

/// How an adaptive limit has found its value.
pub(crate) fn found(pace: &PaceRow) -> String {
    let PaceRow {
        floor,
        ceiling,
        declared,
        cuts,
        ..
    } = pace;
    let mut text = format!("adaptive {floor} to {ceiling} from {declared}, {cuts} cuts");
    if let (Some(ago), Some(from), Some(to)) = (pace.cut_ms, pace.cut_from, pace.cut_to) {
        text += &format!(", the last {} ago from {from} to {to}", duration(ago));
    }
    if let (Some(wall), Some(left)) = (pace.wall, pace.wall_ends_in_ms) {
        text += &format!(", below {wall} for {}", duration(left));
    }
    text
}

/// A key's remaining budget at a rate.
pub(crate) fn left(budget: &BudgetRow) -> String {
    let left = format!("{} of {}", budget.remaining, budget.burst);
    match budget.remaining {
        0 => format!("{left}, more in {}", duration(budget.next_ms)),
        _ => left,
    }
}

impl Row for RefusalRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("AGO", |row| duration(row.age_ms)),
        ("REASON", |row| row.reason.clone()),
        ("IN USE", |row| row.in_use.to_string()),
        ("VALUE", |row| row.max.to_string()),
        ("QUEUED", |row| row.waiting.to_string()),
        ("WAITED", |row| duration(row.waited_ms)),
        ("KEY", |row| caller(row.key, &row.key_text)),
        ("TENANT", |row| tenant(row.tenant, &row.tenant_text)),
        ("WEIGHT", |row| row.weight.to_string()),
        ("REPLICA", |row| row.replica_label.clone()),
        ("LABEL", |row| row.label.clone()),
    ];
}

impl Row for UnclaimedRow {
    const COLUMNS: &'static [Column<Self>] = &[
        ("ID", |row| row.id.clone()),
        ("LEASE ENDS IN", |row| duration(row.ends_in_ms)),
    ];
}
