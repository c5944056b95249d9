//! When slots go to the pool of their line, and when they leave it.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core, Ctx, Granted, Keepers, Lease, Leases, Pool, Shared,
    demand::Taken,
    entry::{Entry, Seen},
    line::Line,
    pool::RIGHT,
    tenure::Tenure,
};
use crate::{
    key::Key,
    ledger::{Batch, Reuse},
    limit::Mode,
    telemetry::Measure,
};

/// The pool of one key, for a semaphore that is bound to it. The line stays for as long as this does.
pub(crate) struct BoundPool {
    keeper: Arc<Shared>,
    /// The index of its line there.
    line: usize,
    pool: Arc<Pool>,
}

impl BoundPool {
    /// What a permit is made of, if there is an idle slot that may be used now. Not for a request that brings another value
    /// of the limit than the latest one.
    pub(crate) fn take(&self, keepers: &Arc<Keepers>, own_max: Option<u32>) -> Option<Granted> {
        let lease = self.pool.take_unseen(own_max)?;
        let taken = Taken {
            leases: Leases::One(Tenure::of(lease)),
            waited: Duration::ZERO,
            place: 0,
            notes: None,
        };
        Some(Granted {
            keepers: keepers.clone(),
            taken,
        })
    }

    /// To be called once that has become a permit.
    pub(crate) fn record_take(&self) {
        self.pool.record_take();
    }
}

impl fmt::Debug for BoundPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BoundPool")
    }
}

impl Drop for BoundPool {
    fn drop(&mut self) {
        self.keeper
            .with(|core, _| core.unbind(self.line, &self.pool));
    }
}

impl Shared {
    /// The pool of a key, if its limit has one.
    pub(super) fn bind(self: &Arc<Self>, limit: usize, key: Key) -> Option<Arc<BoundPool>> {
        let (line, pool) = self.with(|core, now| core.bind(limit, key, now))?;
        let keeper = self.clone();
        Some(Arc::new(BoundPool { keeper, line, pool }))
    }
}

/// Of a pool: when its right was last recalled, and when it is to be tended.
#[derive(Default)]
pub(super) struct Upkeep {
    /// What was asked before says nothing of it.
    pub(super) recalled: Option<Instant>,
    pub(super) tend_at: Option<Instant>,
}

impl Core {
    fn bind(&mut self, limit: usize, key: Key, now: Instant) -> Option<(usize, Arc<Pool>)> {
        if !self.limits[limit].is_reused() {
            return None;
        }
        let index = self.line(limit, &key, now);
        let pool = self.lines[index].pool.clone()?;
        pool.bind();
        Some((index, pool))
    }

    fn unbind(&mut self, line: usize, pool: &Pool) {
        pool.unbind();
        self.settle(line);
    }

    /// An idle slot, for a request that has just come.
    pub(super) fn take_kept(&mut self, index: usize) -> Option<Arc<Lease>> {
        let line = &mut self.lines[index];
        let lease = line.pool.as_ref()?.take(self.ctx.now)?;
        self.ctx.measure(line.key.0, Measure::Held(1.0));
        let entry = line.entries.get_mut(&lease.seq())?;
        (entry.asked, entry.place, entry.taken) = (self.ctx.now, 0, false);
        Some(lease)
    }

    /// Keeps the slot of a permit that was dropped, if that is allowed.
    pub(super) fn keep(&mut self, lease: &Arc<Lease>) -> bool {
        let Some(line) = self.lines.get(lease.line) else {
            return false;
        };
        let Some(pool) = &line.pool else {
            return false;
        };
        let may = |entry: &Entry| {
            let is_counted = entry.in_store || !self.ctx.shared;
            // One with an exchange that is not answered could not be given back at once when it is called back.
            let is_known = is_counted && !entry.open;
            entry.taken && entry.wanted && entry.is_held() && entry.alone && is_known
        };
        if !line.entries.get(&lease.seq()).is_some_and(may) {
            return false;
        }
        lease.set_reusable(true);
        let Some(held) = pool.put(lease, self.ctx.now) else {
            return false;
        };
        self.ctx.measure(line.key.0, Measure::Hold(held));
        self.ctx.measure(line.key.0, Measure::Held(-1.0));
        self.settle(lease.line);
        true
    }

    /// How many slots are idle.
    pub(super) fn idle(&self) -> usize {
        let pools = self.lines.iter().filter_map(|(_, line)| line.pool.as_ref());
        pools.map(|pool| pool.idle()).sum()
    }

    /// Nothing is kept any more.
    pub(super) fn recall_all(&mut self) {
        self.each_line(|line, ctx| line.recall(ctx));
    }
}

impl Line {
    /// Makes its pool, if its limit is one to be reused.
    pub(super) fn follow_reuse(&mut self, ctx: &Ctx) {
        if self.limit.is_reused() && self.pool.is_none() {
            let meter = ctx.meters[self.key.0].clone();
            let pool = Pool::new(meter);
            pool.set_own_max(self.own_max);
            self.pool = Some(Arc::new(pool));
            self.upkeep = Some(Box::default());
        }
    }

    fn may_keep(&self, ctx: &Ctx) -> bool {
        let enforced = self.limit.current_mode() == Mode::Enforce;
        // A late answer may come while the store is down.
        self.limit.is_reused() && enforced && !ctx.ending && ctx.down.is_none()
    }

    /// What the store is told of it.
    pub(super) fn reuse(&self, ctx: &Ctx, now: Instant) -> Reuse {
        match &self.pool {
            Some(pool) if self.may_keep(ctx) && pool.wants_right(now) => Reuse::Keep,
            Some(_) => Reuse::Others,
            None => Reuse::Never,
        }
    }

    /// The store has answered: what this means to the right to keep slots.
    pub(super) fn follow_right(&mut self, ctx: &mut Ctx, batch: &Batch, at: Seen) {
        let Some(upkeep) = &self.upkeep else {
            return;
        };
        if self.heard.waiting > 0 || self.heard.in_use > self.max() {
            return self.recalled(ctx, at.sent);
        }
        let old = upkeep.recalled.is_some_and(|recalled| at.sent <= recalled);
        let given = batch.reuse == Reuse::Keep && (1..=batch.limit).contains(&self.heard.in_use);
        if given && !old && self.may_keep(ctx) {
            let until = at.sent + RIGHT.min(ctx.settings.lease);
            self.pool.iter().for_each(|pool| pool.open(until));
            if let Some(upkeep) = &mut self.upkeep {
                upkeep.tend_at = upkeep.tend_at.or(Some(at.sent + RIGHT / 2));
            }
        }
    }

    /// The ledger of this process has decided: it gives the right for as long as nobody waits.
    pub(super) fn follow_right_here(&mut self, ctx: &mut Ctx) {
        if ctx.shared || self.pool.is_none() {
            return;
        }
        if self.heard.waiting > 0 || self.heard.in_use > self.max() || !self.may_keep(ctx) {
            return self.recall(ctx);
        }
        self.pool.iter().for_each(|pool| pool.open_here());
    }

    /// Somebody wants what is kept, or an answer to what was sent `at` that moment tells so.
    pub(super) fn recalled(&mut self, ctx: &mut Ctx, at: Instant) {
        if let Some(upkeep) = &mut self.upkeep {
            upkeep.recalled = upkeep.recalled.max(Some(at));
        }
        self.recall(ctx);
    }

    /// Gives back what lies idle. What is in use goes back when it comes free.
    pub(super) fn recall(&mut self, ctx: &mut Ctx) {
        let Some(pool) = &self.pool else {
            return;
        };
        if let Some(upkeep) = &mut self.upkeep {
            upkeep.tend_at = None;
        }
        let idle = pool.close();
        self.give_back(ctx, idle);
    }

    /// Gives back what was not needed lately, and asks for the right again if something was.
    pub(super) fn tend_pool(&mut self, ctx: &mut Ctx, now: Instant) {
        let Some(pool) = self.pool.clone() else {
            return;
        };
        let idle = pool.tend(now);
        self.give_back(ctx, idle);
        if pool.is_open() {
            if let Some(upkeep) = &mut self.upkeep {
                upkeep.tend_at = Some(now + RIGHT / 2);
            }
            self.touch |= pool.wants_right(now);
        }
    }

    /// Before so many requests go to the store: these did not come by a slot of the pool, be it that none was idle, or that
    /// they are for several slots at once. What is idle by now goes back with them, or the store would refuse them for
    /// it, or make them wait. Returns whether anything does.
    pub(super) fn make_room(&mut self, ctx: &mut Ctx, requests: usize) -> bool {
        let Some(pool) = &self.pool else {
            return false;
        };
        let idle = pool.withdraw(requests, ctx.now);
        let makes_room = !idle.is_empty();
        self.give_back(ctx, idle);
        makes_room
    }

    fn give_back(&mut self, ctx: &mut Ctx, idle: Vec<Arc<Lease>>) {
        for lease in idle {
            ctx.measure(self.key.0, Measure::Held(1.0));
            if let Some(entry) = self.entries.get_mut(&lease.seq()) {
                // Nothing is learned from it of how long slots are held.
                entry.taken = false;
                self.give_up(ctx, lease.seq());
            }
        }
    }

    /// Nobody holds or wants anything, but for what is kept in a ledger of this process.
    pub(super) fn is_unused(&self) -> bool {
        match &self.pool {
            Some(pool) if pool.is_bound() => false,
            Some(pool) if self.local.is_some() => self.entries.len() == pool.idle(),
            _ => self.entries.is_empty(),
        }
    }
}
