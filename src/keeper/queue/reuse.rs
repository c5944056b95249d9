//! When slots go to the pool of their queue, and when they leave it.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Pooled, Queue, StoreMoment,
    permit::entry::{Entry, Holder},
};
use crate::{
    keeper::context::{Availability, Context},
    leases::{Lease, Pool, RIGHT},
    ledger::{Batch, Reuse, weight_of},
    limit::Mode,
    telemetry::Measure,
};

impl Queue {
    /// Makes a pool, if the limit reuses slots.
    pub(super) fn make_pool(&mut self, ctx: &Context) {
        if self.limit.is_reused() && self.pooled.is_none() {
            let pool = Pool::new(ctx.meter(self.limit_id).clone());
            pool.follow_own_max(self.own_max);
            self.pooled = Some(Box::new(Pooled {
                pool: Arc::new(pool),
                recalled: None,
                tend_at: None,
            }));
        }
    }

    /// An idle slot, for a request that has just come. `wait`: how long it may wait if the slot is lost.
    pub fn take_idle(&mut self, ctx: &mut Context, wait: Duration) -> Option<Arc<Lease>> {
        let lease = self.pool()?.take(ctx.now)?;
        ctx.measure(self.limit_id, Measure::Held(1.0));
        let entry = self.entries.get_mut(&lease.seq())?;
        (entry.asked, entry.wait, entry.place) = (ctx.now, wait, 0);
        entry.hand_over(Holder::Reuser);
        Some(lease)
    }

    /// Puts the slot of a permit that was dropped into the pool, if that is allowed.
    pub fn put_idle(&mut self, ctx: &mut Context, lease: &Arc<Lease>) -> bool {
        let Some(pool) = self.pool() else {
            return false;
        };
        let may = |entry: &Entry| {
            let is_counted = entry.in_store.present || !ctx.shared;
            // One with an exchange in flight could not be released at once when it is recalled.
            let is_known = is_counted && !entry.in_store.entering;
            let is_light = weight_of(lease.seq()) == 1;
            entry.holder() == Some(Holder::Permit) && is_known && is_light
        };
        if !self.entries.get(&lease.seq()).is_some_and(may) {
            return false;
        }
        lease.set_reusable(true);
        let Some(ended) = pool.put(lease, ctx.now) else {
            return false;
        };
        ctx.measure(self.limit_id, ended);
        ctx.measure(self.limit_id, Measure::Held(-1.0));
        true
    }

    fn may_keep(&self, ctx: &Context) -> bool {
        let enforced = self.limit.current_mode() == Mode::Enforce;
        // A late answer may come while the store is down.
        let up = ctx.availability == Availability::Up;
        self.limit.is_reused() && enforced && !self.is_paused() && !ctx.ending && up
    }

    /// The reuse that a batch asks for.
    pub(super) fn reuse(&self, ctx: &Context) -> Reuse {
        match self.pool() {
            Some(pool) if self.may_keep(ctx) && pool.wants_right(ctx.now) => Reuse::Keep,
            Some(_) => Reuse::Others,
            None => Reuse::Never,
        }
    }

    /// Follows an answer of the store: it gives the right to keep slots, or recalls them.
    pub(super) fn follow_right(&mut self, ctx: &mut Context, batch: &Batch, at: StoreMoment) {
        let Some(pooled) = &self.pooled else {
            return;
        };
        if self.snapshot.waiting > 0 || self.snapshot.in_use > self.max() {
            return self.on_recall(ctx, at.sent);
        }
        let old = pooled.recalled.is_some_and(|recalled| at.sent <= recalled);
        let given = batch.reuse == Reuse::Keep && (1..=batch.limit).contains(&self.snapshot.in_use);
        if given
            && !old
            && self.may_keep(ctx)
            && let Some(pooled) = &mut self.pooled
        {
            pooled.pool.open(at.sent + RIGHT.min(ctx.settings.lease));
            pooled.tend_at = pooled.tend_at.or(Some(at.sent + RIGHT / 2));
        }
    }

    /// The ledger in this process gives the right for as long as no request waits.
    pub(super) fn follow_ledger_here(&mut self, ctx: &mut Context) {
        if !std::mem::take(&mut self.recheck_right) || ctx.shared {
            return;
        }
        let Some(pool) = self.pool() else {
            return;
        };
        if self.snapshot.waiting > 0 || self.snapshot.in_use > self.max() || !self.may_keep(ctx) {
            return self.empty_pool(ctx);
        }
        pool.open_here();
    }

    /// Idle slots are recalled: another replica wants them, or an answer to what was sent `at` that moment says so.
    pub fn on_recall(&mut self, ctx: &mut Context, at: Instant) {
        if let Some(pooled) = &mut self.pooled {
            pooled.recalled = pooled.recalled.max(Some(at));
        }
        self.empty_pool(ctx);
    }

    /// Releases idle slots. Those in use are released when they come free.
    pub fn empty_pool(&mut self, ctx: &mut Context) {
        let Some(pooled) = &mut self.pooled else {
            return;
        };
        pooled.tend_at = None;
        let idle = pooled.pool.close();
        self.release_idle(ctx, idle);
    }

    /// Releases what was not needed lately, and asks to extend the right if anything was.
    pub(super) fn tend_pool(&mut self, ctx: &mut Context) {
        let Some(pooled) = &mut self.pooled else {
            return;
        };
        let idle = pooled.pool.tend(ctx.now);
        if pooled.pool.is_open() {
            pooled.tend_at = Some(ctx.now + RIGHT / 2);
            self.wants_batch |= pooled.pool.wants_right(ctx.now);
        }
        self.release_idle(ctx, idle);
    }

    /// Before requests for this many units go to the store: they did not get a slot of the pool, either because none was idle or
    /// because they need several slots at once. Slots that are idle by now are released with them, or the store would
    /// refuse them or make them wait; first those that can be released at once.
    pub fn make_room(&mut self, ctx: &mut Context, units: usize) {
        let Some(pool) = self.pool() else {
            return;
        };
        let is_present = |lease: &Lease| {
            let entry = self.entries.get(&lease.seq());
            entry.is_some_and(|entry| entry.in_store.present && !entry.in_store.entering)
        };
        let idle = pool.withdraw(units, ctx.now, is_present);
        self.release_idle(ctx, idle);
    }

    fn release_idle(&mut self, ctx: &mut Context, idle: Vec<Arc<Lease>>) {
        for lease in idle {
            self.give_up_idle(ctx, lease.seq());
        }
    }
}
