//! Connecting an operator to a store.

use std::{fmt, time::Duration};

use tokio::runtime::Handle;

use super::{
    ask::Remote,
    desk::MAX_ANSWER,
    doctor::{self, Finding},
    names::Names,
    operator::Operator,
    scan::Scanner,
};
use crate::{
    builder::{LimiterBuilder, refused, shown_namespace},
    error::{ConfigError, ConfigErrorKind},
    keeper::ConnectError,
    ledger::ReplicaId,
    store::{
        StoreError,
        redis::{
            StoreTarget,
            control::{ControlConnection, Inbox},
        },
    },
};

/// Answers that wait to be read: one of each replica, and some that are late.
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
            .field("namespace", &shown_namespace(&self.namespace))
            .field("store_timeout", &self.store_timeout)
            .finish()
    }
}

impl Operator {
    /// Connects to the store at this URL, with the default settings.
    ///
    /// # Errors
    ///
    /// Those of [`OperatorBuilder::connect`].
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
    /// It has to be the limiters': see [`LimiterBuilder::namespace`].
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets the longest time that the store has for a command. Default: 2 s.
    pub fn store_timeout(mut self, store_timeout: Duration) -> Self {
        self.store_timeout = store_timeout;
        self
    }

    /// Connects to the store at this URL: one of those that [`LimiterBuilder::connect`] takes, except `memory:`.
    ///
    /// The connection belongs to the current Tokio runtime. If it ends, the next call makes a new one: also a call on
    /// another runtime, once the first one has ended or nothing drives it.
    ///
    /// # Errors
    ///
    /// If a setting is out of range, the URL cannot be used, the store cannot be reached ([`ConfigErrorKind::Unreachable`])
    /// or refuses the credentials or the channel of answers ([`ConfigErrorKind::Permission`]), or there is no Tokio runtime
    /// with timers and IO.
    pub async fn connect(self, url: &str) -> Result<Operator, ConfigError> {
        self.on_target(StoreTarget::open(url)?).await
    }

    /// Connects with a client of the [`redis`] crate: see [`LimiterBuilder::connect_client`].
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), except for the URL.
    pub async fn connect_client(self, client: redis::Client) -> Result<Operator, ConfigError> {
        self.on_target(client.into()).await
    }

    /// Looks at the store at this URL and at the replicas, and says what is wrong with them.
    ///
    /// It takes the user's rights as they are, of a service or an operator. It runs the script that services run: two
    /// replicas acquire, hand over and release a slot, on a key of their own that is gone then, or soon if something fails.
    /// Nothing else is changed. It asks the store some eighty times, scans up to 50,000 keys, and asks the replicas twice if
    /// the user may.
    ///
    /// Each check stands alone: what the store refuses, or does not answer, is a finding.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), but for the rights.
    pub async fn diagnose(self, url: &str) -> Result<Vec<Finding>, ConfigError> {
        let target = StoreTarget::open(url)?;
        let (names, _) = self.names(&target)?;
        let control = ControlConnection::new(&target, self.store_timeout, Inbox::new(1, 0).0);
        let targets = [StoreTarget::open(url)?, StoreTarget::open(url)?];
        let mut findings = doctor::store(&control, targets, &names, self.store_timeout)
            .await
            .map_err(not_connected)?;
        match self.on_target(target).await {
            Ok(operator) => findings.extend(doctor::replicas(&operator).await),
            Err(error) => findings.push(doctor::without_operator(&error)),
        }
        Ok(findings)
    }

    /// The names in the store, and the operator's own.
    fn names(&self, target: &StoreTarget) -> Result<(Names, String), ConfigError> {
        // The same ranges as for a limiter.
        let settings = LimiterBuilder::default()
            .namespace(&self.namespace)
            .store_timeout(self.store_timeout)
            .settings(None)?;
        if Handle::try_current().is_err() {
            return Err(refused(ConnectError::NoRuntime));
        }
        let names = Names::new(&settings.namespace, target.db()).in_cluster(target.is_cluster());
        Ok((names, ReplicaId::text(settings.replica)))
    }

    async fn on_target(self, target: StoreTarget) -> Result<Operator, ConfigError> {
        let (names, id) = self.names(&target)?;
        let (inbox, received) = Inbox::new(MAX_ANSWERS, MAX_ANSWER);
        let control = ControlConnection::new(&target, self.store_timeout, inbox);
        let scanner = Scanner::new(target, self.store_timeout);
        let remote = Remote::connect(control, names, scanner, id, received).await;
        remote.map(Operator::of_store).map_err(not_connected)
    }
}

fn not_connected(error: StoreError) -> ConfigError {
    match error.is_outage() {
        true => ConfigError::new(
            ConfigErrorKind::Unreachable,
            format!("the store cannot be reached: {error}"),
        ),
        false => refused(ConnectError::Store(error)),
    }
}
