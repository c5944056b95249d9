//! The requests of clients: which are accepted, and what each path does.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use hmac_sha256::Hash;
use http::{HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use tokio::time::timeout;

use super::{
    Phase, Serving,
    client::{self, EventBody},
    form::{Form, SlotForm, segment},
    problem::HttpProblem,
    server::Reader,
};

/// Bytes of a body.
const MAX_BODY: usize = 8 * 1024;
/// Longest time for a client to send its body.
const BODY_TIME: Duration = Duration::from_secs(10);
/// Bytes of a secret.
const MAX_SECRET: usize = 64;

pub(super) type AnswerBody = Either<EventBody, Full<Bytes>>;

/// Never fails: each fault is an answer.
pub(super) async fn answer(
    serving: Arc<Serving>,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, Infallible> {
    let answered = respond(&serving, request).await;
    let mut response = answered.unwrap_or_else(|problem| full(problem.into_response()));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

async fn respond(
    serving: &Arc<Serving>,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, HttpProblem> {
    let (mut head, body) = request.into_parts();
    admit(serving, &head)?;
    let path: Vec<_> = head.uri.path().split('/').skip(1).collect();
    let is_known = matches!(
        path[..],
        ["slots", _] | ["permits", _, "ping" | "settle" | "spend"]
    );
    if !is_known {
        let detail = "the paths are /slots/{limit}, and /permits/{id}/ping, settle and spend";
        return Err(HttpProblem::new(404, "no_such_path", detail));
    }
    if head.method != Method::POST {
        let detail = "each path takes POST only";
        return Err(HttpProblem::new(405, "method", detail));
    }
    if head.uri.query().is_some() {
        let detail = "parameters are in the body: proxies log the queries of URLs";
        return Err(HttpProblem::new(400, "query", detail));
    }
    let form = Form::parse(&read(body).await?)?;
    match path[..] {
        ["slots", limit] => {
            let (limit, form) = (segment(limit)?, SlotForm::read(form)?);
            open(serving, limit, form, head.extensions.remove()).await
        }
        ["permits", id, action] => use_permit(serving, &segment(id)?, action, form),
        _ => unreachable!("the paths are checked"),
    }
}

/// Refuses whoever has not the token, and pages of browsers, which could otherwise use the servers of their visitors.
fn admit(serving: &Serving, head: &Parts) -> Result<(), HttpProblem> {
    if head.headers.contains_key(header::ORIGIN) {
        let detail = "pages of browsers hold no slots";
        return Err(HttpProblem::new(403, "cross_site", detail));
    }
    let Some(expected) = &serving.token else {
        return Ok(());
    };
    let sent = head.headers.get(header::AUTHORIZATION);
    let token = sent.and_then(|sent| {
        let (scheme, token) = sent.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
    });
    let (kind, detail) = match token {
        Some(token) if Hash::verify(token, expected) => return Ok(()),
        Some(_) => ("wrong_token", "this is not the server's token"),
        None => (
            "no_token",
            "the token is missing: send it as `Authorization: Bearer <token>`",
        ),
    };
    Err(HttpProblem::new(401, kind, detail))
}

async fn read(body: Incoming) -> Result<Bytes, HttpProblem> {
    let body = timeout(BODY_TIME, Limited::new(body, MAX_BODY).collect()).await;
    let (status, kind, detail) = match body {
        Ok(Ok(body)) => return Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            (413, "too_large", "a body has at most 8 KiB")
        }
        Ok(Err(_)) => (400, "malformed", "the body is cut short"),
        Err(_) => (408, "too_slow", "the body took more than 10 seconds"),
    };
    Err(HttpProblem::new(status, kind, detail))
}

async fn open(
    serving: &Arc<Serving>,
    limit: String,
    form: SlotForm,
    reader: Option<Reader>,
) -> Result<Response<AnswerBody>, HttpProblem> {
    if *serving.phase.borrow() != Phase::Serving {
        return Err(HttpProblem::shut_down());
    }
    let place = serving.clients.clone().try_acquire_owned();
    let place = place.map_err(|_| {
        let detail = "the server has as many clients as --max-clients allows";
        HttpProblem::new(503, "busy", detail)
    })?;
    let events = client::open(serving, limit, form, place, reader).await?;
    let mut response = Response::new(Either::Left(events));
    let headers = response.headers_mut();
    let stream = HeaderValue::from_static("text/event-stream");
    headers.insert(header::CONTENT_TYPE, stream);
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    // nginx would keep events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    // For clients that wait.
    let beat_ms = serving.heartbeat.as_millis() as u64;
    headers.insert("turnstile-heartbeat-ms", beat_ms.into());
    Ok(response)
}

fn use_permit(
    serving: &Serving,
    id: &str,
    action: &str,
    mut form: Form,
) -> Result<Response<AnswerBody>, HttpProblem> {
    let secret = form.text("secret", MAX_SECRET)?;
    let secret = secret.ok_or_else(|| HttpProblem::parameter("secret", "is missing"))?;
    let cost = match action {
        "ping" => None,
        _ => {
            let cost = form.number("cost", 0..=u32::MAX)?;
            Some(cost.ok_or_else(|| HttpProblem::parameter("cost", "is missing"))?)
        }
    };
    form.end()?;
    let held = serving.held.find(id, &secret)?;
    match (action, cost) {
        ("settle", Some(cost)) => held.budget()?.settle(cost.into()),
        ("spend", Some(cost)) => held.budget()?.spend(cost),
        _ => held.pinged.notify_one(),
    }
    let mut response = full(Response::new(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    Ok(response)
}

fn full(response: Response<Bytes>) -> Response<AnswerBody> {
    response.map(|body| Either::Right(Full::new(body)))
}
