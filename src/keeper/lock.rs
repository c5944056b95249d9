//! A keeper: the core behind a lock that is only ever held for a moment. Decisions about the driver are made under the
//! same lock: when to start it, when to wake it, and how to act if it does not run.
//!
//! No foreign code runs under the lock: a step returns its [effects](super::effects), which run afterwards. The lock is
//! taken before the locks of the [pools](crate::leases::Pool) and of labels; under it no other lock is taken.

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    time::Instant,
};

use super::{
    context::{Settings, earliest},
    core::{Core, Outgoing},
    effects::Effects,
};
use crate::{
    error::AcquireErrorKind,
    home::{DedicatedThread, Home},
    ledger::ReplicaId,
    operable::Control,
    store::{KeptSession, Session, Store},
    sync::LockMarker,
    telemetry::{self, History, StoreMeter},
};

/// Number of runtimes remembered as unfit for a driver.
const MAX_UNFIT: usize = 16;
/// Pause before a driver that panicked is restarted on the same runtime.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A keeper: its state machine behind a lock, and the resources of its driver.
pub(crate) struct Keeper {
    locked: Mutex<Locked>,
    pub store: Option<Arc<dyn Store>>,
    /// The session that connected the limiter, until the driver starts. Never locked together with the state.
    session: Mutex<Option<KeptSession>>,
    /// Where the driver runs, if not on the runtime of the first task that needs it.
    pub runtime: Option<Handle>,
    /// Keeps the limiter's dedicated thread alive.
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
        let store_meter = match store {
            Some(_) => StoreMeter::new(&namespace, settings.parts.count()),
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

    /// The kept session, if a driver on this runtime can continue with it.
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

    /// As [`with`](Self::with). Also returns whether a driver must be started because there is none or it is late.
    pub(super) fn with_need<R>(&self, step: impl FnOnce(&mut Core, Instant) -> R) -> (R, bool) {
        self.with_driver(|core, driver, now| {
            let result = step(core, now);
            (result, driver.is_needed(core, now))
        })
    }

    /// As [`with`](Self::with), with the driver's state.
    #[inline]
    pub(super) fn with_driver<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> R {
        // Read before locking, so a step may see time go back by the time it took to lock. Whatever counts from it then
        // ends early, never late.
        let now = Instant::now();
        let mut locked = self.lock();
        let Locked { core, driver } = &mut *locked;
        let result = step(core, driver, now);
        let afterwards = Afterwards {
            keeper: self,
            effects: core.take_effects(),
            is_ending: core.is_ending(),
            is_data_lost: core.take_data_lost(),
            nudge: driver.nudge(core, now),
        };
        drop(locked);
        afterwards.run();
        result
    }

    /// A step of the driver, which also checks for a subscriber of the history.
    pub(super) fn driver_step<R>(
        &self,
        step: impl FnOnce(&mut Core, &mut DriverState, Instant) -> R,
    ) -> R {
        let wanted = History::is_wanted();
        self.with_driver(|core, driver, now| {
            core.set_history_wanted(wanted);
            step(core, driver, now)
        })
    }

    /// Reads under the lock, for a moment only.
    pub(super) fn peek<R>(&self, peek: impl FnOnce(&Core) -> R) -> R {
        peek(&self.lock().core)
    }

    /// Changes the driver's state. Has no effects.
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

/// The rest of a step, to be run without a lock.
#[must_use]
struct Afterwards<'a> {
    keeper: &'a Keeper,
    effects: Effects,
    /// A shutdown has to be notified of each step.
    is_ending: bool,
    /// The store turned out to have lost its data.
    is_data_lost: bool,
    /// The driver has to wake up earlier than planned.
    nudge: Option<Arc<Notify>>,
}

impl Afterwards<'_> {
    fn run(self) {
        if let Some(work) = self.nudge {
            work.notify_one();
        }
        if self.is_ending {
            self.keeper.changed.notify_waiters();
        }
        if self.is_data_lost {
            self.keeper.control.data_lost();
        }
        let Keeper {
            namespace,
            store_meter,
            ..
        } = self.keeper;
        self.effects.run(namespace, store_meter);
    }
}

/// While this guard is held, no foreign code runs on the thread.
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

/// State of the driver, under the keeper's lock.
pub(super) struct DriverState {
    stage: DriverStage,
    /// Whether the driver may run on the runtime of any request.
    is_movable: bool,
    /// Counts drivers that were started. A driver of an older generation ends as soon as it runs.
    generation: u64,
    /// Wakes the current driver.
    work: Arc<Notify>,
    /// Where the current driver runs.
    runtime: Option<runtime::Id>,
    /// Whether the current driver has taken a step: then its runtime has timers and IO.
    has_run: bool,
    /// When a late driver was last replaced.
    replaced: Option<Instant>,
    /// Runtimes on which a driver has panicked, and when it may be restarted there. A runtime without timers or IO
    /// stays unfit.
    unfit: Vec<(runtime::Id, Option<Instant>)>,
    /// Runtimes with a watchdog.
    watched: Vec<runtime::Id>,
}

#[derive(Clone, Copy)]
enum DriverStage {
    Absent,
    /// Started or woken at this moment, and no step taken since.
    Woken(Instant),
    /// Waiting, since its last step, for an answer, an event, a nudge, or a deadline.
    Parked {
        since: Instant,
        until: Option<Instant>,
    },
}

/// A driver to be spawned.
pub(super) struct Start {
    pub runtime: Handle,
    pub generation: u64,
    pub work: Arc<Notify>,
}

/// How late a driver may be once it is due, before each countermeasure.
#[derive(Clone, Copy)]
struct Patience {
    /// Delay after which the driver is replaced.
    replace: Duration,
    /// Delay after which requests stop waiting for the driver.
    give_up: Duration,
    /// Pause between two replacements.
    between: Duration,
}

impl Patience {
    /// A request waits at most `store_timeout`, be it for the store or for the driver.
    fn new(core: &Core) -> Self {
        let store_timeout = core.settings().store_timeout;
        Self {
            replace: store_timeout / 4,
            give_up: store_timeout * 3 / 4,
            between: 4 * store_timeout,
        }
    }
}

/// Interval between a watchdog's checks.
pub(super) fn check_interval(core: &Core) -> Duration {
    core.settings().store_timeout / 8
}

/// The finding of a watchdog.
pub(super) enum WatchdogFinding {
    /// No request waits.
    Idle,
    Well,
    /// The driver may be late, and is woken to find out.
    Probed(Arc<Notify>),
    /// Another driver has to be started.
    Late,
}

impl DriverState {
    pub fn new(is_movable: bool) -> Self {
        Self {
            stage: DriverStage::Absent,
            is_movable,
            generation: 0,
            work: Arc::default(),
            runtime: None,
            has_run: false,
            replaced: None,
            unfit: Vec::new(),
            watched: Vec::new(),
        }
    }

    /// How long the driver has been due without running.
    fn late(&self, core: &Core, now: Instant) -> Duration {
        let due = match self.stage {
            DriverStage::Absent => None,
            DriverStage::Woken(at) => Some(at),
            DriverStage::Parked { since, until } => {
                // An exchange that was due earlier has been given more time.
                earliest(until, core.answer_due(since))
            }
        };
        due.map_or(Duration::ZERO, |due| now.saturating_duration_since(due))
    }

    /// Whether the driver is late and may be replaced.
    fn is_replaceable(&self, core: &Core, now: Instant) -> bool {
        let patience = Patience::new(core);
        let rested = |replaced| now >= replaced + patience.between;
        self.is_movable
            && self.late(core, now) >= patience.replace
            && self.replaced.is_none_or(rested)
    }

    fn is_unfit(&self, runtime: runtime::Id, now: Instant) -> bool {
        let is_it = |(id, until): &(runtime::Id, Option<Instant>)| {
            *id == runtime && until.is_none_or(|until| now < until)
        };
        self.unfit.iter().any(is_it)
    }

    /// Whether this generation is the current one.
    pub fn is_present(&self, generation: u64) -> bool {
        self.generation == generation && !matches!(self.stage, DriverStage::Absent)
    }

    /// Whether nothing is sent until another driver is started.
    pub fn is_absent(&self) -> bool {
        matches!(self.stage, DriverStage::Absent)
    }

    /// Whether a driver has to be started. While the store is not asked, a late driver may be the cause.
    pub fn is_needed(&self, core: &Core, now: Instant) -> bool {
        match self.stage {
            DriverStage::Absent => core.is_shared() || core.next_due().is_some(),
            _ => core.is_any_down() && self.is_replaceable(core, now),
        }
    }

    /// Wakes a parked driver that has to run earlier than planned.
    #[inline]
    fn nudge(&mut self, core: &Core, now: Instant) -> Option<Arc<Notify>> {
        let DriverStage::Parked { until, .. } = self.stage else {
            return None;
        };
        let due = core.next_due();
        let sooner = due.is_some_and(|due| until.is_none_or(|until| due < until));
        if !sooner && !core.may_send(now) && !core.is_over() {
            return None;
        }
        Some(self.wake(now))
    }

    fn wake(&mut self, now: Instant) -> Arc<Notify> {
        self.stage = DriverStage::Woken(now);
        self.work.clone()
    }

    /// Prepares a driver to be spawned, if one is needed and none runs.
    pub fn start(
        &mut self,
        core: &mut Core,
        runtime: Result<Handle, AcquireErrorKind>,
        now: Instant,
    ) -> Result<Option<Start>, AcquireErrorKind> {
        let replaces = match self.stage {
            DriverStage::Absent => false,
            _ => self.is_replaceable(core, now),
        };
        if !replaces && !self.is_needed(core, now) {
            return Ok(None);
        }
        let runtime = runtime?;
        if self.is_unfit(runtime.id(), now) {
            return Err(AcquireErrorKind::NoRuntime);
        }
        if replaces {
            self.replaced = Some(now);
            core.on_replaced_driver(now);
        }
        self.generation += 1;
        self.work = Arc::default();
        self.runtime = Some(runtime.id());
        self.has_run = false;
        Ok(Some(Start {
            runtime,
            generation: self.generation,
            work: self.wake(now),
        }))
    }

    /// The exchanges to send now, and when to return if nothing happens. `None`: the driver should end.
    pub fn next_step(
        &mut self,
        core: &mut Core,
        generation: u64,
        now: Instant,
    ) -> Option<(Vec<Outgoing>, Option<Instant>)> {
        if !self.is_present(generation) {
            return None;
        }
        self.has_run = true;
        core.on_time(now);
        if core.is_over() {
            return None;
        }
        let outgoing = std::iter::from_fn(|| core.next_exchange(now)).collect();
        let until = core.next_due();
        self.stage = DriverStage::Parked { since: now, until };
        Some((outgoing, until))
    }

    /// The driver ended, or was dropped with its runtime: its exchanges in flight will stay unanswered.
    pub fn on_gone(&mut self, core: &mut Core, generation: u64, now: Instant) {
        if self.is_present(generation) {
            self.stage = DriverStage::Absent;
            core.abandon(now);
            core.log_unreleased();
        }
    }

    /// A driver or a watchdog panicked on this runtime. `lacks`: the runtime lacks timers or IO.
    pub fn note_panic(&mut self, runtime: runtime::Id, lacks: bool) {
        let until = (!lacks).then(|| Instant::now() + AFTER_PANIC);
        self.unfit.retain(|(id, _)| *id != runtime);
        if self.unfit.len() == MAX_UNFIT {
            self.unfit.remove(0);
        }
        self.unfit.push((runtime, until));
    }

    /// Whether to start a watchdog on this runtime.
    pub fn watch(&mut self, id: runtime::Id, flavor: runtime::RuntimeFlavor) -> bool {
        // A single-threaded runtime that runs the driver cannot watch it.
        let serves_both = flavor == runtime::RuntimeFlavor::CurrentThread;
        let is_here = self.runtime == Some(id);
        // Before its first step the driver itself has to find out whether the runtime has timers.
        let is_pointless =
            is_here && (serves_both || !self.has_run) || self.is_unfit(id, Instant::now());
        if is_pointless || self.watched.contains(&id) {
            return false;
        }
        self.watched.push(id);
        true
    }

    pub fn unwatch(&mut self, runtime: runtime::Id) {
        self.watched.retain(|id| *id != runtime);
    }

    /// Checks that the driver runs. If a late driver may not be replaced, the fallback of each limit decides on
    /// requests that have waited long enough.
    pub fn check_driver(&mut self, core: &mut Core, now: Instant) -> WatchdogFinding {
        if !core.has_requests() {
            return WatchdogFinding::Idle;
        }
        if matches!(self.stage, DriverStage::Absent) || self.is_replaceable(core, now) {
            return WatchdogFinding::Late;
        }
        if self.late(core, now) >= Patience::new(core).give_up {
            core.on_stall(now);
        } else if let DriverStage::Parked { .. } = self.stage
            && core.awaits_answer_since(now - check_interval(core))
        {
            // A running driver responds with a step; otherwise the next check finds it late.
            return WatchdogFinding::Probed(self.wake(now));
        }
        WatchdogFinding::Well
    }
}
