//! Several real processes of `examples/axum` on one real Redis, under a fair limit. Three tenants have more requests than
//! slots at each replica; then a replica or the store fails.
//!
//! Each test names the guarantees that it checks. The tests run one at a time, since they are about load.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use support::{
    alone,
    redis_server::RedisServer,
    replica::{BoxError, Replica, Request},
    watch::{Ledger, until_empty},
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

const SECOND: Duration = Duration::from_secs(1);
const LIMIT: usize = 6;
const LEASE: Duration = Duration::from_secs(4);
/// Longer than a busy machine takes to answer.
const STORE_TIMEOUT: &str = "1200ms";
/// How long a store stands still.
const FREEZE: Duration = Duration::from_secs(5);
/// How long a refused client waits before its next request.
const RETRY: Duration = Duration::from_millis(100);
/// How long the slot time of the tenants is measured.
const WINDOW: Duration = Duration::from_secs(6);
const REPLICAS: usize = 3;
/// Clients of each tenant at each replica. Each opens one stream after another.
const CLIENTS: usize = 4;

/// The tenants, by the length of their streams.
const TENANTS: [Tenant; 3] = [
    Tenant::new("short", 2, 50),
    Tenant::new("middle", 4, 50),
    Tenant::new("long", 7, 100),
];

struct Tenant {
    name: &'static str,
    /// Events of each stream, and the milliseconds between them.
    events: usize,
    every_ms: usize,
}

impl Tenant {
    const fn new(name: &'static str, events: usize, every_ms: usize) -> Self {
        Self {
            name,
            events,
            every_ms,
        }
    }

    fn path(&self) -> String {
        format!("/stream?chunks=1000000&every={}", self.every_ms)
    }
}

/// G1, G3, G4, G5: a replica is killed. The other replicas serve all their requests.
#[test]
fn tenants_share_the_slots_after_a_crash() {
    alone(async {
        let server = RedisServer::start();
        let mut service = Service::start(&server).await;
        service.until_all_use(0).await;
        service.kill(0);
        service.check_shares(&server, LIMIT).await;
        let seen = service.finish(&server).await;
        assert_eq!(seen.refused, 0, "G4");
    });
}

/// G1, G3, G4, G6, G8: the store stands still for longer than a lease.
#[test]
fn tenants_share_the_slots_after_a_freeze() {
    alone(async {
        let server = RedisServer::start();
        let mut service = Service::start(&server).await;
        service.until_all_use(0).await;
        server.pause();
        sleep(FREEZE).await;
        server.resume();
        service.until_up().await;
        service.check_shares(&server, LIMIT).await;
        let seen = service.finish(&server).await;
        assert!(seen.refused > 0, "G8: the policy decided");
    });
}

/// G1, G3, G4, G6, G8: the store is killed, and starts again without its data.
#[test]
fn tenants_share_the_slots_after_a_restart_without_data() {
    alone(async {
        let mut server = RedisServer::start();
        let mut service = Service::start(&server).await;
        service.until_all_use(0).await;
        service.check_cap(LIMIT);
        server.restart();
        service.watch(&server);
        service.until_up().await;
        service.check_shares(&server, LIMIT).await;
        service.finish(&server).await;
    });
}

/// G1, G3, G4, G6: the store loses its data, and keeps its connections. All requests are served.
///
/// Only a replica that holds no slot at that moment may be granted one before it notices the loss.
#[test]
fn tenants_share_the_slots_after_a_flush() {
    alone(async {
        let server = RedisServer::start();
        let mut service = Service::start(&server).await;
        service.until_all_use(0).await;
        server.cli(&["FLUSHALL"]);
        service.check_shares(&server, LIMIT + 2).await;
        let seen = service.finish(&server).await;
        assert_eq!(seen.refused, 0, "G4");
    });
}

/// Replicas under one limit, and their clients.
struct Service {
    // Dropped before the replicas, because clients do not expect an end of their connections.
    clients: JoinSet<()>,
    replicas: Vec<Replica>,
    load: Load,
    ledger: Option<Ledger>,
}

impl Service {
    async fn start(server: &RedisServer) -> Self {
        let (limit, lease) = (LIMIT.to_string(), format!("{}ms", LEASE.as_millis()));
        let options = [
            "--limit",
            &limit,
            "--lease",
            &lease,
            "--store-timeout",
            STORE_TIMEOUT,
            // The cap also holds in an outage.
            "--fallback",
            "reject",
            "--fair-by",
            "x-tenant",
        ];
        let mut replicas = Vec::new();
        for _ in 0..REPLICAS {
            replicas.push(Replica::start(&server.url(), &options).await);
        }
        let (load, mut clients) = (Load::default(), JoinSet::new());
        for (at, replica) in replicas.iter().enumerate() {
            for (tenant, about) in TENANTS.iter().enumerate() {
                for _ in 0..CLIENTS {
                    let request = replica.get(&about.path()).tenant(about.name);
                    clients.spawn(load.clone().run(at, tenant, request));
                }
            }
        }
        let mut service = Self {
            clients,
            replicas,
            load,
            ledger: None,
        };
        service.watch(server);
        service
    }

    /// Begins to watch the cap, in the ledger and at the clients.
    fn watch(&mut self, server: &RedisServer) {
        self.load.change(|seen| seen.most_inside = seen.inside);
        self.ledger = Some(Ledger::watch(server));
    }

    /// Ends the watch.
    fn check_cap(&mut self, cap: usize) {
        let ledger = self.ledger.take().expect("it is watched").finish();
        let most_inside = self.load.seen.borrow().most_inside;
        println!(
            "at most {} holders, {most_inside} streams at once",
            ledger.most_holders
        );
        assert!(
            ledger.most_holders <= cap,
            "G1: {} holders in the ledger",
            ledger.most_holders
        );
        assert!(
            most_inside <= cap,
            "G1: {most_inside} streams at once, as the clients saw it"
        );
    }

    /// Waits until this replica has open streams and waiting requests of each tenant.
    async fn until_all_use(&self, replica: usize) {
        let is_used = |group: &Group| group.open > 0 && group.waiting > 0;
        let mut seen = self.load.seen.subscribe();
        let used = seen.wait_for(|seen| seen.groups[replica].iter().all(is_used));
        timeout(10 * SECOND, used)
            .await
            .expect("all tenants are served")
            .expect("the sender is here");
    }

    fn kill(&mut self, replica: usize) {
        self.load.change(|seen| seen.killed = Some(replica));
        self.replicas[replica].kill();
    }

    /// Waits until all replicas use the store.
    async fn until_up(&self) {
        for replica in &self.replicas {
            timeout(10 * SECOND, replica.until_store("up"))
                .await
                .expect("G8: by itself");
        }
    }

    /// Checks that at most `cap` slots have been in use up to a lease after a fault; and that from then on no slot is idle,
    /// and the tenants have equal shares of the slot time.
    async fn check_shares(&mut self, server: &RedisServer, cap: usize) {
        // The slots of a killed replica, and newcomers after a loss of data, wait for no longer than this.
        sleep(LEASE).await;
        self.check_cap(cap);
        self.watch(server);
        let before = self.load.slot_times();
        sleep(WINDOW).await;
        let after = self.load.slot_times();
        let used: Vec<_> = after.iter().zip(before).map(|(a, b)| *a - b).collect();
        let sum: Duration = used.iter().sum();
        let shares: Vec<_> = used
            .iter()
            .map(|used| used.as_secs_f64() / sum.as_secs_f64())
            .collect();
        let use_of_slots = sum.as_secs_f64() / (WINDOW.as_secs_f64() * LIMIT as f64);
        println!("shares of the tenants: {shares:.2?}, use of the slots {use_of_slots:.2}");
        // In order of arrival the tenants would have 0.06, 0.19 and 0.75.
        assert!(
            shares.iter().all(|share| (0.23..0.43).contains(share)),
            "G3: {shares:.2?}"
        );
        assert!(use_of_slots > 0.6, "G4: {use_of_slots:.2}");
    }

    /// Lets all clients finish. Checks that each request is answered, that the cap holds again, and that nothing is left.
    async fn finish(mut self, server: &RedisServer) -> Seen {
        self.load.over.store(true, Relaxed);
        let answered = async {
            while let Some(client) = self.clients.join_next().await {
                client.expect("no panic");
            }
        };
        timeout(10 * SECOND, answered)
            .await
            .expect("G4: every request is answered");
        let ledger = self.ledger.as_ref().expect("it is watched");
        timeout(3 * SECOND, ledger.until_holders(0))
            .await
            .expect("G5: no slot is held");
        self.check_cap(LIMIT);
        let seen = self.load.seen.borrow().clone();
        println!("{} requests refused", seen.refused);
        if seen.killed.is_none() {
            timeout(5 * SECOND, until_empty(server))
                .await
                .expect("G6: nothing is left");
        }
        seen
    }
}

/// The clients' work.
#[derive(Clone, Default)]
struct Load {
    seen: Arc<watch::Sender<Seen>>,
    over: Arc<AtomicBool>,
}

/// The clients' observations.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// For each replica and tenant.
    groups: [[Group; TENANTS.len()]; REPLICAS],
    /// Streams that certainly have a slot.
    inside: usize,
    most_inside: usize,
    refused: usize,
    killed: Option<usize>,
    /// Total time of open streams, by tenant, up to `counted_until`.
    slot_times: [Duration; TENANTS.len()],
    counted_until: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    waiting: usize,
    open: usize,
}

impl Load {
    /// Opens one stream after another.
    async fn run(self, replica: usize, tenant: usize, request: Request) {
        while !self.over.load(Relaxed) {
            match self.open(replica, tenant, &request).await {
                Ok(200) => {}
                Ok(503) => {
                    self.change(|seen| seen.refused += 1);
                    sleep(RETRY).await;
                }
                Ok(status) => panic!("{status} at replica {replica}"),
                Err(error) => {
                    let killed = self.seen.borrow().killed;
                    assert_eq!(killed, Some(replica), "cut off: {error}");
                    return;
                }
            }
        }
    }

    /// Sends a request, and reads its events until the client leaves. Returns its status.
    async fn open(
        &self,
        replica: usize,
        tenant: usize,
        request: &Request,
    ) -> Result<u16, BoxError> {
        self.change(|seen| seen.groups[replica][tenant].waiting += 1);
        let response = request.send().await;
        let status = response
            .as_ref()
            .map(|(response, _)| response.status().as_u16());
        let is_open = matches!(status, Ok(200));
        self.change(|seen| {
            let group = &mut seen.groups[replica][tenant];
            group.waiting -= 1;
            group.open += usize::from(is_open);
        });
        let (response, _connection) = response?;
        let status = response.status().as_u16();
        if is_open {
            let read = self.read(tenant, response.into_body()).await;
            self.change(|seen| seen.groups[replica][tenant].open -= 1);
            read?;
        }
        Ok(status)
    }

    /// The client leaves, and is counted out before: the head of the next response would overtake the last event of a
    /// stream that ends by itself.
    async fn read(&self, tenant: usize, mut body: Incoming) -> Result<(), BoxError> {
        let mut events = 0;
        self.change(|seen| {
            seen.inside += 1;
            seen.most_inside = seen.most_inside.max(seen.inside);
        });
        let result = loop {
            match body.frame().await {
                Some(Ok(frame)) => {
                    let data = frame.into_data().unwrap_or_default();
                    events += data.windows(2).filter(|pair| pair == b"\n\n").count();
                }
                Some(Err(error)) => break Err(error.into()),
                None => break Err("it ended by itself".into()),
            }
            if events >= TENANTS[tenant].events {
                break Ok(());
            }
        };
        self.change(|seen| seen.inside -= 1);
        result
    }

    fn slot_times(&self) -> [Duration; TENANTS.len()] {
        self.change(|_| {});
        self.seen.borrow().slot_times
    }

    /// Counts the slot time up to now, before the change.
    fn change(&self, change: impl FnOnce(&mut Seen)) {
        self.seen.send_modify(|seen| {
            let now = Instant::now();
            let before = seen.counted_until.replace(now).unwrap_or(now);
            let passed = now.saturating_duration_since(before);
            for groups in &seen.groups {
                for (time, group) in seen.slot_times.iter_mut().zip(groups) {
                    *time += passed * u32::try_from(group.open).expect("few");
                }
            }
            change(seen);
        });
    }
}
