//! A replica's connection to operators, before there is a replica to answer.

use std::time::Duration;

use tokio::sync::mpsc;

use crate::store::redis::{
    Target,
    control::{Control, Inbox},
};

/// Questions that wait to be answered. A flood fills this queue and nothing else.
const MAX_QUESTIONS: usize = 16;
/// Longest question, in bytes.
pub(super) const MAX_QUESTION: usize = 4 * 1_024;

/// A connection, and the questions that come by it.
pub(crate) struct Link {
    pub(super) control: Control,
    pub(super) questions: mpsc::Receiver<Vec<u8>>,
    pub(super) db: i64,
}

impl Link {
    pub(super) fn new(target: &Target, patience: Duration) -> Self {
        let (inbox, questions) = Inbox::new(MAX_QUESTIONS, MAX_QUESTION);
        Self {
            control: Control::new(target, patience, inbox),
            questions,
            db: target.db(),
        }
    }
}
