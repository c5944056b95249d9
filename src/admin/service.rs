//! The service: how each path is answered.

use std::{
    convert::Infallible,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{
        CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
        X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
    },
    request::Parts,
};
use http_body::Body;
use percent_encoding::percent_decode_str;
use tower_service::Service;

use super::{
    answer::{self, MAX_ROWS, ROWS, Revoked},
    body::AdminBody,
    guard::Origins,
    json::to_json,
    order::{self, DigestOf, Made, Order},
    page,
    problem::Problem,
    receive::receive,
    views::{Subject, Views},
};
use crate::{
    operate::{KeyDigest, Operator, Outcome, Target},
    reason::Reason,
};

/// A page for operators and its JSON API, as a tower service. Cheap to clone; clones share everything.
///
/// Created by [`Limiter::admin`](crate::Limiter::admin) or [`Admin::builder`]. Its paths are relative to the path at
/// which it is nested. The service accepts requests with any body, and never fails.
///
/// Replicas are asked only while somebody is looking, and all open pages share the answers: at most about six questions
/// per second, however many pages are open, or eight if clients request explanations all the time.
#[derive(Clone)]
pub struct Admin(pub(super) Arc<Shared>);

/// Determines the author of a request.
pub(super) type Authors = Box<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

pub(super) struct Shared {
    pub(super) operator: Operator,
    pub(super) authors: Option<Authors>,
    pub(super) origins: Origins,
    pub(super) views: Views,
}

/// Future of a response of an [`Admin`].
#[must_use = "futures do nothing unless they are polled"]
pub struct AdminFuture(Pin<Box<dyn Future<Output = Response<AdminBody>> + Send>>);

impl<B> Service<Request<B>> for Admin
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Send,
{
    type Response = Response<AdminBody>;
    type Error = Infallible;
    type Future = AdminFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> AdminFuture {
        let shared = Arc::clone(&self.0);
        AdminFuture(Box::pin(async move {
            let (head, body) = request.into_parts();
            let response = shared.respond(&head, body).await;
            hardened(response.unwrap_or_else(|problem| problem.respond()))
        }))
    }
}

impl Future for AdminFuture {
    type Output = Result<Response<AdminBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx).map(Ok)
    }
}

impl Shared {
    async fn respond<B: Body>(
        &self,
        head: &Parts,
        body: B,
    ) -> Result<Response<AdminBody>, Problem> {
        let path = head.uri.path().trim_start_matches('/');
        let is_read = matches!(head.method, Method::GET | Method::HEAD);
        let is_post = head.method == Method::POST;
        match path {
            "" if is_read => Ok(page_response()),
            "api/status" if is_read => self.status(head).await,
            "api/limit" if is_read => self.limit(head).await,
            "api/explain" if is_read => self.explain(head).await,
            "api/changes" if is_read => self.log(head).await,
            "api/changes" if is_post => self.change(head, body).await,
            "api/digest" if is_post => self.digest(head, body).await,
            "" | "api/status" | "api/limit" | "api/explain" => Err(no_method("GET, HEAD")),
            "api/changes" => Err(no_method(match self.authors {
                Some(_) => "GET, HEAD, POST",
                None => "GET, HEAD",
            })),
            "api/digest" => Err(no_method("POST")),
            _ => Err(Problem::not_found()),
        }
    }

    async fn status(&self, head: &Parts) -> Result<Response<AdminBody>, Problem> {
        self.origins.check(head)?;
        let latest = self.views.status(&self.operator).await?;
        let author = self.authors.as_ref().and_then(|author| author(head));
        Ok(json(answer::status(&latest, author)))
    }

    async fn limit(&self, head: &Parts) -> Result<Response<AdminBody>, Problem> {
        self.origins.check(head)?;
        let (subject, count) = subject(head.uri.query().unwrap_or_default())?;
        let latest = self.views.details_of(&self.operator, &subject).await?;
        Ok(json(answer::details(&latest, &subject, count)))
    }

    async fn explain(&self, head: &Parts) -> Result<Response<AdminBody>, Problem> {
        self.origins.check(head)?;
        let ((limit, key), count) = subject(head.uri.query().unwrap_or_default())?;
        let key = key.ok_or_else(|| Problem::malformed("`key` must be the digest of a key"))?;
        let latest = self.views.explanation_of(&self.operator, limit, key);
        Ok(json(answer::explanation(&latest.await?, count)))
    }

    async fn log(&self, head: &Parts) -> Result<Response<AdminBody>, Problem> {
        self.origins.check(head)?;
        let latest = self.views.log(&self.operator).await?;
        Ok(json(answer::log(&latest)))
    }

    async fn change<B: Body>(&self, head: &Parts, body: B) -> Result<Response<AdminBody>, Problem> {
        let Some(author) = &self.authors else {
            let detail = "this page is read-only";
            return Err(Problem::method(Reason::ReadOnly, "GET, HEAD", detail));
        };
        self.origins.check_post(head)?;
        let author = author(head).ok_or_else(|| {
            let detail = "the application names no author for this request";
            Problem::forbidden(Reason::NoAuthor, detail)
        })?;
        let order: Order = order::parse(&receive(body).await?)?;
        let outcome = order::make(&self.operator, order, author).await;
        // Even after an error: the change may have been made, or another operator's change was found.
        self.views.changed();
        let (body, is_done) = match outcome? {
            Made::Changed(outcome) => {
                let is_done = matches!(outcome, Outcome::Done { .. });
                (to_json(&outcome), is_done)
            }
            Made::Revoked(answers) => {
                let revoked = Revoked::new(&answers);
                (revoked.to_json(), revoked.is_done())
            }
        };
        let mut response = json(body);
        if !is_done {
            *response.status_mut() = StatusCode::ACCEPTED;
        }
        Ok(response)
    }

    /// Changes nothing: the key is in the body so that it never occurs in a log of URLs.
    async fn digest<B: Body>(&self, head: &Parts, body: B) -> Result<Response<AdminBody>, Problem> {
        self.origins.check_post(head)?;
        let DigestOf { limit, key } = order::parse(&receive(body).await?)?;
        Ok(json(answer::digest(KeyDigest::of(&limit, key))))
    }
}

/// Parses the limit, an optional key, and the number of rows per list.
fn subject(query: &str) -> Result<(Subject, usize), Problem> {
    let (mut limit, mut key, mut count) = (None, None, ROWS);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = value.replace('+', " ");
        let value = percent_decode_str(&value).decode_utf8();
        let value = value.map_err(|_| Problem::malformed(format!("`{name}` is no UTF-8")))?;
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

fn no_method(allow: &'static str) -> Problem {
    Problem::method(Reason::Method, allow, format!("this path takes {allow}"))
}

fn json(body: Bytes) -> Response<AdminBody> {
    let mut response = Response::new(body.into());
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

fn page_response() -> Response<AdminBody> {
    let mut response = Response::new(page::page().into());
    let headers = response.headers_mut();
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    headers.insert(CONTENT_TYPE, html);
    headers.insert(CONTENT_SECURITY_POLICY, page::policy());
    response
}

/// Prevents storing the response, framing it, or guessing its type.
fn hardened(mut response: Response<AdminBody>) -> Response<AdminBody> {
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
            .field("read_only", &self.0.authors.is_none())
            .field("origins", &self.0.origins)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for AdminFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminFuture").finish_non_exhaustive()
    }
}
