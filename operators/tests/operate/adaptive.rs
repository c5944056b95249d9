//! Adaptive limits, as operators see them.

use std::convert::Infallible;

use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{Key, Limit, Limiter, Scope, Slot, layer::Outcome};
use tower_turnstile_operate::{KeyDigest, Overrides, PaceRow, Target};

use crate::{
    scene::{HOUR, Orders, Patient, ada, replicas, scenes, until},
    support::redis_server::RedisServer,
};

/// Reports as many overloads, while one slot is in use.
async fn overload(limiter: &Limiter, times: usize) {
    let scope = Scope::from(Limit::concurrent("gpu", 20).wait_up_to(HOUR));
    let service = service_fn(move |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().expect("a slot").clone();
        async move {
            for _ in 0..times {
                slot.report("gpu", Outcome::Overloaded).unwrap();
            }
            Ok::<_, Infallible>(Response::new(String::new()))
        }
    });
    let layer = limiter.layer(scope.adapt(5..=40)).unwrap();
    let response = layer.layer(service).oneshot(Request::new(())).await;
    drop(response.unwrap());
}

async fn found(operator: &Patient) -> (u32, u32, PaceRow) {
    let row = operator.limits().await.unwrap().rows.remove(0);
    assert!(!row.differs, "{row:?}");
    (row.max, row.declared_max, row.pace.expect("it is adaptive"))
}

#[tokio::test]
async fn the_value_its_bounds_the_wall_and_the_last_cut_are_seen() {
    for (server, limiters, operator) in scenes().await {
        // A replica reports nothing before its first answer of the store.
        overload(&limiters[0], 0).await;
        // A key that nobody uses is not shown.
        let gpu = limiters[0].limit("gpu").unwrap();
        let shared = limiters[0].semaphore(&gpu, Key::SHARED).unwrap();
        let _held = shared.acquire().await.unwrap();
        let (max, declared, begun) = found(&operator).await;
        assert_eq!((max, declared), (20, 20));
        assert_eq!((begun.floor, begun.ceiling, begun.declared), (5, 40, 20));
        assert_eq!((begun.cuts, begun.cut_ms, begun.wall), (0, None, None));

        overload(&limiters[0], 3).await;
        until(async || found(&operator).await.2.cut_to.is_some()).await;
        let (max, declared, cut) = found(&operator).await;
        assert_eq!((max, declared, cut.cuts, cut.overloaded), (5, 20, 1, 3));
        assert_eq!(
            (cut.cut_from, cut.cut_to, cut.wall),
            (Some(20), Some(5), Some(2))
        );
        assert!(
            cut.wall_ends_in_ms <= Some(5_000) && cut.cut_ms <= Some(60_000),
            "{cut:?}"
        );

        let acme = limiters[0].semaphore(&gpu, "acme").unwrap();
        let _permit = acme.acquire().await.unwrap();
        let acme = KeyDigest::of("gpu", "acme");
        let key = operator
            .keys("gpu", Some(acme))
            .await
            .unwrap()
            .rows
            .remove(0);
        let pace = key.pace.clone().expect("it is adaptive");
        assert_eq!(
            (key.max, pace.cuts, pace.cut_ms),
            (20, 0, None),
            "another key"
        );
        let why = operator.explain("gpu", acme).await.unwrap();
        assert_eq!((why.max, why.pace), (20, key.pace));
        // Over all keys.
        let (max, _, all) = found(&operator).await;
        assert_eq!(
            (max, all.cuts, all.overloaded, all.cut_to),
            (20, 1, 3, None)
        );
        drop(server);
    }
}

#[tokio::test]
async fn the_value_of_a_key_that_nobody_uses_is_that_of_the_store() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    // A replica reports nothing before its first answer of the store, and forgets what it knows with its last permit.
    overload(&limiters[0], 0).await;
    let gpu = limiters[0].limit("gpu").unwrap();
    let shared = limiters[0].semaphore(&gpu, Key::SHARED).unwrap();
    let held = shared.acquire().await.unwrap();
    overload(&limiters[0], 3).await;
    until(async || found(&operator).await.2.cut_to.is_some()).await;
    drop(held);
    let is_unused = async || {
        let keys = operator.keys("gpu", None).await.unwrap();
        keys.rows.is_empty()
    };
    until(is_unused).await;

    let (max, declared, cut) = found(&operator).await;
    assert_eq!((max, declared, cut.cuts), (5, 20, 1));
    assert_eq!((cut.cut_from, cut.cut_to), (Some(20), Some(5)));
    let explain = async |key: Option<KeyDigest>| {
        let why = operator.explain("gpu", key).await.unwrap();
        let pace = why.pace.expect("it is adaptive");
        (why.max, pace.declared, pace.cuts, pace.cut_to)
    };
    assert_eq!(explain(None).await, (5, 20, 1, Some(5)));
    let acme = Some(KeyDigest::of("gpu", "acme"));
    assert_eq!(explain(acme).await, (20, 20, 0, None), "another key");

    // While a key is in use, what replicas know of it is not said of another.
    let held = shared.acquire().await.unwrap();
    assert_eq!(found(&operator).await.0, 5);
    assert_eq!(explain(acme).await, (20, 20, 0, None), "another key");
    drop(held);
    until(is_unused).await;

    // An override freezes the value, also at the declared one.
    let (target, seen) = (Target::limit("gpu"), Overrides::default());
    operator
        .set(&seen, &target, 20, HOUR, &ada())
        .await
        .unwrap();
    assert_eq!(found(&operator).await.0, 20);
    assert_eq!(explain(None).await.0, 20);
}
