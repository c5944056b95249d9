//! Checks what several processes and their store have told each other against the guarantees.
//!
//! Each process writes its history to a file: what it has sent to the store, what was answered, and what it made of
//! it (`src/telemetry/history.rs`). [`check`] puts them together by the store's time and looks for what must not be:
//!
//! | file | what |
//! | --- | --- |
//! | `event` | the events, as they are read |
//! | `clock` | a process's time as the store's: each exchange ran between its sending and its answer |
//! | `index`, `story` | what is known of each permit, by ledger |
//! | `cap` | G1: no more leases than the limit, and no more permits with their owners; G2: each within its lease |
//! | `order` | G3: nobody is overtaken |
//! | `progress` | G4: a line goes on; G5: what is given back returns at once |
//! | `names` | G6: nothing comes back |
//! | `rates` | no more begin than a rate allows |
//! | `weights` | how long the heavy and the light wait, and how many units are idle meanwhile |
//! | `report` | what was found, with the timeline of those concerned |
//! | `process`, `load` | a process that makes history, and what it does |
//!
//! An exchange without an answer may have run or not, early or late. So the checker asks of each rule: is there any way
//! in which it was kept? What such an exchange may have released counts as free from its sending on, what it may have
//! acquired as never there, until an answer tells. It raises no false alarm so, and misses what only such exchanges did.
//!
//! What the guarantees excuse must have a reason that the test knows of (the store's data was lost then, this process
//! stood still), and is counted.

// Each test uses a part of it.
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

/// Store time in microseconds. On one machine it is the time of day.
pub(crate) type Micros = u64;
/// From, until.
pub(crate) type Span = (Micros, Micros);

/// What happened, as far as the test knows.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) processes: Vec<Process>,
    /// When the store's data was lost: somewhen in each.
    pub(crate) losses: Vec<Span>,
    /// When the store could not be reached or was slow. Time limits do not count it.
    pub(crate) troubles: Vec<Span>,
    pub(crate) bounds: Bounds,
}

#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) lines: Vec<Line>,
    /// When it stood still.
    pub(crate) stops: Vec<Span>,
    /// When it was killed.
    pub(crate) killed: Option<Micros>,
    /// It was, since it did not end by itself.
    pub(crate) stuck: bool,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) lease_us: u64,
    pub(crate) waiter_ttl_us: u64,
    pub(crate) poll_us: u64,
    /// A round trip, on a machine that has other work to do; at least the store timeout.
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

/// Looks for everything that must not be.
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

    /// How much of a time does not count for what `process` was to do, or anybody.
    fn hampered(&self, from: Micros, until: Micros, process: Option<usize>) -> u64 {
        let stops = process.map_or(&[][..], |process| &self.processes[process].stops);
        let spans = self.troubles.iter().chain(stops);
        let mut spans: Vec<Span> = spans
            .map(|span| (span.0.max(from), span.1.min(until)))
            .filter(|span| span.0 < span.1)
            .collect();
        spans.sort_unstable();
        // Several may be the matter at once.
        let (mut sum, mut counted) = (0, from);
        for (begins, ends) in spans {
            sum += ends.saturating_sub(begins.max(counted));
            counted = counted.max(ends);
        }
        sum
    }

    /// Whether a process was there and awake, and the store too, all this time.
    fn is_calm(&self, from: Micros, until: Micros, process: usize) -> bool {
        let killed = self.processes[process].killed;
        self.hampered(from, until, Some(process)) == 0 && killed.is_none_or(|at| at > until)
    }
}
