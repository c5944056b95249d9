//! The core: a state machine without IO. It has many queues and one connection; the time is passed in, so that a
//! simulation can drive it step by step.
//!
//! | file | what |
//! | --- | --- |
//! | this one | the data; where to find the queue that needs something |
//! | `breaker`, `index` | the circuit breaker; where the queues are |
//! | `rates` | charges and refunds |
//! | `claims` | requests for slots under several limits, all or nothing |
//! | `exchange` | the work of many queues, batched into one exchange (group commit) |
//! | `outage` | the breaker opens and closes; connections come and go |
//! | `replies` | answers, failures and events of the store |
//! | `limits` | the limits, and the values that they have now |
//! | `timers` | one sleep for all; bounds on permits |
//! | `requests` | submitted, collected, cancelled; permits released; shutdown |
//!
//! Each file calls only those above it, and all call this one, which calls `breaker` and `index`. What concerns a single ledger is the business of its [queue](super::queue),
//! which reports to the [`Context`] and knows nothing of this.
//!
//! A name (`Seq`) is in at most one exchange in flight that may put it into the ledger. When such an exchange fails its
//! fate is unknown: the name is released until a release was acknowledged at a store time after the exchange's
//! `not_after`, and the request goes on under a new name.

#[cfg(test)]
mod audit;
mod breaker;
mod claims;
mod exchange;
mod index;
mod limits;
mod outage;
mod rates;
mod replies;
mod requests;
mod timers;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use slab::Slab;
use tokio::time::Instant;

use self::{
    breaker::Breaker,
    index::{Index, leave_room},
};
use super::{
    context::{Availability, Context, Settings, earliest},
    demand::Fee,
    effects::{Effects, StoredWaker},
    queue::{Note, Queue},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{Lease, StoreClock},
    ledger::{Exchange, Refund, Seq, Tat},
    limit::Limit,
};

#[cfg(test)]
pub(super) use self::exchange::MAX_REFUNDS;

/// Queues of ledgers in this process that are kept although they are idle: about 2 KiB each.
pub(super) const MAX_CACHED: usize = 64;

/// The state machine.
pub(crate) struct Core {
    ctx: Context,
    limits: Vec<Arc<Limit>>,
    /// The same as they were when they were registered.
    declared: Vec<Limit>,
    /// Boxed, or to make room for more of them would take long.
    queues: Slab<Box<Member>>,
    /// By the limits' numbers.
    by_key: Vec<Index>,
    by_ledger: HashMap<Arc<str>, usize>,
    /// Queues of ledgers in this process that were idle lately, and may be again.
    cached: VecDeque<usize>,
    /// Queues with work, in the order in which they got it.
    ready: VecDeque<usize>,
    due: BTreeSet<(Instant, usize)>,
    in_flight: Vec<Sent>,
    /// How many exchanges were sent.
    exchanges: u64,
    /// By the order in which they came.
    claims: BTreeMap<u64, Claim>,
    /// Claims to be sent.
    asking: BTreeSet<u64>,
    /// Claims to be sent once the store has answered for their queues: see [`Queue::introduce`].
    held_back: BTreeSet<u64>,
    /// Claims that a rate lets go on then, and its number.
    sleepers: BTreeMap<(Instant, u64), usize>,
    refunds: Vec<Refund>,
    rates: Rates,
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
struct Sent {
    number: u64,
    at: Instant,
    /// When the driver gives up on it.
    deadline: Instant,
    exchange: Arc<Exchange>,
    /// One for each batch.
    notes: Vec<Note>,
    /// The keeper's name of each claim; 0 for a request for a single slot.
    claims: Vec<u64>,
}

/// The rates of this process, for when there is no store, or it is down.
#[derive(Default)]
struct Rates {
    states: HashMap<(usize, Key), Tat>,
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
    pub(crate) max_hold: Option<Duration>,
    /// From the moment that [`Lease::set_unread`] says.
    pub(crate) idle: Option<Duration>,
}

/// The permits that have bounds, until they are released, and when to look at which.
#[derive(Default)]
struct Bounded {
    permits: HashMap<Seq, Watch>,
    due: BTreeSet<(Instant, Seq)>,
}

struct Watch {
    lease: Arc<Lease>,
    until: Option<Instant>,
    idle: Option<Duration>,
    due: Instant,
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
            bounded: Bounded::default(),
            clock: None,
            breaker: Breaker::new(),
            connection: Connection::default(),
            reach: Reach::default(),
            complained: None,
            orphaned: false,
            was_shut_down: false,
            alarm: None,
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

    pub(super) fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0
    }

    /// Whether nothing is left to be sent to the store, or to be expected from it.
    pub(super) fn is_quiet(&self) -> bool {
        let nothing_to_send =
            self.ready.is_empty() && self.asking.is_empty() && self.refunds.is_empty();
        self.in_flight.is_empty() && (nothing_to_send || !self.store_is_up())
    }

    /// Whether a request waits for an answer, or a shutdown for its end.
    pub(super) fn has_requests(&self) -> bool {
        let inquires = |index: &usize| self.queues[*index].queue.has_inquiries();
        self.ctx.counts.waiting > 0
            || !self.claims.is_empty()
            || !self.in_flight.is_empty()
            || self.alarm.is_some()
            || !self.ctx.confirmations.is_empty()
            || self.ready.iter().any(inquires)
    }

    /// Whether no permit, request, release or refund is left, and none will come.
    pub(crate) fn is_over(&self) -> bool {
        let refunds = !self.refunds.is_empty() && self.store_is_up();
        self.orphaned && self.queues.is_empty() && self.claims.is_empty() && !refunds
    }

    /// Has a step taken at this moment.
    pub(super) fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    /// The number of a limit.
    fn number_of(&self, limit_name: &str) -> Option<usize> {
        self.limits
            .iter()
            .position(|known| known.name() == limit_name)
    }

    pub(crate) fn refusal(&self, limit: usize, kind: AcquireErrorKind) -> AcquireError {
        self.limits[limit].acquire_error(kind)
    }

    /// The queue of a key, made if need be. It goes when it is idle.
    fn queue(&mut self, limit: usize, key: &Key) -> usize {
        if let Some(index) = self.by_key[limit].get(key) {
            return index;
        }
        let rules = self.limits[limit].clone();
        let ledger: Arc<str> = match self.ctx.shared {
            true => self.ctx.settings.ledger_name(key, rules.name()).into(),
            false => Arc::default(),
        };
        let index = self.queues.vacant_key();
        self.by_key[limit].insert(key.clone(), index);
        if self.ctx.shared {
            self.by_ledger.insert(ledger.clone(), index);
        }
        let mut queue = Queue::new(index, (limit, key.clone()), ledger, rules, &self.ctx);
        queue.start(&mut self.ctx);
        self.queues.insert(Box::new(Member {
            queue,
            ready: false,
            due: None,
            cached: false,
        }))
    }

    /// After every change of a queue: lists it where it will be found, or drops it.
    fn settle(&mut self, index: usize) {
        let member = &mut self.queues[index];
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
    fn cache_or_drop(&mut self, index: usize) {
        if self.ctx.shared || self.orphaned {
            return self.drop_queue(index);
        }
        if !std::mem::replace(&mut self.queues[index].cached, true) {
            self.cached.push_back(index);
        }
        while self.cached.len() > MAX_CACHED {
            self.drop_oldest_cached();
        }
    }

    /// One that is in use leaves the list only, and comes back when it is idle again.
    fn drop_oldest_cached(&mut self) {
        if let Some(index) = self.cached.pop_front() {
            let member = &mut self.queues[index];
            member.cached = false;
            if !member.ready && member.queue.is_idle() {
                self.drop_queue(index);
            }
        }
    }

    fn drop_queue(&mut self, index: usize) {
        self.queues[index].queue.recall(&mut self.ctx);
        let queue = self.queues.remove(index).queue;
        self.by_key[queue.number()].remove(queue.key());
        self.by_ledger.remove(queue.ledger());
        leave_room(&mut self.by_ledger);
    }

    fn each_queue(&mut self, mut change: impl FnMut(&mut Queue, &mut Context)) {
        let indices: Vec<usize> = self.queues.iter().map(|(index, _)| index).collect();
        for index in indices {
            // It may have been dropped for another one.
            if let Some(member) = self.queues.get_mut(index) {
                change(&mut member.queue, &mut self.ctx);
                self.settle(index);
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
            self.ctx.confirmations.next_due(),
            self.alarm,
        ];
        due.into_iter().fold(None, earliest)
    }
}
