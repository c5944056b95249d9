//! A replica's connection to operators, before there is a replica to answer.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::store::redis::{
    StoreTarget,
    control::{ControlConnection, Inbox},
};

/// Questions that wait to be answered. A flood fills this queue and nothing else.
const MAX_QUESTIONS: usize = 16;
/// Longest question, in bytes.
pub(super) const MAX_QUESTION: usize = 4 * 1_024;

/// A connection, and the questions that come by it.
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
