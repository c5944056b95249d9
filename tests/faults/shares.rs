//! G1 in an outage, under [`Fallback::Share`]: the replicas divide the limit, beyond what each of them held before. The same
//! under `Local` with the whole limit is printed beside it. All of them:
//!
//! ```text
//! cargo test -p tests --all-features --test faults -- shares --include-ignored --nocapture --test-threads 1
//! ```

use std::time::Duration;

use tokio::{join, time::sleep};
use tower_turnstile::{Fallback, Limit, Limiter, LimiterBuilder, ShutdownReport};

use crate::{
    scene::{Figures, GUARD, Holders, Load, calls, quick, soon, steady},
    support::{fault_proxy::FaultProxy, redis_server::RedisServer},
};

const CAP: u32 = 40;
/// The share of each of three replicas.
const SHARE: usize = 14;
/// Clients of each replica: three times the limit in all.
const CLIENTS: u32 = 40;
const HOLD: Duration = Duration::from_millis(200);
/// Longer than the outages from which the store comes back with its data.
const LEASE: Duration = Duration::from_secs(20);
/// How long the store is stopped.
const STOPPED: Duration = Duration::from_secs(5);
/// The same, longer than a lease.
const STOPPED_LONG: Duration = Duration::from_secs(30);
const NAMESPACE: &str = "turnstile";

/// Replicas that have counted each other, and their load.
struct Fleet {
    limit: Limit,
    replicas: Vec<Limiter>,
    holders: Holders,
    /// By replica.
    load: Vec<Vec<Load>>,
}

fn builder() -> LimiterBuilder {
    quick().lease(LEASE).namespace(NAMESPACE)
}

async fn connect(url: &str) -> Limiter {
    let limiter = builder().connect(url).await;
    limiter.expect("its settings are right")
}

impl Fleet {
    async fn start(server: &RedisServer, urls: [String; 3], fallback: Fallback) -> Self {
        let mut replicas = Vec::new();
        for url in &urls {
            replicas.push(connect(url).await);
        }
        // Nobody waits, so no script asks for subscribers.
        let are_counted = async || {
            while counts(server) < 2 * urls.len() {
                sleep(Duration::from_millis(50)).await;
            }
        };
        Self::of(replicas, fallback, are_counted).await
    }

    /// `are_counted`: each counts at its connection, and ten seconds later.
    async fn of(
        replicas: Vec<Limiter>,
        fallback: Fallback,
        are_counted: impl AsyncFnOnce(),
    ) -> Self {
        let limit = Limit::concurrent("shared", CAP).wait_up_to(GUARD);
        let mut fleet = Self {
            limit: limit.fallback(fallback),
            replicas,
            holders: Holders::count(CAP),
            load: Vec::new(),
        };
        fleet.pass_through_all().await;
        soon(are_counted()).await;
        // An answer comes behind the count.
        fleet.pass_through_all().await;
        for replica in 0..fleet.replicas.len() {
            fleet.add_load(replica);
        }
        fleet.until_balanced().await;
        fleet
    }

    /// Each replica acquires and releases a permit.
    async fn pass_through_all(&self) {
        for replica in &self.replicas {
            let semaphore = replica.semaphore(&self.limit, "key").unwrap();
            let permit = soon(semaphore.acquire()).await.expect("free");
            soon(permit.release()).await.expect("the store is up");
        }
    }

    fn add_load(&mut self, replica: usize) {
        let semaphore = self.replicas[replica]
            .semaphore(&self.limit, "key")
            .unwrap();
        // Different times mix the queue, which would else be one block for each replica.
        let hold = |number| HOLD + Duration::from_millis(3) * number;
        let clients = (0..CLIENTS).map(|number| self.holders.load(&semaphore, 1, hold(number)));
        self.load.push(clients.collect());
    }

    /// Waits until each replica holds about its share.
    async fn until_balanced(&self) {
        soon(async {
            while self
                .replicas
                .iter()
                .any(|replica| replica.status().held < SHARE - 2)
            {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }

    /// The limit, one for each replica, and what a replica held before beyond its share.
    fn bound(&self) -> usize {
        let held = self.replicas.iter().map(|replica| replica.status().held);
        let beyond: usize = held.map(|held| held.saturating_sub(SHARE)).sum();
        CAP as usize + self.replicas.len() + beyond
    }

    /// Waits until these replicas know whether the store is up.
    async fn until_known(&self, replicas: &[usize], is_up: bool) {
        soon(async {
            for replica in replicas {
                while self.replicas[*replica].status().store_up != is_up {
                    sleep(Duration::from_millis(2)).await;
                }
            }
        })
        .await;
    }

    async fn end(self) -> Figures {
        let figures = self.holders.figures();
        for load in self.load.into_iter().flatten() {
            load.finish().await;
        }
        figures
    }
}

/// How often the server has counted subscribers.
fn counts(server: &RedisServer) -> usize {
    // The second is the name before Redis 7.
    calls(server, "pubsub|numsub") + calls(server, "pubsub")
}

/// Both fallbacks at once. A run returns its figures, and the most permits that shares allow.
async fn leaves_shares(fault: &str, run: impl AsyncFn(Fallback) -> (Figures, usize)) {
    let (share, local) = join!(run(Fallback::Share), run(Fallback::Local(CAP)));
    let ((share, bound), local) = (share, local.0);
    println!("{fault}: share {share}, at most {bound}; local {local}");
    assert!(share.peak <= bound, "G1: {fault}: {share}, at most {bound}");
    assert!(local.peak > bound, "the fault is none: {local}");
}

fn urls(server: &RedisServer) -> [String; 3] {
    [(); 3].map(|()| server.url())
}

/// In exact times. Exchanges of before the fault run once it is over, and release slots whose replicas have admitted others.
#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn a_frozen_store_leaves_each_replica_its_share() {
    const FROZEN: Duration = Duration::from_secs(2);
    leaves_shares("frozen", async |fallback| {
        let store = tower_turnstile::test_util::TestStore::new();
        let mut replicas = Vec::new();
        for _ in 0..3 {
            let replica = builder().connect_to(&store).await;
            replicas.push(replica.expect("it is up"));
        }
        let are_counted = async || sleep(Duration::from_secs(15)).await;
        let fleet = Fleet::of(replicas, fallback, are_counted).await;
        let bound = fleet.bound();
        store.respond_after(2 * FROZEN);
        sleep(FROZEN).await;
        store.respond_after(Duration::ZERO);
        fleet.until_known(&[0, 1, 2], true).await;
        (fleet.end().await, bound)
    })
    .await;
}

#[tokio::test]
#[ignore = "minutes"]
async fn a_store_that_is_frozen_for_any_time_leaves_each_replica_its_share() {
    for length_ms in [900, 1_100, 1_300, 1_500, 1_700, 2_000, 2_300, 3_100] {
        leaves_shares(&format!("frozen for {length_ms} ms"), async |fallback| {
            let server = RedisServer::start();
            let fleet = Fleet::start(&server, urls(&server), fallback).await;
            server.pause();
            let bound = fleet.bound();
            sleep(Duration::from_millis(length_ms)).await;
            server.resume();
            fleet.until_known(&[0, 1, 2], true).await;
            (fleet.end().await, bound)
        })
        .await;
    }
}

/// While it is down.
async fn a_stopped_store_leaves_shares(down: Duration) {
    leaves_shares(&format!("stopped for {down:?}"), async |fallback| {
        let mut server = RedisServer::start();
        let fleet = Fleet::start(&server, urls(&server), fallback).await;
        server.stop();
        let bound = fleet.bound();
        fleet.until_known(&[0, 1, 2], false).await;
        sleep(down).await;
        (fleet.end().await, bound)
    })
    .await;
}

#[tokio::test]
#[ignore = "half a minute"]
async fn a_stopped_store_leaves_each_replica_its_share() {
    a_stopped_store_leaves_shares(STOPPED).await;
}

/// Leases end meanwhile, and no replica counts the others again.
#[tokio::test]
#[ignore = "one minute"]
async fn a_store_that_is_stopped_for_longer_than_a_lease_leaves_each_replica_its_share() {
    a_stopped_store_leaves_shares(STOPPED_LONG).await;
}

/// Its share is in addition to what the store grants to the others, once its slots there have ended.
#[tokio::test]
#[ignore = "half a minute"]
async fn a_replica_that_is_cut_off_has_its_share() {
    leaves_shares("one of three is cut off", async |fallback| {
        let server = RedisServer::start();
        let proxy = FaultProxy::start(server.port());
        let urls = [proxy.url(), server.url(), server.url()];
        let fleet = Fleet::start(&server, urls, fallback).await;
        proxy.half_open(true);
        let bound = fleet.bound() + SHARE;
        fleet.until_known(&[0], false).await;
        sleep(Duration::from_secs(2)).await;
        proxy.half_open(false);
        fleet.until_known(&[0, 1, 2], true).await;
        (fleet.end().await, bound)
    })
    .await;
}

/// The others have not counted the new replica, and still count the one that has left.
#[tokio::test]
#[ignore = "half a minute"]
async fn replicas_that_come_and_go_add_nothing() {
    leaves_shares("one comes and one goes", async |fallback| {
        let server = RedisServer::start();
        let mut fleet = Fleet::start(&server, urls(&server), fallback).await;
        fleet.replicas.push(connect(&server.url()).await);
        fleet.add_load(3);
        for load in fleet.load.remove(2) {
            load.finish().await;
        }
        let left = fleet.replicas.remove(2);
        let ended = left.shutdown(GUARD).await;
        assert!(
            matches!(
                ended,
                ShutdownReport {
                    lost: 0,
                    unconfirmed: 0,
                    ..
                }
            ),
            "{ended:?}"
        );
        fleet.until_balanced().await;
        server.pause();
        let bound = fleet.bound();
        fleet.until_known(&[0, 1, 2], false).await;
        sleep(Duration::from_secs(1)).await;
        server.resume();
        fleet.until_known(&[0, 1, 2], true).await;
        (fleet.end().await, bound)
    })
    .await;
}

/// A replica without requests is counted too, so that the others leave it its share.
#[tokio::test]
async fn an_idle_replica_is_connected_again_after_a_restart() {
    let mut server = RedisServer::start();
    let builder = steady().namespace(NAMESPACE);
    let limiter = builder.connect(&server.url()).await.expect("it is up");
    let shared = Limit::concurrent("shared", CAP).fallback(Fallback::Share);
    let permit = soon(limiter.semaphore(&shared, "key").unwrap().acquire()).await;
    soon(permit.expect("free").release())
        .await
        .expect("the store is up");
    server.restart();
    until_counted(&server, 1).await;
}

async fn until_counted(server: &RedisServer, replicas: usize) {
    let channel = format!("{NAMESPACE}:wake:all");
    let counted = format!("\n{replicas}");
    soon(async {
        while !server
            .cli(&["PUBSUB", "NUMSUB", &channel])
            .ends_with(&counted)
        {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}
