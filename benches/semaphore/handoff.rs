//! The time until a freed slot is in use again while requests wait, beside the round trip of a PING.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::AsyncConnectionConfig;
use tokio::{runtime::Runtime, task::JoinSet};
use tower_turnstile::{Limit, Limiter, Semaphore};

use crate::{cost::Cost, redis_server::RedisServer, spread::Spread};

const WAITERS: usize = 64;
const HOLD: Duration = Duration::from_millis(5);
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const ONE: Limit = line("one", 1);
const FEW: Limit = line("few", 8);

const fn line(name: &'static str, limit: u32) -> Limit {
    Limit::concurrent(name, limit).wait_up_to(PATIENCE)
}

pub(crate) fn report(server: &RedisServer, runtime: &Runtime, rounds: usize, slice: Duration) {
    let [mut trips, mut waits, mut scripts, mut shares] = [const { Vec::new() }; 4];
    for replicas in [1, 2] {
        for _ in 0..rounds {
            trips.push(1e6 * runtime.block_on(ping(server, slice)).as_secs_f64());
            let semaphores = runtime.block_on(replicas_of(server, &ONE, replicas));
            let before = Cost::read(server, &["evalsha"]);
            let times = runtime.block_on(hand_on(semaphores, slice));
            let mut cost = Cost::default();
            cost.add(before, Cost::read(server, &["evalsha"]));
            scripts.push(cost.commands_us / times.len() as f64);
            waits.push(1e6 * median(times).as_secs_f64());
            let semaphores = runtime.block_on(replicas_of(server, &FEW, replicas));
            shares.push(100.0 * runtime.block_on(in_use(semaphores, 8, 5 * slice)));
        }
        let ratio = Spread::of(waits.iter().zip(&trips).map(|(wait, trip)| wait / trip));
        let all = [&mut trips, &mut waits, &mut scripts, &mut shares];
        let [trip, wait, script, share] = all.map(|values| Spread::of(values.drain(..)));
        println!();
        println!("{WAITERS} wait, in {replicas} process(es)");
        println!(
            "  a PING                       {:>9.1} us ± {:.1}",
            trip.median, trip.around
        );
        println!(
            "  limit 1: release to grant    {:>9.1} us ± {:.1}",
            wait.median, wait.around
        );
        println!(
            "    in round trips             {:>9.2} ± {:.2}",
            ratio.median, ratio.around
        );
        println!(
            "    of it the server's script  {:>9.1} us ± {:.1}",
            script.median, script.around
        );
        println!(
            "  limit 8, 5 ms each: in use   {:>9.1} % ± {:.1}",
            share.median, share.around
        );
    }
}

pub(crate) async fn replicas_of(
    server: &RedisServer,
    limit: &Limit,
    count: usize,
) -> Vec<Semaphore> {
    let mut replicas = Vec::new();
    for _ in 0..count {
        let limiter = Limiter::connect(&server.url()).await.expect("up");
        replicas.push(limiter.semaphore(limit, "handoff").unwrap());
    }
    replicas
}

/// The median of several samples.
pub(crate) async fn ping(server: &RedisServer, slice: Duration) -> Duration {
    let client = redis::Client::open(server.url()).expect("a URL");
    let config = AsyncConnectionConfig::new();
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    let mut redis = connection.await.expect("the server is up");
    let pings = async move {
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || begin.elapsed() < slice {
            let start = Instant::now();
            let pong: String = redis::cmd("PING")
                .query_async(&mut redis)
                .await
                .expect("up");
            assert_eq!(pong, "PONG");
            times.push(start.elapsed());
        }
        median(times)
    };
    tokio::spawn(pings).await.expect("no panic")
}

/// The time from the release of the only slot until another task has it.
async fn hand_on(replicas: Vec<Semaphore>, slice: Duration) -> Vec<Duration> {
    let released = Arc::new(Mutex::new(None::<Instant>));
    let times = all_of(replicas, slice, move |semaphore| {
        let released = released.clone();
        async move {
            let permit = semaphore.acquire().await.expect("in time");
            let since = released.lock().expect("no panic").take();
            let time = since.map(|since| since.elapsed());
            *released.lock().expect("no panic") = Some(Instant::now());
            drop(permit);
            time
        }
    });
    times.await.into_iter().flatten().collect()
}

/// The share of time in which the slots are in use.
async fn in_use(replicas: Vec<Semaphore>, limit: u32, slice: Duration) -> f64 {
    let begin = Instant::now();
    let held = all_of(replicas, slice, |semaphore| async move {
        let _permit = semaphore.acquire().await.expect("in time");
        let start = Instant::now();
        tokio::time::sleep(HOLD).await;
        start.elapsed()
    });
    let held: Duration = held.await.iter().sum();
    held.as_secs_f64() / (f64::from(limit) * begin.elapsed().as_secs_f64())
}

/// Runs a step in a loop in each of the waiting tasks.
async fn all_of<T, F>(
    replicas: Vec<Semaphore>,
    slice: Duration,
    step: impl Fn(Semaphore) -> F + Clone + Send + 'static,
) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send,
{
    let (begin, mut tasks) = (Instant::now(), JoinSet::new());
    for number in 0..WAITERS {
        let (semaphore, step) = (replicas[number % replicas.len()].clone(), step.clone());
        tasks.spawn(async move {
            let mut results = Vec::new();
            while begin.elapsed() < slice {
                results.push(step(semaphore.clone()).await);
            }
            results
        });
    }
    tasks.join_all().await.into_iter().flatten().collect()
}

pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
