//! The effect of operators' decisions in the replicas.

use std::time::Duration;

use futures_util::FutureExt;
use http::{Request, StatusCode, request::Parts};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    Acquire, AcquireErrorKind, Key, Limit, LimitValue, Limiter, Mode, Permit, Refusal, RefusalKind,
    Semaphore,
};
use tower_turnstile_operate::{
    KeyDigest, OperateErrorKind, Operator, Order, Outcome, Overrides, Setting, Target, Verdict,
};

use crate::{
    scene::{
        HOUR, JOBS, Orders as _, Patient, acme, ada, again_while, await_replicas, builder, jobs,
        replica, replicas, seen, set, soon, undrained, until,
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        queue::wait_in_line,
        redis_server::RedisServer,
    },
};

async fn hold(semaphore: &Semaphore, count: usize) -> Vec<Permit> {
    let mut held = Vec::new();
    for _ in 0..count {
        held.push(semaphore.acquire().await.unwrap());
    }
    held
}

/// Checks that as many waiters are admitted as there are new slots.
async fn admitted(waiters: Vec<Acquire>, count: usize) -> Vec<Permit> {
    let mut waiters: Vec<_> = waiters.into_iter().map(Box::pin).collect();
    let mut admitted = Vec::new();
    while admitted.len() < count {
        let any = futures_util::future::select_all(waiters.drain(..));
        let (permit, _, rest) = soon(any).await;
        admitted.push(permit.unwrap());
        waiters = rest;
    }
    // Not one more.
    let any = futures_util::future::select_all(waiters);
    assert!(timeout(Duration::from_millis(100), any).await.is_err());
    admitted
}

#[tokio::test]
async fn a_raise_admits_waiters_of_all_replicas() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let semaphores: Vec<_> = limiters.iter().map(acme).collect();
    let held = hold(&semaphores[0], 2).await;
    let mut waiters = Vec::new();
    for number in 0..40 {
        waiters.push(wait_in_line(&semaphores[number % 2]).await);
    }
    set(&operator, 6, HOUR, 2).await;
    // Both values are shown.
    let row = operator.limits().await.unwrap().rows.swap_remove(0);
    assert_eq!((row.max, row.declared_max, row.differs), (6, 2, false));
    let admitted = admitted(waiters, 4).await;
    assert_eq!(semaphores[1].usage().await.unwrap().in_use, 6);
    drop((held, admitted));
}

#[tokio::test]
async fn a_lowered_limit_takes_nothing_away_and_admits_nobody_above_it() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let semaphores: Vec<_> = limiters.iter().map(acme).collect();
    let mut held = hold(&semaphores[0], 2).await;
    set(&operator, 1, HOUR, 2).await;
    assert!(held.iter().all(|permit| !permit.is_lost()));
    held.pop().unwrap().release().await.unwrap();
    for semaphore in &semaphores {
        let error = semaphore.try_acquire().await.unwrap_err();
        assert_eq!((error.kind(), error.max()), (AcquireErrorKind::Full, 1));
    }
    held.pop().unwrap().release().await.unwrap();
    drop(semaphores[1].try_acquire().await.unwrap());
}

/// A starting replica reads the record before its first request.
#[tokio::test]
async fn a_replica_that_starts_knows_what_is_in_force() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let now = seen(&operator).await;
    operator.pause(&now, "jobs", HOUR, &ada()).await.unwrap();
    let limiter = replica(&server, "late").await;
    let error = acme(&limiter).acquire().await.unwrap_err();
    assert_eq!(error.kind(), AcquireErrorKind::Paused);
}

#[tokio::test]
async fn a_paused_limit_refuses_with_503_until_its_end() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let layer = limiters[0].layer(JOBS.by_header("x-api-key")).unwrap();
    let held = acme(&limiters[0]).acquire().await.unwrap();
    let now = seen(&operator).await;
    let outcome = operator.pause(&now, "jobs", HOUR, &ada()).await.unwrap();
    assert_eq!(outcome, Outcome::Done { replicas: 1 });
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
    }));
    let response = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let retry: u64 = (response.headers()["retry-after"].to_str().unwrap())
        .parse()
        .unwrap();
    assert!((3_500..=3_600).contains(&retry), "{retry}");
    let refusal = response.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind(), RefusalKind::Paused);
    let refusals = operator.refusals("jobs", None).await.unwrap().rows;
    assert_eq!(refusals[0].reason, "paused");
    assert!(!held.is_lost());
    let why = operator
        .explain("jobs", KeyDigest::of("jobs", "acme"))
        .await
        .unwrap();
    assert_eq!(why.verdict, Some(Verdict::Paused));
    undrained(&operator, "jobs", |held, _| held == 1).await;
    held.release().await.unwrap();
    soon(operator.drained("jobs", |_, _| ())).await.unwrap();
    let now = seen(&operator).await;
    operator.unset(&now, &jobs(), &ada()).await.unwrap();
    drop(acme(&limiters[0]).acquire().await.unwrap());
}

#[tokio::test]
async fn a_mode_and_one_key_are_changed() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    let (one, other) = (
        acme(&limiters[0]),
        limiters[0].semaphore(&JOBS, &b"\0\xff"[..]).unwrap(),
    );
    let now = seen(&operator).await;
    let key = Target::key("jobs", &b"\0\xff"[..]);
    let outcome = operator.set(&now, &key, 1, HOUR, &ada()).await.unwrap();
    assert_eq!(outcome, Outcome::Done { replicas: 1 });
    assert_eq!(one.usage().await.unwrap().max, 2);
    assert_eq!(other.usage().await.unwrap().max, 1);
    operator
        .mode(&now, "jobs", Mode::Off, HOUR, &ada())
        .await
        .unwrap();
    let held = hold(&one, 5).await;
    let setting = seen(&operator)
        .await
        .all()
        .iter()
        .map(|one| one.setting)
        .max_by_key(|one| matches!(one, Setting::Mode(_)));
    assert_eq!(setting, Some(Setting::Mode(Mode::Off)));
    drop(held);
}

/// A replica without permission to read the record continues as before, and the operator is informed.
#[tokio::test]
async fn a_replica_that_does_not_confirm_is_named() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    server.cli(&[
        "ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-hscan",
    ]);
    let url = server.url().replace("redis://", "redis://blind:secret@");
    let blind = builder("web-1").connect(&url).await.unwrap();
    await_replicas(&operator, 2).await;
    let expected = Outcome::Recorded {
        confirmed: 1,
        of: 2,
        missing: vec!["web-1".to_owned()],
    };
    // The other may be late.
    let ask = async || {
        let now = seen(&operator).await;
        operator.0.set(&now, &jobs(), 5, HOUR, &ada()).await
    };
    let outcome = again_while(|outcome| outcome.as_ref().ok() != Some(&expected), ask).await;
    assert_eq!(outcome.unwrap(), expected);
    assert_eq!(acme(&limiters[0]).usage().await.unwrap().max, 5);
    assert_eq!(acme(&blind).usage().await.unwrap().max, 2);
}

/// A typo in `turnstile pause caht --wait && migrate` does not start the migration.
#[tokio::test]
async fn a_limit_that_no_replica_has_is_reported() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let now = seen(&operator).await;
    let gone = Target::limit("\u{202e}gone");
    let unused = Outcome::Unused { replicas: 2 };
    for outcome in [
        operator.set(&now, &gone, 5, HOUR, &ada()).await,
        operator.pause(&now, "jobs", HOUR, &ada()).await,
    ] {
        assert_eq!(outcome.unwrap(), unused);
    }
    let error = operator.drained("jobs", |_, _| ()).await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::UnknownLimit);
    // The first request under the limit is paused.
    let error = acme(&limiters[0]).acquire().await.unwrap_err();
    assert_eq!(error.kind(), AcquireErrorKind::Paused);
    let now = seen(&operator).await;
    let outcome = operator.pause(&now, "jobs", HOUR, &ada()).await;
    assert_eq!(outcome.unwrap(), Outcome::Done { replicas: 2 });
    operator.drained("jobs", |_, _| ()).await.unwrap();
}

/// The replica does not hear the first questions, and confirms the change.
#[tokio::test]
async fn a_limit_that_no_replica_has_is_reported_after_a_replica_was_silent() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let proxy = FaultProxy::start(server.port());
    let _late = builder("late").connect(&proxy.url()).await.unwrap();
    let order = Order::Pause {
        limit: "gone".to_owned(),
        length: HOUR,
        seen: None,
    };
    let by = ada();
    let record = || server.cli(&["HGETALL", "turnstile:control"]);
    // It may confirm the change too late, or not say in time that it lacks the limit.
    for _ in 0..60 {
        await_replicas(&operator, 2).await;
        let before = record();
        proxy.hold_all(Way::Replies);
        let recorded = async {
            until(async || record() != before).await;
            proxy.release(Way::Replies);
        };
        let (outcome, ()) = tokio::join!(operator.0.order(&order, &by), recorded);
        match outcome.unwrap() {
            Outcome::Unused { replicas: 2 } => return,
            Outcome::Recorded { .. } | Outcome::Done { .. } => {}
            outcome => panic!("{outcome:?}"),
        }
    }
    panic!("it never answers in time");
}

/// Replicas would ignore it, and the caller would not be blocked.
#[tokio::test]
async fn a_value_that_does_not_fit_is_refused() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let opens = Limit::rate("opens", 10, Duration::from_secs(60));
    drop((
        limiters[0].semaphore(opens, "acme").unwrap(),
        acme(&limiters[1]),
    ));
    let set = async |target: &Target, value| {
        let now = seen(&operator).await;
        operator.set(&now, target, value, HOUR, &ada()).await
    };
    let bursty = LimitValue::from(5).burst(5);
    let opens = Target::key("opens", "acme");
    for (target, value) in [(&opens, LimitValue::from(0)), (&jobs(), bursty)] {
        // It is recorded if no replica answers in time.
        let is_late = |outcome: &Result<Outcome, _>| outcome.is_ok();
        let error = again_while(is_late, async || set(target, value).await).await;
        assert_eq!(error.unwrap_err().kind(), OperateErrorKind::Value);
    }
    let blocked = Target::key("jobs", "acme");
    for (target, value) in [(&opens, bursty), (&blocked, LimitValue::from(0))] {
        set(target, value).await.unwrap();
    }
}

/// Whoever waits for the last holder must not take an open limit for a paused one.
#[tokio::test(start_paused = true)]
async fn a_pause_must_last_until_the_limit_is_drained() {
    let limiter = Limiter::in_memory();
    let (operator, semaphore) = (Operator::of(&limiter), acme(&limiter));
    let mut held = hold(&semaphore, 2).await;
    let (now, minute) = (seen(&operator).await, Duration::from_secs(60));
    operator.pause(&now, "jobs", minute, &ada()).await.unwrap();
    let drained = timeout(2 * minute, operator.drained("jobs", |_, _| ())).await;
    let error = drained.expect("the pause ends").unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::NotFound);
    let expected = "the pause of limit `jobs` has ended with 2 slots held";
    assert_eq!(error.to_string(), expected);
    // A limit that was never paused.
    let drained = operator.drained("jobs", |held_now, _| held.truncate(held_now - 1));
    drained.await.unwrap();
}

/// As when the upstream and the database behind the lookups are down.
#[tokio::test]
async fn a_paused_limit_refuses_without_a_lookup() {
    let later = |_: &Parts| std::future::ready(Some("gold"));
    for scope in [JOBS.by_header("x-api-key"), JOBS.by_key_async(later)] {
        let limiter = Limiter::in_memory();
        let hang = |_: &Parts, _: &Key| std::future::pending::<Option<u32>>();
        let service = limiter
            .layer(scope.values_by_async(10, HOUR, hang))
            .unwrap()
            .layer(service_fn(async |_: Request<()>| {
                Ok::<_, std::convert::Infallible>(http::Response::new(String::new()))
            }));
        let call = || service.clone().oneshot(Request::new(())).now_or_never();
        assert!(call().is_none(), "it looks up");
        let operator = Operator::of(&limiter);
        let now = seen(&operator).await;
        operator.pause(&now, "jobs", HOUR, &ada()).await.unwrap();
        let refused = call().expect("it is refused").unwrap();
        let refusal = refused.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.kind(), RefusalKind::Paused);
        let now = seen(&operator).await;
        operator.unset(&now, &jobs(), &ada()).await.unwrap();
        assert!(call().is_none(), "it looks up");
    }
}

/// As with a large store, which is scanned: not more than half of the time.
#[tokio::test]
async fn a_check_that_takes_long_is_followed_by_a_long_pause() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let (limiters, _) = replicas(&server, 1).await;
    let operator = Patient::connect(&proxy.url()).await;
    let _held = acme(&limiters[0]).acquire().await.unwrap();
    proxy.delay(Way::Replies, Duration::from_millis(600));
    let (began, mut checks) = (Instant::now(), Vec::new());
    let (checked, mut next) = tokio::sync::mpsc::unbounded_channel();
    let drained = operator.drained("jobs", |_, _| checked.send(began.elapsed()).expect("read"));
    tokio::select! {
        _ = drained => panic!("a permit is held"),
        () = async { while checks.len() < 2 { checks.extend(next.recv().await); } } => {}
    }
    // Two round trips, and then a pause of that length rather than a second.
    let check = Duration::from_millis(1_200);
    assert!(checks[0] >= check, "{checks:?}");
    assert!(checks[1] - checks[0] >= 2 * check, "{checks:?}");
}

/// Each operator's change is in force, although replicas report only the latest: the change of a far operator is confirmed after
/// one that a near operator has made meanwhile.
#[tokio::test]
async fn changes_at_the_same_time_are_confirmed() {
    let server = RedisServer::start();
    let (limiters, near) = replicas(&server, 3).await;
    let proxy = FaultProxy::start(server.port());
    let far = Patient::connect(&proxy.url()).await.0;
    let chat = Limit::concurrent("chat", 2);
    for one in &limiters {
        drop((one.semaphore(&chat, "").unwrap(), acme(one)));
    }
    proxy.delay(Way::Replies, Duration::from_millis(100));
    let order = |target| Order::Pause {
        limit: target,
        length: HOUR,
        seen: None,
    };
    let (jobs, chat, ada) = (order("jobs".to_owned()), order("chat".to_owned()), ada());
    let record = || server.cli(&["HGETALL", "turnstile:control"]);
    let mut outcomes = Vec::new();
    // If the machine stalls, replicas answer too late.
    while outcomes.len() < 5 {
        let before = record();
        let meanwhile = async {
            until(async || record() != before).await;
            near.order(&jobs, &ada).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(far.order(&chat, &ada), meanwhile);
        outcomes.push(outcome.unwrap());
        if outcomes.last() == Some(&Outcome::Done { replicas: 3 }) {
            return;
        }
    }
    panic!("{outcomes:?}");
}

/// With paused time: only the end itself ends an override.
#[tokio::test(start_paused = true)]
async fn in_memory_the_same() {
    let limiter = Limiter::in_memory();
    let (operator, semaphore) = (Patient(Operator::of(&limiter)), acme(&limiter));
    let held = hold(&semaphore, 2).await;
    let waiter = wait_in_line(&semaphore).await;
    set(&operator, 3, HOUR, 1).await;
    let third = timeout(Duration::from_millis(1), waiter)
        .await
        .expect("at once")
        .unwrap();
    let now = seen(&operator).await;
    assert_eq!(now.all()[0].setting, Setting::Value(3.into()));
    let error = operator
        .set(&Overrides::default(), &jobs(), 4, HOUR, &ada())
        .await;
    assert!(
        error
            .unwrap_err()
            .to_string()
            .starts_with("changed meanwhile by ada")
    );
    operator
        .pause(&now, "jobs", HOUR / 2, &ada())
        .await
        .unwrap();
    let error = semaphore.acquire().await.unwrap_err();
    assert_eq!(error.kind(), AcquireErrorKind::Paused);
    sleep(HOUR / 2 + Duration::from_millis(2)).await;
    assert_eq!(semaphore.try_acquire().await.unwrap_err().max(), 3);
    // Ends are in whole milliseconds.
    sleep(HOUR / 2 + Duration::from_millis(2)).await;
    assert_eq!(semaphore.try_acquire().await.unwrap_err().max(), 2);
    let log = operator.log().await.unwrap();
    assert_eq!(log.len(), 2);
    drop((held, third));
}

/// Idle slots are taken without the keeper, as are slots released during the pause.
#[tokio::test]
async fn a_pause_holds_for_slots_that_are_reused() {
    let server = RedisServer::start();
    let in_memory = Limiter::in_memory();
    let here = Patient(Operator::of(&in_memory));
    let (mut limiters, remote) = replicas(&server, 1).await;
    let with_store = (limiters.remove(0), remote);
    for (limiter, operator) in [(in_memory, here), with_store] {
        let jobs = JOBS.reuse();
        let semaphore = limiter.semaphore(&jobs, "acme").unwrap();
        let held = semaphore.acquire().await.unwrap();
        let idle = semaphore.acquire().await.unwrap();
        drop(idle);
        let seen = seen(&operator).await;
        let outcome = operator.pause(&seen, "jobs", HOUR, &ada()).await.unwrap();
        assert_eq!(outcome, Outcome::Done { replicas: 1 });
        for _ in 0..3 {
            let error = semaphore.acquire().await.unwrap_err();
            assert_eq!(error.kind(), AcquireErrorKind::Paused);
        }
        drop(held);
        for _ in 0..3 {
            let error = semaphore.acquire().await.unwrap_err();
            assert_eq!(error.kind(), AcquireErrorKind::Paused);
        }
        let seen = self::seen(&operator).await;
        operator.unset(&seen, &self::jobs(), &ada()).await.unwrap();
        drop(semaphore.acquire().await.unwrap());
    }
}
