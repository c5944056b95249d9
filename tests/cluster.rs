//! A cluster that changes while in use. Properties of any store are tested in `semaphore/`, which also runs on a
//! cluster.

mod support;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use support::{
    GUARD, alone,
    queue::wait_in_line,
    redis_cluster::{RedisCluster, id, until},
    redis_server::{RedisServer, free_port},
    soon,
};
use tokio::{task::block_in_place, time::sleep};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Fallback, Limit, Limiter, LimiterBuilder, Permit, Semaphore,
};

/// With times much longer than a machine stalls.
fn builder() -> LimiterBuilder {
    let builder = Limiter::builder().lease(4 * GUARD).waiter_ttl(4 * GUARD);
    builder.store_timeout(GUARD)
}

async fn replica(cluster: &RedisCluster) -> Limiter {
    builder().connect(&cluster.url()).await.expect("it is up")
}

/// A replica for outages, as which it may take a stall of the machine too.
async fn noticing(url: &str) -> Limiter {
    let builder = builder().store_timeout(Duration::from_millis(500));
    builder.connect(url).await.expect("a warning at most")
}

/// The hash slots with ledgers of this namespace, and the keys in each.
fn ledgers(cluster: &RedisCluster) -> BTreeMap<u16, Vec<String>> {
    let mut slots: BTreeMap<u16, Vec<String>> = BTreeMap::new();
    for node in &cluster.primaries {
        for key in node.keys("turnstile:*").lines() {
            let slot = node.cli(&["CLUSTER", "KEYSLOT", key]);
            slots
                .entry(slot.parse().expect("a number"))
                .or_default()
                .push(key.to_owned());
        }
    }
    slots
}

/// Load in the background, and its observations of the cap.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    /// Starts `tasks` tasks that acquire a permit, hold it for a moment, and release it.
    fn start(semaphores: &[Semaphore], tasks: usize) -> Self {
        let (stop, done, most, refused) = <(
            Arc<AtomicBool>,
            Arc<AtomicUsize>,
            Arc<AtomicUsize>,
            Arc<AtomicUsize>,
        )>::default();
        let held = Arc::new(AtomicUsize::new(0));
        let task = |number: usize| {
            let semaphore = semaphores[number % semaphores.len()].clone();
            let (stop, done, held) = (stop.clone(), done.clone(), held.clone());
            let (most, refused) = (most.clone(), refused.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(permit) = semaphore.acquire().await else {
                        refused.fetch_add(1, Ordering::Relaxed);
                        sleep(Duration::from_millis(1)).await;
                        continue;
                    };
                    most.fetch_max(held.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                    held.fetch_sub(1, Ordering::Relaxed);
                    drop(permit);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let tasks = (0..tasks).map(task).collect();
        Self {
            stop,
            done,
            most,
            refused,
            tasks,
        }
    }

    fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits for a hundred more operations.
    async fn goes_on(&self) {
        let enough = self.done() + 100;
        soon(async {
            while self.done() < enough {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }

    /// Returns the maximum number of permits held at once, and the number of refusals.
    async fn end(self) -> (usize, usize) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("no panic");
        }
        (
            self.most.load(Ordering::Relaxed),
            self.refused.load(Ordering::Relaxed),
        )
    }
}

/// G1, G5: keys are spread over all nodes, and nothing is left behind.
#[test]
fn ledgers_are_spread_over_the_nodes() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let limiter = replica(&cluster).await;
        let limit = Limit::concurrent("spread", 1);
        let mut held = Vec::new();
        for key in 0..200u64 {
            held.push(
                limiter
                    .semaphore(&limit, key)
                    .unwrap()
                    .acquire()
                    .await
                    .expect("free"),
            );
        }
        let slots = ledgers(&cluster);
        let expected: Vec<u16> = (0..16).map(|part| part * 1_024 + 512).collect();
        assert_eq!(slots.keys().copied().collect::<Vec<_>>(), expected);
        for node in &cluster.primaries {
            assert!(!node.keys("turnstile:*").is_empty(), "each has its share");
        }
        assert_eq!(limiter.status().held, 200);
        drop(held);
        until("all slots are back", || ledgers(&cluster).is_empty());
    });
}

/// G1, G3, G8: slots move from node to node under load; no request is refused, the cap holds, and the queue stays in
/// order.
#[test]
fn slots_that_move_under_load_are_followed() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let (one, other) = (replica(&cluster).await, replica(&cluster).await);
        let hot = Limit::concurrent("hot", 3).wait_up_to(GUARD);
        let load = Load::start(
            &[
                one.semaphore(&hot, "a").unwrap(),
                other.semaphore(&hot, "a").unwrap(),
            ],
            20,
        );
        load.goes_on().await;
        let slot = *ledgers(&cluster)
            .keys()
            .next()
            .expect("the ledger is there");
        // Some neighbours, so that the move takes a while.
        let neighbour = Limit::concurrent("neighbour", 1);
        let mut held = Vec::new();
        for key in 0..100u64 {
            held.push(
                one.semaphore(&neighbour, key)
                    .unwrap()
                    .acquire()
                    .await
                    .expect("free"),
            );
        }
        for _ in 0..3 {
            let to = (cluster.owner(slot) + 1) % 3;
            block_in_place(|| cluster.move_slot(slot, to, Duration::from_millis(10)));
            assert_eq!(cluster.owner(slot), to);
            load.goes_on().await;
        }
        assert_eq!(load.end().await, (3, 0));
        assert!(held.iter().all(|permit| !permit.is_lost()));
        drop(held);
        until("all slots are back", || ledgers(&cluster).is_empty());
    });
}

/// G1: a slot moves, and a waiter's subscription stays at the previous node, which also receives all messages of the
/// cluster. The waiter is passed over without a wake-up, and admitted when it polls.
#[test]
fn a_waiter_whose_subscription_is_at_another_node_gets_no_message() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let (one, other) = (replica(&cluster).await, replica(&cluster).await);
        let hot = Limit::concurrent("hot", 1).wait_up_to(GUARD);
        let held = other
            .semaphore(&hot, "a")
            .unwrap()
            .acquire()
            .await
            .expect("free");
        let waits = one.semaphore(&hot, "a").unwrap();
        let waiting = tokio::spawn(async move { waits.acquire().await });
        let looks = other.semaphore(&hot, "a").unwrap();
        while looks.usage().await.expect("up").waiting == 0 {
            tokio::task::yield_now().await;
        }
        let slot = *ledgers(&cluster).keys().next().expect("it is there");
        let to = (cluster.owner(slot) + 1) % 3;
        block_in_place(|| cluster.move_slot(slot, to, Duration::ZERO));
        held.release().await.expect("up");
        let admitted = soon(waiting).await.expect("no panic").expect("its turn");
        assert_eq!(looks.usage().await.expect("up").in_use, 1, "in the store");
        drop(admitted);
    });
}

/// G1: a slot is now served by another node, which has none of its keys. Holders are restored there before any newcomer
/// of their process is admitted.
#[test]
fn holders_are_at_the_next_node_before_newcomers() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let limiter = replica(&cluster).await;
        let semaphore = limiter.semaphore(Limit::concurrent("a", 1), "a").unwrap();
        let held = semaphore.acquire().await.expect("free");
        let (slot, keys) = ledgers(&cluster).pop_first().expect("it is there");
        let from = cluster.owner(slot);
        let to = &cluster.primaries[(from + 1) % 3];
        let (part, _) = keys[0].rsplit_once(':').expect("a prefix");
        let generation = format!("{part}:generation");
        cluster.primaries[from].cli(&["DEL", &keys[0], &generation]);
        for node in [to, &cluster.primaries[from]] {
            node.cli(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &id(to)]);
        }
        let error = semaphore.try_acquire().await.expect_err("it is taken");
        assert_eq!(error.kind(), AcquireErrorKind::Full, "{error}");
        assert!(!held.is_lost());
        assert_eq!(semaphore.usage().await.expect("up").in_use, 1);
    });
}

/// A key's slot, its current node, and the node to move it to.
async fn way<'a>(
    cluster: &'a RedisCluster,
    semaphore: &Semaphore,
) -> (String, &'a RedisServer, &'a RedisServer) {
    let permit = granted(semaphore).await;
    let slot = *ledgers(cluster).keys().next().expect("it is there");
    drop(permit);
    until("the ledger is gone", || ledgers(cluster).is_empty());
    let owner = cluster.owner(slot);
    let primaries = &cluster.primaries;
    (
        slot.to_string(),
        &primaries[owner],
        &primaries[(owner + 1) % 3],
    )
}

/// A permit, despite any refusal after a stall of the machine.
async fn granted(semaphore: &Semaphore) -> Permit {
    soon(async {
        loop {
            match semaphore.acquire().await {
                Ok(permit) => return permit,
                Err(_) => sleep(Duration::from_millis(10)).await,
            }
        }
    })
    .await
}

async fn until_granted(semaphore: &Semaphore) {
    drop(granted(semaphore).await);
}

/// A request may be refused a moment before the call is given up.
async fn until_down(limiter: &Limiter) {
    soon(async {
        while limiter.status().store_up {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// G8: two nodes redirect an exchange to each other, which may happen briefly when a move starts or is aborted. This is
/// a transient outage, not a configuration error.
///
/// Later a release empties the key at the first node, so the next command of its script would be redirected, which scripts
/// cannot be. That is no fault of the store, and no request is refused.
#[test]
fn requests_find_their_way_while_a_slot_moves() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let limiter = replica(&cluster).await;
        let limit = Limit::concurrent("a", 1).fallback(Fallback::Reject);
        let semaphore = limiter.semaphore(&limit, "a").unwrap();
        let (slot, from, to) = way(&cluster, &semaphore).await;
        let (from_id, to_id) = (id(from), id(to));
        let set = |node: &RedisServer, state: &[&str]| {
            node.cli(&[&["CLUSTER", "SETSLOT", &slot], state].concat());
        };
        set(from, &["MIGRATING", &to_id]);
        let error = semaphore.acquire().await.expect_err("nobody has it");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
        set(from, &["STABLE"]);
        until_granted(&semaphore).await;

        let held = semaphore.acquire().await.expect("free");
        set(to, &["IMPORTING", &from_id]);
        set(from, &["MIGRATING", &to_id]);
        held.release().await.expect("it is confirmed");
        for _ in 0..5 {
            let permit = semaphore.acquire().await.expect("free, at the next node");
            permit.release().await.expect("it is confirmed");
        }
    });
}

/// All replicas subscribe at the node that a hash slot is leaving, so the next one counts no subscribers of theirs.
#[test]
fn waiters_keep_their_order_while_their_slot_moves() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let (one, other) = (replica(&cluster).await, replica(&cluster).await);
        let limit = Limit::concurrent("a", 1).wait_up_to(GUARD);
        let [one, other] = [one, other].map(|limiter| limiter.semaphore(&limit, "a").unwrap());
        let (slot, from, to) = way(&cluster, &one).await;
        let (from_id, to_id) = (id(from), id(to));
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        let held = one.acquire().await.expect("free");
        let first = wait_in_line(&other).await;
        let second = wait_in_line(&one).await;
        held.release().await.expect("it is confirmed");
        tokio::select! {
            first = first => drop(first.expect("it is next")),
            _ = second => panic!("it has passed the other replica's request"),
        }
    });
}

/// G8: a connection to the node that keys are migrating to is not reused after a missing answer: it may be half open.
#[test]
fn a_silent_node_that_keys_are_moving_to_is_connected_to_anew() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let limiter = noticing(&cluster.url()).await;
        let limit = Limit::concurrent("a", 1).fallback(Fallback::Reject);
        let semaphore = limiter.semaphore(&limit, "a").unwrap();
        let (slot, from, to) = way(&cluster, &semaphore).await;
        let (from_id, to_id) = (id(from), id(to));
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
        until_granted(&semaphore).await;
        // This connection is the only one without a subscription to wake-ups.
        let asking = || -> Vec<String> {
            let clients = to.cli(&["CLIENT", "LIST"]);
            let asking = clients
                .lines()
                .filter(|client| client.contains(" sub=0 ") && client.contains(" cmd=eval"));
            let ids = asking.filter_map(|client| client.split(' ').next());
            ids.map(str::to_owned).collect()
        };
        until("there is one such connection", || asking().len() == 1);
        let before = asking();
        to.pause();
        let error = semaphore.acquire().await.expect_err("no answer");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
        until_down(&limiter).await;
        to.resume();
        until_granted(&semaphore).await;
        until("the silent connection is gone", || {
            !asking().contains(&before[0])
        });
        until("the ledger is gone", || ledgers(&cluster).is_empty());
        let (port, keys) = (
            to.port().to_string(),
            ["CLUSTER", "GETKEYSINSLOT", &slot, "9"],
        );
        for key in from.cli(&keys).lines().filter(|key| !key.is_empty()) {
            from.cli(&["MIGRATE", "127.0.0.1", &port, key, "0", "60000", "REPLACE"]);
        }
        for node in [to, from] {
            node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
        }
        until_granted(&semaphore).await;
        until("there is none after the migration", || asking().is_empty());
    });
}

/// G8: `Share` divides by the replicas counted at the node of a part, including those without work there.
#[test]
fn an_idle_replica_follows_a_hash_slot() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let limiter = replica(&cluster).await;
        let limit = Limit::concurrent("a", 1).fallback(Fallback::Share);
        let semaphore = limiter.semaphore(limit, "a").unwrap();
        let (slot, _, to) = way(&cluster, &semaphore).await;
        let counted = |node: &RedisServer| {
            let channels = node.cli(&["PUBSUB", "CHANNELS", "turnstile:wake:*all"]);
            channels.lines().filter(|line| !line.is_empty()).count()
        };
        until("all parts are counted somewhere", || {
            cluster.nodes().map(counted).sum::<usize>() == 16
        });
        let before = counted(to);
        let slot = slot.parse().expect("a number");
        let next = (cluster.owner(slot) + 1) % 3;
        block_in_place(|| cluster.move_slot(slot, next, Duration::ZERO));
        until("it is counted at the new node", || counted(to) > before);
    });
}

/// G8: a dead node affects only its own parts; the others continue undisturbed.
#[test]
fn a_node_that_is_gone_concerns_its_parts_only() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        let limiter = noticing(&cluster.url()).await;
        let limit = Limit::concurrent("part", 1).fallback(Fallback::Reject);
        let semaphores: Vec<_> = (0..48u64)
            .map(|key| limiter.semaphore(&limit, key).unwrap())
            .collect();
        join_all(semaphores.iter().map(until_granted)).await;
        cluster.primaries[2].pause();
        let attempts = async || {
            let outcomes = join_all(semaphores.iter().map(Semaphore::acquire)).await;
            let refused = outcomes.into_iter().filter_map(Result::err);
            let kinds: Vec<_> = refused.map(|error| error.kind()).collect();
            assert!(
                kinds
                    .iter()
                    .all(|kind| *kind == AcquireErrorKind::Unavailable)
            );
            kinds.len()
        };
        soon(async { while !(8..=24).contains(&attempts().await) {} }).await;
        until_down(&limiter).await;
        cluster.primaries[2].resume();
        join_all(semaphores.iter().map(until_granted)).await;
    });
}

fn deadlines(permits: &[Permit]) -> Vec<Option<tokio::time::Instant>> {
    permits.iter().map(Permit::deadline).collect()
}

/// G1, G4, G8: a primary is killed under load, and its replica takes over.
#[test]
fn a_failover_is_survived_without_a_restart() {
    alone(async {
        let mut cluster = RedisCluster::start(3, 1);
        cluster.notice_deaths_after(GUARD);
        let (one, other) = (
            noticing(&cluster.url()).await,
            noticing(&cluster.url()).await,
        );
        let hot = Limit::concurrent("hot", 2)
            .wait_up_to(GUARD)
            .fallback(Fallback::Reject);
        let (slot, ..) = way(&cluster, &one.semaphore(&hot, "a").unwrap()).await;
        let owner = cluster.owner(slot.parse().expect("a number"));
        let mut held = Vec::new();
        // The keys of the same node.
        for key in 0..30u64 {
            let kept = other.semaphore(Limit::concurrent("kept", 5), key).unwrap();
            let before = cluster.primaries[owner].key_count();
            let permit = kept.acquire().await.expect("free");
            if cluster.primaries[owner].key_count() > before {
                held.push(permit);
            }
        }
        assert!(held.len() >= 3, "{} keys", held.len());
        let load = Load::start(
            &[
                one.semaphore(&hot, "a").unwrap(),
                other.semaphore(&hot, "a").unwrap(),
            ],
            10,
        );
        load.goes_on().await;
        cluster.primaries[owner].stop();
        let before = deadlines(&held);
        cluster.notice_deaths_after(Duration::from_secs(1));
        load.goes_on().await;
        until("each was renewed at its new node", || {
            let mut both = deadlines(&held).into_iter().zip(&before);
            both.all(|(now, before)| now > *before)
        });
        assert!(held.iter().all(|permit| !permit.is_lost()));
        let (most, _) = load.end().await;
        assert!(
            most <= 2 + 2,
            "what was held before is the most that can come on top: {most}"
        );
    });
}

/// G7: while a node is dead, the others redirect everybody there. Each attempt asks every other node only once.
#[test]
fn a_node_that_is_gone_costs_the_others_few_connections() {
    alone(async {
        let mut cluster = RedisCluster::start(3, 0);
        let limiter = replica(&cluster).await;
        let limit = Limit::concurrent("a", 1).fallback(Fallback::Reject);
        let semaphore = limiter.semaphore(&limit, "a").unwrap();
        let (slot, ..) = way(&cluster, &semaphore).await;
        let owner = cluster.owner(slot.parse().expect("a number"));
        cluster.primaries[owner].stop();
        let connections = || -> u64 {
            let others = (0..3).filter(|number| *number != owner);
            let counts = others.map(|number| {
                let stats = cluster.primaries[number].cli(&["INFO", "stats"]);
                let count = stats
                    .lines()
                    .find_map(|line| line.strip_prefix("total_connections_received:"));
                count
                    .expect("it is there")
                    .parse::<u64>()
                    .expect("a number")
            });
            counts.sum()
        };
        let (before, began) = (connections(), Instant::now());
        while began.elapsed() < Duration::from_secs(1) {
            let error = semaphore.acquire().await.expect_err("it is gone");
            assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
            sleep(Duration::from_millis(10)).await;
        }
        let made = connections() - before;
        let most = 20 * (began.elapsed().as_secs() + 1);
        assert!(made < most, "{made} connections in {:?}", began.elapsed());
    });
}

/// G5, G8: a shutdown releases as much as it can, does not wait for a silent node, and reports the permits left there.
#[test]
fn a_shutdown_reports_what_a_silent_node_may_still_count() {
    alone(async {
        const KEYS: u64 = 64;
        let cluster = RedisCluster::start(3, 0);
        // Other nodes must confirm in this time, despite a stall of the machine.
        let builder = builder().store_timeout(Duration::from_secs(5));
        let limiter = builder.connect(&cluster.url()).await.expect("it is up");
        let limit = Limit::concurrent("a", 1).fallback(Fallback::Reject);
        let acquire = async |key| granted(&limiter.semaphore(&limit, key).unwrap()).await;
        let permits = join_all((0..KEYS).map(acquire)).await;
        let silent = &cluster.primaries[1];
        let kept = silent.keys("turnstile:*").lines().count();
        assert!(kept > 0, "it has some of the keys");
        silent.pause();
        let mut shutdown = tokio_test::task::spawn(limiter.shutdown(10 * GUARD));
        tokio_test::assert_pending!(shutdown.poll());
        for key in 0..KEYS {
            let late = limiter.semaphore(&limit, format!("late {key}")).unwrap();
            let refused = late.try_acquire().await.expect_err("all parts are closed");
            assert_eq!(refused.kind(), AcquireErrorKind::ShutDown);
        }
        drop(permits);
        let report = soon(shutdown).await;
        assert_eq!(report.unconfirmed, kept, "{report:?}");
        let released = KEYS as usize - kept;
        assert_eq!((report.released, report.lost), (released, 0), "{report:?}");
        silent.resume();
    });
}

/// G8: all nodes in the URL may be dead by the time they are needed. A password is used for all nodes.
#[test]
fn a_url_may_name_dead_nodes_and_a_password() {
    alone(async {
        let cluster = RedisCluster::start(3, 0);
        for node in cluster.nodes() {
            let user = "shop on >canary ~turnstile:* &* +@all";
            let user: Vec<_> = user.split(' ').collect();
            node.cli(&[&["ACL", "SETUSER"], &user[..]].concat());
        }
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let silent_port = silent.local_addr().expect("an address").port();
        let (dead, node) = (free_port(), cluster.primaries[1].port());
        let nodes = format!("127.0.0.1:{dead},127.0.0.1:{silent_port},127.0.0.1:{node}");
        let limiter = noticing(&format!("redis+cluster://shop:canary@{nodes}")).await;
        let limit = Limit::concurrent("a", 1).fallback(Fallback::Reject);
        let semaphores: Vec<_> = (0..40u64)
            .map(|key| limiter.semaphore(&limit, key).unwrap())
            .collect();
        join_all(semaphores.iter().map(until_granted)).await;
        let url = cluster.url().replace("://", "://shop:wrong@");
        let error = builder().connect(&url).await.expect_err("the wrong one");
        assert_eq!(error.kind(), ConfigErrorKind::Credentials);
        assert!(!error.to_string().contains("wrong@"), "{error}");
    });
}

#[tokio::test]
async fn what_is_no_url_of_a_cluster_is_refused() {
    let many = "redis+cluster://".to_owned() + &["host"; 17].join(",");
    for url in [
        "redis+cluster://",
        "redis+cluster://a,,b",
        "redis+cluster://a/1",
        "unix+cluster://a",
        &many,
    ] {
        let error = Limiter::connect(url).await.expect_err(url);
        assert_eq!(error.kind(), ConfigErrorKind::Url, "{url}: {error}");
    }
}
