//! An answer shared by all open pages.
//!
//! There is no polling task: among the requests for a stale answer, the first one asks, and the others receive the same
//! answer. So nobody is asked while nobody looks, and a client that disconnects in the middle leaves nothing behind.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync, time::Instant};

use crate::operate::OperateError;

/// One question and its latest answer.
#[derive(Debug)]
pub(super) struct View<T> {
    /// Held by the request that is asking the replicas.
    asking: sync::Mutex<()>,
    state: Mutex<ViewState<T>>,
}

#[derive(Debug)]
struct ViewState<T> {
    tried: Option<Tried>,
    /// The latest answers of replicas, and when they were asked.
    last: Option<(Arc<T>, Instant)>,
}

#[derive(Debug)]
struct Tried {
    at: Instant,
    /// Number of changes before this answer.
    changes: u64,
    failed: Option<OperateError>,
}

/// The latest answers and their age.
#[derive(Debug)]
pub(super) struct Latest<T> {
    pub(super) data: Arc<T>,
    pub(super) asked: Instant,
    /// Why the answers are not newer.
    pub(super) failed: Option<OperateError>,
}

impl<T> Default for View<T> {
    fn default() -> Self {
        Self {
            asking: sync::Mutex::new(()),
            state: Mutex::new(ViewState {
                tried: None,
                last: None,
            }),
        }
    }
}

impl<T> View<T> {
    /// Returns the latest answers. Asks again unless they are younger than `fresh_for`, or another request is asking;
    /// after a newer change, in any case.
    ///
    /// # Errors
    ///
    /// Fails if no answer is known yet, and asking fails.
    pub(super) async fn get(
        &self,
        fresh_for: Duration,
        changes: u64,
        ask: impl Future<Output = Result<T, OperateError>>,
    ) -> Result<Latest<T>, OperateError> {
        let is_fresh = |tried: &Tried| tried.changes >= changes && tried.at.elapsed() < fresh_for;
        if let Some(latest) = self.known(is_fresh) {
            return latest;
        }
        let asking = match self.asking.try_lock() {
            Ok(asking) => asking,
            Err(_) => match self.known(|tried| tried.changes >= changes) {
                Some(latest) => return latest,
                None => self.asking.lock().await,
            },
        };
        if let Some(latest) = self.known(is_fresh) {
            return latest;
        }
        let at = Instant::now();
        let outcome = ask.await;
        let latest = self.learn(at, changes, outcome);
        drop(asking);
        latest
    }

    fn learn(
        &self,
        at: Instant,
        changes: u64,
        outcome: Result<T, OperateError>,
    ) -> Result<Latest<T>, OperateError> {
        let mut state = self.lock();
        let failed = match outcome {
            Ok(data) => {
                state.last = Some((Arc::new(data), at));
                None
            }
            Err(error) => Some(error),
        };
        let tried = Tried {
            at: Instant::now(),
            changes,
            failed,
        };
        let latest = state.latest(&tried);
        state.tried = Some(tried);
        latest
    }

    fn known(&self, is_good: impl Fn(&Tried) -> bool) -> Option<Result<Latest<T>, OperateError>> {
        let state = self.lock();
        let tried = state.tried.as_ref().filter(|tried| is_good(tried))?;
        Some(state.latest(tried))
    }

    fn lock(&self) -> MutexGuard<'_, ViewState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> ViewState<T> {
    fn latest(&self, tried: &Tried) -> Result<Latest<T>, OperateError> {
        match (&self.last, &tried.failed) {
            (None, Some(error)) => Err(error.clone()),
            (last, failed) => {
                let (data, asked) = last.as_ref().expect("only a failure leaves nothing");
                Ok(Latest {
                    data: Arc::clone(data),
                    asked: *asked,
                    failed: failed.clone(),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::{join_all, pending};
    use tokio::time::{advance, sleep, timeout};

    use super::*;
    use crate::operate::OperateErrorKind;

    const FRESH: Duration = Duration::from_secs(1);

    fn down() -> OperateError {
        OperateError::new(OperateErrorKind::Unavailable, "down")
    }

    #[tokio::test(start_paused = true)]
    async fn many_requests_ask_once() {
        let (view, asked) = (View::default(), Cell::new(0));
        let ask = async || {
            asked.set(asked.get() + 1);
            sleep(Duration::from_millis(100)).await;
            Ok(asked.get())
        };
        let latest = join_all((0..100).map(|_| view.get(FRESH, 0, ask()))).await;
        assert!(latest.into_iter().all(|latest| *latest.unwrap().data == 1));
        view.get(FRESH, 0, ask()).await.unwrap();
        assert_eq!(asked.get(), 1, "it is fresh");
        view.get(FRESH, 1, ask()).await.unwrap();
        assert_eq!(asked.get(), 2, "something has changed");
        advance(FRESH).await;
        // While one request asks, the others do not wait.
        let first = view.get(FRESH, 1, ask());
        let second = async { *view.get(FRESH, 1, pending()).await.unwrap().data };
        let (first, second) = tokio::join!(first, second);
        assert_eq!((*first.unwrap().data, second, asked.get()), (3, 2, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_answer_outlives_an_outage() {
        let view = View::default();
        let error = view.get(FRESH, 0, async { Err(down()) }).await;
        assert_eq!(error.unwrap_err(), down());
        let again = view.get(FRESH, 0, pending()).await;
        assert_eq!(again.unwrap_err(), down(), "a failure is shared too");
        advance(FRESH).await;
        let latest = view.get(FRESH, 0, async { Ok(7) }).await.unwrap();
        assert_eq!((*latest.data, latest.failed), (7, None));
        advance(FRESH).await;
        let latest = view.get(FRESH, 0, async { Err(down()) }).await.unwrap();
        assert_eq!((*latest.data, latest.failed), (7, Some(down())));
        assert_eq!(latest.asked.elapsed(), FRESH);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_dropped_leaves_the_question_to_others() {
        let view = View::default();
        let left = timeout(FRESH, view.get(FRESH, 0, pending())).await;
        assert!(left.is_err());
        let latest = view.get(FRESH, 0, async { Ok(7) }).await.unwrap();
        assert_eq!(*latest.data, 7);
    }
}
