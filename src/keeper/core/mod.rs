//! The core: a state machine without IO. It has many queues and one connection; the time is passed in, so that a
//! simulation can drive it step by step.
//!
//! | file | what |
//! | --- | --- |
//! | `requests` | submitted, collected, cancelled; permits released; shutdown |
//! | `timers` | one sleep for all; bounds on permits |
//! | `limits` | the limits, and the values that they have now |
//! | `replies` | answers, failures and events of the store; the breaker opens and closes, connections come and go |
//! | `exchange` | the work of many queues, batched into one exchange (group commit) |
//! | `claims` | requests for slots under several limits, all or nothing |
//! | `rates` | charges and refunds |
//! | this one | the data; where to find the queue that needs something |
//! | `breaker` | the circuit breaker |
//!
//! Each file calls only those below it. Anything that concerns a single ledger is the business of its
//! [queue](super::queue), which reports to the [`Context`] and knows nothing of this.
//!
//! A name (`Seq`) is in at most one exchange in flight that may put it into the ledger. When such an exchange fails its
//! fate is unknown: the name is released until a release was acknowledged at a store time after the exchange's
//! `not_after`, and the request goes on under a new name.

#[cfg(test)]
mod audit;
mod breaker;
mod claims;
mod exchange;
mod limits;
mod rates;
mod replies;
mod requests;
mod timers;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    hash::Hash,
    sync::Arc,
    time::Duration,
};

use slab::Slab;
use tokio::time::Instant;

use self::breaker::Breaker;
use super::{
    context::{Availability, Context, Settings, earliest},
    demand::{ClaimId, LimitId},
    effects::Effects,
    queue::{Note, Queue},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{AccountId, Accounts, Fee, Lease, QueueId, StoreClock},
    ledger::{Exchange, Refund, Seq, Tat},
    limit::Limit,
    operable::Refusals,
    overrides::InForce,
    store::in_flight::ExchangeId,
    sync::StoredWaker,
};

#[cfg(test)]
pub(super) use self::{audit::Payer, exchange::MAX_REFUNDS};

/// Queues of ledgers in this process that are kept although they are idle: about 2 KiB each.
pub(super) const MAX_CACHED: usize = 64;

/// Entries that a map may have room for without being made smaller.
const SMALL_ROOM: usize = 1_000;

/// The state machine.
pub(crate) struct Core {
    ctx: Context,
    /// The limits in force: with overrides.
    limits: Vec<Arc<Limit>>,
    /// The same without overrides: as they were updated last.
    updated: Vec<Arc<Limit>>,
    /// The same as they were when they were registered.
    declared: Vec<Limit>,
    /// The overrides that operators have set.
    overrides: Arc<InForce>,
    /// The values in force, and whether they are operators', as the metrics have them.
    measured: Vec<(i64, i64)>,
    /// Boxed, or to make room for more of them would take long.
    queues: Slab<Box<Member>>,
    /// By the limits' numbers.
    by_key: Vec<Index>,
    by_ledger: HashMap<Arc<str>, QueueId>,
    /// Queues of ledgers in this process that were idle lately, and may be again.
    cached: VecDeque<QueueId>,
    /// Queues with work, in the order in which they got it.
    ready: VecDeque<QueueId>,
    due: BTreeSet<(Instant, QueueId)>,
    in_flight: Vec<PendingExchange>,
    /// How many exchanges were sent.
    exchanges: u64,
    /// By the order in which they came.
    claims: BTreeMap<ClaimId, Claim>,
    /// Claims to be sent.
    asking: BTreeSet<ClaimId>,
    /// Claims to be sent once the store has answered for their queues: see [`Queue::introduce`].
    held_back: BTreeSet<ClaimId>,
    /// Claims that a rate lets go on then, and its number.
    sleepers: BTreeMap<(Instant, ClaimId), LimitId>,
    refunds: Vec<Refund>,
    rates: Rates,
    /// The costs of permits at rates.
    accounts: Accounts,
    bounded: Bounded,
    clock: Option<StoreClock>,
    breaker: Breaker,
    connection: Connection,
    reach: Reach,
    /// When a key that cannot be used was last reported.
    complained: Option<Instant>,
    orphaned: bool,
    /// Whether it was shut down before.
    was_shut_down: bool,
    /// When to take a step for a shutdown that waits.
    alarm: Option<Instant>,
    refusals: Refusals,
}

/// A queue, and where it is listed.
struct Member {
    queue: Queue,
    /// In `ready`.
    ready: bool,
    /// In `due`.
    due: Option<Instant>,
    /// In `cached`.
    cached: bool,
}

/// The queues of one limit, by key.
#[derive(Default)]
struct Index {
    /// The one of the key that all share, which needs no hash to be found.
    shared: Option<QueueId>,
    /// Callers choose their keys, so the hash has to be one that they cannot foresee.
    others: HashMap<Key, QueueId>,
}

/// A request for slots under several limits and charges at rates, all or nothing.
struct Claim {
    /// In the order in which they are acquired.
    legs: Vec<Arc<Lease>>,
    fees: Vec<Fee>,
    stage: ClaimStage,
    asked: Instant,
    /// When it began to ask the store that it asks now.
    asking_since: Option<Instant>,
    /// Limits in shadow mode that would have refused it.
    passed: Vec<(Arc<Limit>, AcquireErrorKind)>,
    waker: Option<StoredWaker>,
}

enum ClaimStage {
    /// Its legs decide on the next step.
    Open,
    /// To be sent.
    Listed,
    Sent,
    /// A rate lets it go on then.
    Sleeping(Instant),
    Granted,
    Refused(AcquireError),
}

/// An exchange in flight.
struct PendingExchange {
    id: ExchangeId,
    at: Instant,
    /// When the driver gives up on it.
    deadline: Instant,
    exchange: Arc<Exchange>,
    /// One for each batch.
    notes: Vec<Note>,
    /// For each claim, who asks.
    claims: Vec<Asker>,
}

/// The origin of a claim in an exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asker {
    Claim(ClaimId),
    /// A request for a single slot.
    Slot,
    /// It reports spending to a rate.
    Account(AccountId),
}

/// The rates of this process, for when there is no store, or it is down.
#[derive(Default)]
struct Rates {
    states: HashMap<(LimitId, Key), Tat>,
    purge_at: usize,
}

/// The connection to the store, as far as the store reports it.
#[derive(Default)]
struct Connection {
    made: Option<Instant>,
    /// When to make a new one, as it has ended.
    reconnect_at: Option<Instant>,
    /// A new one is to be made now.
    is_wanted: bool,
}

/// Whether the store has ever answered, and when it was last reported that it does not.
#[derive(Default)]
struct Reach {
    reached: bool,
    reported: Option<Instant>,
}

/// Bounds that end a permit while its lease is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// From the moment at which it is bound.
    pub max_hold: Option<Duration>,
    /// From the moment that [`Lease::set_unread`] says.
    pub idle: Option<Duration>,
}

/// The permits that have bounds, until they are released, and when to look at which.
#[derive(Default)]
struct Bounded {
    permits: HashMap<Seq, BoundedPermit>,
    due: BTreeSet<(Instant, Seq)>,
}

struct BoundedPermit {
    lease: Arc<Lease>,
    until: Option<Instant>,
    idle: Option<Duration>,
    due: Instant,
}

impl Asker {
    fn claim(self) -> Option<ClaimId> {
        match self {
            Self::Claim(id) => Some(id),
            Self::Slot | Self::Account(_) => None,
        }
    }

    fn account(self) -> Option<AccountId> {
        match self {
            Self::Account(id) => Some(id),
            Self::Slot | Self::Claim(_) => None,
        }
    }
}

impl Bounds {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Core {
    /// `shared`: there is a store; else ledgers in this process decide.
    pub(crate) fn new(settings: Settings, shared: bool, now: Instant) -> Self {
        Self {
            ctx: Context::new(settings, shared, now),
            limits: Vec::new(),
            updated: Vec::new(),
            overrides: Arc::default(),
            measured: Vec::new(),
            declared: Vec::new(),
            queues: Slab::new(),
            by_key: Vec::new(),
            by_ledger: HashMap::new(),
            cached: VecDeque::new(),
            ready: VecDeque::new(),
            due: BTreeSet::new(),
            in_flight: Vec::new(),
            exchanges: 0,
            claims: BTreeMap::new(),
            asking: BTreeSet::new(),
            held_back: BTreeSet::new(),
            sleepers: BTreeMap::new(),
            refunds: Vec::new(),
            rates: Rates::default(),
            accounts: Accounts::default(),
            bounded: Bounded::default(),
            clock: None,
            breaker: Breaker::new(),
            connection: Connection::default(),
            reach: Reach::default(),
            complained: None,
            orphaned: false,
            was_shut_down: false,
            alarm: None,
            refusals: Refusals::default(),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.ctx.settings
    }

    /// The effects, to be run once the lock is free.
    pub(crate) fn take_effects(&mut self) -> Effects {
        self.ctx.effects.take()
    }

    /// Whether there is a subscriber for the history.
    pub(crate) fn set_history_wanted(&mut self, wanted: bool) {
        self.ctx.set_history_wanted(wanted);
    }

    /// Whether there is a store that other replicas share.
    pub(super) fn is_shared(&self) -> bool {
        self.ctx.shared
    }

    pub(super) fn store_is_up(&self) -> bool {
        self.ctx.availability == Availability::Up
    }

    /// Whether the store decides on requests.
    fn asks_store(&self) -> bool {
        self.ctx.shared && self.store_is_up()
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ctx.ending
    }

    /// Whether no permit has a slot, or an account that is to be settled.
    pub(super) fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0 && self.accounts.is_empty()
    }

    /// Whether nothing is left to be sent to the store, or to be expected from it.
    pub(super) fn is_quiet(&self) -> bool {
        let nothing_to_send = self.ready.is_empty()
            && self.asking.is_empty()
            && self.refunds.is_empty()
            && self.accounts.next_key().is_none();
        self.in_flight.is_empty() && (nothing_to_send || !self.store_is_up())
    }

    /// Whether a request waits for an answer, or a shutdown for its end.
    pub(super) fn has_requests(&self) -> bool {
        let inquires = |index: &QueueId| self.queues[index.0].queue.has_inquiries();
        self.ctx.counts.waiting > 0
            || !self.claims.is_empty()
            || !self.in_flight.is_empty()
            || self.alarm.is_some()
            || !self.ctx.confirmations.is_empty()
            || self.ready.iter().any(inquires)
    }

    /// Whether no permit, request, release or refund is left, and none will come.
    pub(crate) fn is_over(&self) -> bool {
        let is_owed = !self.refunds.is_empty() || !self.accounts.is_empty();
        let owes = is_owed && self.store_is_up();
        self.orphaned && self.queues.is_empty() && self.claims.is_empty() && !owes
    }

    /// Has a step taken at this moment.
    pub(super) fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    /// The number of a limit.
    pub(crate) fn number_of(&self, limit_name: &str) -> Option<LimitId> {
        let mut limits = self.limits.iter();
        limits
            .position(|known| known.name() == limit_name)
            .map(LimitId)
    }

    pub(crate) fn refusal(&self, limit: LimitId, kind: AcquireErrorKind) -> AcquireError {
        self.limits[limit.0].acquire_error(kind)
    }

    /// The queue of a key, made if need be. It goes when it is idle.
    fn queue(&mut self, limit: LimitId, key: &Key) -> QueueId {
        if let Some(index) = self.by_key[limit.0].get(key) {
            return index;
        }
        let rules = self.limits[limit.0].clone();
        let ledger: Arc<str> = match self.ctx.shared {
            true => self.ctx.settings.ledger_name(key, rules.name()).into(),
            false => Arc::default(),
        };
        let index = QueueId(self.queues.vacant_key());
        self.by_key[limit.0].insert(key.clone(), index);
        if self.ctx.shared {
            self.by_ledger.insert(ledger.clone(), index);
        }
        let mut queue = Queue::new(index, (limit, key.clone()), ledger, rules, &self.ctx);
        if !self.overrides.is_empty() {
            let steered = self.overrides.for_key(&self.limits[limit.0], key);
            queue.steer(&mut self.ctx, steered);
        }
        queue.start(&mut self.ctx);
        self.queues.insert(Box::new(Member {
            queue,
            ready: false,
            due: None,
            cached: false,
        }));
        index
    }

    /// After every change of a queue: lists it where it will be found, or drops it.
    fn relist(&mut self, index: QueueId) {
        let member = &mut self.queues[index.0];
        member.queue.follow_local_right(&mut self.ctx);
        if !member.ready && member.queue.has_work() {
            member.ready = true;
            self.ready.push_back(index);
        }
        let idle = !member.ready && member.queue.is_idle();
        let due = if idle { None } else { member.queue.next_due() };
        if due != member.due {
            if let Some(old) = member.due {
                self.due.remove(&(old, index));
            }
            self.due.extend(due.map(|at| (at, index)));
            member.due = due;
        }
        if idle {
            self.cache_or_drop(index);
        }
    }

    /// A queue of a ledger in this process is kept for a while: its key is likely to come again, and to make it anew
    /// costs more than all that is done with it.
    fn cache_or_drop(&mut self, index: QueueId) {
        if self.ctx.shared || self.orphaned {
            return self.drop_queue(index);
        }
        if !std::mem::replace(&mut self.queues[index.0].cached, true) {
            self.cached.push_back(index);
        }
        while self.cached.len() > MAX_CACHED {
            self.drop_oldest_cached();
        }
    }

    /// One that is in use leaves the list only, and comes back when it is idle again.
    fn drop_oldest_cached(&mut self) {
        if let Some(index) = self.cached.pop_front() {
            let member = &mut self.queues[index.0];
            member.cached = false;
            if !member.ready && member.queue.is_idle() {
                self.drop_queue(index);
            }
        }
    }

    fn drop_queue(&mut self, index: QueueId) {
        self.queues[index.0].queue.recall(&mut self.ctx);
        let queue = self.queues.remove(index.0).queue;
        self.by_key[queue.number().0].remove(queue.key());
        self.by_ledger.remove(queue.ledger());
        leave_room(&mut self.by_ledger);
    }

    fn each_queue(&mut self, mut change: impl FnMut(&mut Queue, &mut Context)) {
        let indices: Vec<QueueId> = self
            .queues
            .iter()
            .map(|(index, _)| QueueId(index))
            .collect();
        for index in indices {
            // It may have been dropped for another one.
            if let Some(member) = self.queues.get_mut(index.0) {
                change(&mut member.queue, &mut self.ctx);
                self.relist(index);
            }
        }
    }

    /// When the next of the exchanges in flight must have been answered.
    pub(super) fn answer_due(&self) -> Option<Instant> {
        self.in_flight.iter().map(|sent| sent.deadline).min()
    }

    /// Whether one was sent then, or before that.
    pub(super) fn awaits_answer_since(&self, then: Instant) -> bool {
        self.in_flight.iter().any(|sent| sent.at <= then)
    }

    /// When to call [`on_time`](Self::on_time) next.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let probe = self.breaker.probe_at();
        let due = [
            self.due.first().map(|(at, _)| *at),
            self.ctx.renewals.first().map(|(at, ..)| *at),
            self.ctx.expiries.first().map(|(at, ..)| *at),
            self.sleepers.first_key_value().map(|((at, _), _)| *at),
            self.bounded.due.first().map(|(at, _)| *at),
            probe.filter(|_| self.in_flight.is_empty()),
            self.connection.reconnect_at,
            self.accounts.next_due(),
            self.overrides.next_end(),
            self.ctx.confirmations.next_due(),
            self.alarm,
        ];
        due.into_iter().fold(None, earliest)
    }
}

impl Index {
    fn get(&self, key: &Key) -> Option<QueueId> {
        match *key == Key::SHARED {
            true => self.shared,
            false => self.others.get(key).copied(),
        }
    }

    fn insert(&mut self, key: Key, queue: QueueId) {
        match key == Key::SHARED {
            true => self.shared = Some(queue),
            false => drop(self.others.insert(key, queue)),
        }
    }

    fn remove(&mut self, key: &Key) {
        match *key == Key::SHARED {
            true => self.shared = None,
            false => {
                self.others.remove(key);
                leave_room(&mut self.others);
            }
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.others.len() + usize::from(self.shared.is_some())
    }
}

/// Room for many is not kept when they are gone.
fn leave_room<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    let room = map.capacity();
    if room > SMALL_ROOM && map.len() < room / 8 {
        map.shrink_to(room / 4);
    }
}
