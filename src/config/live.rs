//! A configuration in use, which can be reloaded.
//!
//! Tests: `tests/config/reloads.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, Mutex},
};

use arc_swap::ArcSwap;
use http::Method;

use super::{
    checked::{Checked, CheckedLimit},
    error::{ConfigFileError, Faults},
    layers::RouteLayers,
    sections::Config,
};
use crate::{
    error::ConfigError,
    key::Key,
    layer::{Gate, GateEdit, LimitLayer, Routing},
    limit::{Limit, LimitValue},
    limiter::Limiter,
    semaphore::Semaphore,
    sync::locked,
};

/// A configuration that can be reloaded while it is in use. Cheap to clone; clones share everything.
///
/// Its [`layer`](Self::layer) applies the new configuration after each reload:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_turnstile::config::ConfigFileError> {
/// use tower_turnstile::config::{Config, LiveConfig};
///
/// let text = "
///     limits.chat.concurrent = 5
///     routes = [{ match = ['/chat'], limits = ['chat'] }]
/// ";
/// let live = LiveConfig::connect(&Config::from_toml(text)?).await?;
/// let layer = live.layer();
///
/// live.reload(&Config::from_toml(&text.replace("5", "8"))?)?;
/// assert_eq!(live.limit("chat").map(|limit| limit.max()), Some(8));
///
/// let other = format!("store.namespace = 'other'\n{text}");
/// let error = live.reload(&Config::from_toml(&other)?).unwrap_err();
/// assert_eq!(error.to_string(), "store: cannot change while it is in use: start the service anew");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct LiveConfig(Arc<Live>);

struct Live {
    limiter: Limiter,
    layers: ArcSwap<RouteLayers>,
    changing: Mutex<Changing>,
}

/// State used only by changes.
struct Changing {
    config: Config,
    /// Limits registered at the limiter, whether they are still in the configuration or not.
    known: BTreeMap<String, CheckedLimit>,
}

/// Callers' own values.
type Values = HashMap<Key, LimitValue>;

impl LiveConfig {
    /// Connects to the store that the configuration names.
    ///
    /// # Errors
    ///
    /// Returns an error if the configuration has faults, and the errors of
    /// [`StoreConfig::connect`](super::StoreConfig::connect).
    pub async fn connect(config: &Config) -> Result<Self, ConfigFileError> {
        config.validate()?;
        Self::new(config, &config.store.connect().await?)
    }

    /// Creates a live configuration on this limiter, and ignores the section `[store]`.
    ///
    /// # Errors
    ///
    /// If the configuration has faults, or the limiter has a limit of the same name with different values.
    pub fn new(config: &Config, limiter: &Limiter) -> Result<Self, ConfigFileError> {
        let nothing = Config {
            store: config.store.clone(),
            unlimited: true,
            ..Config::default()
        };
        let layers = RouteLayers::new(&nothing, Checked::new(&nothing)?, limiter, Vec::new())?;
        let live = Self(Arc::new(Live {
            limiter: limiter.clone(),
            layers: ArcSwap::from_pointee(layers),
            changing: Mutex::new(Changing {
                config: nothing,
                known: BTreeMap::new(),
            }),
        }));
        live.reload(config)?;
        Ok(live)
    }

    /// The layers currently in force.
    pub(super) fn layers(&self) -> Arc<RouteLayers> {
        self.0.layers.load_full()
    }

    /// Returns the limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// Returns a layer that applies the limits of each request's route, and follows every [`reload`](Self::reload).
    ///
    /// Settings of the layer, such as [`refuse_with`](LimitLayer::refuse_with), apply to all routes and all layers of this
    /// configuration, and take precedence over the file. Make each setting once, not for each connection: settings
    /// accumulate.
    pub fn layer(&self) -> LimitLayer {
        LimitLayer::routed(self.0.clone())
    }

    /// Returns the limit with this name, for a [`Semaphore`](crate::Semaphore) or a layer in code.
    ///
    /// The semaphore or layer always has the latest values, whenever it is created, even if a reload runs at the same time
    /// or has removed the limit. Only the wait is fixed by this call. A layer in code does not apply the plans and
    /// overrides of the file: see [`Scope::values`](crate::Scope::values).
    pub fn limit(&self, name: &str) -> Option<Limit> {
        self.0.layers.load().limit(name)
    }

    /// Returns the limits with these names, all from the same configuration. `None`: the configuration lacks a limit.
    ///
    /// Otherwise like [`limit`](Self::limit).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_turnstile::{Limiter, config::{Config, LiveConfig}};
    ///
    /// let config = Config::from_toml(
    ///     "
    ///     unlimited = true # no routes
    ///     limits.jobs = { concurrent = 5, unrouted = true }
    ///     limits.job-starts = { rate = 60, per = '1m', unrouted = true }
    ///     ",
    /// )?;
    /// let live = LiveConfig::new(&config, &Limiter::in_memory())?;
    /// let limits = live.limits(["jobs", "job-starts"]).expect("both are in the file");
    /// let jobs = live.limiter().semaphore(limits, "acme")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn limits<const N: usize>(&self, names: [&str; N]) -> Option<[Limit; N]> {
        let layers = self.0.layers.load();
        let limits: Option<Vec<_>> = names.iter().map(|name| layers.limit(name)).collect();
        limits?.try_into().ok()
    }

    /// Creates a semaphore of a limit for a caller, with the caller's value from a plan or an override, and
    /// the limit's cost, if it is a number.
    ///
    /// For work other than requests, such as a job, under the same limit as requests. The caller is written as in the file:
    /// the value of the header, the client's address, or the name of the route. An empty caller stands for all callers
    /// without a key, and for all callers of a shared limit.
    ///
    /// A later [`reload`](Self::reload) changes the limit's value, but not the caller's own value: create a semaphore for
    /// each job.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tower_turnstile::config::{Config, LiveConfig};
    ///
    /// let config = Config::from_toml(
    ///     "
    ///     limits.gpu = { concurrent = 2, key = { header = 'x-api-key' }, overrides = { acme = 8 } }
    ///     routes = [{ match = ['/infer'], limits = ['gpu'] }]
    ///     ",
    /// )?;
    /// let live = LiveConfig::connect(&config).await?;
    /// let gpu = live.limit("gpu").expect("it is in the file").wait_up_to(Duration::from_secs(60));
    /// let acme = live.semaphore(&gpu, "acme")?;
    /// let permit = acme.acquire().await?;
    /// assert_eq!(acme.usage().await?.max, 8);
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the configuration has no limit with this name, a caller is given for a shared limit, no caller is given although
    /// a key is required, or the key must be an address and is not.
    pub fn semaphore(&self, limit: &Limit, caller: &str) -> Result<Semaphore, ConfigFileError> {
        let layers = self.0.layers.load();
        let (checked, key, value) = layers.caller(limit.name(), caller)?;
        let path = format!("limits.{}", limit.name());
        let fault = |error: ConfigError| ConfigFileError::of(&path, error.to_string());
        let semaphore = self.0.limiter.semaphore(limit, key).map_err(fault)?;
        Ok(semaphore.with_file_settings(checked.cost(), value))
    }

    /// Like [`semaphore`](Self::semaphore), for a tenant of a [fair](crate::Limit::fair) limit, with the tenant's share.
    ///
    /// The tenant is written as in the file. An empty one stands for all requests without a tenant. A later
    /// [`reload`](Self::reload) does not change the semaphore's share.
    ///
    /// ```
    /// # fn main() -> Result<(), tower_turnstile::config::ConfigFileError> {
    /// use tower_turnstile::{Limiter, config::{Config, LiveConfig}};
    ///
    /// let config = Config::from_toml(
    ///     "
    ///     limits.gpu = { concurrent = 2, wait = '1m', fair = { by = { header = 'x-tenant' }, shares = { acme = 3 } } }
    ///     routes = [{ match = ['/infer'], limits = ['gpu'] }]
    ///     ",
    /// )?;
    /// let live = LiveConfig::new(&config, &Limiter::in_memory())?;
    /// let gpu = live.limit("gpu").expect("it is in the file");
    /// let acme = live.tenant_semaphore(&gpu, "", "acme")?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`semaphore`](Self::semaphore), and an error if the limit is not fair, if no tenant is given although
    /// one is required, or if the tenant must be an address and is not.
    pub fn tenant_semaphore(
        &self,
        limit: &Limit,
        caller: &str,
        tenant: &str,
    ) -> Result<Semaphore, ConfigFileError> {
        let (tenant, share) = self.0.layers.load().tenant(limit.name(), tenant)?;
        let semaphore = self.semaphore(limit, caller)?;
        let semaphore = semaphore
            .tenant(tenant)
            .and_then(|semaphore| semaphore.share(share));
        let path = format!("limits.{}.fair", limit.name());
        semaphore.map_err(|error| ConfigFileError::of(&path, error.to_string()))
    }

    /// Replaces the configuration, all or nothing.
    ///
    /// The new configuration applies at once to new and queued requests, and no held slot is lost. If a limit grows,
    /// waiters are admitted; if a limit shrinks, new requests wait until enough slots have been released. Values of single
    /// callers (plans and overrides) change in the same way; waiters of a caller whose value becomes 0 are refused. A
    /// removed limit ends with its last request. The wait, the key, the tenant and the share of a queued request do not
    /// change. If a limit gets another `key`, requests with old and with new keys count apart, both up to the new value,
    /// until the old ones have ended.
    ///
    /// Reload the other replicas too. While they differ, the largest value of a concurrency limit applies, and each replica
    /// charges a rate by its own value.
    ///
    /// # Errors
    ///
    /// If the configuration has faults, removes all limits without [declaring it](super::Config::unlimited), or changes a
    /// fixed setting: the section `[store]`, whether a limit is a rate, whether it is fair, or a limit's
    /// [`class`](super::LimitConfig::class), which also depends on whether its key is the route. After an error the old configuration stays in force. To change a
    /// fixed setting of a limit, give the limit a new name.
    pub fn reload(&self, config: &Config) -> Result<(), ConfigFileError> {
        let live = &*self.0;
        let mut checked = Checked::new(config)?;
        let mut changing = locked(&live.changing);
        changing.check(config, &checked, &live.limiter)?;
        // A name that is new in this configuration may meanwhile be used in code, for another limit.
        changing.register(&mut checked, &live.limiter)?;
        let known = checked.limits.clone();
        let edits = live.layers.load().edits.clone();
        let layers = RouteLayers::new(config, checked, &live.limiter, edits)?;
        // Keys get values of their own before the limits change, and lose them afterwards: no key has a value in between that
        // neither configuration allows.
        for (name, limit) in &known {
            live.give_values(name, &limit.values);
        }
        let old = { known.iter() }.filter(|(name, _)| changing.known.contains_key(*name));
        let old: Vec<_> = old.map(|(_, known)| &known.limit).collect();
        // `check` has refused what cannot change.
        let updated = live.limiter.keeper().update(&old);
        updated.map_err(|error| ConfigFileError::of("limits", error.to_string()))?;
        live.layers.store(Arc::new(layers));
        changing.config = config.clone();
        for (name, limit) in known {
            if let Some(before) = changing.known.insert(name.clone(), limit) {
                live.take_values(&name, &before.values, &changing.known[&name].values);
            }
        }
        Ok(())
    }
}

impl LimitLayer {
    /// Creates a layer that applies the limits of each request's route.
    ///
    /// Ignores the section `[store]`, because the limiter is already connected. To reload a configuration, use
    /// [`LiveConfig`].
    ///
    /// ```
    /// # fn main() -> Result<(), tower_turnstile::config::ConfigFileError> {
    /// use tower_turnstile::{LimitLayer, Limiter, config::Config};
    ///
    /// let config = Config::from_toml(
    ///     "
    ///     limits.chat = { concurrent = 5, key = { header = 'x-api-key' }, wait = '2s' }
    ///     routes = [{ match = ['POST /chat', '/chat/{*rest}'], limits = ['chat'] }]
    ///     ",
    /// )?;
    /// let layer = LimitLayer::from_config(&config, &Limiter::in_memory())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LiveConfig::new`].
    pub fn from_config(config: &Config, limiter: &Limiter) -> Result<Self, ConfigFileError> {
        Ok(LiveConfig::new(config, limiter)?.layer())
    }
}

impl Live {
    /// Gives keys values of their own.
    fn give_values(&self, name: &str, values: &Values) {
        let values = values
            .iter()
            .map(|(key, value)| (key.clone(), Some(*value)));
        self.limiter.keeper().set_values(name, &values.collect());
    }

    /// Resets keys without an override in `now` to the limit's value.
    fn take_values(&self, name: &str, before: &Values, now: &Values) {
        let keys = before.keys().filter(|key| !now.contains_key(key));
        let values = keys.map(|key| (key.clone(), None));
        self.limiter.keeper().set_values(name, &values.collect());
    }
}

impl Changing {
    /// Checks the settings that cannot change.
    fn check(
        &self,
        config: &Config,
        checked: &Checked,
        limiter: &Limiter,
    ) -> Result<(), ConfigFileError> {
        let mut faults = Faults::default();
        if config.store != self.config.store {
            faults.add(
                "store",
                "cannot change while it is in use: start the service anew",
            );
        }
        for (name, checked) in &checked.limits {
            let may = match self.known.get(name) {
                Some(known) => known.limit.may_become(&checked.limit),
                None => limiter.keeper().check(&checked.limit),
            };
            faults.take(&format!("limits.{name}"), may);
        }
        faults.into_result()
    }

    /// Registers the limits that are not known yet. All checked limits then refer to the limiter's.
    fn register(&self, checked: &mut Checked, limiter: &Limiter) -> Result<(), ConfigFileError> {
        let mut faults = Faults::default();
        for (name, CheckedLimit { limit, .. }) in &mut checked.limits {
            if !self.known.contains_key(name) {
                faults.take(&format!("limits.{name}"), limiter.keeper().register(limit));
            }
            *limit = limit.clone().registered_at(limiter.keeper().replica());
        }
        faults.into_result()
    }
}

impl Routing for Live {
    fn find(&self, method: &Method, path: &str) -> Arc<Gate> {
        self.layers.load().find(method, path)
    }

    fn edit(&self, edit: GateEdit) {
        let _changing = locked(&self.changing);
        let layers = RouteLayers::clone(&self.layers.load());
        self.layers.store(Arc::new(layers.edited(edit)));
    }
}

impl fmt::Debug for LiveConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveConfig")
            .field("config", &locked(&self.0.changing).config)
            .field("limiter", &self.0.limiter)
            .finish()
    }
}
