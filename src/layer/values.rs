//! Values of a limit for single keys: from a table, a closure, or a cached lookup.
//!
//! Tests: `tests/layer/values.rs`, `corners.rs`.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use http::request::Parts;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::{key::Key, limit::LimitValue};

/// The sources of a key's own value. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Values {
    pub(super) table: Option<Arc<HashMap<Key, LimitValue>>>,
    pub(super) rule: Rule,
}

#[derive(Clone, Default)]
pub(super) enum Rule {
    #[default]
    None,
    Head(Arc<ByHead>),
    Async(Arc<ByLookup>),
}

pub(super) type ByHead = dyn Fn(&Parts, &Key) -> Option<LimitValue> + Send + Sync;
pub(super) type ByLookup = dyn Fn(&Parts, &Key) -> Lookup<LimitValue> + Send + Sync;

/// The result of a lookup, or its future.
pub(super) enum Lookup<T> {
    Now(Option<T>),
    Later(BoxFuture<'static, Option<T>>),
}

impl Values {
    pub(super) fn listed(&self) -> impl Iterator<Item = LimitValue> {
        self.table.iter().flat_map(|table| table.values().copied())
    }

    /// Whether [`find`](Self::find) reads the head.
    pub(super) fn needs_head(&self) -> bool {
        !matches!(self.rule, Rule::None)
    }

    pub(super) fn find(&self, head: Option<&Parts>, key: &Key) -> Lookup<LimitValue> {
        let listed = self.table.as_ref().and_then(|table| table.get(key));
        match (&self.rule, listed, head) {
            (_, Some(value), _) => Lookup::Now(Some(*value)),
            (Rule::Head(find), None, Some(head)) => Lookup::Now(find(head, key)),
            (Rule::Async(find), None, Some(head)) => find(head, key),
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
pub(super) async fn kept<F, V: Into<LimitValue> + 'static>(
    answers: Arc<ValueCache>,
    ttl: Duration,
    (head, key): (Parts, Key),
    find: Arc<impl Fn(&Parts, &Key) -> F>,
) -> Option<LimitValue>
where
    F: Future<Output = Option<V>>,
{
    let asked = Instant::now();
    loop {
        match answers.get_value_or_guard_async(&key).await {
            // An answer that arrived during the wait is never too old.
            Ok((value, at)) if at >= asked || at.elapsed() < ttl => return value,
            Ok((_, at)) => drop(answers.remove_if(&key, |(_, kept_at)| *kept_at == at)),
            Err(guard) => {
                let value = find(&head, &key).await.map(Into::into);
                // Fails if another answer is already cached, which is as good.
                let _ = guard.insert((value, Instant::now()));
                return value;
            }
        }
    }
}
