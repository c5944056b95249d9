//! tower-turnstile, with its defaults but for the lease, which all peers share.

use std::time::Duration;

use tower_turnstile::{Fallback, Limit, Limiter, Semaphore};

const PATIENCE: Duration = Duration::from_secs(600);

pub(crate) async fn connect(url: &str, lease: Duration) -> Limiter {
    let settings = Limiter::builder().lease(lease).require_store();
    settings.connect(url).await.expect("the store is up")
}

/// The limit of each key. `strict`: without the store nothing is granted; else each process falls back on the same limit.
pub(crate) fn limit(limit: u32, reuse: bool, strict: bool) -> Limit {
    let slots = Limit::concurrent("slots", limit).wait_up_to(PATIENCE);
    let slots = slots.max_waiters(100_000);
    let slots = if strict {
        slots.fallback(Fallback::Reject)
    } else {
        slots
    };
    if reuse { slots.reuse() } else { slots }
}

pub(crate) fn semaphores(limiter: &Limiter, limit: &Limit, keys: usize) -> Vec<Semaphore> {
    let keys = 0..keys as u64;
    let of = |key| limiter.semaphore(limit, key).expect("a valid limit");
    keys.map(of).collect()
}

/// One key, with a tenant in place of each key of the others.
pub(crate) fn tenants(limiter: &Limiter, limit: &Limit, tenants: usize) -> Vec<Semaphore> {
    let tenants = 0..tenants as u64;
    let shared = limiter.semaphore(limit, 0).expect("a valid limit");
    let of = |tenant| shared.clone().tenant(tenant).expect("a fair limit");
    tenants.map(of).collect()
}
