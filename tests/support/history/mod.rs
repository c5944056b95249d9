//! Checks the messages between several processes and their store against the guarantees.
//!
//! Each process writes its history to a file: its messages to the store, the answers, and its decisions
//! (`src/telemetry/exchange_log.rs`). [`check`] merges the histories by the store's time and searches for violations:
//!
//! | file | content |
//! | --- | --- |
//! | `event` | the events as read from a file |
//! | `clock` | converts a process's time to the store's: each exchange ran between its sending and its answer |
//! | `index`, `story` | the known facts about each permit, by ledger |
//! | `cap` | G1: no more leases than the limit, and no more permits with owners; G2: each within its lease |
//! | `order` | G3: nobody is overtaken |
//! | `progress` | G4: the queue moves; G5: a released slot is free at once |
//! | `names` | G6: nothing comes back |
//! | `rates` | no more requests begin than a rate allows |
//! | `weights` | how many heavy and light requests are admitted, and how many units are idle meanwhile |
//! | `report` | the violations, with the timeline of the permits involved |
//! | `process`, `load` | a process that writes a history, and its load |
//!
//! An exchange without an answer may have run or not, early or late. So for each rule the checker asks whether any
//! possible execution kept it. Permits that such an exchange may have released count as released from its sending on,
//! and permits that it may have acquired count as absent, until an answer decides. So the checker raises no false
//! alarm, but misses violations caused by such exchanges alone.
//!
//! Each excuse of the guarantees must have a reason known to the test (the store's data was lost then, or this process
//! stalled), and is counted.

// Each test uses a part of this module.
#![allow(dead_code)]

mod cap;
mod clock;
pub(crate) mod event;
mod index;
mod load;
mod names;
mod order;
pub(crate) mod process;
mod progress;
mod rates;
pub(crate) mod report;
mod story;
mod weights;

use self::{event::Line, index::Index, report::Report, weights::Units};

/// Store time in microseconds. On a single machine it is the time of day.
pub(crate) type Micros = u64;
/// Start and end.
pub(crate) type Span = (Micros, Micros);

/// The events known to the test.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) processes: Vec<Process>,
    /// When the store's data was lost: at some time within each span.
    pub(crate) losses: Vec<Span>,
    /// When the store was unreachable or slow. Time limits exclude these spans.
    pub(crate) troubles: Vec<Span>,
    pub(crate) bounds: Bounds,
}

#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) lines: Vec<Line>,
    /// When the process was stalled.
    pub(crate) stops: Vec<Span>,
    pub(crate) killed: Option<Micros>,
    /// The process was killed because it did not end on its own.
    pub(crate) stuck: bool,
}

/// Time limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) lease_us: u64,
    pub(crate) waiter_ttl_us: u64,
    pub(crate) poll_us: u64,
    /// A round trip on a busy machine; at least the store timeout.
    pub(crate) round_us: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            lease_us: 30_000_000,
            waiter_ttl_us: 5_000_000,
            poll_us: 1_000_000,
            round_us: 1_500_000,
        }
    }
}

/// Searches for all violations.
pub(crate) fn check(history: &History) -> Report {
    let index = Index::new(history);
    let mut report = Report::new(&index);
    cap::check(&index, &mut report);
    order::check(&index, &mut report);
    progress::check(&index, &mut report);
    names::check(&index, &mut report);
    rates::check(&index, &mut report);
    report
}

/// How the units of the only ledger were shared.
pub(crate) fn units(history: &History) -> Units {
    Units::new(&Index::new(history))
}

impl History {
    /// Whether the data may have been lost between two moments.
    fn lost_between(&self, from: Micros, until: Micros) -> bool {
        self.losses
            .iter()
            .any(|loss| loss.1 > from && loss.0 < until)
    }

    /// How much of a span is excluded from the time limits of `process`, or of all processes.
    fn hampered(&self, from: Micros, until: Micros, process: Option<usize>) -> u64 {
        let stops = process.map_or(&[][..], |process| &self.processes[process].stops);
        let spans = self.troubles.iter().chain(stops);
        let mut spans: Vec<Span> = spans
            .map(|span| (span.0.max(from), span.1.min(until)))
            .filter(|span| span.0 < span.1)
            .collect();
        spans.sort_unstable();
        // Several faults may overlap.
        let (mut sum, mut counted) = (0, from);
        for (begins, ends) in spans {
            sum += ends.saturating_sub(begins.max(counted));
            counted = counted.max(ends);
        }
        sum
    }

    /// Whether a process was alive and running, and the store reachable, during the whole span.
    fn is_calm(&self, from: Micros, until: Micros, process: usize) -> bool {
        let killed = self.processes[process].killed;
        self.hampered(from, until, Some(process)) == 0 && killed.is_none_or(|at| at > until)
    }
}
