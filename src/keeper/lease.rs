//! A lease: what a permit and its keeper both know of it, without a lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use super::pool::Pool;
use crate::{error::LostErrorKind, ledger::Seq};

/// The deadline of a lease that ended.
const LOST: u64 = 0;
/// The same, of a permit that was taken back.
const HELD_TOO_LONG: u64 = 1;
const IDLE: u64 = 2;
/// The earliest that is a time.
const EARLIEST: u64 = 3;
/// The deadline of a lease that needs no renewal.
const FOREVER: u64 = u64::MAX;
/// The time since when a response is unread that somebody reads.
const READ: u64 = 0;

/// The time for which a permit has a lease. One that is used again serves several permits, one after the other.
#[derive(Clone)]
pub(crate) struct Tenure {
    lease: Arc<Lease>,
    number: u64,
}

impl Tenure {
    /// Of the permit that has it now.
    pub(super) fn of(lease: Arc<Lease>) -> Self {
        let number = lease.owners.number();
        Self { lease, number }
    }

    pub(super) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Whether the permit was not given back yet, or its lease not used again.
    pub(super) fn lasts(&self) -> bool {
        self.lease.owners.number() == self.number
    }

    /// One more keeps the permit, if anybody does.
    pub(super) fn join(&self) -> bool {
        self.lease.owners.join(self.number)
    }

    /// One less does. Whether it was the last.
    pub(super) fn leave(&self) -> bool {
        self.lease.owners.leave()
    }

    /// The permit is dropped. Whether that is all there is to do: its slot waits for the next one.
    pub(super) fn end(&self) -> bool {
        let pool = self.lease.pool.as_ref();
        pool.is_some_and(|pool| pool.put_unseen(&self.lease))
    }
}

/// A local, conservative deadline. It only ever moves forward, until it is over; then it stays over.
pub(crate) struct Lease {
    /// The number of its keeper.
    pub(super) keeper: usize,
    /// The index of its line in the keeper.
    pub(super) line: usize,
    /// Its name in the ledger. It changes while the request waits: a name whose fate is unknown is never used again.
    seq: AtomicU64,
    epoch: Instant,
    /// Microseconds after `epoch`, or why it is over, or `FOREVER`.
    until_us: AtomicU64,
    /// Since when its response lies unread, as `until_us`, or `READ`.
    unread_us: AtomicU64,
    /// Where it may wait for its next permit.
    pool: Option<Arc<Pool>>,
    owners: Owners,
    /// When the latest of its permits was given, in microseconds after `epoch`.
    tenure_us: AtomicU64,
    /// Whether it may go to the pool behind the keeper's back.
    reusable: AtomicBool,
    /// Wakes whoever waits for the end.
    told: Notify,
}

impl Lease {
    pub(super) fn new(
        keeper: usize,
        line: usize,
        seq: Seq,
        epoch: Instant,
        pool: Option<Arc<Pool>>,
    ) -> Self {
        Self {
            keeper,
            line,
            seq: AtomicU64::new(seq),
            epoch,
            until_us: AtomicU64::new(FOREVER),
            unread_us: AtomicU64::new(READ),
            pool,
            owners: Owners::one(),
            tenure_us: AtomicU64::new(0),
            reusable: AtomicBool::new(false),
            told: Notify::new(),
        }
    }

    pub(super) fn begin_tenure(&self, now: Instant) {
        self.tenure_us
            .store(self.since_epoch_us(now), Ordering::Relaxed);
    }

    /// Returns how long it lasted. Whoever watched the permit that had it sees no more of it.
    pub(super) fn end_tenure(&self, now: Instant) -> Duration {
        self.set_unread(None);
        self.owners.next();
        self.tenure_lasts(now)
    }

    pub(super) fn tenure_lasts(&self, now: Instant) -> Duration {
        let since_us = self.tenure_us.load(Ordering::Relaxed);
        Duration::from_micros(self.since_epoch_us(now).saturating_sub(since_us))
    }

    /// Whether it serves another permit than its first one.
    #[cfg(test)]
    pub(super) fn is_reused(&self) -> bool {
        self.owners.number() > 0
    }

    pub(super) fn is_reusable(&self) -> bool {
        self.reusable.load(Ordering::Relaxed)
    }

    pub(super) fn set_reusable(&self, reusable: bool) {
        self.reusable.store(reusable, Ordering::Relaxed);
    }

    /// Read and written under the keeper's lock only.
    pub(super) fn seq(&self) -> Seq {
        self.seq.load(Ordering::Relaxed)
    }

    pub(super) fn rename(&self, seq: Seq) {
        self.seq.store(seq, Ordering::Relaxed);
    }

    /// Sets the deadline of a permit that had none; `None` for one that needs no renewal.
    pub(super) fn hold(&self, until: Option<Instant>) {
        self.until_us.store(
            until.map_or(FOREVER, |until| self.us(until)),
            Ordering::Release,
        );
    }

    /// Moves the deadline forward, unless it is over by `now`. Returns whether the permit is still held.
    pub(super) fn extend(&self, until: Instant, now: Instant) -> bool {
        let (until, now) = (self.us(until), self.us(now));
        let moved =
            self.until_us
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| match old {
                    ..EARLIEST => None,
                    FOREVER => Some(until),
                    old if now >= old => None,
                    old => Some(until.max(old)),
                });
        moved.is_ok()
    }

    /// Makes whoever watches it look again. Not to be called under a lock: it wakes tasks.
    pub(super) fn tell(&self) {
        super::effects::assert_unlocked();
        self.told.notify_waiters();
    }

    /// Ends it, whatever the deadline. One that is lost may still be ended by a bound, and that is final.
    pub(super) fn end(&self, kind: LostErrorKind) {
        let over = match kind {
            LostErrorKind::Lost => LOST,
            LostErrorKind::HeldTooLong => HELD_TOO_LONG,
            LostErrorKind::Idle => IDLE,
        };
        let ended = |old| (!matches!(old, HELD_TOO_LONG | IDLE)).then_some(over);
        // `None` leaves it as it is.
        let _ = self
            .until_us
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, ended);
    }

    /// It is given back: unless it was over by then, it is never lost any more.
    pub(super) fn return_at(&self, now: Instant) {
        let returned = |until| match until {
            ..EARLIEST | FOREVER => None,
            until if self.us(now) >= until => Some(LOST),
            _ => Some(FOREVER),
        };
        // `None` leaves it as it is.
        let _ = self
            .until_us
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, returned);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_over(Instant::now())
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        let mut until = self.until_us.load(Ordering::Acquire);
        loop {
            match until {
                ..EARLIEST => return true,
                FOREVER => return false,
                _ if self.us(now) < until => return false,
                // Whoever sees that it is over makes it so: a renewal that comes too late must not bring it back.
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
        match self.until_us.load(Ordering::Acquire) {
            ..EARLIEST | FOREVER => None,
            us => Some(self.epoch + Duration::from_micros(us)),
        }
    }

    /// Whether it is over, and why.
    pub(crate) fn over(&self) -> Option<LostErrorKind> {
        if !self.is_lost() {
            return None;
        }
        Some(match self.until_us.load(Ordering::Acquire) {
            HELD_TOO_LONG => LostErrorKind::HeldTooLong,
            IDLE => LostErrorKind::Idle,
            _ => LostErrorKind::Lost,
        })
    }

    /// Tells since when a frame of its response has been handed out and none asked for; `None`: that is not so.
    pub(crate) fn set_unread(&self, since: Option<Instant>) {
        let since_us = since.map_or(READ, |since| self.us(since));
        self.unread_us.store(since_us, Ordering::Release);
    }

    pub(super) fn unread_since(&self) -> Option<Instant> {
        match self.unread_us.load(Ordering::Acquire) {
            READ => None,
            us => Some(self.epoch + Duration::from_micros(us)),
        }
    }

    /// Completes when it is over for a reason that `counts`. `attend` sees to it that somebody will tell: the keeper's
    /// driver may have gone with its runtime.
    pub(crate) async fn ended(
        &self,
        attend: impl Fn(),
        counts: impl Fn(LostErrorKind) -> bool,
    ) -> LostErrorKind {
        loop {
            let told = self.told.notified();
            if let Some(kind) = self.over().filter(|kind| counts(*kind)) {
                return kind;
            }
            attend();
            told.await;
        }
    }

    /// So that no time is taken for the end.
    fn us(&self, at: Instant) -> u64 {
        self.since_epoch_us(at).max(EARLIEST)
    }

    fn since_epoch_us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_micros() as u64
    }
}

/// How many keep a permit, and which it is of those that its lease serves. Once nobody keeps it, nobody can again.
pub(super) struct Owners(AtomicU64);

/// The owners are counted in the lower bits, the permits in the others.
const PERMIT: u64 = 1 << 24;

impl Owners {
    /// The first permit has one.
    pub(super) fn one() -> Self {
        Self(AtomicU64::new(1))
    }

    /// How many permits there were before this one.
    pub(super) fn number(&self) -> u64 {
        self.0.load(Ordering::Acquire) / PERMIT
    }

    /// One more, if the permit is still this one and somebody keeps it.
    pub(super) fn join(&self, number: u64) -> bool {
        let one_more = |now: u64| {
            let owners = now % PERMIT;
            let may = now / PERMIT == number && (1..PERMIT - 1).contains(&owners);
            may.then_some(now + 1)
        };
        let joined = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        joined.is_ok()
    }

    /// One less. Whether it was the last.
    pub(super) fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) % PERMIT == 1
    }

    /// The next permit has one. Nobody keeps the last one, or knows of it.
    fn next(&self) {
        let next = (self.number() + 1) * PERMIT + 1;
        self.0.store(next, Ordering::Release);
    }
}
