//! The work of a queue: roll calls, introductions to a store, pauses, releases until confirmed; whether anything is left to
//! send. The outbox is filled by the methods under "Filling the outbox" in `permit.rs`, and directly by `exchange.rs`,
//! `outage.rs` and `requests.rs` (`inquire`, `on_time`).

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;

use super::{
    KeyPause, Outbox, Queue, RAMP, Release,
    permit::entry::{Entry, State},
};
use crate::{
    keeper::context::{Context, earliest},
    leases::StoreMoment,
    ledger::{Batch, Operation, Seq, weight_of},
    ranges::MAX_PAUSE,
    telemetry::{Measure, Topic},
};

/// Time for holders to be restored in a store that has lost them, before waiters ask it for slots.
const HOLDERS_FIRST: Duration = Duration::from_millis(100);

#[cfg(test)]
thread_local! {
    /// Entries passed in search of an unconfirmed holder, and questions of claims.
    pub static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Repeated questions: after a new connection, and from time to time.
impl Queue {
    /// Requests a batch, even an empty one.
    pub fn ask_for_batch(&mut self) {
        self.wants_batch = true;
    }

    /// Asks for every waiter by name.
    pub fn call_roll(&mut self) {
        self.renew_all(|entry| matches!(entry.state(), State::Waiting(_) | State::Checking { .. }));
    }

    /// Schedules a roll call shortly, not at once: if the store has lost its data, or is another, holders of other
    /// replicas get there first. Grants being checked are asked for now.
    pub fn call_roll_soon(&mut self, ctx: &Context) {
        if let Some(waiters) = &mut self.waiters {
            let soon = ctx.now + HOLDERS_FIRST.min(ctx.settings.poll_interval);
            // Never postponed: a sequence of failing connections would postpone it for ever.
            let at = waiters.roll_call_at.map_or(soon, |at| at.min(soon));
            waiters.roll_call_at = Some(at);
            waiters.poll_at = waiters.poll_at.map(|poll| poll.max(at));
            waiters.next_slot_at = waiters.next_slot_at.map(|expiry| expiry.max(at));
        }
        self.renew_all(|entry| matches!(entry.state(), State::Checking { .. }));
    }

    /// Introduces the queue to a store that may be another, or have lost its data: asks for all holders, and holds back
    /// newcomers until their confirmation, however many exchanges that takes. Holders are adopted only if the store
    /// does not know them: a late `adopt` could restore a permit that was released meanwhile.
    pub fn introduce(&mut self, ctx: &Context) {
        let outbox = self.outbox.iter();
        let listed = outbox.flat_map(|outbox| outbox.renew.iter().chain(&outbox.adopt));
        let listed: BTreeSet<Seq> = listed.copied().collect();
        for seq in self.those(Entry::is_held) {
            let Some(entry) = self.entries.get_mut(&seq) else {
                continue;
            };
            entry.in_store.introduced = true;
            if !listed.contains(&seq) {
                entry.in_store.renew_again |= entry.in_store.renewing;
                self.renew(seq);
            }
        }
        self.introducing = true;
        self.lists = true;
        if let Some(waiters) = &mut self.waiters {
            // Until they have been asked for, the absence of waiters shows no further loss.
            waiters.late_at = Some(ctx.now);
        }
        self.send_pause_again(true);
        self.call_roll_soon(ctx);
    }

    /// Permits have returned: newcomers of this replica, or of others, are admitted.
    pub fn go_on(&mut self) {
        self.wants_batch |= self.has_waiters() || self.snapshot.waiting > 0;
    }

    fn renew_all(&mut self, which: impl Fn(&Entry) -> bool) {
        for seq in self.those(which) {
            self.renew(seq);
        }
    }

    /// Whether the queue holds newcomers back. Called after [`after_change`](Self::after_change).
    pub fn is_introducing(&self) -> bool {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        self.introducing
    }

    pub fn has_adoptions(&self) -> bool {
        (self.outbox.as_ref()).is_some_and(|outbox| !outbox.adopt.is_empty())
    }

    /// A holder that is still being asked for, or adopted: the last one, if none is known.
    fn unconfirmed_holder(&self) -> Option<Seq> {
        let adopts = self.has_adoptions();
        let known = self.entries.get(&self.unconfirmed);
        let known = known.filter(|entry| entry.is_unconfirmed(adopts));
        let found = known.or_else(|| {
            (self.entries.values().rev()).find(|entry| {
                #[cfg(test)]
                LOOKS.set(LOOKS.get() + 1);
                entry.is_unconfirmed(adopts)
            })
        });
        found.map(|entry| entry.lease.seq())
    }

    /// Ends the introduction once none of its holders is being asked for or adopted. Later renewals and adoptions do not
    /// hold newcomers back: at a distance, some are always in flight. The store is asked for holders in order, so the last
    /// one is usually confirmed last: remembering it saves a scan of all holders at each change.
    pub(super) fn end_introduction(&mut self, ctx: &mut Context) {
        if !self.introducing {
            return;
        }
        match self.unconfirmed_holder() {
            Some(seq) => self.unconfirmed = seq,
            None => {
                self.introducing = false;
                ctx.introduced += 1;
            }
        }
    }

    /// Called after every change of the queue, before the core lists it: ends a complete introduction, and opens or
    /// closes the pool by the ledger in this process.
    pub fn after_change(&mut self, ctx: &mut Context) {
        self.end_introduction(ctx);
        self.follow_ledger_here(ctx);
        self.plan_pause(ctx);
    }
}

/// Pauses.
impl Queue {
    /// Starts a pause, unless the present one is longer.
    pub fn pause(&mut self, ctx: &mut Context, length: Duration) {
        let length = length.min(MAX_PAUSE);
        let end = ctx.now + length;
        // An operator has ended a pause, and the store does not know yet: after a new pause from here, the store would
        // keep the ended one. A call that the upstream refuses later starts the next pause.
        let is_unsent_end = |pause: &KeyPause| pause.resumed && pause.unsent;
        let is_ending = self.pause.as_deref().is_some_and(is_unsent_end);
        if length.is_zero()
            || is_ending && ctx.asks_store(self.part)
            || self.running_pause().is_some_and(|pause| pause.end >= end)
        {
            return;
        }
        // Calls in flight may all be answered alike, each a little later.
        if self.pause_left(ctx.now).is_none() {
            ctx.measure(self.limit_id, Measure::Paused(length));
            ctx.report(self.limit_id, Topic::Paused, self.id, 1);
        }
        self.pause = Some(Box::new(KeyPause {
            end,
            since: ctx.now,
            own: true,
            resumed: false,
            unsent: ctx.shared,
            asks: false,
            due: end,
        }));
        self.wants_batch |= ctx.shared;
        self.empty_pool(ctx);
    }

    /// Ends a pause, and its ramp, by an operator's order. Every replica that remembers the pause tells the store: any of
    /// them may have sent it once more in the meantime. Returns whether there was one.
    pub fn resume(&mut self, ctx: &mut Context) -> bool {
        let Some(mut pause) = self.pause.take_if(|pause| !pause.resumed) else {
            return false;
        };
        if ctx.shared {
            (pause.resumed, pause.unsent, pause.since) = (true, true, ctx.now);
            self.pause = Some(pause);
            self.wants_batch = true;
        }
        self.recheck_right = true;
        self.run_here(ctx, Operation::Nothing);
        true
    }

    /// Follows an answer of the store. A pause that it does not know was lost, or ended: it is asked which.
    pub(super) fn follow_pause_in_store(
        &mut self,
        ctx: &Context,
        batch: &Batch,
        end_ms: Option<u64>,
        at: StoreMoment,
    ) {
        let known = self.pause.as_deref();
        if known.is_some_and(|pause| at.sent < pause.since) {
            return;
        }
        let own = known.is_some_and(|pause| pause.own);
        let (unsent, asks) = known.map_or((false, false), |pause| (pause.unsent, pause.asks));
        let is_ended = known.is_some_and(|pause| pause.resumed);
        match end_ms.map(|end_ms| end_ms.saturating_mul(1_000)) {
            // The store has not been told yet, or the exchange came too late.
            Some(_) if is_ended => self.send_pause_again(true),
            Some(end_us) => {
                let ahead = Duration::from_micros(end_us.saturating_sub(at.store_us));
                let ago = Duration::from_micros(at.store_us.saturating_sub(end_us));
                let end = (ctx.now + ahead).checked_sub(ago).unwrap_or(ctx.now);
                // The store may have lost a longer one, which is on its way there again.
                let longer = known.filter(|pause| unsent && pause.end > end);
                let end = longer.map_or(end, |pause| pause.end);
                self.pause = Some(Box::new(KeyPause {
                    end,
                    since: at.sent,
                    own,
                    resumed: false,
                    unsent,
                    asks,
                    due: end + RAMP,
                }));
            }
            None if unsent => {}
            None if is_ended || batch.asks_pause || self.pause_left(ctx.now).is_none() => {
                self.pause = None;
            }
            None => self.send_pause_again(true),
        }
    }

    /// Sets the time for the next slot of the ledger in this process, or for the end of the ramp.
    fn plan_pause(&mut self, ctx: &Context) {
        if self.pause.is_none() {
            return;
        }
        let ledger = self.ledger_here.as_ref().filter(|here| here.waiting() > 0);
        let in_use = ledger.map(|ledger| ledger.in_use());
        let rise = in_use
            .and_then(|in_use| self.next_rise(self.local_max_without_pause(ctx), in_use, ctx.now));
        if let Some(pause) = &mut self.pause {
            let over = pause.end + RAMP;
            pause.due = rise.map_or(over, |rise| rise.min(over));
        }
    }
}

/// Releases, until confirmed.
impl Queue {
    /// Releases a name once more after a pause.
    pub(super) fn repeat_release(&mut self, ctx: &Context, release: Release, pause: Duration) {
        let at = ctx.now + pause.min(ctx.settings.poll_interval);
        let outbox = self.outbox();
        outbox.later.push(release);
        outbox.later_at = earliest(outbox.later_at, Some(at));
    }

    /// Moves the postponed releases to the next exchange.
    pub fn repeat_releases(&mut self) {
        if let Some(outbox) = &mut self.outbox {
            outbox.later_at = None;
            outbox.release.append(&mut outbox.later);
        }
    }

    /// Forgets releases that are no longer worth repeating.
    pub fn forget_releases(&mut self, now: Instant) {
        if let Some(outbox) = &mut self.outbox {
            outbox.release.retain(|release| release.forget_at > now);
            outbox.later.retain(|release| release.forget_at > now);
        }
    }

    /// Number of slots that the store may still count once this process is gone.
    pub fn unreleased(&self) -> usize {
        let names = self.names_in_store();
        names.map(|seq| weight_of(seq) as usize).sum()
    }

    /// Names that the store may know, except names with a release in flight. A name may occur twice.
    pub fn names_in_store(&self) -> impl Iterator<Item = Seq> {
        let entries = self.entries.values();
        let known = entries.filter(|entry| entry.in_store.present || entry.in_store.entering);
        let known = known.map(|entry| entry.lease.seq());
        let outbox = self.outbox.iter();
        let listed = outbox.flat_map(|outbox| outbox.release.iter().chain(&outbox.later));
        known.chain(listed.map(|release| release.seq))
    }

    /// Whether a release will be repeated after a pause.
    pub fn repeats_releases(&self) -> bool {
        let repeats = |outbox: &Outbox| !outbox.later.is_empty();
        self.outbox.as_deref().is_some_and(repeats)
    }
}

/// Remaining work, which determines the queue's listing in the core.
impl Queue {
    /// Whether an inquiry of a user has not been sent yet.
    pub fn has_inquiries(&self) -> bool {
        (self.outbox.as_ref()).is_some_and(|outbox| !outbox.inquiries.is_empty())
    }

    /// Whether requests are ready to send and not held back. Called after [`after_change`](Self::after_change).
    pub fn has_newcomers(&self) -> bool {
        (self.outbox.as_ref()).is_some_and(|outbox| !outbox.acquire.is_empty() && !self.introducing)
    }

    /// Number of names in the outbox for a batch.
    pub fn names_to_send(&self) -> usize {
        self.outbox.as_ref().map_or(0, |outbox| {
            outbox.release.len() + outbox.renew.len() + outbox.adopt.len() + outbox.acquire.len()
        })
    }

    pub fn has_work(&self) -> bool {
        let outbox = self.outbox.as_deref();
        let has_others = outbox.is_some_and(Outbox::has_any_but_newcomers);
        self.wants_batch || has_others || self.has_newcomers()
    }

    /// Whether it can be dropped: the store knows everything that it knows, and nothing is left to send.
    pub fn is_idle(&self, ctx: &Context) -> bool {
        self.is_unused(ctx) && self.in_flight == 0 && !self.has_work() && !self.repeats_releases()
    }

    /// Whether it has neither a pause nor a loss to remember, nor permits nor requests, except idle slots of a ledger in
    /// this process.
    fn is_unused(&self, ctx: &Context) -> bool {
        let remembers = self.pause.is_some() || ctx.returns.is_of_key(self.id);
        match self.pool() {
            _ if remembers && !ctx.ending => false,
            Some(pool) if pool.is_bound() => false,
            Some(pool) if self.ledger_here.is_some() => self.entries.len() == pool.idle(),
            _ => self.entries.is_empty(),
        }
    }
}

impl Outbox {
    pub fn has_any_but_newcomers(&self) -> bool {
        let known = self.release.is_empty() && self.renew.is_empty() && self.adopt.is_empty();
        !known || !self.inquiries.is_empty()
    }
}
