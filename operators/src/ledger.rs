//! Ledgers in the store, including slots of replicas that do not answer.

use std::collections::BTreeMap;

use redis::{Cmd, cmd};

use tower_turnstile::{
    operate::TenantDigest,
    operate::seam::{
        ControlConnection, Names, StoreError,
        layout::{ALIVE, ID_CHARS, IDLE, KEEPING, PACE, PAUSE, RAMP_MS, REPLICA_CHARS, SHARES},
    },
};

/// Maximum number of members read at once.
const MAX_MEMBERS: u32 = 2_000;

/// Holders and waiters of a key.
pub(super) struct LedgerLook {
    pub now_ms: u64,
    pub in_use: u32,
    /// Names, and the ends of their leases in milliseconds on the store's clock.
    pub holders: Vec<(Vec<u8>, f64)>,
    pub waiting: u32,
    /// End of the pause in milliseconds on the store's clock, until its ramp is over.
    pub pause_end_ms: Option<u64>,
}

/// Reads a ledger by several commands, so changes in between may be missed.
pub(super) async fn read(
    control: &ControlConnection,
    ledger: &str,
) -> Result<LedgerLook, StoreError> {
    let waiting = count(control, ledger, "-inf", "(0").await?;
    // From here on the connection leads to the ledger's node.
    let now_ms = control.time_ms().await?;
    let in_use = count(control, ledger, &now_ms.to_string(), &format!("({ALIVE}")).await?;
    let mut range = holding(ledger.as_bytes(), now_ms);
    let holders = control.run(range.arg("WITHSCORES")).await?;
    let (from, end) = ((ALIVE + now_ms).to_string(), format!("({KEEPING}"));
    let mut range = some(ledger.as_bytes(), &from, &end);
    let alive: Vec<(Vec<u8>, f64)> = control.run(range.arg("WITHSCORES")).await?;
    let is_pause =
        |(member, over): &(Vec<u8>, f64)| member == PAUSE.as_bytes() && over.fract() == 0.0;
    let pause = alive.into_iter().find(is_pause);
    let pause_end_ms = pause.map(|(_, over)| (over as u64).saturating_sub(ALIVE + RAMP_MS));
    Ok(LedgerLook {
        now_ms,
        in_use,
        holders,
        waiting,
        pause_end_ms,
    })
}

/// The states of adaptive limits of the first of these ledgers, up to an outage, and the time in milliseconds. `None`: there is none,
/// or it may not be read.
pub(super) async fn paces(
    control: &ControlConnection,
    ledgers: impl Iterator<Item = String>,
) -> (u64, Vec<Option<Vec<u8>>>) {
    let Ok(now_ms) = control.time_ms().await else {
        return (0, Vec::new());
    };
    let mut states = Vec::new();
    for ledger in ledgers {
        let mut get = cmd("GET");
        match control
            .run(get.arg(ledger + PACE))
            .await
            .or_else(unless_down)
        {
            Ok(state) => states.push(state),
            Err(_) => break,
        }
    }
    (now_ms, states)
}

/// The user lacks the permission, unless the store is down.
fn unless_down<T: Default>(error: StoreError) -> Result<T, StoreError> {
    if error.is_outage() {
        Err(error)
    } else {
        Ok(T::default())
    }
}

/// How far tenants of a fair ledger are behind, in milliseconds. `None`: unknown, since nobody has waited of late.
pub(super) async fn debt_ms(
    control: &ControlConnection,
    ledger: &str,
    tenants: &[TenantDigest],
) -> Result<Vec<Option<u64>>, StoreError> {
    let mut scores = cmd("ZMSCORE");
    scores.arg(format!("{ledger}{SHARES}")).arg("");
    for tenant in tenants {
        scores.arg(tenant.to_string());
    }
    let scores: Vec<Option<f64>> = control.run(&scores).await?;
    Ok(behind(&scores))
}

/// The first score is that of virtual time, as `header.lua` says.
pub(super) fn behind(scores: &[Option<f64>]) -> Vec<Option<u64>> {
    let Some((time, paid)) = scores.split_first() else {
        return Vec::new();
    };
    let idle = IDLE as f64;
    let debt_ms = |paid: &Option<f64>| {
        let time_us = (*time)? + idle;
        let paid_us = paid.map_or(0.0, |paid| if paid < idle { paid } else { paid - idle });
        Some((paid_us - time_us).max(0.0).div_euclid(1_000.0) as u64)
    };
    paid.iter().map(debt_ms).collect()
}

/// Sends a command about a key, which in a cluster leads the connection to its node.
pub(super) async fn lead_to(control: &ControlConnection, key: &str) -> Result<(), StoreError> {
    count(control, key, "0", "0").await.map(drop)
}

/// Units that each replica holds in this ledger, by the replica's id.
pub(super) async fn holders(
    control: &ControlConnection,
    ledger: &[u8],
    now_ms: u64,
) -> Result<BTreeMap<String, u32>, StoreError> {
    let members: Vec<Vec<u8>> = control.run(&holding(ledger, now_ms)).await?;
    let mut units = BTreeMap::new();
    for replica in members.iter().filter_map(|member| replica_of(member)) {
        *units.entry(replica).or_default() += 1;
    }
    Ok(units)
}

/// Reads the members of a ledger that hold slots.
fn holding(ledger: &[u8], now_ms: u64) -> Cmd {
    some(ledger, &now_ms.to_string(), &format!("({ALIVE}"))
}

fn some(ledger: &[u8], from: &str, to: &str) -> Cmd {
    let mut range = cmd("ZRANGE");
    range.arg(ledger).arg(from).arg(to);
    range.arg("BYSCORE").arg("LIMIT").arg(0).arg(MAX_MEMBERS);
    range
}

/// The replica's id in a member's name; a heavy permit has several members.
fn replica_of(member: &[u8]) -> Option<String> {
    let name = member.get(..ID_CHARS)?;
    let replica = str::from_utf8(&name[..REPLICA_CHARS]).ok()?;
    Names::is_id(replica).then(|| replica.to_owned())
}

async fn count(
    control: &ControlConnection,
    ledger: &str,
    from: &str,
    to: &str,
) -> Result<u32, StoreError> {
    let mut count = cmd("ZCOUNT");
    control.run(count.arg(ledger).arg(from).arg(to)).await
}
