//! A lease: the deadline of a slot, shared by its permit and its keeper without a lock.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::pin,
    sync::Arc,
    task::{Poll, ready},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    label::{Label, LabelSlot},
    owners::Owners,
};
use crate::{
    error::LostErrorKind,
    ledger::Seq,
    sync::{AtomicBool, AtomicU64, Notify, Ordering, assert_unlocked},
};

/// The number of a queue within its keeper. The number of a dropped queue is reused. No process has room for 2^32
/// queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueId(pub u32);

impl QueueId {
    pub(crate) fn of_index(index: usize) -> Self {
        Self(index as u32)
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

// Values of `Lease::until_us`: these, or a deadline in microseconds after the epoch.
/// The lease is over: its deadline has passed, or the keeper has ended it.
const LOST: u64 = 0;
/// The lease is over: its permit was revoked at this bound.
const HELD_TOO_LONG: u64 = 1;
const IDLE: u64 = 2;
/// The lease is over: the limiter was shut down.
const SHUT_DOWN: u64 = 3;
/// The lowest value of a deadline.
const EARLIEST: u64 = 4;
/// No deadline: the lease does not need renewal, or the slot was released.
const FOREVER: u64 = u64::MAX;

/// Sentinel for [`Lease::unread_us`]: the response is being read.
const READ: u64 = 0;
/// Sentinel for [`Lease::tenure_us`]: no permit holds the lease.
const NO_TENURE: u64 = u64::MAX;

/// A pool that can take a slot back without the keeper's lock.
pub(crate) trait Recycle: Send + Sync {
    /// Takes the slot of a permit without owners, if the pool may keep it.
    fn put_unseen(&self, lease: &Arc<Lease>) -> bool;
}

/// A conservative local deadline of a slot, and the reason of its end. An ended lease stays ended.
///
/// # Why the orderings are enough
///
/// - `until_us` is one word, and every change is a read-modify-write (except [`hold`](Self::hold) and
///   [`succeed`](Self::succeed), under the keeper's lock, for a request whose permit nobody has yet). So all threads agree on
///   the order of its values, and a renewal after the end observes the end. A reader that finds the deadline passed writes the
///   end before reporting it. None of this needs an ordering.
/// - A watcher that observes the end then checks whether its permit still has the lease ([`Tenure::is_current`]),
///   because it must not take the end of a later permit for its own. A thread that [ends](Self::end) the lease under a
///   later permit has observed that permit, through the lock of the pool or the keeper; so ending releases, and looking
///   acquires. A deadline passes without any action: if it passes at the very moment of the permit's release, its
///   watcher may observe either of them first.
/// - `seq` is written under the keeper's lock, for a request without a permit; without the lock it is read for a permit's
///   id and weight. `reusable` is written under it for a permit, and read by the
///   last owner of that permit: [`Owners::leave`] orders them.
/// - `revoked` names a tenure, so a late order is never applied to a later permit.
///   [`wake_watchers`](Self::wake_watchers) ensures that a watcher sees the revocation, as with any end.
/// - `unread_us` and `tenure_us` are times, and no other data depends on them. A keeper that sees a change a moment
///   late is off by that moment when it revokes a permit or measures how long it was held.
///
/// [`Tenure::is_current`]: super::tenure::Tenure::is_current
pub(crate) struct Lease {
    pub(crate) queue: QueueId,
    /// Its name in the ledger. It changes while the request waits: a name whose fate is unknown is never reused.
    seq: AtomicU64,
    epoch: Instant,
    until_us: AtomicU64,
    /// Since when its response has been unread, in microseconds after the epoch, or `READ`.
    unread_us: AtomicU64,
    /// Where it may wait for its next permit.
    pool: Option<Arc<dyn Recycle>>,
    owners: Owners,
    /// When the current tenure began, in microseconds after the epoch, or `NO_TENURE`.
    tenure_us: AtomicU64,
    /// Whether it may return to the pool without the keeper's lock.
    reusable: AtomicBool,
    /// Whether its limit is in shadow mode for the request. A limit that only observes ends no permit.
    is_shadow: bool,
    /// The tenure of the permit revoked by an operator, plus one; 0: none.
    revoked: AtomicU64,
    watchers: Notify,
    label: LabelSlot,
}

impl Lease {
    pub(crate) fn new(
        queue: QueueId,
        seq: Seq,
        epoch: Instant,
        pool: Option<Arc<dyn Recycle>>,
    ) -> Self {
        Self {
            queue,
            seq: AtomicU64::new(seq),
            epoch,
            until_us: AtomicU64::new(FOREVER),
            unread_us: AtomicU64::new(READ),
            pool,
            owners: Owners::one(),
            tenure_us: AtomicU64::new(NO_TENURE),
            reusable: AtomicBool::new(false),
            is_shadow: false,
            revoked: AtomicU64::new(0),
            watchers: Notify::new(),
            label: LabelSlot::new(),
        }
    }

    /// A lease under a limit that may be in shadow mode for the request.
    pub(crate) fn in_shadow(self, is_shadow: bool) -> Self {
        Self { is_shadow, ..self }
    }

    pub(crate) fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    pub(crate) fn seq(&self) -> Seq {
        self.seq.load(Ordering::Relaxed)
    }

    pub(crate) fn rename(&self, seq: Seq) {
        self.seq.store(seq, Ordering::Relaxed);
    }

    /// Returns the slot of a permit without owners to the pool, if it may go there.
    pub(crate) fn recycle(self: &Arc<Self>) -> bool {
        let pool = self.pool.as_ref();
        pool.is_some_and(|pool| pool.put_unseen(self))
    }

    pub(crate) fn is_reusable(&self) -> bool {
        self.reusable.load(Ordering::Relaxed)
    }

    pub(crate) fn set_reusable(&self, reusable: bool) {
        self.reusable.store(reusable, Ordering::Relaxed);
    }
}

/// The deadline.
impl Lease {
    /// Sets the first deadline of a permit; `None` if it does not need renewal.
    pub(crate) fn hold(&self, until: Option<Instant>) {
        let until_us = until.map_or(FOREVER, |until| self.us(until));
        self.until_us.store(until_us, Ordering::Release);
    }

    /// Moves the deadline forward, unless the lease is over by `now`. Returns whether the permit is still held.
    pub(crate) fn extend(&self, until: Instant, now: Instant) -> bool {
        let (until, now) = (self.us(until), self.us(now));
        self.change(|old| match old {
            ..EARLIEST => None,
            FOREVER => Some(until),
            old if now >= old => None,
            old => Some(until.max(old)),
        })
    }

    /// Ends the lease, regardless of its deadline. A lost lease may still be ended by a shutdown or by a bound, which
    /// is final, except in shadow mode, where a bound ends no permit. The caller must [wake](Self::wake_watchers) the watchers afterwards.
    pub(crate) fn end(&self, kind: LostErrorKind) {
        let over = match kind {
            LostErrorKind::Lost => LOST,
            LostErrorKind::HeldTooLong => HELD_TOO_LONG,
            LostErrorKind::Idle => IDLE,
            LostErrorKind::ShutDown => SHUT_DOWN,
            LostErrorKind::Revoked => unreachable!("the lease of a revoked permit goes on"),
        };
        let is_final = |old| matches!(old, HELD_TOO_LONG | IDLE);
        let outlives = self.is_shadow && over == SHUT_DOWN;
        self.change(|old| (outlives || !is_final(old)).then_some(over));
    }

    /// Marks the permit as released: unless the lease was over by then, it can no longer be lost.
    pub(crate) fn release_at(&self, now: Instant) {
        self.change(|until| match until {
            ..EARLIEST | FOREVER => None,
            until if self.us(now) >= until => Some(LOST),
            _ => Some(FOREVER),
        });
    }

    /// Returns whether the value changed.
    fn change(&self, change: impl FnMut(u64) -> Option<u64>) -> bool {
        let (set, fetch) = (Ordering::AcqRel, Ordering::Acquire);
        self.until_us.fetch_update(set, fetch, change).is_ok()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_over(Instant::now())
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        let mut until = self.until_us.load(Ordering::Acquire);
        loop {
            match until {
                ..EARLIEST => return true,
                FOREVER => return false,
                _ if self.us(now) < until => return false,
                // The first thread that sees the deadline passed records the end: a late renewal must not revive the
                // lease.
                _ => match self.until_us.compare_exchange(
                    until,
                    LOST,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(_) => return true,
                    Err(renewed) => until = renewed,
                },
            }
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.until_us.load(Ordering::Relaxed) {
            ..EARLIEST | FOREVER => None,
            us => Some(self.epoch + Duration::from_micros(us)),
        }
    }

    /// Why the lease is over, if its permit ends with it. A slot in shadow mode that is lost, or reaches a bound, ends no
    /// permit; operators and a shutdown do.
    pub(crate) fn over(&self) -> Option<LostErrorKind> {
        // Ask the clock first: the end may not be recorded yet.
        let _ = self.is_lost();
        match self.end_reason() {
            Some(LostErrorKind::Lost | LostErrorKind::HeldTooLong | LostErrorKind::Idle)
                if self.is_shadow =>
            {
                self.is_revoked().then_some(LostErrorKind::Revoked)
            }
            reason => reason,
        }
    }

    /// Why the current permit has ended, once the lease is [over](Self::is_over), [ended](Self::end) or
    /// [released](Self::release_at). `None`: only by its release.
    pub(crate) fn end_reason(&self) -> Option<LostErrorKind> {
        match self.until_us.load(Ordering::Acquire) {
            LOST => Some(LostErrorKind::Lost),
            HELD_TOO_LONG => Some(LostErrorKind::HeldTooLong),
            IDLE => Some(LostErrorKind::Idle),
            SHUT_DOWN => Some(LostErrorKind::ShutDown),
            _ => self.is_revoked().then_some(LostErrorKind::Revoked),
        }
    }

    /// Revokes the permit of this tenure. Its lease is still renewed until its owners are gone, so a revoked permit
    /// never continues without a slot. The caller must [wake](Self::wake_watchers) the watchers afterwards.
    pub(crate) fn revoke(&self, tenure: u64) {
        // A late order for an earlier permit must not undo an order for a later one.
        let next = tenure + 1;
        let later = |before| (before < next).then_some(next);
        let _ = (self.revoked).fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }

    /// Whether the current permit is revoked.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire) == self.owners.tenure() + 1
    }

    /// Makes all watchers check the lease. Must not be called under a lock: it wakes tasks.
    pub(crate) fn wake_watchers(&self) {
        assert_unlocked();
        self.watchers.notify_waiters();
    }

    /// Completes when the lease is [over](Self::over) for a reason that `counts`. `attend` ensures that some task will wake this
    /// future: the keeper's driver may be gone with its runtime.
    pub(crate) async fn ended(
        &self,
        attend: impl Fn(),
        counts: impl Fn(LostErrorKind) -> bool,
    ) -> LostErrorKind {
        // Created before the first check, so it completes at any later end.
        let mut notified = pin!(self.watchers.notified());
        let mut is_attended = false;
        poll_fn(|cx| {
            loop {
                // Check even if the wake-up had another cause: the driver may be late, for example after this process
                // was stopped.
                if let Some(kind) = self.over().filter(|kind| counts(*kind)) {
                    return Poll::Ready(kind);
                }
                if !mem::replace(&mut is_attended, true) {
                    attend();
                }
                ready!(notified.as_mut().poll(cx));
                notified.set(self.watchers.notified());
                is_attended = false;
            }
        })
        .await
    }
}

/// Tenures, and times that a permit records for its keeper.
impl Lease {
    pub(crate) fn owners(&self) -> &Owners {
        &self.owners
    }

    pub(crate) fn begin_tenure(&self, now: Instant) {
        let now_us = self.since_epoch_us(now);
        self.tenure_us.store(now_us, Ordering::Relaxed);
    }

    /// Ends the tenure of a permit without owners. Returns its length. The watchers of that permit no longer observe
    /// the lease.
    pub(crate) fn end_tenure(&self, now: Instant) -> Duration {
        self.set_unread(None);
        let lasted = self.tenure_lasts(now);
        // The order matters: see `Owners`.
        self.tenure_us.store(NO_TENURE, Ordering::Relaxed);
        self.owners.next();
        lasted
    }

    /// Takes over the slot of a lease without owners, for a request without a permit so far: its name, its deadline and
    /// its next tenure. The other lease counts as released, and gets the name `unused`.
    pub(crate) fn succeed(&self, before: &Self, unused: Seq, now: Instant) {
        // The lease may have ended since it was checked.
        let until_us = before.until_us.load(Ordering::Acquire);
        self.until_us.store(until_us, Ordering::Release);
        self.rename(before.seq());
        // A pair of name and tenure is used only once: an order to revoke the earlier permit may arrive late.
        self.owners.follow(before.owners.tenure());
        self.label.move_to(self.owners.tenure());
        self.begin_tenure(now);
        self.set_reusable(true);
        before.release_at(now);
        before.rename(unused);
    }

    /// When the current permit got the lease. `None`: the lease is idle in the pool, or its request has not collected
    /// it. If read after the tenure's number, the time belongs to this tenure or a later one.
    pub(crate) fn tenure_since(&self) -> Option<Instant> {
        match self.tenure_us.load(Ordering::Relaxed) {
            NO_TENURE => None,
            us => Some(self.epoch + Duration::from_micros(us)),
        }
    }

    /// Labels the current or next permit.
    pub(crate) fn set_label(&self, label: Label) {
        self.label.set(self.owners.tenure(), label);
    }

    /// The label of the permit of this tenure.
    pub(crate) fn label(&self, tenure: u64) -> Option<Label> {
        self.label.get(tenure)
    }

    pub(crate) fn tenure_lasts(&self, now: Instant) -> Duration {
        let since_us = self.tenure_us.load(Ordering::Relaxed);
        Duration::from_micros(self.since_epoch_us(now).saturating_sub(since_us))
    }

    /// Whether it serves a permit after its first one.
    #[cfg(test)]
    pub(crate) fn is_reused(&self) -> bool {
        self.owners.tenure() > 0
    }

    /// Sets since when a frame of its response has been handed out without a request for another. `None`: the response
    /// is being read.
    pub(crate) fn set_unread(&self, since: Option<Instant>) {
        let since_us = since.map_or(READ, |since| self.us(since));
        self.unread_us.store(since_us, Ordering::Relaxed);
    }

    pub(crate) fn unread_since(&self) -> Option<Instant> {
        match self.unread_us.load(Ordering::Relaxed) {
            READ => None,
            us => Some(self.epoch + Duration::from_micros(us)),
        }
    }

    /// A time as stored in `until_us` or `unread_us`: never a sentinel.
    fn us(&self, at: Instant) -> u64 {
        self.since_epoch_us(at).max(EARLIEST)
    }

    fn since_epoch_us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_micros() as u64
    }
}
