//! The core: a state machine without IO. It has many queues and one connection; the time is passed in, so that a
//! simulation can drive it step by step.
//!
//! | file | what |
//! | --- | --- |
//! | `exchange` | the work of many queues, batched into one exchange (group commit), sent, and answered |
//! | `store` | exchanges without an answer; events: connections come and go; the breaker opens and closes; the answers to claims |
//! | `requests` | submitted, collected, cancelled; permits released; what is due by time; shutdown |
//! | `limits` | the limits, the values that they have now, overrides; what operators see of them |
//! | `claims` | requests for slots under several limits, all or nothing |
//! | `rates` | charges and refunds |
//! | `overdue` | claims that the store has not answered in time |
//! | this one | the data; settings, the limits in force, the time and counts are in [`context`](super::context) |
//! | `queues` | the queues, made when they are needed, and where each is found |
//! | `breaker` | the circuit breaker |
//! | `window` | how many exchanges may be in flight |
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
mod overdue;
mod queues;
mod rates;
mod requests;
mod store;
mod window;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt, mem,
    sync::Arc,
};

use tokio::time::Instant;

use self::{
    breaker::Breaker,
    queues::Queues,
    window::{WINDOW, WINDOW_OF_ONE_KEY, Window},
};
use super::{
    context::{Availability, Context, Settings},
    demand::ClaimId,
    effects::Effects,
    queue::{PendingBatch, Queue},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    leases::{AccountId, Accounts, BoundedPermits, Fee, Lease, StoreClock},
    ledger::{Exchange, RateState, Refund, Seq},
    limit::{Limit, LimitId},
    operable::{Refusals, Standings},
    status::InLine,
    sync::StoredWaker,
};

#[cfg(test)]
pub(super) use self::{
    audit::{LedgerHere, Payer, WaitingClaim},
    exchange::MAX_REFUNDS,
    queues::MAX_CACHED,
};

/// The state machine.
pub(super) struct Core {
    ctx: Context,
    /// The limits without overrides: as they were updated last. Those in force are in the context.
    updated: Vec<Arc<Limit>>,
    /// The same as they were when they were registered.
    declared: Vec<Limit>,
    /// The values in force, and whether they are operators', as the metrics have them.
    measured: Vec<(i64, i64)>,
    queues: Queues,
    /// In the order in which they were sent.
    in_flight: Vec<PendingExchange>,
    window: Window,
    /// The kind of work that goes first in the next exchange about one key.
    next_kind: usize,
    /// How many exchanges were sent.
    exchanges: u64,
    /// By the order in which they came.
    claims: BTreeMap<ClaimId, ClaimState>,
    /// Claims to be sent.
    unsent_claims: BTreeSet<ClaimId>,
    /// Claims that met a queue which is being introduced: see [`Queue::introduce`]. They are tried again with each exchange.
    held_back: BTreeSet<ClaimId>,
    /// When claims fall back that the store has not answered.
    asking_claims: BTreeSet<(Instant, ClaimId)>,
    /// Requests that the store has not answered do not fall back before this: answers may lie unread.
    patient_until: Option<Instant>,
    /// Claims that a rate lets go on then, and of which limit it is.
    sleepers: BTreeMap<(Instant, ClaimId), LimitId>,
    refunds: Vec<Refund>,
    rates: Rates,
    /// The costs of permits at rates.
    accounts: Accounts,
    bounded: BoundedPermits,
    clock: Option<StoreClock>,
    breaker: Breaker,
    connection: Connection,
    reach: Reach,
    /// When a key of a limit last turned out to be unusable.
    complained: HashMap<LimitId, Instant>,
    orphaned: bool,
    /// Whether it was shut down before.
    was_shut_down: bool,
    /// When to take a step for a shutdown that waits.
    alarm: Option<Instant>,
    refusals: Refusals,
    standings: Standings,
}

/// A request for slots under several limits and charges at rates, all or nothing.
struct ClaimState {
    /// In the order in which they are acquired.
    legs: Vec<Arc<Lease>>,
    fees: Vec<Fee>,
    /// Rates whose mode is off.
    exempt: Vec<Arc<Limit>>,
    stage: ClaimStage,
    asked: Instant,
    /// Set while it asks the store.
    asking: Option<Asking>,
    /// The ticket with which the store first enqueued it, under any of its limits.
    ticket: Option<i64>,
    /// Limits in shadow mode that would have refused it.
    bypassed: Vec<(Arc<Limit>, AcquireErrorKind)>,
    waker: Option<StoredWaker>,
}

/// Since when a claim asks the store that it asks now, and until when.
#[derive(Clone, Copy)]
struct Asking {
    since: Instant,
    until: Instant,
}

enum ClaimStage {
    /// Its legs decide on the next step.
    Open,
    /// To be sent.
    Unsent,
    /// In this exchange.
    Sent(ExchangeId),
    /// A rate lets it go on then.
    Sleeping(Instant),
    Granted,
    Refused(AcquireError),
}

/// The number of an exchange of one keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangeId(pub u64);

impl fmt::Display for ExchangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An exchange to be sent.
pub(super) struct Outgoing {
    pub id: ExchangeId,
    pub exchange: Arc<Exchange>,
    /// When to give up on it.
    pub deadline: Instant,
}

/// An exchange in flight.
struct PendingExchange {
    id: ExchangeId,
    at: Instant,
    /// When the driver gives up on it.
    deadline: Instant,
    /// About how long it is on the wire.
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
    Claim(ClaimId),
    /// A request for a single slot.
    Slot,
    /// It reports spending to a rate.
    Account(AccountId),
}

/// The rates of this process, for when there is no store, or it is down.
#[derive(Default)]
struct Rates {
    states: HashMap<(LimitId, Key), RateState>,
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
    /// The last exchange that was drafted for another one, which is over.
    begins_after: u64,
}

/// Whether the store has ever answered, and when it was last reported that it does not.
#[derive(Default)]
struct Reach {
    reached: bool,
    reported: Option<Instant>,
}

impl Connection {
    /// Whether the exchange was drafted for it, or makes it.
    fn has(&self, id: ExchangeId) -> bool {
        id.0 > self.begins_after
    }
}

impl ClaimState {
    /// Since when it asks the store.
    fn asks_since(&self, now: Instant) -> Instant {
        self.asking.map_or(now, |asking| asking.since)
    }
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

impl Core {
    /// `shared`: there is a store; else ledgers in this process decide.
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
            claims: BTreeMap::new(),
            unsent_claims: BTreeSet::new(),
            held_back: BTreeSet::new(),
            asking_claims: BTreeSet::new(),
            patient_until: None,
            sleepers: BTreeMap::new(),
            refunds: Vec::new(),
            rates: Rates::default(),
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

    /// The effects, to be run once the lock is free.
    pub fn take_effects(&mut self) -> Effects {
        self.ctx.effects.take()
    }

    /// Whether the store was found to have lost its data since this was last called.
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

    /// Whether no permit has a slot, or an account that is to be settled.
    pub fn holds_nothing(&self) -> bool {
        self.ctx.counts.held == 0 && self.accounts.is_empty()
    }

    /// Whether nothing is left to be sent to the store, now or later, or to be expected from it. Of one that is down only
    /// releases are owed.
    pub fn is_quiet(&self) -> bool {
        if !self.store_is_up() {
            return self.unconfirmed().next().is_none();
        }
        self.in_flight.is_empty()
            && self.queues.ready_count() == 0
            && self.unsent_claims.is_empty()
            && self.refunds.is_empty()
            && self.accounts.next_key().is_none()
            && !self.queues.iter().any(Queue::repeats_releases)
    }

    /// Differs from before when the store has confirmed a release, a report of spending or a refund.
    pub fn confirmed(&self) -> (u64, usize, usize) {
        let confirmed = self.ctx.counts.confirmed;
        (confirmed, self.accounts.len(), self.refunds.len())
    }

    /// Names that the store may know, though no permit and no request will need them once this is [closed](Self::close) and
    /// everything is [lost](Self::lose_all). One may come twice.
    pub fn unconfirmed(&self) -> impl Iterator<Item = Seq> {
        let pending = self.in_flight.iter().flat_map(|sent| &sent.pending);
        let in_flight = pending.flat_map(PendingBatch::releases);
        let queues = self.queues.iter();
        queues.flat_map(Queue::names_in_store).chain(in_flight)
    }

    /// Names of slots that permits hold, one for each permit.
    pub fn held_by_permits(&self) -> HashSet<Seq> {
        let queues = self.queues.iter();
        queues.flat_map(Queue::held_by_permits).collect()
    }

    /// Whether a request waits for an answer, or a shutdown for its end.
    pub fn has_requests(&self) -> bool {
        self.ctx.counts.waiting > 0
            || !self.claims.is_empty()
            || !self.in_flight.is_empty()
            || self.alarm.is_some()
            || !self.ctx.confirmations.is_empty()
            || self.queues.ready().any(Queue::has_inquiries)
    }

    /// Whether no permit, request, release or refund is left, and none will come.
    pub fn is_over(&self) -> bool {
        // A charge in flight may have to be refunded.
        let is_owed =
            !self.refunds.is_empty() || !self.accounts.is_empty() || !self.in_flight.is_empty();
        let owes = is_owed && self.store_is_up();
        self.orphaned && self.queues.is_empty() && self.claims.is_empty() && !owes
    }

    /// Has a step taken at this moment.
    pub fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    /// The id of a limit.
    pub fn limit_id(&self, limit_name: &str) -> Option<LimitId> {
        let mut limits = self.ctx.limits.iter();
        limits
            .position(|known| known.name() == limit_name)
            .map(LimitId)
    }

    fn refusal(&self, limit: LimitId, kind: AcquireErrorKind) -> AcquireError {
        self.ctx.limits[limit.0].acquire_error(kind)
    }

    /// The refusal of a limit that an operator has paused until then.
    fn paused_error(&self, limit: LimitId, until: Instant) -> AcquireError {
        let mut error = self.refusal(limit, AcquireErrorKind::Paused);
        error.details.retry_after = Some(until.saturating_duration_since(self.ctx.now));
        error
    }

    /// The place of a request that waits, when it joined its queue.
    fn in_line_of(&self, lease: &Lease) -> Option<InLine> {
        let queue = self.queues.get(lease.queue)?;
        queue.in_line(lease.seq())
    }

    fn each_queue(&mut self, mut change: impl FnMut(&mut Queue, &mut Context)) {
        for id in self.queues.ids() {
            // It may have been dropped for another one.
            self.queues.change_if_there(&mut self.ctx, id, &mut change);
        }
    }
}
