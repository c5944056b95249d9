//! The limits that a keeper knows, their current values, and the view of operators.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, accounting::Level};
use crate::{
    error::{AcquireError, ConfigError},
    keeper::demand::Leg,
    key::Key,
    leases::{Leases, QueueId},
    ledger::{Ledger, Seq, TenantId},
    limit::{Limit, LimitId, LimitValue, Mode, Verdict},
    operable::{Cursor, LOOK, LimitLook, QueueLook, RefusalNote, Seen, Which},
    overrides::InForce,
    telemetry::LimitMeter,
};

impl Core {
    /// Returns the id and meter of a limit; an unknown limit is registered with this meter.
    pub fn register(
        &mut self,
        limit: &Limit,
        meter: &Arc<LimitMeter>,
    ) -> Result<(LimitId, Arc<LimitMeter>), ConfigError> {
        let id = match self.ctx.registry.check(limit)? {
            Some(id) => id,
            None => self.add_limit(limit, meter),
        };
        Ok((id, self.ctx.registry.meter(id).clone()))
    }

    fn add_limit(&mut self, limit: &Limit, meter: &Arc<LimitMeter>) -> LimitId {
        self.ctx.log_misfit(limit);
        self.queues.add_limit();
        let id = self.ctx.registry.add(limit, meter.clone(), self.ctx.now);
        self.ctx.measure_limit(id);
        self.connect_if_divided();
        id
    }

    /// The other replicas have to count this one before an outage in which they divide a limit.
    fn connect_if_divided(&mut self) {
        if self.ctx.registry.has_divided() {
            for link in self.links.iter_mut() {
                if !link.connection.has_clock() && !link.is_connecting() {
                    link.connection.reconnect_in(Duration::ZERO, self.ctx.now);
                }
            }
        }
    }

    /// Updates the values of limits, from the next exchange on. Waiters get any additional slots. If one limit cannot
    /// be updated, none is.
    ///
    /// Each limit comes with a meter, in case it is unknown.
    pub fn update(&mut self, limits: &[(&Limit, Arc<LimitMeter>)]) -> Result<(), ConfigError> {
        for (limit, _) in limits {
            self.ctx.registry.check_update(limit)?;
        }
        for (limit, meter) in limits {
            match self.ctx.registry.id_of(limit.name()) {
                Some(id) => {
                    self.ctx.log_misfit(limit);
                    self.ctx.registry.update(id, limit);
                }
                None => drop(self.add_limit(limit, meter)),
            }
        }
        self.follow_limits();
        self.follow_decisions();
        Ok(())
    }

    /// Gives single keys of a limit new values, or the limit's value, without waiting for their next requests. Keys not
    /// listed keep their values, which may come from code.
    #[cfg(feature = "config")]
    pub fn set_values(&mut self, limit_name: &str, values: &HashMap<Key, Option<LimitValue>>) {
        let Some(id) = self.ctx.registry.id_of(limit_name) else {
            return;
        };
        for (key, own_value) in values {
            if let Some(queue) = self.queues.of_key(id, key) {
                self.change(queue, |queue, ctx| queue.set_own_value(ctx, *own_value));
            }
        }
        self.follow_decisions();
    }

    /// Puts the limits as last updated into force, with the present overrides.
    fn follow_limits(&mut self) {
        self.ctx.registry.follow(self.ctx.now);
        self.each_queue(None, |queue, ctx| queue.follow_limit(ctx));
        for id in self.ctx.registry.ids() {
            if self.ctx.registry.limit(id).current_mode() != Mode::Enforce {
                self.release_sleepers(id);
            }
        }
        self.refuse_sleepers();
        self.ctx.measure_limits();
        for id in self.ctx.registry.ids() {
            if let Some(until) = self.ctx.registry.paused_until(id) {
                self.pause_requests(id, until);
            }
        }
        self.connect_if_divided();
    }
}

/// Overrides.
impl Core {
    /// Replaces the overrides in force.
    pub fn steer(&mut self, overrides: Arc<InForce>) {
        if !self.ctx.registry.steer(overrides) {
            return;
        }
        for id in self.ctx.registry.ids() {
            let updated = self.ctx.registry.updated(id).clone();
            self.ctx.log_misfit(&updated);
        }
        self.follow_limits();
        self.follow_decisions();
    }

    /// Restores declared values where an override has ended, and refuses the requests that wait here for a fallback whose
    /// time is over.
    pub(super) fn end_terms(&mut self) {
        if self.ctx.registry.end_overrides(self.ctx.now) {
            self.follow_limits();
        }
        let end = self.ctx.registry.fallbacks.next_end();
        if end.is_some_and(|end| end <= self.ctx.now) {
            self.ctx.registry.follow_budgets(self.ctx.now);
            self.each_queue(None, |queue, ctx| queue.follow_fallback(ctx));
            self.refuse_sleepers();
            self.ctx.measure_limits();
        }
    }

    /// Refuses a demand under a limit paused by an operator.
    pub(super) fn check_pauses(&mut self, legs: &[Leg]) -> Result<(), AcquireError> {
        let (registry, now) = (&self.ctx.registry, self.ctx.now);
        if registry.overrides().is_empty() {
            return Ok(());
        }
        let paused = legs.iter();
        let mut paused = paused.filter_map(|leg| Some((leg, registry.paused_until(leg.limit)?)));
        let Some((leg, until)) = paused.next() else {
            return Ok(());
        };
        let error = registry.paused_error(leg.limit, until, now);
        // Without a lookup its key is unknown.
        let key = Some(&leg.key).filter(|_| !leg.exempt);
        (self.refusals).keep(leg.limit, &error, now, || (key, None, None));
        Err(error)
    }

    /// Pauses the key of a permit's slot under this limit. Returns whether it has one.
    pub fn pause(&mut self, leases: &Leases, limit: &str, length: Duration) -> bool {
        let slot = self.slot_under(leases, limit);
        if let Some((queue, _)) = slot {
            self.pause_queue(queue, None, length);
        }
        slot.is_some()
    }

    /// Counts how the upstream took the request of a permit, for its slot under this limit. Returns whether it has one.
    pub fn report(&mut self, leases: &Leases, limit: &str, verdict: Verdict) -> bool {
        let slot = self.slot_under(leases, limit);
        if let Some((queue, seq)) = slot {
            self.change(queue, |queue, ctx| queue.report(ctx, seq, verdict));
            self.follow_decisions();
        }
        slot.is_some()
    }

    fn slot_under(&self, leases: &Leases, limit: &str) -> Option<(QueueId, Seq)> {
        leases.all().iter().find_map(|lease| {
            let queue = self.queues.get(lease.queue)?;
            queue.entry(lease.seq())?;
            let is_under = queue.terms().limit().name() == limit;
            is_under.then(|| (lease.queue, lease.seq()))
        })
    }

    /// Pauses a key.
    pub fn pause_key(
        &mut self,
        limit: LimitId,
        (key, own_value): (&Key, Option<LimitValue>),
        length: Duration,
    ) {
        let queue = self.queues.find_or_make(&mut self.ctx, limit, key);
        self.pause_queue(queue, own_value, length);
    }

    fn pause_queue(&mut self, queue: QueueId, own_value: Option<LimitValue>, length: Duration) {
        self.change(queue, |queue, ctx| {
            if own_value.is_some() {
                queue.set_own_value(ctx, own_value);
            }
            queue.pause(ctx, length);
        });
        self.follow_decisions();
    }

    /// Ends the pause of a key. Returns whether this process remembers one.
    pub fn resume(&mut self, limit: LimitId, key: &Key) -> bool {
        let queue = self.queues.of_key(limit, key);
        let was_paused = queue.is_some_and(|id| self.change(id, |queue, ctx| queue.resume(ctx)));
        self.follow_decisions();
        was_paused
    }
}

/// The view of operators, a few rows at a time, since each look is a step under the lock.
///
/// A complete walk takes many looks, and requests proceed in between: entries that come or go meanwhile may be missed.
/// Tests: `operators/tests/operate/`, `src/operate/desk.rs`.
impl Core {
    /// Copies a few queues and entries. Returns the start of the next look, or `None` at the end.
    pub fn look(
        &self,
        from: Cursor,
        (which, now): (&Which, Instant),
        seen: &mut Vec<Seen>,
    ) -> Option<Cursor> {
        let (mut left, mut at) = (LOOK, from);
        while QueueId(at.queue) < self.queues.id_bound() {
            if left == 0 {
                return Some(at);
            }
            left -= 1;
            if let Some(of) = self.queues.get(QueueId(at.queue))
                && let Some(seq) = of.look(&self.ctx, (which, now), at.seq, &mut left, seen)
            {
                return Some(Cursor { seq, ..at });
            }
            (at.queue, at.seq) = (at.queue + 1, 0);
        }
        for of in self.accounting.standings.from(at.standing) {
            if left == 0 {
                return Some(at);
            }
            (left, at.standing) = (left - 1, at.standing + 1);
            if which.counts(of.limit, &of.key, "") {
                let budget = Level::look(of, &self.ctx, &self.links, now);
                seen.push(Seen::Queue(QueueLook {
                    limit: of.limit,
                    key: of.key.clone(),
                    max: budget.map_or(0, |budget| budget.max),
                    budget,
                    pause: None,
                    pace: None,
                    recovering: false,
                }));
            }
        }
        None
    }

    /// All limits, by id.
    pub fn all_limits(&self) -> Vec<LimitLook> {
        let delayed = self.requests.sleepers().map(|(_, limit)| limit);
        self.ctx.registry.looks(delayed)
    }

    /// How far tenants of a key are behind, in us, by the ledger in this process; empty if there is none.
    pub fn behind_us(&self, limit: LimitId, key: &Key, tenants: &[TenantId]) -> Vec<Option<u64>> {
        let queue = self.queues.of_key(limit, key);
        let ledger = queue.and_then(|queue| self.queues[queue].here.get());
        let behind = |ledger: &Ledger| tenants.iter().map(|one| ledger.ahead_us(*one)).collect();
        ledger.map_or_else(Vec::new, behind)
    }

    /// The latest refusals of a limit, oldest first.
    pub fn refusals(&self, limit: LimitId) -> Vec<RefusalNote> {
        self.refusals.of(limit)
    }
}
