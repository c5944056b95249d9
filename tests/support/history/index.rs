//! The known facts about each permit, by ledger, from the processes' histories.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    History, Micros,
    clock::Clock,
    event::{Answered, Charge, Event, Line, Sent, Standing, Woken},
};

pub(crate) use super::story::{Ask, Deed, Doing, Fact, How, Story, What};

/// A process, and a permit's number there.
pub(crate) type Id = (usize, u64);

/// The weight of a permit in units, encoded in the bits of its number above the 54th.
pub(super) fn weight(id: Id) -> u32 {
    (id.1 >> 54) as u32 + 1
}

pub(crate) struct Index<'a> {
    pub(crate) history: &'a History,
    /// By process.
    pub(crate) clocks: Vec<Clock>,
    pub(crate) ledgers: BTreeMap<String, Ledger>,
    pub(crate) rates: BTreeMap<String, Rate>,
    pub(crate) answered: usize,
    pub(crate) unanswered: usize,
}

#[derive(Default)]
pub(crate) struct Ledger {
    /// The largest limit that any process named.
    pub(crate) limit: u32,
    pub(crate) stories: BTreeMap<Id, Story>,
    pub(crate) visits: Vec<Visit>,
    /// Exchanges about it that a process has sent, in order: the line, and the earliest time at which each may have
    /// run.
    pub(crate) sent: BTreeMap<usize, Vec<(usize, Micros)>>,
}

/// An exchange with an answer for a ledger.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    pub(crate) at_us: Micros,
    pub(crate) process: usize,
    pub(crate) limit: u32,
    pub(crate) in_use: u32,
    pub(crate) waiting: u32,
    pub(crate) more: bool,
}

#[derive(Default)]
pub(crate) struct Rate {
    /// When the charge ran, when it starts, the charge itself, and the resulting state.
    pub(crate) charges: Vec<(Micros, Micros, Charge, (u64, u64))>,
    pub(crate) refunds: Vec<(u64, u64)>,
}

impl<'a> Index<'a> {
    pub(crate) fn new(history: &'a History) -> Self {
        let clocks = history.processes.iter().map(Clock::new).collect();
        let mut index = Self {
            history,
            clocks,
            ledgers: BTreeMap::new(),
            rates: BTreeMap::new(),
            answered: 0,
            unanswered: 0,
        };
        for (process, told) in history.processes.iter().enumerate() {
            index.read(process, &told.lines);
        }
        for ledger in index.ledgers.values_mut() {
            ledger.visits.sort_by_key(|visit| visit.at_us);
            for story in ledger.stories.values_mut() {
                story.facts.sort_by_key(|fact| fact.at_us);
            }
        }
        index
    }

    pub(crate) fn earliest(&self, process: usize, local_us: u64) -> Micros {
        self.clocks[process].earliest(local_us)
    }

    fn read(&mut self, process: usize, lines: &[Line]) {
        let mut answers: HashMap<u64, (usize, &Answered)> = HashMap::new();
        let mut too_late = HashSet::new();
        for (number, line) in lines.iter().enumerate() {
            match &line.event {
                Event::Answered(answer) => drop(answers.insert(answer.n, (number, answer))),
                Event::Failed { n, too_late: true } => drop(too_late.insert(*n)),
                _ => {}
            }
        }
        for (number, line) in lines.iter().enumerate() {
            match &line.event {
                Event::Sent(sent) if too_late.contains(&sent.n) => {}
                Event::Sent(sent) => {
                    let answer = answers.get(&sent.n).copied();
                    self.answered += usize::from(answer.is_some());
                    self.unanswered += usize::from(answer.is_none());
                    self.exchanged(process, number, line.at_us, sent, answer);
                }
                Event::Woken(woken) => self.woken(process, number, woken),
                Event::Held(held) => {
                    let (until_us, store_us) = (held.until_us, held.until_ms * 1_000);
                    let what = Doing::Holds { until_us, store_us };
                    self.did(process, number, line.at_us, &held.key, held.seq, what);
                }
                Event::Admitted(it) => {
                    self.did(process, number, line.at_us, &it.key, it.seq, Doing::Admits);
                }
                Event::Taken(it) => {
                    self.did(process, number, line.at_us, &it.key, it.seq, Doing::Takes);
                }
                Event::Lost(it) => {
                    self.did(process, number, line.at_us, &it.key, it.seq, Doing::Loses);
                }
                Event::GivenUp(it) => {
                    self.did(process, number, line.at_us, &it.key, it.seq, Doing::GivesUp);
                }
                Event::Answered(_) | Event::Failed { .. } | Event::Late { .. } => {}
            }
        }
    }

    fn story(&mut self, key: &str, id: Id) -> &mut Story {
        if !self.ledgers.contains_key(key) {
            self.ledgers.insert(key.to_owned(), Ledger::default());
        }
        let ledger = self.ledgers.get_mut(key).expect("just made");
        ledger.stories.entry(id).or_default()
    }

    fn did(&mut self, process: usize, line: usize, at_us: u64, key: &str, seq: u64, what: Doing) {
        let deed = Deed { at_us, what, line };
        self.story(key, (process, seq)).deeds.push(deed);
    }

    fn woken(&mut self, process: usize, line: usize, woken: &Woken) {
        for seq in &woken.seqs {
            let fact = Fact {
                at_us: woken.granted_us,
                what: What::Held {
                    until_us: woken.until_ms * 1_000,
                    how: How::Promoted,
                },
                line,
            };
            self.story(&woken.key, (process, *seq)).facts.push(fact);
        }
    }

    fn exchanged(
        &mut self,
        process: usize,
        line: usize,
        sent_us: u64,
        sent: &Sent,
        answer: Option<(usize, &Answered)>,
    ) {
        let mut exchange = Exchange {
            process,
            line,
            // Only unanswered exchanges need this, and it is slow.
            earliest_us: answer.map_or_else(
                || self.earliest(process, sent_us),
                |(_, answer)| answer.store_us,
            ),
            not_after_us: sent.not_after_us,
            answer: answer.map(|(line, answer)| (line, answer.store_us)),
            index: self,
        };
        for (place, batch) in sent.batches.iter().enumerate() {
            let told = answer.and_then(|(_, answer)| answer.batches[place].as_ref());
            let told = told.cloned().unwrap_or_default();
            let understood = answer.is_some_and(|(_, answer)| answer.batches[place].is_some());
            exchange.about(&batch.key, batch.limit);
            for seq in &batch.release {
                exchange.releases(&batch.key, *seq, understood);
            }
            for (seq, standing) in batch.renew.iter().zip(&told.renewed) {
                exchange.says(&batch.key, *seq, *standing, How::Renewed);
            }
            for (place, seq) in batch.adopt.iter().enumerate() {
                exchange.asks(&batch.key, *seq, true, told.adopted.get(place).copied());
            }
            for (seq, until_ms) in &told.promoted {
                exchange.says(&batch.key, *seq, Standing::Held(*until_ms), How::Promoted);
            }
            for (place, seq) in batch.acquire.iter().enumerate() {
                exchange.asks(&batch.key, *seq, false, told.acquired.get(place).copied());
            }
            if let Some((_, answer)) = answer.filter(|_| understood) {
                let visit = Visit {
                    at_us: answer.store_us,
                    process,
                    limit: batch.limit,
                    in_use: told.in_use,
                    waiting: told.waiting,
                    more: answer.more,
                };
                let ledger = exchange.index.ledgers.get_mut(&batch.key);
                ledger.expect("just made").visits.push(visit);
            }
        }
        for (place, claim) in sent.claims.iter().enumerate() {
            let told = answer.and_then(|(_, answer)| answer.claims[place].as_ref());
            for (place, (batch, seq)) in claim.asks.iter().enumerate() {
                let standing = told.map(|told| told.standings[place]);
                exchange.asks(&sent.batches[*batch].key, *seq, false, standing);
            }
            for (charge, charged) in claim
                .charges
                .iter()
                .zip(told.iter().flat_map(|told| &told.charged))
            {
                if let (Some((start_us, us, rem)), Some((_, store_us))) = (charged, exchange.answer)
                {
                    let rate = exchange.index.rates.entry(charge.key.clone()).or_default();
                    rate.charges
                        .push((store_us, *start_us, charge.clone(), (*us, *rem)));
                }
            }
        }
        for refund in &sent.refunds {
            let rate = self.rates.entry(refund.key.clone()).or_default();
            rate.refunds.push(refund.tat);
        }
    }
}

/// An exchange while it is read.
struct Exchange<'i, 'a> {
    index: &'i mut Index<'a>,
    process: usize,
    line: usize,
    earliest_us: Micros,
    not_after_us: Micros,
    /// The line of the answer, and when the exchange ran.
    answer: Option<(usize, Micros)>,
}

impl Exchange<'_, '_> {
    fn about(&mut self, key: &str, limit: u32) {
        let ledger = self.index.ledgers.entry(key.to_owned()).or_default();
        ledger.limit = ledger.limit.max(limit);
        let sent = ledger.sent.entry(self.process).or_default();
        sent.push((self.line, self.earliest_us));
    }

    fn releases(&mut self, key: &str, seq: u64, understood: bool) {
        let (line, earliest_us, answer) = (self.line, self.earliest_us, self.answer);
        let story = self.index.story(key, (self.process, seq));
        story.releases.push((line, earliest_us, understood));
        if let Some((line, at_us)) = answer.filter(|_| understood) {
            let what = What::Released;
            story.facts.push(Fact { at_us, what, line });
        }
    }

    fn asks(&mut self, key: &str, seq: u64, adopts: bool, standing: Option<Standing>) {
        let is_in = matches!(
            standing,
            Some(Standing::Held(_) | Standing::Adopted(_) | Standing::Waiting(_))
        );
        let ask = Ask {
            line: self.line,
            not_after_us: self.not_after_us,
            adopts,
            answer: self.answer.map(|(line, _)| (line, is_in)),
        };
        let how = if adopts { How::Renewed } else { How::Admitted };
        self.index.story(key, (self.process, seq)).asks.push(ask);
        if let Some(standing) = standing.filter(|_| is_in) {
            self.says(key, seq, standing, how);
        }
    }

    fn says(&mut self, key: &str, seq: u64, standing: Standing, how: How) {
        let Some((line, at_us)) = self.answer else {
            return;
        };
        let held = |until_ms: u64, how| What::Held {
            until_us: until_ms * 1_000,
            how,
        };
        let what = match standing {
            Standing::Held(until_ms) => held(until_ms, how),
            Standing::Adopted(until_ms) => held(until_ms, How::Adopted),
            Standing::Waiting(ticket) => What::Waiting { ticket },
            Standing::Absent | Standing::Full => What::Gone,
        };
        let story = self.index.story(key, (self.process, seq));
        story.facts.push(Fact { at_us, what, line });
    }
}
