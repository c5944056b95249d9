//! The views of all open pages: the overview, the log, limits, and explanations. Each view asks its own question.

use std::{
    collections::HashMap,
    future::ready,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync,
    time::{Instant, timeout},
};

use super::{
    problem::Problem,
    view::{Latest, View},
};
use crate::{
    Answers, Explanation, KeyDigest, KeyRow, LimitRow, LogEntry, OperateError, OperateErrorKind,
    Operator, Overrides, PermitRow, RefusalRow, ReplicaRow, TenantRow,
};

/// Time after which an unused view counts as closed: longer than a page takes to ask again after a request that waited
/// in vain.
const CLOSED_AFTER: Duration = Duration::from_secs(15);
/// Maximum number of open views of limits and keys.
const MAX_VIEWS: usize = 64;
/// How long a request waits for replicas.
const MAX_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Overview {
    pub(super) replicas: Answers<ReplicaRow>,
    pub(super) limits: Answers<LimitRow>,
    pub(super) overrides: Result<Overrides, OperateError>,
    /// The namespaces in use, if no replica answered and they can be determined.
    pub(super) namespaces: Option<Vec<String>>,
}

/// A limit or one key.
#[derive(Debug)]
pub(super) struct Details {
    pub(super) keys: Answers<KeyRow>,
    pub(super) permits: Answers<PermitRow>,
    pub(super) refusals: Answers<RefusalRow>,
    /// `None` if no permit or request has a tenant.
    pub(super) tenants: Option<Answers<TenantRow>>,
}

/// The name of a limit, and optionally one key.
pub(super) type Subject = (String, Option<KeyDigest>);

#[derive(Debug, Default)]
pub(super) struct Views {
    status: View<Overview>,
    log: View<Vec<LogEntry>>,
    details: Subjects<Details>,
    explanations: Subjects<Explanation>,
    /// Held by the view that is asking the replicas. An operator asks one question at a time, and a view several: if
    /// all views asked at once, every view would get to its last question only near the end, when no request waits for
    /// the answer any longer.
    turn: sync::Mutex<()>,
    /// Number of changes made through this page.
    changes: AtomicU64,
}

/// The open views of limits and keys.
#[derive(Debug)]
struct Subjects<T>(Mutex<HashMap<Subject, OpenView<T>>>);

/// A view of a limit or key, and its latest use.
#[derive(Debug)]
struct OpenView<T> {
    at: Instant,
    view: Arc<View<T>>,
}

impl Views {
    /// Marks the answers as stale after a change.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) async fn status(&self, operator: &Operator) -> Result<Latest<Overview>, Problem> {
        let ask = async {
            let replicas = operator.replicas().await?;
            let namespaces = match replicas.replicas {
                0 => operator.namespaces().await.ok(),
                _ => None,
            };
            Ok(Overview {
                limits: operator.limits().await?,
                overrides: match operator.overrides_beside(&replicas).await {
                    Err(error) if error.kind() == OperateErrorKind::Unavailable => {
                        return Err(error);
                    }
                    overrides => overrides,
                },
                replicas,
                namespaces,
            })
        };
        self.get(&self.status, ask).await
    }

    pub(super) async fn log(&self, operator: &Operator) -> Result<Latest<Vec<LogEntry>>, Problem> {
        // The replicas are not asked.
        let changes = self.changes.load(Ordering::Relaxed);
        in_time(self.log.get(0, changes, ready(()), operator.log())).await
    }

    pub(super) async fn details_of(
        &self,
        operator: &Operator,
        subject: &Subject,
    ) -> Result<Latest<Details>, Problem> {
        let view = self.details.look_at(subject)?;
        let (limit, key) = (&subject.0, subject.1);
        let ask = async {
            let permits = operator.permits(limit, key).await?;
            // Under other limits the replicas are not asked once more.
            let is_fair = permits.rows.iter().any(|row| row.tenant.is_some());
            Ok(Details {
                permits,
                keys: operator.keys(limit, key).await?,
                refusals: operator.refusals(limit, key).await?,
                tenants: if is_fair {
                    Some(operator.tenants(limit, key).await?)
                } else {
                    None
                },
            })
        };
        self.get(&view, ask).await
    }

    pub(super) async fn explanation_of(
        &self,
        operator: &Operator,
        subject: &Subject,
    ) -> Result<Latest<Explanation>, Problem> {
        let view = self.explanations.look_at(subject)?;
        let ask = operator.explain(&subject.0, subject.1);
        self.get(&view, ask).await
    }

    /// Number of open views of limits and keys.
    fn open(&self) -> usize {
        self.details.looked_at().len() + self.explanations.looked_at().len()
    }

    async fn get<T>(
        &self,
        view: &View<T>,
        ask: impl Future<Output = Result<T, OperateError>>,
    ) -> Result<Latest<T>, Problem> {
        let changes = self.changes.load(Ordering::Relaxed);
        // Boxed, since each future around it would have room for it twice, and several questions are large.
        let ask = Box::pin(ask);
        in_time(view.get(self.open(), changes, self.turn.lock(), ask)).await
    }
}

async fn in_time<T>(
    latest: impl Future<Output = Result<Latest<T>, OperateError>>,
) -> Result<Latest<T>, Problem> {
    match timeout(MAX_WAIT, latest).await {
        Ok(latest) => Ok(latest?),
        Err(_) => Err(Problem::busy("the replicas did not answer in time")),
    }
}

impl<T> Subjects<T> {
    /// The view of a limit or key.
    fn look_at(&self, subject: &Subject) -> Result<Arc<View<T>>, Problem> {
        let mut subjects = self.looked_at();
        if !subjects.contains_key(subject) && subjects.len() >= MAX_VIEWS {
            return Err(Problem::busy(format!(
                "{MAX_VIEWS} limits and keys are looked at: close some pages"
            )));
        }
        let looked = subjects.entry(subject.clone());
        let looked = looked.or_insert_with(|| OpenView {
            at: Instant::now(),
            view: Arc::default(),
        });
        looked.at = Instant::now();
        Ok(Arc::clone(&looked.view))
    }

    fn looked_at(&self) -> MutexGuard<'_, HashMap<Subject, OpenView<T>>> {
        let mut subjects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        subjects.retain(|_, looked| looked.at.elapsed() < CLOSED_AFTER);
        subjects
    }
}

impl<T> Default for Subjects<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use tokio::time::sleep;

    use super::*;

    /// Time of a question to replicas at a distance.
    const QUESTION: Duration = Duration::from_millis(400);
    /// Time between two requests of a page.
    const INTERVAL: Duration = Duration::from_secs(2);

    fn nothing<T>() -> Answers<T> {
        Answers {
            rows: Vec::new(),
            answered: 1,
            replicas: 1,
            missing: Vec::new(),
            busy: Vec::new(),
            left_out: 0,
        }
    }

    /// Together they take longer than a request waits.
    #[tokio::test(start_paused = true)]
    async fn each_of_many_views_is_answered() {
        let (views, replicas) = (Views::default(), sync::Mutex::new(()));
        let question = async || {
            let _one_at_a_time = replicas.lock().await;
            sleep(QUESTION).await;
        };
        let began = Instant::now();
        let open = async |number: usize| {
            let subject = (format!("limit-{number}"), None);
            let mut first = None;
            while began.elapsed() < Duration::from_secs(40) {
                let view = views.details.look_at(&subject).unwrap();
                let ask = async {
                    for _ in 0..3 {
                        question().await;
                    }
                    Ok(Details {
                        keys: nothing(),
                        permits: nothing(),
                        refusals: nothing(),
                        tenants: None,
                    })
                };
                if views.get(&view, ask).await.is_ok() {
                    first.get_or_insert(began.elapsed());
                }
                sleep(INTERVAL).await;
            }
            first
        };
        let first: Vec<_> = join_all((0..24).map(open)).await;
        assert!(first.iter().all(Option::is_some), "{first:?}");
    }
}
