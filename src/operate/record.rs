//! The record of overrides in the store: read by replicas and operators, changed by operators.
//!
//! Tests: `follow.rs`, `operators/tests/operate/`, by theme.

use std::collections::BTreeMap;

use redis::cmd;
use serde_json::json;
use tokio::{join, time::Instant};

use super::names::Names;
use crate::{
    ledger::ReplicaId,
    overrides::{
        Change, Changed, Logged, MAX_ENTRIES, MAX_LOGGED, RECORD_LUA, Record, arguments, logged,
        reply,
    },
    store::{StoreError, redis::control::ControlConnection},
};

/// Fields of the record per reply: all of them, unless the server has a sparse table.
const PAGE: usize = 2 * MAX_ENTRIES;

/// Reads the whole record in one round trip, or two on a new connection. Also returns when the read was sent: the record's
/// times count from then. `HGETALL` is not used, because it would return an unrelated hash of any size in full.
pub(super) async fn read(
    control: &ControlConnection,
    names: &Names,
) -> Result<(Record, Instant), StoreError> {
    if !control.is_connected() {
        // In a cluster this leads to the record's node, whose clock is authoritative.
        let _ = page(control, names, "0").await?;
    }
    let since = Instant::now();
    let (now_ms, first) = join!(control.time_ms(), page(control, names, "0"));
    let now_ms = now_ms?;
    let (mut cursor, page_fields) = first?;
    let mut fields = BTreeMap::from_iter(page_fields);
    while cursor != "0" && fields.len() <= MAX_ENTRIES + 1 {
        let (next, more) = page(control, names, &cursor).await?;
        fields.extend(more);
        cursor = next;
    }
    let record = Record::read(&fields, now_ms);
    let fault = || StoreError::misconfigured("the record of overrides has too many fields");
    Ok((record.ok_or_else(fault)?, since))
}

type Page = (String, Vec<(Vec<u8>, Vec<u8>)>);

async fn page(
    control: &ControlConnection,
    names: &Names,
    cursor: &str,
) -> Result<Page, StoreError> {
    let mut scan = cmd("HSCAN");
    scan.arg(names.record()).arg(cursor).arg("COUNT").arg(PAGE);
    control.run(&scan).await
}

impl Record {
    /// Reads the record.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses, or if the record is none.
    pub async fn of_store(control: &ControlConnection, names: &Names) -> Result<Self, StoreError> {
        Ok(read(control, names).await?.0)
    }
}

impl Change {
    /// Makes the change, and notifies the replicas.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
    pub async fn make(
        &self,
        control: &ControlConnection,
        names: &Names,
    ) -> Result<Changed, StoreError> {
        let channel = names.control_channel();
        let mut eval = cmd("EVAL");
        eval.arg(RECORD_LUA)
            .arg(2)
            .arg(names.record())
            .arg(names.log());
        eval.arg(arguments(self, &channel, &read_again()));
        let words: Vec<String> = control.run(&eval).await?;
        reply(&words).ok_or_else(StoreError::unreadable)
    }
}

/// The notification of a change, from an operator who asks nothing else. The script sets its expiry. Replicas of all versions
/// follow it, so its format stays the first.
fn read_again() -> String {
    let from = ReplicaId::from_bits(u128::from(fastrand::u64(..))).text();
    let ask = "read-again";
    json!({ "v": 1, "from": from, "number": 1, "not_after_ms": 0, "replicas": 0, "ask": ask })
        .to_string()
}

impl Logged {
    /// The latest changes, newest first. Unreadable entries are skipped.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
    pub async fn of_store(
        control: &ControlConnection,
        names: &Names,
    ) -> Result<Vec<Self>, StoreError> {
        let mut range = cmd("LRANGE");
        range.arg(names.log()).arg(0).arg(MAX_LOGGED - 1);
        let entries: Vec<Vec<u8>> = control.run(&range).await?;
        Ok(entries.iter().filter_map(|entry| logged(entry)).collect())
    }
}
