//! Connecting an operator to a store.

use std::{fmt, time::Duration};

use super::{
    ask::Remote,
    doctor::{self, Finding},
    operator::Operator,
    scan::Scanner,
};
use tower_turnstile::{
    ConfigError,
    operate::seam::{Answer, ControlConnection, Names, StoreTarget},
};

/// Answers waiting to be read: one from each replica, and a few late ones.
const MAX_ANSWERS: usize = 1_024;

/// Configures an [`Operator`].
///
/// | setting | default |
/// | --- | --- |
/// | [`namespace`](Self::namespace) | `turnstile` |
/// | [`store_timeout`](Self::store_timeout) | 2 s |
#[derive(Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct OperatorBuilder {
    namespace: String,
    store_timeout: Duration,
}

impl Default for OperatorBuilder {
    fn default() -> Self {
        Self {
            namespace: "turnstile".to_owned(),
            store_timeout: Duration::from_secs(2),
        }
    }
}

impl fmt::Debug for OperatorBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorBuilder")
            .field("store_timeout", &self.store_timeout)
            .finish_non_exhaustive()
    }
}

impl Operator {
    /// Connects to the store at this URL, with the default settings.
    ///
    /// # Errors
    ///
    /// See [`OperatorBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, ConfigError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for an operator with other settings.
    pub fn builder() -> OperatorBuilder {
        OperatorBuilder::default()
    }
}

impl OperatorBuilder {
    /// Sets the prefix of the service's keys and channels. Default: `turnstile`.
    ///
    /// Must match the limiters' namespace: see [`LimiterBuilder::namespace`](tower_turnstile::LimiterBuilder::namespace).
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets the time limit for a command of the store. Default: 2 s.
    pub fn store_timeout(mut self, store_timeout: Duration) -> Self {
        self.store_timeout = store_timeout;
        self
    }

    /// Connects to the store at this URL. All URLs of [`LimiterBuilder::connect`](tower_turnstile::LimiterBuilder::connect) are accepted, except `memory:`.
    ///
    /// The connection belongs to the current Tokio runtime. If it ends, the next call reconnects. A call on another
    /// runtime can reconnect too, once the first runtime has ended or no longer drives the connection.
    ///
    /// # Errors
    ///
    /// Fails if a setting is out of range, the URL cannot be used, the store cannot be reached
    /// ([`ConfigErrorKind::Unreachable`]) or refuses the credentials or the channel of answers
    /// ([`ConfigErrorKind::Permission`]), or the caller is not on a Tokio runtime with timers and IO.
    ///
    /// [`ConfigErrorKind::Unreachable`]: tower_turnstile::ConfigErrorKind::Unreachable
    /// [`ConfigErrorKind::Permission`]: tower_turnstile::ConfigErrorKind::Permission
    pub async fn connect(self, url: &str) -> Result<Operator, ConfigError> {
        self.on_target(StoreTarget::open(url)?).await
    }

    /// Connects with a client of the [`redis`] crate: see [`LimiterBuilder::connect_client`](tower_turnstile::LimiterBuilder::connect_client).
    ///
    /// # Errors
    ///
    /// See [`connect`](Self::connect), except for errors of the URL.
    pub async fn connect_client(self, client: redis::Client) -> Result<Operator, ConfigError> {
        self.on_target(client.into()).await
    }

    /// Checks the store at this URL and the replicas, and reports what is wrong with them.
    ///
    /// Uses the given user's permissions, whether a service's or an operator's. It runs the services' script, in a cluster
    /// for each of its parts: two replicas acquire, hand over and release a slot, on a separate key that is removed
    /// afterwards, or expires soon if a step fails. Nothing else is changed. The check sends some eighty commands to the
    /// store, scans up to 50,000 keys, of which it looks at a hundred, and asks the replicas twice if permitted.
    ///
    /// Checks are independent: a command that the store refuses or does not answer becomes a finding.
    ///
    /// # Errors
    ///
    /// See [`connect`](Self::connect), except for missing permissions.
    pub async fn diagnose(self, url: &str) -> Result<Vec<Finding>, ConfigError> {
        let target = StoreTarget::open(url)?;
        let (names, _) = Names::of_service(&self.namespace, self.store_timeout, &target)?;
        let control = ControlConnection::new(&target, self.store_timeout);
        let findings =
            doctor::store(&control, (url, target.clone()), &names, self.store_timeout).await;
        let mut findings = findings?;
        match self.on_target(target).await {
            Ok(operator) => findings.extend(doctor::replicas(&operator).await),
            Err(error) => findings.push(doctor::without_operator(&error)),
        }
        Ok(findings)
    }

    async fn on_target(self, target: StoreTarget) -> Result<Operator, ConfigError> {
        let patience = self.store_timeout;
        let (names, id) = Names::of_service(&self.namespace, patience, &target)?;
        let (control, received) =
            ControlConnection::with_inbox(&target, patience, MAX_ANSWERS, Answer::MAX);
        let scanner = Scanner::new(target, patience);
        let remote = Remote::connect(control, names, scanner, id, received).await?;
        Ok(Operator::of_store(remote))
    }
}
