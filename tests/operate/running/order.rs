//! Many commands and a service, under one limit.

use tokio::time::{sleep, timeout};
use tower_turnstile::{Limit, Limiter, Semaphore};

use super::{HOLD, Run, file, path};
use crate::{scene::SOON, support::redis_server::RedisServer};
use std::time::Duration;

const SLOTS: u32 = 3;
const COMMANDS: usize = 20;

async fn until_waiting(service: &Semaphore, count: usize) {
    let all = async {
        while service.usage().await.expect("up").waiting as usize != count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, all).await.expect("in time");
}

/// A service holds one of three slots; one command is killed while it runs, and the store is restarted. The store keeps
/// its data: otherwise limits would be exceeded until all holders are restored.
#[tokio::test(flavor = "multi_thread")]
async fn commands_run_in_order_of_arrival_and_never_too_many() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    // The test awaits the end of a lease.
    let config = file(&format!(
        "
        [store]
        url = '{}'
        lease = '3s'
        [limits.gpu]
        concurrent = {SLOTS}
        wait = '5m'
        [[routes]]
        match = ['*']
        limits = ['gpu']
        ",
        server.url()
    ));
    let limiter = Limiter::builder().lease(Duration::from_secs(3));
    let limiter = limiter.connect(server.url()).await.unwrap();
    let gpu = Limit::concurrent("gpu", SLOTS).wait_up_to(SOON);
    let service = limiter.semaphore(&gpu, "");
    let held = service.acquire().await.unwrap();
    let options = ["gpu", "--config", path(&config)];
    let mut runs = Vec::new();
    for number in 0..COMMANDS {
        let mut run = Run::start("memory:", &options, HOLD);
        match number {
            0 | 1 => run.until_runs().await,
            _ => until_waiting(&service, number - 1).await,
        }
        runs.push(run);
    }
    let in_use = async || service.usage().await.expect("up").in_use;
    assert_eq!(in_use().await, SLOTS);

    // Each end starts the next command in turn.
    let mut next = 2;
    for ended in 0..6 {
        runs[ended].end_input();
        assert_eq!(runs[ended].code().await, Some(0));
        runs[next].until_runs().await;
        next += 1;
        assert_eq!(in_use().await, SLOTS);
        until_waiting(&service, COMMANDS - next).await;
    }

    // The slot of a killed command is free when its lease ends, and not earlier.
    let killed = std::time::Instant::now();
    runs[6].process.start_kill().unwrap();
    runs[next].until_runs().await;
    next += 1;
    let took = killed.elapsed();
    assert!(took > Duration::from_secs(1), "{took:?}");
    assert!(in_use().await <= SLOTS);

    // Running commands continue, and waiting ones are in the queue again.
    server.restart();
    until_waiting(&service, COMMANDS - next).await;
    assert_eq!(in_use().await, SLOTS);
    drop(held);
    let mut rest = runs.split_off(next);
    for (number, run) in runs.iter_mut().enumerate().skip(7) {
        run.end_input();
        assert_eq!(run.code().await, Some(0), "{number}");
        assert!(in_use().await <= SLOTS);
    }
    // Now in the order in which they rejoined.
    rest.iter_mut().for_each(Run::end_input);
    for run in &mut rest {
        run.until_runs().await;
        assert!(in_use().await <= SLOTS);
        assert_eq!(run.code().await, Some(0));
    }
    assert_eq!(
        (in_use().await, service.usage().await.unwrap().waiting),
        (0, 0)
    );
}

/// Before a command has queued, the fallback decides at once. A queued command asks again when the store is back.
#[tokio::test]
async fn a_queue_outlasts_the_store() {
    let mut server = RedisServer::start();
    let limiter = Limiter::connect(server.url()).await.unwrap();
    let service = limiter.semaphore(Limit::concurrent("gpu", 1), "");
    let held = service.acquire().await.unwrap();
    let options = ["gpu", "--concurrent", "1", "--wait", "1m"];
    let mut waiter = Run::start(&server.url(), &options, HOLD);
    assert!(waiter.note().await.is_some(), "it waits");
    server.stop();
    let mut newcomer = Run::start(&server.url(), &options, HOLD);
    assert_eq!(newcomer.code().await, Some(75));
    server.restart();
    drop(held);
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
}

/// Places refer to the whole queue, and decrease.
#[tokio::test]
async fn it_says_where_it_stands() {
    let server = RedisServer::start();
    let options = ["gpu", "--concurrent", "1"];
    let limiter = Limiter::connect(server.url()).await.unwrap();
    let service = limiter.semaphore(Limit::concurrent("gpu", 1), "");
    let _held = service.acquire().await.unwrap();
    let mut waiters = Vec::new();
    for place in ["1st of 1", "2nd of 2", "3rd of 3"] {
        let mut waiter = Run::start(&server.url(), &options, HOLD);
        let note = waiter.note().await.expect("it waits");
        assert_eq!(note, format!("turnstile: {place} for gpu"));
        waiters.push(waiter);
    }
}
