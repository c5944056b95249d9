//! A configuration file as `run` and `serve` read it: with the store of the arguments if it has none.

use std::{env, path::Path};

use tower_turnstile::config::{Config, ConfigFileError, StoreUrl};

use crate::{args::Args, code, commands::CommandError};

pub(crate) async fn read(args: &Args, path: &Path) -> Result<Config, CommandError> {
    let config = Config::from_file(path).await;
    let config = config.map_err(|error| faulty(&path.display().to_string(), &error))?;
    completed(args, config)
}

/// Operators see each slot, and can revoke it.
pub(crate) fn completed(args: &Args, mut config: Config) -> Result<Config, CommandError> {
    config.store.operable = true;
    if config.store.url.is_none() {
        config.store.url = Some(args.store()?.into());
        let namespace = &mut config.store.namespace;
        namespace.get_or_insert_with(|| args.namespace.clone());
    }
    Ok(config)
}

/// The URL and the namespace of a configuration that has connected.
pub(crate) fn store(config: &Config) -> (String, String) {
    let url = match &config.store.url {
        Some(StoreUrl::Plain(url)) => url.clone(),
        Some(StoreUrl::Env(name)) => env::var(name).unwrap_or_default(),
        _ => String::new(),
    };
    let namespace = config.store.namespace.as_deref().unwrap_or("turnstile");
    (url, namespace.to_owned())
}

/// `place`: the file, or the argument.
pub(crate) fn faulty(place: &str, error: &ConfigFileError) -> CommandError {
    let faults = error.faults().iter();
    let lines: Vec<_> = faults.map(|fault| format!("{place}: {fault}")).collect();
    CommandError::new(code::CONFIG, lines.join("; "))
}
