//! What the package of the operators needs of this one: the messages between operators and replicas, and what both read
//! in the store. It is no part of the public interface: that package requires exactly this version.

use std::time::Duration;

use tokio::runtime::Handle;

use crate::{
    builder::{LimiterBuilder, refused},
    error::ConfigError,
    keeper::ConnectError,
    limit::{Limit, LimitValue},
};

pub use crate::{
    ledger::layout,
    operate::{
        desk::Desk,
        names::Names,
        roster::{Declared, Others, Registration},
        rows::{
            BudgetRow, KeyRow, LimitRow, PaceRow, PauseRow, PermitRow, PermitState, RefusalRow,
            ReplicaRow, TenantRow,
        },
        wire::{Answer, Body, Message, Question, Revocation},
    },
    overrides::{Change, Changed, Logged, Record, Signed},
    store::{
        StoreError,
        redis::{StoreTarget, control::ControlConnection},
    },
};

impl Names {
    /// The names of a service, and a new id for its operator.
    ///
    /// # Errors
    ///
    /// Fails if a setting is out of the range of a limiter's, or without a Tokio runtime.
    pub fn of_service(
        namespace: &str,
        store_timeout: Duration,
        target: &StoreTarget,
    ) -> Result<(Self, String), ConfigError> {
        let builder = LimiterBuilder::default().namespace(namespace);
        let settings = builder
            .store_timeout(store_timeout)
            .settings(target.layout())?;
        if Handle::try_current().is_err() {
            return Err(refused(ConnectError::NoRuntime));
        }
        Ok((Self::new(namespace, target), settings.replica.text()))
    }
}

impl LimitRow {
    /// Checks that a limit, as replicas describe it, can have this value.
    ///
    /// # Errors
    ///
    /// Fails if it cannot.
    #[doc(hidden)]
    pub fn check_value(&self, value: LimitValue) -> Result<(), ConfigError> {
        let name = self.limit.clone();
        let limit = match self.period_ms {
            Some(period_ms) => Limit::try_rate(name, self.max, Duration::from_millis(period_ms)),
            None => Limit::try_concurrent(name, self.max),
        };
        // Everybody who may publish may answer, so the row may describe no limit.
        limit.map_or(Ok(()), |limit| limit.check_value(value))
    }
}

impl From<StoreError> for ConfigError {
    fn from(error: StoreError) -> Self {
        if error.is_outage() {
            Self::unreachable(error)
        } else {
            refused(ConnectError::Store(error))
        }
    }
}
