//! A keeper: the core behind a lock that is only ever held for a moment.
//!
//! Nothing foreign runs under the lock: a step returns its [effects](super::effects), which run afterwards. It comes
//! before the locks of the [pools](crate::leases::Pool) and of labels, and no other lock is taken under it.

use std::{
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{runtime::Handle, sync::Notify, time::Instant};

use super::{
    context::Settings,
    core::Core,
    driver::{DriverState, KeptSession},
    effects::Effects,
};
use crate::{
    home::{DedicatedThread, Home},
    ledger::ReplicaId,
    operable::Control,
    part::PARTS,
    store::{Session, Store},
    sync::LockMarker,
    telemetry::{self, History, StoreMeter},
};

/// A keeper: its state machine behind a lock, and what its driver needs.
pub(crate) struct Keeper {
    locked: Mutex<Locked>,
    pub store: Option<Arc<dyn Store>>,
    /// The session that the limiter was connected with, until the driver starts. Never locked together with the state.
    session: Mutex<Option<KeptSession>>,
    /// Where the driver runs, if not on the runtime of the task that needs it.
    pub runtime: Option<Handle>,
    /// Keeps the limiter's own thread, if it has one.
    pub thread: Option<Arc<DedicatedThread>>,
    pub namespace: String,
    /// Names the permits of this process in the store.
    pub replica: ReplicaId,
    pub store_meter: StoreMeter,
    /// Notified after each step of a keeper that is shutting down.
    pub changed: Notify,
    pub(super) control: Control,
}

/// The state under the lock.
struct Locked {
    core: Core,
    driver: DriverState,
}

impl Keeper {
    pub fn new(settings: Settings, store: Option<Arc<dyn Store>>, home: &Home) -> Arc<Self> {
        let (namespace, replica) = (settings.namespace.clone(), settings.replica);
        telemetry::describe(&namespace);
        let share = settings.part.map(|_| 1.0 / PARTS as f64);
        let store_meter = match store {
            Some(_) => StoreMeter::new(&namespace, share),
            None => StoreMeter::noop(),
        };
        let core = Core::new(settings, store.is_some(), Instant::now());
        let runtime = home.runtime();
        let driver = DriverState::new(runtime.is_none());
        Arc::new(Self {
            locked: Mutex::new(Locked { core, driver }),
            store,
            session: Mutex::default(),
            runtime,
            thread: home.thread(),
            namespace,
            replica,
            store_meter,
            changed: Notify::new(),
            control: Control::default(),
        })
    }

    /// Keeps a session for the driver.
    pub(super) fn keep_session(&self, session: Option<KeptSession>) {
        *self.session() = session;
    }

    /// The session that was kept, if a driver on this runtime may go on with it.
    pub(super) fn kept_session(&self, runtime: &Handle) -> Option<Box<dyn Session>> {
        let kept = self.session().take();
        kept.and_then(|kept| kept.session(runtime))
    }

    fn session(&self) -> MutexGuard<'_, Option<KeptSession>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one step of the core, and then its effects.
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut Core, Instant) -> R) -> R {
        self.with_driver(|core, _, now| step(core, now))
    }

    /// As [`with`](Self::with). Returns also whether a driver must be started: there is none, or it is late.
    pub(super) fn with_need<R>(&self, step: impl FnOnce(&mut Core, Instant) -> R) -> (R, bool) {
        self.with_driver(|core, driver, now| {
            let result = step(core, now);
            (result, driver.is_needed(core, now))
        })
    }

    pub(super) fn with_driver<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> R {
        let (result, afterwards) = self.step(step);
        afterwards.run();
        result
    }

    /// A step of the driver. A waker or subscriber that panics is reported by the panic hook, and does not stop it.
    pub(super) fn driver_step<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> R {
        let wanted = History::is_wanted();
        let (result, afterwards) = self.step(|core, driver, now| {
            core.set_history_wanted(wanted);
            step(core, driver, now)
        });
        let _ = catch_unwind(AssertUnwindSafe(|| afterwards.run()));
        result
    }

    /// Runs one step of the core, and returns what is left to be done when no lock is held any more.
    #[inline]
    pub(super) fn step<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> (R, Afterwards<'_>) {
        // Before the lock, so a step may see time go back by the wait for it: what is counted from it ends early, never late.
        let now = Instant::now();
        let mut locked = self.lock();
        let Locked { core, driver } = &mut *locked;
        let result = step(core, driver, now);
        let afterwards = Afterwards {
            keeper: self,
            effects: core.take_effects(),
            is_ending: core.is_ending(),
            nudge: driver.nudge(core, now),
        };
        (result, afterwards)
    }

    /// Reads under the lock, for no longer than a moment.
    pub(super) fn peek<R>(&self, peek: impl FnOnce(&Core) -> R) -> R {
        peek(&self.lock().core)
    }

    /// A change of what is known of the driver, which has no effects.
    pub(super) fn driver<R>(&self, change: impl FnOnce(&mut DriverState) -> R) -> R {
        change(&mut self.lock().driver)
    }

    fn lock(&self) -> KeeperGuard<'_> {
        let locked = self.locked.lock().unwrap_or_else(PoisonError::into_inner);
        KeeperGuard {
            _marker: LockMarker::new(),
            locked,
        }
    }
}

/// The rest of a step, to be run when no lock is held.
#[must_use]
pub(super) struct Afterwards<'a> {
    keeper: &'a Keeper,
    effects: Effects,
    /// A shutdown wants to know of each step.
    is_ending: bool,
    /// The driver has to come back earlier than it thought.
    nudge: Option<Arc<Notify>>,
}

impl Afterwards<'_> {
    pub fn run(self) {
        if let Some(work) = self.nudge {
            work.notify_one();
        }
        if self.is_ending {
            self.keeper.changed.notify_waiters();
        }
        let Keeper {
            namespace,
            store_meter,
            ..
        } = self.keeper;
        self.effects.run(namespace, store_meter);
    }
}

/// While it is held, no foreign code runs on this thread.
struct KeeperGuard<'a> {
    locked: MutexGuard<'a, Locked>,
    _marker: LockMarker,
}

impl Deref for KeeperGuard<'_> {
    type Target = Locked;

    fn deref(&self) -> &Locked {
        &self.locked
    }
}

impl DerefMut for KeeperGuard<'_> {
    fn deref_mut(&mut self) -> &mut Locked {
        &mut self.locked
    }
}
