//! The roster: which replicas there are, so that an operator knows who did not answer.
//!
//! A member is a replica's id and label. It is added once a minute, and counts for three. If the store has lost its data, a
//! replica adds itself again once it notices: by permits of its own that the store has lost, or by a question to fewer
//! replicas than it knows.

use std::time::Duration;

use redis::{cmd, from_redis_value};

use super::names::Names;
use crate::store::{StoreError, StoreErrorKind, redis::control::ControlConnection};

const ROSTER_LUA: &str = include_str!("roster.lua");
/// How often a replica is added.
pub(super) const EVERY: Duration = Duration::from_secs(60);
/// Time after which a replica is off the roster, in milliseconds.
const STALE_MS: u64 = 180_000;
/// Most members that are read.
const MAX_MEMBERS: u32 = 10_000;

/// Characters of a replica's id.
const ID_CHARS: usize = 16;
/// Longest member, in bytes: of a label of 64 characters.
const MAX_MEMBER: usize = ID_CHARS + 4 * 64;

/// A replica on the roster.
pub(super) struct RosterMember {
    pub id: String,
    pub label: String,
}

/// Adds a replica, or takes it off. Returns the store's time in milliseconds, and how many replicas there are.
pub(super) async fn write(
    control: &ControlConnection,
    names: &Names,
    (id, label): (&str, &str),
    is_there: bool,
) -> Result<(u64, u32), StoreError> {
    let member = format!("{id}{label}");
    let is_there: &[u8] = if is_there { b"1" } else { b"0" };
    let stale_ms = STALE_MS.to_string();
    let arguments = [member.as_bytes(), stale_ms.as_bytes(), is_there];
    let written = control
        .eval(ROSTER_LUA, &names.roster(), &arguments)
        .await?;
    from_redis_value(written).map_err(|_| unreadable())
}

/// The store's time in milliseconds, and the replicas.
pub(super) async fn read(
    control: &ControlConnection,
    names: &Names,
) -> Result<(u64, Vec<RosterMember>), StoreError> {
    // Plain commands: an operator who only reads may not run scripts.
    let mut range = cmd("ZRANGE");
    range.arg(names.roster()).arg("-inf").arg("+inf");
    range.arg("BYSCORE").arg("LIMIT").arg(0).arg(MAX_MEMBERS);
    let members = control.run(range.arg("WITHSCORES")).await?;
    let members: Vec<(Vec<u8>, f64)> = from_redis_value(members).map_err(|_| unreadable())?;
    let now_ms = time_ms(control).await?;
    Ok((now_ms, fresh(&members, now_ms)))
}

/// The replicas among the members, by their scores. Anybody who may write a ledger may write these.
pub(super) fn fresh(members: &[(Vec<u8>, f64)], now_ms: u64) -> Vec<RosterMember> {
    let is_fresh = |added_ms: f64| (added_ms as u64).saturating_add(STALE_MS) >= now_ms;
    let members = members.iter().filter(|(_, added_ms)| is_fresh(*added_ms));
    let members = members.filter(|(member, _)| member.len() <= MAX_MEMBER);
    let members = members.filter_map(|(member, _)| {
        let (id, label) = member.split_at_checked(ID_CHARS)?;
        Some(RosterMember {
            id: String::from_utf8(id.to_vec()).ok()?,
            label: String::from_utf8_lossy(label).into_owned(),
        })
    });
    members.collect()
}

/// The store's time in milliseconds: of the node that the last command went to.
pub(super) async fn time_ms(control: &ControlConnection) -> Result<u64, StoreError> {
    let time = control.run(&cmd("TIME")).await?;
    from_redis_value(time).map(to_ms).map_err(|_| unreadable())
}

/// An answer to `TIME` in milliseconds.
pub(super) fn to_ms((seconds, micros): (u64, u64)) -> u64 {
    seconds.saturating_mul(1_000).saturating_add(micros / 1_000)
}

pub(super) fn unreadable() -> StoreError {
    StoreError {
        kind: StoreErrorKind::Misconfigured,
        message: "the store's answer to an operator cannot be read".to_owned(),
    }
}
