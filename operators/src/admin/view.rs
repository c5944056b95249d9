//! An answer shared by all open pages.
//!
//! There is no polling task: among the requests for a stale answer, the first one asks, and the others receive the same
//! answer. So nobody is asked while nobody looks, and a client that disconnects in the middle leaves nothing behind.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync, time::Instant};

use crate::OperateError;

/// Minimum time for which an answer is fresh.
const FRESH: Duration = Duration::from_secs(1);
/// An answer is fresh for this time multiplied by the number of open views. In total the views ask about six questions
/// per second, or eight for explanations, of the twenty that replicas answer; under fair limits two more. If asking
/// takes longer, as at a distance, that time counts instead: a view asks again only after all others have had time to
/// ask.
const FRESH_PER_VIEW: Duration = Duration::from_millis(500);

/// One question and its latest answer.
#[derive(Debug)]
pub(super) struct View<T> {
    /// Held by the request that is asking the replicas.
    asking: sync::Mutex<()>,
    tried: Mutex<Option<Tried<T>>>,
}

/// The result of the latest attempt to ask.
#[derive(Debug)]
struct Tried<T> {
    at: Instant,
    /// How long it took to get the answer. Zero for a failure, which is not kept for longer.
    took: Duration,
    /// Number of changes before this answer.
    changes: u64,
    latest: Result<Latest<T>, OperateError>,
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
            tried: Mutex::new(None),
        }
    }
}

/// Clones share the answers.
impl<T> Clone for Latest<T> {
    fn clone(&self) -> Self {
        Self {
            data: Arc::clone(&self.data),
            asked: self.asked,
            failed: self.failed.clone(),
        }
    }
}

impl<T> View<T> {
    /// Returns the latest answers. Asks again unless they are fresh, given the number of other open views, or another
    /// request is asking; after a newer change, in any case. Awaits its `turn` first, and keeps it while it asks.
    ///
    /// # Errors
    ///
    /// Fails if no answer is known yet, and asking fails.
    pub(super) async fn get<G>(
        &self,
        open: usize,
        changes: u64,
        turn: impl Future<Output = G>,
        ask: impl Future<Output = Result<T, OperateError>>,
    ) -> Result<Latest<T>, OperateError> {
        let is_fresh = |tried: &Tried<T>| {
            let fresh_for = FRESH.max(FRESH_PER_VIEW.max(tried.took) * (open + 1) as u32);
            tried.changes >= changes && tried.at.elapsed() < fresh_for
        };
        if let Some(latest) = self.known(is_fresh) {
            return latest;
        }
        let _asking = match self.asking.try_lock() {
            Ok(asking) => asking,
            Err(_) => match self.known(|tried| tried.changes >= changes) {
                Some(latest) => return latest,
                None => self.asking.lock().await,
            },
        };
        if let Some(latest) = self.known(is_fresh) {
            return latest;
        }
        let _turn = turn.await;
        let asked = Instant::now();
        let outcome = ask.await;
        let took = match outcome {
            Ok(_) => asked.elapsed(),
            Err(_) => Duration::ZERO,
        };
        let mut tried = self.lock();
        let latest = match (outcome, tried.take().map(|tried| tried.latest)) {
            (Ok(data), _) => Ok(Latest {
                data: Arc::new(data),
                asked,
                failed: None,
            }),
            (Err(error), Some(Ok(latest))) => Ok(Latest {
                failed: Some(error),
                ..latest
            }),
            (Err(error), _) => Err(error),
        };
        *tried = Some(Tried {
            at: Instant::now(),
            took,
            changes,
            latest: latest.clone(),
        });
        latest
    }

    fn known(
        &self,
        is_good: impl Fn(&Tried<T>) -> bool,
    ) -> Option<Result<Latest<T>, OperateError>> {
        let tried = self.lock();
        let tried = tried.as_ref().filter(|tried| is_good(tried))?;
        Some(tried.latest.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Tried<T>>> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::ready};

    use futures_util::future::{join_all, pending};
    use tokio::time::{advance, sleep, timeout};

    use super::*;
    use crate::OperateErrorKind;

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
        let latest = join_all((0..100).map(|_| view.get(0, 0, ready(()), ask()))).await;
        assert!(latest.into_iter().all(|latest| *latest.unwrap().data == 1));
        view.get(0, 0, ready(()), ask()).await.unwrap();
        assert_eq!(asked.get(), 1, "it is fresh");
        view.get(0, 1, ready(()), ask()).await.unwrap();
        assert_eq!(asked.get(), 2, "something has changed");
        advance(FRESH).await;
        // While one request asks, the others do not wait.
        let first = view.get(0, 1, ready(()), ask());
        let second = async { *view.get(0, 1, ready(()), pending()).await.unwrap().data };
        let (first, second) = tokio::join!(first, second);
        assert_eq!((*first.unwrap().data, second, asked.get()), (3, 2, 3));
    }

    /// Otherwise views that take long to ask would leave others no turn.
    #[tokio::test(start_paused = true)]
    async fn an_answer_is_fresh_for_as_long_as_all_views_ask() {
        let (view, asked) = (View::default(), Cell::new(0));
        let get = async |open| {
            let ask = async {
                asked.set(asked.get() + 1);
                sleep(FRESH).await;
                Ok(asked.get())
            };
            *view.get(open, 0, ready(()), ask).await.unwrap().data
        };
        assert_eq!(get(9).await, 1);
        advance(FRESH * 10 - Duration::from_millis(1)).await;
        assert_eq!(get(9).await, 1);
        advance(Duration::from_millis(1)).await;
        assert_eq!(get(9).await, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_answer_outlives_an_outage() {
        let view = View::default();
        let error = view.get(0, 0, ready(()), async { Err(down()) }).await;
        assert_eq!(error.unwrap_err(), down());
        let again = view.get(0, 0, ready(()), pending()).await;
        assert_eq!(again.unwrap_err(), down(), "a failure is shared too");
        advance(FRESH).await;
        let latest = view.get(0, 0, ready(()), async { Ok(7) }).await.unwrap();
        assert_eq!((*latest.data, latest.failed), (7, None));
        advance(FRESH).await;
        let latest = view
            .get(0, 0, ready(()), async { Err(down()) })
            .await
            .unwrap();
        assert_eq!((*latest.data, latest.failed), (7, Some(down())));
        assert_eq!(latest.asked.elapsed(), FRESH);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_dropped_leaves_the_question_to_others() {
        let view = View::default();
        let left = timeout(FRESH, view.get(0, 0, ready(()), pending())).await;
        assert!(left.is_err());
        let latest = view.get(0, 0, ready(()), async { Ok(7) }).await.unwrap();
        assert_eq!(*latest.data, 7);
    }
}
