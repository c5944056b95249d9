//! The lock around the state machine, and who calls in.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Waker,
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
    task::yield_now,
    time::Instant,
};
use tracing::Instrument;

use super::{
    Bounds, Core, Lease, Leg, Part, Settings,
    demand::Taken,
    driver,
    greeting::Greeting,
    rates::Fee,
    send::Outgoing,
    under_way::{News, UnderWay},
};
use crate::{
    error::{AcquireErrorKind, ConfigError},
    key::Key,
    limit::{Limit, MAX_WAIT},
    status::{ShutdownReport, Status, Usage},
    store::{Session, Store, StoreError},
    telemetry::{LimitMeter, StoreMeter},
};

/// A keeper: its state machine behind a lock that is only ever held for a moment, and its driver.
pub(crate) struct Shared {
    locked: Mutex<Locked>,
    store: Option<Arc<dyn Store>>,
    greeting: Mutex<Option<Greeting>>,
    runtime: Option<Handle>,
    /// Wakes the driver.
    work: Notify,
    /// Wakes a shutdown.
    changed: Notify,
}

struct Locked {
    core: Core,
    driver: Driver,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Absent,
    Running,
    /// Waits for an answer, an event, a nudge, or this moment.
    Parked(Option<Instant>),
}

impl Shared {
    pub(crate) fn new(
        settings: Settings,
        store: Option<Arc<dyn Store>>,
        runtime: Option<Handle>,
    ) -> Arc<Self> {
        let core = Core::new(settings, store.is_some(), Instant::now());
        Arc::new(Self {
            locked: Mutex::new(Locked {
                core,
                driver: Driver::Absent,
            }),
            store,
            greeting: Mutex::default(),
            runtime,
            work: Notify::new(),
            changed: Notify::new(),
        })
    }

    /// Hears from the store for the first time. That it cannot be reached is no error: then the policies apply.
    pub(crate) async fn greet(self: &Arc<Self>) -> Result<(), StoreError> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let mut under_way = UnderWay::new(Some(store.open()), self.store_meter());
        under_way.send(self.with(Core::hello));
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
            Err((error, _)) => Err(error),
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
    fn session(&self, runtime: &Handle) -> Option<Box<dyn Session>> {
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

    pub(crate) fn register(&self, limit: &Limit) -> Result<usize, ConfigError> {
        self.lock().core.register(limit)
    }

    pub(crate) fn meter(&self, limit: usize) -> Arc<LimitMeter> {
        self.lock().core.meters().limit(limit).clone()
    }

    pub(super) fn store_meter(&self) -> StoreMeter {
        self.lock().core.meters().store.clone()
    }

    /// The legs of a demand as they are taken, from the last to the first, and whose they are.
    pub(super) fn in_order(&self, legs: Vec<Leg>) -> Vec<(Part, Leg)> {
        self.lock().core.in_order(legs)
    }

    pub(super) fn part_of(&self, limit: usize, key: &Key) -> Part {
        self.lock().core.part_of(limit, key)
    }

    pub(super) fn note_admissions(&self, legs: &[(Part, Leg)], taken: &Taken) {
        self.lock().core.note_admissions(legs, taken);
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
    pub(super) fn refund(&self, fee: Fee) {
        self.with(|core, now| core.refund_at(fee, now));
    }

    /// As if it had not been taken.
    pub(super) fn give_back(&self, taken: Taken) {
        self.untake(taken.leases.all());
        let fees = taken.notes.map(|notes| notes.fees);
        fees.into_iter()
            .flatten()
            .rev()
            .for_each(|fee| self.refund(fee));
    }

    pub(crate) fn update(&self, limits: &[&Limit]) -> Result<(), ConfigError> {
        self.with(|core, now| core.update(limits, now))
    }

    pub(crate) fn status(&self) -> Status {
        self.lock().core.status()
    }

    pub(crate) async fn usage(
        self: &Arc<Self>,
        limit: usize,
        key: Key,
    ) -> Result<Usage, AcquireErrorKind> {
        let told: oneshot::Receiver<Usage> = self.with(|core, now| core.inquire(limit, key, now));
        self.start_driver()?;
        told.await.map_err(|_| AcquireErrorKind::Unavailable)
    }

    pub(crate) async fn shutdown(self: &Arc<Self>, deadline: Duration) -> ShutdownReport {
        // Without it nobody tells the store. If there is no runtime, leases have to end by themselves.
        let _ = self.start_driver();
        let (refused, held) = self.with(|core, _| (core.close(), core.status().held));
        let until = Instant::now() + deadline.min(MAX_WAIT);
        self.wait_for(until, |core| core.holds_nothing()).await;
        let lost = self.with(|core, _| core.lose_all());
        let store_timeout = self.lock().core.settings().store_timeout;
        self.wait_for(Instant::now() + store_timeout, Core::is_quiet)
            .await;
        ShutdownReport {
            refused,
            returned: held.saturating_sub(lost),
            lost,
        }
    }

    async fn wait_for(&self, until: Instant, done: impl Fn(&Core) -> bool) {
        loop {
            let changed = self.changed.notified();
            if done(&self.lock().core) || tokio::time::timeout_at(until, changed).await.is_err() {
                return;
            }
        }
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
            needs_driver = self.needs_driver(core, *driver);
            result
        });
        (result, needs_driver)
    }

    fn needs_driver(&self, core: &Core, driver: Driver) -> bool {
        driver == Driver::Absent && (self.store.is_some() || core.next_due().is_some())
    }

    fn with_driver<R>(&self, step: impl FnOnce(&mut Core, &mut Driver, Instant) -> R) -> R {
        let now = Instant::now();
        let mut locked = self.lock();
        let Locked { core, driver, .. } = &mut *locked;
        let result = step(core, driver, now);
        let (wakers, old_wakers) = core.take_wakers();
        let closing = core.is_closing();
        let nudge = locked.wants_nudge(now);
        drop(locked);
        if nudge {
            self.work.notify_one();
        }
        if closing {
            self.changed.notify_waiters();
        }
        wakers.into_iter().for_each(Waker::wake);
        drop(old_wakers);
        result
    }

    /// Starts the driver if it is needed and not there. Its runtime may have gone since it was last used.
    pub(crate) fn start_driver(self: &Arc<Self>) -> Result<(), AcquireErrorKind> {
        let mut locked = self.lock();
        if !self.needs_driver(&locked.core, locked.driver) {
            return Ok(());
        }
        let runtime = match &self.runtime {
            Some(runtime) => runtime.clone(),
            None => Handle::try_current().map_err(|_| AcquireErrorKind::NoRuntime)?,
        };
        locked.driver = Driver::Running;
        // An application may have several limiters: this tells whose store it is.
        let namespace = &*locked.core.settings().namespace;
        let span = tracing::info_span!("turnstile", namespace);
        drop(locked);
        let session = self.session(&runtime);
        let driver = driver::run(driver::Gone(self.clone()), session).instrument(span);
        match runtime.spawn(driver).is_finished() {
            // The runtime has been shut down, and has dropped the task.
            true => Err(AcquireErrorKind::NoRuntime),
            false => Ok(()),
        }
    }

    /// What the driver has to send now, and when to come back if nothing happens. `None`: it may end.
    pub(super) fn next_step(&self) -> Option<(Vec<Outgoing>, Option<Instant>)> {
        self.with_driver(|core, driver, now| {
            core.on_time(now);
            if core.is_over() {
                return None;
            }
            let outgoing = std::iter::from_fn(|| core.next_exchange(now)).collect();
            let until = core.next_due();
            *driver = Driver::Parked(until);
            Some((outgoing, until))
        })
    }

    pub(super) fn parking(&self) -> &Notify {
        &self.work
    }

    /// The driver ended, or was dropped with its runtime: what it had under way will not be answered.
    pub(super) fn driver_is_gone(&self) {
        self.with_driver(|core, driver, now| {
            *driver = Driver::Absent;
            core.abandon(now);
        });
    }

    fn lock(&self) -> MutexGuard<'_, Locked> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Locked {
    /// Whether a parked driver has to come back earlier than it thought.
    fn wants_nudge(&mut self, now: Instant) -> bool {
        let Driver::Parked(until) = self.driver else {
            return false;
        };
        let sooner = self
            .core
            .next_due()
            .is_some_and(|due| until.is_none_or(|until| due < until));
        let nudge = sooner || self.core.may_send(now) || self.core.is_over();
        if nudge {
            self.driver = Driver::Running;
        }
        nudge
    }
}
