//! The limits that a keeper knows, their current values, and the view of operators.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, Measured};
use crate::{
    error::{AcquireError, ConfigError, ConfigErrorKind},
    keeper::{demand::Demand, effects::LogEvent},
    key::Key,
    leases::{Lease, Leases, QueueId},
    limit::{Limit, LimitId, LimitValue, Mode},
    overrides::InForce,
    telemetry::{LimitMeter, Measure},
};
use crate::{
    ledger::TenantId,
    operable::{Cursor, LOOK, LimitLook, RefusalNote, Visitor},
};

impl Core {
    /// Returns the id and meter of a limit; an unknown limit is registered with this meter.
    pub fn register(
        &mut self,
        limit: &Limit,
        meter: &Arc<LimitMeter>,
    ) -> Result<(LimitId, Arc<LimitMeter>), ConfigError> {
        if let Some(id) = self.check(limit)? {
            return Ok((id, self.ctx.meter(id).clone()));
        }
        Ok((self.add_limit(limit, meter), meter.clone()))
    }

    fn add_limit(&mut self, limit: &Limit, meter: &Arc<LimitMeter>) -> LimitId {
        let declared = Arc::new(limit.clone());
        let in_force = self.ctx.overrides.apply(&declared);
        self.log_misfit(&declared);
        self.updated.push(declared);
        self.declared.push(limit.clone());
        self.queues.add_limit();
        self.measured.push(Measured::default());
        let id = self.ctx.add_limit(in_force, meter.clone());
        self.measure_limit(id);
        self.connect_if_divided();
        id
    }

    /// The other replicas have to count this one before an outage in which they divide a limit.
    fn connect_if_divided(&mut self) {
        if self.ctx.limits.iter().any(|limit| limit.is_divided()) {
            for link in &mut self.links {
                if link.clock.is_none() && !link.is_connecting() {
                    link.connection.reconnect_at = Some(self.ctx.now);
                }
            }
        }
    }

    pub fn meter_of(&self, limit_name: &str) -> Option<Arc<LimitMeter>> {
        let id = self.limit_id(limit_name)?;
        Some(self.ctx.meter(id).clone())
    }

    /// The limit of this name with its latest values, without overrides.
    pub fn updated(&self, limit_name: &str) -> Option<Limit> {
        let id = self.limit_id(limit_name)?;
        Some(Limit::clone(&self.updated[id.0]))
    }

    pub fn mode_of(&self, limit: LimitId) -> Mode {
        self.ctx.limits[limit.0].current_mode()
    }

    /// The end of an operator's pause of this limit.
    pub fn paused_until(&self, limit: LimitId) -> Option<Instant> {
        (self.ctx.overrides).paused_until(self.ctx.limits[limit.0].name())
    }

    /// Whether newcomers under strict limits wait because permits return to the store.
    pub fn is_recovering(&self) -> bool {
        self.ctx.is_recovering()
    }

    /// The time for permits to return is over: newcomers go on, unless the store has lost its data again. With a store
    /// that loses its data again and again, all newcomers would otherwise go on to an empty ledger.
    pub(super) fn check_returns(&mut self) {
        for part in self.ctx.settings.parts.all() {
            if self.ctx.returns.is_over(part, self.ctx.now) {
                let link = self.link(part);
                link.forget_query();
                link.connection.is_wanted = true;
            }
            if self.ctx.returns.end_after_outage(part, self.ctx.now) {
                self.each_queue_of(part, |queue, _| queue.go_on());
            }
        }
        while let Some(queue) = self.ctx.returns.end_of_key(self.ctx.now) {
            if self.queues.has(queue) {
                self.change(queue, |queue, _| queue.go_on());
            }
        }
    }

    /// Checks that two limits of one name agree: with the first registration or the current values. A limit returned by
    /// this limiter may have outdated values, since limits can be updated at any time.
    pub fn check(&self, limit: &Limit) -> Result<Option<LimitId>, ConfigError> {
        limit.validate()?;
        let Some(id) = self.limit_id(limit.name()) else {
            return Ok(None);
        };
        let updated = &self.updated[id.0];
        if limit.is_registered_at(self.ctx.settings.replica)
            || updated.agrees_with(limit)
            || self.declared[id.0].agrees_with(limit)
        {
            return Ok(Some(id));
        }
        let name = limit.name();
        let difference = updated.difference(limit);
        let message =
            format!("two limits are named `{name}` and have different values: {difference}");
        Err(ConfigError::new(ConfigErrorKind::Conflict, message))
    }

    /// Updates the values of limits, from the next exchange on. Waiters get any additional slots. If one limit cannot
    /// be updated, none is.
    ///
    /// Each limit comes with a meter, in case it is unknown.
    pub fn update(
        &mut self,
        limits: &[(&Limit, Arc<LimitMeter>)],
        now: Instant,
    ) -> Result<(), ConfigError> {
        self.ctx.now = now;
        for (limit, _) in limits {
            limit.validate()?;
            if let Some(id) = self.limit_id(limit.name()) {
                self.ctx.limits[id.0].may_become(limit)?;
            }
        }
        for (limit, meter) in limits {
            match self.limit_id(limit.name()) {
                Some(id) => {
                    self.log_misfit(limit);
                    self.updated[id.0] = Arc::new((*limit).clone());
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
    pub fn set_values(
        &mut self,
        limit_name: &str,
        values: &HashMap<Key, Option<LimitValue>>,
        now: Instant,
    ) {
        self.ctx.now = now;
        let id = self.limit_id(limit_name);
        self.each_queue(|queue, ctx| {
            if Some(queue.limit_id()) == id
                && let Some(own_value) = values.get(queue.key())
            {
                queue.set_own_value(ctx, *own_value);
            }
        });
        self.follow_decisions();
    }

    /// Puts the limits as last updated into force, with the present overrides.
    fn follow_limits(&mut self) {
        let updated = self.updated.iter();
        self.ctx.limits = updated.map(|one| self.ctx.overrides.apply(one)).collect();
        self.ctx.follow_budgets();
        self.each_queue(|queue, ctx| {
            let limit = ctx.limits[queue.limit_id().0].clone();
            let steered = ctx.overrides.for_key(&limit, queue.key());
            queue.change_limit(ctx, limit, steered);
        });
        let ids = (0..self.ctx.limits.len()).map(LimitId);
        for id in ids.clone() {
            if self.ctx.limits[id.0].current_mode() != Mode::Enforce {
                self.release_sleepers(id);
            }
        }
        self.refuse_sleepers();
        self.measure_limits();
        for id in ids {
            let name = self.ctx.limits[id.0].name();
            if let Some(until) = self.ctx.overrides.paused_until(name) {
                self.pause_requests(id, until);
            }
        }
        self.connect_if_divided();
    }

    /// Measures the limit in force after a change. Changes of a gauge may arrive in any order.
    fn measure_limit(&mut self, id: LimitId) {
        let (limit, updated) = (&self.ctx.limits[id.0], &self.updated[id.0]);
        let next = if self.orphaned {
            Measured::default()
        } else {
            Measured {
                max: limit.max(),
                is_overridden: self.ctx.overrides.overrides(updated),
                fallback: self.ctx.lowest_fallback(id),
            }
        };
        let before = mem::replace(&mut self.measured[id.0], next);
        let mut follow = |before: f64, next: f64, measure: fn(f64) -> Measure| {
            if before != next {
                self.ctx.measure(id, measure(next - before));
            }
        };
        let is_overridden = |measured: Measured| f64::from(measured.is_overridden);
        follow(before.max.into(), next.max.into(), Measure::Max);
        follow(
            is_overridden(before),
            is_overridden(next),
            Measure::Overridden,
        );
        follow(
            before.fallback.into(),
            next.fallback.into(),
            Measure::Fallback,
        );
    }

    pub(super) fn measure_limits(&mut self) {
        for id in 0..self.ctx.limits.len() {
            self.measure_limit(LimitId(id));
        }
    }
}

/// Fallbacks.
impl Core {
    /// Whether they decide on any requests now.
    pub fn falls_back(&self) -> bool {
        self.ctx.falls_back()
    }

    /// Refuses the requests that wait here for a fallback whose time is over.
    pub(super) fn end_fallbacks(&mut self) {
        let end = self.ctx.fallback_ends_at();
        if end.is_some_and(|end| end <= self.ctx.now) {
            self.ctx.follow_budgets();
            self.each_queue(|queue, ctx| queue.follow_fallback(ctx));
            self.refuse_sleepers();
            self.measure_limits();
        }
    }
}

/// Overrides.
impl Core {
    /// Replaces the overrides in force.
    pub fn steer(&mut self, overrides: Arc<InForce>, now: Instant) {
        self.ctx.now = now;
        let before = mem::replace(&mut self.ctx.overrides, overrides);
        // Usually the same overrides are read again, and there may be many queues.
        if before.agrees_with(&self.ctx.overrides) {
            return;
        }
        for id in 0..self.updated.len() {
            self.log_misfit(&self.updated[id].clone());
        }
        self.follow_limits();
        self.follow_decisions();
    }

    /// Restores declared values where an override has ended.
    pub(super) fn end_overrides(&mut self) {
        if !self.ctx.overrides.is_empty()
            && Arc::make_mut(&mut self.ctx.overrides).end(self.ctx.now)
        {
            self.follow_limits();
        }
    }

    /// The refusal of a demand under a limit paused by an operator.
    pub(super) fn pause_of(&mut self, demand: &Demand) -> Option<AcquireError> {
        if self.ctx.overrides.is_empty() {
            return None;
        }
        let (leg, until) = demand
            .legs()
            .iter()
            .find_map(|leg| Some((leg, self.paused_until(leg.limit)?)))?;
        let error = self.paused_error(leg.limit, until);
        // Without a lookup its key is unknown.
        let key = Some(&leg.key).filter(|_| !leg.exempt);
        let about = || (key, None);
        self.refusals.keep(leg.limit, &error, self.ctx.now, about);
        Some(error)
    }

    /// Pauses the key of a permit's slot under this limit. Returns whether it has one.
    pub fn pause(&mut self, leases: &Leases, limit: &str, length: Duration, now: Instant) -> bool {
        self.ctx.now = now;
        let of_limit = |lease: &&Arc<Lease>| {
            let queue = self.queues.get(lease.queue);
            queue.is_some_and(|one| one.contains(lease.seq()) && one.limit().name() == limit)
        };
        let lease = leases.all().iter().find(of_limit);
        if let Some(lease) = lease {
            self.pause_queue(lease.queue, None, length);
        }
        lease.is_some()
    }

    /// Pauses a key.
    pub fn pause_key(
        &mut self,
        limit: LimitId,
        (key, own_value): (&Key, Option<LimitValue>),
        length: Duration,
        now: Instant,
    ) {
        self.ctx.now = now;
        let queue = self.queues.find_or_make(&mut self.ctx, limit, key);
        self.pause_queue(queue, own_value, length);
    }

    fn pause_queue(&mut self, queue: QueueId, own_value: Option<LimitValue>, length: Duration) {
        self.change(queue, |queue, ctx| {
            queue.learn_own_value(ctx, own_value);
            queue.pause(ctx, length);
        });
        self.follow_decisions();
    }

    /// Ends the pause of a key. Returns whether this process remembers one.
    pub fn resume(&mut self, limit: LimitId, key: &Key, now: Instant) -> bool {
        self.ctx.now = now;
        let Some(queue) = self.queues.of_key(limit, key) else {
            return false;
        };
        let ctx = &mut self.ctx;
        let was_paused = (self.queues).change(ctx, queue, |queue, ctx| queue.resume(ctx));
        self.follow_decisions();
        was_paused
    }

    fn log_misfit(&mut self, declared: &Limit) {
        if let Err(error) = self.ctx.overrides.misfit(declared) {
            let error = error.to_string();
            self.ctx.log(LogEvent::OverrideMisfit { error });
        }
    }
}

/// The view of operators, a few rows at a time, since each look is a step under the lock.
///
/// A complete walk takes many looks, and requests proceed in between: entries that come or go meanwhile may be missed.
/// Tests: `operators/tests/operate/`, `src/operate/desk.rs`.
impl Core {
    /// Shows a few queues and entries to a visitor. Returns the start of the next look, or `None` at the end.
    pub fn look(&self, from: Cursor, visitor: &mut impl Visitor) -> Option<Cursor> {
        let mut left = LOOK;
        let Cursor {
            mut queue,
            mut seq,
            mut standing,
        } = from;
        let at = |queue, seq, standing| Cursor {
            queue,
            seq,
            standing,
        };
        while QueueId(queue) < self.queues.id_bound() {
            if left == 0 {
                return Some(at(queue, seq, standing));
            }
            left -= 1;
            if let Some(of) = self.queues.get(QueueId(queue))
                && visitor.queue(of.look(&self.ctx))
                && let Some(seq) = of.look_at_entries(seq, &mut left, |entry| visitor.entry(entry))
            {
                return Some(at(queue, seq, standing));
            }
            (queue, seq) = (queue + 1, 0);
        }
        for of in self.standings.from(standing) {
            if left == 0 {
                return Some(at(queue, seq, standing));
            }
            (left, standing) = (left - 1, standing + 1);
            visitor.rate(of.limit, &of.key, &|now| self.rate_look(of, now));
        }
        None
    }

    /// All limits, by id.
    pub fn all_limits(&self) -> Vec<LimitLook> {
        let mut delayed = vec![0; self.ctx.limits.len()];
        for limit in self.sleepers.values() {
            delayed[limit.0] += 1;
        }
        let limits = self.ctx.limits.iter().zip(&self.updated).zip(delayed);
        let look = |((limit, updated), delayed): ((&Arc<Limit>, &Arc<Limit>), _)| LimitLook {
            limit: limit.clone(),
            declared_max: updated.max(),
            is_paused: self.ctx.overrides.paused_until(limit.name()).is_some(),
            delayed,
        };
        limits.map(look).collect()
    }

    /// The overrides in force.
    pub fn overrides(&self) -> Arc<InForce> {
        self.ctx.overrides.clone()
    }

    /// How far tenants of a key are behind, in us, by the ledger in this process; empty if there is none.
    pub fn behind_us(&self, limit: LimitId, key: &Key, tenants: &[TenantId]) -> Vec<Option<u64>> {
        let queue = self.queues.of_key(limit, key);
        let queue = queue.and_then(|queue| self.queues.get(queue));
        queue.map_or_else(Vec::new, |queue| queue.behind_us(tenants))
    }

    /// The latest refusals of a limit, oldest first.
    pub fn refusals(&self, limit: LimitId) -> Vec<RefusalNote> {
        self.refusals.of(limit)
    }
}
