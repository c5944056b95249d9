//! Wrong clocks: the server's, stepped by a minute and more, and the processes'.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;
use tower_turnstile::Permit;

use crate::{
    scene::{
        Holders, LONG, queue, soon, steady_semaphore, strict, until_empty, until_granted,
        until_usage, usage,
    },
    storage::{CAP, fill, newcomers, until_in_store},
    support::{
        alone,
        clock::{Clock, time_of},
        redis_server::RedisServer,
        replica::{Replica, SERVER, command},
        watch::{Ledger, Streams},
    },
};

const HOLD: Duration = Duration::from_millis(50);
/// A lease, and a waiter's time to live.
const LONG_S: i64 = LONG.as_secs() as i64;

struct Stepped {
    holders: Holders,
    held: Vec<Arc<Permit>>,
    server: RedisServer,
}

/// Some holders keep their permits while others wait; then the server's clock is stepped.
async fn step(clock: &Clock, seconds: i64) -> Stepped {
    let server = clock.server();
    let holders = Holders::count(CAP);
    let one = steady_semaphore(&server.url(), &strict(CAP)).await;
    let other = newcomers(&server.url()).await;
    let mut held = fill(&holders, &one, CAP).await;
    let load = holders.load(&other, 4, HOLD);
    until_usage(&other, |_, waiting| waiting == 4).await;
    clock.step(&server, seconds).await;
    // An answer about the key shows what is missing, as a renewal would.
    drop(one.try_acquire().await);
    until_in_store(&server, &held).await;
    let figures = holders.until_kept(4 * HOLD).await;
    println!("stepped by {seconds} s: {figures}");
    assert!(
        held.iter().all(|permit| !permit.is_lost()),
        "their own clocks were right"
    );
    // Free a slot, so that the load makes progress. G4
    held.pop();
    let done = load.finish().await;
    until_granted(&other).await;
    println!("stepped by {seconds} s: {done:?}");
    assert_eq!(holders.figures().over, figures.over, "G1");
    Stepped {
        holders,
        held,
        server,
    }
}

/// By the server's clock all leases are over. The violation of G1 that this excuses is bounded by the holders that
/// continue by their own clocks.
#[tokio::test]
async fn a_server_clock_stepped_forward_overshoots_once() {
    let clock = Clock::new();
    let Stepped {
        holders,
        held,
        server,
    } = step(&clock, 10 * LONG_S).await;
    let figures = holders.figures();
    assert!(figures.peak <= 2 * CAP as usize, "{figures}");
    drop(held);
    until_empty(&server).await;
}

/// Leases last longer by the step: nothing is granted twice, and a released slot is free long before their end.
#[tokio::test]
async fn a_server_clock_stepped_back_breaks_no_cap() {
    let clock = Clock::new();
    let Stepped {
        holders,
        held,
        server,
    } = step(&clock, -120).await;
    assert_eq!(holders.figures().peak, CAP as usize, "G1");
    drop(held);
    let other = steady_semaphore(&server.url(), &strict(CAP)).await;
    let permits = [soon(other.acquire()).await, soon(other.acquire()).await];
    assert!(permits.iter().all(Result::is_ok), "G5");
    drop(permits);
    // Requests made before the step may be repeated until the clock has caught up; they delay nobody.
    until_usage(&other, |in_use, waiting| in_use + waiting == 0).await;
}

/// Deadlines further ahead than any lease are shortened. Otherwise a crashed holder would keep its slot for as long as
/// the clock was stepped back.
#[tokio::test]
async fn a_clock_stepped_back_by_a_day_leaves_no_deadline_beyond_the_longest_lease() {
    let clock = Clock::new();
    let server = clock.server();
    clock.step(&server, 24 * 60 * 60).await;
    let one = steady_semaphore(&server.url(), &strict(1)).await;
    let _permit = soon(one.acquire()).await.expect("free");
    // A holder of a dead process ends within an hour's lease at most.
    let key = server.keys("*");
    let until_ms = (time_of(&server) + 30) * 1_000;
    server.cli(&["ZADD", &key, &until_ms.to_string(), "crashed"]);
    clock.step(&server, 0).await;
    until_usage(&one, |in_use, _| in_use == 2).await;
    let score: f64 = server
        .cli(&["ZSCORE", &key, "crashed"])
        .parse()
        .expect("a score");
    let ahead = score / 1_000.0 - time_of(&server) as f64;
    println!("it ends in {ahead:.0} s");
    assert!((0.0..=3_601.0).contains(&ahead), "{ahead}");
}

/// Back by more than the lease, then forward by less than a waiter's time to live: the queue is unchanged. A replica
/// that has not called since a step forward may look as if it had stopped, so its waiters may be overtaken until then.
#[tokio::test]
async fn small_steps_cost_no_queue_position() {
    let clock = Clock::new();
    let server = clock.server();
    let (one, other) = (
        steady_semaphore(&server.url(), &strict(1)).await,
        steady_semaphore(&server.url(), &strict(1)).await,
    );
    let held = soon(one.acquire()).await.expect("free");
    let first = queue(&one, 1).await;
    clock.step(&server, -2 * LONG_S).await;
    let second = queue(&other, 2).await;
    clock.step(&server, -LONG_S - LONG_S / 2).await;
    usage(&other).await;
    let third = queue(&one, 3).await;
    assert_eq!(usage(&one).await, (1, 3));
    drop(held);
    for waiter in [first, second, third] {
        // Another one that is granted the slot before keeps it. G3
        drop(soon(waiter).await.expect("no panic"));
    }
    until_empty(&server).await;
}

/// A process's wall clock is never used: replicas minutes apart share one cap, in order of arrival.
#[test]
fn replicas_whose_clocks_are_wrong_share_one_cap() {
    alone(async {
        let server = RedisServer::start();
        let clocks = [Clock::new(), Clock::new(), Clock::new()];
        let mut replicas = Vec::new();
        for (clock, seconds) in clocks.iter().zip([-600, 0, 600]) {
            clock.step_to(seconds);
            // So that no replica is passed over when a busy machine makes it late.
            let patient = ["--lease", "5m", "--store-timeout", "20s"];
            let options = ["--store", &server.url(), "--limit", "1"];
            let options = [&["--listen", "127.0.0.1:0"], &options[..], &patient].concat();
            let mut command = command(SERVER, &options);
            command.envs(clock.environment());
            replicas.push(Replica::launch(command).await);
        }
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let holder = streams.open(99, replicas[0].get("/stream?chunks=1000&every=20"));
        watch.until_members(1).await;
        let mut clients = Vec::new();
        for number in 0..9 {
            let request = replicas[number % 3].get("/stream?chunks=3&every=20");
            clients.push(streams.open(number, request));
            watch.until_members(number + 2).await;
        }
        streams.until_started(99).await;
        // In the middle of the run, the clocks are wrong in the other direction, by more than a lease.
        for (clock, seconds) in clocks.iter().zip([600, -3_600, -600]) {
            clock.step_to(seconds);
        }
        // Time for what may be over by these clocks.
        sleep(Duration::from_millis(500)).await;
        holder.abort();
        for client in clients {
            client.await.expect("no panic").expect("served");
        }
        let (seen, watched) = (streams.seen(), watch.finish());
        println!("order {:?}, most at once {}", seen.order, seen.most_at_once);
        assert_eq!((watched.most_holders, seen.most_at_once), (1, 1), "G1");
        let order: Vec<_> = [99].into_iter().chain(0..9).collect();
        assert_eq!(seen.order, order, "G3");
    });
}
