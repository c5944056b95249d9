//! Converts a process's time to the store's.

use super::{Micros, Process, event::Event};

/// The clocks may drift apart by one part in this many.
const SLEW: i64 = 1_000;
/// Number of exchanges considered on either side of a moment.
const NEIGHBOURS: usize = 16;

/// A process's clock, as bracketed by its exchanges: each ran between its sending and its answer.
#[derive(Debug)]
pub(crate) struct Clock {
    /// Sent and answered (by the process's clock), and run (by the store's), in order of sending.
    brackets: Vec<(i64, i64, i64)>,
}

impl Clock {
    pub(crate) fn new(process: &Process) -> Self {
        let mut sent = std::collections::HashMap::new();
        let mut brackets = Vec::new();
        for line in &process.lines {
            match &line.event {
                Event::Sent(exchange) => drop(sent.insert(exchange.n, line.at_us)),
                Event::Answered(answer) => {
                    if let Some(sent_us) = sent.remove(&answer.n) {
                        brackets.push((sent_us as i64, line.at_us as i64, answer.store_us as i64));
                    }
                }
                _ => {}
            }
        }
        brackets.sort_unstable();
        Self { brackets }
    }

    /// The bounds of the store's time at this moment, inclusive; `None` if unknown.
    pub(crate) fn store_us(&self, local_us: u64) -> Option<(Micros, Micros)> {
        let local = local_us as i64;
        let place = self.brackets.partition_point(|bracket| bracket.0 < local);
        let near = place.saturating_sub(NEIGHBOURS)..(place + NEIGHBOURS).min(self.brackets.len());
        let (mut earliest, mut latest) = (i64::MIN, i64::MAX);
        for &(sent, answered, store) in &self.brackets[near] {
            let slew = (local - sent).abs().max((local - answered).abs()) / SLEW + 1;
            earliest = earliest.max(store + local - answered - slew);
            latest = latest.min(store + local - sent + slew);
        }
        (earliest > i64::MIN && earliest <= latest).then_some((earliest as u64, latest as u64))
    }

    /// A lower bound of the store's time.
    pub(crate) fn earliest(&self, local_us: u64) -> Micros {
        self.store_us(local_us).map_or(0, |(earliest, _)| earliest)
    }
}
