//! Soak test: several processes under load, with a fault every other second; then the history is checked.
//!
//! `.ci/soak <minutes> [seed]` runs [`for_minutes`].

use std::{
    collections::BTreeMap,
    thread::sleep,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    history::{
        History, Process, check,
        process::{Orders, Running, Watch, folder, now_us, recovered, until_empty},
    },
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

const PROCESSES: usize = 4;
/// How long a history lasts until it is checked and a new one begins: it is held in memory.
const ROUND: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Fault {
    Kill,
    StopPastLease,
    PauseStore,
    KillClients,
    KillSubscribers,
    PauseClients,
    FlushScripts,
    FlushData,
    RestartStore,
    Delay,
    DropReplies,
    HalfOpen,
    Cut,
}

/// The first faults are twice as frequent as the others; data loss is rare.
const FAULTS: [(Fault, u32); 13] = [
    (Fault::Kill, 4),
    (Fault::StopPastLease, 4),
    (Fault::PauseStore, 4),
    (Fault::KillClients, 4),
    (Fault::KillSubscribers, 4),
    (Fault::PauseClients, 2),
    (Fault::FlushScripts, 2),
    (Fault::FlushData, 1),
    (Fault::RestartStore, 1),
    (Fault::Delay, 4),
    (Fault::DropReplies, 4),
    (Fault::HalfOpen, 2),
    (Fault::Cut, 4),
];

/// G1 to G6 under faults, for a short time.
#[test]
fn promises_are_kept_under_faults() {
    soak(Duration::from_secs(8), fastrand::u64(..));
}

/// Runs for `SOAK_MINUTES`, with the seed `SOAK_SEED`.
#[test]
#[ignore = "as long as it is told to run"]
fn for_minutes() {
    let minutes = std::env::var("SOAK_MINUTES")
        .ok()
        .and_then(|text| text.parse::<f64>().ok());
    let minutes = minutes.expect("SOAK_MINUTES says how long");
    let seed = std::env::var("SOAK_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    soak(
        Duration::from_secs_f64(60.0 * minutes),
        seed.unwrap_or_else(|| fastrand::u64(..)),
    );
}

fn soak(length: Duration, seed: u64) {
    println!("seed {seed}");
    let end = Instant::now() + length;
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut counts = BTreeMap::new();
    let mut round = 0;
    while Instant::now() < end {
        round += 1;
        let length = (end - Instant::now()).min(ROUND);
        let mut soak = Soak::start(rng.fork());
        soak.run(length, &mut counts);
        let history = soak.finish();
        let report = check(&history);
        println!("round {round}, faults so far {counts:?}: {report}");
        assert!(
            report.violations.is_empty(),
            "seed {seed}, round {round}: {report}"
        );
        // The last round may be short.
        assert!(length < ROUND || report.promotions > 20, "{report}");
    }
    println!("faults: {counts:?}, seed {seed}");
}

struct Soak {
    rng: fastrand::Rng,
    server: RedisServer,
    folder: TempDir,
    /// Each process with its proxy to the store.
    running: Vec<(Running, FaultProxy)>,
    started: usize,
    ended: Vec<Process>,
    history: History,
    watch: Watch,
}

impl Soak {
    fn start(rng: fastrand::Rng) -> Self {
        let server = RedisServer::start();
        let mut soak = Self {
            rng,
            watch: Watch::start(&server),
            server,
            folder: folder(),
            running: Vec::new(),
            started: 0,
            ended: Vec::new(),
            history: History {
                bounds: Orders::new(String::new(), 0).bounds(),
                ..History::default()
            },
        };
        for _ in 0..PROCESSES {
            let process = soak.launch();
            soak.running.push(process);
        }
        soak
    }

    fn launch(&mut self) -> (Running, FaultProxy) {
        self.started += 1;
        let proxy = FaultProxy::start(self.server.port());
        let orders = Orders::new(proxy.url(), self.rng.u64(..));
        let name = format!("process {}", self.started);
        let running = Running::start("process", &name, self.folder.path(), &orders);
        (running, proxy)
    }

    fn run(&mut self, length: Duration, counts: &mut BTreeMap<Fault, usize>) {
        let end = Instant::now() + length;
        sleep(Duration::from_secs(1));
        while Instant::now() < end {
            let fault = self.draw();
            *counts.entry(fault).or_default() += 1;
            self.fault(fault);
            let pause = self.rng.u64(500..3_000);
            sleep(Duration::from_millis(pause));
        }
    }

    fn draw(&mut self) -> Fault {
        let all: u32 = FAULTS.iter().map(|(_, weight)| weight).sum();
        let mut drawn = self.rng.u32(0..all);
        for (fault, weight) in FAULTS {
            if drawn < weight {
                return fault;
            }
            drawn -= weight;
        }
        unreachable!("drawn below the sum")
    }

    fn fault(&mut self, fault: Fault) {
        let since = now_us();
        let length = Duration::from_millis(self.rng.u64(100..1_500));
        let victim = self.rng.usize(0..PROCESSES);
        match fault {
            Fault::Kill => {
                let new = self.launch();
                let (mut old, _proxy) = std::mem::replace(&mut self.running[victim], new);
                old.kill();
                self.ended.push(old.finish());
            }
            Fault::StopPastLease => {
                let lease = Duration::from_micros(self.history.bounds.lease_us);
                self.running[victim].0.pause();
                sleep(lease + length);
                self.running[victim].0.resume();
            }
            Fault::PauseStore => {
                self.server.pause();
                sleep(length);
                self.server.resume();
                self.trouble(since);
            }
            Fault::KillClients => {
                self.server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
                self.trouble(since);
            }
            Fault::KillSubscribers => {
                self.server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
                self.trouble(since);
            }
            Fault::PauseClients => {
                let ms = length.as_millis().to_string();
                self.server.cli(&["CLIENT", "PAUSE", &ms, "ALL"]);
                sleep(length);
                self.trouble(since);
            }
            Fault::FlushScripts => drop(self.server.cli(&["SCRIPT", "FLUSH"])),
            Fault::FlushData => {
                self.server.cli(&["FLUSHALL"]);
                self.history.losses.push((since, now_us()));
            }
            Fault::RestartStore => {
                self.server.restart();
                self.history.losses.push((since, now_us()));
                self.trouble(since);
            }
            Fault::Delay | Fault::DropReplies | Fault::HalfOpen | Fault::Cut => {
                self.hamper(fault, victim, length);
            }
        }
    }

    /// A fault between one process and the store.
    fn hamper(&mut self, fault: Fault, victim: usize, length: Duration) {
        let since = now_us();
        let (running, proxy) = &mut self.running[victim];
        match fault {
            Fault::Delay => {
                let way = if self.rng.bool() {
                    Way::Requests
                } else {
                    Way::Replies
                };
                proxy.delay(way, length / 2);
                sleep(length);
                proxy.delay(way, Duration::ZERO);
            }
            Fault::DropReplies => {
                proxy.drop_replies(true);
                sleep(length);
                proxy.drop_replies(false);
            }
            Fault::HalfOpen => {
                proxy.half_open(true);
                sleep(length);
                proxy.half_open(false);
            }
            _ => proxy.cut_all(),
        }
        running.hampered(since);
    }

    fn trouble(&mut self, since: u64) {
        self.history.troubles.push((since, recovered(now_us())));
    }

    /// Ends all processes, after which the store must be empty.
    fn finish(mut self) -> History {
        let running = std::mem::take(&mut self.running);
        let (mut running, proxies): (Vec<_>, Vec<_>) = running.into_iter().unzip();
        running.iter_mut().for_each(Running::ask_to_end);
        self.ended.extend(running.into_iter().map(Running::finish));
        drop(proxies);
        until_empty(&self.server);
        self.history.processes = self.ended;
        self.history.troubles.extend(self.watch.finish());
        self.history
    }
}
