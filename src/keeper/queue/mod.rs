//! A queue: this process's view of one ledger, with an entry for each of its own permits and requests.
//!
//! | file | what |
//! | --- | --- |
//! | `exchange` | batches, answers, wake-ups |
//! | `timers` | what is due: renewals of held permits, polls, repeated releases |
//! | `limits`, `views` | effects of a changed limit on waiting requests; what requests and operators see |
//! | `outage` | failures: exchanges without an answer, the store down and back; introductions and roll calls |
//! | `held` | slots that are held: renewed, lost (also at a shutdown), parked |
//! | `local` | requests that this process decides on: the fallback while the store is down, or without a store |
//! | `reuse` | slots that go to the pool and come back from it |
//! | `kept` | the pool, its right, and the requests that come first |
//! | `ledger_here` | the ledger in this process |
//! | `key_pause` | the pause of a key: its end, its ramp, and what the store is told |
//! | `pace` | the value of a limit that finds its own, and what is reported for it |
//! | `polls`, `renewals` | when to ask about waiters; when to renew permits |
//! | `presence` | what is known of a name in the store |
//! | `snapshot` | the ledger as last seen |
//! | `terms` | what a queue is for: its key, its ledger, and the values in force there |
//! | `permit` | changes of an entry: entered, sent, granted, refused, released; the outbox; steps of the ledger in this process |
//! | `dues` | fair shares: the payers of newcomers, and what permits owe |
//! | `entries`, `entries/entry` | all entries, with what follows from their states; the states, and what an entry has paid for |
//! | `outbox`, `releases` | what is to be asked; what is to be released, until that is confirmed |
//! | this one | the data, read by all |
//!
//! Each file calls only files below it. A queue does not know the [core](super::core), which has many queues: it reports
//! to the [`Context`].
//!
//! An entry moves from the request to the release; `entries/entry.rs` has the table of its states:
//!
//! ```text
//! Idle -> Sent -> Waiting -> Checking -> Held -> (gone; `Releases` have its name)
//!          `-> Leaving -> (gone): given up before the answer
//! ```
//!
//! A queue reports its decisions on entries of requests ([`Decided`](super::context::Decided)). The core then advances the
//! request: it asks for the entry, or gives it up.
//!
//! An entry may skip states: a request that is granted at once is held after it was sent. An entry moves back in three cases:
//!
//! - A newer answer shows that it waits, while its grant was checked: it waits again.
//! - Its exchange left it out, and can no longer enter it: it is idle under the same name.
//! - Its exchange failed or came too late, the store has lost it, it was granted before a loss was known, it was collected too
//!   late, or an outage moves it: it is idle under a new name. A name of unknown fate is never reused, and stays on the release
//!   list until its fate is known.

#[cfg(test)]
pub(super) mod audit;
mod dues;
mod entries;
mod exchange;
mod held;
mod kept;
mod key_pause;
mod ledger_here;
mod limits;
mod local;
mod outage;
mod outbox;
mod pace;
mod permit;
mod polls;
mod presence;
mod releases;
mod renewals;
mod reuse;
mod snapshot;
mod terms;
mod timers;
mod views;

use std::collections::BTreeMap;

use super::context::Context;
use crate::{
    error::AcquireErrorKind,
    leases::QueueId,
    ledger::{Ledger, Seq, Standing, weight_of},
    sync::Inquiry,
};

pub(super) use self::{
    entries::entry::{Entry, LegState, Requester, Use},
    outbox::Newcomer,
    releases::Release,
    terms::KeyTerms,
};
use self::{
    entries::{Entries, entry::Holder},
    kept::KeptSlots,
    key_pause::KeyPause,
    ledger_here::LedgerHere,
    outbox::Outbox,
    polls::Polls,
    releases::Releases,
    renewals::Renewals,
    snapshot::Snapshot,
};

/// Leases after which a release is no longer repeated. A waiter that outlives even this is released when it is promoted
/// without an entry here.
const FORGET_AFTER: u32 = 10;

pub(super) struct Queue {
    terms: KeyTerms,
    entries: Entries,
    polls: Polls,
    pub outbox: Outbox,
    pub releases: Releases,
    /// Decides without a store.
    pub here: LedgerHere,
    renewals: Renewals,
    pub kept: KeptSlots,
    pause: KeyPause,
    snapshot: Snapshot,
}

/// Why the store may not know the holders of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper) enum Doubt {
    /// A connection was made, perhaps to another store; the store was down; or it has lost all data, by the generation.
    OfStore,
    /// An answer shows that it has lost permits of this key.
    Missing,
    /// Another replica has found that.
    Told,
}

/// The local decision on a request.
pub(super) enum Decider {
    Ledger,
    /// A fallback that needs no ledger.
    Fallback(Result<(), AcquireErrorKind>),
}

/// The record of a batch until its answer.
#[derive(Default)]
pub(super) struct PendingBatch {
    pub queue: QueueId,
    /// The ledger cannot be used.
    pub failed: bool,
    releases: Vec<Release>,
    inquiries: Vec<Inquiry>,
    /// Newcomers that have lost their place, with its ticket.
    pub tickets: BTreeMap<Seq, i64>,
    /// Units of this process that the store should count as held when it was sent, or 0 if this is uncertain: during an
    /// introduction, or while renewals are overdue. Those that its answer grants to claims are added.
    own_held: u32,
    /// Waiters of this process in the store when it was sent, or 0 during an introduction.
    own_waiting: u32,
    /// Legs of claims that wait, according to the answer.
    queued: u32,
    /// When the next lease in the ledger ends, according to the answer.
    nearest_ms: Option<u64>,
    /// The limit in the batch.
    limit: u32,
}

impl PendingBatch {
    /// Names with a release in flight.
    pub fn releases(&self) -> impl Iterator<Item = Seq> {
        self.releases.iter().map(|release| release.seq)
    }

    /// Counts a leg of a claim, by its answer: the ledger's numbers, with which the queue compares its own, include it.
    pub fn count_leg(&mut self, seq: Seq, standing: &Standing) {
        match standing {
            Standing::Held { .. } => self.own_held += weight_of(seq),
            Standing::Waiting { .. } => self.queued += 1,
            _ => {}
        }
    }
}

impl Queue {
    pub fn new(terms: KeyTerms, ctx: &Context) -> Self {
        Self {
            entries: Entries::new(terms.limit_id),
            terms,
            polls: Polls::default(),
            outbox: Outbox::default(),
            releases: Releases::default(),
            here: LedgerHere::default(),
            renewals: Renewals::default(),
            kept: KeptSlots::default(),
            pause: KeyPause::default(),
            snapshot: Snapshot::new(ctx.now),
        }
    }

    pub fn terms(&self) -> &KeyTerms {
        &self.terms
    }

    /// Why a request that does not wait is refused.
    pub fn full_kind(&self, ctx: &Context) -> AcquireErrorKind {
        match self.pause.left(ctx.now) {
            Some(_) => AcquireErrorKind::Paused,
            None => self.terms.full_kind(ctx),
        }
    }

    pub fn entry(&self, seq: Seq) -> Option<&Entry> {
        self.entries.get(seq)
    }

    /// Whether a name has an entry still, or is released with the next batch.
    pub fn is_releasing(&self, seq: Seq) -> bool {
        self.entry(seq).is_some() || self.releases.is_next(seq)
    }

    /// Slots held by permits.
    pub fn held_by_permits(&self) -> impl Iterator<Item = Seq> {
        let by_permit = |entry: &Entry| entry.holder() == Some(Holder::Permit);
        let entries = self.entries.all().iter();
        let held = entries.filter(move |(_, entry)| by_permit(entry));
        held.map(|(seq, _)| *seq)
    }

    /// Slots in use: by the ledger in this process, without those idle in the pool; otherwise as last seen.
    fn in_use(&self) -> u32 {
        let here = self.here.get();
        let used = |ledger: &Ledger| ledger.in_use().saturating_sub(self.kept.idle() as u32);
        here.map_or(self.snapshot.in_use(), used)
    }

    /// Updates the snapshot from the ledger in this process.
    fn read_here(&mut self) {
        if let Some(ledger) = self.here.get() {
            (self.snapshot).follow_here(self.in_use(), ledger.waiting());
        }
    }

    /// The limit of the ledger in this process: in force, and apart from a pause.
    fn limits_here(&self, ctx: &Context) -> (u32, u32) {
        let whole = self.terms.max_here(ctx);
        (self.pause.in_force(whole, ctx.now), whole)
    }
}

/// Remaining work, which determines the queue's listing in the core.
impl Queue {
    /// Whether the queue holds newcomers back: the store has yet to confirm holders of the latest introduction. Later
    /// renewals and adoptions do not hold newcomers back: at a distance, some are always in flight.
    pub fn is_introducing(&self) -> bool {
        self.entries.is_introducing()
    }

    /// Whether requests are ready to send and not held back.
    pub fn has_newcomers(&self) -> bool {
        self.outbox.has_newcomers(self.entries.is_introducing())
    }

    pub fn has_work(&self) -> bool {
        self.releases.count() > 0 || self.outbox.has_work(self.entries.is_introducing())
    }

    /// Whether it can be dropped: nothing is left to send, and it has neither a pause nor a loss to remember, nor permits nor
    /// requests, except idle slots of a ledger in this process.
    pub fn is_idle(&self, ctx: &Context) -> bool {
        let has_entries = match self.kept.pool() {
            Some(pool) if pool.is_bound() => return false,
            Some(pool) if self.here.get().is_some() => self.entries.all().len() != pool.idle(),
            _ => !self.entries.all().is_empty(),
        };
        let reports = self.terms.pace.next_due().is_some();
        let remembers = self.pause.is_any() || ctx.returns.is_of_key(self.terms.id) || reports;
        !has_entries
            && (!remembers || ctx.ending.has_begun())
            && !self.outbox.is_in_flight()
            && !self.has_work()
            && !self.releases.repeats()
    }

    /// Names that the store may know, except names with a release in flight. A name may occur twice.
    pub fn names_in_store(&self) -> impl Iterator<Item = Seq> {
        let entries = self.entries.all().values();
        let known = entries.filter(|entry| entry.presence.may_be_known());
        let known = known.map(|entry| entry.lease.seq());
        known.chain(self.releases.names())
    }
}
