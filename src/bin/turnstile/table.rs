//! The columns of each kind of row.

use tower_turnstile::operate::{
    BudgetRow, Finding, KeyDigest, KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow,
    UnclaimedRow,
};

use crate::{output::Row, text::duration};

/// The caller, as far as it may be shown.
fn caller(key: KeyDigest, text: Option<&str>) -> String {
    match text {
        Some("") => "(all callers)".to_owned(),
        Some(text) => text.to_owned(),
        None => key.to_string(),
    }
}

impl Row for ReplicaRow {
    const COLUMNS: &'static [&'static str] = &[
        "REPLICA", "LABEL", "VERSION", "UP", "HELD", "WAITING", "STORE", "LEASE",
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.replica.clone(),
            self.label.clone(),
            self.version.clone(),
            duration(self.uptime_ms),
            self.held.to_string(),
            self.waiting.to_string(),
            if self.store_up { "up" } else { "down" }.to_owned(),
            duration(self.lease_ms),
        ]
    }
}

impl Row for LimitRow {
    const COLUMNS: &'static [&'static str] = &[
        "LIMIT",
        "VALUE",
        "MODE",
        "HELD",
        "WAITING",
        "OLDEST WAIT",
        "KEYS",
        "",
    ];

    fn cells(&self) -> Vec<String> {
        let value = match self.period_ms {
            Some(period_ms) => {
                let unit = self.unit.as_deref().unwrap_or("requests");
                format!("{} {unit} per {}", self.max, duration(period_ms))
            }
            None => self.max.to_string(),
        };
        let value = match self.max == self.declared_max {
            true => value,
            false => format!("{value} (declared {})", self.declared_max),
        };
        vec![
            self.limit.clone(),
            value,
            if self.paused { "paused" } else { &self.mode }.to_owned(),
            self.held.to_string(),
            self.waiting.to_string(),
            self.oldest_wait_ms.map(duration).unwrap_or_default(),
            self.keys.to_string(),
            if self.differs { "replicas differ" } else { "" }.to_owned(),
        ]
    }
}

impl Row for PermitRow {
    const COLUMNS: &'static [&'static str] =
        &["ID", "STATE", "FOR", "PLACE", "KEY", "REPLICA", "LABEL"];

    fn cells(&self) -> Vec<String> {
        let place = match self.place {
            0 => String::new(),
            place => place.to_string(),
        };
        vec![
            self.id.to_string(),
            self.state.as_str().to_owned(),
            duration(self.age_ms),
            place,
            caller(self.key, self.key_text.as_deref()),
            self.replica_label.clone(),
            self.label.clone(),
        ]
    }
}

impl Row for Finding {
    const COLUMNS: &'static [&'static str] = &["CHECK", "HEALTH", "WHAT WAS SEEN"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.check.as_str().to_owned(),
            self.health.as_str().to_owned(),
            self.text.clone(),
        ]
    }
}

impl Row for KeyRow {
    const COLUMNS: &'static [&'static str] = &[
        "KEY",
        "HELD",
        "VALUE",
        "LEFT",
        "WAITING",
        "OLDEST WAIT",
        "REPLICAS",
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            caller(self.key, self.key_text.as_deref()),
            self.held.to_string(),
            self.max.to_string(),
            self.budget.as_ref().map(left).unwrap_or_default(),
            self.waiting.to_string(),
            self.oldest_wait_ms.map(duration).unwrap_or_default(),
            self.replicas.to_string(),
        ]
    }
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
    const COLUMNS: &'static [&'static str] = &[
        "AGO", "REASON", "IN USE", "VALUE", "QUEUED", "WAITED", "KEY", "REPLICA", "LABEL",
    ];

    fn cells(&self) -> Vec<String> {
        let key = self.key.map(|key| caller(key, self.key_text.as_deref()));
        vec![
            duration(self.age_ms),
            self.reason.clone(),
            self.in_use.to_string(),
            self.max.to_string(),
            self.waiting.to_string(),
            duration(self.waited_ms),
            key.unwrap_or_default(),
            self.replica_label.clone(),
            self.label.clone(),
        ]
    }
}

impl Row for UnclaimedRow {
    const COLUMNS: &'static [&'static str] = &["ID", "LEASE ENDS IN"];

    fn cells(&self) -> Vec<String> {
        vec![self.id.clone(), duration(self.ends_in_ms)]
    }
}
