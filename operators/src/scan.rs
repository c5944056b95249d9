//! A bounded scan of the names of a store's keys: who holds slots, and which namespaces exist.
//!
//! Only for the rare case in which replicas report no holders, or no replica answers.
//!
//! Tests: below; `tests/operate/lost_data.rs`, `command_line.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures_util::future::try_join_all;
use redis::cmd;

use super::ledger::{holders, lead_to};
use tower_turnstile::operate::seam::{ControlConnection, Names, StoreError, StoreTarget};

/// Approximate number of names per step.
const PAGE: usize = 1_000;
/// Maximum number of steps for namespaces, in all parts of a cluster together.
const MAX_PAGES: usize = 50;
/// Maximum number of steps for holders, in each part of a cluster. A holder that is overlooked would be taken for none,
/// so this only bounds the time. From Redis 7.4 and Valkey 8 on, a node scans only the hash slot that the pattern of a part
/// names; older ones scan all their keys for each of their parts.
const MAX_HOLDER_PAGES: usize = 2_000;
/// Number of ledgers read concurrently.
const AT_ONCE: usize = 64;
/// Maximum number of namespaces listed.
const MAX_NAMESPACES: usize = 20;

/// Connections for scans, opened anew for each scan.
pub(super) struct Scanner {
    parts: Vec<ScannedPart>,
}

/// A part of a cluster, or an undivided store.
struct ScannedPart {
    target: StoreTarget,
    control: ControlConnection,
}

/// The holders found by a scan.
pub(super) struct Holders {
    /// Units that each replica holds, by the replica's id.
    pub(super) units: BTreeMap<String, u32>,
    /// Whether all keys were scanned.
    pub(super) is_whole: bool,
}

impl Scanner {
    pub(super) fn new(target: StoreTarget, patience: Duration) -> Self {
        let parts = target.parts().into_iter().map(|target| ScannedPart {
            control: ControlConnection::new(&target, patience),
            target,
        });
        Self {
            parts: parts.collect(),
        }
    }

    /// The holders of all slots.
    pub(super) async fn holders(&self, names: &Names) -> Result<Holders, StoreError> {
        let parts = self.parts.iter();
        let looks = parts
            .clone()
            .map(|scanned| scanned.holders(names, MAX_HOLDER_PAGES));
        let outcome = try_join_all(looks).await;
        parts.for_each(|scanned| scanned.control.disconnect());
        let mut all = Holders {
            units: BTreeMap::new(),
            is_whole: true,
        };
        for Holders { units, is_whole } in outcome? {
            all.is_whole &= is_whole;
            all.add(units);
        }
        Ok(all)
    }

    /// The first namespaces that have keys in this database.
    pub(super) async fn namespaces(&self) -> Result<Vec<String>, StoreError> {
        let pages = (MAX_PAGES / self.parts.len()).max(1);
        let mut found = BTreeSet::new();
        for scanned in &self.parts {
            let outcome = scanned.namespaces(pages).await;
            scanned.control.disconnect();
            found.extend(outcome?);
        }
        Ok(found.into_iter().take(MAX_NAMESPACES).collect())
    }
}

impl Holders {
    fn add(&mut self, units: BTreeMap<String, u32>) {
        for (replica, count) in units {
            *self.units.entry(replica).or_default() += count;
        }
    }
}

impl ScannedPart {
    async fn holders(&self, names: &Names, max_pages: usize) -> Result<Holders, StoreError> {
        let control = &self.control;
        let (prefix, roster) = (names.ledgers(&self.target), names.roster().into_bytes());
        // In a cluster the connection leads to this part's node from here on.
        lead_to(control, &prefix).await?;
        let now_ms = control.time_ms().await?;
        let mut scan = Scan::new(control, format!("{prefix}*"));
        let mut found = Holders {
            units: BTreeMap::new(),
            is_whole: false,
        };
        for _ in 0..max_pages {
            let ledgers: Vec<_> = { scan.page().await? }
                .into_iter()
                .filter(|key| *key != roster)
                .collect();
            for some in ledgers.chunks(AT_ONCE) {
                let looks = some.iter().map(|ledger| holders(control, ledger, now_ms));
                for units in try_join_all(looks).await? {
                    found.add(units);
                }
            }
            if scan.is_whole() {
                found.is_whole = true;
                break;
            }
        }
        Ok(found)
    }

    async fn namespaces(&self, pages: usize) -> Result<BTreeSet<String>, StoreError> {
        let mut scan = Scan::new(&self.control, "*{*}*".to_owned());
        let mut found = BTreeSet::new();
        for _ in 0..pages {
            let keys = scan.page().await?;
            found.extend(keys.iter().filter_map(|key| Names::namespace_of(key)));
            if scan.is_whole() {
                break;
            }
        }
        Ok(found)
    }
}

/// A scan of the sorted sets of a node whose names match a pattern.
struct Scan<'a> {
    control: &'a ControlConnection,
    pattern: String,
    /// Where the next step begins; `None` before the first.
    cursor: Option<String>,
}

impl<'a> Scan<'a> {
    fn new(control: &'a ControlConnection, pattern: String) -> Self {
        Self {
            control,
            pattern,
            cursor: None,
        }
    }

    /// The names found by the next step.
    async fn page(&mut self) -> Result<Vec<Vec<u8>>, StoreError> {
        let mut scan = cmd("SCAN");
        scan.arg(self.cursor.as_deref().unwrap_or("0"));
        scan.arg("MATCH").arg(&self.pattern);
        scan.arg("COUNT").arg(PAGE).arg("TYPE").arg("zset");
        let (cursor, names): (String, Vec<Vec<u8>>) = self.control.run(&scan).await?;
        self.cursor = Some(cursor);
        Ok(names)
    }

    /// Whether the last step has ended the scan.
    fn is_whole(&self) -> bool {
        self.cursor.as_deref() == Some("0")
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::redis_server::{GUARD, RedisServer};

    #[tokio::test]
    async fn a_scan_that_is_cut_is_not_whole() {
        let server = RedisServer::start();
        let fill = "for i = 1, 5000 do redis.call('SET', 'filler:' .. i, '') end";
        server.cli(&["EVAL", fill, "0"]);
        let target = StoreTarget::open(&server.url()).expect("a URL");
        let (names, _) =
            Names::of_service("turnstile", Duration::from_secs(1), &target).expect("in range");
        let scanner = Scanner::new(target, GUARD);
        for (pages, is_whole) in [(1, false), (MAX_HOLDER_PAGES, true)] {
            let holders = scanner.parts[0].holders(&names, pages).await;
            let holders = holders.expect("it is up");
            assert_eq!((holders.units.len(), holders.is_whole), (0, is_whole));
        }
    }

    /// One after another, sixteen parts would take sixteen times as long. Here no connection is answered.
    #[tokio::test]
    async fn parts_are_scanned_at_the_same_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("an address"));
        let target = StoreTarget::open(&url).expect("a URL");
        let (names, _) =
            Names::of_service("turnstile", Duration::from_secs(1), &target).expect("in range");
        let parts = (0..16).map(|_| ScannedPart {
            target: target.clone(),
            control: ControlConnection::new(&target, GUARD),
        });
        let scanner = Scanner {
            parts: parts.collect(),
        };
        let all_connect = async {
            let mut connections = Vec::new();
            while connections.len() < scanner.parts.len() {
                connections.push(listener.accept().await.expect("a connection"));
            }
        };
        tokio::select! {
            _ = scanner.holders(&names) => panic!("the first part was not answered"),
            () = all_connect => {}
        }
    }
}
