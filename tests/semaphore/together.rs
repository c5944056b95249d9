//! Several limits together: all or nothing, narrow limits first, and no deadlock between requests.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower_turnstile::{
    AcquireErrorKind, Class, ConfigErrorKind, Key, Limit, Limiter, Permit, Policy, Semaphore,
};

use crate::{
    backend::{
        Backend, GUARD, lasting, meanwhile, queue, queue_under, soon, start, until, until_free,
        until_same, until_waiting, usage,
    },
    support::redis_server::RedisServer,
};

const CALLER: Limit = Limit::concurrent("caller", 1);
const ALL: Limit = Limit::concurrent("all", 1);
/// One per half hour after the burst: nothing drains during a test.
const OPENS: Limit = Limit::rate("opens", 2, Duration::from_secs(3_600));

const PATIENT_CALLER: Limit = CALLER.wait_up_to(GUARD);
const PATIENT_ALL: Limit = ALL.wait_up_to(GUARD);

conformance! {
    a_status_counts_each_slot,
    lists_have_one_key,
    each_limit_has_its_usage,
    a_permit_holds_a_slot_of_each_limit,
    a_refusal_by_any_leaves_nothing_in_the_others,
    a_waiter_keeps_its_narrow_slot_and_stands_in_the_wide_line,
    a_waiter_that_gives_up_gives_all_back,
    a_wait_that_ends_gives_all_back,
    a_shutdown_gives_all_back,
    a_grant_that_nobody_takes_returns_all,
    an_error_names_the_limit_that_refused,
    a_caller_who_waits_for_its_own_slot_holds_no_shared_one,
    each_queue_is_served_in_order,
    policies_in_opposite_order_do_not_wait_for_each_other,
}

fn caller(limiter: &Limiter, key: &str) -> Semaphore {
    limiter.semaphore(&PATIENT_CALLER, key).unwrap()
}

fn all(limiter: &Limiter) -> Semaphore {
    limiter.semaphore(&PATIENT_ALL, Key::SHARED).unwrap()
}

/// Under the caller's limit and the limit of all callers.
fn both(limiter: &Limiter, key: &str) -> Semaphore {
    caller(limiter, key).and(&PATIENT_ALL, Key::SHARED).unwrap()
}

async fn a_permit_holds_a_slot_of_each_limit(backend: Backend) {
    let (one, other) = (backend.replica().await, backend.replica().await);
    let jobs = both(&one, "a").and(&OPENS, "a").unwrap();
    let permit = jobs.acquire().await.expect("free");
    for scope in [caller(&other, "a"), all(&other)] {
        assert_eq!(usage(&scope).await, (1, 0));
        let error = scope.try_acquire().await.expect_err("taken");
        assert_eq!(error.kind(), AcquireErrorKind::Full);
    }
    assert_eq!(one.status().held, 2);
    assert!(!permit.is_lost());
    drop(permit);
    for scope in [caller(&other, "a"), all(&other)] {
        until_free(&scope).await;
    }
}

/// Whichever limit refuses, and in whatever order the limits are named.
async fn a_refusal_by_any_leaves_nothing_in_the_others(backend: Backend) {
    let limiter = backend.replica().await;
    // The rate comes last, because its charges do not drain.
    let scopes = [(&CALLER, "a"), (&ALL, ""), (&OPENS, "a")];
    for used_up in 0..3 {
        let (limit, key) = scopes[used_up];
        let alone = limiter.semaphore(limit, key).unwrap();
        let mut taken = Vec::new();
        for _ in 0..limit.max() {
            taken.push(alone.try_acquire().await.expect("free"));
        }
        let before = backend.contents();
        for first in 0..3 {
            let [one, two, three] = [0, 1, 2].map(|number| scopes[(first + number) % 3]);
            let jobs = limiter.semaphore(one.0, one.1).unwrap();
            let jobs = jobs
                .and(two.0, two.1)
                .unwrap()
                .and(three.0, three.1)
                .unwrap();
            let error = jobs.acquire().await.expect_err("one is used up");
            assert!(error.is_limited());
            assert_eq!(error.limit_name(), limit.name());
        }
        if !backend.is_a_cluster() {
            assert_eq!(backend.contents(), before);
        }
        until_same(&before, || backend.contents()).await;
        for (limit, key) in [(&CALLER, "a"), (&ALL, "")] {
            let held = u32::from(limit.name() == scopes[used_up].0.name());
            assert_eq!(
                usage(&limiter.semaphore(limit, key).unwrap()).await,
                (held, 0)
            );
        }
        drop(taken);
        for (limit, key) in [(&CALLER, "a"), (&ALL, "")] {
            until_free(&limiter.semaphore(limit, key).unwrap()).await;
        }
        if limit.period().is_none() {
            assert_eq!(backend.contents(), Vec::<String>::new());
        }
    }
    // The rate was used up on purpose, and only its state is left.
    assert_eq!(backend.contents().len(), usize::from(backend.is_shared()));
}

async fn a_waiter_keeps_its_narrow_slot_and_stands_in_the_wide_line(backend: Backend) {
    let (one, other) = (backend.replica().await, backend.replica().await);
    let holder = both(&one, "a").acquire().await.expect("free");
    let mut waiter = both(&other, "b").acquire();
    meanwhile(&mut waiter, until_waiting(&all(&one), 1)).await;
    assert_eq!(usage(&caller(&one, "b")).await, (1, 0));
    assert_eq!(usage(&all(&one)).await, (1, 1));
    assert_eq!(waiter.position(), Some(1));
    drop(holder);
    let permit = soon(waiter).await.expect("its turn");
    assert_eq!(permit.position(), Some(1));
    assert_eq!(usage(&caller(&one, "b")).await, (1, 0));
    assert_eq!(usage(&all(&one)).await, (1, 0));
    until_free(&caller(&one, "a")).await;
}

async fn a_waiter_that_gives_up_gives_all_back(backend: Backend) {
    let (one, other) = (backend.replica().await, backend.replica().await);
    let _holder = all(&one).acquire().await.expect("free");
    let mut waiter = both(&other, "b").acquire();
    meanwhile(&mut waiter, until_waiting(&all(&one), 1)).await;
    drop(waiter);
    until_waiting(&all(&one), 0).await;
    until_free(&caller(&one, "b")).await;
    // Dropped before any answer.
    start(&mut both(&other, "b").acquire());
    until(&all(&one), |in_use, waiting| (in_use, waiting) == (1, 0)).await;
    until_free(&caller(&other, "b")).await;
    assert_eq!(
        (other.status().held, other.status().waiting),
        if backend.is_shared() { (0, 0) } else { (1, 0) }
    );
}

async fn a_wait_that_ends_gives_all_back(backend: Backend) {
    let limiter = backend.replica().await;
    let short = ALL.wait_up_to(Duration::from_millis(50));
    let holder = all(&limiter).acquire().await.expect("free");
    let jobs = caller(&limiter, "b").and(&short, Key::SHARED).unwrap();
    let error = jobs.acquire().await.expect_err("taken for longer");
    assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
    assert!(error.waited() >= Duration::from_millis(50));
    until_waiting(&all(&limiter), 0).await;
    until_free(&caller(&limiter, "b")).await;
    drop(holder);
    until_free(&all(&limiter)).await;
    assert_eq!(backend.contents(), Vec::<String>::new());
}

async fn a_shutdown_gives_all_back(backend: Backend) {
    let (limiter, other) = (backend.replica().await, backend.replica().await);
    let holder = both(&limiter, "a").acquire().await.expect("free");
    let mut waiter = both(&limiter, "b").acquire();
    meanwhile(&mut waiter, until_waiting(&all(&limiter), 1)).await;
    let begin = Instant::now();
    sleep(Duration::from_millis(20)).await;
    let waits_for = begin.elapsed();
    let report = limiter.shutdown(Duration::ZERO).await;
    assert_eq!(report.refused, 1);
    let error = waiter.await.expect_err("closed");
    assert_eq!(error.kind(), AcquireErrorKind::ShutDown);
    assert_eq!((error.limit_name(), error.position()), ("all", Some(1)));
    assert!(error.waited() >= waits_for, "{error:?}");
    soon(holder.lost()).await;
    for scope in [all(&other), caller(&other, "a"), caller(&other, "b")] {
        assert_eq!(usage(&scope).await, (0, 0));
    }
}

async fn a_grant_that_nobody_takes_returns_all(backend: Backend) {
    let limiter = backend.replica().await;
    let holder = all(&limiter).acquire().await.expect("free");
    let mut waiter = both(&limiter, "b").acquire();
    meanwhile(&mut waiter, until_waiting(&all(&limiter), 1)).await;
    drop(holder);
    until(&all(&limiter), |in_use, waiting| {
        (in_use, waiting) == (1, 0)
    })
    .await;
    drop(waiter);
    until_free(&all(&limiter)).await;
    until_free(&caller(&limiter, "b")).await;
}

async fn an_error_names_the_limit_that_refused(backend: Backend) {
    let limiter = backend.replica().await;
    let wide = Limit::concurrent("wide", 3).wait_up_to(Duration::from_millis(30));
    let alone = limiter.semaphore(&wide, Key::SHARED).unwrap();
    drop(alone.acquire().await.expect("free"));
    until_free(&alone).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(alone.acquire().await.expect("free"));
    }
    let jobs = caller(&limiter, "a").and(&wide, Key::SHARED).unwrap();
    let _first = queue_under(
        &limiter
            .semaphore(wide.clone().wait_up_to(GUARD), Key::SHARED)
            .unwrap(),
        &alone,
        1,
    )
    .await;
    let error = soon(async {
        loop {
            let error = jobs.acquire().await.expect_err("taken for longer");
            // A machine may stall for longer than the request waits.
            if error.position().is_some() {
                return error;
            }
        }
    })
    .await;
    assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
    assert_eq!((error.limit_name(), error.max()), ("wide", 3));
    assert_eq!((error.in_use(), error.position()), (3, Some(2)));
    assert!(error.waited() >= Duration::from_millis(30));
    // A slot was held before, so an estimate exists.
    assert!(error.retry_after().is_some());

    let error = jobs.try_acquire().await.expect_err("no wait");
    assert_eq!(
        (error.kind(), error.limit_name(), error.position()),
        (AcquireErrorKind::Full, "wide", None)
    );
    let _own = caller(&limiter, "a").acquire().await.expect("given back");
    let error = jobs.try_acquire().await.expect_err("the own one first");
    assert_eq!((error.limit_name(), error.max()), ("caller", 1));
    assert_eq!((error.in_use(), error.waiting()), (1, 0));
}

/// Whichever limit is named first.
async fn a_caller_who_waits_for_its_own_slot_holds_no_shared_one(backend: Backend) {
    let (one, other) = (backend.replica().await, backend.replica().await);
    let shared = Limit::concurrent("two", 2).wait_up_to(GUARD);
    let shared_alone = one.semaphore(&shared, Key::SHARED).unwrap();
    let jobs = [
        caller(&other, "a").and(&shared, Key::SHARED).unwrap(),
        other
            .semaphore(&shared, Key::SHARED)
            .unwrap()
            .and(&PATIENT_CALLER, "a")
            .unwrap(),
    ];
    for jobs in jobs {
        let holder = jobs.acquire().await.expect("free");
        let waiter = queue_under(&jobs, &caller(&one, "a"), 1).await;
        assert_eq!(usage(&shared_alone).await, (1, 0));
        let stranger = caller(&one, "b").and(&shared, Key::SHARED).unwrap();
        let stranger = stranger.try_acquire().await.expect("not in their way");
        drop((holder, stranger));
        drop(soon(waiter).await.expect("no panic"));
        until_free(&shared_alone).await;
    }
}

/// Requests for one slot and for two, from two replicas, in a single queue.
async fn each_queue_is_served_in_order(backend: Backend) {
    let replicas = [backend.replica().await, backend.replica().await];
    let mut holder = all(&replicas[0]).acquire().await.expect("free");
    let mut waiters = Vec::new();
    for number in 0..12 {
        let limiter = &replicas[number / 2 % 2];
        let jobs = match number % 3 {
            0 => all(limiter),
            // The narrow slot is free for each of them.
            _ => both(limiter, &number.to_string()),
        };
        waiters.push(queue_under(&jobs, &all(&replicas[0]), number as u32 + 1).await);
    }
    for (number, waiter) in waiters.into_iter().enumerate() {
        drop(holder);
        holder = soon(waiter).await.expect("no panic");
        assert_eq!(holder.position(), Some(number as u32 + 1));
        let now = usage(&all(&replicas[0])).await;
        assert_eq!(now, (1, 11 - number as u32));
    }
    drop(holder);
    // A queue of the narrow limit, while the wide one is free.
    let mut holder = both(&replicas[0], "a").acquire().await.expect("free");
    let narrow = caller(&replicas[0], "a");
    let mut waiters = Vec::new();
    for number in 0..6 {
        let limiter = &replicas[number % 2];
        let jobs = match number % 3 {
            0 => caller(limiter, "a"),
            _ => both(limiter, "a"),
        };
        waiters.push(queue_under(&jobs, &narrow, number as u32 + 1).await);
    }
    for (number, waiter) in waiters.into_iter().enumerate() {
        drop(holder);
        holder = soon(waiter).await.expect("no panic");
        assert_eq!(usage(&narrow).await, (1, 5 - number as u32));
    }
}

/// Many requests for the same two limits, named in both orders on two replicas, and some requests for one limit.
async fn policies_in_opposite_order_do_not_wait_for_each_other(backend: Backend) {
    const ROUNDS: usize = 10;
    let x = Limit::concurrent("x", 2).wait_up_to(GUARD);
    let y = Limit::concurrent("y", 3).wait_up_to(GUARD);
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let limiter = backend.replica().await;
        let (x_alone, y_alone) = (
            limiter.semaphore(&x, "k").unwrap(),
            limiter.semaphore(&y, "k").unwrap(),
        );
        let kinds = [
            (x_alone.clone().and(&y, "k").unwrap(), [1, 1]),
            (y_alone.clone().and(&x, "k").unwrap(), [1, 1]),
            (x_alone, [1, 0]),
            (y_alone, [0, 1]),
        ];
        for (kind, (semaphore, slots)) in kinds.into_iter().enumerate() {
            for _ in 0..8 {
                let (semaphore, sender) = (semaphore.clone(), sender.clone());
                tasks.push(tokio::spawn(async move {
                    for _ in 0..ROUNDS {
                        let permit = semaphore.acquire().await.expect("its turn comes");
                        sender.send((kind, slots, 1)).expect("somebody counts");
                        tokio::task::yield_now().await;
                        sender.send((kind, slots, -1)).expect("somebody counts");
                        drop(permit);
                    }
                }));
            }
        }
    }
    drop(sender);
    let watcher = backend.replica().await;
    let watched =
        [(&x, 2), (&y, 3)].map(|(limit, max)| (watcher.semaphore(limit, "k").unwrap(), max));
    let watch = async {
        loop {
            for (semaphore, max) in &watched {
                let (in_use, _) = usage(semaphore).await;
                assert!(in_use <= *max, "{in_use} slots of {max}");
            }
            tokio::task::yield_now().await;
        }
    };
    let count = async {
        let (mut inside, mut done) = ([0; 2], [0; 4]);
        while let Some((kind, slots, change)) = receiver.recv().await {
            done[kind] += usize::from(change == 1);
            inside = [0, 1].map(|limit: usize| inside[limit] + slots[limit] * change);
            assert!(inside[0] <= 2 && inside[1] <= 3, "{inside:?} are inside");
        }
        done
    };
    let done = tokio::select! {
        done = soon(count) => done,
        () = watch => unreachable!("it watches for ever"),
    };
    assert_eq!(done, [2 * 8 * ROUNDS; 4]);
    for task in tasks {
        task.await.expect("no panic");
    }
    for (semaphore, _) in &watched {
        until_free(semaphore).await;
    }
}

/// A request that holds one slot and waits for the other, behind a holder of both on another replica.
async fn holder_and_waiter(server: &RedisServer) -> (Limiter, Permit, JoinHandle<Permit>) {
    let connect = async || {
        let builder = lasting().poll_interval(Duration::from_millis(100));
        let limiter = builder.connect(&server.url()).await;
        limiter.expect("the server is up")
    };
    let (one, other) = (connect().await, connect().await);
    let holder = both(&one, "a").acquire().await.expect("free");
    let waiter = queue_under(&both(&other, "b"), &all(&one), 1).await;
    (one, holder, waiter)
}

async fn all_is_free(server: &RedisServer, limiter: &Limiter) {
    let scopes = [caller(limiter, "a"), caller(limiter, "b"), all(limiter)];
    let free = async || {
        for scope in &scopes {
            let usage = scope.usage().await;
            if !usage.is_ok_and(|usage| usage.in_use + usage.waiting == 0) {
                return false;
            }
        }
        true
    };
    soon(async {
        while !free().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert_eq!(server.key_count(), 0);
}

/// The store loses all data and connections at once, which is not an outage.
#[tokio::test]
async fn a_store_that_has_lost_its_data_is_told_who_holds_and_who_waits() {
    let server = RedisServer::start();
    let (limiter, holder, waiter) = holder_and_waiter(&server).await;
    server.cli(&["FLUSHALL"]);
    for kind in ["normal", "pubsub"] {
        server.cli(&["CLIENT", "KILL", "TYPE", kind]);
    }
    // The holders hold again, and the waiter waits. But if its replica is back first, by the 100 ms after which it asks for
    // its waiters, the waiter gets the slot of the missing holder: after a loss only strict limits wait for holders.
    let narrow = [(1, 0), (1, 0)];
    let scopes = [caller(&limiter, "a"), caller(&limiter, "b"), all(&limiter)];
    soon(async {
        loop {
            let mut now = Vec::new();
            for scope in &scopes {
                let usage = scope.usage().await;
                now.extend(usage.map(|usage| (usage.in_use, usage.waiting)));
            }
            if now.starts_with(&narrow) && matches!(now[2..], [(1, 1) | (2, 0)]) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert!(!holder.is_lost());
    drop(holder);
    let permit = soon(waiter).await.expect("no panic");
    assert!(!permit.is_lost());
    drop(permit);
    all_is_free(&server, &limiter).await;
}

/// If this takes until the fallback of the limits decides, the waiter may have been admitted.
#[tokio::test]
async fn a_store_that_is_killed_leaves_nothing_behind() {
    let mut server = RedisServer::start();
    let (limiter, holder, waiter) = holder_and_waiter(&server).await;
    server.restart();
    drop(holder);
    let permit = soon(waiter).await.expect("no panic");
    assert!(!permit.is_lost());
    drop(permit);
    all_is_free(&server, &limiter).await;
}

/// Whether a limit is narrow or wide depends on its class, not on the key.
#[tokio::test]
async fn a_class_says_which_slot_comes_first() {
    let limiter = Limiter::in_memory();
    let route = Limit::concurrent("route", 1)
        .class(Class::Route)
        .wait_up_to(GUARD);
    let tenant = Limit::concurrent("tenant", 1)
        .class(Class::Tenant)
        .wait_up_to(GUARD);
    let (route_alone, tenant_alone) = (
        limiter.semaphore(&route, "r").unwrap(),
        limiter.semaphore(&tenant, "t").unwrap(),
    );
    let held = tenant_alone.acquire().await.expect("free");
    let waiter = queue_under(
        &route_alone.clone().and(&tenant, "t").unwrap(),
        &tenant_alone,
        1,
    )
    .await;
    assert_eq!(usage(&route_alone).await, (0, 0));
    let route_held = queue(&route_alone, 0).await.await.expect("free");
    drop(held);
    until_waiting(&route_alone, 1).await;
    assert_eq!(usage(&tenant_alone).await, (1, 0));
    drop(route_held);
    drop(soon(waiter).await.expect("no panic"));
}

#[tokio::test]
async fn limits_that_do_not_go_together_are_refused_with_a_reason() {
    let limiter = Limiter::in_memory();
    let names: Vec<String> = (0..=Policy::MAX_SCOPES)
        .map(|number| number.to_string())
        .collect();
    let limits = names
        .iter()
        .map(|name| Limit::try_concurrent(name.clone(), 1).expect("valid"));
    let limits: Vec<Limit> = limits.collect();
    let most = limits[1..Policy::MAX_SCOPES]
        .iter()
        .fold(limiter.semaphore(&limits[0], "k").unwrap(), |all, limit| {
            all.and(limit, "k").unwrap()
        });
    drop(most.acquire().await.expect("16 are fine"));

    let twice = caller(&limiter, "a").and(&PATIENT_CALLER, "b");
    let too_many = most.and(&limits[Policy::MAX_SCOPES], "k");
    for (error, words) in [
        (twice.err(), "`caller` is listed twice"),
        (too_many.err(), "not 17"),
    ] {
        let error = error.expect("refused");
        assert_eq!(error.kind(), ConfigErrorKind::Value);
        assert!(error.to_string().contains(words), "{error}");
    }

    let policies: [(Policy, &str); 3] = [
        (Vec::<Limit>::new().into(), "not 0"),
        (
            (CALLER, CALLER.by_header("x-key")).into(),
            "`caller` is listed twice",
        ),
        (limits.iter().collect::<Vec<_>>().into(), "not 17"),
    ];
    for (policy, words) in policies {
        let error = limiter.layer(policy).expect_err("refused");
        assert_eq!(error.kind(), ConfigErrorKind::Value);
        assert!(error.to_string().contains(words), "{error}");
    }
    let other = Limit::concurrent("caller", 7);
    let conflict = all(&limiter)
        .and(&other, "a")
        .expect_err("there is another one");
    assert_eq!(conflict.kind(), ConfigErrorKind::Conflict);
}

async fn lists_have_one_key(backend: Backend) {
    let limits = ["a", "b", "c"].map(|name| Limit::concurrent(name, 1));
    let [a, b, c] = &limits;
    let limiter = backend.replica().await;
    let lists = [
        limiter.semaphore(&limits[..], "key").unwrap(),
        limiter.semaphore(limits.clone(), "key").unwrap(),
        limiter.semaphore([a, b, c], "key").unwrap(),
        limiter.semaphore(vec![a, b, c], "key").unwrap(),
        limiter
            .semaphore(a, "key")
            .unwrap()
            .and([b, c], "key")
            .unwrap(),
        limiter
            .semaphore([a, b], "key")
            .unwrap()
            .and(c.clone(), "key")
            .unwrap(),
    ];
    for semaphore in lists {
        let permit = semaphore.try_acquire().await.expect("free");
        for limit in &limits {
            let other = limiter.semaphore(limit, "key").unwrap();
            let error = other.try_acquire().await.expect_err("taken");
            assert_eq!(error.limit_name(), limit.name());
        }
        permit.release().await.expect("confirmed");
    }
    for limits in [vec![], vec![a.clone(), a.clone()]] {
        limiter.semaphore(limits, "key").expect_err("no list");
    }
    let semaphore = limiter.semaphore(a, "key").unwrap();
    semaphore
        .and(Vec::<Limit>::new(), "key")
        .expect_err("no list");
}

/// Even while a request waits in another queue.
async fn each_limit_has_its_usage(backend: Backend) {
    let own = Limit::concurrent("own", 1).wait_up_to(GUARD);
    let starts = Limit::rate("starts", 100, Duration::from_secs(1));
    let all = Limit::concurrent("all", 5);
    let limiter = backend.replica().await;
    let semaphore = limiter.semaphore([&own, &starts], "key").unwrap();
    let semaphore = semaphore.and(&all, Key::SHARED).unwrap();
    let usages = async || {
        let usages = semaphore.usages().await.expect("up");
        let each = usages.into_iter();
        let each = each.map(|(limit, usage)| {
            (
                limit.name().to_owned(),
                (usage.in_use, usage.waiting, usage.max),
            )
        });
        each.collect::<Vec<_>>()
    };
    let expect = |own, all| vec![("own".to_owned(), own), ("all".to_owned(), all)];
    assert_eq!(usages().await, expect((0, 0, 1), (0, 0, 5)));
    let permit = semaphore.acquire().await.expect("free");
    let waiter = queue(&semaphore, 1).await;
    assert_eq!(usages().await, expect((1, 1, 1), (1, 0, 5)));
    // A rate has no slots, also if it is the first.
    let usage = limiter
        .semaphore([&starts, &own], "key")
        .unwrap()
        .usage()
        .await;
    let usage = usage.expect("up");
    assert_eq!((usage.in_use, usage.waiting, usage.max), (1, 1, 1));
    permit.release().await.expect("confirmed");
    waiter
        .await
        .expect("no panic")
        .release()
        .await
        .expect("confirmed");
    assert_eq!(usages().await, expect((0, 0, 1), (0, 0, 5)));
}

/// A permit under three limits: while held, when released, and at a shutdown.
async fn a_status_counts_each_slot(backend: Backend) {
    let limits = ["a", "b", "c"].map(|name| Limit::concurrent(name, 3));
    let rate = Limit::rate("rate", 10, Duration::from_secs(1));
    let limiter = backend.replica().await;
    let semaphore = limiter
        .semaphore(limits, "key")
        .unwrap()
        .and(&rate, "key")
        .unwrap();
    let held = || limiter.status().held;
    let mut permits = Vec::new();
    for count in 1..=3 {
        permits.push(semaphore.acquire().await.expect("free"));
        assert_eq!(held(), 3 * count);
    }
    permits
        .pop()
        .expect("three")
        .release()
        .await
        .expect("confirmed");
    assert_eq!(held(), 6);
    drop(permits.pop());
    assert_eq!(held(), 3);
    let report = limiter.shutdown(Duration::ZERO).await;
    assert_eq!((report.released, report.lost, held()), (0, 3, 0));
    drop(permits);
    assert_eq!(held(), 0);
}
