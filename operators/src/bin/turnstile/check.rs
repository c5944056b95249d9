//! `turnstile check`: shows the content of a configuration file and its faults. Works without a store.

use std::{net::IpAddr, path::PathBuf, process::ExitCode};

use clap::Args as Group;
use http::{HeaderName, HeaderValue, Method, Request, Uri, request::Parts, uri::PathAndQuery};
use serde::Serialize;
use serde_json::json;
use tower_turnstile::{
    Fallback, PeerAddress,
    config::{
        Config, ConfigFileError, Fault, LimitConfig, LimitPreview, RequestPreview, RouteConfig,
    },
};
use tower_turnstile_operate::KeyDigest;

use crate::{
    args::Args,
    code,
    commands::CommandError,
    output::{self, Column, Row},
    text::{duration, escaped},
};

#[derive(Debug, Group)]
pub(crate) struct CheckArgs {
    /// The configuration file.
    file: PathBuf,
    /// Path of a request: prints the limits that apply to the request, with its key and cost.
    #[arg(long)]
    path: Option<PathAndQuery>,
    /// Method of the request.
    #[arg(long, default_value = "GET", requires = "path")]
    method: Method,
    /// A header of the request, such as 'x-api-key: acme'. May be repeated.
    #[arg(long, value_name = "NAME: VALUE", value_parser = header, requires = "path")]
    header: Vec<(HeaderName, HeaderValue)>,
    /// Address of the client.
    #[arg(long, value_name = "ADDRESS", requires = "path")]
    peer: Option<IpAddr>,
}

pub(crate) async fn run(args: &Args, check: &CheckArgs) -> Result<ExitCode, CommandError> {
    let config = match Config::from_file(&check.file).await {
        Ok(config) => config,
        Err(error) => return Ok(show_faults(args, check, &error)),
    };
    let Some(path) = &check.path else {
        show_file(args, &config);
        return Ok(ExitCode::SUCCESS);
    };
    let head = check.head(path);
    match config.preview(&head) {
        Ok(preview) => show_request(args, &config, &head, &preview),
        Err(error) => return Ok(show_faults(args, check, &error)),
    }
    Ok(ExitCode::SUCCESS)
}

impl CheckArgs {
    fn head(&self, path: &PathAndQuery) -> Parts {
        let (mut head, ()) = Request::new(()).into_parts();
        head.method = self.method.clone();
        head.uri = Uri::from(path.clone());
        head.headers.extend(self.header.iter().cloned());
        if let Some(peer) = self.peer {
            head.extensions.insert(PeerAddress((peer, 0).into()));
        }
        head
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let fault = || "write a name, a colon and a value, such as 'x-api-key: acme'".to_owned();
    let (name, value) = text.split_once(':').ok_or_else(fault)?;
    let name = name.trim().parse().map_err(|_| fault())?;
    Ok((name, value.trim().parse().map_err(|_| fault())?))
}

/// Shows each fault with its place.
fn show_faults(args: &Args, check: &CheckArgs, error: &ConfigFileError) -> ExitCode {
    let faults = error.faults().iter();
    if args.json {
        let row = |fault: &Fault| json!({"place": fault.path(), "fault": fault.message()});
        output::json(&faults.clone().map(row).collect::<Vec<_>>());
    } else {
        faults.clone().for_each(|fault| {
            let text = format!("{}: {fault}", check.file.display());
            output::line(&escaped(&text));
        })
    }
    // An unreadable file has no other faults.
    let is_unread = faults.clone().any(|fault| fault.path() == "file");
    ExitCode::from(if is_unread {
        code::WRONG_CALL
    } else {
        code::REFUSED
    })
}

#[derive(Serialize)]
struct DeclaredLimit {
    limit: String,
    value: String,
    key: String,
    /// How tenants are distinguished, if the limit is fair.
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    wait_ms: u64,
    own_values: usize,
    mode: &'static str,
    store_down: String,
}

impl Row for DeclaredLimit {
    const COLUMNS: &'static [Column<Self>] = &[
        ("LIMIT", |row| row.limit.clone()),
        ("VALUE", |row| row.value.clone()),
        ("KEY", |row| match &row.tenant {
            Some(tenant) => format!("{}, fair by {tenant}", row.key),
            None => row.key.clone(),
        }),
        ("WAIT", |row| duration(row.wait_ms)),
        ("OWN VALUES", |row| row.own_values.to_string()),
        ("MODE", |row| row.mode.to_owned()),
        ("STORE DOWN", |row| row.store_down.clone()),
    ];
}

impl DeclaredLimit {
    fn new((name, limit): (&String, &LimitConfig), config: &Config) -> Self {
        Self {
            limit: name.clone(),
            value: value_of(limit),
            key: required(limit.key_source(), limit.requires_key()),
            tenant: { limit.tenant_source() }.map(|by| required(by, limit.require_tenant)),
            wait_ms: limit.wait().unwrap_or_default().as_millis() as u64,
            own_values: config.own_values(name),
            mode: limit.mode.as_str(),
            store_down: match limit.fallback {
                None => "local".to_owned(),
                Some(Fallback::Local(value)) => format!("local {value}"),
                Some(Fallback::Share) => "share".to_owned(),
                Some(Fallback::Allow) => "allow".to_owned(),
                Some(Fallback::Reject) => "reject".to_owned(),
                Some(_) => "?".to_owned(),
            },
        }
    }
}

/// `5`, or `40 requests per 1m00s`.
fn value_of(limit: &LimitConfig) -> String {
    let (Some(rate), Some(period)) = (limit.rate, limit.per) else {
        return limit.concurrent.unwrap_or_default().to_string();
    };
    let unit = limit.unit.as_deref().unwrap_or("requests");
    let rate = format!("{rate} {unit} per {}", duration(period.as_millis() as u64));
    match limit.burst {
        Some(burst) => format!("{rate}, burst {burst}"),
        None => rate,
    }
}

fn required(source: String, is_required: bool) -> String {
    if is_required {
        format!("{source}, required")
    } else {
        source
    }
}

#[derive(Serialize)]
struct DeclaredRoute {
    route: String,
    patterns: String,
    limits: String,
    weight: u32,
}

impl Row for DeclaredRoute {
    const COLUMNS: &'static [Column<Self>] = &[
        ("ROUTE", |row| row.route.clone()),
        ("PATTERNS", |row| row.patterns.clone()),
        ("LIMITS", |row| match &*row.limits {
            "" => "(none: not limited)".to_owned(),
            limits => limits.to_owned(),
        }),
        ("WEIGHT", |row| row.weight.to_string()),
    ];
}

impl From<&RouteConfig> for DeclaredRoute {
    fn from(route: &RouteConfig) -> Self {
        Self {
            route: name_of(route),
            patterns: route.matches.join(", "),
            limits: route.limits.join(", "),
            weight: route.weight.unwrap_or(1),
        }
    }
}

fn name_of(route: &RouteConfig) -> String {
    let name = route.name.as_ref().or(route.matches.first());
    name.cloned().unwrap_or_default()
}

#[derive(Serialize)]
#[serde(untagged)]
enum Declared {
    Limit(DeclaredLimit),
    Route(DeclaredRoute),
}

fn show_file(args: &Args, config: &Config) {
    let limits = config
        .limits
        .iter()
        .map(|limit| DeclaredLimit::new(limit, config));
    let routes = config.routes.iter().map(DeclaredRoute::from);
    if args.json {
        let rows = limits
            .map(Declared::Limit)
            .chain(routes.map(Declared::Route));
        return output::json(&rows.collect::<Vec<_>>());
    }
    output::table(&limits.collect::<Vec<_>>());
    output::blank();
    output::table(&routes.collect::<Vec<_>>());
}

/// A limit that applies to a request.
#[derive(Serialize)]
struct MetLimit {
    limit: String,
    value: String,
    /// `None` if shared.
    caller: Option<String>,
    /// As shown by other commands.
    key: KeyDigest,
    /// `None` if the limit is not fair, or the request has no tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    /// `None` if the limit is not fair.
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<u32>,
    weight: u32,
    cost: u32,
    /// Why such a request is always refused, if it is.
    refused: Option<&'static str>,
}

impl Row for MetLimit {
    const COLUMNS: &'static [Column<Self>] = &[
        ("LIMIT", |row| row.limit.clone()),
        ("VALUE", |row| row.value.clone()),
        ("CALLER", |row| {
            let caller = row.caller.as_deref().unwrap_or("(shared)");
            match row.share {
                Some(share) => {
                    let tenant = row.tenant.as_deref().unwrap_or("(none)");
                    format!("{caller}, tenant {tenant} with share {share}")
                }
                None => caller.to_owned(),
            }
        }),
        ("KEY", |row| row.key.to_string()),
        ("UNITS", |row| row.weight.to_string()),
        ("COST", |row| row.cost.to_string()),
        ("", |row| {
            let refused = row.refused.map(|why| format!("always refused: {why}"));
            refused.unwrap_or_default()
        }),
    ];
}

impl From<&LimitPreview> for MetLimit {
    fn from(met: &LimitPreview) -> Self {
        let value = match met.limit.period() {
            None => met.value.max.to_string(),
            Some(period) => {
                let burst = met.value.burst.map(|burst| format!(", burst {burst}"));
                let (max, burst) = (met.value.max, burst.unwrap_or_default());
                format!("{max} per {}{burst}", duration(period.as_millis() as u64))
            }
        };
        Self {
            limit: met.limit.name().to_owned(),
            value,
            caller: met.caller.as_ref().map(|caller| caller.as_str().to_owned()),
            key: KeyDigest::of(met.limit.name(), met.key.clone()),
            tenant: met.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
            share: met.share,
            weight: met.weight,
            cost: met.cost,
            refused: met.refusal.map(|why| why.as_str()),
        }
    }
}

fn show_request(args: &Args, config: &Config, head: &Parts, preview: &RequestPreview) {
    let met: Vec<MetLimit> = preview.limits.iter().map(MetLimit::from).collect();
    if args.json {
        return output::json(&met);
    }
    let route = preview.route.map(|route| name_of(&config.routes[route]));
    let request = format!("{} {}", head.method, head.uri.path());
    let verdict = match route {
        _ if preview.is_ambiguous => {
            "is refused with 400: servers may read its path in different ways".to_owned()
        }
        None => "matches no route: it is not limited".to_owned(),
        Some(route) if met.is_empty() => format!("is under no limit of route {route}"),
        Some(route) => format!("is on route {route}, under these limits together:"),
    };
    output::line(&escaped(&format!("{request} {verdict}")));
    if !met.is_empty() {
        output::table(&met);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_a_name_and_a_value() {
        let (name, value) = header("X-Api-Key:  acme:1 ").unwrap();
        assert_eq!(
            (name.as_str(), value.as_bytes()),
            ("x-api-key", &b"acme:1"[..])
        );
        for text in ["", "x-api-key", "a b: c", "a: b\nc"] {
            assert!(header(text).is_err(), "{text}");
        }
    }
}
