//! A bounded scan of the names of a store's keys: who holds slots, and which namespaces exist.
//!
//! Only for the rare case in which replicas report no holders, or no replica answers.
//!
//! Tests: below; `tests/operate/lost_data.rs`, `namespaces.rs`.

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
/// Maximum number of steps: for holders, in each part of a cluster; for namespaces, in all parts together.
const MAX_PAGES: usize = 50;
/// Number of ledgers read concurrently.
const AT_ONCE: usize = 64;
/// Maximum number of namespaces listed.
const MAX_NAMESPACES: usize = 20;

/// Connections for scans, opened anew for each scan.
pub(super) struct Scanner(Vec<ScannedPart>);

/// A part of a cluster, or an undivided store.
struct ScannedPart {
    part: Option<Part>,
    control: ControlConnection,
}

impl Scanner {
    pub(super) fn new(target: StoreTarget, patience: Duration) -> Self {
        let parts = target.parts().into_iter().map(|(part, target)| {
            let control = ControlConnection::new(&target, patience, Inbox::new(1, 0).0);
            ScannedPart { part, control }
        });
        Self(parts.collect())
    }

    /// Units that each replica holds, by the replica's id.
    pub(super) async fn holders(&self, names: &Names) -> Result<BTreeMap<String, u32>, StoreError> {
        let mut units = BTreeMap::new();
        for scanned in &self.0 {
            let outcome = scanned.holders(names, &mut units).await;
            scanned.control.disconnect();
            outcome?;
        }
        Ok(units)
    }

    /// The first namespaces that have keys in this database.
    pub(super) async fn namespaces(&self) -> Result<Vec<String>, StoreError> {
        let pages = (MAX_PAGES / self.0.len()).max(1);
        let mut found = BTreeSet::new();
        for scanned in &self.0 {
            let outcome = scan(&scanned.control, "*{*}*", pages).await;
            scanned.control.disconnect();
            found.extend(outcome?.iter().filter_map(|key| namespace_of(key)));
        }
        Ok(found.into_iter().take(MAX_NAMESPACES).collect())
    }
}

impl ScannedPart {
    async fn holders(
        &self,
        names: &Names,
        units: &mut BTreeMap<String, u32>,
    ) -> Result<(), StoreError> {
        let control = &self.control;
        let prefix = names.ledgers(self.part);
        // In a cluster the connection leads to this part's node from here on.
        lead_to(control, &prefix).await?;
        let now_ms = time_ms(control).await?;
        let ledgers = scan(control, &format!("{prefix}*"), MAX_PAGES).await?;
        let roster = names.roster().into_bytes();
        let ledgers: Vec<_> = ledgers.into_iter().filter(|key| *key != roster).collect();
        for some in ledgers.chunks(AT_ONCE) {
            let looks = some.iter().map(|ledger| holders(control, ledger, now_ms));
            for (replica, count) in try_join_all(looks).await?.into_iter().flatten() {
                *units.entry(replica).or_default() += count;
            }
        }
        Ok(())
    }
}

/// The keys of a node that match the pattern, up to a number.
async fn scan(
    control: &ControlConnection,
    pattern: &str,
    pages: usize,
) -> Result<Vec<Vec<u8>>, StoreError> {
    let (mut cursor, mut keys) = ("0".to_owned(), Vec::new());
    for _ in 0..pages {
        let mut scan = cmd("SCAN");
        scan.arg(&cursor).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(PAGE).arg("TYPE").arg("zset");
        let (next, some): (String, Vec<Vec<u8>>) = control.run(&scan).await?;
        keys.extend(some);
        if next == "0" {
            break;
        }
        cursor = next;
    }
    Ok(keys)
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
    use super::*;

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
