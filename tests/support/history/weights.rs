//! How requests of different weights share units.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use super::{
    Micros,
    index::{Index, weight},
};

/// The use of one ledger while it has waiters.
#[derive(Debug, Default)]
pub(crate) struct Units {
    /// By weight: number of grants, and the longest wait.
    granted: BTreeMap<u32, (usize, Micros)>,
    contended_us: Micros,
    /// Idle units multiplied by their time.
    idle_unit_us: Micros,
}

impl Units {
    /// # Panics
    ///
    /// Unless there is exactly one ledger.
    pub(super) fn new(index: &Index<'_>) -> Self {
        let mut units = Self::default();
        let mut ledgers = index.ledgers.values();
        let (Some(ledger), None) = (ledgers.next(), ledgers.next()) else {
            panic!("{} ledgers", index.ledgers.len());
        };
        for (id, story) in &ledger.stories {
            if let Some((granted_us, _)) = story.granted() {
                let since_us = story.waits().map_or(granted_us, |(queued, _, _)| queued);
                let (count, longest) = units.granted.entry(weight(*id)).or_default();
                *count += 1;
                *longest = granted_us.saturating_sub(since_us).max(*longest);
            }
        }
        let contended = ledger.visits.windows(2).filter(|pair| pair[0].waiting > 0);
        for pair in contended {
            let (visit, lasted_us) = (&pair[0], pair[1].at_us - pair[0].at_us);
            units.contended_us += lasted_us;
            units.idle_unit_us +=
                lasted_us * Micros::from(visit.limit.saturating_sub(visit.in_use));
        }
        units
    }

    pub(crate) fn granted(&self, weights: RangeInclusive<u32>) -> usize {
        let those = self.granted.range(weights);
        those.map(|(_, (count, _))| count).sum()
    }

    /// The longest wait for a granted permit.
    pub(crate) fn longest_wait_us(&self, weights: RangeInclusive<u32>) -> Micros {
        let those = self.granted.range(weights);
        those.map(|(_, (_, longest))| *longest).max().unwrap_or(0)
    }
}

impl fmt::Display for Units {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (weight, (count, longest)) in &self.granted {
            writeln!(
                out,
                "{weight:>2} units: {count} granted, longest wait {} ms",
                longest / 1_000
            )?;
        }
        let idle = self.idle_unit_us as f64 / self.contended_us.max(1) as f64;
        writeln!(out, "{idle:.1} units idle while others waited")
    }
}
