//! A replica's connection to operators, created before the replica can answer.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::store::redis::{
    StoreTarget,
    control::{ControlConnection, Inbox},
};

/// Maximum number of questions waiting for an answer. A flood of messages fills only this queue.
const MAX_QUESTIONS: usize = 16;
/// Maximum size of a question, in bytes.
pub(super) const MAX_QUESTION: usize = 4 * 1_024;

/// A connection, and the questions received on it.
pub(crate) struct OperatorLink {
    pub(super) control: ControlConnection,
    pub(super) questions: mpsc::Receiver<Vec<u8>>,
    pub(super) db: i64,
}

impl OperatorLink {
    pub(super) fn new(target: &StoreTarget, patience: Duration) -> Self {
        let (inbox, questions) = Inbox::new(MAX_QUESTIONS, MAX_QUESTION);
        Self {
            control: ControlConnection::new(target, patience, inbox),
            questions,
            db: target.db(),
        }
    }
}
