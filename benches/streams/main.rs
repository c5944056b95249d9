//! 100,000 streams, held by two processes through the layer: renewals, memory, and the effect of killing one process.
//!
//! ```sh
//! cargo bench -p tests --bench streams                # both layouts: about six minutes
//! cargo bench -p tests --bench streams -- one-key     # all streams under one key
//! cargo bench -p tests --bench streams -- many-keys   # two streams under each key, one in each process
//! cargo bench -p tests --bench streams -- 10000 6     # so many streams, with a lease of so many seconds
//! ```
//!
//! The bench starts a redis-server and two copies of itself. Each copy opens half of the streams through a tower
//! service under a [`LimitLayer`](tower_turnstile::LimitLayer), whose bodies never end, and holds them for several
//! leases. Then one copy is killed, while a third client acquires and releases slots all the time, under its own key
//! and under a key of the streams. The bench compares the waits of this client before and after the kill.
//!
//! The bench fails if a permit is lost, or a slot is not free two leases after the kill. The output shows targets
//! beside the figures. `benches/RESULTS.md` has the results.

mod gauge;
mod layout;
mod neighbour;
#[path = "../../tests/support/redis_server.rs"]
mod redis_server;
mod replica;
mod streams;
mod table;

use std::{
    alloc::System,
    fmt, thread,
    time::{Duration, Instant},
};

use gauge::Gauge;
use layout::Layout;
use neighbour::Neighbour;
use redis_server::RedisServer;
use replica::Replica;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
struct Plan {
    layout: Layout,
    streams: usize,
    lease: Duration,
    /// How long the streams are watched, in leases.
    leases: u32,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (streams, lease, leases) = (self.streams, self.lease, self.leases);
        let layout = self.layout.name();
        write!(
            f,
            "{streams} streams, {layout}, lease {lease:?}, held for {leases} leases"
        )
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|name| name == replica::NAME) {
        return replica::run(&arguments[1..]);
    }
    let benching = arguments.iter().any(|argument| argument == "--bench");
    let numbers = arguments
        .iter()
        .filter_map(|argument| argument.parse().ok());
    let numbers: Vec<usize> = numbers.collect();
    // Without `--bench` this is a smoke test.
    let (streams, lease_s, leases) = if benching {
        (100_000, 30, 3)
    } else {
        (200, 2, 1)
    };
    let streams = numbers.first().copied().unwrap_or(streams);
    let lease_s = numbers.get(1).map_or(lease_s, |seconds| *seconds as u64);
    let named = |layout: &Layout| arguments.iter().any(|name| name == layout.name());
    let all = !Layout::ALL.iter().any(named);
    for layout in Layout::ALL
        .into_iter()
        .filter(|layout| all || named(layout))
    {
        run(Plan {
            layout,
            streams,
            lease: Duration::from_secs(lease_s),
            leases,
        });
    }
}

/// Runs all phases: open, hold, kill.
fn run(plan: Plan) {
    let server = RedisServer::start();
    let gauge = Gauge::new(&server);
    let neighbour = Neighbour::start(&server.url(), plan);
    let mut waits = Vec::new();
    let mut watch = |when: &'static str, meanwhile: &mut dyn FnMut()| {
        gauge.reset();
        let watch = neighbour.watch();
        meanwhile();
        waits.push((when, watch.end(), gauge.longest_call_ms()));
    };
    watch("nobody else", &mut || thread::sleep(plan.lease / 6));

    let empty_bytes = gauge.used_bytes();
    let mut replicas = [(); 2].map(|()| Replica::start(&server.url(), plan));
    let held = replicas.each_mut().map(Replica::until_held);
    let keys = gauge.ledgers();
    let store_bytes = (gauge.used_bytes() - empty_bytes) / plan.streams as f64;

    let before = replicas.each_mut().map(Replica::look);
    gauge.reset();
    let (load, start) = (gauge.load(), Instant::now());
    let mut shortest_rest = Duration::MAX;
    while start.elapsed() < plan.lease * plan.leases {
        thread::sleep(plan.lease / 60);
        shortest_rest = shortest_rest.min(gauge.shortest_rest(&keys));
    }
    let (load, seconds) = (gauge.load() - load, start.elapsed().as_secs_f64());
    let after = replicas.each_mut().map(Replica::look);
    watch("all are held", &mut || thread::sleep(plan.lease / 3));

    let [dead, survivor] = &mut replicas;
    dead.kill();
    let killed = Instant::now();
    let mut back = None;
    watch("one was killed", &mut || {
        while back.is_none() && killed.elapsed() < plan.lease * 2 {
            thread::sleep(plan.lease / 60);
            // The third client may hold a slot at this moment.
            let all_back = gauge.live(&keys) <= plan.streams / 2 + 1;
            back = all_back.then(|| killed.elapsed());
        }
    });
    let free = neighbour.claim(plan);
    let survived = survivor.look();

    println!();
    println!("{plan}");
    table::renewals(&load, seconds, shortest_rest);
    table::memory(store_bytes, &held);
    table::processes(&held, &before, &after, seconds);
    table::kill(back, free, plan);
    table::waits(&waits);
    for look in after.iter().chain([&survived]) {
        assert_eq!(look.held, plan.streams / 2, "permits were lost");
    }
    assert_eq!(
        free,
        plan.layout.free_after_kill(plan.streams),
        "slots are missing"
    );
}
