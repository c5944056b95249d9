//! Values of a limit for single keys: from a table, a closure, or a cached lookup.
//!
//! Tests: `tests/layer/values.rs`, `corners.rs`.

use std::{
    collections::HashMap,
    future::Future,
    panic::{catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use http::request::Parts;
use quick_cache::sync::Cache;
use tokio::{
    runtime::Handle,
    task::JoinHandle,
    time::{Instant, sleep},
};
use tracing::Instrument;

use crate::{key::Key, limit::LimitValue};

/// Time limit of a lookup, which includes the wait for that of another request.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(30);

/// The sources of a key's own value. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Values {
    pub(super) table: Option<Arc<HashMap<Key, LimitValue>>>,
    pub(super) rule: Option<Arc<ByLookup>>,
}

pub(super) type ByLookup = dyn Fn(&Parts, &Key) -> Lookup<LimitValue> + Send + Sync;

/// The result of a lookup, or its future.
pub(in crate::layer) enum Lookup<T> {
    Now(Option<T>),
    Later(BoxFuture<'static, Option<T>>),
}

impl Values {
    pub(in crate::layer) fn find(&self, head: Option<&Parts>, key: &Key) -> Lookup<LimitValue> {
        let listed = self.table.as_ref().and_then(|table| table.get(key));
        match (&self.rule, listed, head) {
            (_, Some(value), _) => Lookup::Now(Some(*value)),
            (Some(find), None, Some(head)) => find(head, key),
            _ => Lookup::Now(None),
        }
    }
}

/// Cached answers of a lookup, with their times.
pub(super) type ValueCache = Cache<Key, (Option<LimitValue>, Instant)>;

/// The cached answer, if it is fresh.
pub(super) fn fresh(answers: &ValueCache, ttl: Duration, key: &Key) -> Option<Option<LimitValue>> {
    let (value, at) = answers.get(key)?;
    (at.elapsed() < ttl).then_some(value)
}

/// Returns the cached answer if it is fresh. Otherwise one request looks the key up, and the others wait for the answer.
///
/// On a runtime, the lookup is a task. In its request's future, it would stop while that future is not polled, though
/// others wait for it, and a lookup that takes longer than clients do would never be cached.
pub(super) async fn kept<F, V>(
    answers: Arc<ValueCache>,
    ttl: Duration,
    asked_for: (Parts, Key),
    find: Arc<impl Fn(&Parts, &Key) -> F + Send + Sync + 'static>,
) -> Option<LimitValue>
where
    F: Future<Output = Option<V>> + Send + 'static,
    V: Into<LimitValue> + 'static,
{
    let (asked, asked_for) = (Instant::now(), Arc::new(asked_for));
    let begun = Arc::new(AtomicBool::new(false));
    let lookup = || {
        let (asked_for, find, begun) = (asked_for.clone(), find.clone(), begun.clone());
        look_up(answers.clone(), (asked, ttl), asked_for, find, begun)
    };
    let Ok(runtime) = Handle::try_current() else {
        return lookup().await;
    };
    let mut task = LookupTask {
        handle: runtime.spawn(in_time(lookup()).in_current_span()),
        begun: begun.clone(),
    };
    match (&mut task.handle).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The task ended with its runtime, and this request has moved to another.
            Err(_) => in_time(lookup()).await,
        },
    }
}

/// After the time limit there is no value, and nothing is cached: the key is free for the lookup of another request.
async fn in_time(lookup: impl Future<Output = Option<LimitValue>>) -> Option<LimitValue> {
    // Tokio panics on a runtime without timers, and has no other way to find out.
    match catch_unwind(|| sleep(LOOKUP_TIMEOUT)) {
        Ok(timer) => tokio::select! {
            biased;
            value = lookup => value,
            () = timer => None,
        },
        Err(_) => lookup.await,
    }
}

/// Sets `begun` if this is the request that looks the key up.
async fn look_up<F, V: Into<LimitValue>>(
    answers: Arc<ValueCache>,
    (asked, ttl): (Instant, Duration),
    asked_for: Arc<(Parts, Key)>,
    find: Arc<impl Fn(&Parts, &Key) -> F>,
    begun: Arc<AtomicBool>,
) -> Option<LimitValue>
where
    F: Future<Output = Option<V>>,
{
    let (head, key) = &*asked_for;
    loop {
        match answers.get_value_or_guard_async(key).await {
            // An answer that arrived during the wait is never too old.
            Ok((value, at)) if at >= asked || at.elapsed() < ttl => return value,
            Ok((_, at)) => drop(answers.remove_if(key, |(_, kept_at)| *kept_at == at)),
            Err(guard) => {
                begun.store(true, Relaxed);
                let value = find(head, key).await.map(Into::into);
                // Fails if another answer is already cached, which is as good.
                let _ = guard.insert((value, Instant::now()));
                return value;
            }
        }
    }
}

/// The task of a request that looks a key up, or waits for the lookup of another.
struct LookupTask {
    handle: JoinHandle<Option<LimitValue>>,
    /// Whether its own lookup has begun, which goes on without the request.
    begun: Arc<AtomicBool>,
}

impl Drop for LookupTask {
    fn drop(&mut self) {
        if !self.begun.load(Relaxed) {
            self.handle.abort();
        }
    }
}
