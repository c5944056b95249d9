//! The files that SIGHUP reloads: the limits, and the callers. Decides what a file must have, beside what the library checks.

use std::{path::PathBuf, sync::Arc};

use http::Method;
use tokio::signal::unix::Signal;
use tower_turnstile::config::{Config, ConfigFileError, LimitConfig, LiveConfig};

use crate::{callers::Callers, endpoint::Endpoint, path::last_segment};

/// The configuration file, and the files that are reloaded with it.
pub(crate) struct File {
    pub(crate) path: PathBuf,
    /// Name of the limit that is charged.
    pub(crate) budget: Arc<str>,
    pub(crate) callers: Callers,
}

impl File {
    /// Reads the configuration. A missing budget is an error, as a typo must not disable it; `mode = "off"` does.
    pub(crate) async fn read(&self) -> Result<Config, String> {
        let config = Config::from_file(&self.path).await;
        let config = config.map_err(|error| self.blame(in_one_line(&error)))?;
        if config.store.show_keys && !self.callers.are_known() {
            let fault =
                "store.show_keys: without --callers, the keys that operators see are secrets";
            return Err(self.blame(fault.to_owned()));
        }
        let is_rate = |limit: &LimitConfig| limit.rate.is_some();
        if config.limits.get(&*self.budget).is_some_and(is_rate) {
            Ok(config)
        } else {
            Err(self.blame(format!(
                "limits.{}: is missing, or no rate: the gateway charges it (--budget)",
                self.budget
            )))
        }
    }

    pub(crate) fn blame(&self, fault: String) -> String {
        format!("--config {}: {fault}", self.path.display())
    }

    /// Warns of requests that cost tokens and are not charged. The budget was probably forgotten.
    pub(crate) fn warn_of_gaps(&self, config: &Config) {
        let budget = &*self.budget;
        for route in &config.routes {
            let is_costly = |pattern: &&String| {
                let (method, path) = pattern.split_once(' ').unwrap_or(("POST", pattern));
                // A placeholder stands for any name.
                let is_open = last_segment(path).starts_with('{');
                method == "POST" && (is_open || Endpoint::of(&Method::POST, path).is_some())
            };
            if !route.limits.iter().any(|limit| limit == budget) {
                for pattern in route.matches.iter().filter(is_costly) {
                    tracing::warn!(pattern, budget, "requests are not charged");
                }
            }
        }
        let mut patterns = config.routes.iter().flat_map(|route| &route.matches);
        if !patterns.any(|pattern| pattern == "*") {
            tracing::warn!("requests that no route matches are neither limited nor charged");
        }
    }

    pub(crate) async fn reload_on(self, mut hangup: Signal, live: LiveConfig) {
        while hangup.recv().await.is_some() {
            match self.reload(&live).await {
                Ok(()) => tracing::info!("reloaded"),
                Err(fault) => {
                    tracing::error!(fault, "not reloaded, the old settings stay in force")
                }
            }
        }
    }

    /// All files or none.
    async fn reload(&self, live: &LiveConfig) -> Result<(), String> {
        let config = self.read().await?;
        let callers = self.callers.read()?;
        let reloaded = live.reload(&config);
        reloaded.map_err(|error| self.blame(in_one_line(&error)))?;
        self.warn_of_gaps(&config);
        self.callers.replace(callers);
        Ok(())
    }
}

/// Joins all faults of a file.
pub(crate) fn in_one_line(error: &ConfigFileError) -> String {
    error.to_string().replace('\n', "; ")
}
