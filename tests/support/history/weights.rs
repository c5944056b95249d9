//! How requests of different weights share units.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use super::{
    Micros,
    index::{Index, weight},
};

/// The use of one ledger while it has waiters.
#[derive(Debug, Default)]
pub(crate) struct Units {
    /// Number of grants, by weight.
    granted: BTreeMap<u32, usize>,
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
        let granted = ledger.stories.iter();
        for (id, _) in granted.filter(|(_, story)| story.granted().is_some()) {
            *units.granted.entry(weight(*id)).or_default() += 1;
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
        self.granted.range(weights).map(|(_, count)| count).sum()
    }
}

impl fmt::Display for Units {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "granted by weight: {:?}", self.granted)?;
        let idle = self.idle_unit_us as f64 / self.contended_us.max(1) as f64;
        writeln!(out, "{idle:.1} units idle while others waited")
    }
}
