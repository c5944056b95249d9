//! The peers that are crates, and what else of the comparison is written in Rust. `benches/peers/run.py` starts it.
//!
//! ```text
//! peers semaphore <name> <limit> <lease ms> <processes> <url>   # a process that wants slots: see `protocol`
//! peers rate <name> <count> <processes> <url>                   # a process that asks a rate
//! peers service <kind> <url>                                    # an axum server behind a kind of limit
//! peers load <port> <requests a second> <seconds> <connections> # its load: open loop
//! peers distant <port>                                          # a proxy that delays: one-way times in microseconds on stdin
//! ```

#[allow(dead_code)] // The benches of the semaphore use the rest.
#[path = "../../../semaphore/distant.rs"]
mod distant;
mod load;
mod ours;
mod protocol;
mod rates;
mod seeds;
mod semaphores;
mod service;

use std::{io::BufRead, time::Duration};

use rates::Rate;
use semaphores::Semaphore;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["semaphore", name, limit, lease_ms, processes, url] => {
            let lease = Duration::from_millis(number(lease_ms));
            let limit = number(limit) as u32;
            let semaphore = Semaphore::open(name, limit, lease, number(processes) as u32, url);
            protocol::serve_slots(semaphore.await).await;
        }
        ["rate", name, count, processes, url] => {
            let rate = Rate::open(name, number(count) as u32, number(processes) as u32, url);
            protocol::serve_rate(rate.await).await;
        }
        ["service", kind, url] => service::serve(kind, url).await,
        ["load", port, rate, seconds, connections] => {
            let connections = number(connections) as usize;
            load::run(
                number(port) as u16,
                number(rate),
                number(seconds),
                connections,
            )
            .await;
        }
        ["distant", port] => delay(number(port) as u16),
        _ => panic!("not a way to call it: {words:?}"),
    }
}

fn number(text: &str) -> u64 {
    text.parse()
        .unwrap_or_else(|_| panic!("not a number: {text:?}"))
}

/// Prints the proxy's port, then reads round trips.
fn delay(port: u16) {
    let proxy = distant::DistantServer::before(port);
    println!("{}", proxy.port());
    for line in std::io::stdin().lock().lines() {
        let trip = Duration::from_micros(number(&line.expect("stdin is open")));
        proxy.set_round_trip(trip);
        println!("set");
    }
}
