//! The limits that a keeper knows, and the values that they have now.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{cmp::Reverse, sync::Arc};

use tokio::time::Instant;

use super::{Core, Index};
use crate::{
    error::{ConfigError, ConfigErrorKind},
    keeper::demand::{Leg, LimitId, Taken},
    key::Key,
    limit::{Limit, Mode},
    part::Part,
    telemetry::{LimitMeter, Measure},
};

impl Core {
    /// The number of a limit, made if need be; then with this meter.
    pub(crate) fn register(
        &mut self,
        limit: &Limit,
        meter: &Arc<LimitMeter>,
    ) -> Result<LimitId, ConfigError> {
        if let Some(number) = self.check(limit)? {
            return Ok(number);
        }
        self.limits.push(Arc::new(limit.clone()));
        self.declared.push(limit.clone());
        self.by_key.push(Index::default());
        Ok(self.ctx.add_limit(meter.clone()))
    }

    pub(crate) fn meter_of(&self, limit_name: &str) -> Option<Arc<LimitMeter>> {
        let number = self.number_of(limit_name)?;
        Some(self.ctx.meter(number).clone())
    }

    pub(crate) fn mode_and_meter(&self, limit: LimitId) -> (Mode, Arc<LimitMeter>) {
        let mode = self.limits[limit.0].current_mode();
        (mode, self.ctx.meter(limit).clone())
    }

    pub(in crate::keeper) fn is_rate(&self, limit: LimitId) -> bool {
        self.limits[limit.0].period().is_some()
    }

    /// Two limits of one name must say the same: what the first one said, or what it says now.
    pub(crate) fn check(&self, limit: &Limit) -> Result<Option<LimitId>, ConfigError> {
        limit.validate()?;
        let Some(number) = self.number_of(limit.name()) else {
            return Ok(None);
        };
        if self.limits[number.0].agrees_with(limit) || self.declared[number.0].agrees_with(limit) {
            return Ok(Some(number));
        }
        let name = limit.name();
        let difference = self.limits[number.0].difference(limit);
        let message =
            format!("two limits are named `{name}` and have different values: {difference}");
        Err(ConfigError::new(ConfigErrorKind::Conflict, message))
    }

    /// Counts a request as admitted by each of these limits that is not in shadow mode. In a cluster none of them knows of
    /// the others when it admits it.
    pub(in crate::keeper) fn note_admissions(&mut self, legs: &[(Part, Leg)], taken: &Taken) {
        for (_, leg) in legs {
            let limit = &self.limits[leg.limit.0];
            let passed = |(other, _): &(Arc<Limit>, _)| other.name() == limit.name();
            if limit.current_mode() != Mode::Off && !taken.passed().iter().any(passed) {
                self.ctx.measure(leg.limit, Measure::Admitted(taken.waited));
            }
        }
    }

    /// The part of a cluster that a key's ledger is in.
    pub(in crate::keeper) fn part_of(&self, limit: LimitId, key: &Key) -> Part {
        Part::of(key.digest(self.limits[limit.0].name()))
    }

    /// The order in which legs are taken one by one, from the last to the first: the same on all replicas, or requests
    /// could wait for each other in a circle. Rates are first, as nothing is held while they are waited for.
    pub(in crate::keeper) fn in_order(&self, legs: Vec<Leg>) -> Vec<(Part, Leg)> {
        let ranked = legs.into_iter().map(|leg| {
            let limit = &self.limits[leg.limit.0];
            let digest = leg.key.digest(limit.name());
            let rank = (limit.period().is_none(), limit.class_of(&leg.key), digest);
            (rank, leg)
        });
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_by_key(|(rank, _)| Reverse(*rank));
        ranked
            .into_iter()
            .map(|((_, _, digest), leg)| (Part::of(digest), leg))
            .collect()
    }

    /// Gives limits new values, which hold from the next exchange on. If there are more slots, waiters get them. If one
    /// of them cannot change so, none does.
    ///
    /// Each comes with a meter, for the case that it is not known yet.
    pub(crate) fn update(
        &mut self,
        limits: &[(&Limit, Arc<LimitMeter>)],
        now: Instant,
    ) -> Result<(), ConfigError> {
        self.ctx.now = now;
        for (limit, _) in limits {
            limit.validate()?;
            if let Some(number) = self.number_of(limit.name()) {
                self.limits[number.0].may_become(limit)?;
            }
        }
        for (limit, meter) in limits {
            match self.number_of(limit.name()) {
                Some(number) => self.change_limit(number, Arc::new((*limit).clone())),
                None => drop(self.register(limit, meter)?),
            }
        }
        self.advance_moved();
        Ok(())
    }

    /// Gives single keys of a limit new values, without waiting for their next requests. Keys that are not listed have
    /// the limit's.
    #[cfg(feature = "config")]
    pub(crate) fn set_values(
        &mut self,
        limit_name: &str,
        values: &HashMap<Key, u32>,
        now: Instant,
    ) {
        self.ctx.now = now;
        let number = self.number_of(limit_name);
        self.each_queue(|queue, ctx| {
            if Some(queue.number()) == number {
                let own_max = values.get(queue.key()).copied();
                queue.set_own_max(ctx, own_max);
            }
        });
        self.advance_moved();
    }

    fn change_limit(&mut self, number: LimitId, limit: Arc<Limit>) {
        self.limits[number.0] = limit.clone();
        self.each_queue(|queue, ctx| {
            if queue.number() == number {
                queue.change_limit(ctx, limit.clone());
            }
        });
        if limit.current_mode() != Mode::Enforce {
            self.release_sleepers(number);
        }
    }
}
