//! The roster: the existing replicas, so that an operator knows which ones did not answer.
//!
//! A member is a replica's id and label. A replica registers once a minute, and stays on the roster for three. If the
//! store has lost its data, a replica registers again once it notices: because the store has lost its permits, or
//! because a question names fewer replicas than it knows.

use std::time::Duration;

use redis::cmd;
use tokio::try_join;

use super::names::Names;
use crate::{
    ledger::REPLICA_CHARS,
    store::{StoreError, redis::control::ControlConnection},
};

const ROSTER_LUA: &str = include_str!("roster.lua");
/// Time between two registrations.
pub(super) const EVERY: Duration = Duration::from_secs(60);
/// How long a replica stays on the roster, in milliseconds.
const STALE_MS: u64 = 180_000;
/// Maximum number of members read.
const MAX_MEMBERS: u32 = 10_000;

/// Maximum length of a member, in bytes, with a label of 64 characters.
const MAX_MEMBER: usize = REPLICA_CHARS + 4 * 64;

/// A replica on the roster.
pub(super) struct RosterMember {
    pub id: String,
    pub label: String,
}

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

/// The store's time in milliseconds, and the replicas. One round trip, or two on a new connection and in a cluster.
pub(super) async fn read(
    control: &ControlConnection,
    names: &Names,
) -> Result<(u64, Vec<RosterMember>), StoreError> {
    // Plain commands, because a read-only operator may not run scripts.
    let mut range = cmd("ZRANGE");
    range.arg(names.roster()).arg("-inf").arg("+inf");
    range.arg("BYSCORE").arg("LIMIT").arg(0).arg(MAX_MEMBERS);
    let range = range.arg("WITHSCORES");
    // In a cluster the connection may lead to another node, with another clock, until the roster's key leads it back.
    let (members, now_ms): (Vec<(Vec<u8>, f64)>, u64) =
        if control.is_connected() && !names.is_in_cluster() {
            try_join!(control.run(range), time_ms(control))?
        } else {
            (control.run(range).await?, time_ms(control).await?)
        };
    Ok((now_ms, fresh(&members, now_ms)))
}

/// The replicas among the members, by score. Everybody who may write a ledger may write these too.
pub(super) fn fresh(members: &[(Vec<u8>, f64)], now_ms: u64) -> Vec<RosterMember> {
    let is_fresh = |added_ms: f64| (added_ms as u64).abs_diff(now_ms) <= STALE_MS;
    let members = members.iter().filter(|(_, added_ms)| is_fresh(*added_ms));
    let members = members.filter(|(member, _)| member.len() <= MAX_MEMBER);
    let members = members.filter_map(|(member, _)| {
        let (id, label) = member.split_at_checked(REPLICA_CHARS)?;
        Some(RosterMember {
            id: String::from_utf8(id.to_vec()).ok()?,
            label: String::from_utf8_lossy(label).into_owned(),
        })
    });
    members.collect()
}

/// The store's time in milliseconds, from the node that received the last command.
pub(super) async fn time_ms(control: &ControlConnection) -> Result<u64, StoreError> {
    control.run(&cmd("TIME")).await.map(to_ms)
}

/// Converts an answer to `TIME` to milliseconds.
pub(super) fn to_ms((seconds, micros): (u64, u64)) -> u64 {
    seconds.saturating_mul(1_000).saturating_add(micros / 1_000)
}
