//! The roster, as operators read it: the existing replicas, so that it is known which ones did not answer.

use redis::cmd;
use tokio::try_join;
use tower_turnstile::operate::seam::{
    ControlConnection, Names, StoreError,
    layout::{REPLICA_CHARS, STALE_MS},
};

/// Maximum number of members read.
const MAX_MEMBERS: u32 = 10_000;

/// Maximum length of a member, in bytes, with a label of 64 characters.
const MAX_MEMBER: usize = REPLICA_CHARS + 4 * 64;

/// A replica on the roster.
pub(super) struct RosterMember {
    pub id: String,
    pub label: String,
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
            try_join!(control.run(range), control.time_ms())?
        } else {
            (control.run(range).await?, control.time_ms().await?)
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
