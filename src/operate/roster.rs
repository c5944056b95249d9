//! The roster: the existing replicas, so that an operator knows which ones did not answer.
//!
//! A member is a replica's id and label. A replica registers once a minute, and stays on the roster for three. If the
//! store has lost its data, a replica registers again once it notices: because the store has lost its permits, or
//! because a question names fewer replicas than it knows.

use std::time::Duration;

use redis::cmd;

use super::names::Names;
use crate::{
    ledger::layout::STALE_MS,
    store::{StoreError, redis::control::ControlConnection},
};

const ROSTER_LUA: &str = include_str!("roster.lua");
/// Time between two registrations.
pub(super) const EVERY: Duration = Duration::from_secs(60);

/// Adds a replica or removes it. Returns the store's time in milliseconds, and the number of replicas.
pub(super) async fn write(
    control: &ControlConnection,
    names: &Names,
    (id, label): (&str, &str),
    is_there: bool,
) -> Result<(u64, u32), StoreError> {
    let mut eval = cmd("EVAL");
    eval.arg(ROSTER_LUA).arg(1).arg(names.roster());
    eval.arg(format!("{id}{label}")).arg(STALE_MS);
    control.run(eval.arg(u8::from(is_there))).await
}
