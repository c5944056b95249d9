//! The service: how each path is answered.

use std::{
    convert::Infallible,
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    middleware::map_response,
    response::{IntoResponse, Response},
    routing::{MethodRouter, future::RouteFuture, get, post},
};
use bytes::{Buf, Bytes};
use http::{
    HeaderName, HeaderValue, Request, StatusCode, Uri,
    header::{
        CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
        X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
    },
    request::Parts,
};
use http_body_util::BodyExt;
use percent_encoding::percent_decode_str;
use serde_json::json;
use tower_service::Service;

use super::{
    answer::{self, MAX_ROWS, ROWS},
    guard::Origins,
    json::to_json,
    page,
    problem::{ApiFault, Problem},
    receive::{Change, DigestOf, receive},
    views::{Subject, Views},
};
use crate::{By, KeyDigest, Operator, Outcome, Target, TenantDigest};

/// A page for operators and its JSON API, as a tower service. Cheap to clone; clones share everything.
///
/// Created by [`Admin::of`] or [`Admin::builder`]. Its paths are relative to the path at
/// which it is nested. The service accepts requests with any body, and never fails.
///
/// Replicas are asked only while somebody is looking, and all open pages share the answers: at most about six questions
/// per second, however many pages are open, or eight if clients request explanations all the time; two more under
/// fair limits.
#[derive(Clone)]
pub struct Admin {
    shared: Arc<Shared>,
    router: Router,
}

/// Determines the author of a request.
pub(super) type Authors = Box<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

pub(super) struct Shared {
    pub(super) operator: Operator,
    pub(super) authors: Option<Authors>,
    pub(super) origins: Origins,
    pub(super) views: Views,
}

type Answer = Result<Response, Problem>;

const READS: &str = "GET, HEAD";

impl Admin {
    pub(super) fn new(shared: Shared) -> Self {
        let shared = Arc::new(shared);
        let changes = match shared.authors {
            Some(_) => "GET, HEAD, POST",
            None => READS,
        };
        let router = Router::new()
            .route("/", only(READS, get(page_response)))
            .route("/api/status", only(READS, get(status)))
            .route("/api/limit", only(READS, get(limit)))
            .route("/api/explain", only(READS, get(explain)))
            .route("/api/changes", only(changes, get(log).post(change)))
            .route("/api/digest", only("POST", post(digest)))
            .fallback(async || Problem::of(ApiFault::NoSuchPath, "there is nothing at this path"))
            .layer(map_response(hardened))
            .with_state(Arc::clone(&shared));
        Self { shared, router }
    }
}

impl<B> Service<Request<B>> for Admin
where
    B: http_body::Body + Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = RouteFuture<Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // At a path that ends with a slash, the rest of the path begins with another.
        let path = request
            .uri()
            .path_and_query()
            .map_or("", |path| path.as_str());
        if path.starts_with("//") {
            let path = format!("/{}", path.trim_start_matches('/'));
            *request.uri_mut() = with_path(request.uri(), &path);
        }
        self.router.call(request.map(|body| {
            let bytes = |mut data: B::Data| data.copy_to_bytes(data.remaining());
            let body = body.map_frame(move |frame| frame.map_data(bytes));
            Body::new(body.map_err(|_| "the body has ended early"))
        }))
    }
}

fn with_path(uri: &Uri, path: &str) -> Uri {
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = path.parse().ok();
    Uri::from_parts(parts).unwrap_or_else(|_| uri.clone())
}

async fn status(State(shared): State<Arc<Shared>>, head: Parts) -> Answer {
    shared.origins.check(&head)?;
    let latest = shared.views.status(&shared.operator).await?;
    let author = shared.authors.as_ref().and_then(|author| author(&head));
    Ok(json(answer::status(&latest, author)))
}

async fn limit(State(shared): State<Arc<Shared>>, head: Parts) -> Answer {
    shared.origins.check(&head)?;
    let (subject, count) = subject(head.uri.query().unwrap_or_default())?;
    let latest = shared.views.details_of(&shared.operator, &subject).await?;
    Ok(json(answer::details(&latest, &subject, count)))
}

async fn explain(State(shared): State<Arc<Shared>>, head: Parts) -> Answer {
    shared.origins.check(&head)?;
    let (subject, count) = subject(head.uri.query().unwrap_or_default())?;
    let latest = shared.views.explanation_of(&shared.operator, &subject);
    Ok(json(answer::explanation(&latest.await?, count)))
}

async fn log(State(shared): State<Arc<Shared>>, head: Parts) -> Answer {
    shared.origins.check(&head)?;
    let latest = shared.views.log(&shared.operator).await?;
    Ok(json(answer::log(&latest)))
}

async fn change(State(shared): State<Arc<Shared>>, head: Parts, body: Body) -> Answer {
    let Some(author) = &shared.authors else {
        let detail = "this page is read-only";
        return Err(Problem::method(ApiFault::ReadOnly, READS, detail));
    };
    shared.origins.check_post(&head)?;
    let author = author(&head).ok_or_else(|| {
        let detail = "the application names no author for this request";
        Problem::of(ApiFault::NoAuthor, detail)
    })?;
    let Change { order, reason } = receive(body).await?;
    let by = By::new(author, reason)?;
    let outcome = shared.operator.order(&order, &by).await;
    // Even after an error: the change may have been made, or another operator's change was found.
    shared.views.changed();
    let (body, is_done) = match outcome? {
        Outcome::Revoked(revoked) => (answer::revoked(&revoked), revoked.is_done()),
        Outcome::Resumed(answers) => (answer::resumed(&answers), answers.are_all()),
        outcome => {
            let is_in_force = matches!(outcome, Outcome::Done { .. } | Outcome::Unused { .. });
            (to_json(&outcome), is_in_force)
        }
    };
    let status = if is_done {
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    Ok((status, json(body)).into_response())
}

/// Changes nothing: the key or tenant is in the body so that it never occurs in a log of URLs.
async fn digest(State(shared): State<Arc<Shared>>, head: Parts, body: Body) -> Answer {
    shared.origins.check_post(&head)?;
    let DigestOf { limit, key, tenant } = receive(body).await?;
    let digest = match (key, tenant) {
        (Some(key), None) => json!({"key": KeyDigest::of(&limit, key)}),
        (None, Some(tenant)) => json!({"tenant": TenantDigest::of(tenant)}),
        _ => {
            return Err(Problem::malformed(
                "the body must have a `key` or a `tenant`",
            ));
        }
    };
    Ok(json(to_json(&digest)))
}

/// Parses the limit, an optional key, and the number of rows per list.
fn subject(query: &str) -> Result<(Subject, usize), Problem> {
    let (mut limit, mut key, mut count) = (None, None, ROWS);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = value.replace('+', " ");
        let value = percent_decode_str(&value).decode_utf8();
        let value = value.map_err(|_| Problem::malformed(format!("`{name}` is not UTF-8")))?;
        match name {
            "limit" => limit = Some(value.into_owned()),
            "key" => {
                let digest: Result<KeyDigest, _> = value.parse();
                key = Some(digest.map_err(|error| Problem::malformed(error.to_string()))?);
            }
            "count" => {
                let number = value.parse().ok();
                let number = number.filter(|number| (1..=MAX_ROWS).contains(number));
                let fault = || Problem::malformed(format!("`count` must be 1 to {MAX_ROWS}"));
                count = number.ok_or_else(fault)?;
            }
            _ => {
                return Err(Problem::malformed(
                    "only `limit`, `key` and `count` are known",
                ));
            }
        }
    }
    let limit = limit.filter(|limit| Target::limit(limit).is_valid());
    let fault = || Problem::malformed("`limit` must be the name of a limit: 1 to 128 bytes");
    Ok(((limit.ok_or_else(fault)?, key), count))
}

/// Refuses all other methods.
fn only(allow: &'static str, routes: MethodRouter<Arc<Shared>>) -> MethodRouter<Arc<Shared>> {
    let detail = format!("this path takes {allow}");
    let refuse = async move || Problem::method(ApiFault::Method, allow, detail);
    routes.fallback(refuse)
}

fn json(body: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

async fn page_response() -> Response {
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    let headers = [
        (CONTENT_TYPE, html),
        (CONTENT_SECURITY_POLICY, page::policy()),
    ];
    (headers, page::page()).into_response()
}

/// Prevents storing the response, framing it, or guessing its type.
async fn hardened(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin"),
        (CROSS_ORIGIN_OPENER_POLICY, "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(CONTENT_SECURITY_POLICY).or_insert(nothing);
    response
}

const CROSS_ORIGIN_RESOURCE_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-resource-policy");
const CROSS_ORIGIN_OPENER_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-opener-policy");

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("read_only", &self.shared.authors.is_none())
            .field("origins", &self.shared.origins)
            .finish_non_exhaustive()
    }
}
