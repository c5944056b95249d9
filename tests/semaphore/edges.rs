//! Costs in an outage, the order of equal limits, heavy permits after a pause, and deploys. Time is paused, so all figures are exact.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, Fallback, Key, Limit, LimitLayer, Limiter, test_util::TestStore,
};

const SECOND: Duration = Duration::from_secs(1);

async fn replicas(store: &TestStore, count: usize) -> Vec<Limiter> {
    let mut replicas = Vec::new();
    for _ in 0..count {
        replicas.push(Limiter::builder().connect_to(store).await.expect("valid"));
    }
    replicas
}

async fn is_admitted(layer: &LimitLayer) -> bool {
    let serve = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let request = Request::builder().header("x-key", "acme").body(());
    let response = layer.layer(serve).oneshot(request.expect("valid")).await;
    response.expect("infallible").status().is_success()
}

/// Units that all replicas admit in a minute of an outage, while each asks ten times a second.
async fn admitted_in_an_outage(count: usize, cost: u32, fallback: Fallback) -> u64 {
    let store = TestStore::new();
    let limit = Limit::rate("tokens", 100, SECOND).fallback(fallback);
    let replicas = replicas(&store, count).await;
    let layers = replicas.iter().map(|limiter| {
        limiter
            .layer(limit.clone().by_header("x-key").cost_by(move |_| cost))
            .unwrap()
    });
    let layers: Vec<_> = layers.collect();
    // They count each other meanwhile.
    for _ in 0..25 {
        for layer in &layers {
            is_admitted(layer).await;
        }
        sleep(SECOND).await;
    }
    store.go_down();
    let mut units = 0;
    for _ in 0..600 {
        for layer in &layers {
            units += u64::from(is_admitted(layer).await) * u64::from(cost);
        }
        sleep(SECOND / 10).await;
    }
    units
}

/// G1 for rates: whatever a request costs. What exceeds a replica's burst is a debt.
#[tokio::test(start_paused = true)]
async fn in_an_outage_a_rate_is_divided_whatever_requests_cost() {
    for (count, fallback, most_a_second) in [
        (10, Fallback::Share, 100),
        (4, Fallback::Share, 100),
        (1, Fallback::Local(10), 10),
    ] {
        for cost in [1, 7, 10, 50, 100] {
            let units = admitted_in_an_outage(count, cost, fallback).await;
            // At first each replica has its burst, or admits one request.
            let first = count as u64 * u64::from(cost.max(100));
            assert!(
                units <= 60 * most_a_second + first,
                "{count} replicas, cost {cost}: {units}"
            );
            let asked = 600 * count as u64 * u64::from(cost);
            let least = asked.min(55 * most_a_second) / 2;
            assert!(units >= least, "{count} replicas, cost {cost}: {units}");
        }
    }
}

/// Batch requests that wait hold no slot of the wider limit, whatever the names.
#[tokio::test(start_paused = true)]
async fn the_smaller_of_two_shared_limits_is_acquired_first() {
    for number in 0..12 {
        let names = [format!("all{number}"), format!("batch{number}")];
        let [all, batch] = [(&names[0], 8), (&names[1], 6)].map(|(name, max)| {
            let limit = Limit::try_concurrent(name.clone(), max).expect("valid");
            limit.wait_up_to(60 * SECOND)
        });
        let store = TestStore::new();
        let stored = replicas(&store, 1).await.remove(0);
        for limiter in [Limiter::in_memory(), stored] {
            let both = limiter
                .semaphore(&all, Key::SHARED)
                .unwrap()
                .and(&batch, Key::SHARED)
                .unwrap();
            let held: Vec<_> = (0..12).map(|_| tokio::spawn(both.acquire())).collect();
            sleep(SECOND).await;
            let interactive = limiter.semaphore(&all, Key::SHARED).unwrap();
            let slots = [
                interactive.try_acquire().await,
                interactive.try_acquire().await,
            ];
            assert!(slots.iter().all(Result::is_ok), "{names:?}");
            let error = interactive.try_acquire().await.expect_err("six and two");
            assert_eq!(error.kind(), AcquireErrorKind::Full);
            held.iter().for_each(tokio::task::JoinHandle::abort);
        }
    }
}

/// In the five seconds after a pause the limit rises evenly, for permits of any weight.
#[tokio::test(start_paused = true)]
async fn a_heavy_permit_waits_for_the_ramp() {
    let limit = Limit::concurrent("upstream", 8).wait_up_to(60 * SECOND);
    let store = TestStore::new();
    let stored = replicas(&store, 1).await.remove(0);
    for limiter in [Limiter::in_memory(), stored] {
        let semaphore = limiter.semaphore(&limit, Key::SHARED).unwrap();
        drop(semaphore.acquire().await.expect("free"));
        for weight in [1, 3, 4, 8] {
            semaphore
                .pause("upstream", SECOND)
                .expect("a concurrency limit");
            let end = Instant::now() + SECOND;
            let mut permits = Vec::new();
            for units in (weight..=8).step_by(weight as usize) {
                permits.push(semaphore.acquire_many(weight).await.expect("in time"));
                // The limit is `units` from the end of the unit before on.
                let least = 5 * SECOND * (units - 1) / 8;
                let (least, after) = (least.as_millis(), end.elapsed().as_millis());
                assert!(
                    (least..least + 1_300).contains(&after),
                    "{units} at {after} ms"
                );
            }
            drop(permits);
            sleep(10 * SECOND).await;
        }
    }
}

/// Each replica has its share, whenever the outage begins: also in the moment in which replicas are counted.
#[tokio::test(start_paused = true)]
async fn an_outage_at_any_second_leaves_each_replica_its_share() {
    let limit = Limit::concurrent("shared", 10).fallback(Fallback::Share);
    for seconds in [15, 20, 25, 30] {
        let store = TestStore::new();
        let replicas = replicas(&store, 5).await;
        let semaphores = replicas
            .iter()
            .map(|limiter| limiter.semaphore(&limit, "key").unwrap());
        let semaphores: Vec<_> = semaphores.collect();
        for semaphore in &semaphores {
            drop(semaphore.acquire().await.expect("free"));
        }
        sleep(seconds * SECOND).await;
        store.go_down();
        let mut held = Vec::new();
        for semaphore in &semaphores {
            while let Ok(permit) = semaphore.try_acquire().await {
                held.push(permit);
            }
        }
        assert_eq!(held.len(), 10, "after {seconds} s");
    }
}

/// Waiters in a pause whose data are lost, which a further pause shows, are no sign of one loss after the other.
#[tokio::test(start_paused = true)]
async fn a_loss_is_found_once() {
    let limit = Limit::concurrent("slots", 2).wait_up_to(60 * SECOND);
    for waiters in [1, 2, 5] {
        let store = TestStore::new();
        let limiter = replicas(&store, 1).await.remove(0);
        let semaphore = limiter.semaphore(&limit, "key").unwrap();
        semaphore
            .pause("slots", 30 * SECOND)
            .expect("a concurrency limit");
        sleep(SECOND).await;
        let asked = (0..waiters).map(|_| tokio::spawn(semaphore.acquire()));
        let asked: Vec<_> = asked.collect();
        sleep(SECOND).await;
        store.forget();
        semaphore
            .pause("slots", 40 * SECOND)
            .expect("a concurrency limit");
        // A test would hang here if exchanges followed each other without a pause.
        sleep(30 * SECOND).await;
        assert!(asked.iter().all(|one| !one.is_finished()), "still paused");
        sleep(20 * SECOND).await;
        assert!(asked.iter().filter(|one| one.is_finished()).count() >= waiters.min(2));
        asked.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// The newcomer's exchange is the one that shows the loss: the store has granted what it would not have.
#[tokio::test(start_paused = true)]
async fn nobody_is_admitted_in_a_pause_that_the_store_has_lost() {
    let limit = Limit::concurrent("slots", 2).wait_up_to(60 * SECOND);
    for (holders, waiters) in [(0, 0), (0, 1), (1, 0), (1, 3)] {
        let store = TestStore::new();
        let limiter = replicas(&store, 1).await.remove(0);
        let semaphore = limiter.semaphore(&limit, "key").unwrap();
        let mut held = Vec::new();
        for _ in 0..holders {
            held.push(semaphore.acquire().await.expect("free"));
        }
        let began = Instant::now();
        semaphore.pause("slots", 8 * SECOND).expect("its limit");
        sleep(SECOND).await;
        for _ in 0..waiters {
            let asked = semaphore.acquire();
            tokio::spawn(async move { drop(asked.await) });
        }
        sleep(SECOND / 10).await;
        store.forget();
        drop(semaphore.acquire().await.expect("in time"));
        assert!(began.elapsed() >= 8 * SECOND, "{:?}", began.elapsed());
    }
}

/// G4: a rolling deploy refuses nobody: requests that wait in a replica whose balancer has left it are served there.
#[tokio::test(start_paused = true)]
async fn a_rolling_deploy_refuses_nobody() {
    const WORK: Duration = Duration::from_millis(400);
    let store = TestStore::new();
    let limit = Limit::concurrent("slots", 4).wait_up_to(60 * SECOND);
    let open = Arc::new(Mutex::new(replicas(&store, 3).await));
    let clients = (0..30).map(|number| {
        let (open, limit) = (open.clone(), limit.clone());
        tokio::spawn(async move {
            let mut answers = Vec::new();
            for turn in 0..6 {
                let semaphore = {
                    let open = open.lock().expect("no panic");
                    open[(number + turn) % open.len()]
                        .semaphore(&limit, "key")
                        .unwrap()
                };
                let answer = semaphore.acquire().await;
                answers.push(answer.as_ref().err().map(|error| error.kind()));
                sleep(WORK).await;
                drop(answer);
            }
            answers
        })
    });
    let clients: Vec<_> = clients.collect();
    for _ in 0..3 {
        sleep(2 * SECOND).await;
        let new = replicas(&store, 1).await;
        let old = {
            let mut open = open.lock().expect("no panic");
            open.extend(new);
            let busy = open.iter().position(|one| one.status().waiting > 0);
            open.remove(busy.expect("some wait"))
        };
        let report = old.shutdown(20 * SECOND).await;
        assert_eq!((report.refused, report.lost, report.unconfirmed), (0, 0, 0));
    }
    for answers in clients {
        assert_eq!(answers.await.expect("no panic"), [None; 6]);
    }
}
