//! The `[store]` section.
//!
//! Tests: `tests/config/faults.rs`, `tests/security/files.rs`.

use std::{env, fmt, time::Duration};

use serde::{Deserialize, Deserializer};

#[cfg(test)]
use super::schema;
use super::{
    error::{ConfigFileError, Faults, unknown},
    optional::if_set,
    word_or_table::{WORD_OR_TABLE, secret, word_or_table},
};
use crate::{
    builder::{LimiterBuilder, check_url},
    limiter::Limiter,
    operable::{Identity, SEEN},
};

/// The store, and the settings of the [`Limiter`]. Missing fields have the defaults of [`LimiterBuilder`].
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct StoreConfig {
    /// The store's URL. Default: `memory:`, limits within this process.
    #[cfg_attr(test, schemars(with = "schema::WordOrTable<schema::Url, UrlTable>"))]
    pub url: Option<StoreUrl>,
    /// Prefix of all keys in the store. See [`LimiterBuilder::namespace`]. Default: `turnstile`.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9_.:-]{1,64}$")))]
    pub namespace: Option<String>,
    /// Length of a lease. See [`LimiterBuilder::lease`]. Default: 30 s.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub lease: Option<Duration>,
    /// Longest time that a request waits for the store. See [`LimiterBuilder::store_timeout`]. Default: 500 ms.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub store_timeout: Option<Duration>,
    /// Interval between polls for waiters. See [`LimiterBuilder::poll_interval`]. Default: 1 s.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub poll_interval: Option<Duration>,
    /// How long the store keeps the queue positions of a silent replica. Default: 5 s. See [`LimiterBuilder::waiter_ttl`].
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub waiter_ttl: Option<Duration>,
    /// Whether operators may ask this replica and change its limits. Needs the feature `operate`. Default: no.
    pub operable: bool,
    /// Label of this replica in the views for operators. Default: the host's name.
    #[cfg_attr(test, schemars(length(min = 1, max = 64)))]
    pub replica_label: Option<String>,
    /// Whether operators see callers' keys in place of digests. Default: no.
    pub show_keys: bool,
}

/// URL of the store. It may hold a password, so `Debug` does not show it.
///
/// In TOML a string, or `{ env = "REDIS_URL" }` for the value of an environment variable, which is read when the limiter
/// connects. `Debug` does not show the name of the variable either, since it may be a URL by mistake.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// The URL itself, as for [`LimiterBuilder::connect`].
    Plain(String),
    /// The name of the environment variable that holds the URL.
    Env(String),
}

impl StoreConfig {
    /// Connects to the store.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LimiterBuilder::connect`], and an error if the environment variable is not set.
    pub async fn connect(&self) -> Result<Limiter, ConfigFileError> {
        let mut faults = Faults::default();
        self.check(&mut faults);
        let url = match &self.url {
            Some(url) => url.read(&mut faults),
            None => "memory:".to_owned(),
        };
        faults.into_result()?;
        let limiter = self.builder().connect(&url).await;
        limiter.map_err(|error| ConfigFileError::of("store", error.to_string()))
    }

    pub(super) fn check(&self, faults: &mut Faults) {
        match &self.url {
            Some(StoreUrl::Plain(url)) => drop(faults.take("store.url", check_url(url))),
            Some(StoreUrl::Env(name)) if name.is_empty() || name.contains(['=', '\0']) => {
                faults.add("store.url.env", "is not the name of a variable");
            }
            Some(StoreUrl::Env(_)) | None => {}
        }
        let settings = [
            ("operable", self.operable),
            ("replica_label", self.replica_label.is_some()),
            ("show_keys", self.show_keys),
        ];
        for (setting, is_set) in settings {
            if is_set && !SEEN {
                let fault = "needs the feature `operate` of tower-turnstile";
                faults.add(format!("store.{setting}"), fault);
            }
        }
        for (setting, message) in self.builder().faults() {
            faults.add(format!("store.{setting}"), message);
        }
    }

    fn builder(&self) -> LimiterBuilder {
        let mut builder = Limiter::builder();
        let namespace = self.namespace.as_deref();
        builder = if_set(builder, namespace, LimiterBuilder::namespace);
        builder = if_set(builder, self.lease, LimiterBuilder::lease);
        builder = if_set(builder, self.store_timeout, LimiterBuilder::store_timeout);
        builder = if_set(builder, self.poll_interval, LimiterBuilder::poll_interval);
        builder = if_set(builder, self.waiter_ttl, LimiterBuilder::waiter_ttl);
        builder.identity = Identity {
            operable: self.operable,
            label: self.replica_label.clone(),
            shows_keys: self.show_keys,
        };
        builder
    }
}

impl StoreUrl {
    fn read(&self, faults: &mut Faults) -> String {
        match self {
            Self::Plain(url) => url.clone(),
            Self::Env(name) => env::var(name).unwrap_or_else(|_| {
                // Anything but capitals may be a URL in the wrong place.
                let is_word = |c| matches!(c, 'A'..='Z' | '0'..='9' | '_');
                let shown = Some(name.as_str()).filter(|name| name.chars().all(is_word));
                let shown = shown.unwrap_or("that it names");
                let other = format!("the environment variable {shown} is not set, or not UTF-8");
                let others = env::vars_os().filter_map(|(other, _)| other.into_string().ok());
                let others = others.filter(|other| other != name);
                let fault = unknown("environment variable", name, others, &other);
                faults.add("store.url.env", fault);
                String::new()
            }),
        }
    }
}

/// The builder hides an invalid namespace, which may be a URL in the wrong place.
impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreConfig")
            .field("url", &self.url)
            .field("builder", &self.builder())
            .finish()
    }
}

impl From<&str> for StoreUrl {
    fn from(url: &str) -> Self {
        Self::Plain(url.to_owned())
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(_) => f.write_str("Plain(..)"),
            Self::Env(_) => f.write_str("Env(..)"),
        }
    }
}

/// The name of an environment variable that holds the URL.
#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct UrlTable {
    #[serde(deserialize_with = "secret")]
    #[cfg_attr(test, schemars(with = "schema::Variable"))]
    env: String,
}

impl<'de> Deserialize<'de> for StoreUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        word_or_table(
            deserializer,
            WORD_OR_TABLE,
            |url| Ok(Self::Plain(url)),
            |table: UrlTable| Ok(Self::Env(table.env)),
        )
    }
}
