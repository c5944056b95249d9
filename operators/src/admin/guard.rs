//! Which requests are accepted: none that a foreign site could have sent.
//!
//! A site cannot set a custom header in a form, nor in a script without the service's consent, and it can never choose
//! `Host`, `Origin` and `Sec-Fetch-Site`. A site whose own name leads to this service (DNS rebinding) makes all of them
//! consistent, so only known hosts are accepted.
//!
//! Tests: `tests/admin/guards.rs`, and below.

use std::net::IpAddr;

use http::{
    HeaderName, Uri,
    header::{CONTENT_TYPE, HOST, ORIGIN},
    request::Parts,
    uri::{Authority, Scheme},
};

use super::problem::{ApiFault, Problem};
use crate::OperateError;

/// Header required on all requests except reads. Its value does not matter.
const MARK: HeaderName = HeaderName::from_static("x-turnstile");
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// An origin at which browsers reach the page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Origin {
    scheme: Scheme,
    /// In lower case.
    host: String,
    port: u16,
}

impl Origin {
    pub(super) fn parse(text: &str) -> Result<Self, OperateError> {
        Self::read(text).ok_or_else(|| {
            OperateError::value(
                "an origin must have a scheme, a host and perhaps a port, such as https://ops.example.com",
            )
        })
    }

    fn read(text: &str) -> Option<Self> {
        let (_, authority) = text.split_once("://")?;
        let uri: Uri = text.parse().ok()?;
        // A URI without a path has the path `/`.
        let is_whole = authority == uri.authority()?.as_str();
        let scheme = uri.scheme()?.clone();
        let (host, port) = host_and_port(uri.authority()?, default_port(&scheme)?)?;
        is_whole.then_some(Self { scheme, host, port })
    }
}

fn default_port(scheme: &Scheme) -> Option<u16> {
    match scheme.as_str() {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

/// `None` if the authority has a user, lacks a host, or has an invalid port.
fn host_and_port(authority: &Authority, default: u16) -> Option<(String, u16)> {
    let text = authority.as_str();
    let host = authority.host();
    let port = match text.strip_prefix(host)? {
        "" => default,
        port => port.strip_prefix(':')?.parse().ok()?,
    };
    (!host.is_empty()).then(|| (host.to_ascii_lowercase(), port))
}

/// The origins at which browsers reach the page. If empty: any IP address, and `localhost`.
#[derive(Debug)]
pub(super) struct Origins(Vec<Origin>);

impl Origins {
    pub(super) fn new(origins: Vec<Origin>) -> Self {
        Self(origins)
    }

    /// Checks a reading request.
    pub(super) fn check(&self, head: &Parts) -> Result<(), Problem> {
        let host = host(head)?;
        if !self.knows_host(&host) {
            let detail =
                format!("`{host}` is not a host of this page: the application names its origin");
            return Err(Problem::of(ApiFault::WrongHost, detail));
        }
        let site = one(head, &FETCH_SITE)?;
        if site.is_some_and(|site| !matches!(site, "same-origin" | "none")) {
            return Err(cross_site());
        }
        match one(head, &ORIGIN)? {
            Some(origin) if !self.knows_origin(origin, &host) => Err(cross_site()),
            _ => Ok(()),
        }
    }

    /// Checks a request with a body.
    pub(super) fn check_post(&self, head: &Parts) -> Result<(), Problem> {
        self.check(head)?;
        if !head.headers.contains_key(MARK) {
            let detail = format!("the header `{MARK}` is missing, with any value");
            return Err(Problem::of(ApiFault::NoHeader, detail));
        }
        let media_type = one(head, &CONTENT_TYPE)?.unwrap_or_default();
        let media_type = media_type.split(';').next().unwrap_or_default().trim();
        if !media_type.eq_ignore_ascii_case("application/json") {
            let detail = "the content type must be application/json";
            return Err(Problem::of(ApiFault::ContentType, detail));
        }
        Ok(())
    }

    fn knows_host(&self, authority: &Authority) -> bool {
        let is_host = |origin: &Origin| {
            let default = default_port(&origin.scheme).unwrap_or_default();
            let found = host_and_port(authority, default);
            found.is_some_and(|(host, port)| (&*host, port) == (&*origin.host, origin.port))
        };
        match &self.0[..] {
            [] => host_and_port(authority, 80).is_some_and(|(host, _)| is_address(&host)),
            origins => origins.iter().any(is_host),
        }
    }

    fn knows_origin(&self, text: &str, host: &Authority) -> bool {
        let Some(origin) = Origin::read(text) else {
            return false;
        };
        match &self.0[..] {
            [] => {
                let default = default_port(&origin.scheme).unwrap_or_default();
                host_and_port(host, default) == Some((origin.host, origin.port))
            }
            origins => origins.contains(&origin),
        }
    }
}

/// Whether a host is an address or `localhost`, which a foreign site cannot own as a name.
fn is_address(host: &str) -> bool {
    let inner = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    host == "localhost" || inner.unwrap_or(host).parse::<IpAddr>().is_ok()
}

fn host(head: &Parts) -> Result<Authority, Problem> {
    // In HTTP/2 the URI contains the authority.
    if let Some(authority) = head.uri.authority() {
        return Ok(authority.clone());
    }
    let host = one(head, &HOST)?;
    let host = host.and_then(|host| host.parse().ok());
    host.ok_or_else(|| Problem::malformed("the header `host` is missing or cannot be read"))
}

/// A header that may occur only once.
fn one<'a>(head: &'a Parts, name: &HeaderName) -> Result<Option<&'a str>, Problem> {
    let mut values = head.headers.get_all(name).iter();
    let fault = || Problem::malformed(format!("the header `{name}` cannot be read"));
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| fault()),
        _ => Err(fault()),
    }
}

fn cross_site() -> Problem {
    Problem::of(ApiFault::CrossSite, "the request comes from another site")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_read() {
        let origin = Origin::parse("https://Ops.example.com").unwrap();
        assert_eq!((&*origin.host, origin.port), ("ops.example.com", 443));
        assert_eq!(
            Origin::parse("https://ops.example.com:443").unwrap(),
            origin
        );
        assert_eq!(Origin::parse("http://[::1]:3000").unwrap().host, "[::1]");
        for wrong in [
            "",
            "null",
            "ops.example.com",
            "https://",
            "https://ops.example.com/",
            "https://ops.example.com/limits",
            "https://user@ops.example.com",
            "https://ops.example.com:port",
            "https://ops.example.com:70000",
            "ftp://ops.example.com",
            "https://a b",
        ] {
            let error = Origin::parse(wrong).unwrap_err();
            assert!(error.to_string().contains("must have a scheme"), "{wrong}");
        }
    }

    #[test]
    fn names_are_no_addresses() {
        for (host, expected) in [
            ("localhost", true),
            ("127.0.0.1", true),
            ("[::1]", true),
            ("localhost.example.com", false),
            ("127.0.0.1.example.com", false),
            ("web-1", false),
        ] {
            assert_eq!(is_address(host), expected, "{host}");
        }
    }
}
