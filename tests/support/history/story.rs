//! A permit's story: the statements of the store, and the actions of its process.

use super::Micros;

/// All facts about one permit.
#[derive(Default)]
pub(crate) struct Story {
    /// The store's statements, in the order of its time.
    pub(crate) facts: Vec<Fact>,
    /// The process's actions, in order.
    pub(crate) deeds: Vec<Deed>,
    /// Exchanges that would add it to the ledger, in order.
    pub(crate) asks: Vec<Ask>,
    /// Releases, in order: the line that sent each, the earliest time at which it may have run, and whether it was
    /// answered.
    pub(crate) releases: Vec<(usize, Micros, bool)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fact {
    pub(crate) at_us: Micros,
    pub(crate) what: What,
    /// The line where its process learned of it.
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
    /// The permit was restored.
    Adopted,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Deed {
    /// On the process's clock.
    pub(crate) at_us: u64,
    pub(crate) what: Doing,
    pub(crate) line: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// Until this time, on the process's clock and on the store's.
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
    /// The line of the answer, and whether the permit was added.
    pub(crate) answer: Option<(usize, bool)>,
}

impl Story {
    /// When its lease ends, according to the store's latest statement.
    pub(crate) fn ends_us(&self) -> Option<Micros> {
        self.facts.iter().rev().find_map(|fact| match fact.what {
            What::Held { until_us, .. } => Some(until_us),
            _ => None,
        })
    }

    /// The earliest time, from `from` on, at which it may have been released, if a release was sent.
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
                // The permit was in the queue until the exchange that promoted it.
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

    /// When it was first certainly held, and by which kind of grant.
    pub(crate) fn granted(&self) -> Option<(Micros, How)> {
        self.facts.iter().find_map(|fact| match fact.what {
            What::Held { how, .. } => Some((fact.at_us, how)),
            _ => None,
        })
    }

    /// Whether it was admitted by its process alone, or restored.
    pub(crate) fn is_excused(&self) -> bool {
        // Even without an answer the permit may have been restored.
        self.asks.iter().any(|ask| ask.adopts) || self.did(Doing::Admits).is_some()
    }

    pub(crate) fn did(&self, what: Doing) -> Option<&Deed> {
        self.deeds.iter().find(|deed| deed.what == what)
    }
}
