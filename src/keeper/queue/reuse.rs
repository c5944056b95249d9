//! When slots go to the pool of their queue, and when they leave it.

use std::{mem, sync::Arc};

use tokio::time::Instant;

use super::{
    Queue, Use,
    entries::entry::{Entry, Holder, Requester},
    outbox::Newcomer,
};
use crate::{
    fallbacks::Availability,
    keeper::context::{Context, Decision},
    leases::{Lease, Pool, RIGHT, StoreMoment},
    ledger::{Reuse, Seq, weight_of},
    limit::Mode,
    telemetry::Measure,
};

impl Queue {
    /// Creates a pool, if the limit reuses slots.
    pub(super) fn make_pool(&mut self, ctx: &Context) {
        if self.terms.limit().is_reused() && self.kept.pool().is_none() {
            let pool = Pool::new(ctx.registry.meter(self.terms.limit_id).clone());
            pool.follow_own_value(self.terms.own_value());
            self.kept.start(pool);
        }
    }

    /// An idle slot for a new request. `waits`: whether the request may wait if the slot is lost.
    pub fn take_idle(
        &mut self,
        ctx: &mut Context,
        waits: bool,
        request: Requester,
    ) -> Option<Arc<Lease>> {
        let lease = self.kept.pool()?.take(ctx.now)?;
        ctx.measure(self.terms.limit_id, Measure::Held(1.0));
        let entry = self.entries.get_mut(lease.seq())?;
        (entry.turn_began, entry.waits, entry.place) = (ctx.now, waits, 0);
        entry.requester = Some(request);
        entry.hand_over(Holder::Reuser);
        Some(lease)
    }

    /// Keeps the slot of a dropped permit, if allowed: for the first request on its way to the store, or in the pool.
    pub fn keep_released(&mut self, ctx: &mut Context, lease: &Arc<Lease>) -> bool {
        if self.kept.pool().is_none() {
            return false;
        }
        let may = |entry: &Entry| {
            let is_counted = entry.presence.is_present() || !ctx.shared;
            // A slot with an exchange in flight could not be released at once when recalled.
            let is_known = is_counted && !entry.presence.is_entering();
            let is_light = weight_of(lease.seq()) == 1;
            entry.holder() == Some(Holder::Permit) && is_known && is_light
        };
        if !self.entries.get(lease.seq()).is_some_and(may) {
            return false;
        }
        let ended = Measure::Ended(lease.end_reason(), lease.tenure_lasts(ctx.now));
        let is_kept = self.keep(ctx, lease);
        if is_kept {
            ctx.measure(self.terms.limit_id, ended);
        }
        is_kept
    }

    /// Keeps an unused slot, if this process has the right to.
    fn keep(&mut self, ctx: &mut Context, lease: &Arc<Lease>) -> bool {
        let first = self.first_asking();
        let Some(pool) = self.kept.pool() else {
            return false;
        };
        if let Some(first) = first {
            return pool.has_right(ctx.now) && self.hand_on(ctx, lease, first);
        }
        lease.set_reusable(true);
        let is_put = pool.put(lease, ctx.now).is_some();
        if is_put {
            ctx.measure(self.terms.limit_id, Measure::Held(-1.0));
        }
        is_put
    }

    /// Gives a slot to the first request on its way to the store: a later request that found it in the pool would
    /// overtake. The pending ask continues for the pool, or the pool would never grow to the required size.
    fn hand_on(&mut self, ctx: &mut Context, lease: &Arc<Lease>, first: Seq) -> bool {
        let (seq, now) = (lease.seq(), ctx.now);
        let pool = self.kept.pool().cloned();
        let Some(entry) = self.entries.get_mut(first).filter(|_| !lease.is_over(now)) else {
            return false;
        };
        if !entry.is_alone() || weight_of(first) > 1 {
            // The request needs more than this slot, which goes back to the store and is granted there.
            if weight_of(first) == 1 {
                self.forget_first();
            }
            return false;
        }
        let spare = ctx.new_lease(self.terms.id, 1, pool, false);
        let unused = spare.seq();
        spare.rename(first);
        let taker = mem::replace(&mut entry.lease, spare);
        let (asked, waits, requester) = (entry.turn_began, entry.waits, entry.requester);
        entry.presence.spare();
        self.release(ctx, first, Use::Unused);
        if let Some(newcomer) = self.forget_first() {
            self.outbox.unask(newcomer);
        }
        taker.succeed(lease, unused, now);
        if let Some(entry) = self.entries.get_mut(seq) {
            (entry.lease, entry.turn_began, entry.waits, entry.place) = (taker, asked, waits, 0);
            entry.hand_over(Holder::Reuser);
            entry.requester = requester;
        }
        self.entries.tell_request(ctx, seq, Decision::Changed);
        true
    }

    /// The store has granted a slot to a request that has another one by now: this process's next request gets it.
    pub(super) fn keep_spare(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        at: StoreMoment,
        until_ms: u64,
    ) {
        let until = at.deadline(until_ms, ctx.settings.lease);
        if let Some(entry) = self.entries.get_mut(seq) {
            entry.presence.keep();
            entry.lease.hold(Some(until));
        }
        let renew_at = ctx.renew_at(at.sent, until);
        if until <= ctx.now + ctx.settings.store_timeout || !self.keep_granted(ctx, seq, renew_at) {
            return self.release(ctx, seq, Use::Unused);
        }
        ctx.record(|history, now| history.held(&self.terms.ledger, seq, until, until_ms, now));
    }

    /// Keeps a granted slot that no request wants. Returns whether it may be kept.
    fn keep_granted(&mut self, ctx: &mut Context, seq: Seq, renew_at: Instant) -> bool {
        let may_keep = self.may_keep(ctx);
        let Some(entry) = self.entries.get(seq).filter(|_| may_keep) else {
            return false;
        };
        let lease = entry.lease.clone();
        self.hold(ctx, seq, Some(renew_at));
        let is_kept = self.keep(ctx, &lease);
        // As if a permit had been dropped, unless another request has the slot. One that is not kept was never used.
        if is_kept
            && let Some(entry) = self.entries.get_mut(seq)
            && entry.holder() == Some(Holder::Request)
        {
            entry.hand_over(Holder::Permit);
        }
        is_kept
    }

    fn forget_first(&mut self) -> Option<Newcomer> {
        let first = self.kept.forget_first();
        self.first_asking();
        first
    }

    /// The first request on its way to the store.
    fn first_asking(&mut self) -> Option<Seq> {
        let asks = |seq| self.entries.get(seq).is_some_and(Entry::is_on_its_way);
        self.kept.first_asking(asks)
    }

    fn may_keep(&self, ctx: &Context) -> bool {
        let enforced = self.terms.limit().current_mode() == Mode::Enforce;
        // A late answer may come while the store is down.
        let up = ctx.availability(self.terms.part) == Availability::Up;
        self.terms.limit().is_reused()
            && enforced
            && self.terms.paused_until().is_none()
            && !self.pause.is_any()
            && !ctx.ending.has_begun()
            && up
    }

    /// Whether somebody waits for the slots of this key, or more of them are in use than there are.
    fn is_contended(&self) -> bool {
        self.snapshot.waiting() > 0 || self.snapshot.in_use() > self.terms.max()
    }

    /// The reuse that a batch asks for.
    pub(super) fn reuse(&self, ctx: &Context) -> Reuse {
        match self.kept.pool() {
            Some(pool) if self.may_keep(ctx) && pool.wants_right(ctx.now) => Reuse::Keep,
            Some(_) => Reuse::Others,
            None => Reuse::Never,
        }
    }

    /// Follows an answer of the store, which grants the right to keep slots or recalls them.
    pub(super) fn follow_right(
        &mut self,
        ctx: &mut Context,
        (reuse, limit): (Reuse, u32),
        at: StoreMoment,
    ) {
        if self.kept.pool().is_none() {
            return;
        }
        if self.is_contended() || self.pause.is_any() {
            return self.on_recall(ctx, at.sent);
        }
        let given = reuse == Reuse::Keep && (1..=limit).contains(&self.snapshot.in_use());
        if given && self.may_keep(ctx) {
            let until = at.sent + RIGHT.min(ctx.settings.lease);
            self.kept.open(at.sent, until);
        }
    }

    /// The ledger in this process grants the right while no request waits; with a store, newcomers may use the pool
    /// while no request is on its way there.
    pub(super) fn follow_ledger_here(&mut self, ctx: &mut Context) {
        self.first_asking();
        if !self.here.take_change() || ctx.shared {
            return;
        }
        let Some(pool) = self.kept.pool() else {
            return;
        };
        if self.is_contended() || !self.may_keep(ctx) {
            return self.empty_pool(ctx);
        }
        pool.open_here();
    }

    /// Idle slots are recalled: another replica wants them, or the answer to an exchange sent `at` that moment recalls
    /// them.
    pub fn on_recall(&mut self, ctx: &mut Context, at: Instant) {
        self.kept.recall(at);
        self.empty_pool(ctx);
    }

    /// Releases idle slots. Slots in use are released when they come free.
    pub fn empty_pool(&mut self, ctx: &mut Context) {
        let idle = self.kept.close();
        self.release_idle(ctx, idle);
    }

    /// Called before requests for this many units go to the store because the pool did not serve them: no slot was
    /// idle, or they need several slots at once. Slots idle by now are released in the same exchange, or the store
    /// would refuse the requests or make them wait. All can be released at once: no request is sent while a slot is being
    /// adopted. Returns whether there were enough.
    pub fn make_room(&mut self, ctx: &mut Context, units: usize) -> bool {
        if self.kept.pool().is_none() {
            return false;
        }
        let idle = self.kept.withdraw(units, ctx.now);
        let is_enough = idle.len() >= units;
        self.release_idle(ctx, idle);
        is_enough
    }

    pub(super) fn release_idle(&mut self, ctx: &mut Context, idle: Vec<Arc<Lease>>) {
        for lease in idle {
            self.release(ctx, lease.seq(), Use::Idle);
        }
    }
}
