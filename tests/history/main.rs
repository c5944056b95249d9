//! Histories of real processes, checked against the guarantees; and the checker, on histories that violate them.

#[path = "../support/history/mod.rs"]
mod history;
#[path = "../support/mod.rs"]
mod support;

mod checker;
mod runs;
mod soak;

/// Entry point of the processes that the tests here start.
#[test]
#[ignore = "a process that other tests start"]
fn process() {
    history::process::run();
}
