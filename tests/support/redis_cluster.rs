//! A Redis Cluster for tests.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::Duration,
};

pub(crate) use super::redis_server::until;
use super::redis_server::{GUARD, RedisServer};

const SLOTS: u32 = 16_384;

/// Servers that share the hash slots evenly, some with replicas. Killed when dropped.
pub(crate) struct RedisCluster {
    pub(crate) primaries: Vec<RedisServer>,
    pub(crate) replicas: Vec<RedisServer>,
}

impl RedisCluster {
    /// With this many replicas per primary.
    pub(crate) fn start(primaries: usize, replicas: usize) -> Self {
        let nodes = |count| (0..count).map(|_| start_node()).collect::<Vec<_>>();
        let cluster = Self {
            primaries: nodes(primaries),
            replicas: nodes(primaries * replicas),
        };
        let ends = |number: usize| SLOTS * number as u32 / primaries as u32;
        for (number, node) in cluster.primaries.iter().enumerate() {
            let slots: Vec<_> = (ends(number)..ends(number + 1))
                .map(|slot| slot.to_string())
                .collect();
            let mut add = vec!["CLUSTER", "ADDSLOTS"];
            add.extend(slots.iter().map(String::as_str));
            node.cli(&add);
            node.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
        }
        // Otherwise they would wait for each other's gossip.
        let nodes: Vec<_> = cluster.nodes().collect();
        for (number, node) in nodes.iter().enumerate() {
            let port = node.port().to_string();
            for earlier in &nodes[..number] {
                earlier.cli(&["CLUSTER", "MEET", "127.0.0.1", &port]);
            }
        }
        cluster.until_all_know_all();
        for (number, node) in cluster.replicas.iter().enumerate() {
            let of = id(&cluster.primaries[number % primaries]);
            // The node may not know its primary yet.
            until("a replica follows", || {
                node.try_cli(&["CLUSTER", "REPLICATE", &of]).is_ok()
            });
            until("a replica is in step", || {
                node.cli(&["INFO", "replication"])
                    .contains("master_link_status:up")
            });
        }
        cluster.until_all_know_all();
        if replicas > 0 {
            cluster.notice_deaths_after(Duration::from_secs(1));
        }
        cluster
    }

    /// A node without an answer for this long counts as dead, and a replica takes over: initially much longer than a machine
    /// stalls.
    pub(crate) fn notice_deaths_after(&self, time: Duration) {
        let time = time.as_millis().to_string();
        for node in self.nodes() {
            // The node that is dead does not answer.
            let _ = node.try_cli(&["CONFIG", "SET", "cluster-node-timeout", &time]);
        }
    }

    /// A cluster of three nodes, shared by all concurrent users.
    pub(crate) fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<RedisCluster>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let cluster = Arc::new(Self::start(3, 0));
            *shared = Arc::downgrade(&cluster);
            cluster
        })
    }

    /// The URL that names all primaries.
    pub(crate) fn url(&self) -> String {
        let nodes = self.primaries.iter();
        let nodes: Vec<String> = nodes
            .map(|node| format!("127.0.0.1:{}", node.port()))
            .collect();
        format!("redis+cluster://{}", nodes.join(","))
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &RedisServer> {
        self.primaries.iter().chain(&self.replicas)
    }

    /// The primary that serves this slot, according to the first node.
    pub(crate) fn owner(&self, slot: u16) -> usize {
        let owns = |node: &RedisServer| {
            let known = node.cli(&["CLUSTER", "NODES"]);
            let myself = known
                .lines()
                .find(|line| line.contains("myself"))
                .expect("its own line");
            let mut ranges = myself
                .split(' ')
                .skip(8)
                .filter(|range| !range.starts_with('['));
            ranges.any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let end = |text: &str| text.parse::<u16>().expect("a slot");
                (end(first)..=end(last)).contains(&slot)
            })
        };
        self.primaries
            .iter()
            .position(owns)
            .expect("somebody serves the slot")
    }

    /// Moves a slot with its keys from one primary to another, key by key, with a short pause after each.
    pub(crate) fn move_slot(&self, slot: u16, to: usize, pause: Duration) {
        let from = self.owner(slot);
        let (source, target) = (&self.primaries[from], &self.primaries[to]);
        let (source_id, target_id) = (id(source), id(target));
        let number = slot.to_string();
        target.cli(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &source_id]);
        source.cli(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &target_id]);
        loop {
            let keys = source.cli(&["CLUSTER", "GETKEYSINSLOT", &number, "1"]);
            let Some(key) = keys.lines().next().filter(|key| !key.is_empty()) else {
                break;
            };
            let port = target.port().to_string();
            source.cli(&["MIGRATE", "127.0.0.1", &port, key, "0", "60000"]);
            thread::sleep(pause);
        }
        for node in [target, source] {
            node.cli(&["CLUSTER", "SETSLOT", &number, "NODE", &target_id]);
        }
    }

    /// Waits until every node sees all others, and all slots are served.
    fn until_all_know_all(&self) {
        let count = self.nodes().count();
        for node in self.nodes() {
            until("the cluster is complete", || {
                let info = node.cli(&["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok")
                    && info.contains(&format!("cluster_known_nodes:{count}\r"))
            });
        }
    }
}

fn start_node() -> RedisServer {
    let timeout = GUARD.as_millis().to_string();
    RedisServer::start_with(&[
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        &timeout,
        "--repl-diskless-sync-delay",
        "0",
    ])
}

/// The name of a node in its cluster.
pub(crate) fn id(node: &RedisServer) -> String {
    node.cli(&["CLUSTER", "MYID"])
}
