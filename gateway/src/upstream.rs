//! The upstreams: their paths, URLs and keys, and the HTTP client for them.

use std::{env, str::FromStr, time::Duration};

use http::{
    HeaderValue, Uri,
    uri::{Authority, PathAndQuery, Scheme},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An upstream, written as `[PATH=]URL[,VARIABLE]`.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    /// The upstream serves this path and everything below it.
    prefix: String,
    scheme: Scheme,
    authority: Authority,
    /// Path of the URL, prepended to the path of each request.
    base: String,
    /// The gateway's own key, which replaces the caller's.
    pub(crate) key: Option<HeaderValue>,
}

pub(crate) type HttpClient<B> = Client<HttpsConnector<HttpConnector>, B>;

impl FromStr for Upstream {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (prefix, rest) = match text.split_once('=') {
            Some((prefix, rest)) if prefix.starts_with('/') => (prefix, rest),
            _ => ("", text),
        };
        let (url, variable) = match rest.split_once(',') {
            Some((url, variable)) => (url, Some(variable)),
            None => (rest, None),
        };
        let parts = url.parse::<Uri>().unwrap_or_default().into_parts();
        let base = parts.path_and_query.as_ref().map_or("", PathAndQuery::path);
        match (parts.scheme, parts.authority) {
            (Some(scheme), Some(authority))
                if [Scheme::HTTP, Scheme::HTTPS].contains(&scheme)
                    && !authority.as_str().contains('@')
                    && !url.contains('?') =>
            {
                Ok(Self {
                    prefix: prefix.trim_end_matches('/').to_owned(),
                    scheme,
                    authority,
                    base: base.trim_end_matches('/').to_owned(),
                    key: variable.map(key_in).transpose()?,
                })
            }
            _ => Err("it must be [PATH=]http[s]://host[:port][/path][,VARIABLE]".to_owned()),
        }
    }
}

/// Reads the key from an environment variable. Error messages do not contain it.
fn key_in(variable: &str) -> Result<HeaderValue, String> {
    let key = env::var(variable).unwrap_or_default();
    let value = HeaderValue::try_from(key.trim())
        .ok()
        .filter(|value| !value.is_empty());
    let mut value = value.ok_or(format!("there is no key in the variable {variable}"))?;
    value.set_sensitive(true);
    Ok(value)
}

impl Upstream {
    /// Returns the most specific upstream for a path.
    pub(crate) fn of<'a>(upstreams: &'a [Self], path: &str) -> Option<&'a Self> {
        let having = upstreams.iter().filter(|upstream| upstream.has(path));
        having.max_by_key(|upstream| upstream.prefix.len())
    }

    fn has(&self, path: &str) -> bool {
        let rest = path.strip_prefix(&self.prefix);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    pub(crate) fn uri(&self, path_and_query: &PathAndQuery) -> Option<Uri> {
        Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(format!("{}{path_and_query}", self.base))
            .build()
            .ok()
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }
}

/// Creates the HTTP client for all upstreams, which keeps unused connections for `idle`, and one that keeps none. TLS uses the
/// system's root certificates.
pub(crate) fn clients<B>(with_tls: bool, idle: Duration) -> Result<[HttpClient<B>; 2], String>
where
    B: http_body::Body<Data: Send> + Send,
{
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.enforce_http(false);
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let tls = if with_tls {
        HttpsConnectorBuilder::new()
            .with_native_roots()
            .map_err(|error| format!("the system's roots: {error}"))?
    } else {
        let config = ClientConfig::builder()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        HttpsConnectorBuilder::new().with_tls_config(config)
    };
    let connector = tls.https_or_http().enable_http1().wrap_connector(http);
    let mut builder = Client::builder(TokioExecutor::new());
    builder
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(idle);
    let pooled = builder.build(connector.clone());
    Ok([pooled, builder.pool_max_idle_per_host(0).build(connector)])
}
