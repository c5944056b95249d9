//! Pairs of acquire and release: ours beside the semaphore it grew out of, and beside the least that any design costs
//! which sends a command for each step.
//!
//! ```sh
//! cargo bench --bench semaphore          # about a minute
//! cargo bench --bench semaphore -- 25    # the same with more rounds
//! ```
//!
//! All contenders run in this process, on one runtime, against one redis-server that the bench starts for itself. They
//! take turns, a slice of time each, and are compared within a round only: on a machine with other work its moods
//! then fall on all of them alike. That is why there is no bench harness, which would run one after the other.
//!
//! Ours gives slots back behind the caller's back, so its slice ends only when the store has answered a question that
//! was asked after the last release.

#[path = "../tests/support/redis_server.rs"]
mod redis_server;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, IntoConnectionInfo, Value, aio::MultiplexedConnection,
    io::tcp::TcpSettings,
};
use redis_server::RedisServer;
use tokio::{runtime::Runtime, sync::SemaphorePermit, task::JoinSet};
use tower_turnstile::{Limit, Limiter, Permit, Semaphore};

/// More than there are tasks: nobody has to wait.
const LIMIT: u32 = 1_000;
const LEASE: Duration = Duration::from_secs(30);
const STORE_TIMEOUT: Duration = Duration::from_millis(500);

/// What is done: by so many tasks, each with the next key at random.
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
    let mut arguments = std::env::args().skip(1);
    let benching = arguments.any(|argument| argument == "--bench");
    let rounds = std::env::args().find_map(|argument| argument.parse().ok());
    // Without `--bench` it is run as a test, to see whether it runs.
    let (rounds, slice) = match benching {
        true => (rounds.unwrap_or(9), Duration::from_millis(200)),
        false => (1, Duration::from_millis(5)),
    };

    let server = RedisServer::start();
    let runtime = Runtime::new().expect("a runtime");
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
}

/// One request now and then, as with little load: how long it takes to acquire.
fn alone(server: &RedisServer, runtime: &Runtime, rounds: usize) {
    let mut contenders = runtime.block_on(contenders(server, &WORKS[0]));
    // One command of the floor is the least that an acquire takes.
    contenders.retain(Contender::is_remote);
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

/// The median of some.
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
    /// In a slice.
    pairs: usize,
    /// Pairs a second, in each round.
    rates: Vec<f64>,
    cost: Cost,
}

enum Contestant {
    Ours(Limiter, Vec<Semaphore>),
    InMemory(Vec<Semaphore>),
    /// Listing 11.8 of Redis in Action to acquire, ZREM to release.
    Seed(Baseline),
    /// A script that does nothing, for each step.
    Floor(Baseline),
    /// Our own script, called for each step by itself.
    OneByOne(Baseline),
    Tokio(Vec<tokio::sync::Semaphore>),
}

/// The first is ours, and the others are compared with it.
async fn contenders(server: &RedisServer, work: &Work) -> Vec<Contender> {
    const HOT: Limit = Limit::concurrent("hot", LIMIT);
    let semaphores = |limiter: &Limiter| {
        let keys = 0..work.keys as u64;
        keys.map(|key| limiter.semaphore(&HOT, key)).collect()
    };
    let settings = Limiter::builder().lease(LEASE).store_timeout(STORE_TIMEOUT);
    let shared = settings
        .connect(&server.url())
        .await
        .expect("the server is up");
    let tokio = (0..work.keys).map(|_| tokio::sync::Semaphore::new(LIMIT as usize));
    let baseline = async |name, script| Baseline::new(server, work, name, script).await;
    [
        (
            "tower-turnstile",
            Contestant::Ours(shared.clone(), semaphores(&shared)),
        ),
        (
            "its script, a call for each step",
            Contestant::OneByOne(baseline("one-by-one", EXCHANGE).await),
        ),
        (
            "Lua 11.8, then ZREM",
            Contestant::Seed(baseline("seed", SEED).await),
        ),
        (
            "EVALSHA 'return 1' for each step",
            Contestant::Floor(baseline("floor", "return 1").await),
        ),
        (
            "tower-turnstile, in memory",
            Contestant::InMemory(semaphores(&Limiter::in_memory())),
        ),
        ("tokio::sync::Semaphore", Contestant::Tokio(tokio.collect())),
    ]
    .map(|(name, semaphore)| Contender {
        name,
        semaphore: Arc::new(semaphore),
        pairs: work.tasks,
        rates: Vec::new(),
        cost: Cost::default(),
    })
    .into()
}

impl Contender {
    /// Finds out how many pairs fill a slice.
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
        let before = Cost::read(server, &self.semaphore);
        let took = runtime.block_on(self.run(work));
        self.cost.add(before, Cost::read(server, &self.semaphore));
        self.rates.push(self.pairs as f64 / took.as_secs_f64());
    }

    /// Else it stays in this process, and is there for scale only.
    fn is_remote(&self) -> bool {
        !self.semaphore.commands().is_empty()
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

/// A slot of one of the contestants.
enum Held<'a> {
    Ours(Permit),
    Tokio(SemaphorePermit<'a>),
    /// By this name, under this key.
    ByName(usize, String),
}

impl Contestant {
    async fn acquire(&self, key: usize) -> Held<'_> {
        match self {
            Self::Ours(_, semaphores) | Self::InMemory(semaphores) => {
                Held::Ours(semaphores[key].acquire().await.expect("a slot"))
            }
            Self::Tokio(semaphores) => Held::Tokio(semaphores[key].acquire().await.expect("open")),
            Self::Seed(seed) => Held::ByName(key, seed.listing_11_8(key).await),
            Self::Floor(floor) => Held::ByName(key, floor.nothing(key).await),
            Self::OneByOne(script) => Held::ByName(key, script.exchange_of(key, None).await),
        }
    }

    async fn release(&self, held: Held<'_>) {
        match (self, held) {
            (Self::Seed(seed), Held::ByName(key, id)) => seed.zrem(key, &id).await,
            (Self::Floor(floor), Held::ByName(key, _)) => drop(floor.nothing(key).await),
            (Self::OneByOne(script), Held::ByName(key, name)) => {
                drop(script.exchange_of(key, Some(name)).await);
            }
            (_, Held::Ours(permit)) => drop(permit),
            (_, Held::Tokio(permit)) => drop(permit),
            (_, Held::ByName(..)) => unreachable!("these have a command for it"),
        }
    }

    /// Until the last release is done.
    async fn settle(&self) {
        if let Self::Ours(limiter, _) = self {
            let last = limiter.semaphore(&Limit::concurrent("last", 1), "");
            last.usage().await.expect("the store answers");
        }
    }

    /// The commands that it sends by itself. What a script calls is counted with the script.
    fn commands(&self) -> &'static [&'static str] {
        match self {
            Self::Ours(..) | Self::Floor(_) | Self::OneByOne(_) => &["evalsha", "eval"],
            Self::Seed(_) => &["evalsha", "zrem"],
            Self::InMemory(_) | Self::Tokio(_) => &[],
        }
    }
}

/// A semaphore that sends a command for each step, over one multiplexed connection.
struct Baseline {
    redis: MultiplexedConnection,
    digest: String,
    keys: Vec<String>,
    /// The last name given to a permit.
    names: AtomicU64,
}

/// Listing 11.8, written anew.
const SEED: &str = "
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('ZADD', KEYS[1], ARGV[3], ARGV[4])
  return ARGV[4]
end";

const EXCHANGE: &str = include_str!("../src/ledger/exchange.lua");

impl Baseline {
    async fn new(server: &RedisServer, work: &Work, name: &str, script: &str) -> Self {
        let url = format!("{}?protocol=resp3", server.url());
        let address = url.into_connection_info().expect("a URL");
        let address = address.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = Client::open(address).expect("a URL");
        // As ours: nobody waits for the store without end.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(STORE_TIMEOUT));
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        let mut redis = connection.await.expect("the server is up");
        let load = redis::cmd("SCRIPT").arg("LOAD").arg(script).to_owned();
        let digest = load.query_async(&mut redis).await.expect("a script");
        // As long as ours.
        let keys = (0..work.keys).map(|key| format!("{name:-<9.9}:{{{key:032x}}}"));
        Self {
            redis,
            digest,
            keys: keys.collect(),
            names: AtomicU64::new(0),
        }
    }

    async fn listing_11_8(&self, key: usize) -> String {
        let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970");
        let id = format!("{:032x}", fastrand::u128(..));
        let mut acquire = self.script(key);
        acquire
            .arg((now - LEASE).as_secs_f64())
            .arg(LIMIT)
            .arg(now.as_secs_f64())
            .arg(&id);
        assert_ne!(self.send(acquire).await, Value::Nil, "a slot is free");
        id
    }

    async fn zrem(&self, key: usize, id: &str) {
        let mut release = redis::cmd("ZREM");
        release.arg(&self.keys[key]).arg(id);
        assert_eq!(self.send(release).await, Value::Int(1), "it was held");
    }

    async fn nothing(&self, key: usize) -> String {
        assert_eq!(self.send(self.script(key)).await, Value::Int(1));
        String::new()
    }

    /// One exchange that releases this permit, or acquires a new one.
    async fn exchange_of(&self, key: usize, held: Option<String>) -> String {
        let (releases, asks) = if held.is_some() { (1, "") } else { (0, "0") };
        let name = held.unwrap_or_else(|| {
            let name = self.names.fetch_add(1, Ordering::Relaxed);
            format!("{name:010}")
        });
        let mut exchange = self.script(key);
        exchange.arg("a-replica-of-the-service").arg(30_000);
        exchange
            .arg(5_000)
            .arg(6_500)
            .arg(u64::MAX / 2048)
            .arg("wake:")
            .arg(""); // no claims
        exchange.arg(LIMIT).arg(1_000).arg(0);
        exchange.arg(releases).arg(0).arg(0).arg(asks).arg(&name);
        let Value::Array(reply) = self.send(exchange).await else {
            panic!("the script's reply is a list");
        };
        assert!(matches!(reply[2], Value::Array(_)), "{reply:?}");
        name
    }

    fn script(&self, key: usize) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.digest).arg(1).arg(&self.keys[key]);
        cmd
    }

    async fn send(&self, cmd: Cmd) -> Value {
        let mut redis = self.redis.clone();
        cmd.query_async(&mut redis).await.expect("a reply")
    }
}

/// What the server has spent, in microseconds.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// In commands.
    commands_us: f64,
    /// The processor's time in all: commands, protocol, sockets.
    processor_us: f64,
}

impl Cost {
    fn read(server: &RedisServer, contestant: &Contestant) -> Self {
        let number = |text: &str| text.parse::<f64>().expect("a number");
        let stats = server.cli(&["INFO", "commandstats"]);
        let usec_of = |command: &&str| {
            let prefix = format!("cmdstat_{command}:");
            let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
            let usec = line.and_then(|line| {
                line.split(',')
                    .find_map(|field| field.strip_prefix("usec="))
            });
            usec.map_or(0.0, number)
        };
        let processor = server.cli(&["INFO", "cpu"]);
        let seconds = |name: &str| {
            let mut lines = processor.lines();
            lines
                .find_map(|line| line.strip_prefix(name))
                .map_or(0.0, number)
        };
        Self {
            commands_us: contestant.commands().iter().map(usec_of).sum(),
            processor_us: 1e6 * (seconds("used_cpu_user:") + seconds("used_cpu_sys:")),
        }
    }

    fn add(&mut self, before: Self, after: Self) {
        self.commands_us += after.commands_us - before.commands_us;
        self.processor_us += after.processor_us - before.processor_us;
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
        if contender.is_remote() {
            let ours = contenders[0].rates.iter();
            let ratio = Spread::of(ours.zip(&contender.rates).map(|(ours, its)| ours / its));
            let pairs = (contender.pairs * contender.rates.len()) as f64;
            print!(
                "{:>8.2}x ± {:.2}{:>17.2} us{:>9.2} us",
                ratio.median,
                ratio.around,
                commands_us / pairs,
                processor_us / pairs,
            );
        }
        println!();
    }
}

struct Spread {
    median: f64,
    /// Half of the interquartile range.
    around: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
        Self {
            median: at(0.5),
            around: (at(0.75) - at(0.25)) / 2.0,
        }
    }
}
