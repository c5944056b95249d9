//! G4: a free slot with a live waiter is granted. G5: a released slot is free at once.

use super::{
    Micros,
    index::{Ask, Deed, Doing, Id, Index, Ledger, Story, Visit, What, weight},
    report::Report,
};

/// Exchanges that may have been in flight at a release, and a few more.
const SOON: usize = 4;

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, ledger) in &index.ledgers {
        check_visits(index, (key, ledger), report);
        check_gaps(index, (key, ledger), report);
        for (id, story) in &ledger.stories {
            check_standstill(index, (key, ledger), (*id, story), report);
            check_return(index, key, (*id, story), report);
            check_release(index, (key, ledger), (*id, story), report);
        }
    }
}

/// An exchange must not leave a free slot in a ledger while a request waits. Waiters of a dead or possibly disconnected
/// process are excused until their time to live ends.
fn check_visits(index: &Index<'_>, (key, ledger): (&str, &Ledger), report: &mut Report) {
    let history = index.history;
    let waits_in_calm = |at_us: Micros| {
        ledger.stories.iter().any(|(id, story)| {
            let waits = story.waits();
            waits.is_some_and(|(queued, seen, _)| queued < at_us && at_us < seen)
                && history.is_calm(at_us, at_us + 1, id.0)
        })
    };
    let is_calm = |at_us: Micros| {
        let from = at_us.saturating_sub(2 * history.bounds.waiter_ttl_us);
        let mut processes = 0..history.processes.len();
        processes.all(|process| history.is_calm(from, at_us, process))
    };
    // Any of them may have been the next.
    let waiters = ledger
        .stories
        .iter()
        .filter(|(_, story)| story.waits().is_some());
    let needed = waiters.map(|(id, _)| weight(*id)).max().unwrap_or(1);
    let idle = |visit: &&Visit| {
        let fits = visit.in_use == 0 || visit.in_use + needed <= visit.limit;
        let is_free = visit.waiting > 0 && fits && visit.limit > 0 && !visit.more;
        is_free && (waits_in_calm(visit.at_us) || is_calm(visit.at_us))
    };
    if let Some(visit) = ledger.visits.iter().find(idle) {
        let what = format!(
            "{} of {} slots were left in use at {} with {} waiting",
            visit.in_use, visit.limit, visit.at_us, visit.waiting
        );
        report.violated("G4", what, (index, key), &[]);
    }
}

/// A queue is visited once per poll interval, so a slot freed without notice is granted by then.
fn check_gaps(index: &Index<'_>, (key, ledger): (&str, &Ledger), report: &mut Report) {
    let bounds = index.history.bounds;
    let most = bounds.poll_us + 2 * bounds.round_us;
    let gaps = ledger
        .visits
        .windows(2)
        .filter(|pair| pair[1].at_us - pair[0].at_us > most);
    for pair in gaps {
        let (from, until) = (pair[0].at_us, pair[1].at_us);
        let waits = |(id, story): &(&Id, &Story)| {
            let waits = story.waits();
            waits.is_some_and(|(queued, seen, _)| queued <= from && seen >= until)
                && index.history.is_calm(from, until, id.0)
        };
        if let Some((id, _)) = ledger.stories.iter().find(waits) {
            let what = format!(
                "nobody asked for the queue for {} ms",
                (until - from) / 1_000
            );
            report.violated("G4", what, (index, key), &[*id]);
            return;
        }
    }
}

/// No lease is held or granted, which holders would show by renewing, and yet a request waits. A crashed holder
/// explains this for the length of a lease, and crashed waiters for twice their time to live.
fn check_standstill(
    index: &Index<'_>,
    (key, ledger): (&str, &Ledger),
    (id, story): (Id, &Story),
    report: &mut Report,
) {
    let bounds = index.history.bounds;
    let most = bounds.lease_us + 2 * bounds.waiter_ttl_us + bounds.poll_us + bounds.round_us;
    let Some((from, until, _)) = story.waits().filter(|(from, until, _)| until - from > most)
    else {
        return;
    };
    let held = |story: &Story| {
        let held = story
            .facts
            .iter()
            .filter(|fact| matches!(fact.what, What::Held { .. }));
        held.map(|fact| fact.at_us)
            .filter(|at| (from..until).contains(at))
            .collect::<Vec<_>>()
    };
    let mut signs: Vec<Micros> = ledger.stories.values().flat_map(held).collect();
    signs.extend([from, until]);
    signs.sort_unstable();
    for pair in signs.windows(2) {
        let lasted = pair[1] - pair[0];
        if lasted > most && index.history.is_calm(pair[0], pair[1], id.0) {
            let what = format!(
                "#{} waited for {} ms and nobody held a slot",
                id.1,
                lasted / 1_000
            );
            return report.violated("G4", what, (index, key), &[id]);
        }
    }
}

/// A permit that was in the store when its process gave it up, as far as the process knew. This excludes permits
/// already released or never acquired, and permits kept by the pool: a slot granted after its request got another one
/// goes to the pool.
fn given_up(story: &Story) -> Option<&Deed> {
    let is_last = |deed: &&Deed| {
        matches!(deed.what, Doing::GivesUp) || matches!(deed.what, Doing::Holds { .. })
    };
    let last = story.deeds.iter().rev().find(is_last);
    let deed = last.filter(|deed| deed.what == Doing::GivesUp)?;
    let before = story.facts.iter().filter(|fact| fact.line < deed.line);
    let before = before.max_by_key(|fact| fact.line)?.what;
    matches!(before, What::Held { .. } | What::Waiting { .. }).then_some(deed)
}

/// The permit is released in one of the next exchanges about its ledger. This takes no time, so no fault excuses it.
fn check_release(
    index: &Index<'_>,
    (key, ledger): (&str, &Ledger),
    (id, story): (Id, &Story),
    report: &mut Report,
) {
    let Some(deed) = given_up(story) else {
        return;
    };
    // While its acquire is in flight, the permit is not released.
    let is_on_its_way = |ask: &Ask| ask.answer.is_none_or(|(line, _)| line > deed.line);
    let sent = ledger.sent.get(&id.0).into_iter().flatten();
    let mut later = sent.filter(|(line, _)| *line > deed.line);
    let Some((last_line, last_us)) = later.nth(SOON) else {
        return;
    };
    let is_over = story.ends_us().is_some_and(|ends_us| ends_us <= *last_us);
    let released = story.releases.iter().any(|(line, ..)| line <= last_line);
    if !is_over && !released && !story.asks.iter().any(is_on_its_way) {
        let what = format!("#{} was given up and not released", id.1);
        report.violated("G5", what, (index, key), &[id]);
    }
}

/// A permit given up by its process leaves the store one round trip later, or when its lease ends.
fn check_return(index: &Index<'_>, key: &str, (id, story): (Id, &Story), report: &mut Report) {
    let process = &index.history.processes[id.0];
    let Some(deed) = given_up(story) else {
        return;
    };
    let Some((_, given_us)) = index.clocks[id.0].store_us(deed.at_us) else {
        return;
    };
    let gone = story
        .facts
        .iter()
        .filter(|fact| fact.line > deed.line && matches!(fact.what, What::Released | What::Gone));
    let gone = gone.map(|fact| fact.at_us);
    let ends = story.ends_us();
    let end = process.killed.unwrap_or(process.last_us(index, id.0));
    let returned = gone.chain(ends).min().unwrap_or(end);
    let most = index.history.bounds.round_us;
    let took = returned.min(end).saturating_sub(given_us);
    if took > most + index.history.hampered(given_us, returned, Some(id.0)) {
        let what = format!("#{} was given up and stayed for {} ms", id.1, took / 1_000);
        report.violated("G5", what, (index, key), &[id]);
    }
}

impl super::Process {
    /// The process's last sign of life.
    fn last_us(&self, index: &Index<'_>, process: usize) -> Micros {
        self.lines
            .last()
            .map_or(0, |line| index.earliest(process, line.at_us))
    }
}
