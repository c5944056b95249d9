//! A keeper: the core behind a lock that is only ever held for a moment. Decisions about the driver are made under the
//! same lock: when to start and to wake it, when it ends (`Core::is_over`), and how to act if it does not run.
//!
//! No foreign code runs under the lock: a step returns its [effects](super::effects), which run afterwards. The lock is
//! taken before the locks of the [pools](crate::leases::Pool) and of labels; under it no other lock is taken.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::{self, Handle, RuntimeFlavor},
    sync::Notify,
    time::Instant,
};

use super::{
    context::{Settings, earliest},
    core::{Core, Outgoing},
    effects::{Effects, LogEvent},
};
use crate::{
    error::AcquireErrorKind,
    home::Home,
    ledger::ReplicaId,
    operable::Control,
    store::{KeptSession, Store},
    sync::LockMarker,
    telemetry::{self, StoreMeter},
};

/// Number of runtimes beyond which those on which a watchdog panicked are not remembered.
const MAX_WATCHED: usize = 64;
/// Pause before a driver that panicked on its own thread is started again.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// A keeper: its state machine behind a lock, and the resources of its driver.
pub(crate) struct Keeper {
    locked: Mutex<Locked>,
    pub store: Option<Arc<dyn Store>>,
    /// The session that connected the limiter, until the driver starts. Never locked together with the state.
    session: Mutex<Option<KeptSession>>,
    /// Where the driver runs.
    pub home: Home,
    pub namespace: String,
    /// The address of the store, for the log.
    address: String,
    /// Names the permits of this process in the store.
    pub replica: ReplicaId,
    pub store_meter: StoreMeter,
    /// Notified after each step of a keeper that is shutting down.
    pub changed: Notify,
    /// Notified when a request may wait while watchdogs rest.
    pub wanted: Notify,
    pub(super) control: Control,
}

/// The state under the lock.
struct Locked {
    core: Core,
    driver: DriverState,
}

impl Keeper {
    pub fn new(settings: Settings, store: Option<Arc<dyn Store>>, home: Home) -> Arc<Self> {
        let (namespace, replica) = (settings.namespace.clone(), settings.replica);
        telemetry::describe(&namespace);
        let store_meter = match store {
            Some(_) => StoreMeter::new(&namespace, settings.parts.count()),
            None => StoreMeter::noop(),
        };
        let core = Core::new(settings, store.is_some(), Instant::now());
        let driver = DriverState::default();
        let address = store.as_ref().map(|store| store.address());
        Arc::new(Self {
            locked: Mutex::new(Locked { core, driver }),
            store,
            session: Mutex::default(),
            home,
            namespace,
            address: address.unwrap_or_default(),
            replica,
            store_meter,
            changed: Notify::new(),
            wanted: Notify::new(),
            control: Control::default(),
        })
    }

    pub(super) fn session(&self) -> MutexGuard<'_, Option<KeptSession>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one step of the core, and then its effects.
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut Core) -> R) -> R {
        self.with_driver(|core, _| step(core))
    }

    /// As [`with`](Self::with), with the driver's state.
    #[inline]
    pub(super) fn with_driver<R>(&self, step: impl FnOnce(&mut Core, &mut DriverState) -> R) -> R {
        // Read before locking, so a step may see time go back by the time it took to lock. Whatever counts from it then
        // ends early, never late.
        let now = Instant::now();
        let (marker, mut locked) = self.lock();
        let Locked { core, driver } = &mut *locked;
        let result = step(core.begin_step(now), driver);
        let (effects, is_ending) = (core.take_effects(), core.context().ending.has_begun());
        let nudge = driver.nudge(core);
        drop((marker, locked));
        self.after_step(effects, is_ending, nudge);
        result
    }

    /// The rest of a step, without the lock. A shutdown is notified of each step. `nudge`: the driver has to wake up
    /// earlier than planned.
    fn after_step(&self, effects: Effects, is_ending: bool, nudge: Option<Arc<Notify>>) {
        if let Some(work) = nudge {
            work.notify_one();
        }
        if is_ending {
            self.changed.notify_waiters();
        }
        let names = (&*self.namespace, &*self.address);
        effects.run(names, &self.store_meter, &self.control);
    }

    /// Reads under the lock, for a moment only.
    pub(super) fn peek<R>(&self, peek: impl FnOnce(&Core) -> R) -> R {
        let (_marker, locked) = self.lock();
        peek(&locked.core)
    }

    /// While the marker lives, no foreign code runs on the thread.
    fn lock(&self) -> (LockMarker, MutexGuard<'_, Locked>) {
        let locked = self.locked.lock().unwrap_or_else(PoisonError::into_inner);
        (LockMarker::new(), locked)
    }
}

/// State of the driver, under the keeper's lock.
#[derive(Default)]
pub(super) struct DriverState {
    stage: DriverStage,
    /// Counts drivers that were started. A driver of an older generation ends as soon as it runs.
    generation: u64,
    /// Wakes the current driver.
    work: Arc<Notify>,
    /// Where the current driver runs.
    runtime: Option<runtime::Id>,
    /// Whether the current driver has taken a step: then its runtime has timers and IO.
    has_run: bool,
    /// The runtime that dropped a driver before its first step: it has ended.
    ended: Option<runtime::Id>,
    /// When a driver that panicked on its own thread may be started again.
    rests_until: Option<Instant>,
    /// Runtimes with a watchdog, or on which one panicked.
    watched: Vec<runtime::Id>,
    /// Whether watchdogs may rest until a request comes.
    is_resting: bool,
}

#[derive(Clone, Copy, Default)]
enum DriverStage {
    #[default]
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
    pub generation: u64,
    pub work: Arc<Notify>,
}

/// Interval between a watchdog's checks.
pub(super) fn check_interval(core: &Core) -> Duration {
    // The resolution of Tokio's timers.
    (core.context().settings.store_timeout / 8).max(Duration::from_millis(1))
}

/// Where a driver panicked.
#[derive(Clone, Copy)]
pub(super) enum Panic {
    Elsewhere,
    /// Or no such thread can be had.
    OnOwnThread,
}

/// The finding of a watchdog.
pub(super) enum WatchdogFinding {
    /// No request waits, no permit is held in the store, and no driver is late.
    Idle,
    /// No request waits, and a driver that is there renews the leases of permits.
    Holding,
    Well,
    /// The driver may be late, and is woken to find out.
    Probed(Arc<Notify>),
    /// There is no driver.
    Gone,
    Late,
}

impl DriverState {
    /// Whether a driver that is due does not run.
    #[inline(never)]
    pub fn is_late(&self, core: &Core) -> bool {
        let due = match self.stage {
            DriverStage::Absent => None,
            DriverStage::Woken(at) => Some(at),
            // Timers that were due earlier are the work of the next step, and an exchange that was has been given more
            // time.
            DriverStage::Parked { since, until } => {
                earliest(until.map(|until| until.max(since)), core.answer_due(since))
            }
        };
        due.is_some_and(|due| core.now() >= due + core.context().settings.store_timeout / 2)
    }

    /// Whether this generation is the current one.
    pub fn is_present(&self, generation: u64) -> bool {
        self.generation == generation && !self.is_absent()
    }

    /// Whether nothing is sent until another driver is started.
    pub fn is_absent(&self) -> bool {
        matches!(self.stage, DriverStage::Absent)
    }

    /// Whether a driver has to be started.
    pub fn is_needed(&self, core: &Core) -> bool {
        self.is_absent() && (core.context().shared || core.next_due().is_some())
    }

    /// Wakes a parked driver that has to run earlier than planned.
    #[inline]
    pub fn nudge(&mut self, core: &Core) -> Option<Arc<Notify>> {
        let DriverStage::Parked { until, .. } = self.stage else {
            return None;
        };
        let due = core.next_due();
        let is_sooner = due.is_some_and(|due| until.is_none_or(|until| due < until));
        (is_sooner || core.may_send() || core.is_over()).then(|| self.wake(core.now()))
    }

    fn wake(&mut self, now: Instant) -> Arc<Notify> {
        self.stage = DriverStage::Woken(now);
        self.work.clone()
    }

    /// The driver takes its next step after this one, and need not be woken for it.
    pub fn goes_on(&mut self, now: Instant) {
        self.stage = DriverStage::Woken(now);
    }

    /// Prepares a driver to be spawned there, if one is needed and none runs.
    pub fn start(
        &mut self,
        core: &Core,
        runtime: Result<runtime::Id, AcquireErrorKind>,
    ) -> Result<Option<Start>, AcquireErrorKind> {
        if !self.is_needed(core) {
            return Ok(None);
        }
        let runtime = runtime?;
        if self.ended == Some(runtime) || self.rests_until.is_some_and(|at| core.now() < at) {
            return Err(AcquireErrorKind::NoRuntime);
        }
        self.generation += 1;
        self.work = Arc::default();
        self.runtime = Some(runtime);
        self.has_run = false;
        Ok(Some(Start {
            generation: self.generation,
            work: self.wake(core.now()),
        }))
    }

    /// The exchanges to send now, and when to return if nothing happens. `None`: the driver should end.
    pub fn next_step(
        &mut self,
        core: &mut Core,
        generation: u64,
    ) -> Option<(Vec<Outgoing>, Option<Instant>)> {
        if !self.is_present(generation) {
            return None;
        }
        self.has_run = true;
        core.on_time();
        if core.is_over() {
            return None;
        }
        let outgoing = std::iter::from_fn(|| core.next_exchange()).collect();
        let (since, until) = (core.now(), core.next_due());
        self.stage = DriverStage::Parked { since, until };
        Some((outgoing, until))
    }

    /// The driver ended, or was dropped with its runtime: its exchanges in flight will stay unanswered.
    pub fn on_gone(&mut self, core: &mut Core, generation: u64, panic: Option<Panic>) {
        if !self.is_present(generation) {
            return;
        }
        self.stage = DriverStage::Absent;
        match panic {
            // Otherwise a watcher that is woken below would start the next driver there, which would be dropped too.
            None if !self.has_run => self.ended = self.runtime,
            None => {}
            Some(Panic::Elsewhere) => core.context_mut().log(LogEvent::DriverPanicked),
            Some(Panic::OnOwnThread) => self.rests_until = Some(core.now() + AFTER_PANIC),
        }
        core.on_driver_gone();
        core.log_unreleased();
    }

    /// Dismisses a driver that is still late, or does not run on this thread, where it would not be watched: another one takes over.
    pub fn dismiss(&mut self, core: &mut Core, thread: Option<runtime::Id>) {
        let is_elsewhere = !self.is_absent() && thread.is_some() && self.runtime != thread;
        if is_elsewhere || self.is_late(core) {
            self.stage = DriverStage::Absent;
            core.on_late_driver(thread.is_some());
        }
    }

    /// Whether to start a watchdog on this runtime.
    pub fn watch(&mut self, runtime: &Handle) -> bool {
        let id = runtime.id();
        // A single-threaded runtime that runs the driver cannot watch it.
        let serves_both = runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let is_here = self.runtime == Some(id);
        // Before its first step the driver itself has to find out whether the runtime has timers.
        let is_pointless = is_here && (serves_both || !self.has_run);
        if is_pointless || self.watched.contains(&id) {
            return false;
        }
        self.watched.push(id);
        true
    }

    /// The watchdog of this runtime is gone. After a panic no other one is started there: the runtime has no timers.
    pub fn unwatch(&mut self, runtime: Option<runtime::Id>, has_panicked: bool) {
        if !has_panicked || self.watched.len() > MAX_WATCHED {
            self.watched.retain(|id| Some(*id) != runtime);
        }
    }

    /// Ends the rest of the watchdogs, since a request may wait. Returns whether they could rest before.
    pub fn end_rest(&mut self) -> bool {
        mem::take(&mut self.is_resting)
    }

    /// Checks that the driver runs while requests wait, permits need it to renew their leases, or it has something to send.
    pub fn check_driver(&mut self, core: &Core) -> WatchdogFinding {
        let (has_requests, is_late) = (core.has_requests(), self.is_late(core));
        if !has_requests && (!core.context().shared || core.holds_nothing() && !is_late) {
            return WatchdogFinding::Idle;
        }
        if self.is_absent() {
            return WatchdogFinding::Gone;
        }
        if is_late {
            return WatchdogFinding::Late;
        }
        if !has_requests {
            self.is_resting = true;
            return WatchdogFinding::Holding;
        }
        if let DriverStage::Parked { .. } = self.stage
            && core.awaits_answer_since(core.now() - check_interval(core))
        {
            // A running driver responds with a step; otherwise the next check finds it late.
            return WatchdogFinding::Probed(self.wake(core.now()));
        }
        WatchdogFinding::Well
    }
}
