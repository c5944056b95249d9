//! The ledger of one key, as the store has it: also what belongs to replicas that do not answer.

use redis::{FromRedisValue, cmd, from_redis_value};

use super::roster::{time_ms, unreadable};
use crate::store::{StoreError, redis::control::ControlConnection};

/// Most holders that are read.
const MAX_HOLDERS: u32 = 2_000;
/// Scores from here on are no holders: see the table of the guide.
const HOLDING_END: &str = "(2251799813685248";

/// Holders and waiters of a key.
pub(super) struct LedgerLook {
    pub now_ms: u64,
    pub in_use: u32,
    /// Names, and when their leases end, in milliseconds of the store's clock.
    pub holders: Vec<(Vec<u8>, f64)>,
    pub waiting: u32,
}

/// Reads a ledger by a few commands: what changes in between may be missed.
pub(super) async fn read(
    control: &ControlConnection,
    ledger: &str,
) -> Result<LedgerLook, StoreError> {
    let waiting = count(control, ledger, "-inf", "(0").await?;
    // Now the connection leads to the node that has the ledger.
    let now_ms = time_ms(control).await?;
    let from = now_ms.to_string();
    let in_use = count(control, ledger, &from, HOLDING_END).await?;
    let mut range = cmd("ZRANGE");
    range.arg(ledger).arg(&from).arg(HOLDING_END);
    range.arg("BYSCORE").arg("LIMIT").arg(0).arg(MAX_HOLDERS);
    let holders = typed(control.run(range.arg("WITHSCORES")).await?)?;
    Ok(LedgerLook {
        now_ms,
        in_use,
        holders,
        waiting,
    })
}

async fn count(
    control: &ControlConnection,
    ledger: &str,
    from: &str,
    to: &str,
) -> Result<u32, StoreError> {
    let mut count = cmd("ZCOUNT");
    typed(control.run(count.arg(ledger).arg(from).arg(to)).await?)
}

fn typed<T: FromRedisValue>(value: redis::Value) -> Result<T, StoreError> {
    from_redis_value(value).map_err(|_| unreadable())
}
