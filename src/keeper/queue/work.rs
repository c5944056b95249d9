//! The work of a queue: roll calls, introductions to a store, pauses, releases until confirmed; whether anything is left to
//! send. The outbox is filled by the methods under "Filling the outbox" in `permit.rs`, and directly by `exchange.rs`,
//! `outage.rs` and `requests.rs` (`inquire`, `on_time`).

use std::time::Duration;

use super::{
    Doubt, Queue,
    entries::entry::{Entry, State},
};
use crate::{
    keeper::context::Context,
    ledger::{Operation, Seq, weight_of},
    telemetry::{Measure, Topic},
};

/// Time for holders to be restored in a store that has lost them, before waiters ask it for slots.
const HOLDERS_FIRST: Duration = Duration::from_millis(100);

/// Doubts about what the store knows. About the *names* of an exchange without an answer: they are asked for again, and nobody
/// waits ([`unanswered`](Self::unanswered)). About *waiters*: they are asked for by name, and nobody waits. About *holders*:
/// those of this moment are asked for, and newcomers wait until they are confirmed.
impl Queue {
    /// Asks for every waiter by name, since messages may be missing: at once, or soon. Soon, because holders of other replicas
    /// get there first if the store has lost its data. Grants being checked are asked for at once.
    pub fn call_roll(&mut self, ctx: &Context, at_once: bool) {
        if !at_once {
            let soon = HOLDERS_FIRST.min(ctx.settings.poll_interval);
            self.polls.call_roll_by(ctx.now + soon);
        }
        for seq in self.entries.those(|entry| match entry.state() {
            State::Waiting(_) => at_once,
            State::Checking { .. } => true,
            _ => false,
        }) {
            self.renew(seq);
        }
    }

    /// Introduces the queue to the store: asks for all holders of this moment, and holds back newcomers until their
    /// confirmation, however many exchanges that takes. If one of these is not answered, its names are asked for again; only
    /// another introduction asks for more. Holders are adopted only if the store does not know them: a late `adopt` could
    /// restore a permit that was released meanwhile. Waiters follow.
    pub fn introduce(&mut self, ctx: &mut Context, why: Doubt) {
        match why {
            Doubt::Missing => self.outbox.tell_loss(true),
            Doubt::Told => {
                self.outbox.tell_loss(false);
                if (ctx.returns).has_just_begun(self.terms.part, Some(self.terms.id), ctx.now) {
                    return;
                }
                ctx.returns
                    .begin_of_key(self.terms.part, self.terms.id, ctx.now);
            }
            Doubt::Connected | Doubt::StoreBack | Doubt::Generation => {}
        }
        for seq in self.entries.those(Entry::is_held) {
            if self.entries.introduce(seq) {
                self.outbox.extend(seq);
            }
        }
        self.outbox.ask_for_holders();
        self.polls.doubt(ctx.now);
        self.outbox.want(self.pause.send_again(true));
        self.call_roll(ctx, false);
    }

    /// Permits have returned: newcomers of this replica, or of others, are admitted.
    pub fn go_on(&mut self) {
        self.outbox
            .want(self.entries.waiting() > 0 || self.snapshot.waiting() > 0);
    }

    /// Whether the queue holds newcomers back: the store has yet to confirm holders of the latest introduction. Later
    /// renewals and adoptions do not hold newcomers back: at a distance, some are always in flight.
    pub fn is_introducing(&self) -> bool {
        self.entries.is_introducing()
    }

    /// Called after every change of the queue, before the core lists it: opens or closes the pool by the ledger in this
    /// process, and sets the time for the next slot of that ledger after a pause, or for the end of the ramp.
    pub fn after_change(&mut self, ctx: &mut Context) {
        self.follow_ledger_here(ctx);
        if self.pause.is_any() {
            let ledger = self.here.get().filter(|ledger| ledger.waiting() > 0);
            let whole = self.terms.max_here(ctx);
            let rise =
                ledger.and_then(|ledger| self.pause.next_rise(whole, ledger.in_use(), ctx.now));
            self.pause.plan(rise);
        }
    }
}

/// Pauses.
impl Queue {
    /// Starts a pause, unless the present one is longer.
    pub fn pause(&mut self, ctx: &mut Context, length: Duration) {
        let asks_store = ctx.asks_store(self.terms.part);
        let Some(started) = self.pause.start(length, ctx.now, ctx.shared, asks_store) else {
            return;
        };
        if started.is_new {
            ctx.measure(self.terms.limit_id, Measure::Paused(started.length));
            ctx.report(self.terms.limit_id, Topic::Paused, self.terms.id, 1);
        }
        self.outbox.want(ctx.shared);
        self.empty_pool(ctx);
    }

    /// Ends a pause, and its ramp, by an operator's order. Returns whether there was one.
    pub fn resume(&mut self, ctx: &mut Context) -> bool {
        let was_paused = self.pause.resume(ctx.now, ctx.shared);
        if was_paused {
            self.outbox.want(ctx.shared);
            self.here.note_change();
            self.run_here(ctx, Operation::Nothing);
        }
        was_paused
    }
}

/// Releases, until confirmed.
impl Queue {
    /// Number of slots that the store may still count once this process is gone.
    pub fn unreleased(&self) -> usize {
        let names = self.names_in_store();
        names.map(|seq| weight_of(seq) as usize).sum()
    }

    /// Names that the store may know, except names with a release in flight. A name may occur twice.
    pub fn names_in_store(&self) -> impl Iterator<Item = Seq> {
        let entries = self.entries.all().values();
        let known = entries.filter(|entry| entry.presence.may_be_known());
        let known = known.map(|entry| entry.lease.seq());
        known.chain(self.releases.names())
    }
}

/// Remaining work, which determines the queue's listing in the core.
impl Queue {
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
        let has_entries = match self.pool() {
            Some(pool) if pool.is_bound() => return false,
            Some(pool) if self.here.get().is_some() => self.entries.all().len() != pool.idle(),
            _ => !self.entries.all().is_empty(),
        };
        let remembers = self.pause.is_any() || ctx.returns.is_of_key(self.terms.id);
        !has_entries
            && (!remembers || ctx.ending.has_begun())
            && !self.outbox.is_in_flight()
            && !self.has_work()
            && !self.releases.repeats()
    }
}
