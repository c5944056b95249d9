//! Releases that a task waits for: until the store has confirmed them, or for as long as a request waits for the store.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

use super::effects::Confirmation;
use crate::ledger::Seq;

/// By the name that is released.
#[derive(Default)]
pub(super) struct Confirmations {
    by_name: HashMap<Seq, Confirmation>,
    /// In the order in which they were asked for, which is that of their deadlines. The first one is in `by_name`.
    due: VecDeque<(Instant, Seq)>,
}

impl Confirmations {
    pub(super) fn insert(&mut self, seq: Seq, until: Instant, confirmation: Confirmation) {
        self.by_name.insert(seq, confirmation);
        self.due.push_back((until, seq));
    }

    /// Takes out the one that is waited for under this name. Releases are frequent, and most are not waited for.
    #[inline]
    pub(super) fn take(&mut self, seq: Seq) -> Option<Confirmation> {
        if self.by_name.is_empty() {
            return None;
        }
        let confirmation = self.by_name.remove(&seq);
        self.trim();
        confirmation
    }

    /// Takes out one whose deadline has passed.
    pub(super) fn take_overdue(&mut self, now: Instant) -> Option<Confirmation> {
        let &(until, seq) = self.due.front()?;
        (until <= now).then(|| self.take(seq)).flatten()
    }

    pub(super) fn take_all(&mut self) -> Vec<Confirmation> {
        self.due.clear();
        self.by_name.drain().map(|(_, taken)| taken).collect()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.front().map(|(until, _)| *until)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    fn trim(&mut self) {
        while let Some((_, seq)) = self.due.front()
            && !self.by_name.contains_key(seq)
        {
            self.due.pop_front();
        }
    }
}
