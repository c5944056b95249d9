//! Values with their own burst.

use std::time::Duration;

use tower_turnstile::{Limit, LimitValue, Limiter, Semaphore};
use tower_turnstile_operate::{OperateErrorKind, Operator, Outcome, Target};

use crate::{
    scene::{HOUR, JOBS, Orders as _, Patient, acme, ada, jobs, replicas, seen},
    support::redis_server::RedisServer,
};

const DAILY: Limit = Limit::rate("daily", 100_000, Duration::from_secs(86_400));

async fn set(operator: &Patient, target: &Target, value: LimitValue, replicas: usize) {
    let seen = seen(operator).await;
    let outcome = operator.set(&seen, target, value, HOUR, &ada()).await;
    assert_eq!(outcome.unwrap(), Outcome::Done { replicas });
}

/// After one more request the key has this much left, apart from units drained meanwhile.
async fn has_left(tokens: &Semaphore, expected: u32) {
    let permit = tokens.try_acquire().await.expect("there is room");
    let left = permit
        .budget("daily")
        .unwrap()
        .remaining()
        .expect("it was charged");
    assert!(
        (expected - 10..expected + 700).contains(&left),
        "{expected}: {left}"
    );
}

/// A use of 95,000 out of 100,000 stays 95,000.
async fn use_stays(limiters: &[Limiter], operator: &Patient) {
    let tokens: Vec<_> = (limiters.iter())
        .map(|limiter| limiter.semaphore(&DAILY, "acme").unwrap())
        .collect();
    let used = tokens[0].acquire().await.expect("whole");
    used.budget("daily")
        .unwrap()
        .charge(94_999)
        .await
        .expect("within");
    let (all, one) = (Target::limit("daily"), Target::key("daily", "acme"));
    let value = LimitValue::new;
    for (target, value, left) in [
        (&all, value(100_000).burst(200_000), 105_000),
        (&one, value(1_000_000).burst(400_000), 305_000),
        // With the limit's burst.
        (&one, value(1_000_000), 105_000),
    ] {
        set(operator, target, value, limiters.len()).await;
        for tokens in &tokens {
            has_left(tokens, left).await;
        }
    }
    for target in [&one, &all] {
        let seen = seen(operator).await;
        operator.unset(&seen, target, &ada()).await.unwrap();
    }
    for tokens in &tokens {
        has_left(tokens, 5_000).await;
    }
}

#[tokio::test]
async fn use_stays_when_an_operator_sets_a_burst_in_memory() {
    let limiter = Limiter::in_memory();
    let operator = Patient(Operator::of(&limiter));
    use_stays(&[limiter], &operator).await;
}

#[tokio::test]
async fn use_stays_when_an_operator_sets_a_burst_in_the_store() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    use_stays(&limiters, &operator).await;
}

/// A burst for slots, set before the first request shows that the limit is not a rate.
#[tokio::test]
async fn a_burst_of_slots_is_ignored_with_its_value() {
    let limiter = Limiter::in_memory();
    let operator = Patient(Operator::of(&limiter));
    let (before, value) = (seen(&operator).await, LimitValue::new(6).burst(3));
    let outcome = operator.set(&before, &jobs(), value, HOUR, &ada()).await;
    assert_eq!(outcome.unwrap(), Outcome::Unused { replicas: 1 });
    let semaphore = acme(&limiter);
    assert_eq!(semaphore.usage().await.unwrap().max, JOBS.max());
    set(&operator, &jobs(), 6.into(), 1).await;
    assert_eq!(semaphore.usage().await.unwrap().max, 6);
}

#[tokio::test]
async fn a_burst_out_of_range_is_refused() {
    let limiter = Limiter::in_memory();
    let operator = Operator::of(&limiter);
    let seen = seen(&operator).await;
    for burst in [0, 1_000_000_001] {
        let value = LimitValue::new(8).burst(burst);
        let error = operator.set(&seen, &jobs(), value, HOUR, &ada()).await;
        let error = error.unwrap_err();
        assert_eq!(error.kind(), OperateErrorKind::Value);
        let said = error.to_string();
        assert!(
            said.contains(&format!("the burst of limit `jobs` is {burst}")),
            "{said}"
        );
    }
}
