//! Errors that the gateway itself returns, in the form that each provider's clients expect.
//!
//! Tests: `tests/gateway/dialects.rs`.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use sfv::{BareItem, List, ListEntry, Parser};
use tower_turnstile::{Refusal, RefusalKind};

use crate::{callers::NO_KEY, dialect::Dialect, time::in_words};

/// The reason why the gateway itself answers a request or ends a stream.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    message: String,
    /// The limit that was reached.
    limit: Option<String>,
    retry_after: Option<Duration>,
}

impl Fault {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            limit: None,
            retry_after: None,
        }
    }

    /// The request has no key, or one that is not accepted: code and message.
    pub(crate) fn of_key((code, message): (&'static str, &'static str)) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, code, message)
    }

    /// Routes and upstream might read the path differently.
    pub(crate) fn ambiguous_path() -> Self {
        let message = "the path can be read in several ways";
        Self::new(StatusCode::BAD_REQUEST, "ambiguous_path", message)
    }

    /// No route or upstream serves `what`, the method and path.
    pub(crate) fn unknown(what: &str) -> Self {
        let message = format!("the gateway does not serve {what}");
        Self::new(StatusCode::NOT_FOUND, "unknown_url", message)
    }

    /// A limit refused `what`, the method and path.
    pub(crate) fn of_refusal(refusal: &Refusal, what: &str) -> Self {
        match refusal.kind() {
            // A slash within a segment, which the file's route would have to allow.
            RefusalKind::AmbiguousPath => return Self::ambiguous_path(),
            RefusalKind::NoKey => return Self::of_key(NO_KEY),
            // The file has a route that refuses everything.
            _ if refusal.status() == StatusCode::NOT_FOUND => return Self::unknown(what),
            _ => {}
        }
        let code = if refusal.kind().is_limited() {
            "rate_limit_exceeded"
        } else {
            refusal.kind().as_str()
        };
        let fault = Self::new(refusal.status(), code, refusal.to_string());
        // `None` if a retry is pointless.
        let Some(wait) = refusal.retry_after() else {
            return fault;
        };
        let message = format!("{}; try again in {}", fault.message, in_words(wait));
        Self {
            message,
            limit: Some(refusal.limit_name().to_owned()),
            retry_after: Some(wait),
            ..fault
        }
    }

    /// Builds the error response.
    pub(crate) fn to_response(&self, dialect: Dialect) -> Response<Bytes> {
        let mut response = Response::new(Bytes::from(self.body(dialect).to_string()));
        *response.status_mut() = self.status;
        let media = match dialect {
            Dialect::Other => "application/problem+json",
            _ => "application/json",
        };
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, bearer);
            // A connection takes the place of a caller's.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UPGRADE_REQUIRED {
            headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(header::UPGRADE, HeaderValue::from_static("HTTP/1.1"));
        }
        if let Some(wait) = self.retry_after {
            let millis = wait.as_nanos().div_ceil(1_000_000) as u64;
            headers.insert(header::RETRY_AFTER, millis.div_ceil(1_000).into());
            headers.insert(HeaderName::from_static("retry-after-ms"), millis.into());
        }
        response
    }

    /// Builds the error event that ends a stream.
    pub(crate) fn to_event(&self, dialect: Dialect, path: &str) -> Bytes {
        let mut body = self.body(dialect);
        let name = match dialect {
            // Clients recognise the error by the event's name.
            Dialect::Anthropic => "event: error\n",
            _ if path.ends_with("/responses") => {
                // The API's own error event, which clients only pass on, and the member that makes them raise it.
                body["type"] = "error".into();
                body["code"] = self.code.into();
                body["message"] = self.message.clone().into();
                "event: error\n"
            }
            _ => "",
        };
        format!("{name}data: {body}\n\n").into()
    }

    fn body(&self, dialect: Dialect) -> Value {
        let mut error = match dialect {
            Dialect::OpenAi | Dialect::Azure => json!({
                "message": self.message, "type": self.openai_type(), "param": null, "code": self.code,
            }),
            Dialect::Anthropic => {
                json!({ "type": self.anthropic_type(), "message": self.message })
            }
            Dialect::Other => json!({
                "title": self.status.canonical_reason(), "status": self.status.as_u16(),
                "detail": self.message, "code": self.code,
            }),
        };
        if let Some(limit) = &self.limit {
            error["limit"] = limit.clone().into();
        }
        match dialect {
            Dialect::OpenAi | Dialect::Azure => json!({ "error": error }),
            Dialect::Anthropic => json!({ "type": "error", "error": error }),
            Dialect::Other => error,
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        }
    }
}

/// The state of a limit, from the fields `RateLimit-Policy` and `RateLimit`.
#[derive(Debug)]
struct Rate {
    name: String,
    unit: String,
    quota: i64,
    remaining: i64,
    reset: Duration,
}

/// Translates the `RateLimit` fields, if the route has them, into the fields that SDKs read.
pub(crate) fn set_rate_limits(
    headers: &mut HeaderMap,
    dialect: Dialect,
    refusal: Option<&Refusal>,
) {
    let rates = rates(headers, refusal);
    for unit in ["requests", "tokens"] {
        // If several limits have this unit, the tightest.
        let of_unit = rates.iter().filter(|rate| rate.unit == unit);
        let Some(rate) = of_unit.min_by_key(|rate| rate.remaining) else {
            continue;
        };
        if dialect == Dialect::Other {
            return;
        }
        let reset = match dialect {
            Dialect::Anthropic => {
                humantime::format_rfc3339_seconds(SystemTime::now() + rate.reset).to_string()
            }
            _ => format!("{}s", rate.reset.as_secs_f64().ceil()),
        };
        let values = [rate.quota.to_string(), rate.remaining.to_string(), reset];
        for (what, value) in ["limit", "remaining", "reset"].into_iter().zip(values) {
            let name = match dialect {
                Dialect::Anthropic => format!("anthropic-ratelimit-{unit}-{what}"),
                _ => format!("x-ratelimit-{what}-{unit}"),
            };
            if let (Ok(name), Ok(value)) =
                (HeaderName::try_from(name), HeaderValue::try_from(value))
            {
                headers.insert(name, value);
            }
        }
    }
}

fn rates(headers: &HeaderMap, refusal: Option<&Refusal>) -> Vec<Rate> {
    let states = items(headers, "ratelimit");
    let policies = items(headers, "ratelimit-policy").into_iter();
    let rates = policies.filter_map(|(name, policy)| {
        let state = states.iter().find(|(other, _)| *other == name);
        let number = |key: &str| state?.1.iter().find(|(k, _)| k == key)?.1.as_integer();
        let of_policy = |key: &str| policy.iter().find(|(k, _)| k == key);
        of_policy("w")?;
        let mut rate = Rate {
            unit: of_policy("qu")?.1.as_string()?.as_str().to_owned(),
            quota: of_policy("q")?.1.as_integer()?.into(),
            remaining: number("r")?.into(),
            reset: Duration::from_secs(number("t").map_or(0, i64::from).unsigned_abs()),
            name,
        };
        if let Some(refusal) = refusal.filter(|refusal| refusal.limit_name() == rate.name) {
            (rate.remaining, rate.reset) = (0, refusal.retry_after().unwrap_or_default());
        }
        Some(rate)
    });
    // A route that refuses everything has no limit that a client could keep.
    let violated = refusal
        .filter(|refusal| refusal.kind().is_limited() && refusal.status() != StatusCode::NOT_FOUND);
    rates.chain(violated.map(violated_rate)).collect()
}

/// The limit that refused. Slots count as requests.
fn violated_rate(refusal: &Refusal) -> Rate {
    Rate {
        name: refusal.limit_name().to_owned(),
        unit: refusal.unit().unwrap_or("requests").to_owned(),
        quota: refusal.max().into(),
        remaining: 0,
        reset: refusal.retry_after().unwrap_or_default(),
    }
}

type Params = Vec<(String, BareItem)>;

fn items(headers: &HeaderMap, field: &str) -> Vec<(String, Params)> {
    let lines = headers.get_all(field).iter();
    let lines: Vec<_> = lines.filter_map(|line| line.to_str().ok()).collect();
    let list = Parser::new(&lines.join(", ")).parse::<List>();
    let item = |entry| match entry {
        ListEntry::Item(item) => {
            let name = item.bare_item.as_string()?.as_str().to_owned();
            let params = item.params.into_iter();
            Some((
                name,
                params.map(|(key, value)| (key.into(), value)).collect(),
            ))
        }
        ListEntry::InnerList(_) => None,
    };
    list.unwrap_or_default()
        .into_iter()
        .filter_map(item)
        .collect()
}
