//! Lines between a process of a peer and the driver, the same in every language. Times are CLOCK_MONOTONIC, in nanoseconds.
//!
//! | from the driver | meaning | answer |
//! | --- | --- | --- |
//! | `a <id> <key>` | acquire | `g <id> <called> <granted>`, or `e <id> <called> <failed> <text>` |
//! | `r <id>` | release | `d <id> <called> <done>`, or `e ...` |
//! | `t <id>` | ask the rate | `y <id> <called> <answered>` (go on), `n ...` (refused), or `e ...` |
//! | `l <tasks> <ms> <keys>` | pairs in a closed loop | `p <pairs> <failures> <p50 ns> <p99 ns>` |
//!
//! `ready` comes first, and `x <id> <time>` when a holder learns that its slot is lost. The process ends with its input.

use std::{
    collections::HashMap,
    io::BufRead,
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use crate::{rates::Rate, semaphores::Semaphore};

type Releases = Arc<Mutex<HashMap<u64, oneshot::Sender<()>>>>;

pub(crate) fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

pub(crate) async fn serve_slots(semaphore: Semaphore) {
    let semaphore = Arc::new(semaphore);
    let releases = Releases::default();
    let mut lines = lines();
    println!("ready");
    while let Some(line) = lines.recv().await {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["a", id, key] => {
                let id = crate::number(id);
                let (release, released) = oneshot::channel();
                releases.lock().expect("no panic").insert(id, release);
                let hold = hold(semaphore.clone(), id, crate::number(key) as usize, released);
                tokio::spawn(hold);
            }
            ["r", id] => {
                let release = releases
                    .lock()
                    .expect("no panic")
                    .remove(&crate::number(id));
                // Fails if the slot was not granted.
                let _ = release.expect("acquired").send(());
            }
            ["l", tasks, ms, keys] => {
                let [tasks, ms, keys] = [tasks, ms, keys].map(crate::number);
                let pairs = pairs(semaphore.clone(), tasks, Duration::from_millis(ms), keys);
                tokio::spawn(pairs);
            }
            _ => panic!("unknown line: {line:?}"),
        }
    }
    semaphore.close().await;
}

async fn hold(semaphore: Arc<Semaphore>, id: u64, key: usize, mut release: oneshot::Receiver<()>) {
    let called = now_ns();
    let held = match semaphore.acquire(key).await {
        Ok(held) => held,
        Err(error) => return fail(id, called, &error),
    };
    println!("g {id} {called} {}", now_ns());
    let lost = tokio::select! {
        _ = &mut release => false,
        () = held.lost() => true,
    };
    if lost {
        println!("x {id} {}", now_ns());
        let _ = release.await;
    }
    let called = now_ns();
    match semaphore.release(held).await {
        Ok(()) => println!("d {id} {called} {}", now_ns()),
        Err(error) => fail(id, called, &error),
    }
}

fn fail(id: u64, called: u64, error: &str) {
    println!("e {id} {called} {} {}", now_ns(), error.replace('\n', " "));
}

async fn pairs(semaphore: Arc<Semaphore>, tasks: u64, time: Duration, keys: u64) {
    let end = now_ns() + time.as_nanos() as u64;
    let mut all = JoinSet::new();
    for task in 0..tasks {
        let semaphore = semaphore.clone();
        all.spawn(async move {
            let mut random = fastrand::Rng::with_seed(task);
            let (mut times, mut failures) = (Vec::new(), 0_u64);
            while now_ns() < end {
                let called = now_ns();
                match semaphore.acquire(random.usize(..keys as usize)).await {
                    Ok(held) => {
                        let released = semaphore.release_in_passing(held).await;
                        failures += u64::from(released.is_err());
                        times.push(now_ns() - called);
                    }
                    Err(_) => {
                        failures += 1;
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            }
            (times, failures)
        });
    }
    let (mut times, mut failures) = (Vec::new(), 0);
    for (its, failed) in all.join_all().await {
        times.extend(its);
        failures += failed;
    }
    times.sort_unstable();
    let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied();
    let [p50, p99] = [0.5, 0.99].map(|part| at(part).unwrap_or_default());
    println!("p {} {failures} {p50} {p99}", times.len());
}

pub(crate) async fn serve_rate(rate: Rate) {
    let rate = Arc::new(rate);
    let mut lines = lines();
    println!("ready");
    while let Some(line) = lines.recv().await {
        let id = crate::number(line.strip_prefix("t ").expect("a request"));
        let rate = rate.clone();
        tokio::spawn(async move {
            let called = now_ns();
            match rate.ask().await {
                Ok(true) => println!("y {id} {called} {}", now_ns()),
                Ok(false) => println!("n {id} {called} {}", now_ns()),
                Err(error) => fail(id, called, &error),
            }
        });
    }
}

/// The lines of the driver, read by a thread.
fn lines() -> mpsc::UnboundedReceiver<String> {
    let (put, take) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let line = line.expect("stdin is open");
            if put.send(line).is_err() {
                return;
            }
        }
    });
    take
}
