//! The views of all open pages: the overview, the log, limits, and explanations. Each view asks its own question.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::{Instant, timeout};

use super::{
    problem::Problem,
    view::{Latest, View},
};
use crate::operate::{
    Answers, Explanation, KeyDigest, KeyRow, LimitRow, LogEntry, OperateError, OperateErrorKind,
    Operator, Overrides, PermitRow, RefusalRow, ReplicaRow, TenantRow,
};

/// Minimum time for which an answer is fresh.
const FRESH: Duration = Duration::from_secs(1);
/// An answer is fresh for this time multiplied by the number of open views. In total the views ask about six questions
/// per second, or eight for explanations, of the twenty that replicas answer; under fair limits two more.
const FRESH_PER_VIEW: Duration = Duration::from_millis(500);
/// How soon an unused view counts as closed.
const CLOSED_AFTER: Duration = Duration::from_secs(10);
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
        self.get(&self.status, self.open(), ask).await
    }

    pub(super) async fn log(&self, operator: &Operator) -> Result<Latest<Vec<LogEntry>>, Problem> {
        self.get(&self.log, 0, operator.log()).await
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
                tenants: match is_fair {
                    true => Some(operator.tenants(limit, key).await?),
                    false => None,
                },
            })
        };
        self.get(&view, self.open(), ask).await
    }

    pub(super) async fn explanation_of(
        &self,
        operator: &Operator,
        limit: String,
        key: KeyDigest,
    ) -> Result<Latest<Explanation>, Problem> {
        let subject = (limit, Some(key));
        let view = self.explanations.look_at(&subject)?;
        let ask = operator.explain(&subject.0, key);
        self.get(&view, self.open(), ask).await
    }

    /// Number of open views of limits and keys.
    fn open(&self) -> usize {
        self.details.looked_at().len() + self.explanations.looked_at().len()
    }

    async fn get<T>(
        &self,
        view: &View<T>,
        open: usize,
        ask: impl Future<Output = Result<T, OperateError>>,
    ) -> Result<Latest<T>, Problem> {
        let fresh = FRESH.max(FRESH_PER_VIEW * (open + 1) as u32);
        let changes = self.changes.load(Ordering::Relaxed);
        match timeout(MAX_WAIT, view.get(fresh, changes, ask)).await {
            Ok(latest) => Ok(latest?),
            Err(_) => Err(Problem::busy("the replicas did not answer in time")),
        }
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
