//! Limits that find their own value: what a layer takes from responses and handlers.

use std::{convert::Infallible, ops::RangeInclusive, time::Duration};

use http::{Request, Response};
use tower::{Layer, service_fn};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Key, Limit, Limiter, Scope, Slot,
    layer::{Outcome, overload},
};

use crate::support::{get, send};

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
