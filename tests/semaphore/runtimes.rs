//! Runtimes that end, that are not driven, that are blocked, or that lack a feature: requests are still served by the
//! store, since the limiter's task moves to a thread of its own.
//!
//! A task is late after half of `store_timeout`. Where that is the subject, the store is in this process: it cannot stall
//! alone, so the timeout may be short.

use std::{
    convert::Infallible,
    future::{Future, ready},
    panic,
    pin::Pin,
    sync::{
        LazyLock, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::Empty;
use tokio::{
    runtime::{Builder, Runtime},
    time::sleep,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, ConfigError, Fallback, Limit, Limiter, LimiterBuilder, Permit, Semaphore,
    test_util::TestStore,
};

use crate::{
    backend::{
        GUARD, connect, current_thread, lasting, multi_thread, soon, start, until_free,
        until_waiting,
    },
    support::{log::log, redis_server::RedisServer},
};

/// Only the store admits requests.
const ONE: Limit = Limit::concurrent("one", 1).fallback(Fallback::Reject);
/// A lease that has to be renewed: longer than a machine stalls.
const LEASE: Duration = Duration::from_secs(9);

/// For a store in this process: a late task is noticed soon, and its leases last.
fn builder() -> LimiterBuilder {
    lasting()
        .store_timeout(Duration::from_secs(1))
        .lease(4 * GUARD)
}

/// Runs on this runtime.
fn on<F: Future>(runtime: &Runtime, future: F) -> F::Output {
    runtime.block_on(soon(future))
}

/// Waits until something is so, without the runtimes of the test.
fn until(is_so: impl Fn() -> bool) {
    on(&current_thread(), async {
        while !is_so() {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

/// A limiter with a permit, whose task runs on a runtime that is no longer driven.
fn on_an_undriven_runtime(
    connected: impl Future<Output = Result<Limiter, ConfigError>>,
) -> (Runtime, Limiter, Permit) {
    let undriven = current_thread();
    let limiter = on(&undriven, connected).unwrap();
    let permit = on(&undriven, decision(limiter.semaphore(&ONE, "key").unwrap())).unwrap();
    (undriven, limiter, permit)
}

fn waiting(limiter: &Limiter) -> Semaphore {
    limiter.semaphore(ONE.wait_up_to(GUARD), "key").unwrap()
}

/// The store's decision. A request may be refused without the store while the machine stalls, and is repeated.
async fn decision(semaphore: Semaphore) -> Result<Permit, AcquireErrorKind> {
    loop {
        match semaphore.acquire().await {
            Err(error) if error.kind() == AcquireErrorKind::Unavailable => {
                sleep(Duration::from_millis(10)).await;
            }
            decided => return decided.map_err(|error| error.kind()),
        }
    }
}

/// Waits until the lease of a permit is renewed.
async fn until_renewed(permit: &Permit) {
    let first = permit.deadline();
    let renewed = async {
        // A permit that is lost has none.
        while permit.deadline() <= first {
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        kind = permit.lost() => panic!("{kind:?}"),
        () = renewed => {}
    }
}

/// G1, G8: a task that does not run moves, and the store is not considered down.
#[test]
fn a_runtime_that_nobody_drives_does_not_hold_up_others() {
    log();
    let given = current_thread();
    let first_used = builder().namespace("undriven-first");
    let set = builder().namespace("undriven-set");
    let set = set.runtime(given.handle().clone());
    for (namespace, builder) in [("undriven-first", first_used), ("undriven-set", set)] {
        let store = TestStore::new();
        let (undriven, limiter, permit) = on_an_undriven_runtime(builder.connect_to(&store));
        let other = multi_thread(1);
        // The driver then stays where it has moved, whatever happens to the runtime.
        for runtime in [&other, &undriven] {
            let refused = on(runtime, decision(limiter.semaphore(&ONE, "key").unwrap()));
            assert_eq!(refused.unwrap_err(), AcquireErrorKind::Full);
            assert!(limiter.status().store_up);
        }
        let waiter = other.spawn(decision(waiting(&limiter)));
        drop(permit);
        drop(on(&other, waiter).unwrap().unwrap());
        on(&other, until_free(&waiting(&limiter)));
        let logged = log().lines_with("it moves to another thread");
        let logged = logged.iter().filter(|line| line.contains(namespace));
        assert_eq!(logged.count(), 1);
    }
}

/// G4: as above, with a request in the queue when the runtime stops.
#[test]
fn a_waiter_does_not_wait_for_a_runtime_that_nobody_drives() {
    let store = TestStore::new();
    let (undriven, limiter, permit) = on_an_undriven_runtime(builder().connect_to(&store));
    let other = multi_thread(1);
    let semaphore = waiting(&limiter);
    let waiter = other.spawn(decision(semaphore.clone()));
    on(&undriven, until_waiting(&semaphore, 1));
    drop(permit);
    drop(on(&other, waiter).unwrap().unwrap());
    assert!(limiter.status().store_up);
}

/// A thread that serves one connection after another may be blocked by any of them.
#[test]
fn a_blocking_handler_does_not_hold_up_other_threads() {
    let store = TestStore::new();
    let limiter = on(&multi_thread(1), builder().connect_to(&store)).unwrap();
    let semaphore = waiting(&limiter);
    let (blocked, go_on) = (mpsc::channel(), mpsc::channel::<()>());
    let (tell, end) = (blocked.0, go_on.1);
    let handler = semaphore.clone();
    let thread = thread::spawn(move || {
        current_thread().block_on(async move {
            drop(decision(handler).await.unwrap());
            // The slot is not released yet.
            tell.send(()).unwrap();
            end.recv().unwrap();
        });
    });
    blocked.1.recv().unwrap();
    drop(on(&current_thread(), decision(semaphore)).unwrap());
    assert!(limiter.status().store_up);
    go_on.0.send(()).unwrap();
    thread.join().unwrap();
}

/// A task's wake-ups run next on its own thread, and other threads do not steal them.
#[test]
fn a_handler_that_blocks_after_giving_its_slot_back_holds_up_nobody() {
    let store = TestStore::new();
    let runtime = multi_thread(2);
    let limiter = on(&runtime, builder().connect_to(&store)).unwrap();
    let semaphore = waiting(&limiter);
    let (end, ended) = mpsc::channel::<()>();
    let permit = on(&runtime, decision(semaphore.clone())).unwrap();
    let waiter = runtime.spawn(decision(semaphore.clone()));
    on(&runtime, until_waiting(&semaphore, 1));
    let handler = runtime.spawn(async move {
        drop(permit);
        ended.recv().unwrap();
    });
    drop(on(&runtime, waiter).unwrap().unwrap());
    end.send(()).unwrap();
    on(&runtime, handler).unwrap();
}

/// G2: as above, while permits are held and no request waits.
#[test]
fn a_handler_that_blocks_after_giving_its_slot_back_costs_no_lease() {
    let store = TestStore::new();
    let runtime = multi_thread(2);
    let limiter = on(&runtime, builder().lease(LEASE).connect_to(&store)).unwrap();
    let semaphore = limiter
        .semaphore(Limit::concurrent("two", 2), "key")
        .unwrap();
    let held = on(&runtime, semaphore.acquire()).unwrap();
    let other = on(&runtime, semaphore.acquire()).unwrap();
    let (end, ended) = mpsc::channel::<()>();
    // The limiter's task has to wait by then, which nothing shows.
    thread::sleep(Duration::from_millis(50));
    let handler = runtime.spawn(async move {
        drop(other);
        ended.recv().unwrap();
    });
    on(&runtime, until_renewed(&held));
    end.send(()).unwrap();
    on(&runtime, handler).unwrap();
}

/// G5: nothing else is left to do for the process, and no request waits in it.
#[test]
fn a_handler_that_blocks_after_giving_the_last_slot_back_holds_up_no_other_process() {
    let store = TestStore::new();
    let (runtime, other) = (multi_thread(2), multi_thread(1));
    let limiter = on(&runtime, builder().connect_to(&store)).unwrap();
    let permit = on(&runtime, decision(waiting(&limiter))).unwrap();
    let elsewhere = waiting(&on(&other, builder().connect_to(&store)).unwrap());
    let waiter = other.spawn(decision(elsewhere.clone()));
    on(&other, until_waiting(&elsewhere, 1));
    let (end, ended) = mpsc::channel::<()>();
    let handler = runtime.spawn(async move {
        drop(permit);
        ended.recv().unwrap();
    });
    // Long before the lease ends.
    drop(on(&other, waiter).unwrap().unwrap());
    end.send(()).unwrap();
    on(&runtime, handler).unwrap();
}

/// G8: it connects during an outage, so its task runs where nobody drives it. No request waits for the task, since a
/// fallback decides.
#[test]
fn an_outage_is_over_for_a_task_that_is_not_driven() {
    let store = TestStore::new();
    store.go_down();
    let undriven = current_thread();
    let limiter = on(&undriven, builder().connect_to(&store)).unwrap();
    store.come_back();
    let other = current_thread();
    let _permit = on(&other, decision(limiter.semaphore(&ONE, "key").unwrap())).unwrap();
    assert!(limiter.status().store_up);
}

/// G2: whoever waits for the loss of a lease makes sure that it is renewed.
#[test]
fn a_lease_that_is_watched_on_another_runtime_is_renewed() {
    let store = TestStore::new();
    let connected = builder().lease(LEASE).connect_to(&store);
    let (_undriven, _limiter, permit) = on_an_undriven_runtime(connected);
    on(&multi_thread(1), until_renewed(&permit));
}

/// G5: the runtime of the task has ended.
#[test]
fn a_slot_that_is_given_back_on_another_runtime_is_free() {
    let server = RedisServer::start();
    let (undriven, limiter, permit) = on_an_undriven_runtime(lasting().connect(server.url()));
    drop(undriven);
    let other = multi_thread(1);
    let _inside = other.enter();
    drop(permit);
    until(|| server.key_count() == 0);
    drop(limiter);
}

/// Its task ends at once, for want of timers, and moves.
#[test]
fn a_shutdown_ends_on_a_runtime_without_timers() {
    let _alone = alone();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let bare = Builder::new_current_thread().build().unwrap();
        let limiter = Limiter::in_memory();
        let permit = bare.block_on(limiter.semaphore(&ONE, "key").unwrap().acquire());
        let report = bare.block_on(limiter.shutdown(Duration::from_millis(100)));
        drop(permit);
        tell.send(report.lost).unwrap();
    });
    assert_eq!(told.recv_timeout(GUARD), Ok(1));
}

/// Wherever the requests come from, and whatever state their runtimes are in.
#[test]
fn a_thread_of_its_own_depends_on_nobody() {
    let server = RedisServer::start();
    let connected = lasting().dedicated_thread().connect(server.url());
    let (_undriven, limiter, permit) = on_an_undriven_runtime(connected);
    let semaphore = waiting(&limiter);
    let other = current_thread();
    let mut waiter = Box::pin(semaphore.acquire());
    other.block_on(async { start(&mut waiter) });
    // Neither of the two runtimes is driven.
    let third = current_thread();
    let elsewhere = waiting(&on(&third, connect(&server)));
    on(&third, until_waiting(&elsewhere, 1));
    drop(permit);
    on(&third, until_waiting(&elsewhere, 0));
    let bare = Builder::new_current_thread().build().unwrap();
    drop(bare.block_on(waiter).unwrap());
    // The same from a runtime without a timer.
    drop(bare.block_on(semaphore.acquire()).unwrap());
    assert!(limiter.status().store_up);
}

/// G8: exchanges in flight at the end of a runtime are no evidence about the store.
#[test]
fn runtimes_that_end_with_an_exchange_under_way_are_no_outage() {
    let server = RedisServer::start();
    let limiter = on(&current_thread(), connect(&server));
    let semaphore = limiter.semaphore(&ONE, "key").unwrap();
    drop(on(&current_thread(), semaphore.acquire()).unwrap());
    for _ in 0..8 {
        let runtime = multi_thread(1);
        // Scripts must wait, and the server counts them.
        server.cli(&["CLIENT", "PAUSE", "600000", "WRITE"]);
        let request = runtime.spawn(semaphore.acquire());
        let clients = || server.cli(&["INFO", "clients"]);
        until(|| clients().contains("blocked_clients:1"));
        runtime.shutdown_timeout(GUARD);
        drop(request);
        server.cli(&["CLIENT", "UNPAUSE"]);
        assert!(limiter.status().store_up);
    }
    let runtime = current_thread();
    drop(on(&runtime, semaphore.acquire()).unwrap());
    assert!(limiter.status().store_up);
}

/// A test suite with a static limiter: each test has its own runtime, and some runtimes end in the middle.
#[test]
fn a_static_limiter_serves_many_short_runtimes() {
    static LIMITER: OnceLock<Limiter> = OnceLock::new();
    // A static is never dropped, so a server would stay.
    let server = RedisServer::start();
    // A request that ends in the middle is given back once more after this time.
    let builder = lasting().store_timeout(GUARD / 6);
    let connect = || on(&current_thread(), builder.connect(server.url())).unwrap();
    let limiter = LIMITER.get_or_init(connect);
    let semaphore = limiter
        .semaphore(Limit::concurrent("many", 4), "key")
        .unwrap();
    for round in 0..200 {
        let runtime = current_thread();
        match round % 4 {
            0 => drop(on(&runtime, semaphore.acquire()).unwrap()),
            1 => runtime.block_on(async { start(&mut semaphore.acquire()) }),
            // Dropped between two runtimes.
            2 => {
                let permit = on(&runtime, semaphore.acquire()).unwrap();
                drop(runtime);
                drop(permit);
            }
            _ => {
                let request = semaphore.acquire();
                runtime.spawn(async move { drop(request.await) });
                runtime.block_on(tokio::task::yield_now());
            }
        }
        assert!(limiter.status().store_up, "round {round}");
    }
    on(&current_thread(), async {
        until_free(&semaphore).await;
        while server.key_count() != 0 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

/// Tests that count panics run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Panics of tokio because of a missing timer or missing IO.
fn panics() -> usize {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    static COUNTED: LazyLock<()> = LazyLock::new(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.to_string().contains("A Tokio 1.x context was found") {
                PANICS.fetch_add(1, Ordering::Relaxed);
            } else {
                before(info);
            }
        }));
    });
    LazyLock::force(&COUNTED);
    PANICS.load(Ordering::Relaxed)
}

/// Tokio panics once about the missing feature. Then the task moves.
#[test]
fn a_runtime_that_lacks_something_serves_requests() {
    let _alone = alone();
    let server = RedisServer::start();
    let no_timer = Builder::new_current_thread().enable_io().build().unwrap();
    let no_io = Builder::new_current_thread().enable_time().build().unwrap();
    let mut bare = Builder::new_multi_thread();
    let bare = bare.worker_threads(1).build().unwrap();
    for runtime in [&no_timer, &no_io, &bare] {
        let before = panics();
        let connected = runtime.block_on(lasting().connect(server.url()));
        let error = connected.unwrap_err().to_string();
        assert!(error.contains("timers and IO"), "{error}");
        assert_eq!(panics(), before + 1);

        let limiter = on(&current_thread(), connect(&server));
        let semaphore = limiter.semaphore(&ONE, "key").unwrap();
        let before = panics();
        for _ in 0..3 {
            drop(runtime.block_on(waiting(&limiter).acquire()).unwrap());
        }
        assert_eq!(panics(), before + 1);
        assert!(limiter.status().store_up);
        drop(on(&current_thread(), semaphore.acquire()));
    }
    for runtime in [&no_timer, &bare] {
        let memory = Limiter::in_memory();
        let memory = memory
            .semaphore(ONE.wait_up_to(Duration::from_millis(20)), "key")
            .unwrap();
        let held = on(&current_thread(), memory.acquire()).unwrap();
        let before = panics();
        for _ in 0..3 {
            let error = runtime.block_on(memory.acquire()).unwrap_err();
            assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
        }
        assert_eq!(panics(), before + 1);
        drop(held);
        drop(runtime.block_on(memory.acquire()).unwrap());
    }
}

/// In memory the task ends waits in time.
#[test]
fn a_wait_ends_in_time_although_nobody_drives_the_runtime_with_the_task() {
    let memory = Limiter::in_memory();
    let undriven = current_thread();
    let short = memory
        .semaphore(ONE.wait_up_to(Duration::from_millis(50)), "key")
        .unwrap();
    let held = on(&undriven, short.acquire()).unwrap();
    assert!(on(&undriven, short.acquire()).is_err());
    let error = on(&current_thread(), short.acquire()).unwrap_err();
    assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
    drop(held);
}

/// The state of the runtime on which the limiter was connected and first used.
#[derive(Clone, Copy, Debug, PartialEq)]
enum First {
    Same,
    Ended,
    EndedInTheMiddle,
    Undriven,
}

impl First {
    const ALL: [Self; 4] = [
        Self::Same,
        Self::Ended,
        Self::EndedInTheMiddle,
        Self::Undriven,
    ];

    /// A limiter in a separate namespace, used on `runtime` or on another one, which the caller must keep.
    fn limiter(self, runtime: &Runtime, url: &str, cell: usize) -> (Limiter, Option<Runtime>) {
        let other = (self != Self::Same).then(current_thread);
        let first = other.as_ref().unwrap_or(runtime);
        // Half of the timeout passes until a task moves.
        let builder = lasting().store_timeout(GUARD / 10);
        let builder = builder.namespace(format!("cell-{cell}"));
        let limiter = on(first, builder.connect(url)).unwrap();
        let semaphore = limiter.semaphore(&ONE, "first").unwrap();
        drop(on(first, decision(semaphore.clone())).unwrap());
        if self == Self::EndedInTheMiddle {
            first.block_on(async { start(&mut semaphore.acquire()) });
        }
        (limiter, other.filter(|_| self == Self::Undriven))
    }
}

/// An operation on a limiter; or the text of an error.
type Entry = fn(Limiter) -> Pin<Box<dyn Future<Output = Result<(), String>>>>;

fn outcome<T>(result: Result<T, impl ToString>) -> Result<(), String> {
    result.map(drop).map_err(|error| error.to_string())
}

/// The library's entry points that are futures.
const ENTRIES: [(&str, Entry); 8] = [
    ("connect", |_| {
        async { outcome(lasting().connect("redis://127.0.0.1:1").await) }.boxed_local()
    }),
    ("acquire", |limiter| {
        async move { outcome(waiting(&limiter).acquire().await) }.boxed_local()
    }),
    ("try_acquire", |limiter| {
        async move { outcome(limiter.semaphore(&ONE, "key").unwrap().try_acquire().await) }
            .boxed_local()
    }),
    ("acquire several", |limiter| {
        let rate = Limit::rate("rate", 9, Duration::from_secs(1));
        let both = waiting(&limiter).and(&rate, "key").unwrap();
        async move { outcome(both.acquire().await) }.boxed_local()
    }),
    ("usage", |limiter| {
        async move { outcome(limiter.semaphore(&ONE, "key").unwrap().usage().await) }.boxed_local()
    }),
    ("call", |limiter| {
        let serve = |_| ready(Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())));
        let service = limiter.layer(ONE).unwrap().layer(service_fn(serve));
        async move {
            let response = service.oneshot(Request::new(())).await.unwrap();
            let status = response.status();
            if status.is_success() {
                Ok(())
            } else {
                Err(status.to_string())
            }
        }
        .boxed_local()
    }),
    ("lost", |limiter| {
        async move {
            let permit = waiting(&limiter).acquire().await;
            let permit = permit.map_err(|error| error.to_string())?;
            assert!(permit.lost().now_or_never().is_none());
            Ok(())
        }
        .boxed_local()
    }),
    ("shutdown", |limiter| {
        async move {
            assert_eq!(limiter.shutdown(GUARD).await.lost, 0);
            Ok(())
        }
        .boxed_local()
    }),
];

/// Each entry point, on each kind of runtime, whatever happened to the first runtime. All at once, since some wait.
#[test]
fn every_entry_works_from_every_runtime() {
    let server = RedisServer::start();
    let url = &server.url();
    let runtimes: [fn() -> Runtime; 2] = [current_thread, || multi_thread(2)];
    let mut cells = 0;
    thread::scope(|scope| {
        for runtime in runtimes {
            for first in First::ALL {
                for (name, entry) in ENTRIES {
                    let number = cells;
                    cells += 1;
                    scope.spawn(move || {
                        let runtime = runtime();
                        let (limiter, _undriven) = first.limiter(&runtime, url, number);
                        on(&runtime, async {
                            // It may be refused while the machine stalls.
                            while let Err(error) = entry(limiter.clone()).await {
                                println!("{name}, {first:?}: {error}");
                                sleep(Duration::from_millis(10)).await;
                            }
                        });
                    });
                }
            }
        }
    });
    println!("{cells} cells");
}
