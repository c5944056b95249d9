//! The outbox: entries to be asked for again, the introduction of a queue to a store, releases, the batch that takes them
//! all; and the timers after which there is more to send. It is filled by the methods at the end of `mod.rs`, which all
//! files call, and directly by `replies.rs` and by `requests.rs` (`inquire`).

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Outbox, PendingBatch, Queue,
    permit::entry::{Entry, State},
};
use crate::{
    keeper::context::{Context, earliest},
    ledger::{Ask, Batch, Seq, Want, weight_of},
};

/// Time for holders to be restored in a store that has lost them, before waiters ask it for slots.
const HOLDERS_FIRST: Duration = Duration::from_millis(100);

/// Room is counted in units. The last permit may go over it.
fn take_room(room: &mut usize, seq: Seq) {
    *room = room.saturating_sub(weight_of(seq) as usize);
}

/// Questions that are repeated: after a new connection, and from time to time.
impl Queue {
    /// Asks for every waiter by name.
    pub fn call_roll(&mut self) {
        self.renew_all(|entry| {
            matches!(
                entry.state(),
                State::Waiting { .. } | State::Checking { .. }
            )
        });
    }

    /// Asks for every waiter by name in a moment, not at once: if the store has lost its data, or is another, holders of other
    /// replicas are there first. Grants that are being checked are asked for now.
    pub fn call_roll_soon(&mut self, ctx: &Context) {
        if let Some(waiters) = &mut self.waiters {
            let soon = ctx.now + HOLDERS_FIRST.min(ctx.settings.poll_interval);
            // Never put off: connections that keep ending would put it off for ever.
            let at = waiters.roll_call_at.map_or(soon, |at| at.min(soon));
            waiters.roll_call_at = Some(at);
            waiters.poll_at = waiters.poll_at.map(|poll| poll.max(at));
            waiters.handover_at = waiters.handover_at.map(|handover| handover.max(at));
        }
        self.renew_all(|entry| matches!(entry.state(), State::Checking { .. }));
    }

    /// Introduces the queue to a store that may be another, or have lost its data: asks for all holders, and holds back
    /// newcomers until they are confirmed, however many exchanges that takes. Holders are adopted only if the store does not
    /// know them: an `adopt` that arrives late could bring back a permit which was released meanwhile.
    pub fn introduce(&mut self, ctx: &Context) {
        for seq in self.those(Entry::is_held) {
            if let Some(entry) = self.entries.get_mut(&seq) {
                entry.in_store.renew_again |= entry.in_store.renewing;
            }
            self.renew(seq);
        }
        self.introducing = true;
        self.call_roll_soon(ctx);
    }

    fn renew_all(&mut self, which: impl Fn(&Entry) -> bool) {
        for seq in self.those(which) {
            self.renew(seq);
        }
    }

    /// Whether a holder, old or new, is asked for or adopted, since the queue was introduced.
    pub fn is_introducing(&self) -> bool {
        let is_asked = |entry: &Entry| entry.in_store.renewing || entry.in_store.entering;
        let unconfirmed = |entry: &Entry| entry.is_held() && is_asked(entry);
        let adopts = |outbox: &Outbox| !outbox.adopt.is_empty();
        // Looked at in this order, as a queue may have many entries, and is seldom being introduced.
        self.introducing
            && (self.outbox.as_deref().is_some_and(adopts)
                || self.entries.values().any(unconfirmed))
    }

    /// Ends the introduction once all holders are confirmed: a later renewal does not hold newcomers back.
    fn end_introduction(&mut self) {
        self.introducing = self.is_introducing();
    }

    /// After every change of the queue, before the core lists it: ends an introduction that is complete, and opens or
    /// closes the pool by the ledger in this process.
    pub fn after_change(&mut self, ctx: &mut Context) {
        self.end_introduction();
        self.follow_ledger_here(ctx);
    }
}

/// Releases, until they are confirmed.
impl Queue {
    /// Drops releases that are not worth repeating any more.
    pub fn forget_releases(&mut self, now: Instant) {
        if let Some(outbox) = &mut self.outbox {
            outbox.release.retain(|release| release.forget_at > now);
            outbox.later.retain(|release| release.forget_at > now);
        }
    }

    /// How many slots the store may still count once this process is gone.
    pub fn unreleased(&self) -> usize {
        let entries = self.entries.values();
        let known = entries.filter(|entry| entry.in_store.present || entry.in_store.entering);
        let known = known.map(|entry| entry.lease.seq());
        let outbox = self.outbox.iter();
        let listed = outbox.flat_map(|outbox| outbox.release.iter().chain(&outbox.later));
        let names = known.chain(listed.map(|release| release.seq));
        names.map(|seq| weight_of(seq) as usize).sum()
    }
}

/// Batches.
impl Queue {
    /// Has a batch sent, even if it is empty.
    pub fn ask_for_batch(&mut self) {
        self.wants_batch = true;
    }

    /// As much of what is to be sent as there is room for.
    pub fn take_batch(
        &mut self,
        ctx: &mut Context,
        room: &mut usize,
        deadline: &mut Instant,
    ) -> Option<(Batch, PendingBatch)> {
        let mut batch = Batch {
            key: self.ledger.clone(),
            limit: self.max(),
            max_waiters: self.limit.waiters(),
            reuse: self.reuse(ctx),
            ..Batch::default()
        };
        let mut pending = PendingBatch {
            queue: self.id,
            failed: false,
            releases: Vec::new(),
            inquiries: Vec::new(),
            nearest_ms: None,
        };
        let wanted = std::mem::take(&mut self.wants_batch);
        self.end_introduction();
        if !self.introducing
            && let Some(outbox) = &self.outbox
        {
            let newcomers = outbox.acquire.iter().take(*room);
            let units = newcomers.map(|&seq| weight_of(seq) as usize).sum();
            self.make_room(ctx, units);
        }
        self.take_releases(&mut batch, &mut pending, room);
        if let Some(outbox) = &mut self.outbox {
            pending.inquiries = std::mem::take(&mut outbox.inquiries);
            while *room > 0
                && let Some(seq) = outbox.renew.pop_front()
            {
                if self.entries.contains_key(&seq) {
                    batch.renew.push(seq);
                    take_room(room, seq);
                }
            }
            while *room > 0
                && let Some(seq) = outbox.adopt.pop_front()
            {
                if let Some(entry) = self.entries.get_mut(&seq)
                    && entry.is_held()
                    && !entry.in_store.entering
                    && !entry.lease.is_over(ctx.now)
                {
                    entry.in_store.entering = true;
                    batch.adopt.push(seq);
                    take_room(room, seq);
                }
            }
        }
        self.end_introduction();
        if !self.introducing {
            self.take_newcomers(ctx, &mut batch, room, deadline);
        }
        self.shrink_outbox();
        batch.waits = self.has_waiters() || batch.acquire.iter().any(|ask| ask.wait);
        let empty = batch.release.is_empty()
            && batch.renew.is_empty()
            && batch.adopt.is_empty()
            && batch.acquire.is_empty();
        if empty && !wanted && pending.inquiries.is_empty() {
            return None;
        }
        self.in_flight += 1;
        Some((batch, pending))
    }

    fn take_newcomers(
        &mut self,
        ctx: &Context,
        batch: &mut Batch,
        room: &mut usize,
        deadline: &mut Instant,
    ) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        while *room > 0
            && let Some(seq) = outbox.acquire.pop_front()
        {
            if let Some(entry) = self.entries.get_mut(&seq)
                && let Some(since) = entry.send(ctx.now)
            {
                batch.acquire.push(Ask {
                    seq,
                    wait: !entry.wait.is_zero(),
                });
                *deadline = ctx.gives_up_at(since).min(*deadline);
                take_room(room, seq);
            }
        }
    }

    /// As many releases as there is room for.
    pub fn take_releases(
        &mut self,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        let mut count = 0;
        while *room > 0
            && let Some(release) = outbox.release.get(count)
        {
            batch.release.push(release.seq);
            take_room(room, release.seq);
            count += 1;
        }
        pending.releases.extend(outbox.release.drain(..count));
    }

    /// Sends a parked leg: returns what it asks of its ledger.
    pub fn take_leg(&mut self, ctx: &mut Context, seq: Seq) -> Option<Want> {
        let entry = self.entries.get(&seq)?;
        let want = match (entry.is_shadow(), entry.wait.is_zero()) {
            (true, _) => Want::IfFree,
            (false, true) => Want::Now,
            (false, false) => Want::Wait,
        };
        self.send_leg(ctx, seq);
        Some(want)
    }

    /// Frees the outbox after it was emptied. A queue with many entries will need it again soon.
    fn shrink_outbox(&mut self) {
        let idle = |outbox: &Outbox| {
            !outbox.has_any_but_newcomers()
                && outbox.acquire.is_empty()
                && outbox.later_at.is_none()
        };
        if self.entries.are_few() && self.outbox.as_deref().is_some_and(idle) {
            self.outbox = None;
        }
    }
}

/// Work that is left, by which the core lists the queue.
impl Queue {
    /// Whether an inquiry of a user has not been sent yet.
    pub fn has_inquiries(&self) -> bool {
        (self.outbox.as_ref()).is_some_and(|outbox| !outbox.inquiries.is_empty())
    }

    /// Whether a batch is to be sent.
    pub fn has_work(&self) -> bool {
        let Some(outbox) = &self.outbox else {
            return self.wants_batch;
        };
        if outbox.has_any_but_newcomers() || self.wants_batch {
            return true;
        }
        !outbox.acquire.is_empty() && !self.is_introducing()
    }

    /// Since when the first request that is to be sent has been asking.
    pub fn asks_since(&self) -> Option<Instant> {
        let since = |seq| match self.entries.get(seq)?.state() {
            State::Unsent { since } => Some(*since),
            _ => None,
        };
        self.outbox.as_ref()?.acquire.iter().find_map(since)
    }

    /// Whether it can be dropped: the store knows all that it knows, and nothing is to be sent.
    pub fn is_idle(&self) -> bool {
        let releases_later = |outbox: &Outbox| !outbox.later.is_empty();
        self.is_unused()
            && self.in_flight == 0
            && !self.has_work()
            && !self.outbox.as_deref().is_some_and(releases_later)
    }

    /// Whether it has no permits and no requests, but for idle slots of a ledger in this process.
    fn is_unused(&self) -> bool {
        match self.pool() {
            Some(pool) if pool.is_bound() => false,
            Some(pool) if self.ledger_here.is_some() => self.entries.len() == pool.idle(),
            _ => self.entries.is_empty(),
        }
    }
}

/// Timers.
impl Queue {
    /// When to call [`on_time`](Self::on_time) next.
    pub fn next_due(&self) -> Option<Instant> {
        let tend_at = self.pooled.as_ref().and_then(|pooled| pooled.tend_at);
        let mut due = earliest(self.young_at, tend_at);
        if let Some(outbox) = &self.outbox {
            due = earliest(due, outbox.later_at);
        }
        if let Some(waiters) = &self.waiters {
            let timers = [waiters.poll_at, waiters.handover_at, waiters.roll_call_at];
            due = timers.into_iter().fold(due, earliest);
        }
        due
    }

    /// Does what is due, but for renewals of single permits.
    pub fn on_time(&mut self, ctx: &mut Context) {
        let now = ctx.now;
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if due(&mut self.young_at) {
            self.add_young_timers(ctx);
        }
        if let Some(waiters) = &mut self.waiters {
            self.wants_batch |= due(&mut waiters.poll_at);
            self.wants_batch |= due(&mut waiters.handover_at);
            if due(&mut waiters.roll_call_at) {
                self.call_roll();
            }
        }
        if let Some(pooled) = &mut self.pooled
            && due(&mut pooled.tend_at)
        {
            self.tend_pool(ctx);
        }
        if let Some(outbox) = &mut self.outbox
            && due(&mut outbox.later_at)
        {
            outbox.release.append(&mut outbox.later);
        }
    }
}

impl Outbox {
    fn has_any_but_newcomers(&self) -> bool {
        let known = self.release.is_empty() && self.renew.is_empty() && self.adopt.is_empty();
        !known || !self.inquiries.is_empty()
    }
}
