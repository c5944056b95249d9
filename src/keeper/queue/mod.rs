//! A queue: this process's view of one ledger, with an entry for each of its own permits and requests.
//!
//! | file | what |
//! | --- | --- |
//! | `exchange` | batches, answers, wake-ups |
//! | `requests` | timers, which renew held permits; effects of a changed limit on waiting requests; the view of requests and of operators |
//! | `outage` | failures: exchanges without an answer, lost permits (also at a shutdown), the store down and back; retries |
//! | `local` | the ledger in this process, and the fallback while the store is down |
//! | `work` | roll calls, introductions, pauses, releases until confirmed; whether anything is left to send |
//! | `reuse` | slots that go to the pool and come back from it |
//! | `permit` | changes of an entry: sent, granted, refused, released; counts and lists by state; the outbox |
//! | `dues` | fair shares: the payers of newcomers, and what permits owe |
//! | `permit/entry` | the states of an entry, and what it has paid for |
//! | this one | the data, read by all |
//!
//! Each file calls only files below it. A queue does not know the [core](super::core), which has many queues: it reports
//! to the [`Context`].
//!
//! An entry moves from the request to the release; `permit/entry.rs` has the table of its states:
//!
//! ```text
//! Idle -> Sent -> Waiting -> Checking -> Held -> (gone)
//!           \        \___________________/
//!            \__________________________/
//! ```
//!
//! A queue reports its decisions on entries of requests ([`Decided`](super::context::Decided)). The core then advances the
//! request: it asks for the entry, or gives it up.
//!
//! An entry only moves forward, with two exceptions. An entry being checked waits again if a newer answer shows it waiting.
//! An entry whose exchange failed or came too late, that the store has lost, that was collected too late, or that an outage
//! moves is idle again under a new name: a name of unknown fate is never reused, and stays on the release list until its fate
//! is known.

#[cfg(test)]
pub(super) mod audit;
mod dues;
mod exchange;
mod local;
mod outage;
mod permit;
mod requests;
mod reuse;
mod work;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::context::Context;
use crate::{
    error::AcquireErrorKind,
    fallbacks::{Availability, FallbackInForce},
    key::Key,
    leases::{Pool, QueueId, StoreMoment},
    ledger::{Batch, Ledger, RAMP_MS, Seq, next_rise_ms, ramped},
    limit::{Limit, LimitId, LimitValue},
    overrides::Steered,
    part::Part,
    small_map::SmallMap,
    sync::Inquiry,
};

pub(super) use self::permit::entry::Requester;
use self::permit::entry::{Due, Entry, Holder};
#[cfg(test)]
pub use self::work::LOOKS;

/// Leases after which a release is no longer repeated. A waiter that outlives even this is released when it is promoted
/// without an entry here.
const FORGET_AFTER: u32 = 10;

/// Time after a pause in which the limit rises.
const RAMP: Duration = Duration::from_millis(RAMP_MS);
/// Shortest time between two questions to a ledger whose limit rises.
const MIN_RISE: Duration = Duration::from_millis(10);

pub(super) struct Queue {
    id: QueueId,
    limit_id: LimitId,
    key: Key,
    /// The part of the store with its ledger.
    part: Part,
    /// The name of its ledger in the store.
    ledger: Arc<str>,
    limit: Arc<Limit>,
    /// The limit's value for this key, if the latest request brought one.
    own_value: Option<LimitValue>,
    /// Operators' override for this key. Boxed, since it is rare.
    steered: Option<Box<Steered>>,
    entries: SmallMap<Seq, Entry>,
    /// Requests that wait in the store's ledger. Boxed, like the outbox: most queues have neither.
    waiters: Option<Box<Waiters>>,
    outbox: Option<Box<Outbox>>,
    /// A batch should be sent, even an empty one.
    wants_batch: bool,
    /// Number of exchanges in flight with a batch for this queue.
    in_flight: u16,
    /// The ledger in this process, which decides without a store.
    ledger_here: Option<Box<Ledger>>,
    /// When the first held permit is due, or was before it ended: most permits end before that, and clear no timer.
    renew_at: Option<Instant>,
    /// The scan for permits that are due, between two of its parts.
    scan: Option<Box<RenewalScan>>,
    /// Idle slots, if the limit reuses them.
    pooled: Option<Box<Pooled>>,
    /// The ledger in this process has run: whether idle slots may stay must be checked.
    recheck_right: bool,
    /// A pause of the key, until its ramp is over. Boxed, since it is rare.
    pause: Option<Box<KeyPause>>,
    /// Newcomers are held back until the store has confirmed all holders: see [`introduce`](Self::introduce). May stay
    /// set after that, until [`after_change`](Self::after_change).
    introducing: bool,
    /// The last holder that was not confirmed yet when the queue last looked for one.
    unconfirmed: Seq,
    /// The next batch that adopts a permit tells the other replicas, since this one has found the loss.
    tells: bool,
    /// The next batch asks for the holders of this process: the store may have forgotten releases.
    lists: bool,
    held: HeldUnits,
    snapshot: Snapshot,
}

/// Units held by this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HeldUnits {
    all: u32,
    /// Units that the store should count.
    in_store: u32,
}

/// The state of a leg.
pub(super) enum LegState {
    /// `busy`: an exchange in flight may enter it into the ledger again.
    Held {
        over: bool,
        busy: bool,
    },
    Idle,
    /// In a ledger's queue, since then.
    Waiting(Instant),
    /// Unanswered, or being checked.
    Asked,
}

/// The local decision on a request.
pub(super) enum Decider {
    Ledger,
    /// A fallback that needs no ledger.
    Fallback(Result<(), AcquireErrorKind>),
}

/// The ledger as of the last reply.
#[derive(Clone, Copy)]
struct Snapshot {
    in_use: u32,
    waiting: u32,
    head: Option<i64>,
    seen: StoreMoment,
}

/// A pause of the key, which all replicas keep: a caller of this process started it, or the store reports it. The store
/// decides by its own clock; this is for the ledger in this process, for refusals, and to send the pause once more if it
/// may be lost.
#[derive(Clone, Copy)]
struct KeyPause {
    end: Instant,
    /// When it started here, or when the exchange was sent that last set or reported it: answers to earlier exchanges do
    /// not contradict it.
    since: Instant,
    /// Started by this process.
    own: bool,
    /// An operator has ended it, of which the store may not know yet.
    resumed: bool,
    /// The next batch sends its start or its end to the store.
    unsent: bool,
    /// The store has known the pause before: the next batch asks whether an operator has ended it, and restores it otherwise.
    asks: bool,
    /// When the ledger in this process may grant more, or when the ramp is over.
    due: Instant,
}

/// Requests that wait in the store's ledger, and when to ask about them.
#[derive(Default)]
struct Waiters {
    /// Tickets can collide if the store has lost a waiter and its clock was stepped back.
    by_ticket: BTreeSet<(i64, Seq)>,
    /// Places reported by the store when it was asked by name.
    places: BTreeMap<Seq, u32>,
    /// When to ask how far the queue has moved.
    poll_at: Option<Instant>,
    /// When the next lease in the ledger ends, and its slot passes to a waiter; or when the limit rises after a pause.
    next_slot_at: Option<Instant>,
    /// When to ask for every waiter by name: even a waiter behind the head may have left the queue.
    roll_call_at: Option<Instant>,
    /// When this process last asked after a silence, or a loss, in which waiters may have lost their places, or their grants.
    late_at: Option<Instant>,
}

/// A scan for permits that are due, which goes on at [`Queue::renew_at`].
#[derive(Default)]
struct RenewalScan {
    from: Seq,
    /// When the first of the entries before `from` is due.
    next: Option<Instant>,
}

/// The pool of idle slots.
struct Pooled {
    pool: Arc<Pool>,
    /// When its right was last recalled: answers to earlier exchanges do not restore it.
    recalled: Option<Instant>,
    /// When to release slots that were not needed lately.
    tend_at: Option<Instant>,
    /// Requests on their way to the store, in order: a slot that comes free goes to the first of them. Names are
    /// checked when they reach the front; answered ones are dropped then. While there are any, the pool's right is
    /// withheld.
    asking: VecDeque<Seq>,
    withholds: bool,
}

/// Pending work. Names are checked when they are sent: an entry may be gone by then.
#[derive(Default)]
struct Outbox {
    release: Vec<Release>,
    renew: VecDeque<Seq>,
    adopt: VecDeque<Seq>,
    /// In the order in which they began to ask.
    acquire: VecDeque<Newcomer>,
    inquiries: Vec<Inquiry>,
    /// Releases to repeat at `later_at`: an exchange that enters these names may still arrive.
    later: Vec<Release>,
    later_at: Option<Instant>,
}

#[derive(Clone, Copy)]
pub(super) struct Newcomer {
    pub seq: Seq,
    /// When it began to ask, and its number.
    pub since: Instant,
    pub number: NonZeroU64,
}

/// A name to release, until the store has acknowledged the release at a time when no exchange can restore the name.
/// There are never more releases than there were requests.
#[derive(Clone, Debug)]
pub(super) struct Release {
    seq: Seq,
    /// Store time until which an exchange might enter the name into the ledger; otherwise 0.
    not_after_us: u64,
    /// Many leases from now: the name has expired in the store by then.
    forget_at: Instant,
    /// What it settles in a fair ledger, until it is answered.
    due: Option<Box<Due>>,
}

/// The record of a batch until its answer.
pub(super) struct PendingBatch {
    pub queue: QueueId,
    /// The ledger cannot be used.
    pub failed: bool,
    releases: Vec<Release>,
    inquiries: Vec<Inquiry>,
    /// Newcomers that have lost their place, with its ticket.
    tickets: Vec<(Seq, i64)>,
    /// [`HeldUnits::in_store`], and the number of waiters in the store, when it was sent, or 0 during an introduction; with the
    /// units that its answer grants to claims.
    pub held: u32,
    waiting: u32,
    /// When the next lease in the ledger ends, according to the answer.
    nearest_ms: Option<u64>,
    /// The limit in the batch.
    limit: u32,
}

impl Release {
    /// Its exchange failed.
    pub fn set_repeated(&mut self) {
        if let Some(due) = &mut self.due
            && let Due::Settled(report) = **due
        {
            **due = Due::Repeated(report);
        }
    }

    /// The store may have counted its settlement.
    fn may_be_settled(&self) -> bool {
        matches!(self.due.as_deref(), Some(Due::Repeated(_)))
    }
}

impl Newcomer {
    /// A retried request goes before later ones.
    pub fn order(&self) -> (Instant, NonZeroU64) {
        (self.since, self.number)
    }
}

impl Snapshot {
    /// The latest moment at which a waiter was certainly without a slot. Grants follow tickets: a waiter behind the
    /// head was still waiting when the head was seen.
    fn seen_waiting(&self, ticket: i64, seen: StoreMoment) -> StoreMoment {
        match self.head {
            Some(head) if ticket >= head && self.seen.sent > seen.sent => self.seen,
            _ => seen,
        }
    }
}

impl KeyPause {
    /// Time since its end, in ms.
    fn elapsed_ms(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.end);
        elapsed.min(RAMP).as_millis() as u64
    }
}

impl PendingBatch {
    /// Names with a release in flight.
    pub fn releases(&self) -> impl Iterator<Item = Seq> {
        self.releases.iter().map(|release| release.seq)
    }

    /// Whether any newcomer has lost its place.
    pub fn has_tickets(&self) -> bool {
        !self.tickets.is_empty()
    }

    /// The ticket of the place that a newcomer has lost.
    pub fn ticket_of(&self, seq: Seq) -> Option<i64> {
        let mut tickets = self.tickets.iter();
        tickets.find_map(|&(other, ticket)| (other == seq).then_some(ticket))
    }
}

impl Queue {
    pub fn new(
        id: QueueId,
        (limit_id, key): (LimitId, Key),
        (part, ledger): (Part, Arc<str>),
        limit: Arc<Limit>,
        ctx: &Context,
    ) -> Self {
        let seen = StoreMoment {
            store_us: 0,
            sent: ctx.now,
        };
        Self {
            id,
            limit_id,
            key,
            part,
            ledger,
            limit,
            own_value: None,
            steered: None,
            entries: SmallMap::default(),
            waiters: None,
            outbox: None,
            wants_batch: false,
            in_flight: 0,
            ledger_here: None,
            renew_at: None,
            scan: None,
            pooled: None,
            recheck_right: false,
            pause: None,
            introducing: false,
            unconfirmed: 0,
            tells: false,
            lists: false,
            held: HeldUnits::default(),
            snapshot: Snapshot {
                in_use: 0,
                waiting: 0,
                head: None,
                seen,
            },
        }
    }

    pub fn id(&self) -> QueueId {
        self.id
    }

    pub fn limit_id(&self) -> LimitId {
        self.limit_id
    }

    pub fn key(&self) -> &Key {
        &self.key
    }

    pub fn part(&self) -> Part {
        self.part
    }

    /// Whether the store decides on its requests; without a store, the ledger in this process.
    pub fn availability(&self, ctx: &Context) -> Availability {
        ctx.availability(self.part)
    }

    pub fn ledger_name(&self) -> &Arc<str> {
        &self.ledger
    }

    pub fn limit(&self) -> &Arc<Limit> {
        &self.limit
    }

    pub fn max(&self) -> u32 {
        self.own_limit().map_or(self.limit.max(), |own| own.max)
    }

    /// The value of this key, if it differs from the limit's.
    fn own_limit(&self) -> Option<LimitValue> {
        match &self.steered {
            Some(steered) => steered.own_value(self.own_value),
            None => self.own_value,
        }
    }

    /// The fallback in force of this key.
    fn fallback(&self, ctx: &Context) -> FallbackInForce {
        ctx.fallback(self.limit_id, self.part, self.own_limit())
    }

    /// Until when operators have paused the limit for this key.
    fn paused_until(&self) -> Option<Instant> {
        self.steered.as_ref()?.paused_until
    }

    fn is_paused(&self) -> bool {
        self.paused_until().is_some()
    }

    /// A pause, or its ramp, that no operator has ended.
    fn running_pause(&self) -> Option<&KeyPause> {
        self.pause.as_deref().filter(|pause| !pause.resumed)
    }

    /// The rest of a pause, before its ramp.
    fn pause_left(&self, now: Instant) -> Option<Duration> {
        let left = self.running_pause()?.end.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// The part of a limit that a pause and its ramp leave.
    fn in_force(&self, max: u32, now: Instant) -> u32 {
        let ramp = |pause: &KeyPause| ramped(max, 0, pause.elapsed_ms(now));
        self.running_pause().map_or(max, ramp)
    }

    /// When a ledger with waiters may grant the next slot of a limit that rises after a pause.
    fn next_rise(&self, max: u32, in_use: u32, now: Instant) -> Option<Instant> {
        let pause = self.running_pause()?;
        let rise_ms = next_rise_ms(max, in_use, pause.elapsed_ms(now));
        Some((pause.end + Duration::from_millis(rise_ms)).max(now + MIN_RISE))
    }

    /// Adds a pause to send, or its end.
    fn take_pause(&mut self, now: Instant, batch: &mut Batch) {
        let Some(pause) = self.pause.as_mut().filter(|one| one.unsent) else {
            return;
        };
        let left = pause.end.saturating_duration_since(now);
        if pause.resumed || !left.is_zero() {
            let length_ms = left.as_nanos().div_ceil(1_000_000) as u64;
            batch.pause_ms = Some(if pause.resumed { 0 } else { length_ms });
            batch.asks_pause = pause.asks;
            pause.since = now;
        }
        pause.unsent = false;
    }

    /// Sends a pause, or the end of one, once more. `asks`: see [`KeyPause::asks`].
    fn send_pause_again(&mut self, asks: bool) {
        if let Some(pause) = self.pause.as_mut().filter(|pause| !pause.unsent) {
            (pause.unsent, pause.asks) = (true, asks);
            self.wants_batch = true;
        }
    }

    /// How long newcomers wait because permits return to a store that has lost its data, or was down.
    fn return_left(&self, ctx: &Context) -> Option<Duration> {
        if !ctx.returns.is_any() || !ctx.asks_store(self.part) {
            return None;
        }
        let strict = ctx.strict(self.limit_id, self.part, self.own_limit())?;
        (ctx.returns).wait(self.part, self.id, strict, ctx.now)
    }

    fn is_returning(&self, ctx: &Context) -> bool {
        self.return_left(ctx).is_some()
    }

    /// The limit by which the store decides on newcomers; holders return regardless of it.
    fn max_in_store(&self, ctx: &Context) -> u32 {
        if self.is_returning(ctx) {
            0
        } else {
            self.max()
        }
    }

    /// Why a request that does not wait is refused.
    pub fn full_kind(&self, ctx: &Context) -> AcquireErrorKind {
        match self.pause_left(ctx.now) {
            Some(_) => AcquireErrorKind::Paused,
            None if self.is_returning(ctx) => AcquireErrorKind::Unavailable,
            None => AcquireErrorKind::Full,
        }
    }

    pub fn contains(&self, seq: Seq) -> bool {
        self.entries.contains_key(&seq)
    }

    /// Whether the release of a name is pending or unconfirmed.
    pub fn is_releasing(&self, seq: Seq) -> bool {
        let outbox = self.outbox.iter();
        let mut listed = outbox.flat_map(|outbox| outbox.release.iter().rev());
        self.contains(seq) || listed.any(|release| release.seq == seq)
    }

    /// Slots held by permits.
    pub fn held_by_permits(&self) -> impl Iterator<Item = Seq> {
        let by_permit = |entry: &Entry| entry.holder() == Some(Holder::Permit);
        let held = self
            .entries
            .iter()
            .filter(move |(_, entry)| by_permit(entry));
        held.map(|(seq, _)| *seq)
    }

    /// The names of matching entries.
    fn those(&self, which: impl Fn(&Entry) -> bool) -> Vec<Seq> {
        let those = self.entries.iter().filter(|(_, entry)| which(entry));
        those.map(|(seq, _)| *seq).collect()
    }

    fn has_waiters(&self) -> bool {
        self.waiters().next().is_some()
    }

    /// Requests that wait in the store's ledger, by ticket.
    fn waiters(&self) -> impl Iterator<Item = &(i64, Seq)> {
        self.waiters.iter().flat_map(|waiters| &waiters.by_ticket)
    }

    /// Waiters with a lower ticket.
    fn waiters_before(&self, ticket: i64) -> Vec<(i64, Seq)> {
        let waiters = self.waiters.iter();
        let before = waiters.flat_map(|waiters| waiters.by_ticket.range(..(ticket, 0)));
        before.copied().collect()
    }

    /// Slots of the ledger in this process that are in use, without those idle in the pool.
    fn used_of(&self, ledger: &Ledger) -> u32 {
        ledger.in_use().saturating_sub(self.idle() as u32)
    }

    /// Updates the snapshot from the ledger in this process.
    fn read_local(&mut self) {
        if let Some(ledger) = &self.ledger_here {
            let numbers = (self.used_of(ledger), ledger.waiting());
            (self.snapshot.in_use, self.snapshot.waiting) = numbers;
        }
    }

    /// Number of slots of the ledger in this process.
    fn local_max(&self, ctx: &Context) -> u32 {
        self.in_force(self.local_max_without_pause(ctx), ctx.now)
    }

    fn local_max_without_pause(&self, ctx: &Context) -> u32 {
        if !ctx.shared {
            return self.max();
        }
        match self.fallback(ctx) {
            FallbackInForce::Local(value) => value.max,
            FallbackInForce::Allow => self.max(),
            // Its time has just ended.
            FallbackInForce::Reject => 0,
        }
    }

    pub fn idle(&self) -> usize {
        self.pool().map_or(0, |pool| pool.idle())
    }

    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.pooled.as_ref().map(|pooled| &pooled.pool)
    }
}
