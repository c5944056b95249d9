//! The driver: the one task of a keeper that sends, receives and sleeps, with its exchanges in flight; and the
//! watchdogs that check that it runs. Decisions about the driver that need the lock are in `lock.rs`.
//!
//! The driver is spawned on the runtime given to the limiter, or else on the runtime of the first task that needs it; requests
//! may wait on any runtime. If its runtime shuts down, the task is dropped, and the next request starts another driver.
//! A runtime may also be blocked, or no longer polled: then the driver is *late*, which a watchdog on the runtime of a
//! request finds out. It may also lack timers or IO: then the driver panics. In either case the driver moves to
//! a thread of its own, and stays there. A late driver ends, with its connections, as soon as it runs again.

use std::{
    future::poll_fn,
    iter,
    panic::AssertUnwindSafe,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{self, BoxFuture},
};
use tokio::{
    runtime::{self, Handle},
    sync::Notify,
    task::{unconstrained, yield_now},
    time::{Instant, Sleep, sleep, timeout},
};

use self::log::News;
use super::{
    context::STOOD_STILL,
    core::{Core, ExchangeId, Outgoing},
    handle::ConnectError,
    lock::{Keeper, Panic, Start, WatchdogFinding, check_interval},
};
use crate::{
    error::AcquireErrorKind,
    lane_waker::LaneWaker,
    ledger::Reply,
    part::Part,
    repoll::Repoll,
    store::{Event, ExchangeError, Failure, KeptSession, Session, StoreError},
    sync::{AtomicWaker, shielded},
    telemetry::{History, StoreMeter},
};

mod log;

/// Checks without a waiting request after which a watchdog rests or ends, so that not every request starts one.
const IDLE_CHECKS: u32 = 16;
/// By how much a timer may be late on an idle machine.
const TICK: Duration = Duration::from_millis(2);
/// Minimum of ledgers in an exchange that is sent before a received reply is processed, so that the store works in
/// parallel. Two short exchanges are better sent together: the store then reads and answers once, and this process
/// wakes up once.
const LONG: usize = 16;

impl Keeper {
    /// Starts a driver if one is needed and none runs.
    pub(super) fn start_driver(self: &Arc<Self>) -> Result<(), AcquireErrorKind> {
        let runtime = self.home.runtime().or_else(|| Handle::try_current().ok());
        self.start_driver_on(runtime.ok_or(AcquireErrorKind::NoRuntime))
    }

    fn start_driver_on(
        self: &Arc<Self>,
        runtime: Result<Handle, AcquireErrorKind>,
    ) -> Result<(), AcquireErrorKind> {
        let id = runtime.as_ref().map(Handle::id).map_err(|kind| *kind);
        let start = self.with_driver(|core, driver| driver.start(core, id));
        let Some(Start { generation, work }) = start? else {
            return Ok(());
        };
        let runtime = runtime?;
        let gone = Gone {
            keeper: self.clone(),
            generation,
            has_panicked: false,
        };
        let driver = run(gone, self.sessions(&runtime), work);
        // If it has only been replaced already, a driver is there.
        let is_gone =
            runtime.spawn(driver).is_finished() && self.with_driver(|_, driver| driver.is_absent());
        match self.home.runtime() {
            // The driver has panicked already, and moves.
            Some(home) if is_gone && home.id() != runtime.id() => self.start_driver_on(Ok(home)),
            // The runtime was shut down and has dropped the task.
            _ if is_gone => Err(AcquireErrorKind::NoRuntime),
            _ => {
                if let Some(task) = self.control.get() {
                    task.run_on(&runtime);
                }
                Ok(())
            }
        }
    }

    /// Moves a late driver to a thread of its own.
    pub fn move_driver(self: &Arc<Self>) {
        let has_thread = self.home.move_to_thread().is_ok();
        // Without another thread, which the system may deny, this runtime has to do.
        let runtime = self.home.runtime().filter(|_| has_thread);
        let thread = runtime.as_ref().map(Handle::id);
        self.with_driver(|core, driver| driver.dismiss(core, thread));
        let _ = self.start_driver_on(Ok(runtime.unwrap_or_else(Handle::current)));
    }

    /// A session for each part of the store. A hello has to connect first, except for a kept session.
    fn sessions(&self, runtime: &Handle) -> Vec<Box<dyn Session>> {
        let Some(store) = &self.store else {
            return Vec::new();
        };
        let kept = self.session().take();
        let kept = kept.and_then(|kept| kept.session(runtime));
        if kept.is_none() {
            self.with(Core::leave_connections);
        }
        let parts = self.peek(|core| core.context().settings.parts);
        let first = kept.unwrap_or_else(|| store.open(Part::default()));
        let others = parts.all().skip(1).map(|part| store.open(part));
        iter::once(first).chain(others).collect()
    }

    /// Makes sure that the driver does not delay a request that waits on this runtime.
    pub(super) fn watch_driver(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        if self.home.has_thread() {
            return;
        }
        let (is_new, rested) =
            self.with_driver(|_, driver| (driver.watch(&runtime), driver.end_rest()));
        if rested {
            self.wanted.notify_waiters();
        }
        if is_new {
            let watch = WatchGuard {
                keeper: self.clone(),
                runtime: Some(runtime.id()),
                has_panicked: false,
            };
            // If the runtime has shut down meanwhile, the task is dropped together with its guard.
            runtime.spawn(watch_over(watch));
        }
    }

    /// Sends the first hello, in a cluster to the first part: the other parts connect at their first exchange. An
    /// unreachable store is not an error: the fallbacks apply.
    pub async fn greet(self: &Arc<Self>) -> Result<Option<String>, ConnectError> {
        let keeper = self.clone();
        let greeting = async move { keeper.greet_here().await };
        let greeted = match self.home.runtime() {
            // The thread always runs, so the session can stay there.
            Some(runtime) if self.home.has_thread() => runtime.spawn(greeting).await.ok(),
            _ if Handle::try_current().is_err() => None,
            // Tokio panics on a runtime without timers or IO, and has no other way to find out.
            _ => AssertUnwindSafe(greeting).catch_unwind().await.ok(),
        };
        greeted.unwrap_or(Err(ConnectError::NoRuntime))
    }

    async fn greet_here(self: &Arc<Self>) -> Result<Option<String>, ConnectError> {
        let Some(store) = &self.store else {
            return Ok(None);
        };
        let part = Part::default();
        let mut in_flight = InFlight::new(vec![store.open(part)], self.store_meter.clone());
        let wanted = History::is_wanted();
        let hello = self.with(|core| {
            core.context_mut().history.set_wanted(wanted);
            core.hello(part)
        });
        log::sent(&self.namespace, &hello);
        in_flight.send(hello);
        let (id, outcome) = loop {
            let news = in_flight.next(None).await;
            log::heard(&self.namespace, &news);
            match news {
                News::Over(id, _, outcome) => break (id, outcome),
                // The hello fails with its connection.
                News::Event(_, Event::Disconnected) => {}
                News::Event(part, event) => self.with(|core| core.on_event(part, &event)),
                News::Due => {}
            }
        };
        let unreached = self.with(|core| match outcome {
            Ok(reply) => {
                core.on_reply(id, reply);
                Ok(None)
            }
            Err(refused) if refused.failure == Failure::Refused => {
                Err(ConnectError::Store(refused.error))
            }
            Err(mut unanswered) => {
                // Not retried: no request waits for this hello, nor should the first request have to.
                unanswered.failure = Failure::TimedOut;
                core.on_failure(id, &unanswered);
                Ok(Some(unanswered.error.message))
            }
        })?;
        if self.peek(Core::status).store_up {
            let first = in_flight.lanes.into_iter().next();
            self.keep_for_driver(first.map(|lane| lane.session));
        } else {
            // The driver notices when the store is reachable. Without a runtime it is started later.
            let _ = self.start_driver();
        }
        // The caller may leave this runtime for good, so tasks of a session that is not kept end now.
        yield_now().await;
        Ok(unreached)
    }

    /// Keeps a session for the driver, if the driver is likely to run on the same runtime.
    fn keep_for_driver(&self, session: Option<Box<dyn Session>>) {
        let here = Handle::try_current().ok().zip(session);
        let kept = here.map(|(here, session)| KeptSession::new(session, &here));
        let home = self.home.runtime();
        let is_for = |kept: &KeptSession| home.as_ref().is_none_or(|home| kept.is_for(home));
        *self.session() = kept.filter(is_for);
    }
}

/// Runs until an unused keeper is out of work, another driver takes over, or the runtime shuts down.
async fn run(mut gone: Gone, sessions: Vec<Box<dyn Session>>, work: Arc<Notify>) {
    let driver = Repoll::new(drive(&gone.keeper, sessions, gone.generation, &work));
    gone.has_panicked = AssertUnwindSafe(driver).catch_unwind().await.is_err();
}

async fn drive(
    keeper: &Arc<Keeper>,
    sessions: Vec<Box<dyn Session>>,
    generation: u64,
    work: &Notify,
) {
    // The runtime may have no timers: the driver, and not its caller, finds out.
    let mut in_flight = InFlight::new(sessions, keeper.store_meter.clone());
    let namespace = &*keeper.namespace;
    // For the task that started this driver.
    let mut watched = false;
    let next_step = || {
        // Asked without the lock: a subscriber is foreign code.
        let wanted = History::is_wanted();
        let is_logged = log::is_wanted();
        keeper.with_driver(|core, driver| {
            core.context_mut().history.set_wanted(wanted);
            let (exchanges, until) = driver.next_step(core, generation)?;
            let timer = until.filter(|_| is_logged);
            Some((exchanges, until, timer.and_then(|at| core.timer_at(at))))
        })
    };
    while let Some((exchanges, until, timer)) = next_step() {
        for outgoing in exchanges {
            log::sent(namespace, &outgoing);
            in_flight.send(outgoing);
        }
        log::sleeps(namespace, until, timer);
        if !std::mem::replace(&mut watched, true) {
            keeper.watch_driver();
        }
        // More is due than one step does: other tasks of the runtime come first, and no timer has to fire.
        let has_more = until.is_some_and(|until| until <= Instant::now());
        let news = tokio::select! {
            biased;
            news = in_flight.next(until.filter(|_| !has_more)) => news,
            () = work.notified() => continue,
            () = yield_now(), if has_more => continue,
        };
        log::heard(namespace, &news);
        let silent = keeper.with_driver(|core, driver| {
            // A dismissed driver has only outdated knowledge.
            if !driver.is_present(generation) {
                return None;
            }
            driver.goes_on(core.now());
            match news {
                News::Event(part, event) => core.on_event(part, &event),
                News::Over(id, _, Ok(reply)) => core.on_reply(id, reply),
                News::Over(id, _, Err(error)) => {
                    let is_in_use = core.on_failure(id, &error);
                    return (is_in_use && error.failure == Failure::TimedOut).then_some(id.part);
                }
                // The next step does the due work.
                News::Due => {}
            }
            None
        });
        if let Some(part) = silent {
            log::gives_up(namespace, part);
            in_flight.disconnect(part);
        }
    }
    log::ends(namespace);
}

/// Dropped with the driver, even one that was never polled: the keeper then has no driver.
struct Gone {
    keeper: Arc<Keeper>,
    generation: u64,
    /// Not [`thread::panicking`](std::thread::panicking): a thread that panics may drop its runtime, and so the driver.
    has_panicked: bool,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let panic = (self.has_panicked).then(|| match self.keeper.home.move_to_thread() {
            Ok(true) => Panic::Elsewhere,
            Ok(false) | Err(_) => Panic::OnOwnThread,
        });
        (self.keeper).with_driver(|core, driver| driver.on_gone(core, self.generation, panic));
    }
}

/// A watchdog: a task on each runtime on which requests wait, which checks that the driver runs.
///
/// Its cost is a timer a few times per `store_timeout` while requests wait, whatever their number. Soon after the last one
/// it rests for as long as permits are held: then it checks a few times per lease, so that their leases are renewed.
/// Without permits it ends.
async fn watch_over(mut watch: WatchGuard) {
    let check = check_until_idle(&watch.keeper, &mut watch.runtime);
    watch.has_panicked = AssertUnwindSafe(check).catch_unwind().await.is_err();
}

async fn check_until_idle(keeper: &Arc<Keeper>, watched: &mut Option<runtime::Id>) {
    let (interval, rest) =
        keeper.peek(|core| (check_interval(core), core.context().settings.lease / 8));
    let mut idle = 0;
    // A thread of its own always runs.
    while idle < IDLE_CHECKS && !keeper.home.has_thread() {
        let from = Instant::now();
        sleep(interval).await;
        if from.elapsed() > 2 * interval + TICK {
            // The whole process stood still, so the driver could not run either.
            continue;
        }
        // Before the check, so that the rest misses no request that comes after it.
        let wanted = keeper.wanted.notified();
        let finding = keeper.with_driver(|core, driver| {
            let finding = driver.check_driver(core);
            // In the same step: a request of the next moment starts another watchdog.
            if matches!(finding, WatchdogFinding::Idle) && idle + 1 == IDLE_CHECKS {
                driver.unwatch(watched.take(), false);
            }
            finding
        });
        let is_idle = matches!(finding, WatchdogFinding::Idle | WatchdogFinding::Holding);
        idle = if is_idle { idle + 1 } else { 0 };
        match finding {
            WatchdogFinding::Holding if idle == IDLE_CHECKS => {
                idle -= 1;
                let _ = timeout(rest, wanted).await;
            }
            WatchdogFinding::Idle | WatchdogFinding::Holding | WatchdogFinding::Well => {}
            WatchdogFinding::Probed(work) => work.notify_one(),
            WatchdogFinding::Late => keeper.move_driver(),
            WatchdogFinding::Gone => {
                // If it cannot be started here, requests find out when they ask.
                let _ = keeper.start_driver();
            }
        }
    }
}

/// Dropped with the watchdog, even one that was dropped with its runtime before its first poll.
struct WatchGuard {
    keeper: Arc<Keeper>,
    /// `None`: the watch is over.
    runtime: Option<runtime::Id>,
    has_panicked: bool,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        (self.keeper).with_driver(|_, driver| driver.unwatch(self.runtime, self.has_panicked));
    }
}

/// The exchanges in flight, and the one timer of a driver.
///
/// A cluster has a *lane* for each part: a session with its exchanges. Thousands may be in flight, so only lanes that
/// were woken are polled.
struct InFlight {
    /// By part of the store. None without a store.
    lanes: Vec<Lane>,
    /// The lane to poll first, so that none waits for all of another's news.
    first: usize,
    /// The driver's task, if there are several lanes.
    task: Arc<AtomicWaker>,
    meter: StoreMeter,
    /// May fire too early: resetting it for each exchange would wake the runtime's timer each time.
    alarm: Pin<Box<Sleep>>,
}

/// The connection to a part of the store.
struct Lane {
    part: Part,
    /// Ends, with its connections, when the driver ends.
    session: Box<dyn Session>,
    /// In sending order; a handful at most while the store is near.
    exchanges: Vec<Sent>,
    /// Whether to poll it, whoever was woken.
    is_due: bool,
    /// Wakes the driver for this lane. `None`: it is the only one, and is always polled.
    waker: Option<(Arc<LaneWaker>, Waker)>,
}

struct Sent {
    id: ExchangeId,
    /// Whether the exchange has been polled.
    was_polled: bool,
    is_long: bool,
    reply: BoxFuture<'static, Result<Reply, StoreError>>,
    at: Instant,
    deadline: Instant,
    /// Time allowed for the exchange.
    timeout: Duration,
}

impl InFlight {
    /// `sessions`: one for each part of the store.
    fn new(sessions: Vec<Box<dyn Session>>, meter: StoreMeter) -> Self {
        let task = Arc::new(AtomicWaker::new());
        let is_alone = sessions.len() == 1;
        let lane = |(part, session)| Lane {
            part,
            session,
            exchanges: Vec::new(),
            is_due: true,
            waker: (!is_alone).then(|| LaneWaker::for_lane(&task)),
        };
        Self {
            lanes: Part::all().zip(sessions).map(lane).collect(),
            first: 0,
            task,
            meter,
            alarm: Box::pin(sleep(Duration::ZERO)),
        }
    }

    /// Drops the connection to a part; the next hello reconnects.
    fn disconnect(&mut self, part: Part) {
        if let Some(lane) = self.lanes.get_mut(part.number()) {
            lane.session.disconnect();
            lane.is_due = true;
        }
    }

    /// Queues an exchange, which is sent when its outcome is next polled.
    fn send(&mut self, outgoing: Outgoing) {
        let Some(lane) = self.lanes.get_mut(outgoing.id.part.number()) else {
            return;
        };
        let now = Instant::now();
        lane.is_due = true;
        lane.exchanges.push(Sent {
            id: outgoing.id,
            was_polled: false,
            is_long: outgoing.exchange.batches.len() >= LONG,
            reply: lane.session.exchange(outgoing.exchange),
            at: now,
            deadline: now + outgoing.timeout,
            timeout: outgoing.timeout,
        });
    }

    /// Waits for the next event, until `until` at the latest. Cancel safe.
    fn next(&mut self, until: Option<Instant>) -> impl Future<Output = News> {
        poll_fn(move |cx| self.poll(until, cx))
    }

    fn poll(&mut self, until: Option<Instant>, cx: &mut Context<'_>) -> Poll<News> {
        if self.lanes.len() > 1 {
            self.task.register(cx.waker());
        }
        let count = self.lanes.len();
        loop {
            for step in 0..count {
                let number = (self.first + step) % count;
                let lane = &mut self.lanes[number];
                if lane.take_due()
                    && let Some(news) = lane.poll(&self.meter, cx)
                {
                    // The lane may have more news.
                    lane.is_due = true;
                    self.first = number + 1;
                    return Poll::Ready(news);
                }
            }
            let exchanges = self.lanes.iter().flat_map(|lane| &lane.exchanges);
            let deadlines = exchanges.map(|sent| sent.deadline);
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
            self.lanes.iter_mut().for_each(|lane| lane.is_due = true);
        }
    }
}

impl Lane {
    fn take_due(&mut self) -> bool {
        match &self.waker {
            None => true,
            Some((waker, _)) => waker.take() | std::mem::take(&mut self.is_due),
        }
    }

    fn poll(&mut self, meter: &StoreMeter, cx: &mut Context<'_>) -> Option<News> {
        let own = self.waker.as_ref().map(|(_, waker)| waker.clone());
        let cx = &mut Context::from_waker(own.as_ref().unwrap_or(cx.waker()));
        let mut exchanges = self.exchanges.iter();
        if exchanges.any(|sent| sent.was_polled)
            && (self.exchanges.iter()).any(|sent| !sent.was_polled && sent.is_long)
        {
            self.begin_all(cx);
        }
        match self.session.poll_event(cx) {
            Poll::Ready(event) => Some(News::Event(self.part, event)),
            Poll::Pending => self.outcome(meter, cx),
        }
    }

    /// In order: requests on one ledger may be in several exchanges.
    fn begin_all(&mut self, cx: &mut Context<'_>) {
        for sent in self.exchanges.iter_mut().filter(|sent| !sent.was_polled) {
            if let Poll::Ready(result) = sent.poll(cx) {
                sent.reply = future::ready(result).boxed();
            }
        }
    }

    /// The outcome of the first exchange that has one. When an exchange is given more time, the driver takes a step, or
    /// watchdogs would consider it late.
    fn outcome(&mut self, meter: &StoreMeter, cx: &mut Context<'_>) -> Option<News> {
        let now = Instant::now();
        let mut is_news = false;
        for (index, sent) in self.exchanges.iter_mut().enumerate() {
            if let Poll::Ready(result) = sent.poll(cx) {
                let outcome = result.map_err(ExchangeError::from);
                return Some(self.over(index, outcome, meter));
            }
            if now < sent.deadline {
                continue;
            }
            let was_extended = sent.deadline != sent.at + sent.timeout;
            if now > sent.deadline + STOOD_STILL && !was_extended {
                // The reply may have been here all the time, unread.
                sent.deadline = now + sent.timeout;
                is_news = true;
                continue;
            }
            let error = self.session.no_answer(sent.timeout);
            // While it waited for one server, others may have refused.
            let failure = if error.is_outage() {
                Failure::TimedOut
            } else {
                Failure::Refused
            };
            return Some(self.over(index, Err(ExchangeError { failure, error }), meter));
        }
        is_news.then_some(News::Due)
    }

    fn over(
        &mut self,
        index: usize,
        outcome: Result<Reply, ExchangeError>,
        meter: &StoreMeter,
    ) -> News {
        let sent = self.exchanges.remove(index);
        let failure = outcome.as_ref().err().map(|error| error.failure);
        // A recorder runs foreign code.
        shielded(|| meter.exchanged(failure, sent.at.elapsed()));
        News::Over(sent.id, sent.at.elapsed(), outcome)
    }
}

impl Sent {
    /// An exchange whose answer has arrived must not look unanswered at its deadline, only because the task is out of
    /// budget.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reply, StoreError>> {
        self.was_polled = true;
        pin!(unconstrained(&mut self.reply)).poll(cx)
    }
}

#[cfg(test)]
mod tests;
