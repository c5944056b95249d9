//! The store loses its data: overrides in force in replicas are shown, can be removed, and are restored; replicas
//! register again, and holders of slots are not forgotten.

use std::time::Duration;

use tokio::time::timeout;
use tower_turnstile::{AcquireErrorKind, Limit, Semaphore};
use tower_turnstile_operate::{
    Answers, OperateErrorKind, Operator, Outcome, Overrides, PermitRow, PermitState, Revocation,
    Setting, Target, What,
};

use crate::{
    scene::{
        self, CHAT, GUARD, HOUR, JOBS, Orders as _, Patient, UNASKED, acme, ada, again_while,
        await_replicas, builder, jobs, replica, replicas, seen, set, soon, steady, undrained,
    },
    support::{fault_proxy::FaultProxy, redis_server::RedisServer},
};

async fn pause(operator: &Patient, replicas: usize) {
    let now = seen(operator).await;
    let outcome = operator.pause(&now, "jobs", HOUR, &ada()).await.unwrap();
    // Before the first request under the limit.
    assert_eq!(outcome, Outcome::Unused { replicas });
}

async fn is_paused(semaphore: &Semaphore) -> bool {
    let error = semaphore.try_acquire().await.err();
    error.is_some_and(|error| error.kind() == AcquireErrorKind::Paused)
}

/// Loses all data at once, without any notification.
fn lose(server: &RedisServer) {
    server.cli(&["FLUSHALL"]);
}

/// Waits for what replicas do unasked.
async fn until(is_so: impl AsyncFn() -> bool) {
    let all = timeout(UNASKED, scene::until(is_so)).await;
    all.expect("they do it soon");
}

async fn until_max(semaphore: &Semaphore, max: u32) {
    until(async || (semaphore.usage().await).is_ok_and(|usage| usage.max == max)).await;
}

/// The overrides, once there are this many: a replica that answers too late does not tell those that the store has lost.
pub(crate) async fn seen_all(operator: &Operator, count: usize) -> Overrides {
    let are_fewer = |now: &Overrides| now.all().len() != count;
    again_while(are_fewer, async || seen(operator).await).await
}

#[tokio::test]
async fn a_pause_whose_record_was_lost_is_shown_and_ended() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    pause(&operator, 2).await;
    lose(&server);
    assert!(is_paused(&acme(&limiters[0])).await);
    let now = seen_all(&operator, 1).await;
    let settings: Vec<_> = now.of(&jobs()).map(|one| one.setting).collect();
    assert_eq!(settings, [Setting::Pause]);
    let outcome = operator.unset(&now, &jobs(), &ada()).await;
    assert_eq!(outcome.unwrap(), Outcome::Done { replicas: 2 });
    for limiter in &limiters {
        drop(acme(limiter).try_acquire().await.unwrap());
    }
}

/// By an operator who read the overrides before, or never.
#[tokio::test]
async fn a_change_of_another_limit_does_not_end_a_pause_that_was_lost() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    pause(&operator, 2).await;
    lose(&server);
    let (other, nothing) = (Target::limit("other"), Overrides::default());
    operator
        .set(&nothing, &other, 5, HOUR, &ada())
        .await
        .unwrap();
    seen_all(&operator, 2).await;
    for limiter in &limiters {
        assert!(is_paused(&acme(limiter)).await);
    }
    let late = replica(&server, "late").await;
    assert!(is_paused(&acme(&late)).await);
}

/// Even if nobody looks, the replicas restore the record, and new replicas apply it.
#[tokio::test]
async fn what_the_store_has_lost_is_written_back() {
    let mut server = RedisServer::start();
    let (limiters, _operator) = replicas(&server, 2).await;
    let operator = Patient::connect(&server.url()).await;
    pause(&operator, 2).await;
    server.restart();
    until(async || server.cli(&["EXISTS", "turnstile:control"]) == "1").await;
    let late = replica(&server, "late").await;
    assert!(is_paused(&acme(&late)).await);
    assert!(is_paused(&acme(&limiters[0])).await);
    // The expiry is no later than before.
    let ttl_ms: u64 = server.cli(&["PTTL", "turnstile:control"]).parse().unwrap();
    assert!((3_400_000..=3_600_000).contains(&ttl_ms), "{ttl_ms}");
    assert_eq!(operator.log().await.unwrap()[0].what, What::Restored);
}

/// A disconnected replica knows an older value, and is the first to restore it, which the other one notices.
#[tokio::test]
async fn of_what_is_written_back_the_newest_wins() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let behind = builder("behind").connect(&proxy.url()).await.unwrap();
    let near = replica(&server, "web").await;
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 2).await;
    set(&operator, 5, HOUR, 2).await;
    proxy.refuse(true);
    proxy.cut_all();
    let now = seen(&operator).await;
    let outcome = operator.0.set(&now, &jobs(), 4, HOUR, &ada()).await;
    let outcome = outcome.unwrap();
    assert!(matches!(outcome, Outcome::Recorded { .. }), "{outcome:?}");
    until_max(&acme(&near), 4).await;
    lose(&server);
    proxy.refuse(false);
    until_max(&acme(&behind), 4).await;
    assert_eq!(acme(&near).usage().await.unwrap().max, 4);
    let now = seen_all(&operator, 1).await;
    assert_eq!(now.all()[0].setting, Setting::Value(4.into()));
}

/// An override removed while a replica was disconnected does not come back with it.
#[tokio::test]
async fn what_was_removed_is_not_written_back() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let behind = builder("behind").connect(&proxy.url()).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    set(&operator, 5, HOUR, 1).await;
    proxy.refuse(true);
    proxy.cut_all();
    let (now, jobs, ada) = (seen(&operator).await, jobs(), ada());
    let record = || server.cli(&["HGETALL", "turnstile:control"]);
    let before = record();
    let removed = async {
        until(async || record() != before).await;
        proxy.refuse(false);
        until_max(&acme(&behind), 2).await;
    };
    let (outcome, ()) = tokio::join!(operator.0.unset(&now, &jobs, &ada), removed);
    outcome.unwrap();
    assert!(seen(&operator).await.all().is_empty());
}

#[tokio::test]
async fn a_limit_is_not_drained_while_a_replica_off_the_roster_holds_a_slot() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let held = acme(&limiters[0]).acquire().await.unwrap();
    lose(&server);
    undrained(&operator, "jobs", |held, _| held == 1).await;
    held.release().await.unwrap();
    soon(operator.drained("jobs", |_, _| ())).await.unwrap();
}

/// The first question brings them back.
#[tokio::test]
async fn replicas_are_on_the_roster_again_once_one_is_asked() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 3).await;
    lose(&server);
    operator.limits().await.unwrap();
    await_replicas(&operator, 3).await;
    assert_eq!(
        server.cli(&["ZCARD", "turnstile:{turnstile:control}:roster"]),
        "3"
    );
}

/// A permit is held, and the store loses its data: the holder notices on its own, without any question.
#[tokio::test]
async fn a_replica_that_finds_the_data_lost_is_on_the_roster_at_once() {
    let server = RedisServer::start();
    // It renews a lease after a third.
    let builder = builder("web").lease(Duration::from_secs(2));
    let builder = builder.store_timeout(Duration::from_millis(500));
    let limiter = builder.connect(&server.url()).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let roster = "turnstile:{turnstile:control}:roster";
    let is_there = async || server.cli(&["ZCARD", roster]) == "1";
    soon(async {
        loop {
            let held = acme(&limiter).acquire().await.unwrap();
            lose(&server);
            until(async || held.is_lost() || is_there().await).await;
            // After a stall of the machine the permit is lost.
            if !held.is_lost() {
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_permit_is_revoked_after_the_roster_was_lost() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let held = acme(&limiters[1]).acquire().await.unwrap();
    lose(&server);
    let whose = Revocation::Permit(held.id().unwrap());
    let is_late = |answers: &Answers<PermitRow>| answers.rows.is_empty();
    let revoke = async || operator.0.revoke(&whose, &ada()).await.unwrap();
    let [row] = &again_while(is_late, revoke).await.rows[..] else {
        panic!("one is held");
    };
    assert_eq!(row.state, PermitState::Held);
    assert!(held.is_lost());
}

/// No replica can be asked, but one holds slots.
#[tokio::test]
async fn what_a_replica_holds_that_is_not_operable_is_not_forgotten() {
    let server = RedisServer::start();
    let limiter = steady().connect(&server.url()).await.unwrap();
    let semaphore = limiter.semaphore(&JOBS, "acme").unwrap();
    let held = [
        semaphore.acquire().await.unwrap(),
        semaphore.acquire().await.unwrap(),
    ];
    let operator = Patient::connect(&server.url()).await.0;
    undrained(&operator, "jobs", |held, answers| {
        (held, answers.answered, answers.replicas) == (2, 0, 1)
    })
    .await;
    let whose = Revocation::Permit(held[0].id().unwrap());
    let answers = operator.revoke(&whose, &ada()).await.unwrap();
    assert!(!answers.is_complete());
    assert_eq!((answers.answered, answers.replicas), (0, 1));
    drop((held, semaphore));
    limiter.shutdown(GUARD).await;
    // No slot is held, and no replica can be asked.
    let error = operator.revoke(&whose, &ada()).await;
    assert!(!error.unwrap().is_complete());
}

/// The names of a store are read in steps. Here 200 steps are needed, and each of them may have a ledger.
#[tokio::test]
async fn what_a_replica_holds_that_is_not_operable_is_found_among_many_keys() {
    let server = RedisServer::start();
    let limiter = steady().connect(&server.url()).await.unwrap();
    let mut held = Vec::new();
    for key in 0..20_u64 {
        held.extend(limiter.semaphore(&JOBS, key).unwrap().acquire().await);
    }
    let fill = "for i = 1, 50000 do redis.call('SET', ARGV[1] .. ':' .. i, '') end";
    for part in ["a", "b", "c", "d"] {
        server.cli(&["EVAL", fill, "0", part]);
    }
    let operator = Patient::connect(&server.url()).await;
    undrained(&operator, "jobs", |held, _| held == 20).await;
    drop(held);
}

/// Next to a replica that can be asked.
#[tokio::test]
async fn a_permit_of_a_replica_that_is_not_operable_is_not_said_to_be_unknown() {
    let server = RedisServer::start();
    let (_limiters, operator) = replicas(&server, 1).await;
    let limiter = steady().connect(&server.url()).await.unwrap();
    let held = limiter
        .semaphore(CHAT, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let whose = Revocation::Permit(held.id().unwrap());
    // The replica that can be asked may be late.
    let revoke = async || operator.0.revoke(&whose, &ada()).await;
    let is_late = |answers: &Result<Answers<PermitRow>, _>| {
        let answers = answers.as_ref();
        answers.is_ok_and(|answers| (answers.answered, answers.replicas) != (1, 2))
    };
    again_while(is_late, revoke).await.unwrap();
    held.release().await.unwrap();
    let error = again_while(Result::is_ok, revoke).await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::NotFound);
}

/// All replicas use the same key, which counts once.
#[tokio::test]
async fn a_key_that_several_replicas_use_counts_once_if_it_is_the_only_one() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 3).await;
    let all = Limit::concurrent("all", 9);
    let mut held = Vec::new();
    for limiter in &limiters {
        held.push(
            limiter
                .semaphore(&all, "")
                .unwrap()
                .acquire()
                .await
                .unwrap(),
        );
    }
    let limits = operator.limits().await.unwrap();
    assert_eq!((limits.rows[0].held, limits.rows[0].keys), (3, 1));
}
