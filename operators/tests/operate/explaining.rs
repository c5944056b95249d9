//! The prospects of a caller's next request.

use std::time::Duration;

use futures_util::future::join_all;
use tower_turnstile::{AcquireErrorKind, Fallback, Limit, Limiter, Mode};
use tower_turnstile_operate::{
    Explanation, KeyDigest, OperateErrorKind, Operator, Target, Verdict,
};

use crate::{
    scene::{
        HOUR, Orders as _, Patient, ada, again_while, await_replicas, builder, replicas, soon,
        until,
    },
    support::{queue::wait_in_line, redis_server::RedisServer},
};

/// A request waits behind at most `max_waiters` others, however long it would wait.
#[tokio::test(start_paused = true)]
async fn a_rate_with_as_many_waiters_as_it_may_have_refuses() {
    let slow = Limit::rate("slow", 60, Duration::from_secs(60))
        .burst(1)
        .wait_up_to(Duration::from_secs(30))
        .max_waiters(5);
    let limiter = Limiter::in_memory();
    let semaphore = limiter.semaphore(&slow, "acme").unwrap();
    let asked = (0..6).map(|_| tokio_test::task::spawn(semaphore.acquire()));
    let mut asked: Vec<_> = asked.collect();
    for (number, request) in asked.iter_mut().enumerate() {
        assert_eq!(request.poll().is_ready(), number == 0);
    }
    let acme = KeyDigest::of("slow", "acme");
    let why = Operator::of(&limiter).explain("slow", acme).await.unwrap();
    assert!(
        matches!(why.verdict, Some(Verdict::TooSoon(6_000))),
        "{:?}",
        why.verdict
    );
    let refused = semaphore.acquire().await.unwrap_err();
    assert_eq!(refused.kind(), AcquireErrorKind::TooSoon);
}

const JOBS: Limit = Limit::concurrent("jobs", 2).wait_up_to(HOUR).max_waiters(1);

#[tokio::test]
async fn each_verdict_is_what_a_request_meets() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let [one, other] =
        [0, 1].map(|number: usize| limiters[number].semaphore(JOBS, "acme").unwrap());
    let acme = KeyDigest::of("jobs", "acme");
    let explain = async |limit| operator.explain(limit, acme).await;
    let verdict = async || explain("jobs").await.unwrap().verdict.unwrap();
    assert_eq!(verdict().await, Verdict::Admitted);
    let held = [one.acquire().await.unwrap(), other.acquire().await.unwrap()];
    assert_eq!(verdict().await, Verdict::Queued(1));
    let waiter = wait_in_line(&one).await;
    assert_eq!(verdict().await, Verdict::QueueFull);
    other.acquire().await.unwrap_err();

    let why = explain("jobs").await.unwrap();
    assert_eq!((why.in_use, why.waiting, why.max), (2, 1, 2));
    assert_eq!((why.permits.rows.len(), why.unclaimed.len()), (3, 0));
    assert_eq!(why.refusals.rows[0].reason, "queue_full");
    for limiter in &limiters {
        limiter.update(&JOBS.mode(Mode::Shadow)).unwrap();
    }
    assert_eq!(verdict().await, Verdict::Admitted);
    drop((held, waiter));
    let error = explain("other").await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::UnknownLimit);
}

/// More limits than an answer has room for.
#[tokio::test]
async fn each_of_many_limits_is_explained() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    for number in 0..100 {
        let limit = Limit::try_concurrent(format!("limit-{number}"), 2).unwrap();
        drop(limiters[0].semaphore(limit, "acme").unwrap());
    }
    assert!(operator.limits().await.unwrap().left_out > 0);
    let held = {
        limiters[0]
            .semaphore(Limit::concurrent("limit-99", 2), "acme")
            .unwrap()
    }
    .acquire()
    .await
    .unwrap();
    let key = KeyDigest::of("limit-99", "acme");
    let why = operator.explain("limit-99", key).await.unwrap();
    assert_eq!((why.limit.max, why.in_use, why.limit.held), (2, 1, 1));
    held.release().await.unwrap();
    soon(operator.drained("limit-99", |_, _| ())).await.unwrap();
}

/// Newcomers under a strict limit wait until permits are back in a store that has lost its data: for two timeouts.
#[tokio::test]
async fn a_request_to_a_store_that_has_lost_its_data_is_explained() {
    let jobs = JOBS.fallback(Fallback::Reject);
    let acme = KeyDigest::of("jobs", "acme");
    for (timeout, expected) in [
        (Duration::from_secs(20), Verdict::Recovering),
        (Duration::from_millis(200), Verdict::Admitted),
    ] {
        let server = RedisServer::start();
        let limiter = builder("web-0").store_timeout(timeout);
        let limiter = limiter.connect(&server.url()).await.unwrap();
        let operator = Patient::connect(&server.url()).await;
        await_replicas(&operator, 1).await;
        let semaphore = limiter.semaphore(&jobs, "acme").unwrap();
        // A request that is refused, as after a stall of the machine, asks again.
        let mut held = None;
        soon(async {
            while held.is_none() {
                held = semaphore.acquire().await.ok();
            }
        })
        .await;
        server.cli(&["FLUSHALL"]);
        // A newcomer finds the loss.
        until(async || {
            let newcomer = semaphore.try_acquire().await;
            let is_refused = matches!(
                &newcomer, Err(error) if error.kind() == AcquireErrorKind::Unavailable
            );
            drop(newcomer);
            let why = operator.explain("jobs", acme).await.unwrap();
            let is_back = !is_refused && why.in_use == 1;
            why.verdict == Some(expected) && is_back == (expected == Verdict::Admitted)
        })
        .await;
        drop(held);
    }
}

/// With an answer missing, slots would appear unclaimed.
#[tokio::test]
async fn replicas_that_are_asked_too_often_explain_nothing() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let held = limiters[0]
        .semaphore(JOBS, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let acme = KeyDigest::of("jobs", "acme");
    let mut operators = vec![operator];
    for _ in 0..3 {
        operators.push(Patient::connect(&server.url()).await);
    }
    let is_refused = async |operator: &Patient| match operator.0.explain("jobs", acme).await {
        // In a flood the replica does not receive the question, which the answer reports.
        Ok(why) if !why.permits.missing.is_empty() => false,
        Ok(why) => {
            assert_eq!((why.permits.rows.len(), why.unclaimed.len()), (1, 0));
            false
        }
        Err(error) => {
            use OperateErrorKind::{Busy, NoAnswer};
            assert!([Busy, NoAnswer].contains(&error.kind()), "{error}");
            error.kind() == Busy
        }
    };
    until(async || {
        join_all(operators.iter().map(is_refused))
            .await
            .contains(&true)
    })
    .await;
    drop(held);
}

/// A slot of a crashed replica counts until its lease ends, and is shown as unclaimed.
#[tokio::test]
async fn a_slot_that_nobody_answers_for_is_unclaimed() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let held = limiters[0]
        .semaphore(JOBS, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let acme = KeyDigest::of("jobs", "acme");
    let crashed = "67fz9CtE08Ngqc0_---------0";
    let until_ms = server.cli(&["EVAL", "return redis.call('TIME')[1] * 1000 + 20000", "0"]);
    server.cli(&["ZADD", &format!("turnstile:{{{acme}}}"), &until_ms, crashed]);
    let why = operator.explain("jobs", acme).await.unwrap();
    assert_eq!(
        (why.in_use, why.permits.rows.len(), why.unclaimed.len()),
        (2, 1, 1)
    );
    assert_eq!(why.unclaimed[0].id, crashed);
    assert!((15_000..=20_000).contains(&why.unclaimed[0].ends_in_ms));
    drop(held);
}

/// No replica has data of a caller blocked by an operator: the value comes from the record.
#[tokio::test]
async fn a_caller_that_is_blocked_would_be_refused() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let in_memory = Limiter::in_memory();
    let here = Patient(Operator::of(&in_memory));
    for (limiter, operator) in [(&limiters[0], operator), (&in_memory, here)] {
        drop(
            limiter
                .semaphore(JOBS, "other")
                .unwrap()
                .acquire()
                .await
                .unwrap(),
        );
        let seen = operator.overrides().await.unwrap();
        let acme = Target::key("jobs", "acme");
        operator.set(&seen, &acme, 0, HOUR, &ada()).await.unwrap();
        let acme = KeyDigest::of("jobs", "acme");
        let why = operator.explain("jobs", acme).await.unwrap();
        assert_eq!((why.verdict, why.max), (Some(Verdict::Full), 0));
    }
}

/// Replicas know a budget from their charges: the latest charge includes all earlier ones of other replicas.
#[tokio::test]
async fn a_caller_sees_what_is_left_of_a_rate() {
    const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(86_400))
        .burst(50)
        .unit("tokens");
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let in_memory = Limiter::in_memory();
    let alone = [in_memory.clone(), in_memory.clone()];
    let here = Patient(Operator::of(&in_memory));
    for (limiters, operator) in [(&limiters[..], operator), (&alone, here)] {
        let [one, other] =
            [0, 1].map(|number: usize| limiters[number].semaphore(&TOKENS, "acme").unwrap());
        let acme = KeyDigest::of("tokens", "acme");
        let explain = async || operator.explain("tokens", acme).await.unwrap();
        // Replicas answer at their times, so of two charges almost at once the earlier may seem the later.
        let explain_left = async |left| {
            let is_other = |why: &Explanation| why.budget.map(|budget| budget.remaining) != left;
            again_while(is_other, explain).await
        };
        let why = explain().await;
        assert_eq!((why.budget, why.verdict), (None, None));
        assert_eq!(why.limit.unit.as_deref(), Some("tokens"));
        let first = one.acquire().await.unwrap();
        first.budget(&TOKENS).unwrap().charge(9).await.unwrap();
        let second = other.acquire().await.unwrap();
        explain_left(Some(39)).await;
        second.budget(&TOKENS).unwrap().charge(20).await.unwrap();
        let why = explain_left(Some(19)).await;
        assert_eq!(why.verdict, Some(Verdict::Admitted));
        let budget = why.budget.unwrap();
        assert_eq!((budget.burst, budget.next_ms), (50, 0));
        // Refunds and spending.
        second.budget(&TOKENS).unwrap().settle(11);
        explain_left(Some(29)).await;
        first.budget(&TOKENS).unwrap().charge(29).await.unwrap();
        let why = explain_left(Some(0)).await;
        match why.verdict {
            Some(Verdict::TooSoon(ms)) => assert!((800_000..=864_000).contains(&ms), "{ms}"),
            other => panic!("{other:?}"),
        }
        // Listed among the keys; but a key whose whole burst is available is not.
        let idle = one_of(&limiters[0], "idle").await;
        idle.budget(&TOKENS).unwrap().settle(0);
        drop(idle);
        let used = one_of(&limiters[0], "used").await;
        let keys = async || {
            let rows = operator.keys("tokens", None).await.unwrap().rows;
            let left = rows
                .iter()
                .map(|row| (row.key, row.budget.unwrap().remaining));
            Vec::from_iter(left)
        };
        let expected = [(acme, 0), (KeyDigest::of("tokens", "used"), 49)];
        let is_other = |left: &Vec<(KeyDigest, u32)>| left[..] != expected;
        again_while(is_other, keys).await;
        drop((first, second, used));
    }

    async fn one_of(limiter: &Limiter, key: &str) -> tower_turnstile::Permit {
        limiter
            .semaphore(&TOKENS, key)
            .unwrap()
            .acquire()
            .await
            .unwrap()
    }
}

/// The list of rate keys is bounded, and a flood of keys does not hide a key that is charged repeatedly.
#[tokio::test]
async fn the_keys_of_a_rate_that_are_kept_are_bounded() {
    const STARTS: Limit = Limit::rate("starts", 100, Duration::from_secs(86_400));
    let limiter = Limiter::in_memory();
    let busy = limiter.semaphore(&STARTS, "busy").unwrap();
    for number in 0..3_000_u64 {
        if number % 500 == 0 {
            drop(busy.acquire().await.unwrap());
        }
        drop(
            limiter
                .semaphore(&STARTS, number)
                .unwrap()
                .acquire()
                .await
                .unwrap(),
        );
    }
    let operator = Operator::of(&limiter);
    let limits = operator.limits().await.unwrap();
    assert_eq!(limits.rows[0].keys, 1_024);
    let why = operator.explain("starts", KeyDigest::of("starts", "busy"));
    let budget = why.await.unwrap().budget.unwrap();
    assert_eq!((budget.remaining, budget.burst), (94, 100));
    let first = operator.explain("starts", KeyDigest::of("starts", 0_u64));
    assert_eq!(first.await.unwrap().budget, None);
}

/// A limit by key needs one, and a limit that all callers share none.
#[tokio::test]
async fn a_key_is_named_where_there_are_keys() {
    let limiter = Limiter::in_memory();
    let operator = Operator::of(&limiter);
    let chat = Limit::concurrent("chat", 2);
    let _idle = [
        limiter.semaphore(&chat, "acme").unwrap(),
        limiter.semaphore(JOBS, "").unwrap(),
    ];
    let fault = async |limit, key: Option<&str>| {
        let key = key.map(|key| KeyDigest::of(limit, key));
        let error = operator.explain(limit, key).await.err()?;
        assert_eq!(error.kind(), OperateErrorKind::Value);
        Some(error.to_string())
    };
    // As long as no key is known, none is wrong.
    for limit in ["chat", "jobs"] {
        assert_eq!(fault(limit, None).await, None);
        assert_eq!(fault(limit, Some("acme")).await, None);
    }
    let _held = [
        limiter
            .semaphore(&chat, "acme")
            .unwrap()
            .acquire()
            .await
            .unwrap(),
        limiter
            .semaphore(JOBS, "")
            .unwrap()
            .acquire()
            .await
            .unwrap(),
    ];
    let by_key = "limit `chat` counts by key: name the caller's key";
    assert_eq!(fault("chat", None).await.unwrap(), by_key);
    for (limit, key) in [
        ("chat", Some("acme")),
        ("chat", Some("globex")),
        ("jobs", None),
        ("jobs", Some("")),
        // As the key of a caller who is idle, where requests without a key share one.
        ("jobs", Some("acme")),
    ] {
        assert_eq!(fault(limit, key).await, None, "{limit} {key:?}");
    }
    assert_eq!(operator.explain("jobs", None).await.unwrap().in_use, 1);
}
