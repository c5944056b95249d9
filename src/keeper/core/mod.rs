//! The core: a state machine without IO, with many queues, and one connection to the store, or to each part of a cluster.
//! The time is passed in, so that a simulation can drive the core step by step.
//!
//! | file | what |
//! | --- | --- |
//! | `exchange` | the work of many queues, batched into one exchange (group commit), sent, and answered |
//! | `store` | exchanges without an answer; connections; transitions of the breaker; answers to claims |
//! | `requests` | requests and permits: submitted, collected, cancelled, released; timers; shutdown |
//! | `limits` | the limits, their current values, overrides; the view of operators |
//! | `acquire` | all-or-nothing acquisition of slots: submitted, sent, advanced |
//! | `local` | decisions of this process, by its ledgers, its rates and fallbacks, also on unanswered requests; requests that rates refuse or delay |
//! | `refusals` | requests that are refused or dropped, and the contents of a refusal |
//! | `rates` | charges and refunds at rates, claims on ledgers and rates of this process, and accounts of permits |
//! | this one | the data, requests and the lists that they are in; settings, the limits in force, the time and counts are in [`context`](super::context) |
//! | `link` | a connection, with its exchanges in flight, their number, the work that only it can do, and the generation of the data there |
//! | `queues` | the queues, created on demand, and their indexes |
//! | `breaker` | the circuit breaker |
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
mod link;
mod local;
mod queues;
mod rates;
mod refusals;
mod requests;
mod store;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    mem,
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::{
    link::Link,
    queues::{Queues, SMALL_ROOM},
};
use super::{
    context::{Context, Decided, Decision, Settings},
    demand::{Notes, RequestId},
    effects::Effects,
    queue::{LegState, Queue},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{Accounts, BoundedPermits, Fee, Lease, Paid, QueueId},
    ledger::{Batch, Claim, ClaimReply, RateState, Seq},
    limit::{Limit, LimitId},
    operable::{Refusals, Standings},
    part::Part,
    status::InLine,
    sync::StoredWaker,
};

pub(super) use self::link::{ExchangeId, Outgoing};
#[cfg(test)]
pub(super) use self::{
    audit::{LedgerHere, Payer},
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
    measured: Vec<Measured>,
    queues: Queues,
    /// One, or one for each part of a cluster, indexed by part.
    links: Box<[Link]>,
    /// The part whose link was last looked at for work.
    last_link: usize,
    exchanges: u64,
    requests: Slab<Request>,
    last_request: u64,
    /// Decisions being followed.
    following: Vec<Decided>,
    /// When requests fall back if the store has not answered.
    asking: BTreeSet<(Instant, RequestId)>,
    /// Deadlines of waits in queues.
    waits: BTreeSet<(Instant, RequestId)>,
    /// Unanswered requests do not fall back before this time: answers may lie unread.
    patient_until: Option<Instant>,
    /// Requests held back by a rate, with their wake-up time and the limit.
    sleepers: BTreeMap<(Instant, RequestId), LimitId>,
    rates: Rates,
    local: LocalClaim,
    /// The costs of permits at rates.
    accounts: Accounts,
    bounded: BoundedPermits,
    reach: Reach,
    /// When a key of each limit last turned out to be unusable.
    complained: HashMap<LimitId, Instant>,
    orphaned: bool,
    /// When to take a step for a pending shutdown.
    alarm: Option<Instant>,
    /// Deadline for requests to be served and permits to be released, by the latest call of a shutdown; whether one has
    /// passed; and the names of the slots that were lost then.
    grace_ends_at: Option<Instant>,
    closed: bool,
    lost_names: HashSet<Seq>,
    refusals: Refusals,
    standings: Standings,
}

/// The values in force of a limit, as measured.
#[derive(Clone, Copy, Default)]
struct Measured {
    max: u32,
    /// Whether operators have set it.
    is_overridden: bool,
    /// The value that this process enforces by itself.
    fallback: u32,
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
    /// A slot that it asks for is in the outbox of its queue, or was sent from there.
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

/// The next slots and charges of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// All slots and charges that it does not have yet.
    All,
    /// In a cluster, where an exchange is about one key: this charge. Charges come first, since nothing is held while
    /// the request waits for them.
    Charge(usize),
    /// In a cluster: the slot of this leg. Earlier slots are held meanwhile.
    Slot(usize),
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
    /// For each ask: the index of its leg among the legs decided on, its queue, and its batch.
    leg_of_ask: Vec<usize>,
    queues: Vec<QueueId>,
    batches: Vec<Batch>,
    /// Fees that no local rate charges: their numbers, and the refusals that do not count.
    waived: Vec<(usize, Option<AcquireErrorKind>)>,
}

/// Whether the store has ever answered, and when its silence was last reported.
#[derive(Default)]
struct Reach {
    reached: bool,
    reported: Option<Instant>,
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

impl Next {
    fn legs_in(self, request: &Request) -> impl Iterator<Item = &SlotLeg> {
        let legs = request.legs.iter().enumerate();
        let legs = legs.filter(move |(number, _)| match self {
            Self::All => true,
            Self::Charge(_) => false,
            Self::Slot(next) => *number == next,
        });
        legs.map(|(_, leg)| leg)
    }

    /// Its pending charges, with their numbers.
    fn fees_in(self, request: &Request) -> impl Iterator<Item = (usize, &Fee)> {
        let fees = request.fees().iter().enumerate();
        fees.filter(move |(number, fee)| {
            let is_next = match self {
                Self::All => true,
                Self::Charge(next) => *number == next,
                Self::Slot(_) => false,
            };
            is_next && fee.paid == Paid::Not
        })
    }
}

impl Core {
    fn next_for(&self, request: &Request) -> Next {
        if !self.ctx.settings.parts.is_cluster() {
            return Next::All;
        }
        let mut fees = request.fees().iter();
        if let Some(number) = fees.position(|fee| fee.paid == Paid::Not) {
            return Next::Charge(number);
        }
        let lacks = |leg: &SlotLeg| {
            let queue = &self.queues[leg.lease.queue];
            let state = queue.leg_state(leg.lease.seq(), self.ctx.now);
            !matches!(state, Some(LegState::Held { .. }))
        };
        match request.legs.iter().position(lacks) {
            Some(number) => Next::Slot(number),
            None => Next::All,
        }
    }

    /// The part of the store with the next slots and charges of a request.
    #[inline]
    fn part_of(&self, request: &Request) -> Part {
        if !self.ctx.settings.parts.is_cluster() {
            return Part::default();
        }
        match self.next_for(request) {
            Next::All => Part::default(),
            Next::Charge(number) => request.fees()[number].part,
            Next::Slot(number) => self.queues[request.legs[number].lease.queue].part(),
        }
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

    /// Inlined, since a call copies the request twice.
    #[inline(always)]
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
            // Of no entry.
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

    /// When the next request falls back for want of an answer of the store.
    fn next_end_of_asking(&self) -> Option<Instant> {
        let first = self.asking.first().map(|(at, _)| *at)?;
        Some(self.patient_until.map_or(first, |until| first.max(until)))
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

impl Core {
    /// `shared`: there is a store; otherwise the ledgers in this process decide.
    pub fn new(settings: Settings, shared: bool, now: Instant) -> Self {
        let parts = settings.parts;
        let link = |part| Link::new(part, &settings, now);
        Self {
            links: parts.all().map(link).collect(),
            last_link: 0,
            ctx: Context::new(settings, shared, now),
            updated: Vec::new(),
            measured: Vec::new(),
            declared: Vec::new(),
            queues: Queues::new(parts, !shared),
            exchanges: 0,
            requests: Slab::new(),
            last_request: 0,
            following: Vec::new(),
            asking: BTreeSet::new(),
            waits: BTreeSet::new(),
            patient_until: None,
            sleepers: BTreeMap::new(),
            rates: Rates::default(),
            local: LocalClaim::default(),
            accounts: Accounts::new(parts),
            bounded: BoundedPermits::default(),
            reach: Reach::default(),
            complained: HashMap::new(),
            orphaned: false,
            alarm: None,
            grace_ends_at: None,
            closed: false,
            lost_names: HashSet::new(),
            refusals: Refusals::default(),
            standings: Standings::default(),
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.ctx.settings
    }

    /// The effects, to be run without the lock.
    #[inline]
    pub fn take_effects(&mut self) -> Effects {
        self.ctx.measure_returns();
        self.ctx.effects.take()
    }

    /// Whether there is a subscriber for the history.
    pub fn set_history_wanted(&mut self, wanted: bool) {
        self.ctx.set_history_wanted(wanted);
    }

    /// Whether there is a store that other replicas share.
    pub fn is_shared(&self) -> bool {
        self.ctx.shared
    }

    fn link(&mut self, part: Part) -> &mut Link {
        &mut self.links[part.number()]
    }

    pub fn is_ending(&self) -> bool {
        self.ctx.ending
    }

    /// Changes whenever the store confirms a release, a report of spending or a refund.
    pub fn confirmed(&self) -> (u64, usize, usize) {
        let confirmed = self.ctx.counts.confirmed;
        let refunds = self.links.iter().map(|link| link.refunds.len());
        (confirmed, self.accounts.len(), refunds.sum())
    }

    /// Names that the store may know, though no permit or request needs them once the core is [closed](Self::close) and
    /// everything is [lost](Self::lose_all). A name may occur twice.
    pub fn unconfirmed(&self) -> impl Iterator<Item = Seq> {
        let in_flight = self.links.iter().flat_map(Link::names_released);
        let queues = self.queues.iter();
        queues.flat_map(Queue::names_in_store).chain(in_flight)
    }

    /// The names of slots held by permits.
    pub fn held_by_permits(&self) -> HashSet<Seq> {
        let queues = self.queues.iter();
        queues.flat_map(Queue::held_by_permits).collect()
    }

    /// Whether a request awaits an answer, or a shutdown is waiting to end.
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
            || self.links.iter().any(|link| !link.in_flight.is_empty())
            || self.alarm.is_some()
            || !self.ctx.confirmations.is_empty()
            || (self.links.iter())
                .any(|link| self.queues.ready(link.part).any(Queue::has_inquiries))
    }

    /// Whether no permit, request, release or refund is left or can still come.
    pub fn is_over(&self) -> bool {
        // A charge in flight may still need a refund.
        let is_owed = |link: &Link| {
            link.is_up()
                && (!self.accounts.is_empty()
                    || !link.refunds.is_empty()
                    || !link.in_flight.is_empty())
        };
        self.orphaned
            && self.queues.is_empty()
            && self.requests.is_empty()
            && !self.links.iter().any(is_owed)
    }

    /// Requests a step at this time, for a shutdown.
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

    /// Changes a queue, then lists or drops it.
    #[inline]
    fn change<R>(&mut self, id: QueueId, change: impl FnOnce(&mut Queue, &mut Context) -> R) -> R {
        self.queues.change(&mut self.ctx, id, change)
    }

    fn each_queue(&mut self, mut change: impl FnMut(&mut Queue, &mut Context)) {
        for id in self.queues.ids() {
            // The queue may have been dropped on behalf of another.
            if self.queues.has(id) {
                self.change(id, &mut change);
            }
        }
    }

    /// Changes all queues with ledgers in this part.
    fn each_queue_of(&mut self, part: Part, mut change: impl FnMut(&mut Queue, &mut Context)) {
        for id in self.queues.ids_of(part) {
            if self.queues.has(id) {
                self.change(id, &mut change);
            }
        }
    }
}
