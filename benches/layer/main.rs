//! The cost of a request in the layer: allocations, and instructions under an external counter.
//!
//! ```sh
//! cargo bench --bench layer                        # allocations
//! cargo bench --bench layer -- by-header 1000      # so many requests, for a profiler
//! .ci/cost                                         # both, as a table
//! ```
//!
//! The work is too short to be timed reliably, so the bench measures no time. It subtracts a first run from a run of
//! twice as many requests, which leaves the cost of the requests alone.

mod contenders;

use std::alloc::System;

use contenders::Contender;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio::runtime::{Builder, Runtime};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const REQUESTS: usize = 1_000;

fn main() {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named = |contender: &Contender| arguments.iter().any(|name| name == contender.name());
    let count = arguments.iter().find_map(|argument| argument.parse().ok());
    match Contender::ALL.iter().copied().find(named) {
        Some(contender) => runtime.block_on(contender.run(count.unwrap_or(REQUESTS))),
        None => print_allocations(&runtime),
    }
}

fn print_allocations(runtime: &Runtime) {
    for contender in Contender::ALL.iter().copied() {
        let [one, two] = [1, 2].map(|times| {
            let region = Region::new(ALLOCATOR);
            runtime.block_on(contender.run(times * REQUESTS));
            let change = region.change();
            [
                change.allocations + change.reallocations,
                change.bytes_allocated,
            ]
        });
        let [allocations, bytes] = [0, 1].map(|of| (two[of] - one[of]) as f64 / REQUESTS as f64);
        println!(
            "{:<20}{allocations:>8.2}{bytes:>8.0} bytes",
            contender.name()
        );
    }
}
