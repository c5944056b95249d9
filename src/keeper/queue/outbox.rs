//! The outbox, which holds what is sent next: renewals and roll calls, and the batch that takes it all.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Note, Outbox, Queue, Release,
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

impl Queue {
    /// Asks for every waiter by name.
    pub(in crate::keeper) fn call_roll(&mut self) {
        self.renew_all(|entry| {
            matches!(
                entry.state(),
                State::Waiting { .. } | State::Checking { .. }
            )
        });
    }

    /// Asks for every waiter in a moment, and not before: if the store has lost its data, or is another, holders of other
    /// replicas are there first.
    pub(in crate::keeper) fn call_roll_soon(&mut self, ctx: &Context) {
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

    /// Introduces the queue to a store that may be another, or have lost its data: asks for all entries, and holds back
    /// newcomers until the answer. No `adopt` is sent at once: repeated late, that could bring back a permit
    /// which was released meanwhile.
    pub(in crate::keeper) fn introduce(&mut self, ctx: &Context) {
        self.renew_all(Entry::is_held);
        self.introducing = true;
        self.call_roll_soon(ctx);
    }

    fn renew_all(&mut self, which: impl Fn(&Entry) -> bool) {
        for seq in self.those(which) {
            self.renew(seq);
        }
    }

    /// Sends a batch, even if it is empty.
    pub(in crate::keeper) fn touch(&mut self) {
        self.touch = true;
    }

    /// Releases a name once more after a pause.
    pub(super) fn repeat_release(&mut self, ctx: &Context, release: Release, pause: Duration) {
        let at = ctx.now + pause.min(ctx.settings.poll_interval);
        let outbox = self.outbox();
        outbox.later.push(release);
        outbox.later_at = earliest(outbox.later_at, Some(at));
    }

    /// Drops releases that are not worth repeating any more.
    pub(in crate::keeper) fn forget_releases(&mut self, now: Instant) {
        if let Some(outbox) = &mut self.outbox {
            outbox.release.retain(|release| release.forget_at > now);
            outbox.later.retain(|release| release.forget_at > now);
        }
    }

    /// As much of what is to be sent as there is room for.
    pub(in crate::keeper) fn take_batch(
        &mut self,
        ctx: &mut Context,
        room: &mut usize,
        deadline: &mut Instant,
    ) -> Option<(Batch, Note)> {
        let mut batch = Batch {
            key: self.ledger.clone(),
            limit: self.max(),
            max_waiters: self.limit.waiters(),
            reuse: self.reuse(ctx),
            ..Batch::default()
        };
        let mut note = Note {
            queue: self.id,
            failed: false,
            releases: Vec::new(),
            inquiries: Vec::new(),
            nearest_ms: None,
        };
        let touch = std::mem::take(&mut self.touch);
        if !self.is_introducing()
            && let Some(outbox) = &self.outbox
        {
            let newcomers = outbox.acquire.iter().take(*room);
            let units = newcomers.map(|&seq| weight_of(seq) as usize).sum();
            self.make_room(ctx, units);
        }
        self.take_releases(&mut batch, &mut note, room);
        if let Some(outbox) = &mut self.outbox {
            note.inquiries = std::mem::take(&mut outbox.inquiries);
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
        if !self.is_introducing() {
            self.take_newcomers(ctx, &mut batch, room, deadline);
        }
        self.shrink_outbox();
        batch.waits = self.has_waiters() || batch.acquire.iter().any(|ask| ask.wait);
        let empty = batch.release.is_empty()
            && batch.renew.is_empty()
            && batch.adopt.is_empty()
            && batch.acquire.is_empty();
        if empty && !touch && note.inquiries.is_empty() {
            return None;
        }
        self.in_flight += 1;
        Some((batch, note))
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
                *deadline = ctx.patience(since).min(*deadline);
                take_room(room, seq);
            }
        }
    }

    /// As many releases as there is room for.
    pub(in crate::keeper) fn take_releases(
        &mut self,
        batch: &mut Batch,
        note: &mut Note,
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
        note.releases.extend(outbox.release.drain(..count));
    }

    /// Sends a parked leg: returns what it asks of its ledger.
    pub(in crate::keeper) fn take_leg(&mut self, ctx: &mut Context, seq: Seq) -> Option<Want> {
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
