//! For tests: checks that the state of a queue is consistent, and reads for the simulation.

use std::collections::{BTreeSet, HashMap};

use tokio::time::Instant;

use super::{
    HeldUnits, Outbox, PendingBatch, Queue, Release, Waiters,
    permit::entry::{Entry, HeldSlot, Holder, InStore, Line, State},
};
use crate::{
    fallbacks::Availability,
    keeper::{
        context::{Context, Counts},
        demand::RequestId,
    },
    ledger::{Ledger, Seq, TenantId, weight_of},
    limit::LimitId,
};

pub(in crate::keeper) const FORGET_AFTER: u32 = super::FORGET_AFTER;

/// The core's records of all queues, and the findings of the audit.
#[derive(Default)]
pub(in crate::keeper) struct Books {
    /// Names that exchanges in flight may enter into the ledger, and names that they renew.
    pub entering: BTreeSet<Seq>,
    pub renewing: BTreeSet<Seq>,
    /// The request of each leg.
    pub requests_of_legs: HashMap<Seq, RequestId>,
    /// Slots that requests ask for through their queues.
    pub listed: BTreeSet<Seq>,
    pub counts: Counts,
    pub tenants: HashMap<(LimitId, TenantId), usize>,
}

macro_rules! ensure {
    ($condition:expr, $($why:tt)*) => {
        if !$condition {
            return Err(format!($($why)*));
        }
    };
}
pub(in crate::keeper) use ensure;

impl Queue {
    /// Returns the first contradiction found. To be called between steps. `in_flight`: the batches of this queue.
    pub fn audit(&self, ctx: &Context, books: &mut Books, in_flight: u16) -> Result<(), String> {
        let at = format!("queue {} ({})", self.id.0, self.limit.name());
        ensure!(
            self.in_flight == in_flight,
            "{at}: {} in flight, not {in_flight}",
            self.in_flight
        );
        for (seq, entry) in self.entries.iter() {
            let at = format!("{at}, entry {seq}");
            self.audit_entry(ctx, books, *seq, entry)
                .map_err(|why| format!("{at}: {why}"))?;
        }
        let none = Waiters::default();
        let waiters = self.waiters.as_deref().unwrap_or(&none);
        for (ticket, seq) in &waiters.by_ticket {
            let state = self.entries.get(seq).map(Entry::state);
            let same = matches!(
                state,
                Some(State::Waiting(Line::InStore { ticket: own, .. })) if own == ticket
            );
            ensure!(same, "{at}: {seq} queues and does not wait");
        }
        ensure!(
            !ctx.asks_store(self.part) || self.ledger_here.is_none(),
            "{at}: has a ledger of its own"
        );
        let outbox = self.outbox.iter();
        let asking = outbox.flat_map(|outbox| &outbox.acquire);
        ensure!(
            asking.map(|newcomer| newcomer.order()).is_sorted(),
            "{at}: requests are out of turn"
        );
        ensure!(
            self.scan.is_none() || self.renew_at.is_some(),
            "{at}: its scan does not go on"
        );
        let has_work = self.has_work();
        if ctx.asks_store(self.part) && self.has_waiters() {
            let poll = self.waiters.as_ref().and_then(|waiters| waiters.poll_at);
            let asked = poll.is_some() || self.in_flight > 0 || has_work;
            ensure!(asked, "{at}: waits, and never asks");
        }
        ensure!(
            !self.recheck_right || ctx.shared,
            "{at}: the right to keep slots was not seen to"
        );
        let in_store = |entry: &Entry| matches!(entry.state(), State::Held(hold) if hold.in_store);
        let units = |held: Vec<Seq>| held.into_iter().map(weight_of).sum();
        let held = HeldUnits {
            in_store: units(self.those(in_store)),
            all: units(self.those(Entry::is_held)),
        };
        ensure!(held == self.held, "{at}: counts {:?} as held", self.held);
        let adopts = self.has_adoptions();
        let is_unconfirmed = |entry: &Entry| entry.is_unconfirmed(adopts);
        ensure!(
            !self.introducing || !self.those(is_unconfirmed).is_empty(),
            "{at}: its introduction is complete and was not ended"
        );
        self.audit_local(&at)?;
        self.audit_pool(&at)
    }

    /// Whether the store should count units of this process.
    pub fn holds_in_store(&self) -> bool {
        self.held.in_store > 0
    }

    fn audit_entry(
        &self,
        ctx: &Context,
        books: &mut Books,
        seq: Seq,
        entry: &Entry,
    ) -> Result<(), String> {
        let none = Outbox::default();
        let outbox = self.outbox.as_deref().unwrap_or(&none);
        let up = self.availability(ctx) == Availability::Up;
        ensure!(entry.lease.seq() == seq, "its lease has another name");
        ensure!(entry.lease.queue == self.id, "in the wrong queue");
        let (state, request) = (*entry.state(), entry.request());
        let InStore {
            present,
            entering,
            renewing,
            renew_again,
            introduced: _,
            spare,
            not_after_us,
        } = entry.in_store;
        ensure!(!renew_again || renewing, "renewed again after no renewal");
        let is_leaving = matches!(state, State::Leaving);
        ensure!(!spare || is_leaving, "spare, and somebody wants it");
        let before = books.counts.held + books.counts.waiting;
        match state {
            State::Held(_) => books.counts.held += 1,
            State::Idle => books.counts.waiting += usize::from(entry.is_plain()),
            State::Sent { .. } | State::Waiting(_) | State::Checking { .. } => {
                books.counts.waiting += 1;
            }
            State::Leaving => {}
        }
        if let Some(paying) = entry.paying()
            && books.counts.held + books.counts.waiting > before
        {
            let tenant = (self.limit_id, paying.tenant);
            *books.tenants.entry(tenant).or_default() += 1;
        }
        ensure!(
            entering == books.entering.contains(&seq),
            "entering {entering}"
        );
        let asked = outbox.renew.contains(&seq) || books.renewing.contains(&seq);
        ensure!(
            !renewing || asked,
            "renewing, and no renewal is listed or in flight"
        );
        ensure!(
            request.is_none_or(|request| books.requests_of_legs.get(&seq) == Some(&request)),
            "no request {request:?}"
        );
        ensure!(
            request.is_some() || !entry.is_undecided(),
            "asks for nobody"
        );
        match state {
            State::Idle => {
                let is_listed = books.listed.contains(&seq);
                let mut acquire = outbox.acquire.iter();
                let listed = acquire.any(|newcomer| newcomer.seq == seq);
                ensure!(!is_listed || listed && up, "wants to ask, and will not");
                ensure!(is_listed || !listed, "asks out of turn");
                ensure!(!entering && !present && not_after_us == 0, "asked before");
            }
            State::Sent { .. } => ensure!(entering, "asks, and nobody was asked"),
            // If its renewal was lost, the exchange that acquires it is still unanswered.
            State::Checking { .. } => ensure!(renewing || entering, "is checked by nobody"),
            State::Waiting(Line::Here) => {
                ensure!(self.ledger_here.is_some(), "waits here, where no ledger is");
                ensure!(!entering && !present, "waits here, and in the store");
            }
            State::Waiting(Line::InStore { ticket, .. }) => {
                let listed = self.waiters().any(|waiter| *waiter == (ticket, seq));
                ensure!(listed, "not among the waiters");
                ensure!(present, "waits in a store that does not have it");
            }
            State::Held(HeldSlot { due, holder, .. }) => {
                let is_taken = !matches!(holder, Holder::Request | Holder::Reuser);
                ensure!(
                    is_taken == request.is_none(),
                    "held for {holder:?}, and {request:?}"
                );
                if let Some(at) = due {
                    let next = match &self.scan {
                        Some(scan) if seq < scan.from => scan.next,
                        Some(_) => Some(at),
                        None => self.renew_at,
                    };
                    let is_timed = next.is_some_and(|next| next <= at);
                    ensure!(is_timed || entering, "nobody renews it at {at:?}");
                }
            }
            State::Leaving => ensure!(entering, "nobody wants it, and it stays"),
        }
        Ok(())
    }

    /// Idle slots are held, by the pool alone, and are renewed.
    fn audit_pool(&self, at: &str) -> Result<(), String> {
        let Some(pooled) = &self.pooled else {
            return Ok(());
        };
        let idle = pooled.pool.names();
        for seq in &idle {
            let held = |entry: &Entry| entry.holder() == Some(Holder::Permit);
            let entry = self.entries.get(seq);
            ensure!(
                entry.is_none_or(held),
                "{at}: {seq} is idle and is not held"
            );
        }
        let names: BTreeSet<_> = idle.iter().collect();
        ensure!(names.len() == idle.len(), "{at}: idle twice: {idle:?}");
        let tended = pooled.tend_at.is_some() || self.ledger_here.is_some();
        ensure!(tended || idle.is_empty(), "{at}: keeps {idle:?} for ever");
        Ok(())
    }

    /// The ledger in this process has exactly the holders and waiters that the queue has.
    fn audit_local(&self, at: &str) -> Result<(), String> {
        let Some(ledger) = &self.ledger_here else {
            return Ok(());
        };
        let holders: BTreeSet<Seq> = ledger.holders().map(|(id, _)| id.seq).collect();
        let waiters: BTreeSet<Seq> = ledger.waiters().map(|(_, id)| id.seq).collect();
        let held: BTreeSet<Seq> = self.those(Entry::is_held).into_iter().collect();
        let waiting = self.those(|entry| matches!(entry.state(), State::Waiting(Line::Here)));
        let waiting: BTreeSet<Seq> = waiting.into_iter().collect();
        let ghosts: Vec<_> = holders.difference(&held).copied().collect();
        ensure!(ghosts.is_empty(), "{at}: ghosts {ghosts:?} hold slots here");
        let ghosts: Vec<_> = waiters.difference(&waiting).copied().collect();
        ensure!(ghosts.is_empty(), "{at}: ghosts {ghosts:?} wait here");
        let lost: Vec<_> = waiting.difference(&waiters).copied().collect();
        ensure!(
            lost.is_empty(),
            "{at}: {lost:?} wait here and are not in the ledger"
        );
        Ok(())
    }

    /// A release to be sent.
    pub fn release_of(&self, seq: Seq) -> Option<Release> {
        let outbox = self.outbox.as_ref()?;
        let mut releases = outbox.release.iter().chain(&outbox.later);
        releases.find(|release| release.seq == seq).cloned()
    }

    /// Whether it waits in a queue, or was sent to one.
    pub fn waits_in_queue(&self, seq: Seq) -> bool {
        let waits = |entry: &Entry| matches!(entry.state(), State::Waiting(_) | State::Sent { .. });
        self.entries.get(&seq).is_some_and(waits)
    }

    pub fn is_open(&self, seq: Seq) -> bool {
        self.entries
            .get(&seq)
            .is_some_and(|entry| entry.in_store.entering)
    }

    /// The ledger in this process.
    pub fn audited_ledger(&self) -> Option<&Ledger> {
        self.ledger_here.as_deref()
    }

    pub fn max_here(&self, ctx: &Context) -> u32 {
        self.local_max(ctx)
    }

    pub fn idle_seqs(&self, now: Instant) -> Option<Vec<Seq>> {
        let lasts = |seq: &Seq| {
            let entry = self.entries.get(seq);
            entry.is_some_and(|entry| !entry.lease.is_over(now))
        };
        let names = self.pool()?.names();
        Some(names.into_iter().filter(lasts).collect())
    }
}

impl PendingBatch {
    /// A release in flight.
    pub fn release_of(&self, seq: Seq) -> Option<Release> {
        let mut releases = self.releases.iter();
        releases.find(|release| release.seq == seq).cloned()
    }
}

impl Release {
    pub fn forget_at(&self) -> Instant {
        self.forget_at
    }
}
