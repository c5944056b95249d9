//! The driver: the one task that sends, receives and sleeps for a keeper; the exchanges that it has in flight; and the
//! watchdogs that see to it that it runs. What is decided about it under the lock is in `lock.rs`.
//!
//! It is a task on the runtime of the task that needed it first (or on the one that the limiter was given), and
//! requests wait on any runtime. If the driver's runtime ends, the task is dropped and the next request starts another
//! one. A runtime may also be blocked, or not be driven any more: then the driver is *late*. A watchdog on the runtime of
//! a request that waits finds out, and starts another driver there. The late one is dismissed: it ends when it runs
//! again, and its connections with it. Where the driver's place was given, it is not moved: the fallback of each limit
//! applies until it runs.

use std::{
    any::Any,
    future::poll_fn,
    panic::{AssertUnwindSafe, resume_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{self, BoxFuture},
};
use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    task::yield_now,
    time::{Instant, Sleep, sleep},
};

use super::{
    context::STOOD_STILL,
    core::{Core, ExchangeId, Outgoing},
    lock::{Keeper, Start, WatchdogFinding, check_interval},
};
use crate::{
    error::AcquireErrorKind,
    ledger::Reply,
    repoll::Repoll,
    store::{Event, ExchangeError, Failure, KeptSession, Session, StoreError},
    sync::shielded,
    telemetry::StoreMeter,
};

/// Checks without a request that waits, after which a watchdog ends: a busy limiter does not start one for each request.
const IDLE_CHECKS: u32 = 16;

/// An exchange with at least this many ledgers is sent before a reply that has arrived is processed, so that the store works
/// while we do. Two short ones had better go out together: then the store reads and answers, and we wake up, once for both.
const LONG: usize = 16;

/// Why a store cannot be used.
pub(crate) enum ConnectError {
    /// It refuses to work.
    Store(StoreError),
    /// There is no runtime with timers and IO.
    NoRuntime,
}

impl Keeper {
    /// Starts the driver if it is needed and not there, or does not run.
    pub(super) fn start_driver(self: &Arc<Self>) -> Result<(), AcquireErrorKind> {
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
        let session = self.kept_session(&runtime).or_else(|| self.open_session());
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

    /// A session without a connection, which a hello has to make first.
    fn open_session(&self) -> Option<Box<dyn Session>> {
        let store = self.store.as_ref()?;
        self.with(|core, _| core.leave_connection());
        Some(store.open())
    }

    /// Sees to it that the driver does not hold up a request that waits on this runtime.
    pub(super) fn watch_driver(self: &Arc<Self>) {
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

    /// Sends the first hello. That the store cannot be reached is no error: then the fallbacks apply.
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
        let (id, outcome) = loop {
            match in_flight.next(None).await {
                News::Over(id, outcome) => break (id, outcome),
                // The hello fails with its connection.
                News::Event(Event::Disconnected) => {}
                News::Event(event) => self.with(|core, now| core.on_event(&event, now)),
                News::Due => {}
            }
        };
        let unreached = self.with(|core, now| match outcome {
            Ok(reply) => {
                core.on_reply(id, reply, now);
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
                core.on_failure(id, &ExchangeError { failure, error }, now);
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
        let is_silent = keeper.driver_step(|core, driver, now| {
            // One that was dismissed knows nothing that counts.
            if !driver.is_present(generation) {
                return false;
            }
            match news {
                News::Event(event) => core.on_event(&event, now),
                News::Over(id, Ok(reply)) => core.on_reply(id, reply, now),
                News::Over(id, Err(error)) => {
                    let is_in_use = core.on_failure(id, &error, now);
                    return is_in_use && error.failure == Failure::TimedOut;
                }
                // The next step does what is due.
                News::Due => {}
            }
            false
        });
        if is_silent {
            // It may be half open.
            in_flight.disconnect();
        }
    }
}

/// Ends with the driver, however that ends, and even if it was never polled: then the keeper has none.
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

/// An event of the store, an outcome, or the time.
enum News {
    Event(Event),
    /// An exchange is over.
    Over(ExchangeId, Result<Reply, ExchangeError>),
    /// The time has come, or an exchange was given more.
    Due,
}

/// Exchanges in flight, and the one timer of a driver.
struct InFlight {
    /// Ends with the driver, and its connections with it.
    session: Option<Box<dyn Session>>,
    meter: StoreMeter,
    /// In the order in which they were sent; a handful at most.
    exchanges: Vec<Sent>,
    /// May ring too early. To set it anew for each exchange would wake the runtime's timer each time.
    alarm: Pin<Box<Sleep>>,
}

struct Sent {
    id: ExchangeId,
    /// Whether it has been polled.
    was_polled: bool,
    is_long: bool,
    reply: BoxFuture<'static, Result<Reply, StoreError>>,
    at: Instant,
    deadline: Instant,
    /// How long it may take.
    timeout: Duration,
    /// Whether it was given its time once more.
    was_extended: bool,
}

impl InFlight {
    fn new(session: Option<Box<dyn Session>>, meter: StoreMeter) -> Self {
        Self {
            session,
            meter,
            exchanges: Vec::new(),
            alarm: Box::pin(sleep(Duration::ZERO)),
        }
    }

    /// The session, for the next driver to go on with.
    fn into_session(self) -> Option<Box<dyn Session>> {
        self.session
    }

    /// The next exchange makes a connection.
    fn disconnect(&mut self) {
        if let Some(session) = &mut self.session {
            session.disconnect();
        }
    }

    /// It is sent when its outcome is waited for.
    fn send(&mut self, outgoing: Outgoing) {
        let Some(session) = &mut self.session else {
            return;
        };
        let now = Instant::now();
        self.exchanges.push(Sent {
            id: outgoing.id,
            was_polled: false,
            is_long: outgoing.exchange.batches.len() >= LONG,
            reply: session.exchange(outgoing.exchange),
            at: now,
            deadline: outgoing.deadline,
            timeout: outgoing.deadline.saturating_duration_since(now),
            was_extended: false,
        });
    }

    /// The next event, at `until` at the latest. Cancel safe.
    fn next(&mut self, until: Option<Instant>) -> impl Future<Output = News> {
        poll_fn(move |cx| self.poll(until, cx))
    }

    fn poll(&mut self, until: Option<Instant>, cx: &mut Context<'_>) -> Poll<News> {
        let exchanges = &self.exchanges;
        let was_polled = exchanges.iter().any(|sent| sent.was_polled);
        if was_polled
            && exchanges
                .iter()
                .any(|sent| !sent.was_polled && sent.is_long)
        {
            self.begin_all(cx);
        }
        if let Some(session) = &mut self.session
            && let Poll::Ready(event) = session.poll_event(cx)
        {
            return Poll::Ready(News::Event(event));
        }
        loop {
            if let Some(news) = self.outcome(cx) {
                return Poll::Ready(news);
            }
            let deadlines = self.exchanges.iter().map(|sent| sent.deadline);
            let Some(next) = deadlines.chain(until).min() else {
                return Poll::Pending;
            };
            if self.alarm.deadline() > next || self.alarm.is_elapsed() {
                self.alarm.as_mut().reset(next);
            }
            ready!(self.alarm.as_mut().poll(cx));
            if until.is_some_and(|until| until <= Instant::now()) {
                return Poll::Ready(News::Due);
            }
        }
    }

    /// In their order: requests of one ledger may be in several.
    fn begin_all(&mut self, cx: &mut Context<'_>) {
        for sent in self.exchanges.iter_mut().filter(|sent| !sent.was_polled) {
            sent.was_polled = true;
            if let Poll::Ready(result) = sent.reply.poll_unpin(cx) {
                sent.reply = future::ready(result).boxed();
            }
        }
    }

    /// The outcome of the first that has one. If an exchange is given more time, the driver takes a step: to others it would
    /// seem late.
    fn outcome(&mut self, cx: &mut Context<'_>) -> Option<News> {
        let now = Instant::now();
        let mut is_news = false;
        for (index, sent) in self.exchanges.iter_mut().enumerate() {
            sent.was_polled = true;
            if let Poll::Ready(result) = sent.reply.poll_unpin(cx) {
                return Some(self.over(index, result.map_err(ExchangeError::from)));
            }
            if now < sent.deadline {
                continue;
            }
            if now > sent.deadline + STOOD_STILL && !sent.was_extended {
                // The reply may have been here all the time, unread.
                sent.was_extended = true;
                sent.deadline = now + sent.timeout;
                is_news = true;
                continue;
            }
            // There is a session: it has sent the exchange.
            let error = self.session.as_ref()?.no_answer(sent.timeout);
            let failure = Failure::TimedOut;
            return Some(self.over(index, Err(ExchangeError { failure, error })));
        }
        is_news.then_some(News::Due)
    }

    fn over(&mut self, index: usize, outcome: Result<Reply, ExchangeError>) -> News {
        let sent = self.exchanges.remove(index);
        let failure = outcome.as_ref().err().map(|error| error.failure);
        // A recorder is foreign code.
        shielded(|| self.meter.exchanged(failure, sent.at.elapsed()));
        News::Over(sent.id, outcome)
    }
}

#[cfg(test)]
mod tests;
