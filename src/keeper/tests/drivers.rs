//! Late drivers, and what they leave.

use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, pending, ready},
};
use tokio::{
    runtime::{Builder, Runtime},
    task::yield_now,
};

use super::*;
use crate::{
    home::Home,
    keeper::{Keeper, lock::WatchdogFinding},
    ledger::Exchange,
    store::{Event, Session, Store},
};

/// The answer to a hello.
const TIME: Reply = Reply {
    now_us: EPOCH_US,
    more: false,
    is_late: false,
    batches: Vec::new(),
    claims: Vec::new(),
    generation: None,
};

/// Counts the exchanges of each of its sessions, and leaves them unanswered.
#[derive(Default)]
struct Silent {
    sessions: AtomicUsize,
    exchanges: Arc<[AtomicUsize; 2]>,
    disconnected: Arc<AtomicUsize>,
}

struct Numbered {
    number: usize,
    exchanges: Arc<[AtomicUsize; 2]>,
    disconnected: Arc<AtomicUsize>,
}

impl Store for Silent {
    fn open(&self, _: Part) -> Box<dyn Session> {
        Box::new(Numbered {
            number: self.sessions.fetch_add(1, Relaxed),
            exchanges: self.exchanges.clone(),
            disconnected: self.disconnected.clone(),
        })
    }
}

impl Session for Numbered {
    fn exchange(&mut self, _: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
        self.exchanges[self.number].fetch_add(1, Relaxed);
        pending().boxed()
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        Poll::Pending
    }

    fn disconnect(&mut self) {
        self.disconnected.fetch_add(1, Relaxed);
    }
}

/// Answers hellos only, and records for each session whether its exchanges were hellos.
#[derive(Default)]
struct Courteous(Arc<Mutex<Vec<Vec<bool>>>>);

struct Conversation {
    number: usize,
    noted: Arc<Mutex<Vec<Vec<bool>>>>,
}

impl Store for Courteous {
    fn open(&self, _: Part) -> Box<dyn Session> {
        let mut noted = self.0.lock().unwrap();
        noted.push(Vec::new());
        Box::new(Conversation {
            number: noted.len() - 1,
            noted: self.0.clone(),
        })
    }
}

impl Session for Conversation {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let is_hello = exchange.is_hello();
        self.noted.lock().unwrap()[self.number].push(is_hello);
        if is_hello {
            ready(Ok(TIME)).boxed()
        } else {
            pending().boxed()
        }
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        Poll::Pending
    }

    fn disconnect(&mut self) {}
}

/// G1: the limiter was connected on a runtime that has shut down, so its driver begins with a new session.
#[test]
fn a_driver_with_a_new_session_begins_with_a_hello() {
    for is_kept in [true, false] {
        let store = Arc::new(Courteous::default());
        let keeper = Keeper::new(settings(0), Some(store.clone()), Home::default());
        let meter = Arc::new(LimitMeter::new("test", "a"));
        keeper.with(|core| core.register(&ONE, &meter)).unwrap();
        let (first, other) = (runtime(), runtime());
        assert!(first.block_on(keeper.greet()).is_ok());
        let driven = if is_kept { &first } else { &other };
        driven.block_on(async {
            submit(&keeper);
            assert_eq!(keeper.start_driver(), Ok(()));
            let is_sent = async {
                while store.0.lock().unwrap().iter().flatten().all(|hello| *hello) {
                    yield_now().await;
                }
            };
            let is_sent = tokio::time::timeout(PATIENT, is_sent);
            is_sent.await.expect("the request is sent");
        });
        let expected = if is_kept {
            vec![vec![true, false]]
        } else {
            vec![vec![true], vec![true, false]]
        };
        assert_eq!(*store.0.lock().unwrap(), expected);
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

impl Silent {
    fn sent(&self) -> [usize; 2] {
        self.exchanges.each_ref().map(|count| count.load(Relaxed))
    }
}

/// With a limit, and a short timeout of the store.
fn keeper_of(store: Arc<dyn Store>) -> Arc<Keeper> {
    let settings = Settings {
        store_timeout: Duration::from_millis(20),
        ..settings(0)
    };
    let keeper = Keeper::new(settings, Some(store), Home::default());
    let meter = Arc::new(LimitMeter::new("test", "a"));
    keeper.with(|core| core.register(&ONE, &meter)).unwrap();
    keeper
}

fn submit(keeper: &Keeper) {
    let demand = Demand::One(leg(0, PATIENT));
    keeper.with(|core| drop(core.submit_unlabelled(&demand)));
}

/// Waits until a watchdog has moved a late driver.
async fn until_moved(keeper: &Arc<Keeper>, store: &Silent) {
    submit(keeper);
    keeper.watch_driver();
    while store.sent() == [0, 0] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(keeper.home.has_thread());
    assert_eq!(store.sent()[0], 0, "the late one did not run");
}

/// A late driver may run again at any time: on a runtime that is polled again, or after a blocking handler.
#[test]
fn a_driver_that_has_moved_does_nothing_where_it_was() {
    let store = Arc::new(Silent::default());
    let keeper = keeper_of(store.clone());
    let (late, other) = (runtime(), runtime());
    late.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    other.block_on(until_moved(&keeper, &store));
    late.block_on(async {
        for _ in 0..100 {
            yield_now().await;
        }
    });
    assert_eq!(store.sent()[0], 0, "nor does it now");
    // It may report anything.
    keeper.with_driver(|core, driver| {
        assert!(!driver.is_present(1));
        assert!(driver.next_step(core, 1).is_none());
    });
}

/// Its end wakes the watchers of permits, and each of them would start another driver there.
#[test]
fn a_runtime_that_has_ended_takes_no_further_driver() {
    let store = Arc::new(Silent::default());
    let keeper = keeper_of(store.clone());
    let ended = runtime();
    let handle = ended.handle().clone();
    drop(ended);
    let _entered = handle.enter();
    for _ in 0..2 {
        assert_eq!(keeper.start_driver(), Err(AcquireErrorKind::NoRuntime));
    }
    assert_eq!(store.sessions.load(Relaxed), 1, "only the first was tried");
}

/// Otherwise the driver would run without a watchdog.
#[test]
fn a_late_driver_that_runs_while_its_thread_is_started_moves_too() {
    let keeper = keeper_of(Arc::new(Silent::default()));
    let (late, other) = (runtime(), runtime());
    late.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    submit(&keeper);
    keeper.with_driver(|core, driver| drop(driver.next_step(core, 1)));
    other.block_on(async { keeper.move_driver() });
    assert!(keeper.home.has_thread());
    assert!(keeper.with_driver(|_, driver| !driver.is_present(1)));
}

/// A test that fails drops its runtime, and so the driver, while its thread panics.
#[test]
fn a_driver_that_ends_with_a_panicking_thread_did_not_panic() {
    let keeper = keeper_of(Arc::new(Silent::default()));
    let fails = keeper.clone();
    let failed = std::thread::spawn(move || {
        let runtime = runtime();
        runtime.block_on(async { assert_eq!(fails.start_driver(), Ok(())) });
        panic!("a test fails");
    });
    assert!(failed.join().is_err());
    assert!(keeper.with_driver(|_, driver| driver.is_absent()));
    assert!(!keeper.home.has_thread());
}

/// Panics on each log event.
struct Panics;

impl tracing::Subscriber for Panics {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        panic!("at {}", event.metadata().name());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// G2, G8: the next driver starts although logging the late one panics.
#[test]
fn a_subscriber_that_panics_does_not_cost_the_next_driver() {
    let store = Arc::new(Silent::default());
    let keeper = keeper_of(store.clone());
    let (late, other) = (runtime(), runtime());
    late.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    submit(&keeper);
    let _panics = tracing::subscriber::set_default(Panics);
    other.block_on(async {
        let moved = tokio::time::timeout(PATIENT, until_moved(&keeper, &store));
        moved.await.expect("another driver");
    });
    assert_eq!(store.sessions.load(Relaxed), 2, "it moved once");
}

/// An unanswered connection may be half open: it is not used again.
#[test]
fn a_silent_connection_is_left() {
    let store = Arc::new(Silent::default());
    let keeper = keeper_of(store.clone());
    runtime().block_on(async {
        assert_eq!(keeper.start_driver(), Ok(()));
        submit(&keeper);
        let is_left = async {
            while store.disconnected.load(Relaxed) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let is_left = tokio::time::timeout(PATIENT, is_left);
        is_left.await.expect("it is used again and again");
    });
}

/// Answers hellos only. At any other exchange the connection ends, while the exchange stays unanswered.
#[derive(Clone, Default)]
struct Flaky(Arc<Mutex<Events>>);

#[derive(Default)]
struct Events {
    ends: usize,
    disconnects: usize,
    /// Number of disconnects of the session before each exchange other than a hello.
    disconnects_before: Vec<usize>,
}

impl Store for Flaky {
    fn open(&self, _: Part) -> Box<dyn Session> {
        Box::new(self.clone())
    }
}

impl Session for Flaky {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let mut events = self.0.lock().unwrap();
        if exchange.is_hello() {
            return ready(Ok(TIME)).boxed();
        }
        let disconnects = events.disconnects;
        events.disconnects_before.push(disconnects);
        pending().boxed()
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        let mut events = self.0.lock().unwrap();
        if events.ends == 1 || events.disconnects_before.is_empty() {
            return Poll::Pending;
        }
        events.ends += 1;
        Poll::Ready(Event::Disconnected)
    }

    fn disconnect(&mut self) {
        self.0.lock().unwrap().disconnects += 1;
    }
}

/// G8: an exchange on an ended connection times out, and the next connection stays.
#[test]
fn a_silent_exchange_does_not_end_the_next_connection() {
    let store = Flaky::default();
    let keeper = keeper_of(Arc::new(store.clone()));
    runtime().block_on(async {
        submit(&keeper);
        assert_eq!(keeper.start_driver(), Ok(()));
        let is_retried = async {
            while store.0.lock().unwrap().disconnects_before.len() < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let is_retried = tokio::time::timeout(PATIENT, is_retried);
        is_retried.await.expect("the store is up");
    });
    assert_eq!(store.0.lock().unwrap().disconnects_before, [0, 0]);
}

/// The store accepts a connection, and closes it at the first exchange.
#[derive(Clone, Default)]
struct Closing(Arc<Mutex<VecDeque<Event>>>);

impl Store for Closing {
    fn open(&self, _: Part) -> Box<dyn Session> {
        Box::new(self.clone())
    }
}

impl Session for Closing {
    fn exchange(&mut self, _: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let events = [Event::Connected, Event::Disconnected];
        self.0.lock().unwrap().extend(events);
        ready(Err(StoreError::outage("closed"))).boxed()
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        let event = self.0.lock().unwrap().pop_front();
        event.map_or(Poll::Pending, Poll::Ready)
    }

    fn disconnect(&mut self) {}
}

/// G8: the first request does not wait for a store that left the greeting unanswered.
#[test]
fn a_connection_that_ends_at_the_greeting_is_an_outage() {
    let keeper = keeper_of(Arc::new(Closing::default()));
    assert!(matches!(runtime().block_on(keeper.greet()), Ok(Some(_))));
    assert!(keeper.peek(Core::is_any_down));
}

/// G8: while permits are held and no request waits, watchdogs rest. A request ends their rest.
#[test]
fn watchdogs_rest_until_a_request_comes() {
    let keeper = keeper_of(Arc::new(Silent::default()));
    let (first, other) = (runtime(), runtime());
    first.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    let check = || keeper.with_driver(|core, driver| driver.check_driver(core));
    assert!(matches!(check(), WatchdogFinding::Idle));
    keeper.with_driver(|core, driver| {
        // In an outage the fallback admits the request.
        let hello = core.hello(Part::default());
        let error = ExchangeError::of(Failure::TimedOut, "silent");
        core.on_failure(hello.id, &error);
        let asked = core.submit_unlabelled(&Demand::One(leg(0, PATIENT)));
        assert!(held(core.collect(asked.expect("open"), false)));
        driver.next_step(core, 1).expect("it is present");
    });
    let wanted = keeper.wanted.notified();
    assert!(matches!(check(), WatchdogFinding::Holding));
    other.block_on(async { keeper.watch_driver() });
    assert!(wanted.now_or_never().is_some());
}

/// G3, G8: an exchange is given its time again if the process stood still. Watchdogs see that the driver runs.
#[test]
fn a_driver_that_waits_for_longer_is_not_late() {
    let store = Arc::new(Silent::default());
    let keeper = keeper_of(store.clone());
    let runtime = runtime();
    runtime.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    submit(&keeper);
    keeper.with_driver(|core, driver| {
        let (sent, _) = driver.next_step(core, 1).expect("it is present");
        assert_eq!(sent.len(), 1);
        core.begin_step(core.now() + 10 * STORE_TIMEOUT);
        assert!(matches!(driver.check_driver(core), WatchdogFinding::Late));
        // The step taken when the driver gives the exchange more time.
        driver.next_step(core, 1).expect("it is present");
        core.begin_step(core.now() + Duration::from_millis(5));
        let finding = driver.check_driver(core);
        assert!(matches!(finding, WatchdogFinding::Probed(_)));
    });
}

/// G8: more work is due than a step does. A driver that takes step after step is not late.
#[test]
fn a_driver_with_much_due_work_is_not_late() {
    let keeper = keeper_of(Arc::new(Silent::default()));
    let runtime = runtime();
    runtime.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    let meter = Arc::new(LimitMeter::new("test", "many"));
    let many = Limit::concurrent("many", 1).max_waiters(3_000);
    let (many, _) = keeper.with(|core| core.register(&many, &meter)).unwrap();
    keeper.with_driver(|core, driver| {
        let begun = core.now();
        let hello = core.hello(Part::default());
        let error = ExchangeError::of(Failure::TimedOut, "silent");
        core.on_failure(hello.id, &error);
        for _ in 0..2_500 {
            let waiting = Leg {
                limit: many,
                ..leg(0, PATIENT)
            };
            let asked = core.submit_unlabelled(&Demand::One(waiting));
            asked.expect("open");
        }
        core.begin_step(begun + PATIENT);
        for _ in ["a thousand", "a thousand more"] {
            driver.next_step(core, 1).expect("it is present");
            core.begin_step(core.now() + Duration::from_millis(9));
        }
        assert!(core.next_due().is_some_and(|due| due <= begun + PATIENT));
        let finding = driver.check_driver(core);
        assert!(!matches!(finding, WatchdogFinding::Late));
    });
}
