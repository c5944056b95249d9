//! The limits of a keeper: as first registered, as last updated, and in force, which is as updated with the overrides of
//! operators; and the values of each that depend on the time: its fallback in an outage, and how long its permits are held.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    error::{AcquireError, AcquireErrorKind, ConfigError, ConfigErrorKind},
    fallbacks::{Availability, FallbackInForce, Fallbacks},
    key::Key,
    ledger::{ReplicaId, TenantId},
    limit::{Limit, LimitId, LimitValue, MAX_LIMIT},
    operable::LimitLook,
    overrides::InForce,
    part::{Part, Parts},
    telemetry::{LimitMeter, Measure},
};

/// Gauges: the value in force, whether operators have set it, and what this process enforces by itself. They are changed by a
/// difference, since changes may arrive in any order.
const GAUGES: [fn(f64) -> Measure; 3] = [Measure::Max, Measure::Overridden, Measure::Fallback];

pub(super) struct Registry {
    replica: ReplicaId,
    /// The parts of the store, if there is one.
    parts: Option<Parts>,
    /// By [`LimitId`], as are those in force.
    known: Vec<Registered>,
    in_force: Vec<Arc<Limit>>,
    overrides: Arc<InForce>,
    pub fallbacks: Fallbacks,
}

struct Registered {
    declared: Limit,
    updated: Arc<Limit>,
    meter: Arc<LimitMeter>,
    /// The value of each gauge, as measured.
    measured: [f64; GAUGES.len()],
    hold: Option<MeanHold>,
}

/// Recent mean hold time of a limit's permits. Without weights, both fields are equal.
#[derive(Clone, Copy, Debug)]
struct MeanHold {
    seconds: f64,
    /// Held time multiplied by the weight of the permit.
    unit_seconds: f64,
}

impl Registry {
    pub fn new(replica: ReplicaId, parts: Parts, has_store: bool, now: Instant) -> Self {
        Self {
            replica,
            parts: has_store.then_some(parts),
            known: Vec::new(),
            in_force: Vec::new(),
            overrides: Arc::default(),
            fallbacks: Fallbacks::new(parts, now),
        }
    }

    pub fn add(&mut self, limit: &Limit, meter: Arc<LimitMeter>, now: Instant) -> LimitId {
        let updated = Arc::new(limit.clone());
        self.in_force.push(self.overrides.apply(&updated));
        self.known.push(Registered {
            declared: limit.clone(),
            updated,
            meter,
            measured: [0.0; GAUGES.len()],
            hold: None,
        });
        self.fallbacks.add_limit();
        self.follow_budgets(now);
        LimitId(self.known.len() - 1)
    }

    /// Checks that two limits of one name agree: with the first registration or the current values. A limit returned by
    /// this limiter may have outdated values, since limits can be updated at any time.
    pub fn check(&self, limit: &Limit) -> Result<Option<LimitId>, ConfigError> {
        limit.validate()?;
        let Some(id) = self.id_of(limit.name()) else {
            return Ok(None);
        };
        let known = &self.known[id.0];
        if limit.is_registered_at(self.replica)
            || known.updated.agrees_with(limit)
            || known.declared.agrees_with(limit)
        {
            return Ok(Some(id));
        }
        let name = limit.name();
        let difference = known.updated.difference(limit);
        let message =
            format!("two limits are named `{name}` and have different values: {difference}");
        Err(ConfigError::new(ConfigErrorKind::Conflict, message))
    }

    /// Whether a limit can have these values from now on.
    pub fn check_update(&self, limit: &Limit) -> Result<(), ConfigError> {
        limit.validate()?;
        let known = self.id_of(limit.name());
        known.map_or(Ok(()), |id| self.limit(id).may_become(limit))
    }

    /// Values to be put into force by [`follow`](Self::follow).
    pub fn update(&mut self, id: LimitId, limit: &Limit) {
        self.known[id.0].updated = Arc::new(limit.clone());
    }

    /// Replaces the overrides, to be put into force by [`follow`](Self::follow). Returns whether they differ.
    pub fn steer(&mut self, overrides: Arc<InForce>) -> bool {
        // Usually the same overrides are read again, and there may be many queues.
        let before = mem::replace(&mut self.overrides, overrides);
        !before.agrees_with(&self.overrides)
    }

    /// Whether an override has ended, to be followed.
    pub fn end_overrides(&mut self, now: Instant) -> bool {
        !self.overrides.is_empty() && Arc::make_mut(&mut self.overrides).end(now)
    }

    /// Puts the limits as last updated into force, with the present overrides.
    pub fn follow(&mut self, now: Instant) {
        let updated = self.known.iter().map(|one| &one.updated);
        self.in_force = updated.map(|one| self.overrides.apply(one)).collect();
        self.follow_budgets(now);
    }

    /// Budgets of fallbacks were changed, or the earliest end was reached.
    pub fn follow_budgets(&mut self, now: Instant) {
        self.fallbacks.find_next_end(&self.in_force, now);
    }

    /// How the gauges of a limit change. `is_gone`: there are no limits any more.
    pub fn measure(
        &mut self,
        id: LimitId,
        is_gone: bool,
        now: Instant,
    ) -> impl Iterator<Item = Measure> + use<> {
        let is_overridden = self.overrides.overrides(self.updated(id));
        let next = if is_gone {
            [0.0; GAUGES.len()]
        } else {
            let (max, fallback) = (self.limit(id).max(), self.lowest_fallback(id, now));
            [max.into(), is_overridden.into(), fallback.into()]
        };
        let before = mem::replace(&mut self.known[id.0].measured, next);
        let changes = before.into_iter().zip(next).zip(GAUGES);
        let changes = changes.filter(|((before, next), _)| before != next);
        changes.map(|((before, next), gauge)| gauge(next - before))
    }
}

/// Lookup.
impl Registry {
    /// In force.
    #[inline]
    pub fn limit(&self, id: LimitId) -> &Arc<Limit> {
        &self.in_force[id.0]
    }

    /// In force, by id.
    pub fn limits(&self) -> &[Arc<Limit>] {
        &self.in_force
    }

    /// Whether the replicas divide a limit among themselves in an outage.
    pub fn has_divided(&self) -> bool {
        self.in_force.iter().any(|limit| limit.is_divided())
    }

    pub fn ids(&self) -> impl Iterator<Item = LimitId> + use<> {
        (0..self.in_force.len()).map(LimitId)
    }

    pub fn id_of(&self, limit_name: &str) -> Option<LimitId> {
        let mut limits = self.in_force.iter();
        let position = limits.position(|known| known.name() == limit_name);
        position.map(LimitId)
    }

    /// With its latest values, without overrides.
    pub fn updated(&self, id: LimitId) -> &Arc<Limit> {
        &self.known[id.0].updated
    }

    pub fn meter(&self, id: LimitId) -> &Arc<LimitMeter> {
        &self.known[id.0].meter
    }

    pub fn overrides(&self) -> &Arc<InForce> {
        &self.overrides
    }

    /// The end of an operator's pause of this limit.
    pub fn paused_until(&self, id: LimitId) -> Option<Instant> {
        self.overrides.paused_until(self.limit(id).name())
    }

    /// The share of a tenant: that of its request, unless an operator has changed it.
    pub fn share_of(&self, id: LimitId, tenant: TenantId, own: u32) -> u32 {
        let share = self.overrides.share_of(self.limit(id).name(), tenant);
        share.unwrap_or(own)
    }

    /// A key's own value, unless operators have set another.
    pub fn own_value(
        &self,
        limit: &Limit,
        key: &Key,
        own: Option<LimitValue>,
    ) -> Option<LimitValue> {
        if self.overrides.is_empty() {
            return own;
        }
        self.overrides.for_key(limit, key).own_value(own)
    }

    /// The refusal under a limit that an operator has paused until then.
    pub fn paused_error(&self, id: LimitId, until: Instant, now: Instant) -> AcquireError {
        let mut error = self.limit(id).acquire_error(AcquireErrorKind::Paused);
        error.details.retry_after = Some(until.saturating_duration_since(now));
        error
    }

    /// For operators, by id. `delayed`: the limit of each request that a rate holds back.
    pub fn looks(&self, delayed: impl Iterator<Item = LimitId>) -> Vec<LimitLook> {
        let look = |id| LimitLook {
            limit: self.limit(id).clone(),
            declared_max: self.updated(id).max(),
            is_paused: self.paused_until(id).is_some(),
            delayed: 0,
        };
        let mut looks: Vec<_> = self.ids().map(look).collect();
        delayed.for_each(|id| looks[id.0].delayed += 1);
        looks
    }
}

/// Fallbacks.
impl Registry {
    pub fn set_availability(&mut self, part: Part, availability: Availability, now: Instant) {
        (self.fallbacks).set_availability(part, availability, &self.in_force, now);
    }

    /// The lowest value that this process enforces by itself in any part: 0 if it refuses, and without a store.
    fn lowest_fallback(&self, id: LimitId, now: Instant) -> u32 {
        let value = |part| match self.fallbacks.of((id, self.limit(id)), part, None, now) {
            FallbackInForce::Local(value) => value.max,
            FallbackInForce::Allow => MAX_LIMIT,
            FallbackInForce::Reject => 0,
        };
        let parts = self.parts.iter().flat_map(|parts| parts.all());
        parts.map(value).min().unwrap_or(0)
    }
}

/// Hold times.
impl Registry {
    /// Updates the mean hold time of a limit. Recent permits weigh more.
    pub fn note_hold(&mut self, id: LimitId, held: Duration, weight: u32) {
        let seconds = held.as_secs_f64();
        let latest = MeanHold {
            seconds,
            unit_seconds: seconds * f64::from(weight),
        };
        let hold = &mut self.known[id.0].hold;
        *hold = Some(hold.map_or(latest, |mean| MeanHold {
            seconds: mean.seconds * 0.9 + latest.seconds * 0.1,
            unit_seconds: mean.unit_seconds * 0.9 + latest.unit_seconds * 0.1,
        }));
    }

    /// The recent mean hold of a limit's permits.
    pub fn mean_hold(&self, id: LimitId) -> Option<Duration> {
        let hold = self.known[id.0].hold;
        hold.map(|hold| Duration::from_secs_f64(hold.seconds))
    }

    /// Estimated unit-seconds of `waiting` waiters, then of a newcomer of this weight, by recent means of holds and weights.
    pub fn unit_seconds(&self, id: LimitId, waiting: u32, weight: u32) -> Option<f64> {
        let hold = self.known[id.0].hold?;
        Some(f64::from(waiting) * hold.unit_seconds + f64::from(weight) * hold.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{limit::Fallback, overrides::SettingInForce};

    struct Scene {
        registry: Registry,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let now = Instant::now();
            let registry = Registry::new(ReplicaId::from_bits(1), Parts::WHOLE, true, now);
            Self { registry, now }
        }

        fn add(&mut self, limit: &Limit) -> LimitId {
            let meter = Arc::new(LimitMeter::new("namespace", limit.name()));
            self.registry.add(limit, meter, self.now)
        }

        /// Changes of the gauges.
        fn measures(&mut self, id: LimitId, is_gone: bool) -> Vec<(&'static str, f64)> {
            let measured = self.registry.measure(id, is_gone, self.now);
            let named = measured.map(|measure| match measure {
                Measure::Max(by) => ("max", by),
                Measure::Overridden(by) => ("overridden", by),
                Measure::Fallback(by) => ("fallback", by),
                _ => unreachable!("no gauge of a limit"),
            });
            named.collect()
        }
    }

    fn limit(max: u32) -> Limit {
        Limit::concurrent("limit", max)
    }

    #[test]
    fn a_limit_agrees_with_its_first_and_its_latest_values() {
        let mut scene = Scene::new();
        assert_eq!(scene.registry.check(&limit(1)).unwrap(), None);
        let id = scene.add(&limit(1));
        scene.registry.update(id, &limit(2));
        for max in [1, 2] {
            assert_eq!(scene.registry.check(&limit(max)).unwrap(), Some(id));
        }
        let error = scene.registry.check(&limit(3)).unwrap_err().to_string();
        assert!(error.contains("two limits are named `limit`"), "{error}");
        assert!(scene.registry.check_update(&limit(3)).is_ok());
    }

    #[test]
    fn values_are_in_force_once_they_are_followed() {
        let mut scene = Scene::new();
        let id = scene.add(&limit(1));
        scene.registry.update(id, &limit(5));
        assert_eq!(scene.registry.limit(id).max(), 1);
        scene.registry.follow(scene.now);
        assert_eq!(scene.registry.limit(id).max(), 5);
        let end = scene.now + Duration::from_secs(60);
        let mut overrides = InForce::default();
        overrides.add("limit", SettingInForce::Value(9.into()), end);
        let overrides = Arc::new(overrides);
        assert!(scene.registry.steer(overrides.clone()));
        assert!(!scene.registry.steer(overrides), "the same again");
        scene.registry.follow(scene.now);
        assert_eq!(scene.registry.limit(id).max(), 9);
        assert_eq!(scene.registry.updated(id).max(), 5);
        assert!(!scene.registry.end_overrides(scene.now));
        assert!(scene.registry.end_overrides(end));
        scene.registry.follow(end);
        assert_eq!(scene.registry.limit(id).max(), 5);
    }

    #[test]
    fn gauges_follow_the_values_in_force() {
        let mut scene = Scene::new();
        let id = scene.add(&limit(4).fallback(Fallback::Local(2)));
        assert_eq!(scene.measures(id, false), [("max", 4.0), ("fallback", 2.0)]);
        assert_eq!(scene.measures(id, false), []);
        let less = limit(3).fallback(Fallback::Local(2));
        scene.registry.update(id, &less);
        scene.registry.follow(scene.now);
        assert_eq!(scene.measures(id, false), [("max", -1.0)]);
        assert_eq!(
            scene.measures(id, true),
            [("max", -3.0), ("fallback", -2.0)]
        );
    }

    #[test]
    fn recent_holds_weigh_more() {
        let mut scene = Scene::new();
        let id = scene.add(&limit(4));
        assert_eq!(scene.registry.unit_seconds(id, 1, 1), None);
        scene.registry.note_hold(id, Duration::from_secs(10), 2);
        assert_eq!(scene.registry.mean_hold(id), Some(Duration::from_secs(10)));
        assert_eq!(scene.registry.unit_seconds(id, 3, 1), Some(70.0));
        scene.registry.note_hold(id, Duration::from_secs(20), 1);
        assert_eq!(scene.registry.mean_hold(id), Some(Duration::from_secs(11)));
    }
}
