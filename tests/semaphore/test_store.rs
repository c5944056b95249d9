//! The store for tests of outages: it keeps the guarantees of the store in Redis, and fails on demand.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, advance, sleep};
use tower_turnstile::{
    AcquireErrorKind, Fallback, Limit, Limiter, LimiterBuilder, Permit, Semaphore, ShutdownReport,
    test_util::TestStore,
};

use crate::backend::{Backend, queue, soon, start, until_free, until_up, until_waiting, usage};

const ONE: Limit = Limit::concurrent("one", 1).wait_up_to(Duration::from_secs(60));
/// Without the store, requests are refused.
const STRICT: Limit = ONE.fallback(Fallback::Reject);
const STORE_TIMEOUT: Duration = Duration::from_millis(500);
const LEASE: Duration = Duration::from_secs(30);

macro_rules! on_this_store {
    ($($case:ident),* $(,)?) => {
        $(#[tokio::test] async fn $case() { crate::$case(Backend::test_store()).await })*
    };
}

promises!(on_this_store);

async fn connect(builder: LimiterBuilder, store: &TestStore) -> Limiter {
    builder.connect_to(store).await.expect("valid settings")
}

async fn replica(store: &TestStore) -> Limiter {
    connect(Limiter::builder(), store).await
}

async fn semaphore(store: &TestStore, limit: &Limit) -> Semaphore {
    replica(store).await.semaphore(limit, "key").unwrap()
}

async fn kind(semaphore: &Semaphore) -> AcquireErrorKind {
    let error = semaphore.try_acquire().await.expect_err("refused");
    error.kind()
}

const SHARED: Limit = Limit::concurrent("shared", 10).fallback(Fallback::Share);

/// The limit is declared, but no request comes before the outage.
#[tokio::test(start_paused = true)]
async fn a_replica_without_requests_knows_its_share() {
    let store = TestStore::new();
    let replicas = [
        semaphore(&store, &SHARED).await,
        semaphore(&store, &SHARED).await,
    ];
    sleep(Duration::from_secs(15)).await;
    store.go_down();
    for replica in &replicas {
        let asked = join_all((0..10).map(|_| replica.try_acquire())).await;
        assert_eq!(asked.iter().filter(|permit| permit.is_ok()).count(), 5);
    }
}

/// A replica that is new in the outage, or was new at its start, admits nobody; the others admit their shares.
#[tokio::test(start_paused = true)]
async fn replicas_that_were_counted_admit_their_shares_without_the_store() {
    let store = TestStore::new();
    let mut replicas = Vec::new();
    for _ in 0..3 {
        let replica = semaphore(&store, &SHARED).await;
        drop(replica.acquire().await.expect("free"));
        replicas.push(replica);
    }
    sleep(Duration::from_secs(15)).await;
    let new = semaphore(&store, &SHARED).await;
    drop(new.acquire().await.expect("free"));
    let held = replicas[0].acquire().await.expect("free");
    store.go_down();
    for replica in &replicas {
        let asked = join_all((0..10).map(|_| replica.acquire())).await;
        let (admitted, refused): (Vec<_>, Vec<_>) = asked.into_iter().partition(Result::is_ok);
        let before = usize::from(std::ptr::eq(replica, &replicas[0]));
        assert_eq!((before + admitted.len(), refused.len()), (4, 6 + before));
    }
    assert_eq!(kind(&new).await, AcquireErrorKind::Unavailable);
    drop(held);
    store.come_back();
    sleep(Duration::from_secs(25)).await;
    drop(new.acquire().await.expect("free"));
    store.go_down();
    let asked = join_all((0..10).map(|_| new.acquire())).await;
    assert_eq!(
        asked.iter().filter(|permit| permit.is_ok()).count(),
        3,
        "of four replicas"
    );
}

#[tokio::test(start_paused = true)]
async fn limiters_of_one_store_share_the_cap() {
    let (store, other_store) = (TestStore::new(), TestStore::new());
    let (here, there) = (semaphore(&store, &ONE).await, semaphore(&store, &ONE).await);
    let elsewhere = semaphore(&other_store, &ONE).await;
    let permit = here.acquire().await.expect("free");
    assert_eq!(kind(&there).await, AcquireErrorKind::Full);
    assert!(elsewhere.try_acquire().await.is_ok(), "another store");
    let waiter = queue(&there, 1).await;
    // A message wakes the waiter long before its next poll.
    let released = Instant::now();
    permit.release().await.expect("the store is up");
    let permit = waiter.await.expect("no panic");
    assert!(released.elapsed() < Duration::from_millis(10));
    drop(permit);
    until_free(&here).await;
}

#[tokio::test(start_paused = true)]
async fn limits_fall_back_while_the_store_is_down() {
    let store = TestStore::new();
    let limiter = replica(&store).await;
    let on = |name, fallback| {
        let limit = Limit::concurrent(name, 1).fallback(fallback);
        limiter.semaphore(&limit, "key").unwrap()
    };
    let reject = on("reject", Fallback::Reject);
    let (local, allow) = (
        on("local", Fallback::Local(2)),
        on("allow", Fallback::Allow),
    );
    let before = local.acquire().await.expect("free");
    store.go_down();
    assert!(store.is_down());
    assert_eq!(kind(&reject).await, AcquireErrorKind::Unavailable);
    assert!(!limiter.status().store_up);
    // The store admitted a single request.
    let during = local.try_acquire().await.expect("the second of two");
    assert_eq!(kind(&local).await, AcquireErrorKind::Full);
    let allowed: Vec<_> = [allow.try_acquire().await, allow.try_acquire().await].into();
    assert!(allowed.iter().all(Result::is_ok));
    drop((before, allowed));

    store.come_back();
    until_up(&limiter).await;
    assert!(reject.try_acquire().await.is_ok());
    // Permits admitted meanwhile count.
    let other = replica(&store).await;
    let local_there = other
        .semaphore(
            Limit::concurrent("local", 1).fallback(Fallback::Local(2)),
            "key",
        )
        .unwrap();
    assert_eq!(kind(&local_there).await, AcquireErrorKind::Full);
    drop(during);
    until_free(&local_there).await;
    assert!(local_there.try_acquire().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_limiter_starts_while_the_store_is_down() {
    let store = TestStore::new();
    store.go_down();
    let limiter = replica(&store).await;
    assert!(!limiter.status().store_up);
    let strict = limiter.semaphore(&STRICT, "key").unwrap();
    assert_eq!(kind(&strict).await, AcquireErrorKind::Unavailable);
    store.come_back();
    until_up(&limiter).await;
    assert!(strict.acquire().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_delay_is_that_of_one_round_trip() {
    const DELAY: Duration = Duration::from_millis(40);
    let store = TestStore::new();
    let (here, there) = (semaphore(&store, &ONE).await, semaphore(&store, &ONE).await);
    store.respond_after(DELAY);
    let asked = Instant::now();
    let permit = here.acquire().await.expect("free");
    assert_eq!(asked.elapsed(), DELAY);
    let waiter = queue(&there, 1).await;
    // The release takes half the delay, and the wake-up the other half.
    let released = Instant::now();
    drop(permit);
    drop(waiter.await.expect("no panic"));
    assert_eq!(released.elapsed(), DELAY);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_too_slow_is_given_up() {
    let store = TestStore::new();
    let limiter = replica(&store).await;
    let (here, there) = (
        limiter.semaphore(&STRICT, "key").unwrap(),
        semaphore(&store, &STRICT).await,
    );
    store.respond_after(STORE_TIMEOUT * 3 / 2);
    let asked = Instant::now();
    let error = here.acquire().await.expect_err("no answer in time");
    assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
    assert_eq!(asked.elapsed(), STORE_TIMEOUT);
    // The request has still arrived, and its slot is released.
    store.respond_after(Duration::ZERO);
    until_up(&limiter).await;
    until_free(&there).await;
    assert!(here.acquire().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_is_under_way_is_lost_when_the_store_goes_down() {
    let store = TestStore::new();
    let limiter = replica(&store).await;
    let here = limiter.semaphore(&STRICT, "key").unwrap();
    store.respond_after(STORE_TIMEOUT / 2);
    for passed in [STORE_TIMEOUT / 8, STORE_TIMEOUT * 3 / 8] {
        let asked = tokio::spawn(here.acquire());
        sleep(passed).await; // before it has arrived; before the reply is here
        store.go_down();
        let error = asked.await.expect("no panic").expect_err("refused");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
        store.come_back();
        until_up(&limiter).await;
        until_free(&here).await;
    }
}

/// The data is kept, and waiters keep their places.
#[tokio::test(start_paused = true)]
async fn a_short_outage_costs_no_slot_and_no_place() {
    let store = TestStore::new();
    let limiter = replica(&store).await;
    let (here, there) = (
        limiter.semaphore(&ONE, "key").unwrap(),
        semaphore(&store, &ONE).await,
    );
    let permit = here.acquire().await.expect("free");
    let first = queue(&there, 1).await;
    store.go_down();
    advance(Duration::from_secs(2)).await;
    store.come_back();
    until_up(&limiter).await;
    assert!(!permit.is_lost());
    let second = queue(&here, 2).await;
    drop(permit);
    let first = first.await.expect("no panic");
    assert_eq!(usage(&here).await, (1, 1));
    drop(first);
    drop(second.await.expect("no panic"));
}

#[tokio::test(start_paused = true)]
async fn a_permit_is_lost_when_the_outage_outlasts_its_lease() {
    let store = TestStore::new();
    let here = connect(Limiter::builder().lease(LEASE), &store).await;
    let here = here.semaphore(&STRICT, "key").unwrap();
    let permit = here.acquire().await.expect("free");
    let deadline = permit.deadline().expect("it has a lease");
    store.go_down();
    permit.lost().await;
    assert!(Instant::now() >= deadline);
    assert!(deadline.elapsed() < Duration::from_millis(100));
    assert!(permit.is_lost());
}

#[tokio::test(start_paused = true)]
async fn held_permits_are_put_back_when_the_store_has_forgotten_them() {
    let store = TestStore::new();
    let (here, there) = (semaphore(&store, &ONE).await, semaphore(&store, &ONE).await);
    let permit = here.acquire().await.expect("free");
    store.forget();
    assert_eq!(usage(&there).await, (0, 0));
    // Renewed after each third of the lease.
    sleep(LEASE / 3 + Duration::from_secs(1)).await;
    assert_eq!(usage(&there).await, (1, 0));
    assert_eq!(kind(&there).await, AcquireErrorKind::Full);
    assert!(!permit.is_lost());
    drop(permit);
    until_free(&there).await;
}

/// Waiters of a store restarted without its data rejoin its queue.
#[tokio::test(start_paused = true)]
async fn waiters_outlive_a_restart_without_data() {
    let store = TestStore::new();
    let (here, there) = (semaphore(&store, &ONE).await, semaphore(&store, &ONE).await);
    let permit = here.acquire().await.expect("free");
    let waiter = queue(&there, 1).await;
    store.go_down();
    store.forget();
    store.come_back();
    // The waiter does not ask yet, because it would be admitted in place of the holder.
    sleep(LEASE / 3 + Duration::from_secs(1)).await;
    drop(permit);
    drop(soon(waiter).await.expect("no panic"));
    until_free(&here).await;
}

/// The waiters of a dropped replica are passed over, and its slots expire.
#[tokio::test(start_paused = true)]
async fn a_limiter_that_is_dropped_is_a_replica_that_is_gone() {
    let store = TestStore::new();
    let here = semaphore(&store, &ONE).await;
    let permit = here.acquire().await.expect("free");
    {
        let there = semaphore(&store, &ONE).await;
        let mut waiter = there.acquire();
        start(&mut waiter);
        until_waiting(&here, 1).await;
    }
    until_waiting(&here, 0).await;
    assert_eq!(usage(&here).await, (1, 0));
    drop(permit);
}

#[tokio::test(start_paused = true)]
async fn settings_are_checked() {
    let builder = Limiter::builder().lease(Duration::ZERO);
    assert!(builder.connect_to(&TestStore::new()).await.is_err());
}

/// A delay of any length, when nobody waits for the answer.
#[tokio::test(start_paused = true)]
async fn the_longest_delay_is_a_timeout() {
    let store = TestStore::new();
    let here = semaphore(&store, &STRICT).await;
    store.respond_after(Duration::MAX);
    assert_eq!(kind(&here).await, AcquireErrorKind::Unavailable);
}

/// For many keys that no request waits for.
const FLOOD: Limit = Limit::concurrent("flood", 1).fallback(Fallback::Reject);
/// More distinct keys than all exchanges within `store_timeout` can cover at this distance.
const MANY_KEYS: u64 = 5_000;
/// Time allowed for a shutdown, which it does not need.
const GRACE: Duration = Duration::from_secs(60);

/// Permits of one replica for distinct keys.
async fn permits(limiter: &Limiter, keys: u64) -> Vec<Permit> {
    let acquire = |key| limiter.semaphore(&FLOOD, key).unwrap().acquire();
    let permits = join_all((0..keys).map(acquire)).await.into_iter();
    permits.map(|permit| permit.expect("free")).collect()
}

/// Shuts down a limiter while its permits are dropped. Returns how long it took.
async fn drop_and_shut_down(
    limiter: &Limiter,
    permits: Vec<Permit>,
    deadline: Duration,
) -> (ShutdownReport, Duration) {
    let began = Instant::now();
    let shutdown = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.shutdown(deadline).await }
    });
    tokio::task::yield_now().await;
    drop(permits);
    let report = shutdown.await.expect("no panic");
    (report, began.elapsed())
}

/// Number of keys whose only slot is taken.
async fn taken(store: &TestStore, keys: u64) -> usize {
    store.respond_after(Duration::ZERO);
    let other = replica(store).await;
    let usage = |key| {
        let semaphore = other.semaphore(&FLOOD, key).unwrap();
        async move { semaphore.usage().await.expect("the store is up").in_use as usize }
    };
    join_all((0..keys).map(usage)).await.into_iter().sum()
}

#[tokio::test(start_paused = true)]
async fn the_later_of_two_shutdowns_counts() {
    let second = Duration::from_secs(1);
    for (later, is_lost) in [(20 * second, false), (2 * second, true)] {
        let store = TestStore::new();
        let limiter = replica(&store).await;
        let mut permits = permits(&limiter, 2).await;
        let (first, again) = (limiter.clone(), limiter.clone());
        let first = tokio::spawn(async move { first.shutdown(5 * second).await });
        sleep(second).await;
        let again = tokio::spawn(async move { again.shutdown(later).await });
        sleep(6 * second).await;
        drop(permits.pop());
        sleep(second).await;
        assert_eq!(permits[0].is_lost(), is_lost, "{later:?}");
        drop(permits);
        let lost = if is_lost { 2 } else { 0 };
        for report in [first, again] {
            let report = report.await.expect("no panic");
            let counts = (report.released, report.lost, report.unconfirmed);
            assert_eq!(counts, (2 - lost, lost, 0), "{later:?}");
        }
        assert_eq!(taken(&store, 2).await, 0);
    }
}

#[cfg(feature = "operate")]
#[tokio::test]
async fn a_replica_has_its_label() {
    use tower_turnstile::operate::seam::{Desk, Question};

    let store = TestStore::new();
    let builder = Limiter::builder().operable().replica_label("r1");
    let limiter = connect(builder, &store).await;
    let answer = Desk::of(&limiter).answer(0, &Question::Replicas).await;
    assert_eq!(answer.expect("the limiter exists").label, "r1");
}

/// G5: however many releases are pending, a shutdown leaves none of them to the end of its lease.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_while_releases_are_confirmed() {
    // Far more round trips than a shutdown allows for a single confirmation.
    const STORE_TIMEOUT: Duration = Duration::from_millis(50);
    let store = TestStore::new();
    let limiter = connect(Limiter::builder().store_timeout(STORE_TIMEOUT), &store).await;
    let permits = permits(&limiter, MANY_KEYS).await;
    store.respond_after(STORE_TIMEOUT * 9 / 10);
    let (report, took) = drop_and_shut_down(&limiter, permits, GRACE).await;
    assert_eq!(taken(&store, MANY_KEYS).await, 0, "{report:?}");
    assert_eq!((report.released, report.lost), (MANY_KEYS as usize, 0));
    assert_eq!(report.unconfirmed, 0);
    assert!(took < GRACE / 10, "{took:?}");
}

/// After the deadline, releases have one `store_timeout`, and the report counts the unconfirmed ones.
#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_soon_after_its_deadline() {
    const DEADLINE: Duration = Duration::from_millis(100);
    const KEYS: u64 = 1_000;
    for delay in [STORE_TIMEOUT * 9 / 10, Duration::MAX] {
        let store = TestStore::new();
        let limiter = replica(&store).await;
        let permits = permits(&limiter, KEYS).await;
        store.respond_after(delay);
        let began = Instant::now();
        let report = limiter.shutdown(DEADLINE).await;
        let took = began.elapsed();
        assert!(took <= DEADLINE + STORE_TIMEOUT, "{took:?}");
        assert_eq!((report.released, report.lost), (0, KEYS as usize));
        assert!(permits.iter().all(Permit::is_lost));
        let taken = taken(&store, KEYS).await;
        assert_eq!(taken, report.unconfirmed, "{report:?} after {delay:?}");
        assert!(delay < Duration::MAX || taken == KEYS as usize, "{taken}");
    }
}

/// A store without an answer does not delay a shutdown, and the report contains everything that the store may still
/// count.
#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_a_store_that_is_gone() {
    type Outage = fn(&TestStore);
    let outages: [(&str, Outage); 2] = [
        ("down", |store| store.go_down()),
        ("silent", |store| store.respond_after(Duration::MAX)),
    ];
    for (name, outage) in outages {
        let store = TestStore::new();
        let limiter = replica(&store).await;
        let permits = permits(&limiter, 10).await;
        outage(&store);
        let (report, took) = drop_and_shut_down(&limiter, permits, GRACE).await;
        assert_eq!((report.released, report.lost), (0, 0), "{name}");
        assert_eq!(report.unconfirmed, 10, "{name}");
        assert!(took <= 3 * STORE_TIMEOUT, "{name}: {took:?}");
        if name == "down" {
            store.come_back();
            assert_eq!(taken(&store, 10).await, 10);
        }
        // Releases continue in the background, and another shutdown waits for the rest.
        store.respond_after(Duration::ZERO);
        until_up(&limiter).await;
        let report = limiter.shutdown(GRACE).await;
        assert_eq!((report.released, report.unconfirmed), (0, 0), "{name}");
        assert_eq!(taken(&store, 10).await, 0, "{name}");
    }
}

/// A connection that ends in the middle of a shutdown costs time, but no slot.
#[tokio::test(start_paused = true)]
async fn a_shutdown_outlasts_a_short_outage() {
    let store = TestStore::new();
    let limiter = replica(&store).await;
    let permits = permits(&limiter, 1_000).await;
    store.respond_after(Duration::from_millis(20));
    let outage = tokio::spawn({
        let store = store.clone();
        async move {
            sleep(Duration::from_millis(50)).await;
            store.go_down();
            sleep(STORE_TIMEOUT / 2).await;
            store.come_back();
        }
    });
    let (report, took) = drop_and_shut_down(&limiter, permits, GRACE).await;
    outage.await.expect("no panic");
    assert_eq!(taken(&store, 1_000).await, 0, "{report:?}");
    assert_eq!((report.released, report.unconfirmed), (1_000, 0));
    assert!(took < GRACE / 10, "{took:?}");
}

/// Permits dropped earlier, and requests that waited, do not count as released, but are awaited as well.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_earlier_releases() {
    let store = TestStore::new();
    let limiter = replica(&store).await;
    let holder = semaphore(&store, &ONE).await.acquire().await.expect("free");
    let one = limiter.semaphore(ONE.wait_up_to(2 * GRACE), "key").unwrap();
    let mut waiter = one.acquire();
    start(&mut waiter);
    until_waiting(&one, 1).await;
    let permits = permits(&limiter, MANY_KEYS).await;
    store.respond_after(Duration::from_millis(20));
    drop(permits);
    let report = limiter.shutdown(GRACE).await;
    let refused = waiter.await.expect_err("refused");
    assert_eq!(refused.kind(), AcquireErrorKind::ShutDown);
    assert_eq!(taken(&store, MANY_KEYS).await, 0, "{report:?}");
    assert_eq!(
        (report.refused, report.released, report.unconfirmed),
        (1, 0, 0)
    );
    assert_eq!(usage(&semaphore(&store, &ONE).await).await, (1, 0));
    drop(holder);
}
