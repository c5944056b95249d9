//! Permits of several units.

use std::{
    collections::VecDeque,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::task::{JoinHandle, yield_now};
use tower_turnstile::{AcquireError, AcquireErrorKind, Key, Limit, Mode, Permit, Semaphore};

use crate::{
    backend::{Backend, GUARD, connect, lasting, soon, until, until_free, until_waiting, usage},
    support::redis_server::RedisServer,
};

const TEN: Limit = Limit::concurrent("ten", 10).wait_up_to(GUARD);

conformance! {
    a_permit_counts_as_many_units_as_it_weighs,
    a_weight_that_no_permit_can_have_is_refused_at_once,
    a_light_newcomer_does_not_pass_a_heavy_waiter,
    each_is_granted_in_the_order_of_arrival,
    the_cap_holds_under_load,
    a_limit_that_is_lowered_lets_a_heavy_waiter_in_alone,
    several_limits_are_taken_whole_or_not_at_all,
    what_is_kept_for_reuse_makes_room_for_a_heavy_request,
}

fn refusal(error: &AcquireError) -> (AcquireErrorKind, u32, u32) {
    (error.kind(), error.weight(), error.max())
}

async fn a_permit_counts_as_many_units_as_it_weighs(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&TEN, "key").unwrap();
    let heavy = semaphore.acquire_many(7).await.expect("free");
    let light = semaphore.acquire().await.expect("free");
    assert_eq!((heavy.weight(), light.weight()), (7, 1));
    assert_eq!(usage(&semaphore).await, (8, 0));
    // The process has two permits.
    assert_eq!(limiter.status().held, 2);
    let error = semaphore.try_acquire_many(3).await.expect_err("too many");
    assert_eq!(refusal(&error), (AcquireErrorKind::Full, 3, 10));
    assert_eq!(
        error.to_string(),
        "limit `ten` is full: 3 slots needed, 8 of 10 in use"
    );
    let other = semaphore.try_acquire_many(2).await.expect("just enough");
    drop((heavy, other));
    until(&semaphore, |in_use, _| in_use == 1).await;
    drop(light);
    until_free(&semaphore).await;
}

async fn a_weight_that_no_permit_can_have_is_refused_at_once(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&TEN, "key").unwrap();
    for (weight, words) in [
        (0, "a permit of limit `ten` weighs 1 to 64 units, not 0"),
        (11, "a permit of 11 units is heavier than limit `ten` of 10"),
        (64, "a permit of 64 units is heavier than limit `ten` of 10"),
        (65, "a permit of limit `ten` weighs 1 to 64 units, not 65"),
        (
            u32::MAX,
            "a permit of limit `ten` weighs 1 to 64 units, not 4294967295",
        ),
    ] {
        let refused = semaphore.acquire_many(weight).await;
        let error = refused.expect_err("it could never enter");
        assert_eq!(
            refusal(&error),
            (AcquireErrorKind::InvalidWeight, weight, 10)
        );
        assert!(!error.is_limited());
        assert_eq!(error.to_string(), words);
    }
    assert_eq!(usage(&semaphore).await, (0, 0));
    // A key without slots is full for every weight.
    let none = semaphore.clone().value(0).unwrap();
    let error = none.acquire_many(2).await.expect_err("no slots");
    assert_eq!(refusal(&error), (AcquireErrorKind::Full, 2, 0));
    // A limit without enforcement refuses nothing.
    limiter
        .update(&TEN.mode(Mode::Shadow))
        .expect("it may become that");
    let permit = semaphore.acquire_many(65).await.expect("not enforced");
    assert_eq!(permit.weight(), 1);
}

/// Queues a request at this place.
async fn queue(semaphore: &Semaphore, weight: u32, place: u32) -> JoinHandle<Permit> {
    let request = semaphore.acquire_many(weight);
    let task = tokio::spawn(async move { request.await.expect("it fits in the end") });
    until_waiting(semaphore, place).await;
    task
}

async fn granted(task: JoinHandle<Permit>) -> Permit {
    soon(task).await.expect("no panic")
}

async fn a_light_newcomer_does_not_pass_a_heavy_waiter(backend: Backend) {
    let (one, other) = (backend.semaphore(&TEN).await, backend.semaphore(&TEN).await);
    let holder = one.acquire_many(6).await.expect("free");
    let heavy = queue(&one, 5, 1).await;
    let light = queue(&other, 1, 2).await;
    // Four units are free.
    let error = other.try_acquire().await.expect_err("others wait");
    assert_eq!(error.kind(), AcquireErrorKind::Full);
    assert_eq!(usage(&one).await, (6, 2));
    drop(holder);
    let (heavy, light) = (granted(heavy).await, granted(light).await);
    assert_eq!((heavy.weight(), light.weight()), (5, 1));
    drop((heavy, light));
    until_free(&one).await;
}

/// A model of the queue, compared with the store's: each release must grant exactly the next requests.
async fn each_is_granted_in_the_order_of_arrival(backend: Backend) {
    const REQUESTS: u32 = 40;
    let replicas = [
        backend.semaphore(&TEN).await,
        backend.semaphore(&TEN).await,
        backend.semaphore(&TEN).await,
    ];
    let mut rng = fastrand::Rng::with_seed(7);
    let mut held = vec![replicas[0].acquire_many(10).await.expect("free")];
    let mut waiting = VecDeque::new();
    for number in 0..REQUESTS {
        let weight = rng.u32(1..=10);
        let replica = &replicas[rng.usize(0..3)];
        waiting.push_back((weight, queue(replica, weight, number + 1).await));
    }
    while !held.is_empty() {
        drop(held.swap_remove(rng.usize(0..held.len())));
        let mut in_use: u32 = held.iter().map(Permit::weight).sum();
        let mut next = Vec::new();
        while let Some((weight, _)) = waiting.front()
            && in_use + weight <= 10
        {
            in_use += weight;
            next.extend(waiting.pop_front());
        }
        let expected = (in_use, waiting.len() as u32);
        until(&replicas[0], |in_use, waiting| {
            (in_use, waiting) == expected
        })
        .await;
        for (weight, task) in next {
            let permit = granted(task).await;
            assert_eq!(permit.weight(), weight);
            held.push(permit);
        }
        let early = waiting.iter().position(|(_, task)| task.is_finished());
        assert_eq!(early, None, "granted before its turn");
    }
    assert!(waiting.is_empty());
    until_free(&replicas[0]).await;
}

/// Three replicas with far more demand than capacity.
async fn the_cap_holds_under_load(backend: Backend) {
    const EACH: u32 = 25;
    let inside = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for replica in 0..3 {
        let semaphore = backend.semaphore(&TEN).await;
        for number in 0..10 {
            let (semaphore, inside) = (semaphore.clone(), inside.clone());
            tasks.push(tokio::spawn(async move {
                let mut rng = fastrand::Rng::with_seed(10 * replica + number);
                for _ in 0..EACH {
                    let weight = rng.u32(1..=10);
                    let permit = semaphore.acquire_many(weight).await.expect("in the end");
                    let now = inside.fetch_add(weight, Ordering::SeqCst) + weight;
                    assert!(now <= 10, "{now} units are inside");
                    yield_now().await;
                    inside.fetch_sub(weight, Ordering::SeqCst);
                    drop(permit);
                }
            }));
        }
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    until_free(&backend.semaphore(&TEN).await).await;
}

async fn a_limit_that_is_lowered_lets_a_heavy_waiter_in_alone(backend: Backend) {
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore(&TEN, "key").unwrap();
    let holder = semaphore.acquire_many(4).await.expect("free");
    let heavy = queue(&semaphore, 8, 1).await;
    let light = queue(&semaphore, 1, 2).await;
    let three = Limit::concurrent("ten", 3).wait_up_to(GUARD);
    limiter.update(&three).expect("it may become that");
    let error = semaphore.acquire_many(8).await.expect_err("too heavy now");
    assert_eq!(refusal(&error), (AcquireErrorKind::InvalidWeight, 8, 3));
    assert_eq!(usage(&semaphore).await, (4, 2));
    drop(holder);
    let heavy = granted(heavy).await;
    assert_eq!(usage(&semaphore).await, (8, 1));
    drop(heavy);
    drop(granted(light).await);
    until_free(&semaphore).await;
}

async fn several_limits_are_taken_whole_or_not_at_all(backend: Backend) {
    const FIVE: Limit = Limit::concurrent("five", 5).wait_up_to(GUARD);
    let limiter = backend.replica().await;
    let (ten, five) = (
        limiter.semaphore(&TEN, Key::SHARED).unwrap(),
        limiter.semaphore(&FIVE, "key").unwrap(),
    );
    let both = five.clone().and(&TEN, Key::SHARED).unwrap();
    let error = both.acquire_many(6).await.expect_err("too heavy for one");
    assert_eq!(refusal(&error), (AcquireErrorKind::InvalidWeight, 6, 5));
    let others = ten.acquire_many(7).await.expect("free");
    let error = both.try_acquire_many(4).await.expect_err("one is full");
    assert_eq!((error.limit_name(), error.weight()), ("ten", 4));
    until_free(&five).await;
    let request = both.acquire_many(4);
    let waiter = tokio::spawn(async move { request.await.expect("in the end") });
    until_waiting(&ten, 1).await;
    drop(others);
    let permit = granted(waiter).await;
    assert_eq!(permit.weight(), 4);
    assert_eq!((usage(&five).await.0, usage(&ten).await.0), (4, 4));
    drop(permit);
    until_free(&five).await;
    until_free(&ten).await;
}

async fn what_is_kept_for_reuse_makes_room_for_a_heavy_request(backend: Backend) {
    let limit = TEN.reuse();
    let semaphore = backend.semaphore(&limit).await;
    for _ in 0..20 {
        let permits = (0..8).map(|_| semaphore.acquire());
        let permits = futures_util::future::join_all(permits).await;
        drop(permits);
        let heavy = semaphore.try_acquire_many(9).await.expect("all are idle");
        drop(heavy);
    }
    until_free(&semaphore).await;
}

#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn renewals_keep_all_units() {
    let backend = Backend::test_store();
    let semaphore = backend.semaphore(&TEN).await;
    let permit = semaphore.acquire_many(7).await.expect("free");
    let first = permit.deadline().expect("of the store");
    tokio::time::sleep_until(first + 10 * GUARD).await;
    assert_eq!(usage(&semaphore).await, (7, 0));
    assert!(!permit.is_lost());
}

#[tokio::test]
async fn lost_data_is_restored_whole() {
    let server = RedisServer::start();
    let semaphore = connect(&server).await.semaphore(&TEN, "key").unwrap();
    let permit = semaphore.acquire_many(7).await.expect("free");
    server.cli(&["FLUSHALL"]);
    until(&semaphore, |in_use, _| in_use == 7).await;
    let waiter = queue(&semaphore, 4, 1).await;
    assert!(!permit.is_lost());
    drop(permit);
    drop(granted(waiter).await);
    until_free(&semaphore).await;
    assert_eq!(server.key_count(), 0);
}

/// How long the units of the killed process stay taken.
const LEASE: Duration = Duration::from_secs(10);
const STORE: &str = "TURNSTILE_WEIGHTS_STORE";

#[test]
#[ignore = "a process that another test starts and kills"]
fn process() {
    let url = std::env::var(STORE).expect("the other test says where its store is");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let builder = lasting()
            .lease(LEASE)
            .store_timeout(LEASE / 4)
            .poll_interval(LEASE / 10);
        let limiter = builder.connect(&url).await.expect("it is up");
        let semaphore = limiter.semaphore(&TEN, "key").unwrap();
        loop {
            // A machine that stalls may take the slots away.
            let holder = semaphore.acquire_many(7).await.expect("free");
            tokio::select! {
                _ = semaphore.acquire_many(10) => {}
                _ = holder.lost() => {}
            }
        }
    });
}

/// Killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn units_of_a_killed_process_come_back_together() {
    let server = RedisServer::start();
    let binary = std::env::current_exe().expect("a path");
    let process = Command::new(binary)
        .args(["weights::process", "--exact", "--ignored"])
        .env(STORE, server.url())
        .stdout(Stdio::null())
        .spawn();
    let process = Process(process.expect("it runs"));
    let semaphore = connect(&server).await.semaphore(&TEN, "key").unwrap();
    until(&semaphore, |in_use, waiting| (in_use, waiting) == (7, 1)).await;
    let waiter = queue(&semaphore, 9, 2).await;
    drop(process);
    let permit = granted(waiter).await;
    // Its waiter was passed over, and is evicted later.
    assert_eq!(usage(&semaphore).await.0, 9);
    drop(permit);
    until(&semaphore, |in_use, _| in_use == 0).await;
}
