//! The core: a state machine without IO, with many queues, and one connection to the store, or to each part of a cluster.
//! The time is passed in, so that a simulation can drive the core step by step.
//!
//! # The algorithm
//!
//! The store has a ledger for each key: its holders until their leases end, and its waiters in order. Here each ledger has
//! a [queue](super::queue), with an entry for each slot that a permit holds or a request wants.
//!
//! 1. A slot that is wanted gets a name, which goes into the outbox of its queue. Requests for several slots, or at a rate,
//!    are claims, which the core sends whole.
//! 2. An exchange takes what all outboxes contain, names to acquire, renew and adopt, and all releases. While it is in flight,
//!    the next one fills (group commit).
//! 3. The answer tells of each name whether the store counts it as held, waiting or absent. A held slot has a deadline,
//!    counted from the moment at which the exchange was sent, and is renewed after a third of that time. A waiting one is
//!    promoted by a wake-up or a later answer.
//! 4. A name is released when its permit ends, again and again until the store confirms it.
//! 5. An exchange without an answer may have run, or may still run until its `not_after`. At most one exchange in flight may
//!    enter a name into the ledger: if it fails, the name is released until the store acknowledges that at a time after
//!    `not_after`, and the request continues under a new name.
//! 6. Only a hello makes a connection. Then each queue asks for its holders, adopts those that the store has lost, and only
//!    then sends newcomers.
//! 7. While the breaker of a link is open, the fallbacks decide, with ledgers and rates of this process.
//!
//! # Driving it
//!
//! Each step has the lock. It begins with `begin_step`, which tells the time, and ends with `take_effects`, which run without
//! the lock: they wake tasks, and write metrics and logs. There are two kinds of steps:
//!
//! 1. One input: of a request, `submit`, `collect`, `cancel` or `release`; of the driver, `on_event` for news of a connection,
//!    and `on_reply` or `on_failure`, once for each exchange.
//! 2. The driver's next step (`DriverState::next_step`), after its inputs and whenever it is woken: `on_time`, then
//!    `next_exchange` until that returns `None`; the exchanges are sent in this order. Then the driver sleeps until `next_due`.
//!
//! # Files
//!
//! | file | what |
//! | --- | --- |
//! | `exchange` | the next exchange, and its answer |
//! | `timers` | what is due, also a hello to reconnect, and how much of it in a step |
//! | `store` | exchanges without an answer; connections; events and wake-ups; transitions of the breaker; answers to claims |
//! | `permits` | requests and permits: submitted, collected, cancelled, released; shutdown |
//! | `limits` | the limits, their current values, overrides; the view of operators |
//! | `losses` | a loss of data: found, told, waited for, and over |
//! | `acquire` | all-or-nothing acquisition of slots: submitted, sent, advanced |
//! | `local` | decisions of this process, by its ledgers, its rates and fallbacks, also on unanswered requests; requests that rates refuse or delay |
//! | `refusals` | requests that are refused or dropped, and the contents of a refusal |
//! | `draft` | when a link may send; the work of many queues, and claims, batched into one exchange (group commit) |
//! | this one | the data; settings, the limits in force, the time and counts are in [`context`](super::context) |
//! | `accounting` | charges and refunds at rates, the rates of this process, and accounts of permits |
//! | `progress` | how far a request has come, and what it asks for next |
//! | `requests` | the stage of each request, its deadlines, and the task to wake for its answer |
//! | `link` | a connection, with its exchanges in flight, their number, the work that only it can do, and the generation of the data there |
//! | `connection` | whose exchanges it has, when another one is made, and the store's clock |
//! | `unsent` | the requests that a link has to send, and those that an introduction holds back |
//! | `queues` | the queues, created on demand, and their indexes |
//! | `breaker` | the circuit breaker |
//!
//! Each file calls only files below it. Everything about a single ledger is in its [queue](super::queue), which reports
//! to the [`Context`] and does not know the core.

mod accounting;
mod acquire;
#[cfg(test)]
pub(super) mod audit;
mod breaker;
mod connection;
mod draft;
mod exchange;
mod limits;
mod link;
mod local;
mod losses;
mod permits;
mod progress;
mod queues;
mod refusals;
mod requests;
mod store;
mod timers;
mod unsent;

use std::collections::{HashMap, HashSet};

use tokio::time::Instant;

use self::{
    accounting::Accounting,
    link::{Link, Links},
    progress::{Next, Progress},
    queues::Queues,
    requests::{Legs, Request, Requests, SlotLeg, Stage},
};
use super::{
    context::{Context, Decided, Settings},
    demand::RequestId,
    effects::Effects,
    queue::Queue,
};
use crate::{
    error::AcquireErrorKind,
    key::Key,
    leases::{BoundedPermits, QueueId},
    ledger::{Batch, Claim, ClaimReply, Seq},
    limit::LimitId,
    operable::Refusals,
    part::Part,
    telemetry::Measure,
};

pub(super) use self::link::{ExchangeId, Outgoing};

/// The state machine.
pub(super) struct Core {
    ctx: Context,
    queues: Queues,
    links: Links,
    /// The part whose link was last looked at for work.
    last_link: usize,
    exchanges: u64,
    requests: Requests,
    /// Decisions being followed.
    following: Vec<Decided>,
    local: LocalClaim,
    accounting: Accounting,
    bounded: BoundedPermits,
    complaints: Complaints,
    refusals: Refusals,
}

/// The claim being decided on. Cleared but never freed.
#[derive(Default)]
struct LocalClaim {
    claim: Claim,
    reply: ClaimReply,
    /// By charge.
    rates: Vec<(LimitId, Key)>,
    /// By ask.
    queues: Vec<QueueId>,
    batches: Vec<Batch>,
    /// Fees that no local rate charges: their numbers, and the refusals that do not count.
    waived: Vec<(usize, Option<AcquireErrorKind>)>,
}

/// When a key of each limit last turned out to be unusable.
#[derive(Default)]
struct Complaints(HashMap<LimitId, Instant>);

impl Core {
    /// `shared`: there is a store; otherwise the ledgers in this process decide.
    pub fn new(settings: Settings, shared: bool, now: Instant) -> Self {
        let parts = settings.parts;
        let link = |part| Link::new(part, &settings, now);
        Self {
            links: Links(parts.all().map(link).collect()),
            last_link: 0,
            ctx: Context::new(settings, shared, now),
            queues: Queues::new(parts, !shared),
            exchanges: 0,
            requests: Requests::default(),
            following: Vec::new(),
            local: LocalClaim::default(),
            accounting: Accounting::new(parts),
            bounded: BoundedPermits::default(),
            complaints: Complaints::default(),
            refusals: Refusals::default(),
        }
    }

    /// Begins a step at this time, which is the time of everything that the step does.
    #[inline]
    pub fn begin_step(&mut self, now: Instant) -> &mut Self {
        self.ctx.now = now;
        self
    }

    /// The time of this step.
    pub fn now(&self) -> Instant {
        self.ctx.now
    }

    /// What all queues share.
    pub fn context(&self) -> &Context {
        &self.ctx
    }

    /// For a step about nothing else.
    pub fn context_mut(&mut self) -> &mut Context {
        &mut self.ctx
    }

    /// The effects, to be run without the lock.
    #[inline]
    pub fn take_effects(&mut self) -> Effects {
        self.ctx.measure_returns();
        self.ctx.effects.take()
    }

    /// Changes whenever the store confirms a release, a report of spending or a refund.
    pub fn confirmed(&self) -> (u64, usize, usize) {
        let confirmed = self.ctx.counts.confirmed;
        let refunds = self.links.iter().map(|link| link.refunds.len());
        (confirmed, self.accounting.accounts.len(), refunds.sum())
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
        let asks = |link: &Link| {
            let mut ready = self.queues.ready(link.part);
            !link.in_flight.is_empty() || ready.any(|queue| queue.outbox.has_inquiries())
        };
        !self.requests.is_empty()
            || self.ctx.ending.alarm().is_some()
            || !self.ctx.confirmations.is_empty()
            || self.links.iter().any(asks)
    }

    /// Whether no permit, request, release or refund is left or can still come.
    pub fn is_over(&self) -> bool {
        // A charge in flight may still need a refund.
        let is_owed = |link: &Link| {
            link.is_up()
                && (!self.accounting.accounts.is_empty()
                    || !link.refunds.is_empty()
                    || !link.in_flight.is_empty())
        };
        self.ctx.ending.is_orphaned()
            && self.queues.is_empty()
            && self.requests.is_empty()
            && !self.links.iter().any(is_owed)
    }

    /// Changes a queue, then lists or drops it.
    #[inline]
    fn change<R>(&mut self, id: QueueId, change: impl FnOnce(&mut Queue, &mut Context) -> R) -> R {
        self.queues.change(&mut self.ctx, id, change)
    }

    /// Changes all queues, or those with ledgers in this part.
    fn each_queue(&mut self, of: Option<Part>, mut change: impl FnMut(&mut Queue, &mut Context)) {
        for id in self.queues.ids(of) {
            // The queue may have been dropped on behalf of another.
            if self.queues.has(id) {
                self.change(id, &mut change);
            }
        }
    }

    /// A rate no longer holds the request back.
    fn end_sleep(&mut self, id: RequestId) {
        if let Some(limit) = self.requests.wake(id) {
            self.ctx.measure(limit, Measure::Waiting(-1.0));
        }
    }
}
