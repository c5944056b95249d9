//! The driver: the one task that sends, receives and sleeps for a keeper (`task`). Here is what is decided about it under
//! the keeper's lock: when it is started, how it is woken, and what is done if it does not run.
//!
//! It is a task on the runtime of the task that needed it first (or on the one that the limiter was given), and
//! requests wait on any runtime. If the driver's runtime ends, the task is dropped and the next request starts another
//! one. A runtime may also be blocked, or not be driven any more: then the driver is *late*. A watchdog on the runtime of
//! a request that waits finds out, and starts another driver there. The late one is dismissed: it ends when it runs
//! again, and its connections with it. Where the driver's place was given, it is not moved: the fallback of each limit
//! applies until it runs.

mod task;

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    time::Instant,
};

use super::{context::earliest, core::Core};
use crate::{
    error::AcquireErrorKind,
    store::{Session, StoreError, in_flight::Outgoing},
};

/// Runtimes that are remembered as unfit for a driver.
const MAX_UNFIT: usize = 16;
/// Time before a driver that has panicked is started again on the same runtime.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Time for which a session may lie unused: later a firewall may have forgotten its connection, and the first request
/// would wait for nothing.
const FRESH: Duration = Duration::from_secs(10);

/// Why a store cannot be used.
pub(crate) enum ConnectError {
    /// It refuses to work.
    Store(StoreError),
    /// There is no runtime with timers and IO.
    NoRuntime,
}

/// The driver, as the keeper's lock knows it.
pub(super) struct DriverState {
    stage: DriverStage,
    /// Whether it may run on the runtime of any request.
    is_movable: bool,
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

#[derive(Clone, Copy)]
enum DriverStage {
    Absent,
    /// It was started or woken at this moment, and has not taken a step since.
    Woken(Instant),
    /// Waits for an answer, an event, a nudge, or this moment.
    Parked(Option<Instant>),
}

/// A driver to be spawned.
struct Start {
    runtime: Handle,
    generation: u64,
    work: Arc<Notify>,
}

/// How long a driver may take to run once it is due, by what is to be done then.
#[derive(Clone, Copy)]
struct Patience {
    /// After this it is replaced.
    replace: Duration,
    /// After this requests do not wait for it any longer.
    give_up: Duration,
    /// Between two replacements.
    between: Duration,
}

/// How often a watchdog checks the driver.
fn check_interval(core: &Core) -> Duration {
    core.settings().store_timeout / 8
}

impl Patience {
    /// A request waits no longer than `store_timeout` for the store, nor for the driver.
    fn of(core: &Core) -> Self {
        let store_timeout = core.settings().store_timeout;
        Self {
            replace: store_timeout / 4,
            give_up: store_timeout * 3 / 4,
            between: 4 * store_timeout,
        }
    }
}

/// The finding of a watchdog.
enum WatchdogFinding {
    /// No request waits.
    Idle,
    Well,
    /// The driver may be late: to find out, it is woken.
    Probed(Arc<Notify>),
    /// Another driver is to be started.
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

    /// For how long it has been due and not run.
    fn late(&self, core: &Core, now: Instant) -> Duration {
        let due = match self.stage {
            DriverStage::Absent => None,
            DriverStage::Woken(at) => Some(at),
            DriverStage::Parked(until) => earliest(until, core.answer_due()),
        };
        due.map_or(Duration::ZERO, |due| now.saturating_duration_since(due))
    }

    /// Whether the driver is late, and another one may take its place.
    fn is_replaceable(&self, core: &Core, now: Instant) -> bool {
        let patience = Patience::of(core);
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

    /// Whether a task of this generation is the present one.
    pub fn is_present(&self, generation: u64) -> bool {
        self.generation == generation && !matches!(self.stage, DriverStage::Absent)
    }

    /// Whether nothing is sent until another one is started.
    pub fn is_absent(&self) -> bool {
        matches!(self.stage, DriverStage::Absent)
    }

    /// Whether a driver is to be started. While the store is not asked, a late one may be the reason.
    pub fn is_needed(&self, core: &Core, now: Instant) -> bool {
        match self.stage {
            DriverStage::Absent => core.is_shared() || core.next_due().is_some(),
            _ => !core.store_is_up() && self.is_replaceable(core, now),
        }
    }

    /// Wakes a parked driver that has to come back earlier than it thought.
    #[inline]
    pub fn nudge(&mut self, core: &Core, now: Instant) -> Option<Arc<Notify>> {
        let DriverStage::Parked(until) = self.stage else {
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

    /// A driver to be spawned, if it is needed and not there, or does not run.
    fn start(
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

    /// The exchanges that the driver has to send now, and when to come back if nothing happens. `None`: it is to end.
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
        self.stage = DriverStage::Parked(until);
        Some((outgoing, until))
    }

    /// The driver ended, or was dropped with its runtime: its exchanges in flight will not be answered.
    fn on_gone(&mut self, core: &mut Core, generation: u64, now: Instant) {
        if self.is_present(generation) {
            self.stage = DriverStage::Absent;
            core.abandon(now);
            core.log_unreleased();
        }
    }

    /// A driver or a watchdog has panicked on this runtime. `lacks`: the runtime has no timer, or no IO.
    fn note_panic(&mut self, runtime: runtime::Id, lacks: bool) {
        let until = (!lacks).then(|| Instant::now() + AFTER_PANIC);
        self.unfit.retain(|(id, _)| *id != runtime);
        if self.unfit.len() == MAX_UNFIT {
            self.unfit.remove(0);
        }
        self.unfit.push((runtime, until));
    }

    /// Whether a watchdog is to be started on this runtime.
    fn watch(&mut self, id: runtime::Id, flavor: runtime::RuntimeFlavor) -> bool {
        // A thread that serves both cannot wait for itself.
        let serves_both = flavor == runtime::RuntimeFlavor::CurrentThread;
        let is_here = self.runtime == Some(id);
        // Where the driver is about to run first, it finds out whether the runtime has a timer.
        let is_pointless =
            is_here && (serves_both || !self.has_run) || self.is_unfit(id, Instant::now());
        if is_pointless || self.watched.contains(&id) {
            return false;
        }
        self.watched.push(id);
        true
    }

    fn unwatch(&mut self, runtime: runtime::Id) {
        self.watched.retain(|id| *id != runtime);
    }

    /// Finds out whether the driver runs. If it may not be replaced, the fallback of each limit decides on requests that
    /// have waited for long enough.
    fn check_driver(&mut self, core: &mut Core, now: Instant) -> WatchdogFinding {
        if !core.has_requests() {
            return WatchdogFinding::Idle;
        }
        if matches!(self.stage, DriverStage::Absent) || self.is_replaceable(core, now) {
            return WatchdogFinding::Late;
        }
        if self.late(core, now) >= Patience::of(core).give_up {
            core.on_stall(now);
        } else if let DriverStage::Parked(_) = self.stage
            && core.awaits_answer_since(now - check_interval(core))
        {
            // A driver that runs takes a step, and one that does not is found out.
            return WatchdogFinding::Probed(self.wake(now));
        }
        WatchdogFinding::Well
    }
}

/// A session that is not polled, and the runtime that its connections belong to.
pub(super) struct KeptSession {
    session: Box<dyn Session>,
    runtime: runtime::Id,
    since: Instant,
}

impl KeptSession {
    fn new(session: Box<dyn Session>, runtime: &Handle) -> Self {
        Self {
            session,
            runtime: runtime.id(),
            since: Instant::now(),
        }
    }

    fn is_for(&self, runtime: &Handle) -> bool {
        self.runtime == runtime.id()
    }

    /// The session, if a driver on this runtime may go on with it.
    pub fn session(self, runtime: &Handle) -> Option<Box<dyn Session>> {
        let is_fresh = self.since.elapsed() < FRESH;
        (is_fresh && self.is_for(runtime)).then_some(self.session)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::Arc,
        task::{Context, Poll},
    };

    use futures_util::future::BoxFuture;
    use tokio::time::advance;

    use super::*;
    use crate::{
        ledger::{Exchange, Reply},
        store::{Event, StoreError},
    };

    struct Idle;

    impl Session for Idle {
        fn exchange(&mut self, _: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
            unreachable!("nothing is sent")
        }

        fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
            Poll::Pending
        }

        fn disconnect(&mut self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_for_its_own_runtime_and_not_for_long() {
        let here = Handle::current();
        let other = tokio::runtime::Builder::new_current_thread();
        let other = { other }.build().expect("a runtime");
        for (runtime, idle, is_kept) in [
            (&here, FRESH - Duration::from_millis(1), true),
            (&here, FRESH, false),
            (other.handle(), Duration::ZERO, false),
        ] {
            let kept = KeptSession::new(Box::new(Idle), &here);
            advance(idle).await;
            assert_eq!(kept.session(runtime).is_some(), is_kept);
        }
        other.shutdown_background();
    }
}
