//! Faults of a store and of the replicas, as far as they can be seen without a change.
//!
//! Tests: `tests/operate/doctor.rs`.

mod finding;
mod rights;
mod server;

use std::collections::BTreeSet;

pub use self::finding::{Check, Finding, Health};
use super::{
    answer::{Answers, LimitRow, ReplicaRow},
    names::Names,
    operator::Operator,
};
use crate::store::{StoreError, redis::control::ControlConnection};

/// Looks at the store.
pub(super) async fn store(
    control: &ControlConnection,
    names: &Names,
) -> Result<Vec<Finding>, StoreError> {
    let mut findings = server::looks(control).await?;
    findings.extend(rights::looks(control, names).await?);
    findings.push(server::keys(control, names).await?);
    Ok(findings)
}

/// Looks at the replicas, by an operator who may ask.
pub(super) async fn replicas(operator: &Operator) -> Vec<Finding> {
    let mut findings = Vec::new();
    match operator.replicas().await {
        Ok(answers) => findings.push(of_replicas(&answers)),
        Err(error) => {
            let text = format!("cannot be asked: {error}");
            findings.push(Finding::new(Check::Replicas, Health::Note, text));
            return findings;
        }
    }
    if let Ok(answers) = operator.limits().await {
        findings.extend(of_limits(&answers));
    }
    findings
}

fn of_replicas(answers: &Answers<ReplicaRow>) -> Finding {
    let (answered, all) = (answers.answered, answers.replicas);
    let mut faults = Vec::new();
    if !answers.missing.is_empty() {
        faults.push(format!("no answer from {}", answers.missing.join(", ")));
    }
    let mut down = answers.rows.iter().filter(|row| !row.store_up).peekable();
    if down.peek().is_some() {
        let down: Vec<_> = down.map(|row| &*row.label).collect();
        faults.push(format!("do not reach the store: {}", down.join(", ")));
    }
    let mut differs = |what: &str, of: &dyn Fn(&ReplicaRow) -> String| {
        let values: BTreeSet<_> = answers.rows.iter().map(of).collect();
        if values.len() > 1 {
            let values: Vec<_> = values.into_iter().collect();
            faults.push(format!("{what} differs: {}", values.join(", ")));
        }
    };
    differs("version", &|row| row.version.clone());
    differs("lease", &|row| format!("{} ms", row.lease_ms));
    differs("waiter_ttl", &|row| format!("{} ms", row.waiter_ttl_ms));
    differs("the record of overrides", &|row| match &row.token {
        Some(_) => "read".to_owned(),
        None => "not read".to_owned(),
    });
    let text = format!("{answered} of {all} answered");
    match (all, faults.is_empty()) {
        (0, _) => Finding::new(Check::Replicas, Health::Note, "no replica is operable"),
        (_, true) => Finding::new(Check::Replicas, Health::Good, text),
        (_, false) => {
            let text = format!("{text}; {}", faults.join("; "));
            Finding::new(Check::Replicas, Health::Warning, text)
        }
    }
}

fn of_limits(answers: &Answers<LimitRow>) -> Option<Finding> {
    if answers.rows.is_empty() {
        return None;
    }
    let differ = answers.rows.iter().filter(|row| row.differs);
    let differ: Vec<_> = differ.map(|row| &*row.limit).collect();
    Some(match &differ[..] {
        [] => {
            let text = format!("{} with the same values everywhere", answers.rows.len());
            Finding::new(Check::Limits, Health::Good, text)
        }
        _ => {
            let text = format!(
                "replicas differ in {}: the largest value applies",
                differ.join(", ")
            );
            Finding::new(Check::Limits, Health::Warning, text)
        }
    })
}
