//! The life of the driver: when it is started, how it is woken, and what is done if it does not run.
//!
//! The driver is a task on the runtime of whoever needed it first (or on the one that the limiter was given), and requests
//! wait on any runtime. If the driver's runtime ends, the task is dropped and the next request starts another one. A
//! runtime may also be blocked, or not be driven any more: then the driver is *late*. A [watchdog](super::watchdog)
//! on the runtime of those who wait finds out, and starts another driver there. The late one is dismissed: it ends when
//! it runs again, and its connections with it. Where the driver's place was given, it is not moved: the fallback of each
//! limit applies until it runs.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    time::Instant,
};

use super::{Core, Shared, driver, line::earliest, send::Outgoing, shared::Locked, watchdog};
use crate::error::AcquireErrorKind;

/// Runtimes that are remembered as unfit for a driver.
const MAX_UNFIT: usize = 16;
/// Time before a driver that has panicked is started again on the same runtime.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// The driver, as the keeper's lock knows it.
#[derive(Default)]
pub(super) struct DriverState {
    stage: Stage,
    /// Of those that were started one after the other. An older one ends as soon as it runs.
    generation: u64,
    /// Wakes the present one.
    work: Arc<Notify>,
    /// Where the present one runs.
    runtime: Option<runtime::Id>,
    /// Whether the present one has taken a step: then its runtime lacks nothing.
    has_run: bool,
    /// When a late one was last replaced.
    replaced: Option<Instant>,
    /// Runtimes on which a driver has panicked, and until when none is started there again. Some have no timer or no
    /// IO, and will never do.
    unfit: Vec<(runtime::Id, Option<Instant>)>,
    /// Runtimes with a watchdog.
    watched: Vec<runtime::Id>,
}

#[derive(Clone, Copy, Default)]
enum Stage {
    #[default]
    Absent,
    /// It was started or woken at this moment, and has not taken a step since.
    Woken(Instant),
    /// Waits for an answer, an event, a nudge, or this moment.
    Parked(Option<Instant>),
}

/// How long a driver may take to run once it is due, by what is to be done then.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// How often a watchdog looks.
    pub(super) look: Duration,
    /// After this it is replaced.
    replace: Duration,
    /// After this requests do not wait for it any longer.
    give_up: Duration,
    /// Between two replacements.
    between: Duration,
}

impl Patience {
    /// A request waits no longer than `store_timeout` for the store, nor for the driver.
    fn new(store_timeout: Duration) -> Self {
        Self {
            look: store_timeout / 8,
            replace: store_timeout / 4,
            give_up: store_timeout * 3 / 4,
            between: 4 * store_timeout,
        }
    }
}

/// What a watchdog finds.
pub(super) enum Finding {
    /// Nobody waits.
    Idle,
    Well,
    /// Another driver is to be started.
    Late,
}

impl DriverState {
    /// For how long it has been due and not run.
    fn late(&self, core: &Core, now: Instant) -> Duration {
        let due = match self.stage {
            Stage::Absent => None,
            Stage::Woken(at) => Some(at),
            Stage::Parked(until) => earliest(until, core.answer_due()),
        };
        due.map_or(Duration::ZERO, |due| now.saturating_duration_since(due))
    }

    fn may_be_replaced(&self, patience: Patience, now: Instant) -> bool {
        self.replaced
            .is_none_or(|replaced| now >= replaced + patience.between)
    }

    fn is_unfit(&self, runtime: runtime::Id, now: Instant) -> bool {
        let is_it = |(id, until): &(runtime::Id, Option<Instant>)| {
            *id == runtime && until.is_none_or(|until| now < until)
        };
        self.unfit.iter().any(is_it)
    }

    /// Whether a task of this generation is the present one.
    fn is_present(&self, generation: u64) -> bool {
        self.generation == generation && !matches!(self.stage, Stage::Absent)
    }
}

impl Locked {
    /// Whom to wake if a parked driver has to come back earlier than it thought.
    #[inline]
    pub(super) fn nudge(&mut self, now: Instant) -> Option<Arc<Notify>> {
        let Stage::Parked(until) = self.driver.stage else {
            return None;
        };
        let due = self.core.next_due();
        let sooner = due.is_some_and(|due| until.is_none_or(|until| due < until));
        if !sooner && !self.core.may_send(now) && !self.core.is_over() {
            return None;
        }
        self.driver.stage = Stage::Woken(now);
        Some(self.driver.work.clone())
    }
}

impl Shared {
    /// Whether a driver is to be started. While the store is not asked, a late one may be the reason.
    pub(super) fn needs_driver(&self, core: &Core, driver: &DriverState, now: Instant) -> bool {
        match driver.stage {
            Stage::Absent => self.store.is_some() || core.next_due().is_some(),
            _ => !core.store_is_up() && self.is_replaceable(core, driver, now),
        }
    }

    /// Whether the driver is late, and another one may take its place.
    fn is_replaceable(&self, core: &Core, driver: &DriverState, now: Instant) -> bool {
        let patience = patience(core);
        self.runtime.is_none()
            && driver.late(core, now) >= patience.replace
            && driver.may_be_replaced(patience, now)
    }

    /// Starts the driver if it is needed and not there, or does not run.
    pub(crate) fn start_driver(self: &Arc<Self>) -> Result<(), AcquireErrorKind> {
        let runtime = match &self.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => Handle::try_current().map_err(|_| AcquireErrorKind::NoRuntime),
        };
        let started = self.with_driver(|core, driver, now| {
            let replaces = match driver.stage {
                Stage::Absent => false,
                _ => self.is_replaceable(core, driver, now),
            };
            if !replaces && !self.needs_driver(core, driver, now) {
                return Ok(None);
            }
            let runtime = runtime?;
            if driver.is_unfit(runtime.id(), now) {
                return Err(AcquireErrorKind::NoRuntime);
            }
            if replaces {
                driver.replaced = Some(now);
                core.on_replaced_driver(now);
            }
            driver.stage = Stage::Woken(now);
            driver.generation += 1;
            driver.work = Arc::default();
            driver.runtime = Some(runtime.id());
            driver.has_run = false;
            Ok(Some((runtime, driver.generation, driver.work.clone())))
        });
        let Some((runtime, generation, work)) = started? else {
            return Ok(());
        };
        let shared = self.clone();
        let id = runtime.id();
        let session = self.session(&runtime);
        let driver = driver::run(driver::Gone { shared, generation }, session, id, work);
        match runtime.spawn(driver).is_finished() {
            // The runtime has been shut down, and has dropped the task.
            true => Err(AcquireErrorKind::NoRuntime),
            false => Ok(()),
        }
    }

    /// What the driver has to send now, and when to come back if nothing happens. `None`: it is to end.
    pub(super) fn next_step(&self, generation: u64) -> Option<(Vec<Outgoing>, Option<Instant>)> {
        self.driver_step(|core, driver, now| {
            if !driver.is_present(generation) {
                return None;
            }
            driver.has_run = true;
            core.on_time(now);
            if core.is_over() {
                return None;
            }
            let outgoing = std::iter::from_fn(|| core.next_exchange(now)).collect();
            let until = core.next_due();
            driver.stage = Stage::Parked(until);
            Some((outgoing, until))
        })
    }

    /// Something that the driver of this generation has learned. One that was dismissed knows nothing that counts.
    pub(super) fn on_news(&self, generation: u64, step: impl FnOnce(&mut Core, Instant)) {
        self.driver_step(|core, driver, now| {
            if driver.is_present(generation) {
                step(core, now);
            }
        });
    }

    /// The driver ended, or was dropped with its runtime: what it had under way will not be answered.
    pub(super) fn driver_is_gone(&self, generation: u64) {
        self.with_driver(|core, driver, now| {
            if driver.is_present(generation) {
                driver.stage = Stage::Absent;
                core.abandon(now);
            }
        });
    }

    /// A driver or a watchdog has panicked on this runtime. `lacks`: the runtime has no timer, or no IO.
    pub(super) fn note_panic(&self, runtime: runtime::Id, lacks: bool) {
        let until = (!lacks).then(|| Instant::now() + AFTER_PANIC);
        let unfit = &mut self.lock().driver.unfit;
        unfit.retain(|(id, _)| *id != runtime);
        if unfit.len() == MAX_UNFIT {
            unfit.remove(0);
        }
        unfit.push((runtime, until));
    }

    /// Sees to it that the driver does not hold up a request that waits on this runtime.
    pub(super) fn watch_driver(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let (id, flavor) = (runtime.id(), runtime.runtime_flavor());
        // A thread that serves both cannot wait for itself.
        let serves_both = flavor == runtime::RuntimeFlavor::CurrentThread;
        {
            let driver = &mut self.lock().driver;
            let is_here = driver.runtime == Some(id);
            // Where the driver is about to run first, it says whether the runtime has a timer.
            let is_pointless = is_here && (serves_both || !driver.has_run)
                || driver.is_unfit(id, Instant::now())
                || self.has_own_thread();
            if is_pointless || driver.watched.contains(&id) {
                return;
            }
            driver.watched.push(id);
        }
        // If the runtime has ended meanwhile, the task is dropped, and with it what it watches.
        runtime.spawn(watchdog::run(watchdog::Watch::new(self.clone(), id)));
    }

    pub(super) fn is_unwatched(&self, runtime: runtime::Id) {
        self.lock().driver.watched.retain(|id| *id != runtime);
    }

    pub(super) fn patience(&self) -> Patience {
        patience(&self.lock().core)
    }

    /// Looks whether the driver runs. If it may not be replaced, those who have waited for long enough go by the fallbacks
    /// of their limits.
    pub(super) fn look_after_driver(&self) -> Finding {
        let (finding, probed) = self.with_driver(|core, driver, now| {
            if !core.has_requests() {
                return (Finding::Idle, None);
            }
            let patience = patience(core);
            if matches!(driver.stage, Stage::Absent) || self.is_replaceable(core, driver, now) {
                return (Finding::Late, None);
            }
            if driver.late(core, now) >= patience.give_up {
                core.on_stall(now);
            } else if let Stage::Parked(_) = driver.stage
                && core.awaits_answer_since(now - patience.look)
            {
                // A driver that runs takes a step, and one that does not is found out.
                driver.stage = Stage::Woken(now);
                return (Finding::Well, Some(driver.work.clone()));
            }
            (Finding::Well, None)
        });
        if let Some(work) = probed {
            work.notify_one();
        }
        finding
    }
}

fn patience(core: &Core) -> Patience {
    Patience::new(core.settings().store_timeout)
}
