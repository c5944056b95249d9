//! Pairs of acquire and release over a distance, compared with the bound set by the round trip, on a server and in a
//! cluster.
//!
//! A fixed number of tasks acquires and releases without a pause. A pair takes one round trip, since no task waits for
//! a release, and then waits for its turn at the processors, which have `best` pairs a second over the shortest
//! distances. So the distance allows `tasks / (round trip + tasks / best)` pairs a second: the tasks bound the number in
//! flight. With 10,000 keys in a cluster each exchange has one key, and a limiter has 64 in flight for each of its 16
//! parts, half of them releases: that allows 512 pairs in a round trip.
//!
//! The cluster has one node. Each of the 16 parts of a limiter has its own connection, whichever node is at the other
//! end, and more nodes would only take more of this machine's processors.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::AsyncConnectionConfig;
use tokio::{runtime::Runtime, task::JoinSet, time::sleep};
use tower_turnstile::{Fallback, Limit, Limiter, Semaphore};

use crate::{
    STORE_TIMEOUT, distant::DistantServer, redis_cluster::RedisCluster, redis_server::RedisServer,
};

/// Tasks of a row, unless the command line has another number.
const TASKS: usize = 1_000;
const KEYS: [usize; 3] = [1, 100, 10_000];
/// Round trips in milliseconds. Without one, the processors are the limit.
const ROUND_TRIPS_MS: [u64; 5] = [0, 1, 5, 20, 100];
/// Minimum time for tasks to get out of step with each other.
const WARM_UP: Duration = Duration::from_millis(250);
const MEASURED: Duration = Duration::from_secs(1);
/// Interval between checks whether the store is up. An outage lasts at least 50 ms and a round trip.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Pause of a refused task, which would otherwise retry in a busy loop while the breaker is open.
const AFTER_REFUSAL: Duration = Duration::from_millis(10);
/// Permits of distinct keys that are held when a shutdown begins.
const LEFT: usize = 5_000;
const GRACE: Duration = Duration::from_secs(10);

/// The load of a row.
#[derive(Clone, Copy)]
struct Load {
    tasks: usize,
    keys: usize,
    warm_up: Duration,
    measured: Duration,
}

/// The outcome of a row.
struct Row {
    pairs_per_second: f64,
    /// Duration of a pair, by percentile.
    p50: Duration,
    p99: Duration,
    /// Requests without a slot, since the store was not called or did not answer.
    refused: u64,
    /// Number of times that the breaker opened under load.
    openings: u64,
    /// Whether the store counted as down once the limiter was connected.
    starts_down: bool,
    /// Exchanges that were in flight on average.
    in_flight: f64,
}

/// `tasks` overrides [`TASKS`].
pub(crate) fn report(runtime: &Runtime, tasks: Option<usize>) {
    let tasks = tasks.unwrap_or(TASKS);
    let server = RedisServer::start();
    let distant = DistantServer::before(server.port());
    println!(
        "pairs of acquire and release over a distance, by {tasks} tasks; store_timeout {STORE_TIMEOUT:?}"
    );
    println!(
        "allowed: a pair for each task in a round trip (PING) and in the time that the processors take for all tasks"
    );
    println!(
        "in flight: exchanges on average, by the calls of the script in a round trip; openings: of the breaker"
    );
    table(
        "one server",
        false,
        &server,
        &distant,
        &distant.url(),
        runtime,
        tasks,
    );
    shutdowns(&server, &distant, &distant.url(), runtime);

    let cluster = RedisCluster::start(1, 0);
    let node = &cluster.primaries[0];
    let distant = DistantServer::before(node.port());
    let port = distant.port().to_string();
    node.cli(&["CONFIG", "SET", "cluster-announce-port", &port]);
    let url = format!("redis+cluster://127.0.0.1:{port}");
    table(
        "a cluster: 16 parts",
        true,
        node,
        &distant,
        &url,
        runtime,
        tasks,
    );
    shutdowns(node, &distant, &url, runtime);
}

/// Pairs in flight with a key for each exchange.
const PAIRS_OF_ONE_KEY: f64 = 16.0 * 64.0 / 2.0;

/// Runs a row of every kind, as a smoke test.
pub(crate) fn try_out(runtime: &Runtime) {
    let server = RedisServer::start();
    let distant = DistantServer::before(server.port());
    distant.set_round_trip(Duration::from_millis(1));
    let load = Load {
        tasks: 10,
        keys: 10,
        warm_up: Duration::from_millis(5),
        measured: Duration::from_millis(5),
    };
    let trip = runtime.block_on(ping(&distant.url()));
    let row = runtime.block_on(run(&server, &distant.url(), load, trip));
    println!("over 1 ms: {:.0} pairs/s", row.pairs_per_second);
}

fn table(
    name: &str,
    is_cluster: bool,
    server: &RedisServer,
    distant: &DistantServer,
    url: &str,
    runtime: &Runtime,
    tasks: usize,
) {
    println!();
    println!(
        "{name:<22}{:>10}{:>10}{:>10}{:>8}{:>10}{:>10}{:>11}{:>9}{:>9}",
        "round trip",
        "pairs/s",
        "allowed",
        "ratio",
        "p50",
        "p99",
        "in flight",
        "refused",
        "openings"
    );
    let loads = [(1, 1)].into_iter().chain(KEYS.map(|keys| (tasks, keys)));
    for (tasks, keys) in loads {
        let mut best = 0.0_f64;
        for trip_ms in ROUND_TRIPS_MS {
            distant.set_round_trip(Duration::from_millis(trip_ms));
            let trip = runtime.block_on(ping(&distant.url()));
            let load = Load {
                tasks,
                keys,
                warm_up: WARM_UP.max(4 * trip),
                measured: MEASURED.max(15 * trip),
            };
            let row = runtime.block_on(run(server, url, load, trip));
            best = best.max(row.pairs_per_second);
            let in_flight = (tasks as f64).min(if is_cluster && keys > 1_000 {
                PAIRS_OF_ONE_KEY
            } else {
                f64::MAX
            });
            let step = trip.as_secs_f64() + tasks as f64 / best;
            let allowed = (tasks as f64 / step).min(in_flight / trip.as_secs_f64());
            let what = match tasks {
                1 => "alone".to_owned(),
                _ => format!("{keys} key{}", if keys == 1 { "" } else { "s" }),
            };
            println!(
                "  {what:<20}{:>7.2} ms{:>10.0}{:>10.0}{:>8.2}{:>7.1} ms{:>7.1} ms{:>11.1}{:>9}{:>9}{}",
                ms(trip),
                row.pairs_per_second,
                allowed,
                row.pairs_per_second / allowed,
                ms(row.p50),
                ms(row.p99),
                row.in_flight,
                row.refused,
                row.openings,
                if row.starts_down { "^" } else { "" },
            );
        }
    }
    println!("  ^: the store counted as down after `connect`");
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// The shortest of several round trips, since other work on this machine only adds to them.
async fn ping(url: &str) -> Duration {
    let client = redis::Client::open(url).expect("a URL");
    // The default would give up on a server that is a second away.
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    let mut redis = connection.await.expect("the server is up");
    let pings = async move {
        let mut shortest = Duration::MAX;
        for _ in 0..7 {
            let start = Instant::now();
            let pong: String = redis::cmd("PING")
                .query_async(&mut redis)
                .await
                .expect("up");
            assert_eq!(pong, "PONG");
            shortest = shortest.min(start.elapsed());
        }
        shortest
    };
    tokio::spawn(pings).await.expect("no panic")
}

async fn run(server: &RedisServer, url: &str, load: Load, trip: Duration) -> Row {
    // No slot is scarce, and with `Reject` a request that the store does not decide is visible.
    let limit = Limit::concurrent("far", 100_000).fallback(Fallback::Reject);
    let limiter = connect(url).await;
    let semaphores = 0..load.keys as u64;
    let starts_down = !limiter.status().store_up;
    while !limiter.status().store_up {
        sleep(LOOK_INTERVAL).await;
    }
    let semaphores: Arc<[_]> = semaphores
        .map(|key| limiter.semaphore(&limit, key).unwrap())
        .collect();
    let begin = Instant::now() + load.warm_up;
    let end = begin + load.measured;
    let refused = Arc::new(AtomicU64::new(0));
    let openings = Arc::new(AtomicU64::new(0));
    let is_over = Arc::new(AtomicBool::new(false));
    let watch = tokio::spawn(watch(limiter.clone(), openings.clone(), is_over.clone()));
    let mut tasks = JoinSet::new();
    for task in 0..load.tasks {
        let (semaphores, refused) = (semaphores.clone(), refused.clone());
        tasks.spawn(acquire_until(end, task as u64, semaphores, refused));
    }
    sleep(begin.saturating_duration_since(Instant::now())).await;
    let calls = calls_of_script(server);
    sleep(end.saturating_duration_since(Instant::now())).await;
    let calls = calls_of_script(server) - calls;
    let pairs = tasks.join_all().await.into_iter().flatten();
    is_over.store(true, Ordering::Relaxed);
    watch.await.expect("no panic");
    limiter.shutdown(Duration::from_secs(2)).await;
    server.cli(&["FLUSHALL"]);

    let (mut times, mut sum) = (Vec::new(), 0.0);
    for (start, time) in pairs {
        // Count the part of each pair that is in time, since pairs come in bursts, a round trip apart.
        let inside = end
            .min(start + time)
            .saturating_duration_since(begin.max(start));
        sum += inside.as_secs_f64() / time.as_secs_f64();
        if !inside.is_zero() {
            times.push(time);
        }
    }
    times.sort();
    let at = |part: f64| {
        let index = (times.len() as f64 * part) as usize;
        times.get(index).copied().unwrap_or_default()
    };
    let seconds = load.measured.as_secs_f64();
    Row {
        pairs_per_second: sum / seconds,
        p50: at(0.5),
        p99: at(0.99),
        refused: refused.load(Ordering::Relaxed),
        openings: openings.load(Ordering::Relaxed),
        starts_down,
        in_flight: calls as f64 / seconds * trip.as_secs_f64(),
    }
}

/// Acquires one permit after the other, each under a random key. Returns the start and the duration of each pair.
async fn acquire_until(
    end: Instant,
    seed: u64,
    semaphores: Arc<[Semaphore]>,
    refused: Arc<AtomicU64>,
) -> Vec<(Instant, Duration)> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut pairs = Vec::new();
    loop {
        let start = Instant::now();
        if start >= end {
            return pairs;
        }
        match semaphores[random.usize(..semaphores.len())].acquire().await {
            Ok(permit) => {
                drop(permit);
                pairs.push((start, start.elapsed()));
            }
            Err(_) => {
                refused.fetch_add(1, Ordering::Relaxed);
                sleep(AFTER_REFUSAL).await;
            }
        }
    }
}

/// Counts the openings of the breaker.
async fn watch(limiter: Limiter, openings: Arc<AtomicU64>, is_over: Arc<AtomicBool>) {
    let mut was_up = true;
    while !is_over.load(Ordering::Relaxed) {
        let is_up = limiter.status().store_up;
        openings.fetch_add(u64::from(was_up && !is_up), Ordering::Relaxed);
        was_up = is_up;
        sleep(LOOK_INTERVAL).await;
    }
}

async fn connect(url: &str) -> Limiter {
    let limiter = Limiter::builder().store_timeout(STORE_TIMEOUT);
    limiter.connect(url).await.expect("the server is up")
}

fn calls_of_script(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    let calls = line.and_then(|line| line.split(',').next());
    calls.map_or(0, |calls| calls.parse().expect("a number"))
}

/// Measures shutdowns that wait for the release of permits.
fn shutdowns(server: &RedisServer, distant: &DistantServer, url: &str, runtime: &Runtime) {
    println!();
    println!(
        "  {LEFT} permits of distinct keys, dropped as a shutdown of {GRACE:?} begins: slots still taken when it ends"
    );
    for trip_ms in [5, 20, 100] {
        // Acquire without a distance.
        distant.set_round_trip(Duration::ZERO);
        let (took, report) = runtime.block_on(async {
            let limiter = connect(url).await;
            let limit = Limit::concurrent("left", 1);
            let mut permits = Vec::new();
            for key in 0..LEFT as u64 {
                permits.push(
                    limiter
                        .semaphore(&limit, key)
                        .unwrap()
                        .acquire()
                        .await
                        .expect("free"),
                );
            }
            distant.set_round_trip(Duration::from_millis(trip_ms));
            let start = Instant::now();
            let shutdown = {
                let limiter = limiter.clone();
                tokio::spawn(async move { limiter.shutdown(GRACE).await })
            };
            // Wait until the shutdown has begun, so that it counts the permits.
            sleep(LOOK_INTERVAL).await;
            drop(permits);
            let report = shutdown.await.expect("no panic");
            (start.elapsed(), report)
        });
        let taken = server.key_count();
        println!("  {trip_ms:>4} ms: {taken} after {took:.2?}; {report:?}");
        server.cli(&["FLUSHALL"]);
    }
}
