//! The keepers of a limiter: a single one, or one for each part of a cluster. Limiters, semaphores, permits and
//! operators call them here.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{
    fmt,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    core::Core,
    demand::Taken,
    lock::{Afterwards, Keeper},
};
use crate::{
    error::{AcquireErrorKind, ConfigError, ReleaseError},
    key::Key,
    leases::{Account, Bounds, Fee, KeeperId, Lease, Leases, Pool, QueueId, Tenure},
    ledger::{MemberId, ReplicaId},
    limit::{Limit, LimitId, LimitValue, Mode},
    overrides::InForce,
    part::{PARTS, Part},
    permit_id::PermitId,
    status::{Quota, QuotaReader, ShutdownReport, Status, Usage},
    sync::{Confirmation, Inquiry, LockMarker},
    telemetry::{Cost, LimitMeter, UnknownRates},
};
#[cfg(feature = "operate")]
use crate::{
    operable::{ControlTask, Cursor, LimitLook, RefusalNote, Visitor},
    overrides::LocalRecord,
};

/// One keeper, or one for each [`Part`] of a cluster. All keepers know the same limits by the same ids.
pub(crate) struct Keepers {
    all: Box<[Arc<Keeper>]>,
    /// Held while limits are registered or changed: ids depend on the order.
    changing: Mutex<()>,
    pub unknown_rates: Arc<UnknownRates>,
    /// The overrides of operators, if no store records them.
    #[cfg(feature = "operate")]
    record: Option<LocalRecord>,
}

/// The cores of all keepers, for requests that step several cores in sequence. A simulation has cores without keepers.
pub(super) trait Cores {
    fn moment(&self) -> Instant;

    /// Takes a step of one core.
    fn with_core<R>(&mut self, of: KeeperId, step: impl FnOnce(&mut Core, Instant) -> R) -> R;

    /// Releases slots as if they had never been acquired.
    fn untake(&mut self, leases: &Leases) {
        let of_one = |one: &Arc<Lease>, other: &Arc<Lease>| one.keeper == other.keeper;
        for leases in leases.all().chunk_by(of_one) {
            self.with_core(leases[0].keeper, |core, now| {
                leases.iter().for_each(|lease| core.untake(lease, now));
            });
        }
    }

    /// Releases the slots and refunds the charges of a result. Returns the state of the rates afterwards.
    fn give_back(&mut self, taken: Taken) -> Vec<Quota> {
        self.untake(&taken.leases);
        // Newest charge first: a rate can only undo its latest charge.
        let fees = taken.notes.map(|notes| notes.fees);
        let fees = fees.into_iter().flatten().rev();
        fees.filter_map(|fee| self.with_core(fee.keeper, |core, now| core.refund_at(&fee, now)))
            .collect()
    }
}

impl Cores for &Keepers {
    fn moment(&self) -> Instant {
        Instant::now()
    }

    fn with_core<R>(&mut self, of: KeeperId, step: impl FnOnce(&mut Core, Instant) -> R) -> R {
        self.all[of.index()].with(step)
    }
}

/// A granted slot not yet turned into a `Permit`.
pub(crate) struct Granted {
    pub keepers: Arc<Keepers>,
    pub taken: Taken,
}

impl Keepers {
    pub fn new(all: Vec<Arc<Keeper>>) -> Arc<Self> {
        debug_assert!(matches!(all.len(), 1 | PARTS));
        Arc::new(Self {
            #[cfg(feature = "operate")]
            record: all[0].store.is_none().then(LocalRecord::new),
            unknown_rates: Arc::new(UnknownRates::new(&all[0].namespace)),
            all: all.into(),
            changing: Mutex::default(),
        })
    }

    /// The single keeper, if all ledgers belong to one.
    pub(super) fn only(&self) -> Option<&Arc<Keeper>> {
        match &*self.all {
            [only] => Some(only),
            _ => None,
        }
    }

    pub(super) fn of_part(&self, part: Part) -> &Arc<Keeper> {
        &self.all[part.number()]
    }

    fn of_key(&self, limit: LimitId, key: &Key) -> &Arc<Keeper> {
        match self.only() {
            Some(keeper) => keeper,
            None => self.of_part(self.first().peek(|core| core.part_of(limit, key))),
        }
    }

    /// Any keeper, for state that all share.
    pub(super) fn first(&self) -> &Arc<Keeper> {
        &self.all[0]
    }

    fn each_of(&self, leases: &Leases, mut visit: impl FnMut(&Arc<Keeper>, &[Arc<Lease>])) {
        let of_one = |one: &Arc<Lease>, other: &Arc<Lease>| one.keeper == other.keeper;
        for leases in leases.all().chunk_by(of_one) {
            visit(&self.all[leases[0].keeper.index()], leases);
        }
    }

    fn each_lease(&self, leases: &Leases, step: impl Fn(&mut Core, &Arc<Lease>, Instant)) {
        self.each_of(leases, |keeper, leases| {
            keeper.with(|core, now| leases.iter().for_each(|lease| step(core, lease, now)));
        });
    }
}

/// Permits.
impl Keepers {
    /// Bounds a held permit. Bounds need a runtime.
    pub fn bound(&self, leases: &Leases, bounds: Bounds) {
        self.each_of(leases, |keeper, leases| {
            keeper.with(|core, now| {
                leases
                    .iter()
                    .for_each(|lease| core.bound(lease, bounds, now));
            });
            let _ = keeper.start_driver();
        });
    }

    pub fn release(&self, leases: &Leases) {
        // Most permits have a single slot and no accounts, so there is nothing to group.
        if let (Leases::One(_), [lease]) = (leases, leases.all()) {
            let keeper = &self.all[lease.keeper.index()];
            return keeper.with(|core, now| core.release(lease, now));
        }
        self.close_accounts(leases);
        self.each_lease(leases, Core::release_one_of_several);
    }

    /// Releases slots and waits until the store has confirmed the release. Fails with the limit of a slot that was not
    /// confirmed in time.
    pub fn release_confirmed(
        self: &Arc<Self>,
        leases: &Leases,
    ) -> impl Future<Output = Result<(), ReleaseError>> + use<> {
        self.close_accounts(leases);
        let mut waits = Vec::new();
        self.each_of(leases, |keeper, leases| {
            for lease in leases {
                let (confirmation, confirmed) = Confirmation::new();
                let limit =
                    keeper.with(|core, now| core.release_confirmed(lease, confirmation, now));
                waits.extend(limit.map(|limit| (limit, confirmed)));
            }
            // Without a runtime nothing is sent, and no driver would give up on the confirmation.
            if !waits.is_empty() && keeper.start_driver().is_err() {
                keeper.with(|core, _| core.give_up_on_confirmations());
            }
            keeper.watch_driver();
        });
        // While this future waits, the driver must not consider the limiter dropped.
        let keepers = self.clone();
        async move {
            for (limit, confirmed) in waits {
                confirmed.await.map_err(|_| keepers.unconfirmed(&limit))?;
            }
            Ok(())
        }
    }

    /// Changes the account of a permit: see [`Core::change_account`].
    pub fn change_account(
        &self,
        fee: &Fee,
        change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>,
    ) {
        let keeper = &self.all[fee.keeper.index()];
        let ((), needs_driver) =
            keeper.with_need(|core, now| core.change_account(fee, now, change));
        if needs_driver {
            // Without a runtime nothing is sent.
            let _ = keeper.start_driver();
        }
    }

    /// The state of a rate, as far as this permit knows it.
    pub fn quota_of(&self, fee: &Fee, reader: QuotaReader) -> Option<Quota> {
        self.all[fee.keeper.index()].with(|core, now| core.account_quota(fee, reader, now))
    }

    fn close_accounts(&self, leases: &Leases) {
        for fee in leases.open_accounts() {
            self.change_account(fee, |account| {
                account.end();
                None
            });
        }
    }

    fn unconfirmed(&self, limit: &Limit) -> ReleaseError {
        let lease = self.first().peek(|core| core.settings().lease);
        ReleaseError::new(limit.name().to_owned(), lease)
    }

    /// The meter of the first held slot's limit. `None`: the slots are no longer held.
    pub fn meter_of(&self, leases: &Leases) -> Option<Arc<LimitMeter>> {
        let lease = leases.all().first()?;
        self.all[lease.keeper.index()].peek(|core| core.meter_of_lease(lease))
    }

    /// The public id of the permit with these leases.
    pub fn id_of(&self, leases: &Leases) -> Option<PermitId> {
        let (lease, tenure) = leases.first()?;
        let replica = self.all[lease.keeper.index()].replica;
        let seq = lease.seq();
        Some(PermitId::new(MemberId { replica, seq }, tenure))
    }

    /// Undoes an acquisition. Returns the state of its rates afterwards.
    pub fn give_back(&self, taken: Taken) -> Vec<Quota> {
        Cores::give_back(&mut &*self, taken)
    }

    /// Makes sure that the leases are renewed.
    pub fn attend(&self, leases: &Leases) {
        self.each_of(leases, |keeper, _| {
            // Without a runtime nothing renews them; the deadline still holds.
            let _ = keeper.start_driver();
        });
    }
}

/// Limits.
impl Keepers {
    /// Whether [`register`](Self::register) would accept the limit.
    #[cfg(feature = "config")]
    pub fn check(&self, limit: &Limit) -> Result<(), ConfigError> {
        let me = self.replica();
        self.first().peek(|core| core.check(limit, me)).map(drop)
    }

    /// Checks and registers a limit. Returns its id, and its meter, which never changes.
    pub fn register(&self, limit: &Limit) -> Result<(LimitId, Arc<LimitMeter>), ConfigError> {
        let (me, meter) = (self.replica(), self.meter_for(limit));
        let (number, meter) = self.change_and_run(|core, _| core.register(limit, me, &meter))?;
        meter.expect(limit, self.first().store.is_some());
        Ok((number, meter))
    }

    /// Updates all limits, or fails and updates none.
    pub fn update(&self, limits: &[&Limit]) -> Result<(), ConfigError> {
        let limits = limits.iter().map(|limit| (*limit, self.meter_for(limit)));
        let limits: Vec<_> = limits.collect();
        self.change_and_run(|core, now| core.update(&limits, now))?;
        for (limit, meter) in &limits {
            meter.expect(limit, self.first().store.is_some());
        }
        Ok(())
    }

    /// As [`change_all`](Self::change_all), with the effects of the change.
    fn change_and_run<R>(
        &self,
        change: impl Fn(&mut Core, Instant) -> Result<R, ConfigError>,
    ) -> Result<R, ConfigError> {
        let mut afterwards = Vec::with_capacity(self.all.len());
        let changed = self.change_all(|keeper| {
            let (changed, rest) = keeper.step(|core, _, now| change(core, now));
            afterwards.push(rest);
            changed
        });
        afterwards.into_iter().for_each(Afterwards::run);
        changed
    }

    /// Makes the same change in all keepers. Their state is the same, so they all accept or all reject it.
    fn change_all<'a, R>(
        &'a self,
        mut change: impl FnMut(&'a Keeper) -> Result<R, ConfigError>,
    ) -> Result<R, ConfigError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let _marker = LockMarker::new();
        let changed = change(self.first())?;
        self.all[1..]
            .iter()
            .try_for_each(|keeper| change(keeper).map(drop))?;
        Ok(changed)
    }

    /// The meter of a limit, created if necessary: without a lock, since a recorder is foreign code.
    fn meter_for(&self, limit: &Limit) -> Arc<LimitMeter> {
        let first = self.first();
        let known = first.peek(|core| core.meter_of(limit.name()));
        known.unwrap_or_else(|| Arc::new(LimitMeter::new(&first.namespace, limit.name())))
    }

    /// The limit of this name with its latest values, without overrides.
    pub fn updated(&self, limit_name: &str) -> Option<Limit> {
        self.first().peek(|core| core.updated(limit_name))
    }

    pub fn mode_of(&self, limit: LimitId) -> Mode {
        self.first().peek(|core| core.mode_of(limit))
    }

    /// The record of overrides in a process without a store.
    #[cfg(feature = "operate")]
    pub fn local_record(&self) -> Option<&LocalRecord> {
        self.record.as_ref()
    }

    /// Replaces the overrides in force.
    #[cfg_attr(not(feature = "operate"), allow(dead_code))]
    pub fn steer(&self, overrides: InForce) {
        let overrides = Arc::new(overrides);
        for keeper in &self.all {
            keeper.with(|core, now| core.steer(overrides.clone(), now));
            // Without a runtime nothing ends them in time; the next step does.
            let _ = keeper.start_driver();
        }
    }

    #[cfg(feature = "config")]
    pub fn set_values(&self, limit_name: &str, values: &HashMap<Key, Option<LimitValue>>) {
        for keeper in &self.all {
            keeper.with(|core, now| core.set_values(limit_name, values, now));
        }
    }
}

impl Keepers {
    /// The name of this limiter, also for operators: the name of its first keeper in the store.
    pub fn replica(&self) -> ReplicaId {
        self.first().replica
    }

    pub fn status(&self) -> Status {
        let mut all = Status {
            held: 0,
            waiting: 0,
            store_up: true,
        };
        for keeper in &self.all {
            let status = keeper.peek(Core::status);
            all.held += status.held;
            all.waiting += status.waiting;
            all.store_up &= status.store_up;
        }
        all
    }

    pub async fn usage(&self, limit: LimitId, key: Key) -> Result<Usage, AcquireErrorKind> {
        let keeper = self.of_key(limit, &key);
        let (inquiry, answer) = Inquiry::new();
        keeper.with(|core, now| core.inquire(limit, &key, inquiry, now));
        keeper.start_driver()?;
        keeper.watch_driver();
        answer.await.map_err(|_| AcquireErrorKind::Unavailable)
    }

    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        let reports = self.all.iter().map(|keeper| keeper.shutdown(deadline));
        let mut all = ShutdownReport {
            refused: 0,
            released: 0,
            lost: 0,
            unconfirmed: 0,
        };
        for report in join_all(reports).await {
            all.refused += report.refused;
            all.released += report.released;
            all.lost += report.lost;
            all.unconfirmed += report.unconfirmed;
        }
        if all.unconfirmed > 0 {
            self.first()
                .with(|core, _| core.log_unconfirmed(all.unconfirmed));
        }
        self.first().control.leave().await;
        all
    }

    /// Starts listening to operators, for as long as the limiter or a permit exists.
    #[cfg(feature = "operate")]
    pub fn set_control_task(&self, task: &Arc<dyn ControlTask>) {
        for keeper in &self.all {
            keeper.control.set(task.clone());
        }
    }
}

/// The view of operators: over all keepers, unless stated otherwise.
#[cfg(feature = "operate")]
impl Keepers {
    /// The names of the keepers in the store.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.all.iter().map(|keeper| keeper.replica)
    }

    /// The lengths of a lease and of the heartbeat of a waiter.
    pub fn lease_and_waiter_ttl(&self) -> (Duration, Duration) {
        self.first().peek(|core| {
            let settings = core.settings();
            (settings.lease, settings.waiter_ttl)
        })
    }

    pub fn limit_id(&self, limit_name: &str) -> Option<LimitId> {
        self.first().peek(|core| core.limit_id(limit_name))
    }

    /// All limits, by id.
    pub fn limits(&self) -> Vec<LimitLook> {
        let mut limits = self.first().peek(Core::all_limits);
        // In a cluster each part delays its own requests.
        for keeper in &self.all[1..] {
            let each = limits.iter_mut().zip(keeper.peek(Core::all_limits));
            each.for_each(|(sum, part)| sum.delayed += part.delayed);
        }
        limits
    }

    /// The latest refusals of a limit, unordered.
    pub fn refusals(&self, limit: LimitId) -> Vec<RefusalNote> {
        let each = |keeper: &Arc<Keeper>| keeper.peek(|core| core.refusals(limit));
        self.all.iter().flat_map(each).collect()
    }

    /// Shows a few queues and entries of one keeper to a visitor. See [`Core::look`].
    pub fn look(&self, keeper: usize, from: Cursor, visitor: &mut impl Visitor) -> Option<Cursor> {
        self.all[keeper].peek(|core| core.look(from, visitor))
    }
}

/// The limiter is dropped: the drivers end once everything is sent to the store.
impl Drop for Keepers {
    fn drop(&mut self) {
        for keeper in &self.all {
            keeper.with_driver(|core, driver, _| {
                core.orphan();
                // A remaining driver reports them if it ends first. A dedicated thread may end unseen, with the
                // process.
                if driver.is_absent() || keeper.thread.is_some() {
                    core.log_unreleased();
                }
            });
        }
    }
}

/// The pool of one key, for a semaphore bound to that key. The queue lives as long as this.
pub(crate) struct BoundPool {
    keeper: Arc<Keeper>,
    queue: QueueId,
    pool: Arc<Pool>,
}

impl Keepers {
    /// The pool of a key, if its limit reuses slots.
    pub fn bind(&self, limit: LimitId, key: &Key) -> Option<Arc<BoundPool>> {
        let keeper = self.of_key(limit, key).clone();
        let (queue, pool) = keeper.with(|core, now| core.bind(limit, key, now))?;
        Some(Arc::new(BoundPool {
            keeper,
            queue,
            pool,
        }))
    }
}

impl BoundPool {
    /// An idle slot that may be used now. Not for a request whose own value of the limit differs from the latest.
    pub fn take(&self, keepers: &Arc<Keepers>, own_value: Option<LimitValue>) -> Option<Granted> {
        let lease = self.pool.take_unseen(own_value)?;
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

    /// Records a slot taken from the pool, once it has become a permit.
    pub fn record_take(&self) {
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
            .with(|core, _| core.unbind(self.queue, &self.pool));
    }
}
