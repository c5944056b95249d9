//! Waiting tasks, as stored by a state machine, which may only pass them on. Waking, cloning or dropping one runs
//! foreign code, so each of these operations asserts that no lock is held.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    task::Waker,
};

use tokio::{sync::oneshot, time::Instant};

use super::marker::assert_unlocked;
use crate::{ledger::Seq, part::Part, status::Usage};

/// The waker of a request. A state machine may only store it and pass it on.
#[derive(Debug)]
pub(crate) struct StoredWaker(Waker);

impl StoredWaker {
    /// Call without the lock, because cloning a waker runs foreign code too.
    pub(crate) fn of(waker: &Waker) -> Self {
        assert_unlocked();
        Self(waker.clone())
    }

    pub(crate) fn wake_task(mut self) {
        mem::replace(&mut self.0, Waker::noop().clone()).wake();
    }

    /// Whether both wake the same task. Compares only pointers.
    pub(crate) fn will_wake(&self, waker: &Waker) -> bool {
        self.0.will_wake(waker)
    }
}

impl Drop for StoredWaker {
    fn drop(&mut self) {
        assert_unlocked();
    }
}

/// A task that waits for an answer. Answering or dropping it wakes the task.
#[derive(Debug)]
pub(crate) struct AwaitedAnswer<T>(Option<oneshot::Sender<T>>);

/// A task that asked for the usage of a ledger.
pub(crate) type Inquiry = AwaitedAnswer<Usage>;

/// A task that waits for the confirmation of a release.
pub(crate) type Confirmation = AwaitedAnswer<()>;

impl<T> AwaitedAnswer<T> {
    pub(crate) fn new() -> (Self, oneshot::Receiver<T>) {
        let (awaited, answer) = oneshot::channel();
        (Self(Some(awaited)), answer)
    }

    pub(crate) fn respond(mut self, answer: T) {
        // The receiver may be gone.
        self.0.take().map(|awaited| awaited.send(answer));
    }
}

impl<T> Drop for AwaitedAnswer<T> {
    fn drop(&mut self) {
        if self.0.is_some() {
            assert_unlocked();
        }
    }
}

/// Awaited releases by name: until the store has confirmed them, or as long as a request waits for the store.
#[derive(Default)]
pub(crate) struct Confirmations {
    /// With the part of the store that has to confirm.
    by_name: HashMap<Seq, (Part, Confirmation)>,
    /// In order of registration, which is also the order of deadlines. The first one is in `by_name`.
    due: VecDeque<(Instant, Seq)>,
}

impl Confirmations {
    pub(crate) fn insert(
        &mut self,
        seq: Seq,
        part: Part,
        until: Instant,
        confirmation: Confirmation,
    ) {
        self.by_name.insert(seq, (part, confirmation));
        self.due.push_back((until, seq));
    }

    /// Takes the confirmation for this name. Releases are frequent, and most are not awaited.
    #[inline]
    pub(crate) fn take(&mut self, seq: Seq) -> Option<Confirmation> {
        if self.by_name.is_empty() {
            return None;
        }
        let taken = self.by_name.remove(&seq);
        self.trim();
        taken.map(|(_, confirmation)| confirmation)
    }

    /// Takes a confirmation whose deadline has passed.
    pub(crate) fn take_overdue(&mut self, now: Instant) -> Option<Confirmation> {
        let &(until, seq) = self.due.front()?;
        (until <= now).then(|| self.take(seq)).flatten()
    }

    /// Takes the confirmations due from this part, or from all parts.
    pub(crate) fn take_all(&mut self, of: Option<Part>) -> Vec<Confirmation> {
        let is_of = |_: &Seq, (part, _): &mut (Part, Confirmation)| of.is_none_or(|of| of == *part);
        let taken = self.by_name.extract_if(is_of);
        let taken = taken.map(|(_, (_, confirmation))| confirmation).collect();
        self.trim();
        taken
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
