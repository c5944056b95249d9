//! Pairs of acquire and release: our semaphore beside the semaphores that it grew out of, beside the minimum cost of
//! any design that sends a command per step, and beside in-process semaphores.
//!
//! ```sh
//! cargo bench -p tests --bench semaphore              # the table: about two minutes
//! cargo bench -p tests --bench semaphore -- 25        # the same with more rounds
//! cargo bench -p tests --bench semaphore -- handoff   # how soon a free slot is in use again: a few seconds
//! cargo bench -p tests --bench semaphore -- sharing   # what a second process has of slots that are used again: a few seconds
//! cargo bench -p tests --bench semaphore -- growth    # the cost as holders, waiters, replicas and keys grow: about a minute
//! cargo bench -p tests --bench semaphore -- distance  # what a round trip of 1 to 100 ms allows, by 1,000 tasks: about two minutes
//! cargo bench -p tests --bench semaphore -- distance 200 # the same by 200 tasks
//! ```
//!
//! All contenders run in this process, on one runtime, against one redis-server that the bench starts. The contenders
//! take turns, a slice of time each, and are compared only within a round, so that other work on the machine affects
//! all contenders alike. A bench harness would run one contender after the other, so this bench does not use one.
//!
//! Our semaphore releases slots in the background, so its slice ends only when the store has answered a query sent
//! after the last release.
//!
//! `benches/RESULTS.md` has the results.

mod baseline;
mod contestant;
mod cost;
mod distance;
mod distant;
mod growth;
mod handoff;
// Tests of failovers use the rest of the module.
#[allow(dead_code)]
#[path = "../../tests/support/redis_cluster.rs"]
mod redis_cluster;
#[path = "../../tests/support/redis_server.rs"]
mod redis_server;
mod sharing;
mod spread;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contestant::Contestant;
use cost::Cost;
use redis_server::RedisServer;
use spread::Spread;
use tokio::{runtime::Runtime, task::JoinSet};
use tower_turnstile::Limit;

/// More than the tasks, so that none has to wait.
const LIMIT: u32 = 1_000;
const HOT: Limit = Limit::concurrent("hot", LIMIT);
const FAIR: Limit = Limit::concurrent("fair", LIMIT)
    .wait_up_to(Duration::from_secs(60))
    .fair();
const REUSED: Limit = Limit::concurrent("reused", LIMIT).reuse();
const LEASE: Duration = Duration::from_secs(30);
const STORE_TIMEOUT: Duration = Duration::from_millis(500);

/// The load: a number of tasks that pick random keys.
struct Work {
    name: &'static str,
    tasks: usize,
    keys: usize,
}

const WORKS: [Work; 4] = [
    Work {
        name: "1 task, one key",
        tasks: 1,
        keys: 1,
    },
    Work {
        name: "64 tasks, one key",
        tasks: 64,
        keys: 1,
    },
    Work {
        name: "512 tasks, one key",
        tasks: 512,
        keys: 1,
    },
    Work {
        name: "256 tasks, 5,000 keys",
        tasks: 256,
        keys: 5_000,
    },
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let benching = arguments.iter().any(|argument| argument == "--bench");
    let number: Option<usize> = arguments.iter().find_map(|argument| argument.parse().ok());
    // Without `--bench` this is a smoke test.
    let (rounds, slice) = if benching {
        (number.unwrap_or(9), Duration::from_millis(200))
    } else {
        (1, Duration::from_millis(5))
    };

    let runtime = Runtime::new().expect("a runtime");
    if arguments.iter().any(|argument| argument == "distance") {
        return distance::report(&runtime, number);
    }
    let server = RedisServer::start();
    if arguments.iter().any(|argument| argument == "handoff") {
        return handoff::report(&server, &runtime, rounds, slice);
    }
    if arguments.iter().any(|argument| argument == "sharing") {
        return sharing::report(&server, &runtime, rounds, slice);
    }
    if arguments.iter().any(|argument| argument == "growth") {
        return growth::report(&server, &runtime, rounds, 100_000);
    }
    println!(
        "pairs of acquire and release, {rounds} rounds of {slice:?} for each contender in turn"
    );
    println!("median ± half of the interquartile range; times of the server are for each pair");
    for work in &WORKS {
        let mut contenders: Vec<Contender> = runtime.block_on(contenders(&server, work));
        for contender in &mut contenders {
            contender.warm_up(&runtime, work, slice);
        }
        for round in 0..rounds {
            let mut order: Vec<usize> = (0..contenders.len()).collect();
            order.rotate_left(round % contenders.len());
            for number in order {
                contenders[number].take_turn(&runtime, &server, work);
            }
        }
        report(work, &contenders);
    }
    alone(&server, &runtime, rounds);
    handoff::report(&server, &runtime, rounds, slice);
    sharing::report(&server, &runtime, rounds, slice);
    if !benching {
        growth::report(&server, &runtime, rounds, 10);
        distance::try_out(&runtime);
    }
}

/// Measures a request now and then, as under low load.
fn alone(server: &RedisServer, runtime: &Runtime, rounds: usize) {
    let mut contenders = runtime.block_on(contenders(server, &WORKS[0]));
    // One command of the floor is the minimum for an acquire.
    contenders.retain(|contender| contender.semaphore.is_remote());
    let mut times = vec![Vec::new(); contenders.len()];
    for round in 0..rounds {
        for turn in 0..contenders.len() {
            let number = (turn + round) % contenders.len();
            let acquire = acquire_now_and_then(contenders[number].semaphore.clone());
            let time = runtime.block_on(runtime.spawn(acquire));
            times[number].push(1e6 * time.expect("no panic").as_secs_f64());
        }
    }
    println!();
    println!(
        "{:<36}{:>18}{:>16}",
        "1 task, a pause before each", "acquire", "ours takes"
    );
    for (contender, its) in contenders.iter().zip(&times) {
        let time = Spread::of(its.iter().copied());
        let ratio = Spread::of(times[0].iter().zip(its).map(|(ours, its)| ours / its));
        println!(
            "  {:<34}{:>9.1} us ± {:>2.0} %{:>8.2}x ± {:.2}",
            contender.name,
            time.median,
            100.0 * time.around / time.median,
            ratio.median,
            ratio.around,
        );
    }
}

/// The median of several samples.
async fn acquire_now_and_then(semaphore: Arc<Contestant>) -> Duration {
    let mut times = Vec::new();
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let start = Instant::now();
        let held = semaphore.acquire(0).await;
        times.push(start.elapsed());
        semaphore.release(held).await;
    }
    times.sort();
    times[times.len() / 2]
}

struct Contender {
    name: &'static str,
    semaphore: Arc<Contestant>,
    /// Pairs in a slice.
    pairs: usize,
    /// Pairs a second, in each round.
    rates: Vec<f64>,
    cost: Cost,
}

/// All contenders: ours first, as the reference.
async fn contenders(server: &RedisServer, work: &Work) -> Vec<Contender> {
    let all = contestant::all(server, work).await.into_iter();
    all.map(|(name, semaphore)| Contender {
        name,
        semaphore: Arc::new(semaphore),
        pairs: work.tasks,
        rates: Vec::new(),
        cost: Cost::default(),
    })
    .collect()
}

impl Contender {
    /// Determines the number of pairs that fill a slice.
    fn warm_up(&mut self, runtime: &Runtime, work: &Work, slice: Duration) {
        loop {
            let took = runtime.block_on(self.run(work));
            let factor = slice.as_secs_f64() / took.as_secs_f64();
            self.pairs = (self.pairs as f64 * factor.min(10.0)) as usize;
            self.pairs = self.pairs.next_multiple_of(work.tasks).max(work.tasks);
            if factor < 2.0 {
                return;
            }
        }
    }

    fn take_turn(&mut self, runtime: &Runtime, server: &RedisServer, work: &Work) {
        let before = Cost::read(server, self.semaphore.commands());
        let took = runtime.block_on(self.run(work));
        self.cost
            .add(before, Cost::read(server, self.semaphore.commands()));
        self.rates.push(self.pairs as f64 / took.as_secs_f64());
    }

    async fn run(&self, work: &Work) -> Duration {
        let (keys, each) = (work.keys, self.pairs / work.tasks);
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..work.tasks {
            let semaphore = self.semaphore.clone();
            tasks.spawn(async move {
                let mut random = fastrand::Rng::with_seed(task as u64);
                for _ in 0..each {
                    let held = semaphore.acquire(random.usize(..keys)).await;
                    semaphore.release(held).await;
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.expect("no task panics");
        }
        self.semaphore.settle().await;
        start.elapsed()
    }
}

fn report(work: &Work, contenders: &[Contender]) {
    println!();
    println!(
        "{:<36}{:>18}{:>16}{:>20}{:>12}",
        work.name, "pairs/s", "ours is", "server: commands", "processor"
    );
    for contender in contenders {
        let rate = Spread::of(contender.rates.iter().copied());
        print!(
            "  {:<34}{:>10.0} ± {:>3.0} %",
            contender.name,
            rate.median,
            100.0 * rate.around / rate.median,
        );
        let Cost {
            commands_us,
            processor_us,
        } = contender.cost;
        let ours = contenders[0].rates.iter();
        let ratio = Spread::of(ours.zip(&contender.rates).map(|(ours, its)| ours / its));
        print!("{:>8.2}x ± {:.2}", ratio.median, ratio.around);
        if contender.semaphore.is_remote() {
            let pairs = (contender.pairs * contender.rates.len()) as f64;
            print!(
                "{:>17.2} us{:>9.2} us",
                commands_us / pairs,
                processor_us / pairs,
            );
        }
        println!();
    }
}
