//! Asks the store one question at a time. A refusal or a missing answer does not prevent other questions.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use redis::{Cmd, FromRedisValue};
use tokio::time::Instant;

use super::finding::{Check, Finding, Health};
use tower_turnstile::operate::seam::{ControlConnection, StoreError};

/// Number of commands without an answer, within all the time allowed, after which the store counts as gone.
const MAX_UNANSWERED: u32 = 3;

/// A store that answers but may refuse.
pub(super) struct Asking<'a> {
    control: &'a ControlConnection,
    /// Time limit of a command.
    patience: Duration,
    unanswered: AtomicU32,
}

/// The outcome of a command: its answer, or why it failed.
pub(super) type Asked<T> = Result<T, StoreError>;

impl<'a> Asking<'a> {
    /// # Errors
    ///
    /// Fails without a connection, because no question can be asked then.
    pub(super) async fn connect(
        control: &'a ControlConnection,
        patience: Duration,
    ) -> Result<Self, StoreError> {
        control.connect_now().await?;
        Ok(Self {
            control,
            patience,
            unanswered: AtomicU32::new(0),
        })
    }

    /// Runs a command.
    ///
    /// # Errors
    ///
    /// Fails if the store has become unreachable.
    pub(super) async fn ask<T: FromRedisValue>(
        &self,
        command: &Cmd,
    ) -> Result<Asked<T>, StoreError> {
        let from = Instant::now();
        let outcome = self.control.run(command).await;
        self.reached(outcome, from).await
    }

    /// Subscribes to a channel.
    ///
    /// # Errors
    ///
    /// Fails if the store has become unreachable.
    pub(super) async fn subscribe(&self, channel: &str) -> Result<Asked<()>, StoreError> {
        let from = Instant::now();
        let outcome = self.control.subscribe(channel).await;
        self.reached(outcome, from).await
    }

    /// Returns the outcome if the store is still reachable.
    async fn reached<T>(&self, outcome: Asked<T>, from: Instant) -> Result<Asked<T>, StoreError> {
        if outcome.as_ref().is_err_and(StoreError::is_outage) {
            // The error may be an answer, for example of a read-only replica or of a proxy that ends the connection.
            self.control.connect_now().await?;
            if from.elapsed() >= self.patience
                && self.unanswered.fetch_add(1, Relaxed) + 1 >= MAX_UNANSWERED
                && let Err(error) = outcome
            {
                return Err(error);
            }
        }
        Ok(outcome)
    }
}

/// A check that could not be made, by the name of its command.
pub(super) fn not_asked(check: Check, command: &str, error: &StoreError) -> Finding {
    let text = format!("cannot be seen: {command}: {error}");
    Finding::new(check, Health::Note, text)
}
