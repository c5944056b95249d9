//! Ids of permits: in the store, on permits, slots and holds.

use http::Extensions;
use tower_turnstile::{Key, Limit, Limiter, PermitId, Slot};
use tower_turnstile_operate::KeyDigest;
use tower_turnstile_operate::Operator;

use crate::{scene::replica, support::redis_server::RedisServer};

const JOBS: Limit = Limit::concurrent("jobs", 5);

#[tokio::test]
async fn the_id_of_a_permit_is_its_name_in_the_store() {
    let server = RedisServer::start();
    let limiter = replica(&server, "web").await;
    let permit = limiter
        .semaphore(JOBS, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    let ledger = format!("turnstile:{{{}}}", KeyDigest::of("jobs", "acme"));
    let members = server.cli(&["ZRANGE", &ledger, "0", "-1"]);
    assert_eq!(members, permit.id().unwrap().to_string());
    assert!(format!("{permit:?}").contains(&members));
}

/// Under reuse a slot serves several permits, each with its own id.
#[tokio::test]
async fn a_successor_in_a_slot_has_another_id() {
    let limiter = Limiter::in_memory();
    let jobs = limiter.semaphore(JOBS.reuse(), "acme").unwrap();
    let mut ids: Vec<PermitId> = Vec::new();
    for _ in 0..3 {
        let permit = jobs.acquire().await.unwrap();
        ids.push(permit.id().unwrap());
    }
    let texts: Vec<String> = ids.iter().map(ToString::to_string).collect();
    assert_eq!(texts[1], format!("{}.1", texts[0]));
    assert_eq!(texts[2], format!("{}.2", texts[0]));
    assert_eq!(texts[2].parse(), Ok(ids[2]));
}

#[tokio::test]
async fn a_permit_of_several_limits_has_one_id_and_one_of_a_rate_none() {
    let limiter = Limiter::in_memory();
    let starts = Limit::rate("starts", 5, std::time::Duration::from_secs(1));
    let both = limiter
        .semaphore([JOBS, starts.clone()], "acme")
        .unwrap()
        .and(Limit::concurrent("all", 9), Key::SHARED)
        .unwrap();
    let permit = both.acquire().await.unwrap();
    let rows = Operator::of(&limiter)
        .permits("jobs", None)
        .await
        .unwrap()
        .rows;
    assert_eq!(permit.id(), Some(rows[0].id));
    let rate_only = limiter
        .semaphore(starts, "acme")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    assert_eq!(rate_only.id(), None);
}

/// A handler's slot and a hold of it.
#[tokio::test]
async fn a_slot_and_its_hold_have_the_id_of_the_permit() {
    use http::{Request, Response};
    use http_body_util::Full;
    use tower::{Layer, ServiceExt, service_fn};

    let limiter = Limiter::in_memory();
    let service = service_fn(async |request: Request<()>| {
        let slot: &Slot = request.extensions().get().unwrap();
        let hold = slot.hold().unwrap();
        let mut extensions = Extensions::new();
        extensions.insert((slot.id(), hold.id()));
        let mut response = Response::new(Full::<bytes::Bytes>::from("x"));
        *response.extensions_mut() = extensions;
        Ok::<_, std::convert::Infallible>(response)
    });
    let limited = limiter.layer(JOBS).unwrap().layer(service);
    let response = limited.oneshot(Request::new(())).await.unwrap();
    let ids = response
        .extensions()
        .get::<(Option<PermitId>, Option<PermitId>)>();
    let rows = Operator::of(&limiter)
        .permits("jobs", None)
        .await
        .unwrap()
        .rows;
    assert_eq!(ids, Some(&(Some(rows[0].id), Some(rows[0].id))));
}
