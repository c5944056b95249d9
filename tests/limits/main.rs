//! The cost of a flood of streams or keys: store commands, memory, and leftovers. One test runs at a time, since memory
//! is shared by the process. `-- --nocapture` shows the figures.
//!
//! `cargo test -p tests --release --all-features --test limits -- --ignored --nocapture` runs a million keys, in a minute.

mod floods;
mod keys;
#[path = "../support/mod.rs"]
mod support;

use std::{fs, time::Duration};

use support::{GUARD, redis_server::RedisServer};
use tokio::time::sleep;
use tower_turnstile::Limiter;

const PAGE_KIB: usize = 4;

/// The resident memory of this process.
fn resident_kib() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).expect("the second field");
    pages.parse::<usize>().expect("a number") * PAGE_KIB
}

/// No stall of a busy machine is an outage.
async fn connect(server: &RedisServer) -> Limiter {
    let lasting = Limiter::builder().lease(10 * GUARD).store_timeout(GUARD);
    lasting.connect(&server.url()).await.expect("it is up")
}

/// Waits until nothing is held or waiting, here and in the store. Never gives up: the test runner
/// limits the time.
async fn idle(limiter: &Limiter, server: &RedisServer) {
    loop {
        let status = limiter.status();
        if (status.held, status.waiting) == (0, 0) && server.key_count() == 0 {
            return;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// How often the store ran scripts.
fn script_calls(server: &RedisServer) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let script = |line: &&str| line.starts_with("cmdstat_eval");
    let calls = |line: &str| -> Option<u64> {
        let (_, calls) = line.split_once("calls=")?;
        calls.split(',').next()?.parse().ok()
    };
    stats.lines().filter(script).filter_map(calls).sum()
}
