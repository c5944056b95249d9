//! Reuse between processes: the time until a second process gets a slot that is idle in the first, beside the round
//! trip of a PING, and the second process's share of slots that the first had alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{runtime::Runtime, task::JoinSet, time::sleep};
use tower_turnstile::{Limit, Semaphore};

use crate::{
    handoff::{PATIENCE, median, ping, replicas_of},
    redis_server::RedisServer,
    spread::Spread,
};

const ONE: Limit = Limit::concurrent("kept", 1).wait_up_to(PATIENCE).reuse();
const FEW: Limit = Limit::concurrent("shared", 8).wait_up_to(PATIENCE).reuse();
const TASKS: usize = 64;
const HOLD: Duration = Duration::from_millis(1);

pub(crate) fn report(server: &RedisServer, runtime: &Runtime, rounds: usize, slice: Duration) {
    let (mut trips, mut waits) = (Vec::new(), Vec::new());
    let mut shares = [const { Vec::new() }; 2];
    for _ in 0..rounds {
        trips.push(1e6 * runtime.block_on(ping(server, slice)).as_secs_f64());
        waits.push(1e6 * runtime.block_on(called_back(server, slice)).as_secs_f64());
        let share = runtime.block_on(second_comes(server, 5 * slice / 2));
        shares
            .iter_mut()
            .zip(share)
            .for_each(|(all, share)| all.push(100.0 * share));
    }
    let ratio = Spread::of(waits.iter().zip(&trips).map(|(wait, trip)| wait / trip));
    let [trip, wait] = [trips, waits].map(|values| Spread::of(values.into_iter()));
    let [first, then] = shares.map(|values| Spread::of(values.into_iter()));
    println!();
    println!("with reuse, a second process comes");
    println!(
        "  a PING                       {:>9.1} us ± {:.1}",
        trip.median, trip.around
    );
    println!(
        "  an idle slot of the first    {:>9.1} us ± {:.1}",
        wait.median, wait.around
    );
    println!(
        "    in round trips             {:>9.2} ± {:.2}",
        ratio.median, ratio.around
    );
    println!(
        "  its share, first half second {:>9.1} % ± {:.1}",
        first.median, first.around
    );
    println!(
        "  and in the next one          {:>9.1} % ± {:.1}",
        then.median, then.around
    );
}

/// The median wait for a slot that another process keeps.
async fn called_back(server: &RedisServer, slice: Duration) -> Duration {
    let replicas = replicas_of(server, &ONE, 2).await;
    let times = tokio::spawn(async move {
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.is_empty() || begin.elapsed() < slice {
            let [one, other] = [&replicas[times.len() % 2], &replicas[(times.len() + 1) % 2]];
            drop(one.acquire().await.expect("in time"));
            // Obtains the right, so that the slot is kept.
            drop(one.acquire().await.expect("in time"));
            let start = Instant::now();
            drop(other.acquire().await.expect("in time"));
            times.push(start.elapsed());
        }
        times
    });
    median(times.await.expect("no panic"))
}

/// With equally many tasks in each process, the share of the process that came later, in two periods after it came.
async fn second_comes(server: &RedisServer, period: Duration) -> [f64; 2] {
    let replicas = replicas_of(server, &FEW, 2).await;
    let over = Arc::new(AtomicBool::new(false));
    let counts: Vec<Arc<AtomicU64>> = replicas.iter().map(|_| Arc::default()).collect();
    let mut tasks = JoinSet::new();
    let mut enter = |number: usize| {
        for _ in 0..TASKS {
            let (semaphore, over) = (replicas[number].clone(), over.clone());
            tasks.spawn(use_it(semaphore, counts[number].clone(), over));
        }
    };
    enter(0);
    sleep(period).await;
    enter(1);
    let mut shares = [0.0; 2];
    for share in &mut shares {
        let before: Vec<u64> = counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        sleep(period).await;
        let given = counts.iter().zip(before);
        let given: Vec<u64> = given
            .map(|(count, old)| count.load(Ordering::Relaxed) - old)
            .collect();
        *share = given[1] as f64 / given.iter().sum::<u64>().max(1) as f64;
    }
    over.store(true, Ordering::Relaxed);
    while let Some(done) = tasks.join_next().await {
        done.expect("no task panics");
    }
    shares
}

async fn use_it(semaphore: Semaphore, count: Arc<AtomicU64>, over: Arc<AtomicBool>) {
    while !over.load(Ordering::Relaxed) {
        let permit = semaphore.acquire().await.expect("in time");
        sleep(HOLD).await;
        drop(permit);
        count.fetch_add(1, Ordering::Relaxed);
    }
}
