//! A configuration in use, which can be reloaded.
//!
//! Tests: `tests/config/reloads.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use http::Method;

use super::{
    check::Checked,
    error::{ConfigFileError, Faults},
    layers::RouteLayers,
    sections::Config,
};
use crate::{
    error::ConfigError,
    key::Key,
    layer::{GateEdit, Gates, LimitLayer, Routing},
    limit::{Limit, LimitValue},
    limiter::Limiter,
    semaphore::Semaphore,
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

/// State that only a change needs.
struct Changing {
    config: Config,
    /// Limits at the limiter, whether they are still in the configuration or not.
    known: BTreeMap<String, Known>,
}

#[derive(Clone)]
struct Known {
    limit: Limit,
    /// Of the callers that have a value of their own.
    values: HashMap<Key, LimitValue>,
}

impl LiveConfig {
    /// Connects to the store that the configuration names.
    ///
    /// # Errors
    ///
    /// If the configuration has faults, and those of [`StoreConfig::connect`](super::StoreConfig::connect).
    pub async fn connect(config: &Config) -> Result<Self, ConfigFileError> {
        config.validate()?;
        Self::new(config, &config.store.connect().await?)
    }

    /// Uses this limiter and ignores the section `[store]`.
    ///
    /// # Errors
    ///
    /// If the configuration has faults, or the limiter knows a limit of the same name and different values.
    pub fn new(config: &Config, limiter: &Limiter) -> Result<Self, ConfigFileError> {
        let mut checked = Checked::new(config)?;
        let mut known = BTreeMap::new();
        apply(limiter, &mut known, &mut checked)?;
        let layers = RouteLayers::new(config, checked, limiter, Vec::new())?;
        Ok(Self(Arc::new(Live {
            limiter: limiter.clone(),
            layers: ArcSwap::from_pointee(layers),
            changing: Mutex::new(Changing {
                config: config.clone(),
                known,
            }),
        })))
    }

    /// The layers that are in force now.
    pub(super) fn layers(&self) -> Arc<RouteLayers> {
        self.0.layers.load_full()
    }

    /// Returns the limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// Returns a layer that applies the limits of each request's route, also after a [`reload`](Self::reload).
    ///
    /// Settings of the layer, such as [`refuse_with`](LimitLayer::refuse_with), apply to all routes and all layers of this
    /// configuration, and take precedence over the file. Make them once, not for each connection: they are kept.
    pub fn layer(&self) -> LimitLayer {
        LimitLayer::routed(self.0.clone())
    }

    /// Returns the limit of this name, for a [`Semaphore`](crate::Semaphore) or a layer in code.
    ///
    /// These always have the latest values, whenever they are created, even if a reload runs at the same time or has removed
    /// the limit. Only the wait is that of this call. A layer in code does not know the plans and overrides of the file: see
    /// [`Scope::values`](crate::Scope::values).
    pub fn limit(&self, name: &str) -> Option<Limit> {
        self.0.layers.load().limit(name)
    }

    /// Returns the limits of these names, all from the same configuration. `None`: it lacks one of them.
    ///
    /// Otherwise like [`limit`](Self::limit).
    ///
    /// ```
    /// # fn main() -> Result<(), tower_turnstile::config::ConfigFileError> {
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
    /// let jobs = live.limiter().semaphore(limits, "acme");
    /// # Ok(())
    /// # }
    /// ```
    pub fn limits<const N: usize>(&self, names: [&str; N]) -> Option<[Limit; N]> {
        let layers = self.0.layers.load();
        let limits: Option<Vec<_>> = names.iter().map(|name| layers.limit(name)).collect();
        limits?.try_into().ok()
    }

    /// Creates a semaphore of one of these limits for a caller, with the value that a plan or an override gives it.
    ///
    /// For work that is no request, such as a job, under the same limit as requests. The caller is written as in the file:
    /// the value of the header, the client's address, or the name of the route. Empty stands for all that have no
    /// key, and for everybody under a limit that all share.
    ///
    /// A later [`reload`](Self::reload) changes the limit's value, and not the caller's own: make the semaphore anew for
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
    /// If the configuration has no limit of this name, a caller is named under a limit that all share, none is named where
    /// a key is required, or the key is no address and has to be one.
    pub fn semaphore(&self, limit: &Limit, caller: &str) -> Result<Semaphore, ConfigFileError> {
        let (key, value) = self.0.layers.load().caller(limit.name(), caller)?;
        let path = format!("limits.{}", limit.name());
        let fault = |error: ConfigError| ConfigFileError::of(&path, error.to_string());
        let semaphore = self.0.limiter.try_semaphore(limit, key).map_err(fault)?;
        match value {
            Some(value) => semaphore.try_value(value).map_err(fault),
            None => Ok(semaphore),
        }
    }

    /// Replaces the configuration, all or nothing.
    ///
    /// It applies at once to new and queued requests, and no held slot is lost. If a limit grows, waiters are admitted; if it
    /// shrinks, new requests wait until enough slots have been released. The same goes for values of single callers (plans
    /// and overrides). A limit that is removed ends with its last request. The wait and the key of a queued request do
    /// not change.
    ///
    /// Reload the other replicas too. While they differ, the largest value of a limit applies.
    ///
    /// # Errors
    ///
    /// If it has faults, removes all limits without [saying so](super::Config::unlimited), or changes what cannot change:
    /// the section `[store]`, whether a limit is a rate, and its [`class`](super::LimitConfig::class), which also depends on
    /// whether its key is the route. Then nothing changes. A limit of another name can be anything.
    pub fn reload(&self, config: &Config) -> Result<(), ConfigFileError> {
        self.0.reload(config)
    }
}

impl LimitLayer {
    /// Creates a layer that applies the limits of each request's route.
    ///
    /// It ignores the section `[store]`, because the limiter is connected already. For a configuration that is reloaded
    /// see [`LiveConfig`].
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
    /// Those of [`LiveConfig::new`].
    pub fn from_config(config: &Config, limiter: &Limiter) -> Result<Self, ConfigFileError> {
        Ok(LiveConfig::new(config, limiter)?.layer())
    }
}

impl Live {
    fn reload(&self, config: &Config) -> Result<(), ConfigFileError> {
        let mut checked = Checked::new(config)?;
        let mut changing = self.changing();
        changing.check(config, &checked, &self.limiter)?;
        let before = changing.known.clone();
        let edits = self.layers.load().edits();
        let layers = apply(&self.limiter, &mut changing.known, &mut checked)
            .and_then(|()| RouteLayers::new(config, checked, &self.limiter, edits));
        match layers {
            Ok(layers) => {
                self.layers.store(Arc::new(layers));
                changing.config = config.clone();
                for name in config.limits.keys() {
                    let [before, known] = [&before, &changing.known].map(|known| known.get(name));
                    let values = listed_values(before, known);
                    self.limiter.keepers().set_values(name, &values);
                }
                Ok(())
            }
            Err(error) => {
                // The program has another limit of a name that is new here.
                for (name, known) in before {
                    let _ = self.limiter.update(&known.limit);
                    changing.known.insert(name, known);
                }
                Err(error)
            }
        }
    }

    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Changing {
    /// Settings that cannot change.
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
                None => limiter.keepers().check(&checked.limit),
            };
            faults.take(&format!("limits.{name}"), may);
        }
        faults.into_result()
    }
}

/// The new values of keys that a configuration lists, or did before. `None`: the limit's own value.
fn listed_values(
    before: Option<&Known>,
    known: Option<&Known>,
) -> HashMap<Key, Option<LimitValue>> {
    let [before, values] = [before, known].map(|known| known.map(|known| &known.values));
    let keys = [before, values].into_iter().flatten().flatten();
    let now = |key: &Key| values.and_then(|values| values.get(key)).copied();
    keys.map(|(key, _)| (key.clone(), now(key))).collect()
}

/// Gives the limiter all new limits and new values, or none. From then on the checked limits are the limiter's.
fn apply(
    limiter: &Limiter,
    known: &mut BTreeMap<String, Known>,
    checked: &mut Checked,
) -> Result<(), ConfigFileError> {
    let mut faults = Faults::default();
    let limits = checked
        .limits
        .iter()
        .map(|(name, checked)| (name, &checked.limit));
    let (old, new): (Vec<_>, Vec<_>) = limits
        .clone()
        .partition(|(name, _)| known.contains_key(*name));
    for (name, limit) in new {
        faults.take(&format!("limits.{name}"), limiter.keepers().register(limit));
    }
    let old: Vec<&Limit> = old.into_iter().map(|(_, limit)| limit).collect();
    if faults.is_empty() {
        faults.take("limits", limiter.keepers().update(&old));
    }
    faults.into_result()?;
    for (name, checked) in &mut checked.limits {
        checked.limit = checked
            .limit
            .clone()
            .registered_at(limiter.keepers().replica());
        let values = checked.values.clone();
        let limit = checked.limit.clone();
        known.insert(name.clone(), Known { limit, values });
    }
    Ok(())
}

impl Routing for Live {
    fn find(&self, method: &Method, path: &str) -> Gates {
        self.layers.load().find(method, path)
    }

    fn edit(&self, edit: GateEdit) {
        let _changing = self.changing();
        let layers = RouteLayers::clone(&self.layers.load());
        self.layers.store(Arc::new(layers.edited(edit)));
    }
}

impl fmt::Debug for LiveConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveConfig")
            .field("config", &self.0.changing().config)
            .field("limiter", &self.0.limiter)
            .finish()
    }
}
