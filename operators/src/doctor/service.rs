//! Checks whether a service would work, by being one: two limiters share a limit of one slot on a separate key.
//!
//! The first acquires the slot, the second queues, the first releases, and the second is woken, holds the slot and
//! releases it. A rate is charged as well. The key is gone afterwards, or expires soon if a step fails.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use redis::cmd;
use tokio::time::{Instant, timeout};

use super::finding::{Check, Finding, Health, abridged};
use tower_turnstile::{
    AcquireError, ConfigError, ConfigErrorKind, Fallback, Key, Limit, Limiter, Permit,
    ReleaseError,
    operate::KeyDigest,
    operate::seam::{ControlConnection, Names, StoreTarget},
};

const SLOT: Limit = Limit::concurrent("doctor", 1).fallback(Fallback::Reject);
const RATE: Limit =
    Limit::rate("doctor:rate", 1, Duration::from_millis(1)).fallback(Fallback::Reject);

/// How soon a request knows its place, at best.
const LOOK: Duration = Duration::from_millis(1);
/// Longer than the check takes: without a wake-up nobody learns of a slot.
const POLL: Duration = Duration::from_secs(60);
/// What a failed step leaves behind is gone after this time.
const LEASE: Duration = Duration::from_secs(60);

/// How long the steps took, `None` if the wake-up of a queued request did not come; or the step that failed.
pub(super) type Served = Result<Option<Duration>, Failed>;

/// A step that failed.
pub(super) struct Failed {
    text: String,
    /// The user may not run the script at all.
    is_forbidden: bool,
}

/// Runs the steps of a service, in each part of a cluster.
pub(super) async fn serve(
    url: &str,
    target: StoreTarget,
    names: &Names,
    patience: Duration,
) -> Vec<Served> {
    let connect = async || {
        let builder = Limiter::builder()
            .namespace(names.namespace())
            .store_timeout(patience);
        let builder = builder.poll_interval(POLL).waiter_ttl(3 * POLL);
        let builder = builder.lease(LEASE.max(4 * patience)).require_store();
        builder.connect(url).await.map_err(not_connected)
    };
    let (first, second) = match (connect().await, connect().await) {
        (Ok(first), Ok(second)) => (first, second),
        (Err(failed), _) | (_, Err(failed)) => return vec![Err(failed)],
    };
    let parts = target.parts().into_iter().map(|target| {
        let prefix = names.ledgers(&target);
        let key = || Key::from(fastrand::u64(..));
        let key = std::iter::repeat_with(key).find(|key| {
            let digest = KeyDigest::of(SLOT.name(), key);
            names.ledger(digest).starts_with(&prefix)
        });
        let (first, second) = (&first, &second);
        async move {
            let key = key.expect("each part has keys");
            let from = Instant::now();
            match steps(first, second, &key, patience).await {
                Ok(is_woken) => Ok(is_woken.then(|| from.elapsed())),
                Err((step, error)) => {
                    let control = ControlConnection::new(&target, patience);
                    // A limiter tells the store's own words only to the log.
                    let ledger = names.ledger(KeyDigest::of(SLOT.name(), &key));
                    let mut write = cmd("ZADD");
                    write.arg(ledger).arg("XX").arg(0).arg("x");
                    let error = match control.run::<u32>(&write).await {
                        Err(cause) => cause.to_string(),
                        Ok(_) => error,
                    };
                    Err(Failed {
                        text: format!("{step}: {error}"),
                        is_forbidden: false,
                    })
                }
            }
        }
    });
    let served = join_all(parts).await;
    for limiter in [first, second] {
        limiter.shutdown(Duration::ZERO).await;
    }
    served
}

/// Returns whether the wake-up arrived; or the step that failed, and why.
async fn steps(
    first: &Limiter,
    second: &Limiter,
    key: &Key,
    patience: Duration,
) -> Result<bool, (&'static str, String)> {
    let refused = |step| move |error: AcquireError| (step, error.to_string());
    let kept = |error: ReleaseError| ("release a slot", error.to_string());
    let of =
        |limiter: &Limiter, limit: &Limit| limiter.semaphore(limit, key.clone()).expect("in range");
    let charged = of(first, &RATE).acquire().await;
    drop(charged.map_err(refused("charge a rate"))?);
    let held = of(first, &SLOT).acquire().await;
    let held = held.map_err(refused("acquire a slot"))?;
    let queues = SLOT.wait_up_to(2 * patience);
    let mut waiter = of(second, &queues).acquire();
    while waiter.position().is_none_or(|place| place == 0) {
        if let Ok(outcome) = timeout(LOOK, &mut waiter).await {
            let admitted = |_| "the store has lost its data: it has admitted two".to_owned();
            let text = outcome.map_or_else(|error| error.to_string(), admitted);
            return Err(("queue for a slot", text));
        }
    }
    held.release().await.map_err(kept)?;
    match timeout(patience, waiter).await {
        Err(_) => Ok(false),
        Ok(woken) => {
            let woken: Permit = woken.map_err(refused("hand a slot over"))?;
            woken.release().await.map_err(kept)?;
            Ok(true)
        }
    }
}

fn not_connected(error: ConfigError) -> Failed {
    Failed {
        text: format!("connect: {error}"),
        is_forbidden: error.kind() == ConfigErrorKind::Permission,
    }
}

/// `served`: for each part of a cluster, or for any other store as a whole.
pub(super) fn of_service(served: &[Served], is_an_operators: bool) -> Finding {
    let failed: Vec<_> = served.iter().filter_map(|one| one.as_ref().err()).collect();
    let took: Option<Vec<_>> = served.iter().flatten().copied().collect();
    let (health, text) = if !failed.is_empty()
        && is_an_operators
        && failed.iter().all(|one| one.is_forbidden)
    {
        (Health::Note, "an operator's user cannot try it".to_owned())
    } else if !failed.is_empty() {
        let texts = failed
            .iter()
            .map(|one| format!("a service cannot {}", one.text));
        let texts: Vec<_> = BTreeSet::from_iter(texts).into_iter().collect();
        let parts = match served.len() {
            1 => String::new(),
            all => format!("in {} of {all} parts of the cluster ", failed.len()),
        };
        (Health::Fault, parts + &abridged(&texts))
    } else if let Some(took) = took.and_then(|took| took.into_iter().max()) {
        let text = format!("a slot was acquired, handed over and released in {took:.1?}");
        (Health::Good, text)
    } else {
        let text = "slots are acquired and released, but wake-ups do not come: queued requests learn of their slots by polling";
        (Health::Warning, text.to_owned())
    };
    Finding::new(Check::Service, health, text)
}
