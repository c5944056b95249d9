//! All keepers of a limiter: one, or one for each part of a cluster.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;

use super::{
    BoundPool, Bounds, Demand, Lease, Leases, Leg, Request, Shared, demand::Taken, effects::Locked,
    shared::Afterwards, step::Step,
};
use crate::{
    error::{AcquireErrorKind, ConfigError},
    key::Key,
    limit::Limit,
    part::{PARTS, Part},
    status::{Quota, ShutdownReport, Status, Usage},
    telemetry::LimitMeter,
};

/// One keeper, or one for each [`Part`] of a cluster. All know the same limits by the same numbers.
pub(crate) struct Keepers {
    all: Box<[Arc<Shared>]>,
    /// Held while they are told of limits: the numbers depend on the order.
    telling: Mutex<()>,
}

impl Keepers {
    pub(crate) fn new(all: Vec<Arc<Shared>>) -> Arc<Self> {
        debug_assert!(matches!(all.len(), 1 | PARTS));
        Arc::new(Self {
            all: all.into(),
            telling: Mutex::default(),
        })
    }

    /// The keeper that has all ledgers, if there is one.
    pub(super) fn only(&self) -> Option<&Arc<Shared>> {
        match &*self.all {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Asks for a permit when it is first polled.
    pub(crate) fn request(self: &Arc<Self>, demand: Demand) -> Request {
        Request::new(self.clone(), demand)
    }

    /// The legs of a demand as they are taken, from the last to the first.
    pub(super) fn in_order(&self, demand: Demand) -> Vec<(Part, Leg)> {
        let legs = match demand {
            Demand::One(leg) => vec![leg],
            Demand::All(legs) => legs,
        };
        self.first().in_order(legs)
    }

    /// The step for one of these legs.
    pub(super) fn step(&self, (part, leg): &(Part, Leg)) -> Step {
        let keeper = self.all[part.number()].clone();
        Step::new(keeper, Demand::One(leg.clone()))
    }

    /// Counts a request that got all it wanted.
    pub(super) fn note_admissions(&self, legs: &[(Part, Leg)], taken: &Taken) {
        self.first().note_admissions(legs, taken);
    }

    pub(super) fn is_rate(&self, limit: usize) -> bool {
        self.first().is_rate(limit)
    }

    /// Bounds a held permit. Without a runtime nobody sees to it.
    pub(crate) fn bound(&self, leases: &Leases, bounds: Bounds) {
        self.each_of(leases, |keeper, leases| keeper.bound(leases, bounds));
    }

    /// The pool of a key, if its limit has one.
    pub(crate) fn bind(&self, limit: usize, key: &Key) -> Option<Arc<BoundPool>> {
        let keeper = match self.only() {
            Some(keeper) => keeper,
            None => &self.all[self.first().part_of(limit, key).number()],
        };
        keeper.bind(limit, key.clone())
    }

    pub(crate) fn release(&self, leases: &Leases) {
        match leases {
            Leases::One(_) => self.each_of(leases, |keeper, leases| keeper.release(leases)),
            Leases::Many(_) => self.each_of(leases, |keeper, leases| keeper.part(leases)),
        }
    }

    /// Releases slots as if they had not been taken.
    pub(super) fn untake(&self, leases: &Leases) {
        self.each_of(leases, |keeper, leases| keeper.untake(leases));
    }

    /// As if it had not been taken. Tells how its rates stand then.
    pub(super) fn give_back(&self, taken: Taken) -> Vec<Quota> {
        self.untake(&taken.leases);
        // From the last to the first, so that reserved times can be taken back.
        let fees = taken.notes.map(|notes| notes.fees);
        let fees = fees.into_iter().flatten().rev();
        fees.filter_map(|fee| self.all[fee.keeper].refund(fee))
            .collect()
    }

    /// Sees to it that the leases are looked after.
    pub(crate) fn attend(&self, leases: &Leases) {
        self.each_of(leases, |keeper, _| {
            // Without a runtime nobody does; the deadline holds all the same.
            let _ = keeper.start_driver();
        });
    }

    /// Whether [`register`](Self::register) would take it.
    #[cfg(feature = "config")]
    pub(crate) fn check(&self, limit: &Limit) -> Result<(), ConfigError> {
        self.first().check(limit)
    }

    /// Checks a limit and makes it known under its name; returns its number.
    pub(crate) fn register(&self, limit: &Limit) -> Result<usize, ConfigError> {
        let meter = self.meter_for(limit);
        self.tell(|keeper| keeper.register(limit, &meter))
    }

    /// All of them or none.
    pub(crate) fn update(&self, limits: &[&Limit]) -> Result<(), ConfigError> {
        let limits = limits.iter().map(|limit| (*limit, self.meter_for(limit)));
        let limits: Vec<_> = limits.collect();
        let mut afterwards = Vec::with_capacity(self.all.len());
        let updated = self.tell(|keeper| {
            let (updated, rest) = keeper.update(&limits);
            afterwards.push(rest);
            updated
        });
        afterwards.into_iter().for_each(Afterwards::run);
        updated
    }

    /// The meter of a limit, made if need be: without a lock, since a recorder is foreign code.
    fn meter_for(&self, limit: &Limit) -> Arc<LimitMeter> {
        let first = self.first();
        let known = first.meter_of(limit.name());
        known.unwrap_or_else(|| Arc::new(LimitMeter::new(first.namespace(), limit.name())))
    }

    #[cfg(feature = "config")]
    pub(crate) fn set_values(&self, limit_name: &str, values: &HashMap<Key, u32>) {
        self.all
            .iter()
            .for_each(|keeper| keeper.set_values(limit_name, values));
    }

    pub(crate) fn meter(&self, limit: usize) -> Arc<LimitMeter> {
        self.first().meter(limit)
    }

    pub(crate) fn status(&self) -> Status {
        let mut all = Status {
            held: 0,
            waiting: 0,
            store_up: true,
        };
        for status in self.all.iter().map(|keeper| keeper.status()) {
            all.held += status.held;
            all.waiting += status.waiting;
            all.store_up &= status.store_up;
        }
        all
    }

    pub(crate) async fn usage(&self, limit: usize, key: Key) -> Result<Usage, AcquireErrorKind> {
        let keeper = match self.only() {
            Some(keeper) => keeper,
            None => &self.all[self.first().part_of(limit, &key).number()],
        };
        keeper.usage(limit, key).await
    }

    pub(crate) async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        let reports = self.all.iter().map(|keeper| keeper.shutdown(deadline));
        let mut all = ShutdownReport {
            refused: 0,
            returned: 0,
            lost: 0,
        };
        for report in join_all(reports).await {
            all.refused += report.refused;
            all.returned += report.returned;
            all.lost += report.lost;
        }
        all
    }

    fn first(&self) -> &Arc<Shared> {
        &self.all[0]
    }

    /// Tells all the same. They know the same, so if one takes it, all do.
    fn tell<'a, R>(
        &'a self,
        mut tell: impl FnMut(&'a Shared) -> Result<R, ConfigError>,
    ) -> Result<R, ConfigError> {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        let _marker = Locked::new();
        let told = tell(self.first())?;
        self.all[1..]
            .iter()
            .try_for_each(|keeper| tell(keeper).map(drop))?;
        Ok(told)
    }

    fn each_of(&self, leases: &Leases, visit: impl Fn(&Arc<Shared>, &[Arc<Lease>])) {
        let of_one = |one: &Arc<Lease>, other: &Arc<Lease>| one.keeper == other.keeper;
        for leases in leases.all().chunk_by(of_one) {
            visit(&self.all[leases[0].keeper], leases);
        }
    }
}

/// Nobody is left who could ask for anything: the drivers end when all is told to the store.
impl Drop for Keepers {
    fn drop(&mut self) {
        self.all.iter().for_each(|keeper| keeper.orphan());
    }
}
