//! Several real processes of `examples/axum` on one real Redis, under a fair limit: requests of three tenants wait at each
//! replica, while a replica or the store fails. That tenants share the slots is proven without real time, in the simulation
//! and in `tests/semaphore/tenants.rs`.
//!
//! Each test names the guarantees that it checks.

mod support;

use std::time::Duration;

use futures_util::future::join_all;
use support::{
    alone,
    redis_server::RedisServer,
    replica::Replica,
    soon,
    watch::{Ledger, Streams, until_empty},
};
use tokio::{task::JoinHandle, time::sleep};

const REPLICAS: usize = 3;
const TENANTS: [&str; 3] = ["one", "two", "three"];
/// Slots of each replica, before a fault.
const EACH: usize = 2;
const LIMIT: usize = REPLICAS * EACH;
/// Requests of each tenant that wait at each replica.
const WAITING: usize = 3;
const ENDLESS: &str = "/stream?chunks=1000000&every=20";
/// Permits last longer than a machine stalls.
const LASTING: [&str; 4] = ["--lease", "240s", "--store-timeout", "1s"];
const SHORT: [&str; 4] = ["--lease", "2s", "--store-timeout", "600ms"];

/// G1, G3, G4, G5: a replica is killed. The others have its slots, and serve all their requests.
#[test]
fn tenants_are_served_after_a_crash() {
    alone(async {
        let server = RedisServer::start();
        let mut service = Service::start(&server, SHORT).await;
        service.replicas[0].kill();
        drop(service.waiting.remove(0));
        service.all_are_served().await;
        let most_at_once = service.visits.seen().most_at_once;
        assert!(most_at_once <= EACH, "G1: {most_at_once} have its slots");
        service.finish(LIMIT).await;
    });
}

/// G1, G3, G4, G6, G8: the store stands still until the policy decides.
#[test]
fn tenants_are_served_after_a_freeze() {
    alone(async {
        let server = RedisServer::start();
        let mut service = Service::start(&server, LASTING).await;
        server.pause();
        service.until_stores_are("down").await;
        server.resume();
        service.until_stores_are("up").await;
        service.leave();
        let refused = service.all_are_served().await;
        assert!(refused > 0, "G8: the policy decided");
        service.finish(LIMIT).await;
        soon(until_empty(&server)).await;
    });
}

/// G1, G3, G4, G6, G8: the store is killed, and starts again without its data.
#[test]
fn tenants_are_served_after_a_restart_without_data() {
    alone(async {
        let mut server = RedisServer::start();
        let mut service = Service::start(&server, LASTING).await;
        server.restart();
        service.ledger = Ledger::watch(&server);
        service.are_served_after_a_loss(&server).await;
    });
}

/// G1, G3, G4, G6: the store loses its data, and keeps its connections.
#[test]
fn tenants_are_served_after_a_flush() {
    alone(async {
        let server = RedisServer::start();
        let service = Service::start(&server, LASTING).await;
        server.cli(&["FLUSHALL"]);
        service.are_served_after_a_loss(&server).await;
    });
}

/// Replicas under one limit. Their clients hold all slots, and others wait.
struct Service {
    replicas: Vec<Replica>,
    /// Of each replica.
    holding: Vec<JoinHandle<Result<(), String>>>,
    waiting: Vec<Vec<JoinHandle<Result<usize, String>>>>,
    /// Streams of those that wait.
    visits: Streams,
    ledger: Ledger,
}

impl Service {
    async fn start(server: &RedisServer, times_of_first: [&str; 4]) -> Self {
        let limit = LIMIT.to_string();
        let mut replicas = Vec::new();
        for times in [times_of_first, LASTING, LASTING] {
            // The cap also holds in an outage, as which a replica may take a stall of the machine.
            let options = [
                "--limit",
                &limit,
                "--max-wait",
                "240s",
                "--fallback",
                "reject",
            ];
            let options = [&options[..], &times, &["--fair-by", "x-tenant"]].concat();
            replicas.push(Replica::start(&server.url(), &options).await);
        }
        let (visits, streams) = (Streams::default(), Streams::default());
        let ledger = Ledger::watch(server);
        let request = |replica: usize, number: usize| {
            let tenant = TENANTS[number % TENANTS.len()];
            replicas[replica].get(ENDLESS).tenant(tenant)
        };
        let mut holding = Vec::new();
        for number in 0..LIMIT {
            let request = || request(number / EACH, number);
            holding.push(streams.begin(number, request).await);
        }
        let wait = |replica, number| {
            let (visits, request) = (visits.clone(), request(replica, number));
            tokio::spawn(async move { visits.visit(number, &request).await })
        };
        let at = |replica| (0..WAITING * TENANTS.len()).map(move |number| wait(replica, number));
        let waiting: Vec<Vec<_>> = (0..REPLICAS).map(|replica| at(replica).collect()).collect();
        for (replica, tasks) in replicas.iter().zip(&waiting) {
            // Some have been served already if the machine stalls for longer than a lease.
            let served = || tasks.iter().filter(|task| task.is_finished()).count();
            while replica.waiting().await + served() < tasks.len() {
                sleep(Duration::from_millis(5)).await;
            }
        }
        Self {
            replicas,
            holding,
            waiting,
            visits,
            ledger,
        }
    }

    async fn until_stores_are(&self, state: &str) {
        for replica in &self.replicas {
            soon(replica.until_store(state)).await;
        }
    }

    fn leave(&self) {
        self.holding.iter().for_each(JoinHandle::abort);
    }

    /// Returns how many requests were refused because of an outage, and sent again.
    async fn all_are_served(&mut self) -> usize {
        let waiting = self.waiting.drain(..).flatten();
        let served = soon(join_all(waiting)).await;
        let refused = served.into_iter().map(|one| one.expect("no panic"));
        refused.map(|one| one.expect("G4: it is served")).sum()
    }

    /// The holders count again before others are served. A replica that stands still for so long that the others do not wait
    /// for it comes on top, with what it holds.
    async fn are_served_after_a_loss(mut self, server: &RedisServer) {
        soon(self.ledger.until_holders(LIMIT)).await;
        self.leave();
        self.all_are_served().await;
        self.finish(LIMIT + EACH).await;
        soon(until_empty(server)).await;
    }

    /// Checks that the cap held, and that no slot is left.
    async fn finish(&self, cap: usize) {
        self.leave();
        soon(self.ledger.until_holders(0)).await;
        let holders = self.ledger.most_holders();
        assert!(holders <= cap, "G1: {holders} holders in the ledger");
        let streams = self.visits.seen().most_at_once;
        assert!(streams <= cap, "G1: {streams} streams, as clients saw it");
    }
}
