//! Which replicas have applied a change.
//!
//! Tests: `tests/operate/steering.rs`.

use std::time::Duration;

use tokio::time::sleep;

use super::{ReplicaRow, changes::Outcome, operator::Operator};

/// Extra time for replicas that were slow to read the record.
const SECOND_TRY: Duration = Duration::from_millis(200);

impl Operator {
    /// Asks all replicas. A replica that has been notified of the change reads the record before it answers.
    pub(super) async fn confirmation(&self, token: &str) -> Outcome {
        let mut outcome = self.confirmed(token).await;
        if let Outcome::Recorded { of: 1.., .. } = outcome {
            sleep(SECOND_TRY).await;
            outcome = self.confirmed(token).await;
        }
        outcome
    }

    async fn confirmed(&self, token: &str) -> Outcome {
        // The change is recorded, even if the question fails.
        let Ok(answers) = self.replicas().await else {
            return Outcome::Recorded {
                confirmed: 0,
                of: 0,
                missing: Vec::new(),
            };
        };
        let has = |row: &ReplicaRow, token: &str| row.token.as_deref() == Some(token);
        // The record of a later change contains this one. It is read only if a replica has applied another.
        let later = if answers.rows.iter().all(|row| has(row, token)) {
            None
        } else {
            let record = self.record().await.ok();
            record.and_then(|record| Some(record.token()?.to_owned()))
        };
        let has_not = |row: &&ReplicaRow| {
            !has(row, token) && !later.as_ref().is_some_and(|later| has(row, later))
        };
        let others = answers.rows.iter().filter(has_not);
        let mut missing: Vec<String> = others.map(|row| row.label.clone()).collect();
        let confirmed = answers.rows.len() - missing.len();
        missing.extend(answers.missing.into_iter().chain(answers.busy));
        if missing.is_empty() && confirmed > 0 {
            Outcome::Done {
                replicas: confirmed,
            }
        } else {
            Outcome::Recorded {
                confirmed,
                of: confirmed + missing.len(),
                missing,
            }
        }
    }
}
