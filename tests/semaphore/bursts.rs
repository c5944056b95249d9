//! Values of a key with their own burst, and the key's use when they change.

use std::time::Duration;

use tower_turnstile::{AcquireErrorKind, Limit, LimitValue, Limiter, Semaphore};

use crate::backend::Backend;

const DAY: Duration = Duration::from_secs(86_400);
const DAILY: Limit = Limit::rate("daily", 100_000, DAY);

conformance! {
    a_key_has_the_burst_of_its_value,
    use_of_a_key_stays_when_its_value_and_burst_change,
    use_of_a_key_stays_while_replicas_disagree_on_its_burst,
}

fn tokens(limiter: &Limiter, value: LimitValue) -> Semaphore {
    limiter
        .semaphore(&DAILY, "a")
        .unwrap()
        .value(value)
        .unwrap()
}

/// The remaining budget after one more request, apart from units drained meanwhile.
async fn left(tokens: &Semaphore) -> u32 {
    let permit = tokens.try_acquire().await.expect("there is room");
    permit
        .budget("daily")
        .unwrap()
        .remaining()
        .expect("it was charged")
}

async fn a_key_has_the_burst_of_its_value(backend: Backend) {
    let limiter = backend.replica().await;
    let tokens = tokens(&limiter, LimitValue::new(100).burst(3));
    for _ in 0..3 {
        drop(tokens.try_acquire().await.expect("within the burst"));
    }
    let error = tokens.try_acquire().await.expect_err("no more than that");
    assert_eq!(
        (error.kind(), error.max()),
        (AcquireErrorKind::TooSoon, 100)
    );
    // One per 864 seconds.
    let rest = error.retry_after().expect("exact").as_secs();
    assert!((800..=864).contains(&rest), "{rest}");
}

/// A use of 95,000 out of 100,000 stays 95,000, whatever the new burst.
async fn use_of_a_key_stays_when_its_value_and_burst_change(backend: Backend) {
    let limiter = backend.replica().await;
    let used = limiter
        .semaphore(&DAILY, "a")
        .unwrap()
        .acquire()
        .await
        .expect("whole");
    used.budget("daily")
        .unwrap()
        .charge(94_999)
        .await
        .expect("within");
    let value = LimitValue::new;
    for (value, before) in [
        (value(100_000).burst(200_000), 105_000),
        (value(1_000_000), 905_000),
        (value(1_000_000).burst(500_000), 405_000),
        (value(100_000), 5_000),
    ] {
        let left = left(&tokens(&limiter, value)).await;
        // Less than a minute has passed.
        assert!(
            (before - 10..before + 700).contains(&left),
            "{value:?}: {left}"
        );
    }
    // 35,000 must drain, at 40,000 per day.
    let error = tokens(&limiter, value(40_000).burst(60_000))
        .try_acquire()
        .await;
    let rest = error
        .expect_err("used up")
        .retry_after()
        .expect("exact")
        .as_secs();
    assert!((74_000..=75_630).contains(&rest), "{rest}");
}

/// As during a rollout: each replica declares a different burst, in turn.
async fn use_of_a_key_stays_while_replicas_disagree_on_its_burst(backend: Backend) {
    let [one, other] = [backend.replica().await, backend.replica().await];
    let used = one
        .semaphore(&DAILY, "a")
        .unwrap()
        .acquire()
        .await
        .expect("whole");
    used.budget("daily")
        .unwrap()
        .charge(94_999)
        .await
        .expect("within");
    let with_burst = tokens(&one, LimitValue::new(100_000).burst(300_000));
    let faster = tokens(&other, LimitValue::new(1_000_000).burst(400_000));
    let narrow = tokens(&other, LimitValue::new(100_000).burst(20));
    for _ in 0..10 {
        let left_of_it = left(&with_burst).await;
        assert!((204_900..205_800).contains(&left_of_it), "{left_of_it}");
        let left_of_it = left(&faster).await;
        assert!((304_900..305_800).contains(&left_of_it), "{left_of_it}");
        let error = narrow.try_acquire().await.expect_err("used up");
        assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
    }
}
