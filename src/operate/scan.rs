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

use super::{
    ledger::{holders, lead_to},
    names::Names,
    roster::time_ms,
};
use crate::{
    overrides::KeyDigest,
    part::Part,
    store::{
        StoreError,
        redis::{
            StoreTarget,
            control::{ControlConnection, Inbox},
        },
    },
};

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
    part: Option<Part>,
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
        let parts = target.parts().into_iter().map(|(part, target)| {
            let control = ControlConnection::new(&target, patience, Inbox::new(1, 0).0);
            ScannedPart { part, control }
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
        let (prefix, roster) = (names.ledgers(self.part), names.roster().into_bytes());
        // In a cluster the connection leads to this part's node from here on.
        lead_to(control, &prefix).await?;
        let now_ms = time_ms(control).await?;
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
            found.extend(keys.iter().filter_map(|key| namespace_of(key)));
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

/// The namespace of a ledger or a roster. `None` if the key has another format.
fn namespace_of(key: &[u8]) -> Option<String> {
    let key = str::from_utf8(key).ok()?;
    let (namespace, rest) = key.rsplit_once(":{")?;
    let (tag, rest) = rest.split_once('}')?;
    let is_digest = |text: &str| text.parse::<KeyDigest>().is_ok();
    let is_roster = rest == ":roster" && tag.strip_suffix(":control") == Some(namespace);
    let in_part = || Part::all().any(|part| part.tag() == tag);
    let in_cluster = || rest.strip_prefix(':').is_some_and(is_digest) && in_part();
    let is_ours = is_roster || rest.is_empty() && is_digest(tag) || in_cluster();
    (is_ours && !namespace.is_empty()).then(|| namespace.to_owned())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::redis_server::RedisServer;

    const PATIENCE: Duration = Duration::from_secs(2);

    #[tokio::test]
    async fn a_scan_that_is_cut_is_not_whole() {
        let server = RedisServer::start();
        let fill = "for i = 1, 5000 do redis.call('SET', 'filler:' .. i, '') end";
        server.cli(&["EVAL", fill, "0"]);
        let target = StoreTarget::open(&server.url()).expect("a URL");
        let scanner = Scanner::new(target, PATIENCE);
        let names = Names::new("turnstile", 0);
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
        let parts = Part::all().map(|part| ScannedPart {
            part: Some(part),
            control: ControlConnection::new(&target, PATIENCE, Inbox::new(1, 0).0),
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
        let names = Names::new("turnstile", 0).in_cluster(true);
        tokio::select! {
            _ = scanner.holders(&names) => panic!("the first part was not answered"),
            () = all_connect => {}
        }
    }

    #[test]
    fn keys_of_ours_have_a_namespace() {
        let digest = KeyDigest::of("chat", "acme");
        for namespace in ["turnstile", "shop:eu", "a.b-c_d"] {
            let names = Names::new(namespace, 0);
            let in_cluster = names.clone().in_cluster(true);
            for key in [
                names.roster(),
                names.ledger(digest),
                in_cluster.ledger(digest),
            ] {
                assert_eq!(
                    namespace_of(key.as_bytes()).as_deref(),
                    Some(namespace),
                    "{key}"
                );
            }
            assert_eq!(namespace_of(names.record().as_bytes()), None);
        }
        for other in [
            "",
            "{a}",
            "bull:{queue}:wait",
            "shop:{other:control}:roster",
            "shop:{0123}",
            ":{0123456789abcdef0123456789abcdef}",
            "shop:{no}:0123456789abcdef0123456789abcdef",
        ] {
            assert_eq!(namespace_of(other.as_bytes()), None, "{other}");
        }
        assert_eq!(namespace_of(b"\xff:{a}"), None);
    }
}
