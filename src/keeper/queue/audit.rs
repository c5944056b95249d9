//! For tests: checks that the state of a queue is consistent, and reads for the simulation.

use std::collections::{BTreeSet, HashMap};

use tokio::time::Instant;

use super::{
    PendingBatch, Queue, Release,
    entries::entry::{Entry, HeldSlot, Holder, State, WaitsIn},
};
use crate::{
    fallbacks::Availability,
    keeper::{
        context::{Context, Counts},
        demand::RequestId,
    },
    ledger::{Ledger, Seq, TenantId},
    limit::{Adapt, LimitId},
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
        let at = format!("queue {} ({})", self.terms.id.0, self.terms.limit().name());
        ensure!(
            self.outbox.batches_in_flight() == in_flight,
            "{at}: {} in flight, not {in_flight}",
            self.outbox.batches_in_flight()
        );
        if let Some(Adapt { floor, ceiling }) = self.terms.adapt() {
            let max = self.terms.max();
            ensure!((floor..=ceiling).contains(&max), "{at}: its value is {max}");
        }
        for (seq, entry) in self.entries.all().iter() {
            let at = format!("{at}, entry {seq}");
            self.audit_entry(ctx, books, *seq, entry)
                .map_err(|why| format!("{at}: {why}"))?;
        }
        self.entries.audit().map_err(|why| format!("{at}: {why}"))?;
        ensure!(
            !ctx.asks_store(self.terms.part) || self.here.get().is_none(),
            "{at}: has a ledger of its own"
        );
        self.outbox.audit().map_err(|why| format!("{at}: {why}"))?;
        let has_work = self.has_work();
        if ctx.asks_store(self.terms.part) && self.entries.waiting() > 0 {
            let asked = self.polls.is_polling() || self.outbox.is_in_flight() || has_work;
            ensure!(asked, "{at}: waits, and never asks");
        }
        ensure!(
            !self.here.is_changed() || ctx.shared,
            "{at}: the right to keep slots was not seen to"
        );
        self.audit_local(&at)?;
        self.audit_pool(&at)
    }

    /// Whether the store should count units of this process.
    pub fn holds_in_store(&self) -> bool {
        self.entries.held().in_store > 0
    }

    fn audit_entry(
        &self,
        ctx: &Context,
        books: &mut Books,
        seq: Seq,
        entry: &Entry,
    ) -> Result<(), String> {
        let up = ctx.availability(self.terms.part) == Availability::Up;
        ensure!(entry.lease.seq() == seq, "its lease has another name");
        ensure!(entry.lease.queue == self.terms.id, "in the wrong queue");
        let (state, request) = (*entry.state(), entry.request());
        let presence = &entry.presence;
        presence.audit(entry.is_held(), matches!(state, State::Leaving))?;
        let entering = presence.is_entering();
        let before = books.counts.held + books.counts.waiting;
        match state {
            State::Held(_) => books.counts.held += 1,
            State::Idle => books.counts.waiting += usize::from(entry.is_alone()),
            State::Sent { .. } | State::Waiting(_) | State::Checking { .. } => {
                books.counts.waiting += 1;
            }
            State::Leaving => {}
        }
        if let Some(paying) = entry.paying()
            && books.counts.held + books.counts.waiting > before
        {
            let tenant = (self.terms.limit_id, paying.tenant);
            *books.tenants.entry(tenant).or_default() += 1;
        }
        ensure!(
            entering == books.entering.contains(&seq),
            "entering {entering}"
        );
        let asked = (self.outbox.is_by_name(seq), books.renewing.contains(&seq));
        let is_renewing = asked.0 || asked.1;
        ensure!(
            presence.renewal() == asked,
            "renewal {:?}, and {asked:?} listed and in flight",
            presence.renewal()
        );
        ensure!(
            !presence.is_in_doubt() || is_renewing || entering,
            "nobody will confirm it"
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
                let listed = self.outbox.is_asked(seq);
                ensure!(!is_listed || listed && up, "wants to ask, and will not");
                ensure!(is_listed || !listed, "asks out of turn");
                ensure!(presence.is_unasked(), "asked before");
            }
            State::Sent { .. } => ensure!(entering, "asks, and nobody was asked"),
            // If its renewal was lost, the exchange that acquires it is still unanswered.
            State::Checking { .. } => {
                ensure!(is_renewing || entering, "is checked by nobody");
            }
            State::Waiting(WaitsIn::Here) => {
                ensure!(self.here.get().is_some(), "waits here, where no ledger is");
                ensure!(!presence.may_be_known(), "waits here, and in the store");
            }
            State::Waiting(WaitsIn::InStore { .. }) => {
                ensure!(
                    presence.is_present(),
                    "waits in a store that does not have it"
                );
            }
            State::Held(HeldSlot { due, holder, .. }) => {
                let is_taken = !matches!(holder, Holder::Request | Holder::Reuser);
                ensure!(
                    is_taken == request.is_none(),
                    "held for {holder:?}, and {request:?}"
                );
                if let Some(at) = due {
                    let is_timed = self.renewals.audit(seq, at);
                    ensure!(is_timed || entering, "nobody renews it at {at:?}");
                }
            }
            State::Leaving => ensure!(entering, "nobody wants it, and it stays"),
        }
        Ok(())
    }

    /// Idle slots are held, by the pool alone, and are renewed.
    fn audit_pool(&self, at: &str) -> Result<(), String> {
        let Some(pool) = self.kept.pool() else {
            return Ok(());
        };
        let idle = pool.names();
        for seq in &idle {
            let held = |entry: &Entry| entry.holder() == Some(Holder::Permit);
            let entry = self.entries.get(*seq);
            ensure!(
                entry.is_none_or(held),
                "{at}: {seq} is idle and is not held"
            );
        }
        let names: BTreeSet<_> = idle.iter().collect();
        ensure!(names.len() == idle.len(), "{at}: idle twice: {idle:?}");
        let tended = self.kept.next_due().is_some() || self.here.get().is_some();
        ensure!(tended || idle.is_empty(), "{at}: keeps {idle:?} for ever");
        Ok(())
    }

    /// The ledger in this process has exactly the holders and waiters that the queue has.
    fn audit_local(&self, at: &str) -> Result<(), String> {
        let Some(ledger) = self.here.get() else {
            return Ok(());
        };
        let holders: BTreeSet<Seq> = ledger.holders().map(|(id, _)| id.seq).collect();
        let waiters: BTreeSet<Seq> = ledger.waiters().map(|(_, id)| id.seq).collect();
        let held: BTreeSet<Seq> = self.entries.those(Entry::is_held).into_iter().collect();
        let waiting = self
            .entries
            .those(|entry| matches!(entry.state(), State::Waiting(WaitsIn::Here)));
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
        self.releases.release_of(seq)
    }

    /// Whether it waits in a queue, or was sent to one.
    pub fn waits_in_queue(&self, seq: Seq) -> bool {
        let waits = |entry: &Entry| matches!(entry.state(), State::Waiting(_) | State::Sent { .. });
        self.entries.get(seq).is_some_and(waits)
    }

    pub fn is_open(&self, seq: Seq) -> bool {
        self.entries
            .get(seq)
            .is_some_and(|entry| entry.presence.is_entering())
    }

    /// The ledger in this process.
    pub fn audited_ledger(&self) -> Option<&Ledger> {
        self.here.get()
    }

    pub fn max_here(&self, ctx: &Context) -> u32 {
        self.limits_here(ctx).0
    }

    pub fn idle_seqs(&self, now: Instant) -> Option<Vec<Seq>> {
        let lasts = |seq: &Seq| {
            let entry = self.entries.get(*seq);
            entry.is_some_and(|entry| !entry.lease.is_over(now))
        };
        let names = self.kept.pool()?.names();
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
