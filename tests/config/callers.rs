//! Semaphores of a file's limits, for work other than requests.

use std::time::Duration;

use http::Request;
use tower::Layer;
use tower_turnstile::{
    AcquireErrorKind, Limiter,
    config::{Config, LiveConfig},
};

use crate::support::{Script, send, serve};

const FILE: &str = "
    [plans.gold]
    keys = ['gold-1']
    [limits]
    gpu = { concurrent = 2, key = { header = 'x-api-key' }, plans = { gold = 3 }, overrides = { none = 0 } }
    all = { concurrent = 5 }
    peers = { concurrent = 1, key = 'client-address', overrides = { '10.0.0.1' = 4 } }
    strict = { concurrent = 1, key = { header = 'x-api-key' }, require_key = true }
    [[routes]]
    match = ['*']
    limits = ['gpu', 'all', 'peers', 'strict']
";

fn live() -> LiveConfig {
    let config = Config::from_toml(FILE).expect("valid");
    LiveConfig::new(&config, &Limiter::in_memory()).expect("valid")
}

#[tokio::test]
async fn a_caller_has_the_value_of_its_plan_or_its_own() {
    let live = live();
    for (limit, caller, max) in [
        ("gpu", "acme", 2),
        ("gpu", "gold-1", 3),
        ("gpu", "", 2),
        ("all", "", 5),
        ("peers", "10.0.0.1", 4),
        ("peers", "10.0.0.2", 1),
        ("strict", "acme", 1),
    ] {
        let semaphore = live.semaphore(&live.limit(limit).unwrap(), caller);
        let semaphore = semaphore.unwrap();
        let permit = semaphore.acquire().await.unwrap();
        let usage = semaphore.usage().await.unwrap();
        assert_eq!(usage.max, max, "{limit} {caller}");
        drop(permit);
    }
    let none = live.semaphore(&live.limit("gpu").unwrap(), "none").unwrap();
    let error = none.acquire().await.unwrap_err();
    assert_eq!(error.kind(), AcquireErrorKind::Full);
}

/// Jobs and requests of a caller count together, but only the job waits.
#[tokio::test]
async fn a_job_has_a_slot_of_the_caller_of_requests() {
    let text = "
        limits.gpu = { concurrent = 1, key = { header = 'x-api-key' } }
        routes = [{ match = ['*'], limits = ['gpu'] }]
    ";
    let config = Config::from_toml(text).unwrap();
    let live = LiveConfig::new(&config, &Limiter::in_memory()).unwrap();
    let patient = live.limit("gpu").unwrap();
    let patient = patient.wait_up_to(Duration::from_secs(60));
    let job = live.semaphore(&patient, "acme").unwrap();
    let permit = job.acquire().await.unwrap();
    let service = live.layer().layer(serve(Script::of([])));
    let status = async |key: &str| {
        let request = Request::get("/").header("x-api-key", key).body(());
        send(&service, request.unwrap()).await.status().as_u16()
    };
    assert_eq!((status("acme").await, status("other").await), (429, 200));
    drop(permit);
    assert_eq!(status("acme").await, 200);
}

#[tokio::test]
async fn a_caller_that_the_limit_cannot_have_is_a_fault() {
    let live = live();
    for (limit, caller, fault) in [
        (
            "all",
            "acme",
            "limits.all.key: all requests share this limit: it has no callers",
        ),
        (
            "strict",
            "",
            "limits.strict.key: is required, and the caller has none",
        ),
        ("peers", "acme", "limits.peers.key: is no IP address"),
    ] {
        let error = live.semaphore(&live.limit(limit).unwrap(), caller);
        assert_eq!(error.unwrap_err().to_string(), fault);
    }
    let other = tower_turnstile::Limit::concurrent("other", 1);
    let error = live.semaphore(&other, "acme").unwrap_err();
    assert_eq!(error.to_string(), "limits.other: there is no such limit");
}
