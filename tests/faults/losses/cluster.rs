//! A node of a cluster loses its data: the keys of its parts keep their cap, and those of other parts notice nothing.

use std::{thread, time::Duration};

use tokio::task::block_in_place;
use tower_turnstile::{Fallback, Limit, Limiter};

use super::{
    APART, CAP, Loss, Replicas, TIMES, Times, check_first_grants,
    failover::{self, Failover},
    first_grants, peaks,
};
use crate::{
    frozen::longest_pause,
    processes::{KEY, LIMIT, Span, now_us},
    scene::{GUARD, Holders, steady},
    storage::{fill, until_in_store, wait},
    support::{
        redis_cluster::{RedisCluster, id, until},
        redis_server::RedisServer,
    },
};

/// The longest time without a grant for a key whose node is undisturbed: far below the second that newcomers wait after a
/// loss.
const UNDISTURBED: Duration = Duration::from_millis(500);
/// Time after a loss in which a key of another node is watched.
const WATCHED: Duration = Duration::from_secs(3);

const ALL: Limit = Limit::concurrent(LIMIT, CAP)
    .wait_up_to(GUARD)
    .fallback(Fallback::Reject);

/// Three processes at a cluster of three nodes, with a key at one that loses its data, and a key at another.
struct Scene {
    cluster: RedisCluster,
    /// The node that loses its data.
    node: usize,
    /// The hash slot of its key.
    slot: u16,
    replicas: Replicas,
}

/// What became of both keys after each loss.
struct Outcome {
    peaks: Vec<i32>,
    first_grants: Vec<Duration>,
    peak_elsewhere: i32,
    pause_elsewhere: Duration,
}

/// The node and the hash slot of a key's ledger.
async fn home(cluster: &RedisCluster, limiter: &Limiter, key: &str) -> (usize, u16) {
    let semaphore = limiter.semaphore(&ALL, key).unwrap();
    let permit = semaphore.acquire().await.expect("free");
    let mut nodes = cluster.primaries.iter().enumerate();
    let found = nodes.find_map(|(number, node)| {
        let keys = node.keys("turnstile:*");
        let ledger = keys.lines().next()?;
        let slot = node.cli(&["CLUSTER", "KEYSLOT", ledger]);
        Some((number, slot.parse().expect("a number")))
    });
    permit.release().await.expect("it is up");
    found.expect("it has a ledger")
}

/// The home of this key, and a key of another node.
async fn homes(cluster: &RedisCluster, limiter: &Limiter) -> ((usize, u16), String) {
    let at = home(cluster, limiter, KEY).await;
    for number in 1.. {
        let key = format!("key-{number}");
        if home(cluster, limiter, &key).await.0 != at.0 {
            return (at, key);
        }
    }
    unreachable!("the keys are spread over the nodes")
}

/// A node that is gone concerns its own slots only.
fn of_independent_nodes(copies: usize) -> RedisCluster {
    let cluster = RedisCluster::start(3, copies);
    for node in cluster.nodes() {
        node.cli(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    cluster
}

fn until_served(node: &RedisServer) {
    until("the node serves its slots", || {
        node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    });
}

impl Scene {
    fn start(copies: usize, times: Times) -> Self {
        let cluster = of_independent_nodes(copies);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("resources");
        let ((node, slot), elsewhere) = runtime.block_on(async {
            let limiter = Limiter::connect(cluster.url()).await.expect("it is up");
            homes(&cluster, &limiter).await
        });
        Self {
            replicas: Replicas::start(cluster.url(), &[KEY, &elsewhere], true, times),
            cluster,
            node,
            slot,
        }
    }

    fn flush(&mut self) -> Loss {
        let began = now_us();
        self.cluster.primaries[self.node].cli(&["FLUSHALL"]);
        Loss {
            began,
            answered: now_us(),
        }
    }

    /// The node restarts empty after this time. It serves its slots again two seconds later.
    fn restart(&mut self, down: Duration) -> Loss {
        let began = now_us();
        let node = &mut self.cluster.primaries[self.node];
        node.stop();
        thread::sleep(down);
        node.restart();
        node.cli(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        until_served(node);
        Loss {
            began,
            answered: now_us(),
        }
    }

    /// The node is gone for good, and another one takes over the slot of its key, without the data.
    fn take_over(&mut self) -> Loss {
        let began = now_us();
        self.cluster.primaries[self.node].stop();
        let heir = (self.node + 1) % self.cluster.primaries.len();
        let (slot, name) = (self.slot.to_string(), id(&self.cluster.primaries[heir]));
        self.cluster.primaries[heir].cli(&["CLUSTER", "BUMPEPOCH"]);
        for (number, node) in self.cluster.primaries.iter().enumerate() {
            if number != self.node {
                node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &name]);
            }
        }
        Loss {
            began,
            answered: now_us(),
        }
    }

    fn finish(self, losses: &[Loss]) -> Outcome {
        let by_key = self.replicas.finish();
        let (lost, elsewhere) = (&by_key[0], &by_key[1]);
        let pause = |loss: &Loss| longest_pause(elsewhere, watched(loss));
        let pauses = losses.iter().map(pause);
        Outcome {
            peaks: peaks(losses, lost),
            first_grants: first_grants(losses, lost),
            peak_elsewhere: peaks(losses, elsewhere).into_iter().max().unwrap_or(0),
            pause_elsewhere: pauses.max().unwrap_or_default(),
        }
    }
}

fn watched(loss: &Loss) -> Span {
    (loss.began, loss.answered + WATCHED.as_micros() as u64)
}

/// Prints a row of the table, and checks it. `bound`: the most slots that may be held.
fn check(name: &str, outcome: &Outcome, bound: u32) {
    let Outcome {
        peaks,
        first_grants,
        peak_elsewhere,
        pause_elsewhere,
    } = outcome;
    let most = peaks.iter().max().copied().unwrap_or(0);
    let over = peaks.iter().filter(|peak| **peak > CAP as i32).count();
    let middle = first_grants[first_grants.len() / 2];
    println!(
        "| {name} | {} | {most} of {CAP}, {over} times above | {middle:?} | {peak_elsewhere} of {CAP} | {pause_elsewhere:?} |",
        peaks.len(),
    );
    assert!(most <= bound as i32, "G1: {name}: {peaks:?}");
    assert_eq!(first_grants.len(), peaks.len(), "nothing was granted");
    check_first_grants(first_grants);
    assert!(*peak_elsewhere <= CAP as i32, "G1: {name}, elsewhere");
    assert!(
        *pause_elsewhere < UNDISTURBED,
        "{name}: {pause_elsewhere:?} without a grant elsewhere"
    );
}

fn repeat(count: usize, mut lose: impl FnMut(usize) -> Loss) -> Vec<Loss> {
    let one = |number| {
        let loss = lose(number);
        thread::sleep(APART);
        loss
    };
    (0..count).map(one).collect()
}

fn flushes(count: usize) {
    let mut scene = Scene::start(0, TIMES);
    let losses = repeat(count, |_| scene.flush());
    check("FLUSHALL of a node", &scene.finish(&losses), CAP + 2);
}

fn restarts(count: usize) {
    let mut scene = Scene::start(0, TIMES);
    let losses = repeat(count, |number| {
        // From 0.02 to 5 s, most of them short.
        let down = 20.0 * 250.0_f64.powf(number as f64 / count as f64);
        scene.restart(Duration::from_millis(down as u64))
    });
    check("restart of a node", &scene.finish(&losses), CAP);
}

fn takeovers(count: usize) {
    for _ in 0..count {
        let mut scene = Scene::start(0, TIMES);
        let losses = repeat(1, |_| scene.take_over());
        check("slot taken over, empty", &scene.finish(&losses), CAP);
    }
}

/// The copy of the node of one key takes over from it at once, without what the node wrote last. The node then is its copy.
fn failovers(count: usize) {
    let mut scene = Scene::start(1, failover::AT_ONCE);
    let (mut old, mut new) = (
        scene.cluster.primaries.remove(scene.node),
        scene.cluster.replicas.remove(scene.node),
    );
    let one = |number| {
        old.until_copied([&new]);
        let cut = failover::cut_off(&old, &[&new]);
        thread::sleep(failover::lag(number, count));
        let began = now_us();
        old.stop();
        new.cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
        until("it is the primary", || {
            new.cli(&["INFO", "replication"]).contains("role:master")
        });
        let answered = now_us();
        failover::reunite(&[&new]);
        thread::sleep(APART);
        old.restart();
        old.cli(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        until("the old primary is a copy", || {
            new.cli(&["INFO", "replication"]).contains("state=online")
        });
        std::mem::swap(&mut old, &mut new);
        Failover {
            cut,
            loss: Loss { began, answered },
        }
    };
    let failovers: Vec<_> = (0..count).map(one).collect();
    let by_key = scene.replicas.finish();
    failover::check("copy in a cluster", &failovers, &by_key[0]);
    let losses: Vec<_> = failovers.iter().map(|one| one.loss).collect();
    let most = peaks(&losses, &by_key[1]).into_iter().max();
    assert!(most <= Some(CAP as i32), "G1, elsewhere: {most:?}");
}

/// G1: its holders return before waiters, and the keys of other nodes notice nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_loses_its_data_keeps_the_cap_and_disturbs_no_other() {
    let mut cluster = block_in_place(|| of_independent_nodes(0));
    let one = steady().connect(cluster.url()).await.expect("it is up");
    let other = steady().connect(cluster.url()).await.expect("it is up");
    let ((node, _), elsewhere) = homes(&cluster, &one).await;
    let elsewhere = other.semaphore(&ALL, elsewhere).unwrap();
    let goes_on = async || drop(elsewhere.try_acquire().await.expect("undisturbed"));
    let holders = Holders::count(CAP);
    let held = fill(&holders, &one.semaphore(&ALL, KEY).unwrap(), CAP).await;
    let waiter = wait(&other.semaphore(&ALL, KEY).unwrap()).await;
    goes_on().await;

    cluster.primaries[node].cli(&["FLUSHALL"]);
    goes_on().await;
    until_in_store(&cluster.primaries[node], &held).await;
    cluster.primaries[node].stop();
    goes_on().await;
    block_in_place(|| {
        cluster.primaries[node].restart();
        until_served(&cluster.primaries[node]);
    });
    goes_on().await;
    until_in_store(&cluster.primaries[node], &held).await;
    assert!(!waiter.is_finished(), "G1");
    assert!(held.iter().all(|permit| !permit.is_lost()));
}

#[test]
#[ignore = "three minutes"]
fn many_losses_of_a_node() {
    println!("| loss | losses | held | first grant | held elsewhere | longest pause elsewhere |");
    flushes(20);
    restarts(12);
    takeovers(4);
}

/// G1: the copy takes over at once, without what the node wrote last.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_node_that_lacks_the_last_grants_gets_them_back() {
    let mut cluster = block_in_place(|| RedisCluster::start(2, 1));
    let limiter = steady().connect(cluster.url()).await.expect("it is up");
    let (node, _) = home(&cluster, &limiter, KEY).await;
    let semaphore = limiter.semaphore(&ALL, KEY).unwrap();
    let (old, new) = (&mut cluster.primaries[node], &cluster.replicas[node]);
    let holders = Holders::count(CAP);
    let mut held = fill(&holders, &semaphore, CAP / 2).await;
    block_in_place(|| {
        old.until_copied([new]);
        failover::cut_off(old, &[new]);
    });
    held.extend(fill(&holders, &semaphore, CAP / 2).await);
    old.stop();
    new.cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
    until_in_store(new, &held).await;
    assert!(held.iter().all(|permit| !permit.is_lost()));
}

#[test]
#[ignore = "one minute"]
fn many_failovers_of_a_node() {
    println!("| failover | failovers | held, and not in the copy | held | first grant |");
    failovers(12);
}
