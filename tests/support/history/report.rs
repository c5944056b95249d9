//! The checker's findings.

use std::{collections::BTreeMap, fmt};

use super::{
    History, Micros, Span,
    index::{Doing, Id, Index, Ledger, Story, What},
};

/// Maximum number of listed violations per guarantee; further ones are only counted.
const MOST: usize = 2;

#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) violations: Vec<Violation>,
    pub(crate) more: usize,
    pub(crate) answered: usize,
    pub(crate) unanswered: usize,
    pub(crate) permits: usize,
    pub(crate) grants: usize,
    /// Grants to requests that had waited.
    pub(crate) promotions: usize,
    /// Permits that their processes considered lost.
    pub(crate) lost: usize,
    /// Excuses: permits restored to the store, or admitted without it.
    pub(crate) adopted: usize,
    pub(crate) admitted: usize,
    pub(crate) charges: usize,
    /// The excess caused by excuses, by ledger.
    pub(crate) over: BTreeMap<String, Over>,
}

/// An excess of leases over a ledger's limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Over {
    pub(crate) limit: u32,
    pub(crate) peak: u32,
    pub(crate) lasted_us: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) guarantee: &'static str,
    pub(crate) what: String,
    pub(crate) timeline: Vec<String>,
}

impl Report {
    pub(crate) fn new(index: &Index<'_>) -> Self {
        let mut report = Self {
            answered: index.answered,
            unanswered: index.unanswered,
            charges: index.rates.values().map(|rate| rate.charges.len()).sum(),
            ..Self::default()
        };
        let stuck = index.history.processes.iter().filter(|it| it.stuck);
        report.violations.extend(stuck.map(|process| Violation {
            guarantee: "end",
            what: format!("{} does not end when asked to", process.name),
            timeline: Vec::new(),
        }));
        for story in index
            .ledgers
            .values()
            .flat_map(|ledger| ledger.stories.values())
        {
            report.permits += 1;
            report.grants += usize::from(story.granted().is_some());
            report.promotions += usize::from(story.granted().is_some() && story.waits().is_some());
            report.lost += usize::from(story.did(Doing::Loses).is_some());
            report.admitted += usize::from(story.did(Doing::Admits).is_some());
            report.adopted += usize::from(story.asks.iter().any(|ask| ask.adopts));
        }
        report
    }

    pub(crate) fn violated(
        &mut self,
        guarantee: &'static str,
        what: String,
        (index, key): (&Index<'_>, &str),
        ids: &[Id],
    ) {
        let known = self.violations.iter();
        if known.filter(|known| known.guarantee == guarantee).count() >= MOST {
            self.more += 1;
            return;
        }
        let ledger = index.ledgers.get(key);
        let timeline = ledger.map_or_else(Vec::new, |ledger| timeline(index, ledger, ids));
        self.violations.push(Violation {
            guarantee,
            what: format!("{what} in {key}"),
            timeline,
        });
    }

    /// # Panics
    ///
    /// If any guarantee was violated, with the timelines.
    pub(crate) fn assert_clean(&self) {
        assert!(self.violations.is_empty(), "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "{} exchanges answered, {} not; {} permits asked for, {} granted, {} of them after a wait, {} lost; \
             {} charges; excuses: {} adopted, {} admitted without the store",
            self.answered,
            self.unanswered,
            self.permits,
            self.grants,
            self.promotions,
            self.lost,
            self.charges,
            self.adopted,
            self.admitted
        )?;
        for (key, over) in &self.over {
            writeln!(
                out,
                "over the cap: up to {} of {} for {} ms in {key}",
                over.peak,
                over.limit,
                over.lasted_us / 1_000
            )?;
        }
        for violation in &self.violations {
            writeln!(out, "{} VIOLATED: {}", violation.guarantee, violation.what)?;
            for line in &violation.timeline {
                writeln!(out, "    {line}")?;
            }
        }
        if self.more > 0 {
            writeln!(out, "and {} violations more", self.more)?;
        }
        Ok(())
    }
}

/// All facts about these permits, in store time.
fn timeline(index: &Index<'_>, ledger: &Ledger, ids: &[Id]) -> Vec<String> {
    let mut events = Vec::new();
    for id in ids {
        if let Some(story) = ledger.stories.get(id) {
            let name = format!("{} #{}", index.history.processes[id.0].name, id.1);
            let told = tell(index, id.0, story);
            events.extend(
                told.into_iter()
                    .map(|(at, what)| (at, format!("{name} {what}"))),
            );
        }
    }
    let span = |at: fn(Micros, Micros) -> Micros| events.iter().map(|event| event.0).reduce(at);
    if let (Some(first), Some(last)) = (span(Micros::min), span(Micros::max)) {
        let History {
            processes,
            losses,
            troubles,
            ..
        } = index.history;
        let mut known: Vec<(Span, String)> = Vec::new();
        known.extend(
            losses
                .iter()
                .map(|loss| (*loss, "the store's data was lost".to_owned())),
        );
        known.extend(
            troubles
                .iter()
                .map(|trouble| (*trouble, "the store was in trouble".to_owned())),
        );
        for process in processes {
            let stops = process.stops.iter();
            known.extend(stops.map(|stop| (*stop, format!("{} was hampered", process.name))));
        }
        known.retain(|(span, _)| span.0 < last && span.1 > first);
        events.extend(known.into_iter().map(|(span, what)| {
            let lasted = (span.1 - span.0) / 1_000;
            (span.0, format!("{what}, for {lasted} ms"))
        }));
    }
    events.sort();
    let first = events.first().map_or(0, |event| event.0);
    let line = |(at, what): (Micros, String)| {
        format!("{:>12.3} ms  {what}", (at as f64 - first as f64) / 1e3)
    };
    let mut lines = vec![format!("store time {first} us")];
    lines.extend(events.into_iter().map(line));
    lines
}

fn tell(index: &Index<'_>, process: usize, story: &Story) -> Vec<(Micros, String)> {
    let mut events = Vec::new();
    // Sorts the consequences of an answer after it.
    let latest = |local_us| {
        let between = index.clocks[process].store_us(local_us);
        between.map_or(0, |(_, latest)| latest)
    };
    for fact in &story.facts {
        let what = match fact.what {
            What::Held { until_us, how } => {
                let rest = until_us.saturating_sub(fact.at_us) / 1_000;
                format!("is held for {rest} ms ({how:?})")
            }
            What::Waiting { ticket } => format!("waits with ticket {ticket}"),
            What::Gone => "is not there".to_owned(),
            What::Released => "was released".to_owned(),
        };
        events.push((fact.at_us, format!("store: {what}")));
    }
    for deed in &story.deeds {
        let what = match deed.what {
            Doing::Holds { until_us, .. } => {
                format!(
                    "counts as held for {} ms",
                    until_us.saturating_sub(deed.at_us) / 1_000
                )
            }
            Doing::Admits => "is admitted without the store".to_owned(),
            Doing::Takes => "has an owner".to_owned(),
            Doing::Loses => "is lost".to_owned(),
            Doing::GivesUp => "is given up".to_owned(),
        };
        events.push((latest(deed.at_us), format!("process: {what}")));
    }
    let lines = &index.history.processes[process].lines;
    let sent = |line: usize| index.earliest(process, lines[line].at_us);
    for ask in &story.asks {
        let answered = if ask.answer.is_some() {
            ""
        } else {
            ", no answer"
        };
        let what = if ask.adopts { "adopt" } else { "acquire" };
        events.push((
            sent(ask.line),
            format!("sent: {what} until {}{answered}", ask.not_after_us),
        ));
    }
    for (line, _, answered) in &story.releases {
        let answered = if *answered { "" } else { ", no answer" };
        events.push((sent(*line), format!("sent: release{answered}")));
    }
    events
}
