//! The interface of a keeper for limiters, semaphores, permits and operators.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{fmt, future::Future, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    core::Core,
    demand::{RequestId, Taken},
    lock::Keeper,
};
use crate::{
    error::{AcquireErrorKind, ConfigError, ReleaseError},
    key::Key,
    leases::{Account, Bounds, Fee, Leases, Pool, QueueId, Tenure},
    ledger::{MemberId, ReplicaId, TenantId},
    limit::{Limit, LimitId, LimitValue, Mode, Verdict},
    operable::{ControlTask, Cursor, LimitLook, RefusalNote, Seen, Which},
    overrides::{InForce, LocalRecord},
    permit_id::PermitId,
    status::{Quota, ShutdownReport, Status, Usage},
    store::StoreError,
    sync::{Confirmation, Inquiry},
    telemetry::{Cost, LimitMeter, UnknownRates},
};

/// A keeper, as limiters, semaphores and permits see it. The limiter and its permits are gone once this is dropped.
pub(crate) struct KeeperHandle {
    pub(super) keeper: Arc<Keeper>,
    pub unknown_rates: Arc<UnknownRates>,
    /// The overrides of operators, if no store records them.
    record: Option<LocalRecord>,
}

/// A granted slot not yet turned into a `Permit`.
pub(crate) struct Granted {
    pub keeper: Arc<KeeperHandle>,
    pub taken: Taken,
}

/// Why a store cannot be used.
pub(crate) enum ConnectError {
    /// The store refuses to work.
    Store(StoreError),
    /// No runtime with timers and IO is available.
    NoRuntime,
}

impl KeeperHandle {
    pub fn new(keeper: Arc<Keeper>) -> Arc<Self> {
        Arc::new(Self {
            record: keeper.store.is_none().then(LocalRecord::default),
            unknown_rates: Arc::new(UnknownRates::new(&keeper.namespace)),
            keeper,
        })
    }
}

/// Permits.
impl KeeperHandle {
    /// Bounds a held permit. Bounds need a runtime.
    pub fn bound(&self, leases: &Leases, bounds: Bounds) {
        self.act(|core| {
            let leases = leases.all().iter();
            leases.for_each(|lease| core.bound(lease, bounds));
        });
    }

    pub fn release(&self, leases: &Leases) {
        self.close_accounts(leases);
        self.give_back(|core| core.release(leases));
    }

    pub fn cancel(&self, id: RequestId) {
        self.give_back(|core| core.cancel(id));
    }

    /// Runs a step that frees a slot or a place, and starts a driver if the store has to be told and no driver is there.
    /// Costs less than [`act`](Self::act), since a release in memory has no timers.
    #[inline]
    fn give_back(&self, step: impl FnOnce(&mut Core)) {
        let is_untold = self.keeper.with_driver(|core, driver| {
            step(core);
            driver.is_absent() && core.context().shared
        });
        if is_untold {
            let _ = self.keeper.start_driver();
        }
    }

    /// Releases slots and waits until the store has confirmed the release. Fails with the limit of a slot that was not
    /// confirmed in time.
    pub fn release_confirmed(
        self: &Arc<Self>,
        leases: &Leases,
    ) -> impl Future<Output = Result<(), ReleaseError>> + use<> {
        self.close_accounts(leases);
        let keeper = &self.keeper;
        let mut waits = Vec::new();
        for lease in leases.all() {
            let (confirmation, confirmed) = Confirmation::new();
            let limit = keeper.with(|core| core.release_confirmed(lease, confirmation));
            waits.extend(limit.map(|limit| (limit, confirmed)));
        }
        // Without a runtime nothing is sent, and no driver would give up on the confirmation.
        if !waits.is_empty() && keeper.start_driver().is_err() {
            keeper.with(|core| core.context_mut().end_confirmations(None));
        }
        keeper.watch_driver();
        // While this future waits, the driver must not consider the limiter dropped.
        let keeper = self.clone();
        async move {
            for (limit, confirmed) in waits {
                if confirmed.await.is_err() {
                    // The driver may have ended with its runtime; the release is retried.
                    let _ = keeper.keeper.start_driver();
                    let lease = (keeper.keeper).peek(|core| core.context().settings.lease);
                    return Err(ReleaseError::new(limit.name().to_owned(), lease));
                }
            }
            Ok(())
        }
    }

    /// Pauses the key of a permit's slot under this limit, in all replicas. Returns whether the permit has such a slot.
    pub fn pause(&self, leases: &Leases, limit_name: &str, length: Duration) -> bool {
        self.act(|core| core.pause(leases, limit_name, length))
    }

    /// Counts the verdict on a request that holds these leases, for its limit of this name. Returns whether it has one.
    pub fn report(&self, leases: &Leases, limit_name: &str, verdict: Verdict) -> bool {
        self.act(|core| core.report(leases, limit_name, verdict))
    }

    /// Pauses a key in all replicas.
    pub fn pause_key(&self, limit: LimitId, key: (&Key, Option<LimitValue>), length: Duration) {
        self.act(|core| core.pause_key(limit, key, length));
    }

    /// Ends the pause of a key, for which each replica that remembers it is to be asked. Returns whether this one does.
    pub fn resume(&self, limit: LimitId, key: &Key) -> bool {
        self.act(|core| core.resume(limit, key))
    }

    /// Runs a step of the core, and starts a driver if one is needed then. Without a runtime nothing is sent.
    fn act<R>(&self, step: impl FnOnce(&mut Core) -> R) -> R {
        self.try_act(step).0
    }

    /// As [`act`](Self::act). Also returns why a driver could not be started.
    #[inline(always)]
    pub(super) fn try_act<R>(
        &self,
        step: impl FnOnce(&mut Core) -> R,
    ) -> (R, Result<(), AcquireErrorKind>) {
        let (result, is_rare) = self.keeper.with_driver(|core, driver| {
            let result = step(core);
            let falls_back = core.context().registry.fallbacks.decide();
            (result, driver.is_needed(core) || falls_back)
        });
        if !is_rare {
            return (result, Ok(()));
        }
        (result, self.see_to_driver())
    }

    /// Starts a driver if one is needed. While fallbacks decide, no request waits, so this also checks that the driver runs.
    #[cold]
    fn see_to_driver(&self) -> Result<(), AcquireErrorKind> {
        if (self.keeper).with_driver(|core, driver| driver.is_late(core)) {
            self.keeper.watch_driver();
        }
        self.keeper.start_driver()
    }

    /// Changes the account of a permit: see [`Core::change_account`].
    pub fn change_account(
        &self,
        fee: &Fee,
        change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>,
    ) {
        self.act(|core| core.change_account(fee, change));
    }

    /// The state of a rate, as far as this permit knows it.
    pub fn quota_of(&self, fee: &Fee) -> Option<Quota> {
        (self.keeper).with(|core| core.account_quota(fee))
    }

    fn close_accounts(&self, leases: &Leases) {
        for fee in leases.open_accounts() {
            self.change_account(fee, |account| {
                account.end();
                None
            });
        }
    }

    /// The meter of the first held slot's limit. `None`: the slots are no longer held.
    pub fn meter_of(&self, leases: &Leases) -> Option<Arc<LimitMeter>> {
        let lease = leases.all().first()?;
        self.keeper.peek(|core| core.meter_of_lease(lease))
    }

    /// The public id of the permit with these leases.
    pub fn id_of(&self, leases: &Leases) -> Option<PermitId> {
        let (lease, tenure) = leases.first()?;
        let (replica, seq) = (self.keeper.replica, lease.seq());
        Some(PermitId::new(MemberId { replica, seq }, tenure))
    }

    /// Undoes an acquisition. Returns the state of its rates afterwards.
    pub fn cancel_granted(&self, taken: Taken) -> Vec<Quota> {
        self.keeper.with(|core| core.cancel_granted(taken))
    }

    /// The pool of a key, if its limit reuses slots.
    pub fn bind(&self, limit: LimitId, key: &Key) -> Option<Arc<BoundPool>> {
        let (queue, pool) = self.keeper.with(|core| core.bind(limit, key))?;
        Some(Arc::new(BoundPool {
            keeper: self.keeper.clone(),
            queue,
            pool,
        }))
    }

    /// Makes sure that the leases are renewed.
    pub fn attend(&self) {
        // Without a runtime nothing renews them; the deadline still holds.
        let _ = self.keeper.start_driver();
        if self.keeper.store.is_some() {
            self.keeper.watch_driver();
        }
    }
}

/// Limits.
impl KeeperHandle {
    /// Whether [`register`](Self::register) would accept the limit.
    #[cfg(feature = "config")]
    pub fn check(&self, limit: &Limit) -> Result<(), ConfigError> {
        let checked = (self.keeper).peek(|core| core.context().registry.check(limit));
        checked.map(drop)
    }

    /// Checks and registers a limit. Returns its id, and its meter, which never changes.
    pub fn register(&self, limit: &Limit) -> Result<(LimitId, Arc<LimitMeter>), ConfigError> {
        let meter = self.meter_for(limit);
        let step = |core: &mut Core| core.register(limit, &meter);
        let (number, meter) = self.declare(limit.is_divided(), step)?;
        meter.expect(limit, self.keeper.store.is_some());
        Ok((number, meter))
    }

    /// A step that declares limits. Replicas that divide one connect before their first request, so that they are counted.
    fn declare<R>(&self, is_divided: bool, step: impl FnOnce(&mut Core) -> R) -> R {
        if is_divided {
            self.act(step)
        } else {
            self.keeper.with(step)
        }
    }

    /// Updates all limits, or fails and updates none.
    pub fn update(&self, limits: &[&Limit]) -> Result<(), ConfigError> {
        let limits = limits.iter().map(|limit| (*limit, self.meter_for(limit)));
        let limits: Vec<_> = limits.collect();
        let is_divided = limits.iter().any(|(limit, _)| limit.is_divided());
        self.declare(is_divided, |core| core.update(&limits))?;
        for (limit, meter) in &limits {
            meter.expect(limit, self.keeper.store.is_some());
        }
        Ok(())
    }

    /// The meter of a limit, created if necessary: without a lock, since a recorder is foreign code.
    fn meter_for(&self, limit: &Limit) -> Arc<LimitMeter> {
        let known = self.keeper.peek(|core| {
            let registry = &core.context().registry;
            Some(registry.meter(registry.id_of(limit.name())?).clone())
        });
        known.unwrap_or_else(|| Arc::new(LimitMeter::new(&self.keeper.namespace, limit.name())))
    }

    /// The limit of this name with its latest values, without overrides.
    pub fn updated(&self, limit_name: &str) -> Option<Limit> {
        self.keeper.peek(|core| {
            let registry = &core.context().registry;
            Some(Limit::clone(registry.updated(registry.id_of(limit_name)?)))
        })
    }

    pub fn mode_of(&self, limit: LimitId) -> Mode {
        (self.keeper).peek(|core| core.context().registry.limit(limit).current_mode())
    }

    /// Whether an operator has paused the limit.
    pub fn is_paused(&self, limit: LimitId) -> bool {
        let until = (self.keeper).peek(|core| core.context().registry.paused_until(limit));
        until.is_some_and(|until| until > Instant::now())
    }

    /// The record of overrides in a process without a store.
    pub fn local_record(&self) -> Option<&LocalRecord> {
        self.record.as_ref()
    }

    /// Replaces the overrides in force.
    pub fn steer(&self, overrides: InForce) {
        let overrides = Arc::new(overrides);
        // Without a runtime nothing ends them in time; the next driver does.
        self.act(|core| core.steer(overrides));
    }

    #[cfg(feature = "config")]
    pub fn set_values(&self, limit_name: &str, values: &HashMap<Key, Option<LimitValue>>) {
        (self.keeper).with(|core| core.set_values(limit_name, values));
    }
}

impl KeeperHandle {
    /// The name of this limiter in the store, also for operators.
    pub fn replica(&self) -> ReplicaId {
        self.keeper.replica
    }

    pub fn status(&self) -> Status {
        self.keeper.peek(Core::status)
    }

    pub async fn usage(
        &self,
        limit: LimitId,
        key: (&Key, Option<LimitValue>),
    ) -> Result<Usage, AcquireErrorKind> {
        let (inquiry, answer) = Inquiry::new();
        (self.keeper).with(|core| core.inquire(limit, key, inquiry));
        self.keeper.start_driver()?;
        self.keeper.watch_driver();
        answer.await.map_err(|_| AcquireErrorKind::Unavailable)
    }

    pub async fn shutdown(&self, grace: Duration) -> ShutdownReport {
        let report = self.keeper.shutdown(grace).await;
        if report.unconfirmed > 0 {
            (self.keeper).with(|core| core.log_unconfirmed(report.unconfirmed));
        }
        if let Some(task) = self.keeper.control.get() {
            task.leave().await;
        }
        report
    }

    /// Starts listening to operators, for as long as the limiter or a permit exists.
    pub fn set_control_task(&self, task: Arc<dyn ControlTask>) {
        let _ = self.keeper.control.set(task);
    }
}

/// The view of operators.
impl KeeperHandle {
    /// The lengths of a lease and of the heartbeat of a waiter.
    pub fn lease_and_waiter_ttl(&self) -> (Duration, Duration) {
        self.keeper.peek(|core| {
            let settings = &core.context().settings;
            (settings.lease, settings.waiter_ttl)
        })
    }

    /// Whether newcomers under strict limits wait because permits return to the store.
    pub fn is_recovering(&self) -> bool {
        self.keeper.peek(|core| core.context().is_recovering())
    }

    pub fn limit_of(&self, limit_name: &str) -> Option<LimitId> {
        (self.keeper).peek(|core| core.context().registry.id_of(limit_name))
    }

    /// All limits, by id.
    pub fn limits(&self) -> Vec<LimitLook> {
        self.keeper.peek(Core::all_limits)
    }

    /// The latest refusals of a limit, oldest first.
    pub fn refusals(&self, limit: LimitId) -> Vec<RefusalNote> {
        self.keeper.peek(|core| core.refusals(limit))
    }

    /// The overrides in force.
    pub fn overrides(&self) -> Arc<InForce> {
        (self.keeper).peek(|core| core.context().registry.overrides().clone())
    }

    /// How far tenants of a key are behind. See [`Core::behind_us`].
    pub fn behind_us(&self, limit: LimitId, key: &Key, tenants: &[TenantId]) -> Vec<Option<u64>> {
        (self.keeper).peek(|core| core.behind_us(limit, key, tenants))
    }

    /// Copies a few queues and entries. See [`Core::look`].
    pub fn look(&self, from: Cursor, which: &Which, seen: &mut Vec<Seen>) -> Option<Cursor> {
        let now = Instant::now();
        (self.keeper).peek(|core| core.look(from, (which, now), seen))
    }
}

/// The limiter is dropped: the driver ends once everything is sent to the store.
impl Drop for KeeperHandle {
    fn drop(&mut self) {
        let has_thread = self.keeper.home.has_thread();
        self.keeper.with_driver(|core, driver| {
            core.orphan();
            // A remaining driver reports them if it ends first. A dedicated thread may end unseen, with the process.
            if driver.is_absent() || has_thread {
                core.log_unreleased();
            }
        });
    }
}

/// The pool of one key, for a semaphore bound to that key. The queue lives as long as this.
pub(crate) struct BoundPool {
    keeper: Arc<Keeper>,
    queue: QueueId,
    pool: Arc<Pool>,
}

impl BoundPool {
    /// An idle slot that may be used now. Not for a request whose own value of the limit differs from the latest.
    pub fn take(
        &self,
        keeper: &Arc<KeeperHandle>,
        own_value: Option<LimitValue>,
    ) -> Option<Granted> {
        let lease = self.pool.take_unseen(own_value)?;
        let taken = Taken {
            leases: Leases::One(Tenure::of(lease)),
            waited: Duration::ZERO,
            place: 0,
            notes: None,
        };
        Some(Granted {
            keeper: keeper.clone(),
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
        (self.keeper).with(|core| core.unbind(self.queue, &self.pool));
    }
}
