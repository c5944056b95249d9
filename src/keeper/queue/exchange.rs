//! One queue's part in an exchange: its batch, and the answer. Also wake-ups, which are answers brought by another
//! replica's exchange.

use std::{collections::BTreeSet, time::Duration};

use super::{
    Newcomer, Outbox, PendingBatch, Queue, Release, Snapshot,
    dues::{add_due, add_report},
    permit::entry::{Entry, HeldSlot, Line, State},
};
use crate::{
    error::AcquireErrorKind,
    keeper::{context::Context, effects::Effect},
    leases::StoreMoment,
    ledger::{Ask, Batch, BatchReply, Payer, SWEEP_BUDGET, Seq, Standing, Wake, Want, weight_of},
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
            key: self.ledger.clone(),
            limit: self.max_in_store(ctx),
            max_waiters: self.limit.waiters(),
            reuse: self.reuse(ctx),
            dues: self.no_dues(),
            ..Batch::default()
        };
        let mut pending = PendingBatch {
            queue: self.id,
            failed: false,
            releases: Vec::new(),
            inquiries: Vec::new(),
            tickets: Vec::new(),
            held: 0,
            waiting: 0,
            nearest_ms: None,
            limit: batch.limit,
        };
        let wanted = self.wants_batch;
        self.fill_batch(ctx, &mut batch, &mut pending, room);
        let empty = batch.release.is_empty()
            && batch.renew.is_empty()
            && batch.adopt.is_empty()
            && batch.acquire.is_empty();
        if empty && !wanted && pending.inquiries.is_empty() {
            self.lists |= batch.lists;
            return None;
        }
        self.in_flight += 1;
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
        self.wants_batch = false;
        batch.lists |= std::mem::take(&mut self.lists);
        self.take_pause(ctx.now, batch);
        self.end_introduction(ctx);
        if !self.introducing
            && let Some(outbox) = &self.outbox
        {
            let newcomers = outbox.acquire.iter().take(*room);
            let units = newcomers.map(|one| weight_of(one.seq) as usize).sum();
            self.make_room(ctx, units);
        }
        let share = if self.has_newcomers() {
            room.div_ceil(2)
        } else {
            *room
        };
        let mut left = share;
        // Once it is released, another replica may have the slot of a permit that is adopted later.
        if self.introducing {
            self.take_holders(ctx, batch, pending, &mut left);
        }
        self.take_releases(batch, pending, &mut left);
        self.take_holders(ctx, batch, pending, &mut left);
        *room -= share - left;
        self.end_introduction(ctx);
        if !self.introducing {
            self.take_newcomers(ctx, batch, pending, room);
        }
        self.shrink_outbox();
        if !self.introducing {
            pending.held = self.held.in_store;
            let waiters = self.waiters.as_ref();
            pending.waiting = waiters.map_or(0, |waiters| waiters.by_ticket.len() as u32);
        }
        batch.waits |= self.has_waiters() || batch.acquire.iter().any(|ask| ask.wait);
    }

    /// Holders to renew or adopt, and inquiries.
    fn take_holders(
        &mut self,
        ctx: &Context,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        pending.inquiries.append(&mut outbox.inquiries);
        while *room > 0
            && let Some(outbox) = &mut self.outbox
            && let Some(seq) = outbox.renew.pop_front()
        {
            match self.entries.get_mut(&seq) {
                None => {}
                // The store never had it, so it need not be asked first.
                Some(entry) if entry.is_held_here_only() => {
                    (entry.in_store.renewing, entry.in_store.renew_again) = (false, false);
                    self.take_adoption(ctx, batch, room, seq);
                }
                Some(_) => {
                    batch.renew.push(seq);
                    take_room(room, seq);
                    add_report(batch, self.report_of(ctx, seq));
                }
            }
        }
        while *room > 0
            && let Some(outbox) = &mut self.outbox
            && let Some(seq) = outbox.adopt.pop_front()
        {
            self.take_adoption(ctx, batch, room, seq);
        }
    }

    fn take_adoption(&mut self, ctx: &Context, batch: &mut Batch, room: &mut usize, seq: Seq) {
        match self.entries.get_mut(&seq) {
            Some(entry) if entry.lease.is_over(ctx.now) => entry.in_store.introduced = false,
            Some(entry) if entry.is_held() && !entry.in_store.entering => {
                entry.in_store.entering = true;
                batch.adopt.push(seq);
                let was_granted = entry.lease.deadline().is_some();
                batch.tells |= was_granted && std::mem::take(&mut self.tells);
                take_room(room, seq);
            }
            _ => {}
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
            && let Some(outbox) = &mut self.outbox
            && let Some(Newcomer { seq, .. }) = outbox.acquire.pop_front()
        {
            if let Some((wait, ticket)) = self.send_listed(ctx, seq) {
                let payer = self.payer(ctx, seq);
                pending
                    .tickets
                    .extend(ticket.map(|ticket| (seq, ticket.get())));
                batch.acquire.push(Ask { seq, wait, payer });
                take_room(room, seq);
            }
        }
    }

    /// Takes as many releases as there is room for. A repeated settlement is batched only with other repeated ones: the
    /// store counts it if the exchange removes as many units as it is for, and others would make it count twice.
    pub fn take_releases(
        &mut self,
        batch: &mut Batch,
        pending: &mut PendingBatch,
        room: &mut usize,
    ) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        let mut first = pending.releases.iter().chain(&outbox.release);
        let repeats = first.next().is_some_and(Release::may_be_settled);
        let mut count = 0;
        while *room > 0
            && let Some(release) = outbox.release.get(count)
            && release.may_be_settled() == repeats
        {
            batch.release.push(release.seq);
            add_due(batch, release.seq, release.due.as_deref().copied());
            take_room(room, release.seq);
            count += 1;
        }
        pending.releases.extend(outbox.release.drain(..count));
        // Idle slots may be released after the batch was made.
        pending.held = pending.held.min(self.held.in_store);
    }

    /// Sends an entry with the others of its request. Returns its ask, and who pays. `has_room`: idle slots are released for it.
    pub fn take_leg(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        has_room: bool,
    ) -> Option<(Want, Option<Payer>)> {
        let entry = self.entries.get(&seq)?;
        let want = match (entry.is_shadow(), entry.waits) {
            (true, _) => Want::IfFree,
            (false, false) => Want::Now,
            (false, true) => Want::Wait,
        };
        self.send_leg(ctx, seq, has_room);
        Some((want, self.payer(ctx, seq)))
    }

    /// Frees the outbox once it is empty. A queue with many entries will soon need it again.
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

/// The room of an exchange is counted in units. The last permit may exceed it.
fn take_room(room: &mut usize, seq: Seq) {
    *room = room.saturating_sub(weight_of(seq) as usize);
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
        let BatchReply {
            in_use,
            waiting,
            head,
            ..
        } = answer;
        self.remember_waiting(head);
        let seen = self.snapshot.seen;
        self.snapshot = Snapshot {
            in_use,
            waiting,
            head,
            seen: at,
        };
        pending.nearest_ms = answer.nearest_ms;
        self.follow_pause_in_store(ctx, batch, answer.pause_end_ms, at);
        self.follow_right(ctx, batch, at);
        for mut release in pending.releases.drain(..) {
            if release.not_after_us >= at.store_us {
                release.due = None;
                let rest = Duration::from_micros(release.not_after_us - at.store_us);
                self.repeat_release(ctx, release, rest + Duration::from_millis(1));
            } else {
                ctx.confirm(release.seq);
            }
        }
        for inquiry in pending.inquiries.drain(..) {
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        }
        let places = places_of(batch, &answer);
        let mut is_lost = self.lacks_own(ctx, batch, pending, &answer, seen) && !self.introducing;
        for (seq, standing) in batch.renew.iter().zip(answer.renewed) {
            is_lost |= self.renewed(ctx, *seq, standing, at);
        }
        let finds_loss = is_lost && !self.introducing;
        if finds_loss {
            // Before this answer's newcomers, which have got the slots of the missing holders.
            ctx.returns.begin_of_key(self.part, self.id, ctx.now);
        }
        self.note_places(places);
        self.report_adopted(ctx, batch, &answer.adopted);
        for (seq, standing) in batch.adopt.iter().zip(answer.adopted) {
            self.adopted(ctx, *seq, standing, at);
        }
        self.uncount(&answer.acquired);
        for (ask, standing) in batch.acquire.iter().zip(answer.acquired) {
            self.acquired(ctx, ask.seq, standing, at);
        }
        for promotion in answer.promoted {
            self.granted(ctx, promotion.seq, at, promotion.until_ms);
        }
        match answer.listed {
            Some(names) => self.release_ghosts(ctx, names),
            // Others took the time that an exchange has for such work.
            None if batch.lists && in_use <= SWEEP_BUDGET => {
                (self.lists, self.wants_batch) = (true, true);
            }
            None => {}
        }
        if finds_loss {
            self.tells = true;
            self.introduce(ctx);
        }
    }

    /// Releases permits that are in the store, but not in this process: it has released them, and the store has forgotten that.
    fn release_ghosts(&mut self, ctx: &Context, mut names: Vec<Seq>) {
        names.retain(|seq| !self.entries.contains_key(seq));
        if names.is_empty() {
            return;
        }
        let released: BTreeSet<Seq> = self.names_in_store().collect();
        for seq in names {
            if !released.contains(&seq) {
                self.release_ghost(ctx, seq);
            }
        }
    }

    fn note_places(&mut self, places: Vec<(Seq, u32)>) {
        for (seq, place) in places {
            if let Some(entry) = self.entries.get(&seq)
                && let State::Waiting(_) = entry.state()
                && let Some(waiters) = &mut self.waiters
            {
                waiters.places.insert(seq, place);
            }
        }
    }

    /// The store holds a slot for this name `until_ms`, `counted` from that moment.
    fn granted(&mut self, ctx: &mut Context, seq: Seq, counted: StoreMoment, until_ms: u64) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            // Given up in the meantime, or entered by an exchange that ran late.
            return self.release_ghost(ctx, seq);
        };
        entry.in_store.present = true;
        if let State::Leaving = entry.state() {
            return self.release_slot(ctx, seq);
        }
        let now = ctx.now;
        let until = counted.deadline(until_ms, ctx.settings.lease);
        let renew_at = ctx.renew_at(counted.sent, until);
        match entry.state() {
            State::Held(_) if !entry.lease.extend(until, now) => self.lose(ctx, seq),
            State::Held(_) => {
                ctx.record(|history, now| history.held(&self.ledger, seq, until, until_ms, now));
                self.set_due(seq, renew_at);
            }
            // There must be time left to renew the lease.
            _ if until <= now + ctx.settings.store_timeout => self.check_grant(ctx, seq),
            _ => {
                ctx.record(|history, now| history.held(&self.ledger, seq, until, until_ms, now));
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
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.in_store.renewing = false;
            let again = std::mem::take(&mut entry.in_store.renew_again);
            entry.in_store.introduced &= again || !matches!(standing, Standing::Held { .. });
            if again {
                self.renew(seq);
            }
        }
        if let Standing::Held { until_ms } = standing {
            self.granted(ctx, seq, at, until_ms);
            return false;
        }
        let Some(entry) = self.entries.get_mut(&seq) else {
            return false;
        };
        match (*entry.state(), standing) {
            // The answer is older than the grant.
            (State::Held(HeldSlot { since, .. }), _) if at.sent < since => {
                self.renew_or_end(ctx, seq)
            }
            (State::Checking { since }, _) if at.sent < since => self.renew(seq),
            // The store has lost the permit, or has reverted to an older copy; or it never had it.
            (State::Held(_), _) => {
                let is_lost = entry.lease.deadline().is_some() && !entry.lease.is_over(ctx.now);
                self.outbox().adopt.push_back(seq);
                return is_lost;
            }
            (State::Waiting(_) | State::Checking { .. }, Standing::Waiting { ticket }) => {
                self.wait_in_store(ctx, seq, ticket, at);
            }
            // The store has lost the waiter, which queues once more: in its place, if the slot came while this process
            // had stopped, otherwise at the end.
            (State::Waiting(_) | State::Checking { .. }, _) => {
                entry.in_store.present = false;
                self.park(ctx, seq);
            }
            _ => {}
        }
        false
    }

    fn adopted(&mut self, ctx: &mut Context, seq: Seq, standing: Standing, at: StoreMoment) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.exchange_over(0);
        let is_held = matches!(standing, Standing::Held { .. } | Standing::Adopted { .. });
        entry.in_store.introduced &= !is_held || entry.in_store.renewing;
        let state = *entry.state();
        self.note_change(ctx, seq);
        match (standing, state) {
            (Standing::Held { until_ms } | Standing::Adopted { until_ms }, _) => {
                self.granted(ctx, seq, at, until_ms);
            }
            (_, State::Leaving) => self.release_slot(ctx, seq),
            _ => {
                self.renew_or_end(ctx, seq);
                self.outbox().adopt.push_back(seq);
            }
        }
    }

    /// The store's answer to an ask, which was [subtracted](Self::uncount) from the snapshot before.
    pub fn acquired(&mut self, ctx: &mut Context, seq: Seq, standing: Standing, at: StoreMoment) {
        self.snapshot.waiting += u32::from(standing.ticket().is_some());
        let has_lost_pause = self.pause.as_ref().is_some_and(|pause| pause.asks);
        let is_returning =
            self.is_returning(ctx) || has_lost_pause && self.pause_left(ctx.now).is_some();
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.exchange_over(0);
        entry.in_store.present |=
            matches!(standing, Standing::Held { .. } | Standing::Waiting { .. });
        let State::Sent { .. } = entry.state() else {
            return match standing {
                // After a loss, holders return first: see below.
                Standing::Held { until_ms } if entry.in_store.spare && !is_returning => {
                    self.keep_spare(ctx, seq, at, until_ms);
                }
                _ => self.answered_late(ctx, seq, standing),
            };
        };
        match standing {
            // Sent before the loss was known. The request asks again, behind the holders, or in the pause.
            Standing::Held { .. } if is_returning => self.park(ctx, seq),
            Standing::Held { until_ms } => {
                entry.owes_nothing();
                self.granted(ctx, seq, at, until_ms);
            }
            Standing::Waiting { ticket } => {
                entry.place = self.snapshot.waiting;
                entry.begin(ctx.now);
                self.wait_in_store(ctx, seq, ticket, at);
            }
            Standing::Full => self.refuse(ctx, seq, self.full_kind(ctx)),
            Standing::QueueFull => self.refuse(ctx, seq, AcquireErrorKind::QueueFull),
            // Its turn has not come.
            Standing::Absent | Standing::Adopted { .. } => self.park_unasked(ctx, seq),
        }
    }

    /// The answer came after the decision: the request was cancelled, or a wake-up came first.
    fn answered_late(&mut self, ctx: &mut Context, seq: Seq, standing: Standing) {
        let entry = self.entries.get_mut(&seq);
        let Some(entry) = entry.filter(|entry| matches!(entry.state(), State::Leaving)) else {
            return self.renew_or_end(ctx, seq);
        };
        if let Standing::Waiting { ticket } = standing {
            entry.set_ticket(ticket);
        }
        self.release_slot(ctx, seq);
    }

    /// Subtracts waiting asks from the snapshot. [`acquired`](Self::acquired) counts them again one by one: their places.
    pub fn uncount<'a>(&mut self, standings: impl IntoIterator<Item = &'a Standing>) {
        let queued = standings.into_iter().filter_map(Standing::ticket).count();
        self.snapshot.waiting = self.snapshot.waiting.saturating_sub(queued as u32);
    }

    /// The waiters passed by a new head were still waiting when the old head was seen: records that.
    fn remember_waiting(&mut self, head: Option<i64>) {
        if self.limit.is_fair() {
            // Grants do not follow tickets.
            return;
        }
        for (_, seq) in self.waiters_before(head.unwrap_or(0)) {
            self.saw_waiting(seq);
        }
    }

    /// Called after an exchange's answers for this queue. Looks for waiters that have left the store's queue, and sets
    /// the timers of the others.
    pub fn after_answer(&mut self, ctx: &mut Context, pending: &PendingBatch, at: StoreMoment) {
        self.in_flight -= 1;
        // The limit rose, or permits had returned, while the exchange was in flight.
        self.wants_batch |= self.has_waiters() && pending.limit < self.max_in_store(ctx);
        let head = self.snapshot.head;
        // Grants follow tickets: a waiter below the head has left, or was passed over while this process was
        // disconnected. Only the store knows which, but it need not be asked in each exchange.
        let pause = ctx.settings.poll_interval / 10;
        for (_, seq) in self.waiters_before(head.unwrap_or(0)) {
            match self.entries.get(&seq).map(Entry::state) {
                Some(State::Waiting(Line::InStore { seen, .. })) if at.sent < seen.sent + pause => {
                }
                _ => self.renew(seq),
            }
        }
        let rise = self.next_rise(self.max(), self.snapshot.in_use, ctx.now);
        let Some(waiters) = &mut self.waiters else {
            return;
        };
        let Some((first, _)) = waiters.by_ticket.first() else {
            self.waiters = None;
            return;
        };
        // Live replicas renew their leases long before they end, so a lease that does end belongs to a replica that has
        // crashed. The replica at the head of the queue asks first; if that replica crashed, the others do.
        let turn = if head == Some(*first) {
            Duration::ZERO
        } else {
            ctx.settings.poll_interval / 10
        };
        let expiry = pending.nearest_ms.map(|nearest_ms| {
            let rest = nearest_ms.saturating_sub(at.store_us / 1_000) + 1;
            ctx.now + Duration::from_millis(rest)
        });
        waiters.next_slot_at = rise.or(expiry).map(|at| at + turn);
        // Counted from the sending, so that a slow store does not make this process look as if it had stopped. Answered
        // within an interval, so that a wake-up before that grants a lease with enough time left to be used at once.
        let interval = ctx.settings.poll_interval;
        let round_trip = (ctx.now - at.sent).min(interval / 4);
        let poll_at = at.sent + ctx.jittered(interval) - round_trip;
        waiters.poll_at = Some(poll_at.max(ctx.now + pause));
        // Grants of a fair limit do not follow tickets, so the head of the queue does not show who has left it.
        let next = if self.limit.is_fair() {
            waiters.poll_at
        } else {
            Some(ctx.now + ctx.settings.waiter_ttl)
        };
        waiters.roll_call_at = waiters.roll_call_at.or(next);
    }
}

/// Wake-ups.
impl Queue {
    /// Another replica's exchange has promoted a waiter.
    pub fn on_wake(&mut self, ctx: &mut Context, seq: Seq, wake: &Wake) {
        let seen = match self.entries.get(&seq).map(Entry::state) {
            Some(State::Waiting(Line::InStore { ticket, seen })) => {
                if self.limit.is_fair() {
                    Some(*seen)
                } else {
                    Some(self.snapshot.seen_waiting(*ticket, *seen))
                }
            }
            Some(State::Sent { at, .. }) => Some(StoreMoment {
                store_us: 0,
                sent: *at,
            }),
            Some(State::Held(_) | State::Checking { .. }) => return,
            _ => None,
        };
        let counted_from = |sent| StoreMoment {
            store_us: wake.granted_us,
            sent,
        };
        match seen {
            Some(seen) if wake.granted_us >= seen.store_us => {
                self.granted(ctx, seq, counted_from(seen.sent), wake.until_ms);
            }
            // The grant is older than the last answer, so the store is asked.
            Some(_) => self.renew(seq),
            None => self.granted(ctx, seq, counted_from(ctx.now), wake.until_ms),
        }
    }
}

/// Waiters whose places were asked for: usually none.
fn places_of(batch: &Batch, answer: &BatchReply) -> Vec<(Seq, u32)> {
    let renewed = batch.renew.iter().zip(&answer.renewed);
    let waiting = renewed.filter(|(_, standing)| standing.ticket().is_some());
    let places = answer.places.iter().zip(waiting);
    places.map(|(place, (seq, _))| (*seq, *place)).collect()
}
