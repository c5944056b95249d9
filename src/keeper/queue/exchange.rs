//! One queue's part in an exchange: its batch, and the answer. Also wake-ups, which are answers brought by another
//! replica's exchange.

use std::collections::BTreeSet;

use super::{
    Doubt, Newcomer, PendingBatch, Queue, Use,
    dues::{add_debt, add_report},
    entries::entry::{Entry, HeldSlot, State, WaitsIn},
    polls::{Polled, Polls},
    releases::take_room,
    snapshot::places_of,
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    keeper::{
        context::{Context, Decision},
        effects::Effect,
    },
    leases::StoreMoment,
    ledger::{Ask, Batch, BatchReply, Payer, SWEEP_BUDGET, Seq, Standing, Wake, Want},
};

/// Batches.
impl Queue {
    /// Takes as much pending work as there is room for.
    pub fn take_batch(
        &mut self,
        ctx: &mut Context,
        room: &mut usize,
    ) -> Option<(Batch, PendingBatch)> {
        let mut batch = Batch {
            key: self.terms.ledger.clone(),
            limit: match self.terms.paces(ctx) {
                Some(_) => self.terms.start(),
                None => self.terms.max_in_store(ctx),
            },
            max_waiters: self.terms.limit().waiters(),
            reuse: self.reuse(ctx),
            dues: self.terms.empty_dues(),
            ..Batch::default()
        };
        let mut pending = PendingBatch {
            queue: self.terms.id,
            limit: batch.limit,
            ..PendingBatch::default()
        };
        let wanted = self.outbox.wants_batch();
        self.fill_batch(ctx, &mut batch, &mut pending, room);
        let empty = batch.release.is_empty()
            && batch.renew.is_empty()
            && batch.adopt.is_empty()
            && batch.acquire.is_empty();
        if empty && !wanted && pending.inquiries.is_empty() {
            if batch.asks_holders {
                self.outbox.ask_for_holders();
            }
            return None;
        }
        batch.results = self.terms.take_results(ctx);
        self.outbox.sent();
        Some((batch, pending))
    }

    /// Adds as much pending work as there is room for. Newcomers and other work each leave half of the room to the
    /// other.
    pub fn fill_batch(
        &mut self,
        ctx: &mut Context,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        batch.asks_holders |= self.outbox.begin();
        if let Some(pause) = self.pause.take_to_send(ctx.now) {
            (batch.pause_ms, batch.asks_pause) = (Some(pause.length_ms), pause.asks);
        }
        if !self.entries.is_introducing() {
            self.make_room(ctx, self.outbox.units_of(*room));
        }
        let share = if self.has_newcomers() {
            room.div_ceil(2)
        } else {
            *room
        };
        let mut left = share;
        // In an introduction holders go first: a release may free the slot of a permit that is restored only later.
        if self.entries.is_introducing() {
            self.take_by_name(ctx, batch, pending, &mut left);
        }
        self.take_releases(batch, pending, &mut left);
        self.take_by_name(ctx, batch, pending, &mut left);
        *room -= share - left;
        if !self.entries.is_introducing() {
            self.take_newcomers(ctx, batch, pending, room);
        }
        // A queue with many entries will soon need it again.
        if self.entries.all().are_few() {
            self.outbox.shrink();
            self.releases.shrink();
        }
        if !self.entries.is_introducing() {
            // After a stall, leases that have ended may be among them until all that is due is done.
            pending.own_held = if ctx.has_overdue || self.renewals.is_in_parts() {
                0
            } else {
                self.entries.held().in_store
            };
            pending.own_waiting = self.entries.waiting() as u32;
        }
        batch.waits |= self.entries.waiting() > 0 || batch.acquire.iter().any(|ask| ask.wait);
    }

    /// Those asked for by name: holders to renew or adopt, waiters for their tickets; and inquiries.
    fn take_by_name(
        &mut self,
        ctx: &mut Context,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        pending.inquiries.append(&mut self.outbox.take_inquiries());
        while *room > 0
            && let Some(seq) = self.outbox.next_by_name()
        {
            let Some(entry) = self.entries.get_mut(seq) else {
                continue;
            };
            if !entry.is_to_restore() {
                entry.presence.renewal_sent();
                batch.renew.push(seq);
                add_report(batch, self.take_report(ctx, seq));
            } else if entry.lease.is_over(ctx.now) {
                entry.presence.renewal_over();
                self.entries.end_doubt(ctx, seq);
                continue;
            } else {
                entry.presence.renewal_over();
                entry.presence.enter_sent();
                batch.adopt.push(seq);
                let was_granted = entry.lease.deadline().is_some();
                batch.tells |= was_granted && self.outbox.take_tells_loss();
            }
            take_room(room, seq);
        }
    }

    fn take_newcomers(
        &mut self,
        ctx: &mut Context,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        while *room > 0
            && let Some(Newcomer { seq, .. }) = self.outbox.next_newcomer()
        {
            if let Some((wait, ticket)) = self.send_listed(ctx, seq) {
                let payer = self.quote(ctx, seq);
                (pending.tickets).extend(ticket.map(|ticket| (seq, ticket.get())));
                batch.acquire.push(Ask { seq, wait, payer });
                take_room(room, seq);
            }
        }
    }

    /// Takes as many releases as there is room for.
    pub fn take_releases(
        &mut self,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        for release in self.releases.take(&mut pending.releases, room) {
            batch.release.push(release.seq);
            add_debt(batch, release.seq, release.debt.as_deref().copied());
        }
        // Idle slots may be released after the batch was made.
        pending.own_held = pending.own_held.min(self.entries.held().in_store);
    }

    /// Sends an entry with the others of its request. Returns its ask, and who pays. `is_covered`: idle slots are released for it.
    pub fn take_leg(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        is_covered: bool,
    ) -> Option<(Want, Option<Payer>)> {
        let entry = self.entries.get(seq)?;
        let want = match (entry.is_shadow(), entry.waits) {
            (true, _) => Want::IfFree,
            (false, false) => Want::Now,
            (false, true) => Want::Wait,
        };
        self.send_leg(ctx, seq, is_covered);
        Some((want, self.quote(ctx, seq)))
    }
}

/// Answers.
impl Queue {
    /// Processes the store's answer to a batch.
    pub fn on_answer(
        &mut self,
        ctx: &mut Context,
        batch: &Batch,
        pending: &mut PendingBatch,
        answer: BatchReply,
        at: StoreMoment,
    ) {
        // Before the snapshot follows this answer: they compare it with the one before.
        self.remember_waiting(answer.head);
        let seen_before = self.snapshot.seen();
        self.snapshot.follow(&answer, at);
        let found = self.follow_pacing(ctx, answer.pacing, at.sent);
        pending.limit = found.unwrap_or(pending.limit);
        pending.nearest_ms = answer.nearest_ms;
        let asks_pause = (self.pause).follow(answer.pause_end_ms, batch.asks_pause, at, ctx.now);
        self.outbox.want(asks_pause);
        self.follow_right(ctx, (batch.reuse, pending.limit), at);
        let soon = (ctx.now, ctx.settings.poll_interval);
        let confirm = |seq| ctx.confirm(seq);
        (self.releases).answered(&mut pending.releases, at.store_us, soon, confirm);
        for inquiry in pending.inquiries.drain(..) {
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        }
        let places: Vec<_> = places_of(&batch.renew, &answer).collect();
        let is_introducing = self.entries.is_introducing();
        let mut is_lost = self.lacks_own(ctx, batch, pending, &answer, seen_before);
        for (seq, standing) in batch.renew.iter().zip(answer.renewed) {
            is_lost |= self.renewed(ctx, *seq, standing, at);
        }
        // Holders missing during an introduction are being adopted: the loss was found before, or the connection is new, as after a
        // failover, and every replica introduces its own holders.
        let finds_loss = is_lost && !is_introducing;
        if finds_loss {
            // Before this answer's newcomers, which have got the slots of the missing holders.
            (ctx.returns).begin_of_key(self.terms.part, self.terms.id, ctx.now);
        }
        for (seq, place) in places {
            self.entries.tell_place(seq, place);
        }
        self.report_adopted(ctx, batch, &answer.adopted);
        for (seq, standing) in batch.adopt.iter().zip(answer.adopted) {
            self.adopted(ctx, *seq, standing, at);
        }
        let queued = answer.acquired.iter().filter_map(Standing::ticket).count();
        self.snapshot.uncount(queued as u32);
        for (ask, standing) in batch.acquire.iter().zip(answer.acquired) {
            self.acquired(ctx, pending, ask.seq, standing, at);
        }
        for promotion in answer.promoted {
            self.held_until(ctx, promotion.seq, at, promotion.until_ms);
        }
        self.listed(ctx, batch, answer.listed, answer.in_use);
        // The legs of claims join when their answers follow.
        self.snapshot.uncount(pending.queued);
        if finds_loss {
            self.introduce(ctx, Doubt::Missing);
        }
    }

    fn listed(&mut self, ctx: &Context, batch: &Batch, listed: Option<Vec<Seq>>, in_use: u32) {
        if let Some(names) = listed {
            self.release_ghosts(ctx, names);
        } else if batch.asks_holders && in_use <= SWEEP_BUDGET {
            // Others took the time that an exchange has for such work.
            self.outbox.ask_for_holders();
            self.outbox.want(true);
        }
    }

    /// Releases permits that are in the store, but not in this process: it has released them, and the store has forgotten that.
    fn release_ghosts(&mut self, ctx: &Context, mut names: Vec<Seq>) {
        names.retain(|seq| self.entries.get(*seq).is_none());
        if names.is_empty() {
            return;
        }
        let released: BTreeSet<Seq> = self.names_in_store().collect();
        for seq in names {
            if !released.contains(&seq) {
                self.push_release(ctx, seq, 0, None);
            }
        }
    }

    /// The store holds a slot for this name `until_ms`, `counted` from that moment.
    fn held_until(&mut self, ctx: &mut Context, seq: Seq, counted: StoreMoment, until_ms: u64) {
        let Some(entry) = self.entries.get_mut(seq) else {
            // Given up in the meantime, or entered by an exchange that ran late.
            return self.push_release(ctx, seq, 0, None);
        };
        entry.presence.found();
        if let State::Leaving = entry.state() {
            return self.release(ctx, seq, Use::Held);
        }
        if let State::Waiting(WaitsIn::InStore { ticket, .. }) = *entry.state() {
            entry.set_ticket(ticket);
        }
        let now = ctx.now;
        let until = counted.deadline(until_ms, ctx.settings.lease);
        let renew_at = ctx.renew_at(counted.sent, until);
        match entry.state() {
            State::Held(_) if !entry.lease.extend(until, now) => {
                self.lose(ctx, seq, LostErrorKind::Lost)
            }
            State::Held(_) => {
                ctx.record(|history, now| {
                    history.held(&self.terms.ledger, seq, until, until_ms, now)
                });
                if self.entries.extend(seq, renew_at) {
                    self.renewals.note(renew_at);
                }
            }
            // There must be time left to renew the lease.
            _ if until <= now + ctx.settings.store_timeout => self.check_grant(ctx, seq),
            _ => {
                ctx.record(|history, now| {
                    history.held(&self.terms.ledger, seq, until, until_ms, now)
                });
                entry.lease.hold(Some(until));
                self.hold(ctx, seq, Some(renew_at));
            }
        }
    }

    /// Returns whether the store has lost the permit.
    fn renewed(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        standing: Standing,
        at: StoreMoment,
    ) -> bool {
        if let Some(entry) = self.entries.get_mut(seq) {
            let is_held = matches!(standing, Standing::Held { .. });
            let (is_confirmed, again) = entry.presence.renewal_answered(is_held);
            if is_confirmed {
                self.entries.end_doubt(ctx, seq);
            }
            if again {
                self.ask_about(seq);
            }
        }
        if let Standing::Held { until_ms } = standing {
            self.held_until(ctx, seq, at, until_ms);
            return false;
        }
        let Some(entry) = self.entries.get_mut(seq) else {
            return false;
        };
        match (*entry.state(), standing) {
            // The answer is older than the grant.
            (State::Held(HeldSlot { since, .. }), _) if at.sent < since => {
                self.look_after(ctx, seq)
            }
            (State::Checking { since }, _) if at.sent < since => self.ask_about(seq),
            (State::Held(_), _) => {
                let is_lost = entry.lease.deadline().is_some() && !entry.lease.is_over(ctx.now);
                entry.presence.missed();
                self.ask_about(seq);
                return is_lost;
            }
            (State::Waiting(_) | State::Checking { .. }, Standing::Waiting { ticket }) => {
                self.set(ctx, seq, State::waiting(ticket, at));
            }
            // The store has lost the waiter, which queues once more: in its place, if the slot came while this process
            // had stopped, otherwise at the end.
            (State::Waiting(_) | State::Checking { .. }, _) => {
                entry.presence.lost_waiting();
                self.park(ctx, seq);
            }
            _ => {}
        }
        false
    }

    fn adopted(&mut self, ctx: &mut Context, seq: Seq, standing: Standing, at: StoreMoment) {
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        let state = *entry.state();
        let is_held = matches!(standing, Standing::Held { .. } | Standing::Adopted { .. });
        if entry.presence.adopted(is_held) {
            self.entries.end_doubt(ctx, seq);
        }
        self.entries.tell_request(ctx, seq, Decision::Changed);
        match (standing, state) {
            (Standing::Held { until_ms } | Standing::Adopted { until_ms }, _) => {
                self.held_until(ctx, seq, at, until_ms);
            }
            (_, State::Leaving) => self.release(ctx, seq, Use::Held),
            _ => self.look_after(ctx, seq),
        }
    }

    /// The store's answer to an ask. If it waits, it was subtracted from the snapshot before, and is counted again here: its
    /// place.
    pub fn acquired(
        &mut self,
        ctx: &mut Context,
        pending: &PendingBatch,
        seq: Seq,
        standing: Standing,
        at: StoreMoment,
    ) {
        let gives_back = self.terms.is_returning(ctx) || self.pause.is_lost(ctx.now);
        let place = standing.ticket().map_or(0, |_| self.snapshot.join());
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        let is_present = matches!(standing, Standing::Held { .. } | Standing::Waiting { .. });
        entry.presence.enter_answered(is_present);
        let State::Sent { .. } = entry.state() else {
            return match standing {
                // After a loss, holders return first: see below.
                Standing::Held { until_ms } if entry.presence.is_spare() && !gives_back => {
                    self.keep_spare(ctx, seq, at, until_ms);
                }
                _ => self.answered_late(ctx, seq, standing),
            };
        };
        match standing {
            // Sent before the loss was known. The request asks again, behind the holders, or in the pause.
            Standing::Held { .. } if gives_back => self.park(ctx, seq),
            Standing::Held { until_ms } => {
                entry.forget_prepayment();
                self.held_until(ctx, seq, at, until_ms);
            }
            Standing::Waiting { ticket } => {
                entry.place = place;
                entry.begin(ctx.now);
                self.set(ctx, seq, State::waiting(ticket, at));
            }
            // Sent while permits returned, which may be over by now.
            Standing::Full if pending.limit == 0 && self.terms.max() > 0 => {
                self.refuse(ctx, seq, AcquireErrorKind::Unavailable)
            }
            Standing::Full => self.refuse(ctx, seq, self.full_kind(ctx)),
            Standing::QueueFull => self.refuse(ctx, seq, AcquireErrorKind::QueueFull),
            // Its turn has not come.
            Standing::Absent | Standing::Adopted { .. } => self.set(ctx, seq, State::Idle),
        }
    }

    /// The answer came after the decision: the request was cancelled, or a wake-up came first.
    fn answered_late(&mut self, ctx: &mut Context, seq: Seq, standing: Standing) {
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        let is_leaving = matches!(entry.state(), State::Leaving);
        if let Standing::Waiting { ticket } = standing
            && (is_leaving || entry.request().is_some())
        {
            entry.set_ticket(ticket);
        }
        if is_leaving {
            return self.release(ctx, seq, Use::Held);
        }
        self.look_after(ctx, seq);
    }

    /// The waiters passed by a new head were still waiting when the old head was seen: records that. Without a head all were passed:
    /// tickets are below 0.
    fn remember_waiting(&mut self, head: Option<i64>) {
        if self.terms.limit().is_fair() {
            // Grants do not follow tickets.
            return;
        }
        for seq in self.entries.before(head.unwrap_or(0)) {
            self.entries.saw_waiting(seq, &self.snapshot);
        }
    }

    /// Called after an exchange's answers for this queue. Looks for waiters that have left the store's queue, and sets
    /// the timers of the others.
    pub fn after_answer(&mut self, ctx: &mut Context, pending: &PendingBatch, at: StoreMoment) {
        self.outbox.over();
        // The limit rose, or permits had returned, while the exchange was in flight.
        self.outbox
            .want(self.entries.waiting() > 0 && pending.limit < self.terms.max_in_store(ctx));
        let head = self.snapshot.head();
        // Grants follow tickets, except under fair limits, where this only asks too often: a waiter below the head has left, or was
        // passed over while this process was disconnected. Only the store knows which, but it need not be asked in each exchange.
        let pause = Polls::pause(ctx.settings.poll_interval);
        for seq in self.entries.before(head.unwrap_or(0)) {
            match self.entries.get(seq).map(Entry::state) {
                Some(State::Waiting(WaitsIn::InStore { seen, .. }))
                    if at.sent < seen.sent + pause => {}
                _ => self.ask_about(seq),
            }
        }
        let Some(first) = self.entries.first_ticket() else {
            self.entries.shrink();
            return self.polls.end();
        };
        let is_first = head == Some(first);
        let is_fair = self.terms.limit().is_fair();
        let polled = Polled {
            at,
            interval: ctx.settings.poll_interval,
            jittered: ctx.jittered(ctx.settings.poll_interval),
            is_first,
            nearest_ms: pending.nearest_ms,
            rise: (self.pause).next_rise(self.terms.max(), self.snapshot.in_use(), ctx.now),
            roll_call_in: (!is_fair).then_some(ctx.settings.waiter_ttl),
        };
        self.polls.answered(ctx.now, &polled);
    }
}

/// Wake-ups.
impl Queue {
    /// Another replica's exchange has promoted a waiter.
    pub fn on_wake(&mut self, ctx: &mut Context, seq: Seq, wake: &Wake) {
        let (seen_us, sent) = match self.entries.get(seq).map(Entry::state) {
            Some(State::Waiting(WaitsIn::InStore { ticket, seen, .. })) => {
                let seen = if self.terms.limit().is_fair() {
                    *seen
                } else {
                    self.snapshot.seen_waiting(*ticket, *seen)
                };
                (seen.store_us, seen.sent)
            }
            Some(State::Sent { at, .. }) => (0, *at),
            Some(State::Held(_) | State::Checking { .. }) => return,
            // The waiter has left: its slot is released, whenever its lease ends. Names in other states never waited in the store.
            _ => (0, ctx.now),
        };
        if wake.granted_us < seen_us {
            // The grant is older than the last answer, so the store is asked.
            return self.ask_about(seq);
        }
        let counted = StoreMoment {
            store_us: wake.granted_us,
            sent,
        };
        self.held_until(ctx, seq, counted, wake.until_ms);
    }
}
