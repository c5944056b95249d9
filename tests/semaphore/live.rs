//! Limits that change while in use: their values and their modes.

use std::time::Duration;

use tokio::{task::JoinSet, time::Instant};
use tower_turnstile::{
    Acquire, AcquireErrorKind, Class, ConfigErrorKind, Key, Limit, Limiter, Mode, Semaphore,
};

use crate::backend::{
    Backend, GUARD, meanwhile, queue, queue_under, soon, until, until_free, until_one_waits,
    until_waiting, usage,
};

const LIVE: Limit = Limit::concurrent("live", 1).wait_up_to(GUARD);
const ALL: Limit = Limit::concurrent("all", 9);
/// One at once, then one per quarter of an hour: longer than any test takes.
const SLOW: Limit = Limit::rate("slow", 96, DAY).burst(1);
const SPACING: Duration = Duration::from_secs(900);
const DAY: Duration = Duration::from_secs(86_400);

conformance! {
    a_raised_limit_admits_waiters_at_once,
    a_raised_limit_admits_those_of_replicas_that_are_told_later,
    a_raised_limit_admits_thousands_at_once,
    a_lowered_limit_takes_nothing_away,
    the_queue_may_become_longer,
    a_rate_may_become_faster,
    use_of_a_rate_stays_when_it_changes,
    a_shadow_admits_and_takes_no_slot_that_is_not_free,
    a_shadow_of_one_limit_leaves_the_others_enforced,
    a_shadow_rate_charges_only_what_it_would_allow,
    a_limit_that_is_off_is_not_asked,
    waiters_go_on_when_their_limit_becomes_a_shadow,
    waiters_go_on_when_their_limit_is_switched_off,
    waiters_of_several_limits_wait_for_those_that_are_left,
    waiters_for_their_time_go_on_when_the_rate_is_not_enforced,
    a_permit_that_a_shadow_lets_go_is_charged_what_it_spends,
    what_cannot_change_is_refused_and_nothing_is_changed,
    a_returned_limit_names_the_latest_values,
}

fn with(max: u32) -> Limit {
    Limit::concurrent("live", max)
}

fn update(limiter: &Limiter, limit: &Limit) {
    limiter.update(limit).expect("it may become that");
}

async fn a_raised_limit_admits_waiters_at_once(backend: Backend) {
    let limiter = backend.replica_that_rarely_asks().await;
    let live = limiter.semaphore(&LIVE, "a").unwrap();
    let _holder = live.acquire().await.expect("free");
    let mut waiters = Vec::new();
    for place in 1..=4 {
        waiters.push(queue(&live, place).await);
    }
    update(&limiter, &with(3));
    let last = waiters.split_off(2);
    let mut permits = Vec::new();
    for waiter in waiters {
        permits.push(soon(waiter).await.expect("no panic"));
    }
    let now = live.usage().await.expect("the store is up");
    assert_eq!((now.in_use, now.waiting, now.max), (3, 2, 3));
    // All the others are admitted at once, too.
    update(&limiter, &with(1_000));
    for waiter in last {
        permits.push(soon(waiter).await.expect("no panic"));
    }
    assert_eq!(usage(&live).await, (5, 0));
    // The semaphore still has its original limit.
    assert_eq!(live.limit().max(), 1);
}

async fn a_raised_limit_admits_those_of_replicas_that_are_told_later(backend: Backend) {
    let replicas = [
        backend.replica_that_rarely_asks().await,
        backend.replica_that_rarely_asks().await,
    ];
    let live = replicas
        .each_ref()
        .map(|limiter| limiter.semaphore(&LIVE, "a").unwrap());
    let _holder = live[0].acquire().await.expect("free");
    let first = queue(&live[0], 1).await;
    let second = queue(&live[1], 2).await;
    for limiter in replicas.iter().rev() {
        update(limiter, &with(3));
    }
    let permits = [
        soon(first).await.expect("no panic"),
        soon(second).await.expect("no panic"),
    ];
    assert_eq!(usage(&live[1]).await, (3, 0));
    drop(permits);
}

/// More requests than one call of the store's script admits.
async fn a_raised_limit_admits_thousands_at_once(backend: Backend) {
    const WAITERS: u32 = 2_500;
    let limiter = backend.replica_that_rarely_asks().await;
    let live = limiter.semaphore(LIVE.max_waiters(WAITERS), "a").unwrap();
    let _holder = live.acquire().await.expect("free");
    let mut waiters = JoinSet::new();
    for _ in 0..WAITERS {
        waiters.spawn(live.acquire());
    }
    until_waiting(&live, WAITERS).await;
    update(&limiter, &with(WAITERS + 1).max_waiters(WAITERS));
    let permits = soon(tokio::spawn(waiters.join_all())).await;
    assert!(permits.expect("no panic").iter().all(Result::is_ok));
}

async fn a_lowered_limit_takes_nothing_away(backend: Backend) {
    let limiter = backend.replica().await;
    let live = limiter.semaphore(with(3), "a").unwrap();
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(live.acquire().await.expect("free"));
    }
    update(&limiter, &with(1));
    assert_eq!(usage(&live).await, (3, 0));
    assert!(permits.iter().all(|permit| !permit.is_lost()));
    for in_use in [2, 1] {
        let error = live.try_acquire().await.expect_err("more than there are");
        assert_eq!((error.kind(), error.max()), (AcquireErrorKind::Full, 1));
        permits.pop();
        until(&live, |now, _| now == in_use).await;
    }
    live.try_acquire().await.expect_err("the last one is taken");
    permits.pop();
    until_free(&live).await;
    drop(live.try_acquire().await.expect("one is left"));
}

async fn the_queue_may_become_longer(backend: Backend) {
    let limiter = backend.replica().await;
    let short = with(1).max_waiters(1);
    let live = limiter.semaphore(short.wait_up_to(GUARD), "a").unwrap();
    let _holder = live.acquire().await.expect("free");
    let _first = queue(&live, 1).await;
    let error = live.acquire().await.expect_err("no room");
    assert_eq!(error.kind(), AcquireErrorKind::QueueFull);
    update(&limiter, &with(1).max_waiters(2));
    let _second = queue(&live, 2).await;
    let error = live.acquire().await.expect_err("no room");
    assert_eq!(
        (error.kind(), error.waiting()),
        (AcquireErrorKind::QueueFull, 2)
    );
}

async fn a_rate_may_become_faster(backend: Backend) {
    let limiter = backend.replica().await;
    let slow = limiter.semaphore(&SLOW, "a").unwrap();
    drop(slow.acquire().await.expect("in time"));
    let error = slow.acquire().await.expect_err("used up");
    assert!(error.retry_after() > Some(SPACING / 2));
    let quick = Limit::rate("slow", 1_000, Duration::from_secs(1)).burst(1_000);
    update(&limiter, &quick);
    // The earlier charge is now one of 1,000, which drains within a millisecond.
    let quick = limiter.semaphore(quick, "a").unwrap();
    let permit = quick.try_acquire().await.expect("999 are left");
    let left = permit.budget(quick.limit()).unwrap().remaining();
    assert!((998..=1_000).contains(&left.expect("charged")), "{left:?}");
    drop(
        limiter
            .semaphore(quick.limit(), "b")
            .unwrap()
            .acquire()
            .await
            .expect("in time"),
    );
}

/// A use of 95,000 out of 100,000 stays 95,000, with 1,000,000 and with 40,000.
async fn use_of_a_rate_stays_when_it_changes(backend: Backend) {
    let daily = |count| {
        let daily = Limit::rate("daily", count, DAY);
        daily.burst(100_000)
    };
    let limiter = backend.replica().await;
    update(&limiter, &daily(100_000));
    let tokens = limiter.semaphore(daily(100_000), "a").unwrap();
    let used = tokens.acquire().await.expect("within the burst");
    used.budget("daily")
        .unwrap()
        .charge(94_999)
        .await
        .expect("within");
    for (count, seconds) in [(100_000, 38_880), (1_000_000, 3_888), (40_000, 97_200)] {
        update(&limiter, &daily(count));
        let error = used
            .budget("daily")
            .unwrap()
            .charge(50_000)
            .await
            .expect_err("too much");
        let rest = error.retry_after().expect("exact").as_secs();
        assert!((seconds - 60..=seconds).contains(&rest), "{count}: {rest}");
    }
}

async fn a_shadow_admits_and_takes_no_slot_that_is_not_free(backend: Backend) {
    let limiter = backend.replica().await;
    let live = limiter.semaphore(LIVE.mode(Mode::Shadow), "a").unwrap();
    let first = live.acquire().await.expect("free");
    assert_eq!(usage(&live).await, (1, 0));
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(live.acquire().await.expect("it only looks on"));
        assert_eq!(usage(&live).await, (1, 0));
    }
    drop(others);
    assert_eq!(usage(&live).await, (1, 0));
    // Holders keep their slots when the limit is enforced.
    update(&limiter, &with(1));
    let enforced = limiter.semaphore(&LIVE, "a").unwrap();
    let error = enforced.try_acquire().await.expect_err("taken");
    assert_eq!(error.kind(), AcquireErrorKind::Full);
    let waiter = queue(&enforced, 1).await;
    drop(first);
    drop(soon(waiter).await.expect("no panic"));
    until_free(&live).await;
}

async fn a_shadow_of_one_limit_leaves_the_others_enforced(backend: Backend) {
    let limiter = backend.replica().await;
    let shadow = LIVE.mode(Mode::Shadow);
    let one = Limit::concurrent("one", 1);
    let (live_alone, one_alone) = (
        limiter.semaphore(&shadow, "a").unwrap(),
        limiter.semaphore(&one, Key::SHARED).unwrap(),
    );
    let jobs = live_alone.clone().and(&one, Key::SHARED).unwrap();
    let taken = live_alone.acquire().await.expect("free");
    let permit = jobs.acquire().await.expect("it only looks on");
    assert_eq!(
        (usage(&live_alone).await, usage(&one_alone).await),
        ((1, 0), (1, 0))
    );
    let error = jobs.acquire().await.expect_err("the other one is enforced");
    assert_eq!(
        (error.kind(), error.limit_name()),
        (AcquireErrorKind::Full, "one")
    );
    drop((taken, permit));
    until_free(&live_alone).await;
    until_free(&one_alone).await;
    // A free slot is taken, and released if another limit refuses.
    let _taken = one_alone.acquire().await.expect("free");
    jobs.acquire().await.expect_err("taken");
    until_free(&live_alone).await;
}

async fn a_shadow_rate_charges_only_what_it_would_allow(backend: Backend) {
    let limiter = backend.replica().await;
    let shadow = SLOW.mode(Mode::Shadow).wait_up_to(DAY);
    let semaphore = limiter.semaphore(&shadow, "a").unwrap();
    for _ in 0..5 {
        drop(semaphore.acquire().await.expect("it only looks on"));
    }
    update(&limiter, &SLOW);
    let error = limiter
        .semaphore(&SLOW, "a")
        .unwrap()
        .acquire()
        .await
        .expect_err("used up");
    assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
    // Only one was charged, not five.
    let rest = error.retry_after().expect("exact");
    assert!(rest <= SPACING, "{rest:?}");
}

async fn a_limit_that_is_off_is_not_asked(backend: Backend) {
    let limiter = backend.replica().await;
    let live = limiter.semaphore(LIVE.mode(Mode::Off), "a").unwrap();
    let slow = SLOW.mode(Mode::Off);
    let jobs = live.clone().and(&slow, "a").unwrap();
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(live.acquire().await.expect("it is off"));
        permits.push(jobs.acquire().await.expect("both are off"));
    }
    assert_eq!(usage(&live).await, (0, 0));
    assert_eq!(backend.contents(), Vec::<String>::new());
    update(&limiter, &with(1));
    let enforced = limiter.semaphore(&LIVE, "a").unwrap();
    let _held = enforced.try_acquire().await.expect("nobody has a slot");
    enforced.try_acquire().await.expect_err("taken");
    drop(permits);
    assert_eq!(usage(&live).await, (1, 0));
}

async fn let_waiters_go(backend: Backend, mode: Mode) {
    let limiter = backend.replica().await;
    let live = limiter.semaphore(&LIVE, "a").unwrap();
    let holder = live.acquire().await.expect("free");
    let mut waiters = Vec::new();
    for place in 1..=3 {
        waiters.push(queue(&live, place).await);
    }
    update(&limiter, &with(1).mode(mode));
    let mut permits = Vec::new();
    for waiter in waiters {
        permits.push(soon(waiter).await.expect("no panic"));
    }
    assert!(permits.iter().all(|permit| !permit.is_lost()));
    until(&live, |in_use, waiting| (in_use, waiting) == (1, 0)).await;
    drop((holder, permits));
    until_free(&live).await;
    assert_eq!(limiter.status().held, 0);
}

async fn waiters_go_on_when_their_limit_becomes_a_shadow(backend: Backend) {
    let_waiters_go(backend, Mode::Shadow).await;
}

async fn waiters_go_on_when_their_limit_is_switched_off(backend: Backend) {
    let_waiters_go(backend, Mode::Off).await;
}

/// A request waits for the slot of a limit that is turned off, and then for the next one.
async fn waiters_of_several_limits_wait_for_those_that_are_left(backend: Backend) {
    let limiter = backend.replica().await;
    let wide = Limit::concurrent("wide", 1).wait_up_to(GUARD);
    let (live, wide_alone) = (
        limiter.semaphore(&LIVE, "a").unwrap(),
        limiter.semaphore(&wide, Key::SHARED).unwrap(),
    );
    let jobs = live
        .clone()
        .and(&wide, Key::SHARED)
        .unwrap()
        .and(&ALL, Key::SHARED)
        .unwrap();
    let (_narrow, holder) = (
        live.acquire().await.expect("free"),
        wide_alone.acquire().await.expect("free"),
    );
    let waiter = queue_under(&jobs, &live, 1).await;
    update(&limiter, &with(1).mode(Mode::Off));
    until_waiting(&wide_alone, 1).await;
    assert_eq!(usage(&live).await, (1, 0));
    drop(holder);
    let permit = soon(waiter).await.expect("no panic");
    assert_eq!(usage(&wide_alone).await, (1, 0));
    drop(permit);
    until_free(&wide_alone).await;
    until_free(&limiter.semaphore(&ALL, Key::SHARED).unwrap()).await;
}

/// Polls a request until it waits for its start at a rate.
async fn until_asleep(limiter: &Limiter, mut request: Acquire) -> Acquire {
    meanwhile(&mut request, until_one_waits(limiter)).await;
    request
}

/// Retries until the rate's refusal has a retry time that satisfies `until`.
async fn until_refused(semaphore: &Semaphore, until: impl Fn(Option<Duration>) -> bool) {
    soon(async {
        let used_up = async || semaphore.try_acquire().await.expect_err("used up");
        while !until(used_up().await.retry_after()) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

async fn a_permit_that_a_shadow_lets_go_is_charged_what_it_spends(backend: Backend) {
    let limiter = backend.replica().await;
    let slow = limiter.semaphore(SLOW.wait_up_to(DAY), "a").unwrap();
    drop(slow.acquire().await.expect("in time"));
    let waiter = until_asleep(&limiter, slow.acquire()).await;
    update(&limiter, &SLOW.mode(Mode::Shadow));
    let permit = soon(waiter).await.expect("not enforced");
    permit.budget(&SLOW).unwrap().spend(2);
    drop(permit);
    update(&limiter, &SLOW);
    until_refused(&slow, |rest| rest >= Some(2 * SPACING)).await;
}

async fn waiters_for_their_time_go_on_when_the_rate_is_not_enforced(backend: Backend) {
    let limiter = backend.replica().await;
    let slow = limiter.semaphore(SLOW.wait_up_to(DAY), "a").unwrap();
    // This rate is always enforced, and admits one request per 100 ms.
    let other = Limit::rate("other", 10, Duration::from_secs(1))
        .burst(1)
        .wait_up_to(GUARD);
    let jobs = slow.clone().and(&other, "a").unwrap();
    let began = Instant::now();
    drop(jobs.acquire().await.expect("in time"));
    for (number, mode) in [(1, Mode::Off), (2, Mode::Shadow)] {
        for semaphore in [&slow, &jobs] {
            let waiter = until_asleep(&limiter, semaphore.acquire()).await;
            update(&limiter, &SLOW.mode(mode));
            drop(soon(waiter).await.expect("not enforced"));
            update(&limiter, &SLOW);
        }
        let earliest = number * Duration::from_millis(100);
        assert!(began.elapsed() >= earliest, "the other one is enforced");
    }
    // In the end none of them was charged.
    until_refused(&slow, |rest| rest <= Some(SPACING)).await;
}

async fn what_cannot_change_is_refused_and_nothing_is_changed(backend: Backend) {
    let limiter = backend.replica().await;
    let (live, slow) = (
        limiter.semaphore(&LIVE, "a").unwrap(),
        limiter.semaphore(&SLOW, "a").unwrap(),
    );
    let second = Duration::from_secs(1);
    let conflicts = [
        Limit::rate("live", 100, second),
        Limit::concurrent("slow", 100),
        with(100).class(Class::Global),
    ];
    for limit in &conflicts {
        let error = limiter.update(limit).expect_err("not while it is in use");
        assert_eq!(error.kind(), ConfigErrorKind::Conflict);
        let name = format!("`{}`", limit.name());
        assert!(error.to_string().contains(&name), "{error}");
    }
    let bad = with(100).max_waiters(u32::MAX);
    let error = limiter.update(&bad).expect_err("out of range");
    assert_eq!(error.kind(), ConfigErrorKind::Value);
    let _held = live.try_acquire().await.expect("free");
    let error = live.try_acquire().await.expect_err("one, as before");
    assert_eq!(error.max(), 1);
    drop(slow.acquire().await.expect("in time"));
    let error = slow.acquire().await.expect_err("used up");
    assert!(error.retry_after() > Some(SPACING / 2));
    // An unknown limit becomes known.
    update(&limiter, &Limit::concurrent("new", 2));
    let conflict = limiter.semaphore(Limit::concurrent("new", 3), "a");
    assert_eq!(
        conflict.expect_err("it is 2").kind(),
        ConfigErrorKind::Conflict
    );
}

async fn a_returned_limit_names_the_latest_values(backend: Backend) {
    let limiter = backend.replica().await;
    assert_eq!(limiter.limit("live"), None);
    update(&limiter, &with(1));
    update(&limiter, &with(2));
    let returned = limiter.limit("live").expect("it is known");
    assert_eq!(returned.max(), 2);
    update(&limiter, &with(3));
    // Its values are neither the first nor the latest ones.
    let error = limiter.semaphore(with(2), "a").expect_err("another");
    assert_eq!(error.kind(), ConfigErrorKind::Conflict);
    let live = limiter.semaphore(returned, "a").expect("the same");
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(live.try_acquire().await.expect("free"));
    }
    live.try_acquire().await.expect_err("full");
}
