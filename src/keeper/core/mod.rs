//! The core: a state machine without IO, with many queues and one connection. The time is passed in, so that a
//! simulation can drive the core step by step.
//!
//! | file | what |
//! | --- | --- |
//! | `exchange` | the work of many queues, batched into one exchange (group commit), sent, and answered |
//! | `store` | exchanges without an answer; connections; transitions of the breaker; answers to claims |
//! | `requests` | requests and permits: submitted, collected, cancelled, released; timers; shutdown |
//! | `limits` | the limits, their current values, overrides; the view of operators |
//! | `acquire` | all-or-nothing acquisition of slots: submitted, sent, advanced; unanswered requests |
//! | `local` | decisions of this process, by its ledgers, its rates and fallbacks; requests that rates refuse or delay |
//! | `refusals` | requests that are refused or dropped, and the contents of a refusal |
//! | `rates` | charges and refunds at rates, claims on ledgers and rates of this process, and accounts of permits |
//! | this one | the data, requests and the lists that they are in; settings, the limits in force, the time and counts are in [`context`](super::context) |
//! | `queues` | the queues, created on demand, and their indexes |
//! | `breaker` | the circuit breaker |
//! | `window` | how many exchanges may be in flight |
//!
//! Each file calls only files below it. Everything about a single ledger is in its [queue](super::queue), which reports
//! to the [`Context`] and does not know the core.
//!
//! At most one exchange in flight may enter a name (`Seq`) into the ledger. If that exchange fails, the fate of the name
//! is unknown: its release is repeated until the store acknowledges it at a time after the exchange's `not_after`, and
//! the request continues under a new name.

mod acquire;
#[cfg(test)]
mod audit;
mod breaker;
mod exchange;
mod limits;
mod local;
mod queues;
mod rates;
mod refusals;
mod requests;
mod store;
mod window;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt, mem,
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::{
    breaker::Breaker,
    queues::{Queues, SMALL_ROOM},
    window::{WINDOW, WINDOW_OF_ONE_KEY, Window},
};
use super::{
    context::{Availability, Context, Decided, Decision, Settings},
    demand::{Notes, RequestId},
    effects::Effects,
    queue::{PendingBatch, Queue},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{AccountId, Accounts, BoundedPermits, Fee, Lease, QueueId, StoreClock},
    ledger::{Batch, Claim, ClaimReply, Exchange, RateState, Refund, Seq},
    limit::{Limit, LimitId},
    operable::{Refusals, Standings},
    status::InLine,
    sync::StoredWaker,
};

#[cfg(test)]
pub(super) use self::{
    audit::{LedgerHere, Payer, WaitingRequest},
    exchange::MAX_REFUNDS,
    queues::MAX_CACHED,
};

/// The state machine.
pub(super) struct Core {
    ctx: Context,
    /// The limits as last updated, without overrides. The context has the limits in force.
    updated: Vec<Arc<Limit>>,
    /// The limits as registered.
    declared: Vec<Limit>,
    /// The values in force as measured, and whether operators set them.
    measured: Vec<(i64, i64)>,
    queues: Queues,
    /// In sending order.
    in_flight: Vec<PendingExchange>,
    window: Window,
    /// The kind of work that goes first in the next exchange about one key.
    next_kind: usize,
    exchanges: u64,
    requests: Slab<Request>,
    last_request: u64,
    /// Decisions being followed.
    following: Vec<Decided>,
    /// Requests to send, except those sent by their queues.
    unsent: BTreeSet<RequestId>,
    /// Requests that met a queue which is being introduced: see [`Queue::introduce`]. Retried with each exchange.
    held_back: BTreeSet<RequestId>,
    /// When requests fall back if the store has not answered.
    asking: BTreeSet<(Instant, RequestId)>,
    /// Deadlines of waits in queues.
    waits: BTreeSet<(Instant, RequestId)>,
    /// Unanswered requests do not fall back before this time: answers may lie unread.
    patient_until: Option<Instant>,
    /// Requests held back by a rate, with their wake-up time and the limit.
    sleepers: BTreeMap<(Instant, RequestId), LimitId>,
    refunds: Vec<Refund>,
    rates: Rates,
    local: LocalClaim,
    /// The costs of permits at rates.
    accounts: Accounts,
    bounded: BoundedPermits,
    clock: Option<StoreClock>,
    breaker: Breaker,
    connection: Connection,
    reach: Reach,
    /// When a key of each limit last turned out to be unusable.
    complained: HashMap<LimitId, Instant>,
    orphaned: bool,
    /// Whether it was already shut down.
    was_shut_down: bool,
    /// When to take a step for a pending shutdown.
    alarm: Option<Instant>,
    refusals: Refusals,
    standings: Standings,
}

/// A request for slots and charges, all or nothing.
struct Request {
    number: NonZeroU64,
    /// In order of acquisition.
    legs: Legs,
    /// A request for a single slot, which its queue sends.
    plain: bool,
    /// Includes its charges.
    notes: Option<Box<Notes>>,
    stage: Stage,
    asked: Instant,
    /// Set while the request asks the store.
    asking: Option<Asking>,
    /// Deadline of its wait, while it queues.
    waits_until: Option<Instant>,
    /// The request's first ticket from the store, under any of its limits.
    ticket: Option<i64>,
    waker: Option<StoredWaker>,
}

/// Most requests have one or two.
type Legs = SmallVec<[SlotLeg; 2]>;

/// A slot wanted by a request.
#[derive(Clone)]
struct SlotLeg {
    lease: Arc<Lease>,
    /// Maximum wait, from the beginning of its turn.
    wait: Duration,
}

/// When a request began to ask the store, and when it stops.
#[derive(Clone, Copy)]
struct Asking {
    since: Instant,
    until: Instant,
}

enum Stage {
    /// The legs decide on the next step.
    Open,
    /// In the outbox of its queue, or sent from there.
    Listed,
    /// To be sent in a claim.
    Unsent,
    /// Sent in this exchange.
    Sent(ExchangeId),
    /// Held back by a rate until then.
    Sleeping(Instant),
    Granted,
    Refused(AcquireError),
}

/// The number of an exchange within its keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangeId(pub u64);

impl fmt::Display for ExchangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

pub(super) struct Outgoing {
    pub id: ExchangeId,
    pub exchange: Arc<Exchange>,
    /// When the exchange times out.
    pub deadline: Instant,
}

struct PendingExchange {
    id: ExchangeId,
    at: Instant,
    /// When the driver gives up on the exchange.
    deadline: Instant,
    /// Approximate size on the wire.
    bytes: usize,
    exchange: Arc<Exchange>,
    /// One for each batch.
    pending: Vec<PendingBatch>,
    /// The origin of each claim.
    claims: Vec<Asker>,
}

/// The origin of a claim in an exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asker {
    Request(RequestId),
    /// A request that its queue would have sent, turned into a claim to keep the order.
    Listed,
    /// A report of spending.
    Account(AccountId),
}

/// The rates of this process, used without a store or while it is down.
#[derive(Default)]
struct Rates {
    states: HashMap<(LimitId, Key), RateState>,
    purge_at: usize,
}

/// The claim being decided on. Cleared but never freed.
#[derive(Default)]
struct LocalClaim {
    claim: Claim,
    reply: ClaimReply,
    /// By charge.
    rates: Vec<(LimitId, Key)>,
    /// For each ask: the part of the request, the queue, and the batch.
    parts: Vec<usize>,
    queues: Vec<QueueId>,
    batches: Vec<Batch>,
    /// Fees that no local rate charges: their numbers, and the refusals that do not count.
    waived: Vec<(usize, Option<AcquireErrorKind>)>,
}

/// The connection to the store, as far as the store reports it.
#[derive(Default)]
struct Connection {
    made: Option<Instant>,
    /// When to reconnect after the connection has ended.
    reconnect_at: Option<Instant>,
    /// A connection is wanted now.
    is_wanted: bool,
    /// The last exchange drafted for an earlier connection.
    begins_after: u64,
}

/// Whether the store has ever answered, and when its silence was last reported.
#[derive(Default)]
struct Reach {
    reached: bool,
    reported: Option<Instant>,
}

impl Connection {
    /// Whether the exchange was drafted for this connection, or establishes it.
    fn has(&self, id: ExchangeId) -> bool {
        id.0 > self.begins_after
    }
}

impl Request {
    fn new(
        id: RequestId,
        legs: Legs,
        plain: bool,
        notes: Option<Box<Notes>>,
        now: Instant,
    ) -> Self {
        Self {
            number: id.number,
            legs,
            plain,
            notes,
            stage: Stage::Open,
            asked: now,
            asking: None,
            waits_until: None,
            ticket: None,
            waker: None,
        }
    }

    fn id(&self, slot: u32) -> RequestId {
        let number = self.number;
        RequestId { number, slot }
    }

    fn fees(&self) -> &[Fee] {
        self.notes.as_ref().map_or(&[], |notes| &notes.fees)
    }

    fn fees_mut(&mut self) -> &mut [Fee] {
        self.notes.as_mut().map_or(&mut [], |notes| &mut notes.fees)
    }

    fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::Refused(_))
    }
}

/// Storage of requests.
impl Core {
    fn request(&self, id: RequestId) -> Option<&Request> {
        let request = self.requests.get(id.slot as usize);
        request.filter(|request| request.number == id.number)
    }

    fn request_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let request = self.requests.get_mut(id.slot as usize);
        request.filter(|request| request.number == id.number)
    }

    /// Requests that match, in order of arrival.
    fn requests_that(&self, which: impl Fn(&Request) -> bool) -> Vec<RequestId> {
        let requests = self.requests.iter();
        let those = requests.filter(|(_, request)| which(request));
        let mut ids: Vec<_> = those.map(|(slot, one)| one.id(slot as u32)).collect();
        ids.sort_unstable();
        ids
    }

    fn next_request(&mut self) -> RequestId {
        self.last_request += 1;
        RequestId {
            number: NonZeroU64::new(self.last_request).expect("counted from 1"),
            slot: self.requests.vacant_key() as u32,
        }
    }

    /// Stores a request under its id.
    fn insert_request(&mut self, id: RequestId, request: Request) {
        let slot = self.requests.insert(request);
        debug_assert_eq!(slot, id.slot as usize);
    }

    fn remove_request(&mut self, id: RequestId) -> Option<Request> {
        self.request(id)?;
        let request = self.requests.remove(id.slot as usize);
        if self.requests.is_empty() && self.requests.capacity() > SMALL_ROOM {
            self.requests = Slab::new();
        }
        Some(request)
    }
}

/// Stages of requests.
impl Core {
    /// Advances the request together with those on which queues have decided.
    fn note_changed(&mut self, request: RequestId) {
        self.ctx.decided.push(Decided {
            request,
            seq: 0,
            decision: Decision::Changed,
        });
    }

    /// Whether an exchange contains this request.
    fn is_sent_in(&self, id: RequestId, exchange: ExchangeId) -> bool {
        let request = self.request(id);
        request.is_some_and(|one| matches!(one.stage, Stage::Sent(sent) if sent == exchange))
    }

    /// The request no longer asks the store, or has been answered.
    fn stop_asking(&mut self, id: RequestId) {
        // Usually empty, as in memory.
        if self.asking.is_empty() {
            return;
        }
        let request = self.request_mut(id);
        if let Some(asking) = request.and_then(|request| request.asking.take()) {
            self.asking.remove(&(asking.until, id));
        }
    }

    /// Sets the deadline of the wait in a queue.
    fn set_wait(&mut self, id: RequestId, until: Option<Instant>) {
        if until.is_none() && self.waits.is_empty() {
            return;
        }
        let Some(request) = self.request_mut(id) else {
            return;
        };
        let before = mem::replace(&mut request.waits_until, until);
        if before != until {
            if let Some(before) = before {
                self.waits.remove(&(before, id));
            }
            self.waits.extend(until.map(|until| (until, id)));
        }
    }
}

impl Asker {
    fn request(self) -> Option<RequestId> {
        match self {
            Self::Request(id) => Some(id),
            Self::Listed | Self::Account(_) => None,
        }
    }

    fn account(self) -> Option<AccountId> {
        match self {
            Self::Account(id) => Some(id),
            Self::Listed | Self::Request(_) => None,
        }
    }
}

impl Core {
    /// `shared`: there is a store; otherwise the ledgers in this process decide.
    pub fn new(settings: Settings, shared: bool, now: Instant) -> Self {
        let bounds = match settings.part {
            None => WINDOW,
            Some(_) => WINDOW_OF_ONE_KEY,
        };
        Self {
            window: Window::new(bounds, now),
            next_kind: 0,
            ctx: Context::new(settings, shared, now),
            updated: Vec::new(),
            measured: Vec::new(),
            declared: Vec::new(),
            queues: Queues::new(!shared),
            in_flight: Vec::new(),
            exchanges: 0,
            requests: Slab::new(),
            last_request: 0,
            following: Vec::new(),
            unsent: BTreeSet::new(),
            held_back: BTreeSet::new(),
            asking: BTreeSet::new(),
            waits: BTreeSet::new(),
            patient_until: None,
            sleepers: BTreeMap::new(),
            refunds: Vec::new(),
            rates: Rates::default(),
            local: LocalClaim::default(),
            accounts: Accounts::default(),
            bounded: BoundedPermits::default(),
            clock: None,
            breaker: Breaker::new(),
            connection: Connection::default(),
            reach: Reach::default(),
            complained: HashMap::new(),
            orphaned: false,
            was_shut_down: false,
            alarm: None,
            refusals: Refusals::default(),
            standings: Standings::default(),
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.ctx.settings
    }

    /// The effects, to be run without the lock.
    pub fn take_effects(&mut self) -> Effects {
        self.ctx.effects.take()
    }

    /// Whether the store turned out to have lost its data since the last call.
    #[inline]
    pub fn take_data_lost(&mut self) -> bool {
        mem::take(&mut self.ctx.is_data_lost)
    }

    /// Whether there is a subscriber for the history.
    pub fn set_history_wanted(&mut self, wanted: bool) {
        self.ctx.set_history_wanted(wanted);
    }

    /// Whether there is a store that other replicas share.
    pub fn is_shared(&self) -> bool {
        self.ctx.shared
    }

    pub fn store_is_up(&self) -> bool {
        self.ctx.availability == Availability::Up
    }

    /// Whether the store decides on requests.
    fn asks_store(&self) -> bool {
        self.ctx.shared && self.store_is_up()
    }

    pub fn is_ending(&self) -> bool {
        self.ctx.ending
    }

    /// Whether no permit has a slot or an unsettled account.
    pub fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0 && self.accounts.is_empty()
    }

    /// Whether nothing is left to send to the store, or to expect from it, now or later. A store that is down is owed
    /// only releases.
    pub fn is_quiet(&self) -> bool {
        if !self.store_is_up() {
            return self.unconfirmed().next().is_none();
        }
        self.in_flight.is_empty()
            && self.queues.ready_count() == 0
            && self.unsent.is_empty()
            && self.refunds.is_empty()
            && self.accounts.next_key().is_none()
            && !self.queues.iter().any(Queue::repeats_releases)
    }

    /// Changes whenever the store confirms a release, a report of spending or a refund.
    pub fn confirmed(&self) -> (u64, usize, usize) {
        let confirmed = self.ctx.counts.confirmed;
        (confirmed, self.accounts.len(), self.refunds.len())
    }

    /// Names that the store may know, though no permit or request needs them once the core is [closed](Self::close) and
    /// everything is [lost](Self::lose_all). A name may occur twice.
    pub fn unconfirmed(&self) -> impl Iterator<Item = Seq> {
        let pending = self.in_flight.iter().flat_map(|sent| &sent.pending);
        let in_flight = pending.flat_map(PendingBatch::releases);
        let queues = self.queues.iter();
        queues.flat_map(Queue::names_in_store).chain(in_flight)
    }

    /// The names of slots held by permits, one per permit.
    pub fn held_by_permits(&self) -> HashSet<Seq> {
        let queues = self.queues.iter();
        queues.flat_map(Queue::held_by_permits).collect()
    }

    /// Whether a request awaits an answer, or a shutdown its end.
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
            || !self.in_flight.is_empty()
            || self.alarm.is_some()
            || !self.ctx.confirmations.is_empty()
            || self.queues.ready().any(Queue::has_inquiries)
    }

    /// Whether no permit, request, release or refund is left or can still come.
    pub fn is_over(&self) -> bool {
        // A charge in flight may still need a refund.
        let is_owed =
            !self.refunds.is_empty() || !self.accounts.is_empty() || !self.in_flight.is_empty();
        let owes = is_owed && self.store_is_up();
        self.orphaned && self.queues.is_empty() && self.requests.is_empty() && !owes
    }

    /// Requests a step at this time.
    pub fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    pub fn limit_id(&self, limit_name: &str) -> Option<LimitId> {
        let mut limits = self.ctx.limits.iter();
        limits
            .position(|known| known.name() == limit_name)
            .map(LimitId)
    }

    fn refusal(&self, limit: LimitId, kind: AcquireErrorKind) -> AcquireError {
        self.ctx.limits[limit.0].acquire_error(kind)
    }

    /// The refusal under a limit that an operator has paused until then.
    fn paused_error(&self, limit: LimitId, until: Instant) -> AcquireError {
        let mut error = self.refusal(limit, AcquireErrorKind::Paused);
        error.details.retry_after = Some(until.saturating_duration_since(self.ctx.now));
        error
    }

    /// An entry's place in its queue.
    fn in_line_of(&self, lease: &Lease) -> Option<InLine> {
        let queue = self.queues.get(lease.queue)?;
        queue.in_line(lease.seq())
    }

    fn each_queue(&mut self, mut change: impl FnMut(&mut Queue, &mut Context)) {
        for id in self.queues.ids() {
            // The queue may have been dropped on behalf of another.
            self.queues.change_if_there(&mut self.ctx, id, &mut change);
        }
    }
}
