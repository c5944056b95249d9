//! All that is known of one permit.

use super::Micros;

/// All that is known of one permit.
#[derive(Default)]
pub(crate) struct Story {
    /// What the store said, in the order of its time.
    pub(crate) facts: Vec<Fact>,
    /// What its process did, in order.
    pub(crate) deeds: Vec<Deed>,
    /// Exchanges that would put it into the ledger, in order.
    pub(crate) asks: Vec<Ask>,
    /// Releases, in order: the line that sent each, the earliest that it may have run, and whether it was answered.
    pub(crate) releases: Vec<(usize, Micros, bool)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fact {
    pub(crate) at_us: Micros,
    pub(crate) what: What,
    /// Where its process learned of it.
    pub(crate) line: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Held { until_us: Micros, how: How },
    Waiting { ticket: i64 },
    Gone,
    Released,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// A newcomer got a free slot.
    Admitted,
    Promoted,
    Renewed,
    /// It was put back.
    Adopted,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Deed {
    /// By the process's clock.
    pub(crate) at_us: u64,
    pub(crate) what: Doing,
    pub(crate) line: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// Until then by the process's clock, and by the store's.
    Holds {
        until_us: u64,
        store_us: Micros,
    },
    Admits,
    Takes,
    Loses,
    GivesUp,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) line: usize,
    pub(crate) not_after_us: Micros,
    pub(crate) adopts: bool,
    /// Where the answer is, and whether it is in.
    pub(crate) answer: Option<(usize, bool)>,
}

impl Story {
    /// When its lease ends, as the store said last.
    pub(crate) fn ends_us(&self) -> Option<Micros> {
        self.facts.iter().rev().find_map(|fact| match fact.what {
            What::Held { until_us, .. } => Some(until_us),
            _ => None,
        })
    }

    /// The earliest from `from` on that it may have been released, if it was asked for.
    pub(crate) fn may_be_released_from(&self, from: Micros) -> Option<Micros> {
        let acknowledged = self.facts.iter().filter(|fact| fact.what == What::Released);
        let acknowledged = acknowledged.map(|fact| fact.at_us).filter(|at| *at >= from);
        let others = self.releases.iter().filter(|(_, _, answered)| !answered);
        acknowledged
            .chain(others.map(|(_, at, _)| (*at).max(from)))
            .min()
    }

    /// When it joined the queue, when it was certainly last there, and its ticket.
    pub(crate) fn waits(&self) -> Option<(Micros, Micros, i64)> {
        let mut seen = None;
        for fact in &self.facts {
            match (fact.what, &mut seen) {
                (What::Waiting { ticket }, None) => seen = Some((fact.at_us, fact.at_us, ticket)),
                (What::Waiting { .. }, Some(seen)) => seen.1 = fact.at_us,
                // It was in line until the exchange that promoted it.
                (
                    What::Held {
                        how: How::Promoted, ..
                    },
                    Some(seen),
                ) => {
                    seen.1 = seen.1.max(fact.at_us);
                    break;
                }
                (What::Held { .. }, _) => break,
                _ => {}
            }
        }
        seen
    }

    /// When it was first certainly held, and how it came to be.
    pub(crate) fn granted(&self) -> Option<(Micros, How)> {
        self.facts.iter().find_map(|fact| match fact.what {
            What::Held { how, .. } => Some((fact.at_us, how)),
            _ => None,
        })
    }

    /// Whether it was let in by its process alone, or put back.
    pub(crate) fn is_excused(&self) -> bool {
        // Without an answer it may have been put back all the same.
        self.asks.iter().any(|ask| ask.adopts) || self.did(Doing::Admits).is_some()
    }

    pub(crate) fn did(&self, what: Doing) -> Option<&Deed> {
        self.deeds.iter().find(|deed| deed.what == what)
    }
}
