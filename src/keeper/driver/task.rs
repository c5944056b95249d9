//! The driver's task, and the watchdogs that see to it that it runs.

use std::panic::resume_unwind;
use std::{any::Any, panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt;
use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    task::yield_now,
    time::{Instant, sleep},
};

use super::{ConnectError, KeptSession, Start, WatchdogFinding, check_interval};
use crate::{
    error::AcquireErrorKind,
    keeper::{core::Core, lock::Keeper},
    repoll::Repoll,
    store::{
        ExchangeError, Failure, Session,
        in_flight::{InFlight, News},
    },
};

/// Checks without a request that waits, after which a watchdog ends: a busy limiter does not start one for each request.
const IDLE_CHECKS: u32 = 16;

impl Keeper {
    /// Starts the driver if it is needed and not there, or does not run.
    pub(in crate::keeper) fn start_driver(self: &Arc<Self>) -> Result<(), AcquireErrorKind> {
        let runtime = match &self.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => Handle::try_current().map_err(|_| AcquireErrorKind::NoRuntime),
        };
        let start = self.with_driver(|core, driver, now| driver.start(core, runtime, now));
        let Some(Start {
            runtime,
            generation,
            work,
        }) = start?
        else {
            return Ok(());
        };
        let gone = Gone {
            keeper: self.clone(),
            generation,
        };
        let session = self.kept_session(&runtime);
        let session = session.or_else(|| self.store.as_ref().map(|store| store.open()));
        let driver = run(gone, session, runtime.id(), work);
        match runtime.spawn(driver).is_finished() {
            // The runtime has been shut down, and has dropped the task.
            true => Err(AcquireErrorKind::NoRuntime),
            false => {
                self.control.run_on(&runtime);
                Ok(())
            }
        }
    }

    /// Sees to it that the driver does not hold up a request that waits on this runtime.
    pub(in crate::keeper) fn watch_driver(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let (id, flavor) = (runtime.id(), runtime.runtime_flavor());
        if self.thread.is_some() || !self.driver(|driver| driver.watch(id, flavor)) {
            return;
        }
        let watch = WatchGuard {
            keeper: self.clone(),
            runtime: id,
        };
        // If the runtime has ended meanwhile, the task is dropped, and with it what it watches.
        runtime.spawn(watch_over(watch));
    }

    /// Hears from the store for the first time. That it cannot be reached is no error: then the fallbacks apply.
    pub async fn greet(self: &Arc<Self>) -> Result<Option<String>, ConnectError> {
        let keeper = self.clone();
        let greeting = async move { keeper.greet_here().await };
        match &self.runtime {
            // It runs in any case, and so the session can stay there.
            Some(runtime) if self.thread.is_some() => match runtime.spawn(greeting).await {
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

    async fn greet_here(self: &Arc<Self>) -> Result<Option<String>, ConnectError> {
        let Some(store) = &self.store else {
            return Ok(None);
        };
        let mut in_flight = InFlight::new(Some(store.open()), self.store_meter.clone());
        in_flight.send(self.driver_step(|core, _, now| core.hello(now)));
        let (number, outcome) = loop {
            match in_flight.next(None).await {
                News::Over(number, outcome) => break (number, outcome),
                News::Event(event) => self.with(|core, now| core.on_event(&event, now)),
                News::Due => {}
            }
        };
        let unreached = self.with(|core, now| match outcome {
            Ok(reply) => {
                core.on_reply(number, reply, now);
                Ok(None)
            }
            Err(refused) if refused.failure == Failure::Refused => {
                Err(ConnectError::Store(refused.error))
            }
            Err(unanswered) => {
                let error = unanswered.error;
                let message = error.message.clone();
                // No retry: no request waits for it, and the first request should not have to.
                let failure = Failure::TimedOut;
                core.on_failure(number, &ExchangeError { failure, error }, now);
                Ok(Some(message))
            }
        })?;
        if self.peek(Core::status).store_up {
            self.keep_for_driver(in_flight.into_session());
        } else {
            // It will notice when the store is there. The caller awaits on a runtime, or will start it later.
            let _ = self.start_driver();
        }
        // The caller may leave this runtime for good: what ran for a session that is not kept ends now.
        yield_now().await;
        Ok(unreached)
    }

    /// Keeps a session for the driver, if that is likely to run where the session is.
    fn keep_for_driver(&self, session: Option<Box<dyn Session>>) {
        let here = Handle::try_current().ok();
        let kept = here.zip(session);
        let kept = kept.map(|(here, session)| KeptSession::new(session, &here));
        let runtime = self.runtime.as_ref();
        self.keep_session(kept.filter(|kept| runtime.is_none_or(|runtime| kept.is_for(runtime))));
    }
}

/// Runs until nothing is left to do for a keeper that is not used any more, until another driver takes its place, or until its
/// runtime ends.
async fn run(
    gone: Gone,
    session: Option<Box<dyn Session>>,
    runtime: runtime::Id,
    work: Arc<Notify>,
) {
    let Gone { keeper, generation } = &gone;
    let driver = Repoll::new(drive(keeper, session, *generation, &work));
    note_panic(keeper, runtime, driver).await;
}

async fn drive(
    keeper: &Arc<Keeper>,
    session: Option<Box<dyn Session>>,
    generation: u64,
    work: &Notify,
) {
    let mut in_flight = InFlight::new(session, keeper.store_meter.clone());
    // For the task that has started it.
    let mut watched = false;
    let next_step =
        || keeper.driver_step(|core, driver, now| driver.next_step(core, generation, now));
    while let Some((exchanges, until)) = next_step() {
        exchanges
            .into_iter()
            .for_each(|outgoing| in_flight.send(outgoing));
        if !std::mem::replace(&mut watched, true) {
            keeper.watch_driver();
        }
        let news = tokio::select! {
            biased;
            news = in_flight.next(until) => news,
            () = work.notified() => continue,
        };
        keeper.driver_step(|core, driver, now| {
            // One that was dismissed knows nothing that counts.
            if !driver.is_present(generation) {
                return;
            }
            match news {
                News::Event(event) => core.on_event(&event, now),
                News::Over(number, Ok(reply)) => core.on_reply(number, reply, now),
                News::Over(number, Err(error)) => core.on_failure(number, &error, now),
                // The next step does what is due.
                News::Due => {}
            }
        });
    }
}

/// Tells the keeper when the driver ends, however it ends, even if it was never polled.
struct Gone {
    keeper: Arc<Keeper>,
    generation: u64,
}

impl Drop for Gone {
    fn drop(&mut self) {
        self.keeper
            .with_driver(|core, driver, now| driver.on_gone(core, self.generation, now));
    }
}

/// A watchdog: a task on each runtime from which requests wait, which makes sure that the driver runs.
///
/// It costs a timer a few times in a `store_timeout` while requests wait, however many they are, and ends soon after the
/// last one.
async fn watch_over(watch: WatchGuard) {
    let WatchGuard { keeper, runtime } = &watch;
    note_panic(keeper, *runtime, check_until_idle(keeper)).await;
}

async fn check_until_idle(keeper: &Arc<Keeper>) {
    let interval = keeper.peek(check_interval);
    let mut idle = 0;
    while idle < IDLE_CHECKS {
        let from = Instant::now();
        sleep(interval).await;
        if from.elapsed() > 2 * interval {
            // The whole process stood still: the driver has had no chance to run either.
            continue;
        }
        idle = match keeper.with_driver(|core, driver, now| driver.check_driver(core, now)) {
            WatchdogFinding::Idle => idle + 1,
            WatchdogFinding::Well => 0,
            WatchdogFinding::Probed(work) => {
                work.notify_one();
                0
            }
            WatchdogFinding::Late => {
                // If it cannot be started here, requests find that out when they ask.
                let _ = keeper.start_driver();
                0
            }
        };
    }
}

/// Ends with the watchdog, even if that is dropped with its runtime before it was ever polled.
struct WatchGuard {
    keeper: Arc<Keeper>,
    runtime: runtime::Id,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.keeper.driver(|driver| driver.unwatch(self.runtime));
    }
}

/// Runs a task of the keeper on this runtime. If it panics, the runtime may be unfit for it.
async fn note_panic(keeper: &Keeper, runtime: runtime::Id, task: impl Future<Output = ()>) {
    if let Err(panic) = AssertUnwindSafe(task).catch_unwind().await {
        let lacks = lacks_something(&*panic);
        keeper.driver(|driver| driver.note_panic(runtime, lacks));
    }
}

/// Whether a panic is tokio's, for want of a timer or of IO. There is no other way to ask a runtime for them.
fn lacks_something(panic: &(dyn Any + Send)) -> bool {
    const WORDS: &str = "A Tokio 1.x context was found, but";
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| Some(panic.downcast_ref::<String>()?.as_str()));
    text.is_some_and(|text| text.starts_with(WORDS))
}
