//! A queue: what this process knows of one ledger, with an entry for each of its own permits and requests.
//!
//! | file | what |
//! | --- | --- |
//! | this one | the data, and what can be read from it |
//! | `permit` | what happens to an entry: granted, refused, given up; counts and lists by its state |
//! | `reuse` | slots that go to the pool and come back from it |
//! | `outbox` | what to send next |
//! | `local` | the ledger in this process, and the fallback while the store is down |
//! | `requests` | a request's way: submitted, collected |
//! | `renewals` | timers: leases that are renewed or end, polls |
//! | `replies` | answers, failures and wake-ups |
//!
//! Each file calls only those above it. A queue knows nothing of the [core](super::core), which has many of them: it
//! reports to the [`Context`].
//!
//! An entry moves from the request to the release:
//!
//! ```text
//! Asking -> Waiting -> Checking -> Held -> (gone)
//!    \          \          \_________________/
//!     \__________\__________________________/
//! ```
//!
//! A leg of a claim is *parked* until it is its turn. One that would have been refused by a limit in shadow mode has
//! *passed*: it goes on without a slot.
//!
//! An entry only moves forward, except that a request which the store has lost asks again under a new name: a name
//! whose fate is unknown is never used again. Until its fate is known it stays on the release list.

#[cfg(test)]
pub(super) mod audit;
mod local;
mod outbox;
mod permit;
mod renewals;
mod replies;
mod requests;
mod reuse;

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    context::{Context, earliest},
    effects::{Inquiry, StoredWaker},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{Lease, Pool},
    ledger::{Ledger, Seq},
    limit::{Limit, MAX_WAIT},
    small_map::SmallMap,
    status::{Quota, Usage},
};

#[cfg(test)]
pub(super) use self::permit::FORGET_AFTER;

pub(super) struct Queue {
    index: usize,
    /// The number of its limit.
    number: usize,
    key: Key,
    /// The name of its ledger in the store.
    ledger: Arc<str>,
    limit: Arc<Limit>,
    /// The limit's value for this key, if the latest request gave it one of its own.
    own_max: Option<u32>,
    entries: SmallMap<Seq, Entry>,
    /// Those that wait in the store's ledger. Boxed, like the outbox: most queues have neither.
    waiters: Option<Box<Waiters>>,
    outbox: Option<Box<Outbox>>,
    /// A batch is due even if it is empty.
    touch: bool,
    /// Exchanges in flight that have a batch for this queue.
    in_flight: u16,
    /// The ledger in this process, which decides while there is no store.
    local: Option<Box<Ledger>>,
    /// Held permits from this name on are not in [`Context::renewals`]: most are released before they are due.
    young_from: Seq,
    /// When to renew the first of those.
    young_at: Option<Instant>,
    /// Idle slots, if the limit reuses them.
    pool: Option<Arc<Pool>>,
    /// When the pool's right was last recalled: an answer to an earlier question does not renew it.
    recalled: Option<Instant>,
    /// The ledger in this process has run: whether idle slots may stay is to be seen again.
    recheck_right: bool,
    /// When to give back the slots of the pool that were not needed lately.
    tend_at: Option<Instant>,
    introducing: bool,
    snapshot: Snapshot,
}

/// One permit or request of this process.
struct Entry {
    lease: Arc<Lease>,
    state: State,
    /// It is in the store's ledger, not only in this process's.
    in_store: bool,
    /// An exchange that puts it into the store's ledger is in flight.
    open: bool,
    /// Unanswered exchanges may put it there until this store time.
    not_after_us: u64,
    /// A renewal is to be sent or in flight.
    renewing: bool,
    /// A request waits for it, or a permit holds it.
    wanted: bool,
    /// Its request has got its permit.
    taken: bool,
    /// That permit has no other slots.
    alone: bool,
    /// That permit has another slot, which counts for it.
    companion: bool,
    asked: Instant,
    /// When it began to ask the store that it asks now: it has `store_timeout` from then. Once it has a slot, when this
    /// process learned of that: an answer to an earlier question does not contradict it.
    since: Instant,
    /// Zero: it does not wait.
    wait: Duration,
    place: u32,
    waker: Option<StoredWaker>,
    /// The claim that it is a leg of, until that is granted.
    claim: Option<u64>,
    /// As a leg, it has had its turn.
    begun: bool,
    /// Its limit is in shadow mode: a refusal lets it pass.
    shadow: bool,
}

#[derive(Clone, Copy)]
enum State {
    /// To be sent, or sent then and not answered.
    Asking(Option<Seen>),
    /// In the store's queue.
    Waiting {
        ticket: i64,
        seen: Seen,
    },
    /// In the queue of the ledger in this process.
    WaitingHere,
    /// Granted by the store, perhaps so long ago that the lease is about to end: renewed before it is used.
    Checking,
    /// Renewed at that time, or found to be over. `None`: it needs no renewal.
    Held {
        look_at: Option<Instant>,
    },
    Refused(AcquireErrorKind),
    /// It would have been refused, and goes on without a slot.
    Passed(AcquireErrorKind),
    /// A leg of a claim whose turn has not come.
    Parked,
}

/// How far a leg of a claim has come.
pub(super) enum LegState {
    /// `busy`: an exchange that may put it into the ledger again is in flight.
    Held {
        over: bool,
        busy: bool,
    },
    Parked,
    Refused(AcquireErrorKind),
    Passed(AcquireErrorKind),
    Pending,
}

/// A moment at which an entry was seen not to be granted yet: by the store's clock, and no later by ours.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) store_us: u64,
    pub(super) sent: Instant,
}

/// The ledger as the last reply shows it.
#[derive(Clone, Copy)]
struct Snapshot {
    in_use: u32,
    waiting: u32,
    head: Option<i64>,
    seen: Seen,
}

/// Those that wait in the store's ledger, and when to ask for them.
#[derive(Default)]
struct Waiters {
    /// A ticket is used twice if the store has lost a waiter, and its clock was stepped back.
    by_ticket: BTreeSet<(i64, Seq)>,
    /// When to ask how far the queue has moved.
    poll_at: Option<Instant>,
    /// When the next lease in the ledger ends, and its slot goes to a waiter.
    handover_at: Option<Instant>,
    /// When to ask for every waiter by name: one that is not before the head may still have left the queue.
    roll_call_at: Option<Instant>,
}

/// Work to be sent. Names are checked again when they are sent: an entry may have gone in the meantime.
#[derive(Default)]
struct Outbox {
    release: Vec<Release>,
    renew: VecDeque<Seq>,
    adopt: VecDeque<Seq>,
    acquire: VecDeque<Seq>,
    inquiries: Vec<Inquiry>,
    /// Releases to repeat at `later_at`: what they release might still arrive.
    later: Vec<Release>,
    later_at: Option<Instant>,
}

/// A name to be released, until the store has acknowledged that at a time when nothing can bring the name back. There
/// are no more of them than there were requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    seq: Seq,
    /// An exchange that might put it into the ledger runs until this store time; 0 if there is none.
    not_after_us: u64,
    /// Many leases from now: whatever the store had of it has ended.
    forget_at: Instant,
}

/// The memory of a batch until its answer.
pub(super) struct Note {
    /// The index of the queue.
    pub(super) queue: usize,
    /// The ledger cannot be used.
    pub(super) failed: bool,
    releases: Vec<Release>,
    inquiries: Vec<Inquiry>,
    /// When the next lease in the ledger ends, as the answer says.
    nearest_ms: Option<u64>,
}

impl Queue {
    pub(super) fn new(
        index: usize,
        (number, key): (usize, Key),
        ledger: Arc<str>,
        limit: Arc<Limit>,
        ctx: &Context,
    ) -> Self {
        let seen = Seen {
            store_us: 0,
            sent: ctx.now,
        };
        Self {
            index,
            number,
            key,
            ledger,
            limit,
            own_max: None,
            entries: SmallMap::default(),
            waiters: None,
            outbox: None,
            touch: false,
            in_flight: 0,
            local: None,
            young_from: 0,
            young_at: None,
            pool: None,
            recalled: None,
            recheck_right: false,
            tend_at: None,
            introducing: false,
            snapshot: Snapshot {
                in_use: 0,
                waiting: 0,
                head: None,
                seen,
            },
        }
    }

    /// The number of its limit.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    pub(super) fn ledger(&self) -> &Arc<str> {
        &self.ledger
    }

    pub(super) fn limit(&self) -> &Arc<Limit> {
        &self.limit
    }

    /// How many slots this key has.
    fn max(&self) -> u32 {
        self.own_max.unwrap_or(self.limit.max())
    }

    pub(super) fn place(&self, seq: Seq) -> u32 {
        self.entries.get(&seq).map_or(0, |entry| entry.place)
    }

    /// The place at which a request that waits has joined the queue.
    pub(super) fn waiting_place(&self, seq: Seq) -> Option<u32> {
        let entry = self.entries.get(&seq)?;
        let waits = matches!(
            entry.state,
            State::Waiting { .. } | State::WaitingHere | State::Checking
        );
        waits.then_some(entry.place)
    }

    pub(super) fn leg_state(&self, seq: Seq, now: Instant) -> Option<LegState> {
        let entry = self.entries.get(&seq)?;
        Some(match entry.state {
            State::Held { .. } => LegState::Held {
                over: entry.lease.is_over(now),
                busy: entry.open,
            },
            State::Parked => LegState::Parked,
            State::Refused(kind) => LegState::Refused(kind),
            State::Passed(kind) => LegState::Passed(kind),
            State::Asking(_) | State::Waiting { .. } | State::WaitingHere | State::Checking => {
                LegState::Pending
            }
        })
    }

    pub(super) fn waker(&self, seq: Seq) -> Option<&StoredWaker> {
        self.entries.get(&seq)?.waker.as_ref()
    }

    /// Replaces the waker of a request. Returns the one that is not needed any more.
    pub(super) fn set_waker(&mut self, seq: Seq, waker: StoredWaker) -> Option<StoredWaker> {
        match self.entries.get_mut(&seq) {
            Some(entry) => entry.waker.replace(waker),
            None => Some(waker),
        }
    }

    pub(super) fn contains(&self, seq: Seq) -> bool {
        self.entries.contains_key(&seq)
    }

    pub(super) fn names(&self) -> Vec<Seq> {
        self.entries.iter().map(|(seq, _)| *seq).collect()
    }

    /// The names of the entries of which this holds.
    fn those(&self, which: impl Fn(&Entry) -> bool) -> Vec<Seq> {
        let those = self.entries.iter().filter(|(_, entry)| which(entry));
        those.map(|(seq, _)| *seq).collect()
    }

    /// Whether the release of a name is still to be confirmed, or to be sent.
    pub(super) fn is_releasing(&self, seq: Seq) -> bool {
        let outbox = self.outbox.iter();
        let mut listed = outbox.flat_map(|outbox| outbox.release.iter().rev());
        self.contains(seq) || listed.any(|release| release.seq == seq)
    }

    /// How many slots the store may still count once this process is gone.
    pub(super) fn unreleased(&self) -> usize {
        let entries = self.entries.values();
        let known = entries.filter(|entry| entry.in_store || entry.open).count();
        let listed = self
            .outbox
            .as_ref()
            .map_or(0, |outbox| outbox.release.len() + outbox.later.len());
        known + listed
    }

    /// Whether a request waits in the store's ledger.
    fn has_waiters(&self) -> bool {
        self.waiters().next().is_some()
    }

    /// Those that wait in the store's ledger, by ticket.
    fn waiters(&self) -> impl Iterator<Item = &(i64, Seq)> {
        self.waiters.iter().flat_map(|waiters| &waiters.by_ticket)
    }

    /// Those with a lower ticket.
    fn waiters_before(&self, ticket: i64) -> Vec<(i64, Seq)> {
        let waiters = self.waiters.iter();
        let before = waiters.flat_map(|waiters| waiters.by_ticket.range(..(ticket, 0)));
        before.copied().collect()
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            // Slots go to the pool and come back without a step of the ledger.
            in_use: (self.local.as_ref())
                .map_or(self.snapshot.in_use, |ledger| self.used_of(ledger)),
            waiting: self.snapshot.waiting,
            max: self.max(),
        }
    }

    /// How many slots of the ledger in this process are in use, and not idle in the pool.
    fn used_of(&self, ledger: &Ledger) -> u32 {
        ledger.in_use().saturating_sub(self.idle() as u32)
    }

    /// How many slots are idle in the pool.
    pub(super) fn idle(&self) -> usize {
        self.pool.as_ref().map_or(0, |pool| pool.idle())
    }

    pub(super) fn error(
        &self,
        ctx: &Context,
        kind: AcquireErrorKind,
        place: u32,
        waited: Duration,
    ) -> AcquireError {
        let place = (place > 0).then_some(place);
        let Usage {
            in_use,
            waiting,
            max,
        } = self.usage();
        AcquireError {
            in_use,
            waiting,
            max,
            place,
            waited,
            retry_after: self.next_free(ctx),
            quotas: self.quota(ctx).into_iter().collect(),
            ..self.limit.acquire_error(kind)
        }
    }

    /// How the limit stands for this key, if that is known.
    pub(super) fn quota(&self, ctx: &Context) -> Option<Quota> {
        let known = self.local.is_some() || self.snapshot.seen.store_us > 0;
        let free = self.max().saturating_sub(self.usage().in_use);
        let remaining = if self.snapshot.waiting > 0 { 0 } else { free };
        known.then(|| Quota {
            remaining,
            reset: self.next_free(ctx).filter(|_| remaining == 0),
            ..self.limit.quota(self.max())
        })
    }

    /// About how long it takes until a newcomer would have a slot, by how long slots are held lately.
    fn next_free(&self, ctx: &Context) -> Option<Duration> {
        let held = ctx.mean_hold(self.number)?;
        let turns = f64::from(self.snapshot.waiting + 1) / f64::from(self.max().max(1));
        Some(Duration::from_secs_f64(
            (held * turns).min(MAX_WAIT.as_secs_f64()),
        ))
    }

    /// Whether a user asks how it stands, and the store has not been asked yet.
    pub(super) fn has_inquiries(&self) -> bool {
        (self.outbox.as_ref()).is_some_and(|outbox| !outbox.inquiries.is_empty())
    }

    pub(super) fn has_work(&mut self) -> bool {
        let Some(outbox) = &self.outbox else {
            return self.touch;
        };
        if outbox.has_any_but_newcomers() || self.touch {
            return true;
        }
        !outbox.acquire.is_empty() && !self.is_introducing()
    }

    /// Whether the store has not confirmed all holders since the queue was introduced.
    pub(super) fn is_introducing(&mut self) -> bool {
        let unconfirmed = |entry: &Entry| entry.is_held() && (entry.renewing || entry.open);
        let adopts = |outbox: &Outbox| !outbox.adopt.is_empty();
        self.introducing &=
            self.outbox.as_deref().is_some_and(adopts) || self.entries.values().any(unconfirmed);
        self.introducing
    }

    /// Whether nothing is known of it that the store would not tell again, and nothing is to be sent.
    pub(super) fn is_idle(&mut self) -> bool {
        let releases_later = |outbox: &Outbox| !outbox.later.is_empty();
        self.is_unused()
            && self.in_flight == 0
            && !self.has_work()
            && !self.outbox.as_deref().is_some_and(releases_later)
    }

    /// Whether it has no permits and no requests, but for idle slots of a ledger in this process.
    fn is_unused(&self) -> bool {
        match &self.pool {
            Some(pool) if pool.is_bound() => false,
            Some(pool) if self.local.is_some() => self.entries.len() == pool.idle(),
            _ => self.entries.is_empty(),
        }
    }

    /// When to call [`on_time`](Self::on_time) next.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let mut due = earliest(self.young_at, self.tend_at);
        if let Some(outbox) = &self.outbox {
            due = earliest(due, outbox.later_at);
        }
        if let Some(waiters) = &self.waiters {
            let timers = [waiters.poll_at, waiters.handover_at, waiters.roll_call_at];
            due = timers.into_iter().fold(due, earliest);
        }
        due
    }
}

impl Entry {
    fn new(lease: Arc<Lease>, wait: Duration, now: Instant) -> Self {
        Self {
            lease,
            state: State::Parked,
            in_store: false,
            open: false,
            not_after_us: 0,
            renewing: false,
            wanted: true,
            taken: false,
            alone: false,
            companion: false,
            asked: now,
            since: now,
            wait,
            place: 0,
            waker: None,
            claim: None,
            begun: false,
            shadow: false,
        }
    }

    /// It is the turn of this leg: its time to wait begins, unless it has begun before.
    fn begin(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.begun, true) {
            self.asked = now;
        }
    }

    /// It needs nothing from any ledger any more.
    fn is_decided(&self) -> bool {
        matches!(self.state, State::Refused(_) | State::Passed(_))
    }

    fn wait_until(&self) -> Instant {
        self.asked + self.wait
    }

    fn is_held(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }
}

impl Snapshot {
    /// The latest moment at which a waiter certainly had no slot. Grants go in the order of tickets: a waiter that is not
    /// before the head had none when the head was seen.
    fn seen_waiting(&self, ticket: i64, seen: Seen) -> Seen {
        match self.head {
            Some(head) if ticket >= head && self.seen.sent > seen.sent => self.seen,
            _ => seen,
        }
    }
}

impl Outbox {
    fn has_any_but_newcomers(&self) -> bool {
        let known = self.release.is_empty() && self.renew.is_empty() && self.adopt.is_empty();
        !known || !self.inquiries.is_empty()
    }
}
