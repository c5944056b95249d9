//! Limits that find their own value: what a layer takes from responses and handlers.

use std::{convert::Infallible, future::ready, ops::RangeInclusive, time::Duration};

use futures_util::future::join_all;
use http::{Request, Response};
use tower::{Layer, Service, service_fn};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Key, Limit, LimitLayer, Limiter, Scope, Slot,
    layer::{Outcome, overload, slower_than},
};

use crate::{
    common::{redis_server::RedisServer, soon},
    support::{get, on_redis, send},
};

const GPU: Limit = Limit::concurrent("gpu", 10).wait_up_to(Duration::from_secs(60));

fn adaptive(bounds: RangeInclusive<u32>) -> Scope {
    Scope::from(GPU).outcome_by(overload).adapt(bounds)
}

#[test]
fn bounds_are_checked() {
    let rate = Limit::rate("gpu", 10, Duration::from_secs(1));
    let own = |value| adaptive(5..=40).values([("acme", value)]);
    for (scope, words) in [
        (
            adaptive(0..=40),
            "its bounds are 0 to 40: they must be 1 to 1000000",
        ),
        (adaptive(RangeInclusive::new(40, 5)), "the lower first"),
        (adaptive(5..=1_000_001), "they must be 1 to 1000000"),
        (adaptive(11..=40), "it begins at 10, which must be 11 to 40"),
        (adaptive(5..=9), "it begins at 10"),
        (Scope::from(GPU.reuse()).adapt(5..=40), "set no `reuse`"),
        (
            Scope::from(rate).adapt(5..=40),
            "a rate has no slots to be adapted",
        ),
        (
            own(4),
            "a value of 4: the limit is adaptive, so it must be 0, or 5 to 40",
        ),
        (own(41), "a value of 41"),
    ] {
        let error = Limiter::in_memory().layer(scope).expect_err(words);
        assert_eq!(error.kind(), ConfigErrorKind::Value);
        let text = error.to_string();
        assert!(
            text.contains("limit `gpu`") && text.contains(words),
            "{text}"
        );
    }
    for scope in [
        adaptive(10..=10),
        adaptive(1..=1_000_000),
        own(0),
        own(5),
        own(40),
    ] {
        let _ = Limiter::in_memory()
            .layer(scope)
            .expect("within the bounds");
    }
}

/// In code only a scope makes a limit adaptive: others take the limit from the limiter.
#[tokio::test]
async fn a_limit_has_one_pair_of_bounds() {
    let limiter = Limiter::in_memory();
    let _ = limiter.layer(adaptive(5..=40)).unwrap();
    for other in [limiter.layer(&GPU), limiter.layer(adaptive(5..=41))] {
        let error = other.expect_err("another limit");
        assert_eq!(error.kind(), ConfigErrorKind::Conflict);
        assert!(error.to_string().contains("adapt"), "{error}");
    }
    let gpu = limiter.limit("gpu").expect("the layer has it");
    limiter.semaphore(&gpu, "acme").expect("the limiter's own");
    let _ = limiter
        .layer(Scope::from(gpu).outcome_by(overload).adapt(5..=40))
        .expect("the same");
    limiter
        .update(&Limit::concurrent("gpu", 20).wait_up_to(Duration::from_secs(60)))
        .expect("within its bounds");
    let error = limiter
        .update(&Limit::concurrent("gpu", 4))
        .expect_err("below its floor");
    assert!(error.to_string().contains("it begins at 4"), "{error}");
}

#[tokio::test]
async fn a_report_names_a_limit_with_slots() {
    let limiter = Limiter::in_memory();
    let starts = Limit::rate("starts", 10, Duration::from_secs(1));
    let service = service_fn(async |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().expect("a slot").clone();
        let hold = slot.hold().expect("held");
        let outcomes = [
            Outcome::Accepted,
            Outcome::Other,
            Outcome::Overloaded,
            Outcome::Pause(Duration::ZERO),
        ];
        for outcome in outcomes {
            slot.report(&GPU, outcome).expect("it has a slot");
            hold.report("gpu", outcome).expect("it has a slot");
            for unknown in [slot.report("gpus", outcome), hold.report("starts", outcome)] {
                assert_eq!(
                    unknown.expect_err("a typo").kind(),
                    AcquireErrorKind::UnknownLimit
                );
            }
        }
        Ok::<_, Infallible>(Response::new(String::new()))
    });
    let layer = limiter
        .layer((adaptive(5..=40), starts.by_key(|_| Some(Key::SHARED))))
        .unwrap();
    assert_eq!(send(&layer.layer(service), get("/")).await.status(), 200);
}

/// The limiter's value for the key that all callers share.
async fn value(limiter: &Limiter) -> u32 {
    let gpu = limiter.limit("gpu").expect("the layer has it");
    let semaphore = limiter.semaphore(&gpu, Key::SHARED).unwrap();
    semaphore.usage().await.unwrap().max
}

/// Answers each request with the status in its path, after as many milliseconds as its query says.
fn upstream()
-> impl Service<Request<()>, Response = Response<String>, Error = Infallible, Future: Send> + Clone
{
    service_fn(async |request: Request<()>| {
        let ms = request.uri().query().map_or(0, |ms| ms.parse().unwrap());
        tokio::time::sleep(Duration::from_millis(ms)).await;
        let status = request.uri().path().trim_start_matches('/');
        let response = Response::builder().status(status);
        Ok(response.body(String::new()).expect("valid"))
    })
}

/// Sends as many requests at once.
async fn burst(layer: &LimitLayer, count: usize, path: &str) {
    let service = layer.layer(upstream());
    join_all((0..count).map(|_| send(&service, get(path)))).await;
}

#[tokio::test(start_paused = true)]
async fn a_limit_grows_and_is_cut_by_its_responses() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(adaptive(5..=12)).unwrap();
    burst(&layer, 1, "/200").await;
    assert_eq!(value(&limiter).await, 10, "most slots are free");
    burst(&layer, 10, "/500?20").await;
    assert_eq!(value(&limiter).await, 10, "that says nothing");
    burst(&layer, 10, "/200?1000").await;
    assert_eq!(value(&limiter).await, 11, "a tenth in this second");
    for _ in 0..2 {
        burst(&layer, 11, "/200?1000").await;
        assert_eq!(value(&limiter).await, 12, "its ceiling");
    }
    burst(&layer, 12, "/503?20").await;
    assert_eq!(
        value(&limiter).await,
        9,
        "nine tenths of the ten that were in use at the third"
    );
}

/// The wait in the queue does not count, nor does the body.
#[tokio::test(start_paused = true)]
async fn a_late_head_is_an_overload() {
    let limiter = Limiter::in_memory();
    let scope = Scope::from(GPU)
        .outcome_by(overload)
        .outcome_by(slower_than(Duration::from_secs(2)));
    let layer = limiter.layer(scope.adapt(5..=40)).unwrap();
    burst(&layer, 30, "/200?2000").await;
    let grown = value(&limiter).await;
    assert!(grown > 10, "{grown}: the last waited for four seconds");
    burst(&layer, 3, "/404?2001").await;
    let cut = value(&limiter).await;
    assert_eq!(cut, 5, "three were in use");
    burst(&layer, 3, "/503?0").await;
    assert_eq!(value(&limiter).await, 5, "its floor");
}

#[tokio::test(start_paused = true)]
async fn each_limit_of_a_request_follows_its_own_judge() {
    let limiter = Limiter::in_memory();
    let other = Limit::concurrent("other", 10);
    let late = Scope::from(&other)
        .outcome_by(slower_than(Duration::from_secs(2)))
        .adapt(1..=40);
    let layer = limiter.layer((adaptive(1..=40), late)).unwrap();
    burst(&layer, 4, "/503?10").await;
    let of_other = async || {
        let other = limiter.limit("other").expect("the layer has it");
        limiter
            .semaphore(&other, Key::SHARED)
            .unwrap()
            .usage()
            .await
            .unwrap()
            .max
    };
    assert_eq!((value(&limiter).await, of_other().await), (1, 10));
    burst(&layer, 1, "/200?2001").await;
    burst(&layer, 1, "/200?2001").await;
    burst(&layer, 1, "/200?2001").await;
    assert_eq!(of_other().await, 1);
}

#[tokio::test(start_paused = true)]
async fn reports_and_pauses_count_as_overloads() {
    for outcome in [
        Outcome::Overloaded,
        Outcome::Pause(Duration::from_millis(1)),
    ] {
        let limiter = Limiter::in_memory();
        let service = service_fn(move |request: Request<()>| {
            let slot = request.extensions().get::<Slot>().expect("a slot").clone();
            (0..3).for_each(|_| slot.report(&GPU, outcome).expect("it has a slot"));
            ready(Ok::<_, Infallible>(Response::new(String::new())))
        });
        // No judge: only the handler knows.
        let layer = limiter.layer(Scope::from(GPU).adapt(2..=40)).unwrap();
        send(&layer.layer(service), get("/")).await;
        assert_eq!(value(&limiter).await, 2, "{outcome:?}");
    }
}

#[tokio::test]
async fn replicas_share_the_value() {
    let server = RedisServer::start();
    let (one, another) = (on_redis(&server).await, on_redis(&server).await);
    let layers = [&one, &another].map(|limiter| limiter.layer(adaptive(5..=40)).unwrap());
    // Until a replica has had an answer of the store, it knows no generation.
    for layer in &layers {
        burst(layer, 1, "/200").await;
    }
    burst(&layers[0], 3, "/503?50").await;
    // The last results are sent within a tenth of a second.
    soon(async { while value(&another).await == 10 {} }).await;
    assert_eq!((value(&one).await, value(&another).await), (5, 5));
}
