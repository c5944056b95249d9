//! Corner cases: keys without slots, rates that refuse together, abandoned lookups.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt, future::join_all};
use http::{Request, StatusCode};
use tower::{Layer, Service, ServiceExt};
use tower_turnstile::{Fallback, Key, Limit, Limiter, Mode, Policy, Refusal, RefusalKind};

use crate::{
    common::redis_server::RedisServer,
    support::{ONE, Script, get, on_redis, send, serve, soon},
};

const HOUR: Duration = Duration::from_secs(3600);

fn keyed(key: &str) -> Request<()> {
    Request::get("/").header("x", key).body(()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_rate_that_was_given_back_does_not_put_the_retry_off() {
    let opens = Limit::rate("opens", 1, HOUR);
    let limiter = Limiter::in_memory();
    let layer = limiter
        .layer([ONE.into(), opens.by_header("x")])
        .unwrap()
        .rate_limit_fields();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let first = send(&service, keyed("a")).await;
    assert_eq!(first.status(), StatusCode::OK);
    let refused = send(&service, keyed("b")).await;
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.limit_name(), "one");
    drop(first);
    // The charge was refunded.
    assert_eq!(send(&service, keyed("b")).await.status(), StatusCode::OK);
    // If the charge still counted, the client would be asked to stay away for an hour.
    assert!(
        refusal.retry_after() < Some(Duration::from_secs(60)),
        "{:?}",
        refusal.retry_after()
    );
}

#[tokio::test]
async fn a_key_without_slots_gets_none_when_the_store_is_down() {
    for policy in [Fallback::Local(3), Fallback::Local(5), Fallback::Allow] {
        let limiter = Limiter::connect("redis://127.0.0.1:1").await.unwrap();
        let limit = Limit::concurrent("five", 5).fallback(policy);
        let layer = limiter
            .layer(limit.by_header("x").values([("banned", 0)]))
            .unwrap();
        let service = layer.layer(serve(Script::of([]).then_waits()));
        let status = send(&service, keyed("banned")).await.status();
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{policy:?}");
    }
}

#[tokio::test]
async fn a_key_without_slots_does_not_wait() {
    let limiter = Limiter::in_memory();
    let limit = Limit::concurrent("five", 5).wait_up_to(HOUR);
    let layer = limiter
        .layer(limit.by_header("x").values([("banned", 0)]))
        .unwrap();
    let mut service = layer.layer(serve(Script::of([]).then_waits()));
    let call = service.ready().await.unwrap().call(keyed("banned"));
    assert!(call.now_or_never().is_some(), "it waits for an hour");
}

#[tokio::test]
async fn a_limit_that_was_updated_serves_as_before() {
    let limiter = Limiter::in_memory();
    let _a = limiter.semaphore(&ONE, "a").unwrap().acquire().await;
    limiter.update(&Limit::concurrent("one", 2)).unwrap();
    limiter.semaphore(&ONE, "b").unwrap();
}

#[tokio::test(start_paused = true)]
async fn lookups_are_shared_whatever_their_answers_age() {
    let mut seen = Vec::new();
    for (capacity, fresh) in [(10, Duration::ZERO), (0, HOUR), (1, HOUR)] {
        let lookups = Arc::new(AtomicUsize::new(0));
        let count = lookups.clone();
        let limit = Limit::concurrent("many", 100)
            .by_header("x")
            .values_by_async(capacity, fresh, move |_, _| {
                count.fetch_add(1, Ordering::Relaxed);
                async {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    Some(100)
                }
            });
        let layer = Limiter::in_memory().layer(limit).unwrap();
        let service = layer.layer(serve(Script::of([]).then_waits()));
        let responses = join_all((0..20).map(|_| send(&service, keyed("a")))).await;
        assert_eq!(responses.len(), 20);
        seen.push((capacity, fresh, lookups.load(Ordering::Relaxed)));
    }
    assert!(seen.iter().all(|(_, _, lookups)| *lookups == 1), "{seen:?}");
}

/// The database behind the lookups hangs, so an operator turns the limit off.
#[tokio::test]
async fn a_limit_that_is_off_looks_nothing_up() {
    let by_key = ONE.by_key_async(|_| pending::<Option<Key>>());
    let by_value = ONE.by_header("x");
    let by_value = by_value.values_by_async(10, HOUR, |_, _| pending::<Option<u32>>());
    let other = Limit::concurrent("other", 1);
    for policy in [
        Policy::from(&by_key),
        Policy::from(&by_value),
        [by_key, other.into()].into(),
    ] {
        let limiter = Limiter::in_memory();
        let service = limiter
            .layer(policy)
            .unwrap()
            .layer(serve(Script::of(["served"])));
        let call = || service.clone().oneshot(keyed("a")).now_or_never();
        assert!(call().is_none());
        limiter.update(&ONE.mode(Mode::Off)).unwrap();
        let served = call().expect("no lookup").unwrap();
        assert_eq!(served.status(), StatusCode::OK);
        limiter.shutdown(Duration::ZERO).await;
        let refused = call().expect("no lookup").unwrap();
        let refusal = refused.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.kind(), RefusalKind::ShutDown);
    }
}

async fn refused_by_two_rates(limiter: &Limiter, order: [usize; 2]) -> Duration {
    let rates = [
        Limit::rate("short", 1, Duration::from_secs(2)),
        Limit::rate("long", 1, HOUR),
    ];
    let scopes = order.map(|index| rates[index].clone().by_header("x"));
    let layer = limiter.layer(scopes).unwrap().rate_limit_fields();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let key = format!("{order:?}");
    assert_eq!(send(&service, keyed(&key)).await.status(), StatusCode::OK);
    let refused = send(&service, keyed(&key)).await;
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    refusal.retry_after().unwrap()
}

#[tokio::test]
async fn of_two_rates_the_longer_one_sets_the_retry() {
    let redis = RedisServer::start();
    let shared = on_redis(&redis).await;
    let mut retries = Vec::new();
    for limiter in [Limiter::in_memory(), shared] {
        for order in [[0, 1], [1, 0]] {
            retries.push(refused_by_two_rates(&limiter, order).await);
        }
    }
    assert!(
        retries
            .iter()
            .all(|retries| *retries > Duration::from_secs(3_000)),
        "{retries:?}"
    );
}

/// Two of three starts at the rate are used: by the admitted request, and by the refunded one.
#[tokio::test]
async fn a_refusal_after_a_wait_tells_how_the_rate_stands_that_was_given_back() {
    let redis = RedisServer::start();
    let shared = on_redis(&redis).await;
    for limiter in [Limiter::in_memory(), shared] {
        let opens = Limit::rate("opens", 3, HOUR);
        let one = ONE.wait_up_to(Duration::from_millis(50));
        let layer = limiter.layer([one.into(), opens.by_header("x")]).unwrap();
        let layer = layer.rate_limit_fields();
        let service = layer.layer(serve(Script::of([]).then_waits()));
        let _held = send(&service, keyed("a")).await;
        let refused = send(&service, keyed("a")).await;
        let refusal = refused.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.kind(), RefusalKind::TimedOut);
        let values = refused.headers().get_all("ratelimit").iter();
        let values: Vec<_> = values.map(|line| line.to_str().unwrap()).collect();
        assert!(values.join(", ").contains(r#""opens";r=2"#), "{values:?}");
    }
}

#[tokio::test]
async fn a_rate_that_was_given_back_in_the_store_does_not_put_the_retry_off() {
    let redis = RedisServer::start();
    let limiter = on_redis(&redis).await;
    let opens = Limit::rate("opens", 1, HOUR);
    let one = ONE.wait_up_to(Duration::from_millis(200));
    let layer = limiter
        .layer([one.into(), opens.by_header("x")])
        .unwrap()
        .rate_limit_fields();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let first = send(&service, keyed("a")).await;
    let refused = send(&service, keyed("b")).await;
    drop(first);
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    // Again after a stall of the machine. If the charge still counted, this would last for an hour.
    soon(async { while send(&service, keyed("b")).await.status() != StatusCode::OK {} }).await;
    assert!(
        refusal.retry_after() < Some(Duration::from_secs(60)),
        "{:?}",
        refusal.retry_after()
    );
}

/// Six requests share a lookup that takes a second, or panics after it. Returns the number that were served, and of lookups.
async fn six_requests(capacity: usize, first_leaves: bool, first_panics: bool) -> (usize, usize) {
    let lookups = Arc::new(AtomicUsize::new(0));
    let count = lookups.clone();
    let limit = Limit::concurrent("many", 100)
        .by_header("x")
        .values_by_async(capacity, HOUR, move |_, _| {
            let number = count.fetch_add(1, Ordering::Relaxed);
            async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                assert!(number > 0 || !first_panics, "a lookup panics");
                Some(100)
            }
        });
    let layer = Limiter::in_memory().layer(limit).unwrap();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let call = |_| {
        let service = service.clone();
        tokio::spawn(async move { send(&service, keyed("a")).await.status() })
    };
    let calls: Vec<_> = (0..6).map(call).collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    if first_leaves {
        calls[0].abort();
    }
    let answers = tokio::time::timeout(Duration::from_secs(60), join_all(calls));
    let answers = answers.await.unwrap();
    let served = answers.iter().filter(|status| status.is_ok()).count();
    (served, lookups.load(Ordering::Relaxed))
}

#[tokio::test(start_paused = true)]
async fn a_lookup_that_is_left_goes_on_for_the_others() {
    for capacity in [0, 1, 10] {
        assert_eq!(six_requests(capacity, true, false).await, (5, 1));
    }
}

/// The panic is that of its request.
#[tokio::test(start_paused = true)]
async fn a_lookup_that_panics_goes_to_the_next() {
    for capacity in [0, 1, 10] {
        assert_eq!(six_requests(capacity, false, true).await, (5, 2));
    }
}

/// The request that began the lookup has left before the lookup panics.
#[tokio::test(start_paused = true)]
async fn a_lookup_that_was_left_and_panics_goes_to_the_next() {
    for capacity in [0, 1, 10] {
        assert_eq!(six_requests(capacity, true, true).await, (5, 2));
    }
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_is_over_is_not_one_of_a_rate() {
    let opens = Limit::rate("opens", 10, HOUR);
    let layer = Limiter::in_memory()
        .layer([opens, ONE])
        .unwrap()
        .max_hold(Duration::from_secs(1));
    let never = tower::service_fn(|_: Request<()>| {
        std::future::pending::<Result<http::Response<Script>, std::convert::Infallible>>()
    });
    let refused = send(&layer.layer(never), get("/")).await;
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.limit_name(), "one");
}
