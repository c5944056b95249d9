//! Diagnoses a store and its replicas without changing anything, except that a slot is acquired on a separate key.
//!
//! Checks are independent: a command that the store refuses or does not answer becomes a note.
//!
//! Tests: `tests/operate/doctor.rs`, `strangers.rs`.

mod asking;
mod finding;
mod rights;
mod server;
mod service;

use std::{collections::BTreeSet, fmt, time::Duration};

use tokio::time::sleep;

pub use self::finding::{Check, Finding, Health};
use self::{asking::Asking, finding::abridged};
use super::{LimitRow, ReplicaRow, answer::Answers, operator::Operator};
use tower_turnstile::operate::seam::{ControlConnection, Names, StoreError, StoreTarget};

/// Time for replicas that have not yet read the latest record of overrides.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Checks the store.
///
/// # Errors
///
/// Fails without a connection to the store.
pub(super) async fn store(
    control: &ControlConnection,
    (url, target): (&str, StoreTarget),
    names: &Names,
    patience: Duration,
) -> Result<Vec<Finding>, StoreError> {
    let asking = Asking::connect(control, patience).await?;
    let mut findings = server::looks(&asking).await?;
    let rights = rights::looks(&asking, names).await?;
    let served = service::serve(url, target, names, patience).await;
    findings.push(service::of_service(&served, rights.is_an_operators));
    findings.extend(rights.findings);
    findings.push(server::keys(&asking, names).await?);
    Ok(findings)
}

/// The finding if the operator cannot connect.
pub(super) fn without_operator(error: &dyn fmt::Display) -> Finding {
    let text = format!("cannot be asked: {error}");
    Finding::new(Check::Replicas, Health::Note, text)
}

/// Checks the replicas. The operator's user may ask.
pub(super) async fn replicas(operator: &Operator) -> Vec<Finding> {
    let mut answers = operator.replicas().await;
    if let Ok(first) = &answers
        && !agree(first)
    {
        // A replica may be about to read the record.
        sleep(SECOND_LOOK).await;
        answers = operator.replicas().await;
    }
    let answers = match answers {
        Ok(answers) => answers,
        Err(error) => return vec![without_operator(&error)],
    };
    let mut finding = of_replicas(&answers);
    if answers.replicas == 0
        && let Ok(namespaces) = operator.namespaces().await
    {
        finding.text += &in_use(&namespaces);
    }
    let mut findings = vec![finding];
    if let Ok(answers) = operator.limits().await {
        findings.extend(of_limits(&answers));
    }
    findings
}

/// Whether all replicas have read the same record of overrides.
fn agree(answers: &Answers<ReplicaRow>) -> bool {
    let mut tokens = answers.rows.iter().map(|row| &row.token);
    let first = tokens.next();
    tokens.all(|token| Some(token) == first)
}

/// Lists the namespaces in use, because a wrong namespace looks like a service without replicas.
fn in_use(namespaces: &[String]) -> String {
    match namespaces {
        [] => "; no namespace is in use in this database".to_owned(),
        _ => format!(
            "; namespaces in use in this database: {}",
            namespaces.join(", ")
        ),
    }
}

fn of_replicas(answers: &Answers<ReplicaRow>) -> Finding {
    let (answered, all) = (answers.answered, answers.replicas);
    let mut faults = Vec::new();
    if !answers.missing.is_empty() {
        faults.push(format!("no answer from {}", abridged(&answers.missing)));
    }
    let mut down = answers.rows.iter().filter(|row| !row.store_up).peekable();
    if down.peek().is_some() {
        let down: Vec<_> = down.map(|row| row.label.clone()).collect();
        faults.push(format!("do not reach the store: {}", abridged(&down)));
    }
    let mut differs = |what: &str, of: &dyn Fn(&ReplicaRow) -> String| {
        let values: BTreeSet<_> = answers.rows.iter().map(of).collect();
        if values.len() > 1 {
            let values: Vec<_> = values.into_iter().collect();
            faults.push(format!("{what} differs: {}", abridged(&values)));
        }
    };
    differs("version", &|row| row.version.clone());
    differs("lease", &|row| format!("{} ms", row.lease_ms));
    differs("waiter_ttl", &|row| format!("{} ms", row.waiter_ttl_ms));
    differs("the record of overrides", &|row| match &row.token {
        Some(token) => token.chars().take(8).collect(),
        None => "none".to_owned(),
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
    let more = match answers.left_out {
        0 => "",
        _ => "; the answers had no room for others",
    };
    let differ = answers.rows.iter().filter(|row| row.differs);
    let differ: Vec<_> = differ.map(|row| &*row.limit).collect();
    Some(match &differ[..] {
        [] => {
            let rows = answers.rows.len();
            let text = format!("{rows} with the same values everywhere{more}");
            Finding::new(Check::Limits, Health::Good, text)
        }
        _ => {
            let text = format!(
                "replicas differ in {}: the largest value applies, and of a rate each one's own{more}",
                differ.join(", ")
            );
            Finding::new(Check::Limits, Health::Warning, text)
        }
    })
}
