//! Tasks that wait, as a state machine may keep them: it can pass them on, and nothing else. To wake, clone or drop one
//! runs foreign code, which asserts that no lock is held.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    task::Waker,
};

use tokio::{sync::oneshot, time::Instant};

use super::marker::assert_unlocked;
use crate::{ledger::Seq, status::Usage};

/// The waker of a request. The state machine can keep it and pass it on, and nothing else.
#[derive(Debug)]
pub(crate) struct StoredWaker(Waker);

impl StoredWaker {
    /// To be made without the lock: to clone a waker runs foreign code too.
    pub(crate) fn of(waker: &Waker) -> Self {
        assert_unlocked();
        Self(waker.clone())
    }

    pub(crate) fn wake_task(mut self) {
        mem::replace(&mut self.0, Waker::noop().clone()).wake();
    }

    /// Whether both wake the same task. This compares pointers only.
    pub(crate) fn will_wake(&self, waker: &Waker) -> bool {
        self.0.will_wake(waker)
    }
}

impl Drop for StoredWaker {
    fn drop(&mut self) {
        assert_unlocked();
    }
}

/// Somebody who asked how a ledger stands. To answer or to drop it wakes a task.
#[derive(Debug)]
pub(crate) struct Inquiry(Option<oneshot::Sender<Usage>>);

impl Inquiry {
    pub(crate) fn new() -> (Self, oneshot::Receiver<Usage>) {
        let (done, all_done) = oneshot::channel();
        (Self(Some(done)), all_done)
    }

    pub(crate) fn respond(mut self, usage: Usage) {
        // The receiver may be gone.
        self.0.take().map(|inquiry| inquiry.send(usage));
    }
}

impl Drop for Inquiry {
    fn drop(&mut self) {
        if self.0.is_some() {
            assert_unlocked();
        }
    }
}

/// A task that waits until a release is confirmed. To answer or to drop it wakes the task.
#[derive(Debug)]
pub(crate) struct Confirmation(Option<oneshot::Sender<()>>);

impl Confirmation {
    pub(crate) fn new() -> (Self, oneshot::Receiver<()>) {
        let (confirm, confirmed) = oneshot::channel();
        (Self(Some(confirm)), confirmed)
    }

    pub(crate) fn notify(mut self) {
        // Nobody may be waiting any more.
        self.0.take().map(|confirmed| confirmed.send(()));
    }
}

impl Drop for Confirmation {
    fn drop(&mut self) {
        if self.0.is_some() {
            assert_unlocked();
        }
    }
}

/// Releases that a task waits for, by name: until the store has confirmed them, or for as long as a request waits for the
/// store.
#[derive(Default)]
pub(crate) struct Confirmations {
    by_name: HashMap<Seq, Confirmation>,
    /// In the order in which they were asked for, which is that of their deadlines. The first one is in `by_name`.
    due: VecDeque<(Instant, Seq)>,
}

impl Confirmations {
    pub(crate) fn insert(&mut self, seq: Seq, until: Instant, confirmation: Confirmation) {
        self.by_name.insert(seq, confirmation);
        self.due.push_back((until, seq));
    }

    /// Takes out the one that is waited for under this name. Releases are frequent, and most are not waited for.
    #[inline]
    pub(crate) fn take(&mut self, seq: Seq) -> Option<Confirmation> {
        if self.by_name.is_empty() {
            return None;
        }
        let confirmation = self.by_name.remove(&seq);
        self.trim();
        confirmation
    }

    /// Takes out one whose deadline has passed.
    pub(crate) fn take_overdue(&mut self, now: Instant) -> Option<Confirmation> {
        let &(until, seq) = self.due.front()?;
        (until <= now).then(|| self.take(seq)).flatten()
    }

    pub(crate) fn take_all(&mut self) -> Vec<Confirmation> {
        self.due.clear();
        self.by_name.drain().map(|(_, taken)| taken).collect()
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.front().map(|(until, _)| *until)
    }

    pub(crate) fn is_empty(&self) -> bool {
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
