//! The lock around the state machine, and who calls in.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{runtime::Handle, sync::Notify, task::yield_now, time::Instant};

use super::{
    Bounds, Core, Lease, Leg, Part, Settings,
    demand::Taken,
    driver::lacks_something,
    effects::{self, Effects, Inquiry},
    greeting::Greeting,
    home::{DedicatedThread, Home},
    lifecycle::DriverState,
    rates::Fee,
    under_way::{News, UnderWay},
};
use crate::{
    error::{AcquireErrorKind, ConfigError},
    key::Key,
    limit::{Limit, MAX_WAIT},
    part::PARTS,
    status::{Quota, ShutdownReport, Status, Usage},
    store::{Session, Store, StoreError},
    telemetry::{self, History, LimitMeter, StoreMeter},
};

/// Why a store cannot be used.
pub(crate) enum ConnectError {
    /// It refuses to work.
    Store(StoreError),
    /// There is no runtime with timers and IO.
    NoRuntime,
}

/// A keeper: its state machine behind a lock that is only ever held for a moment, and its driver.
pub(crate) struct Shared {
    locked: Mutex<Locked>,
    pub(super) store: Option<Arc<dyn Store>>,
    greeting: Mutex<Option<Greeting>>,
    /// Where the driver runs, if not on the runtime of whoever needs it.
    pub(super) runtime: Option<Handle>,
    namespace: String,
    store_meter: StoreMeter,
    /// Keeps the limiter's own thread, if it has one.
    thread: Option<Arc<DedicatedThread>>,
    /// Wakes a shutdown.
    changed: Notify,
}

pub(super) struct Locked {
    pub(super) core: Core,
    pub(super) driver: DriverState,
}

impl Shared {
    pub(crate) fn new(settings: Settings, store: Option<Arc<dyn Store>>, home: &Home) -> Arc<Self> {
        telemetry::describe();
        let namespace = settings.namespace.clone();
        let share = settings.part.map(|_| 1.0 / PARTS as f64);
        let store_meter = match store {
            Some(_) => StoreMeter::new(&namespace, share),
            None => StoreMeter::noop(),
        };
        let core = Core::new(settings, store.is_some(), Instant::now());
        Arc::new(Self {
            locked: Mutex::new(Locked {
                core,
                driver: DriverState::default(),
            }),
            store,
            greeting: Mutex::default(),
            runtime: home.runtime(),
            namespace,
            store_meter,
            thread: home.thread(),
            changed: Notify::new(),
        })
    }

    /// Hears from the store for the first time. That it cannot be reached is no error: then the policies apply.
    pub(crate) async fn greet(self: &Arc<Self>) -> Result<(), ConnectError> {
        let shared = self.clone();
        let greeting = async move { shared.greet_here().await };
        match &self.runtime {
            // It runs in any case, and so the session can stay there.
            Some(runtime) if self.has_own_thread() => match runtime.spawn(greeting).await {
                Ok(greeted) => greeted,
                Err(_) => Err(ConnectError::NoRuntime),
            },
            _ if Handle::try_current().is_err() => Err(ConnectError::NoRuntime),
            _ => match AssertUnwindSafe(greeting).catch_unwind().await {
                Ok(greeted) => greeted,
                Err(panic) if lacks_something(&*panic) => Err(ConnectError::NoRuntime),
                Err(panic) => resume_unwind(panic),
            },
        }
    }

    async fn greet_here(self: &Arc<Self>) -> Result<(), ConnectError> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let mut under_way = UnderWay::new(Some(store.open()), self.store_meter());
        under_way.send(self.driver_step(|core, _, now| core.hello(now)));
        let (number, outcome) = loop {
            match under_way.next(None).await {
                News::Over(number, outcome) => break (number, outcome),
                News::Event(event) => self.with(|core, now| core.on_event(&event, now)),
                News::Due => {}
            }
        };
        self.with(|core, now| match outcome {
            Ok(reply) => {
                core.on_reply(number, reply, now);
                Ok(())
            }
            Err((error, _)) if error.is_outage() => {
                // No second try: nobody waits for it, and the first request should not have to.
                core.on_failure(number, &error, true, now);
                Ok(())
            }
            Err((error, _)) => Err(ConnectError::Store(error)),
        })?;
        if self.status().store_up {
            self.keep(under_way.into_session());
        } else {
            // It will notice when the store is there. The caller awaits on a runtime, or will start it later.
            let _ = self.start_driver();
        }
        // The caller may leave this runtime for good: what ran for a session that is not kept ends now.
        yield_now().await;
        Ok(())
    }

    /// Keeps a session for the driver, if that is likely to run where the session is.
    fn keep(&self, session: Option<Box<dyn Session>>) {
        let here = Handle::try_current().ok();
        let greeting = here.zip(session);
        let greeting = greeting.map(|(here, session)| Greeting::new(session, &here));
        let runtime = self.runtime.as_ref();
        let greeting = greeting.filter(|kept| runtime.is_none_or(|runtime| kept.is_for(runtime)));
        *self.greeting() = greeting;
    }

    /// A session for a driver on this runtime.
    pub(super) fn session(&self, runtime: &Handle) -> Option<Box<dyn Session>> {
        let greeting = self.greeting().take();
        let kept = greeting.and_then(|greeting| greeting.session(runtime));
        kept.or_else(|| self.store.as_ref().map(|store| store.open()))
    }

    fn greeting(&self) -> MutexGuard<'_, Option<Greeting>> {
        self.greeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "config")]
    pub(crate) fn set_values(&self, limit_name: &str, values: &HashMap<Key, u32>) {
        self.with(|core, now| core.set_values(limit_name, values, now));
    }

    /// Whether [`register`](Self::register) would take it.
    #[cfg(feature = "config")]
    pub(crate) fn check(&self, limit: &Limit) -> Result<(), ConfigError> {
        self.lock().core.check(limit).map(drop)
    }

    pub(crate) fn register(
        &self,
        limit: &Limit,
        meter: &Arc<LimitMeter>,
    ) -> Result<usize, ConfigError> {
        self.lock().core.register(limit, meter)
    }

    /// Of a limit that is known already, by its name.
    pub(super) fn meter_of(&self, limit_name: &str) -> Option<Arc<LimitMeter>> {
        self.lock().core.meter_of(limit_name)
    }

    pub(crate) fn meter(&self, limit: usize) -> Arc<LimitMeter> {
        self.lock().core.meter(limit)
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(super) fn store_meter(&self) -> StoreMeter {
        self.store_meter.clone()
    }

    /// The legs of a demand as they are taken, from the last to the first, and whose they are.
    pub(super) fn in_order(&self, legs: Vec<Leg>) -> Vec<(Part, Leg)> {
        self.lock().core.in_order(legs)
    }

    pub(super) fn part_of(&self, limit: usize, key: &Key) -> Part {
        self.lock().core.part_of(limit, key)
    }

    pub(super) fn note_admissions(&self, legs: &[(Part, Leg)], taken: &Taken) {
        self.with(|core, _| core.note_admissions(legs, taken));
    }

    pub(super) fn is_rate(&self, limit: usize) -> bool {
        self.lock().core.limits[limit].period().is_some()
    }

    /// Bounds held slots. Without a runtime nobody sees to it.
    pub(super) fn bound(self: &Arc<Self>, leases: &[Arc<Lease>], bounds: Bounds) {
        self.with(|core, now| {
            leases
                .iter()
                .for_each(|lease| core.bound(lease, bounds, now));
        });
        let _ = self.start_driver();
    }

    pub(super) fn release(&self, leases: &[Arc<Lease>]) {
        self.with(|core, now| leases.iter().for_each(|lease| core.release(lease, now)));
    }

    /// Releases slots that were held together.
    pub(super) fn part(&self, leases: &[Arc<Lease>]) {
        self.with(|core, now| leases.iter().for_each(|lease| core.part(lease, now)));
    }

    /// Releases slots as if they had not been taken.
    pub(super) fn untake(&self, leases: &[Arc<Lease>]) {
        self.with(|core, now| leases.iter().for_each(|lease| core.untake(lease, now)));
    }

    /// Gives back what was charged for a request that was refused after all.
    pub(super) fn refund(&self, fee: Fee) -> Option<Quota> {
        self.with(|core, now| core.refund_at(fee, now))
    }

    /// As if it had not been taken.
    pub(super) fn give_back(&self, taken: Taken) {
        self.untake(taken.leases.all());
        let fees = taken.notes.map(|notes| notes.fees);
        for fee in fees.into_iter().flatten().rev() {
            self.refund(fee);
        }
    }

    pub(super) fn update(
        &self,
        limits: &[(&Limit, Arc<LimitMeter>)],
    ) -> (Result<(), ConfigError>, Afterwards<'_>) {
        self.locked_step(|core, _, now| core.update(limits, now))
    }

    pub(crate) fn status(&self) -> Status {
        self.lock().core.status()
    }

    pub(crate) async fn usage(
        self: &Arc<Self>,
        limit: usize,
        key: Key,
    ) -> Result<Usage, AcquireErrorKind> {
        let (inquiry, told) = Inquiry::new();
        self.with(|core, now| core.inquire(limit, &key, inquiry, now));
        self.start_driver()?;
        self.watch_driver();
        told.await.map_err(|_| AcquireErrorKind::Unavailable)
    }

    pub(crate) async fn shutdown(self: &Arc<Self>, deadline: Duration) -> ShutdownReport {
        let (refused, held) = self.with(|core, now| (core.close(now), core.status().held));
        let until = Instant::now() + deadline.min(MAX_WAIT);
        self.wait_for(until, |core| core.holds_nothing()).await;
        let lost = self.with(|core, now| core.lose_all(now));
        let store_timeout = self.lock().core.settings().store_timeout;
        self.wait_for(Instant::now() + store_timeout, Core::is_quiet)
            .await;
        ShutdownReport {
            refused,
            returned: held.saturating_sub(lost),
            lost,
        }
    }

    /// Waits by the driver's timer, since the caller's runtime may have none. Without a driver nothing can be waited for:
    /// then leases have to end by themselves.
    async fn wait_for(self: &Arc<Self>, until: Instant, done: impl Fn(&Core) -> bool) {
        self.with(|core, _| core.set_alarm(Some(until)));
        let is_driven = self.start_driver().is_ok();
        self.watch_driver();
        loop {
            let changed = self.changed.notified();
            if !is_driven || Instant::now() >= until || done(&self.lock().core) {
                break;
            }
            changed.await;
        }
        self.with(|core, _| core.set_alarm(None));
    }

    /// Nobody is left who could ask for anything: the driver ends when all is told.
    pub(super) fn orphan(&self) {
        self.with(|core, _| core.orphan());
    }

    /// Runs one step of the state machine; then, without the lock, wakes whom it concerns.
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut Core, Instant) -> R) -> R {
        self.with_driver(|core, _, now| step(core, now))
    }

    /// As [`with`](Self::with). Tells also whether the driver is needed and not there.
    pub(super) fn with_need<R>(&self, step: impl FnOnce(&mut Core, Instant) -> R) -> (R, bool) {
        let mut needs_driver = false;
        let result = self.with_driver(|core, driver, now| {
            let result = step(core, now);
            needs_driver = self.needs_driver(core, driver, now);
            result
        });
        (result, needs_driver)
    }

    pub(super) fn with_driver<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> R {
        let (result, afterwards) = self.locked_step(step);
        afterwards.run();
        result
    }

    /// Runs one step of the state machine, and returns what is left to be done when no lock is held any more.
    #[inline]
    fn locked_step<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> (R, Afterwards<'_>) {
        let now = Instant::now();
        let mut locked = self.lock();
        let Locked { core, driver, .. } = &mut *locked;
        let result = step(core, driver, now);
        let afterwards = Afterwards {
            shared: self,
            effects: core.take_effects(),
            is_closing: core.is_closing(),
            nudge: locked.nudge(now),
        };
        (result, afterwards)
    }

    /// A step of the driver. A waker or subscriber that panics is reported by the panic hook, and does not stop it.
    pub(super) fn driver_step<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> R {
        let wanted = History::is_wanted();
        let (result, afterwards) = self.locked_step(|core, driver, now| {
            core.set_history_wanted(wanted);
            step(core, driver, now)
        });
        let _ = catch_unwind(AssertUnwindSafe(|| afterwards.run()));
        result
    }

    pub(super) fn has_own_thread(&self) -> bool {
        self.thread.is_some()
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        let locked = self.locked.lock().unwrap_or_else(PoisonError::into_inner);
        Guard {
            _marker: effects::Locked::new(),
            locked,
        }
    }
}

/// What a step leaves to be done when no lock is held.
#[must_use]
pub(super) struct Afterwards<'a> {
    shared: &'a Shared,
    effects: Effects,
    /// A shutdown wants to know of each step.
    is_closing: bool,
    /// The driver has to come back earlier than it thought.
    nudge: Option<Arc<Notify>>,
}

impl Afterwards<'_> {
    pub(super) fn run(self) {
        if let Some(work) = self.nudge {
            work.notify_one();
        }
        if self.is_closing {
            self.shared.changed.notify_waiters();
        }
        let Shared {
            namespace,
            store_meter,
            ..
        } = self.shared;
        self.effects.run(namespace, store_meter);
    }
}

/// While it is held, no foreign code runs on this thread.
pub(super) struct Guard<'a> {
    locked: MutexGuard<'a, Locked>,
    _marker: effects::Locked,
}

impl Deref for Guard<'_> {
    type Target = Locked;

    fn deref(&self) -> &Locked {
        &self.locked
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Locked {
        &mut self.locked
    }
}
