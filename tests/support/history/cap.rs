//! G1: never more leases than the limit at any instant of store time, and never more permits with owners. G2: every
//! permit that its process treats as held has a live lease.

use super::{
    Micros, Span,
    index::{Doing, How, Id, Index, Ledger, Story, What, weight},
    report::{Over, Report},
};

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, ledger) in &index.ledgers {
        check_leases(index, (key, ledger), report);
        check_owners(index, (key, ledger), report);
        let excused = ledger.stories.values().any(Story::is_excused);
        let most = ledger.visits.iter().map(|visit| visit.in_use).max();
        if let Some(most) = most.filter(|most| *most > ledger.limit && !excused) {
            let what = format!("{most} slots of {} are in use", ledger.limit);
            report.violated("G1", what, (index, key), &[]);
        }
        for (id, story) in &ledger.stories {
            check_lease(index, key, (*id, story), report);
            check_deeds(index, key, (*id, story), report);
        }
    }
}

/// Checks leases that were certainly alive.
fn check_leases(index: &Index<'_>, (key, ledger): (&str, &Ledger), report: &mut Report) {
    let (mut strict, mut all) = (Vec::new(), Vec::new());
    for (id, story) in &ledger.stories {
        for span in leases(index, story) {
            all.push((*id, span));
            if !story.is_excused() {
                strict.push((*id, span));
            }
        }
    }
    let over = sweep(&all, ledger.limit);
    if over.peak > ledger.limit {
        report.over.insert(key.to_owned(), over);
    }
    if let Some((at_us, ids)) = crowd(&strict, ledger.limit) {
        let what = format!("{} leases of {} at {at_us}", ids.len(), ledger.limit);
        report.violated("G1", what, (index, key), &ids);
    }
}

/// Checks permits that certainly had owners who considered them held.
fn check_owners(index: &Index<'_>, (key, ledger): (&str, &Ledger), report: &mut Report) {
    let mut spans = Vec::new();
    for (id, story) in &ledger.stories {
        if let Some(span) = owned(index, *id, story)
            && !story.is_excused()
            && !index
                .history
                .lost_between(story.granted().map_or(0, |it| it.0), span.1)
        {
            spans.push((*id, span));
        }
    }
    if let Some((at_us, ids)) = crowd(&spans, ledger.limit) {
        let what = format!("{} owners of {} at {at_us}", ids.len(), ledger.limit);
        report.violated("G1", what, (index, key), &ids);
    }
}

/// When a lease was certainly alive in the store.
fn leases(index: &Index<'_>, story: &Story) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for fact in &story.facts {
        let What::Held { until_us, .. } = fact.what else {
            continue;
        };
        let from = fact.at_us;
        let mut until = story
            .may_be_released_from(from)
            .map_or(until_us, |at| at.min(until_us));
        for loss in &index.history.losses {
            if loss.1 > from {
                until = until.min(loss.0.max(from));
            }
        }
        match spans.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ if until > from => spans.push((from, until)),
            _ => {}
        }
    }
    spans
}

/// When a permit certainly had an owner who considered it held, in store time.
fn owned(index: &Index<'_>, (process, _): Id, story: &Story) -> Option<Span> {
    let taken = story.did(Doing::Takes)?;
    let (mut from, mut until) = (taken.at_us, None::<u64>);
    for deed in &story.deeds {
        match (deed.what, until) {
            (Doing::Holds { until_us, .. }, None) => {
                (from, until) = (from.max(deed.at_us), Some(until_us))
            }
            (Doing::Holds { until_us, .. }, Some(old)) => until = Some(old.max(until_us)),
            (Doing::Loses | Doing::GivesUp, Some(old)) => {
                until = Some(old.min(deed.at_us));
                break;
            }
            _ => {}
        }
    }
    let clock = &index.clocks[process];
    let from = clock.store_us(from)?.1;
    let mut until = clock.store_us(until?)?.0;
    if let Some(killed) = index.history.processes[process].killed {
        until = until.min(killed);
    }
    (from < until).then_some((from, until))
}

/// The first moment with more units than the limit, and their permits. A heavier permit may be alone.
fn crowd(spans: &[(Id, Span)], limit: u32) -> Option<(Micros, Vec<Id>)> {
    let mut there = Vec::new();
    for (at_us, enters, id) in turns(spans) {
        if enters {
            there.push(id);
        } else {
            there.retain(|other| *other != id);
        }
        let units: u32 = there.iter().copied().map(weight).sum();
        if units > limit && there.len() > 1 {
            return Some((at_us, there));
        }
    }
    None
}

fn sweep(spans: &[(Id, Span)], limit: u32) -> Over {
    let mut over = Over {
        limit,
        ..Over::default()
    };
    let (mut count, mut before) = (0, 0);
    for (at_us, enters, id) in turns(spans) {
        if count > limit {
            over.lasted_us += at_us - before;
        }
        before = at_us;
        let units = weight(id);
        count = if enters { count + units } else { count - units };
        over.peak = over.peak.max(count);
    }
    over
}

/// At the same moment, leaving comes before entering.
fn turns(spans: &[(Id, Span)]) -> Vec<(Micros, bool, Id)> {
    let ends = |(id, (from, until)): &(Id, Span)| [(*from, true, *id), (*until, false, *id)];
    let mut turns: Vec<_> = spans.iter().flat_map(ends).collect();
    turns.sort_unstable();
    turns
}

/// G2: a lease does not vanish, and only permits lost by the store are restored.
fn check_lease(index: &Index<'_>, key: &str, (id, story): (Id, &Story), report: &mut Report) {
    let mut held: Option<Span> = None;
    for fact in &story.facts {
        match (fact.what, held) {
            (
                What::Held {
                    how: How::Adopted, ..
                },
                _,
            ) if story.did(Doing::Admits).is_none()
                && !index
                    .history
                    .lost_between(held.map_or(0, |it| it.0), fact.at_us) =>
            {
                let what = "a permit was put back that the store had not lost".to_owned();
                return report.violated("G1", what, (index, key), &[id]);
            }
            (What::Held { until_us, .. }, None) => held = Some((fact.at_us, until_us)),
            (What::Held { until_us, .. }, Some((_, old))) => {
                held = Some((fact.at_us, old.max(until_us)));
            }
            (What::Gone | What::Waiting { .. }, Some((from, until)))
                if fact.at_us < until
                    && !index.history.lost_between(from, fact.at_us)
                    && story
                        .may_be_released_from(from)
                        .is_none_or(|at| at > fact.at_us) =>
            {
                let what = "a lease ended before its time".to_owned();
                return report.violated("G2", what, (index, key), &[id]);
            }
            (What::Gone | What::Released, _) => held = None,
            (What::Waiting { .. }, _) => {}
        }
    }
}

/// G2: a process holds only permits granted by the store, for no longer than granted, and releases none that still has
/// an owner. Once over, a permit stays over.
fn check_deeds(index: &Index<'_>, key: &str, (id, story): (Id, &Story), report: &mut Report) {
    let clock = &index.clocks[id.0];
    let (mut until, mut taken) = (None::<u64>, None::<usize>);
    for deed in &story.deeds {
        match deed.what {
            Doing::Holds { until_us, store_us } => {
                let told =
                    |what| matches!(what, What::Held { until_us, .. } if until_us == store_us);
                if !story
                    .facts
                    .iter()
                    .any(|fact| told(fact.what) && fact.line <= deed.line)
                {
                    let what = "a permit counts as held, and the store never said so".to_owned();
                    return report.violated("G2", what, (index, key), &[id]);
                }
                if clock
                    .store_us(until_us)
                    .is_some_and(|(earliest, _)| earliest > store_us)
                {
                    let what = "a permit counts as held for longer than its lease".to_owned();
                    return report.violated("G2", what, (index, key), &[id]);
                }
                if until.is_some_and(|until| deed.at_us >= until) {
                    let what = "a permit that was over counts as held again".to_owned();
                    return report.violated("G2", what, (index, key), &[id]);
                }
                until = Some(until.map_or(until_us, |old| old.max(until_us)));
            }
            Doing::Takes => taken = Some(deed.line),
            Doing::Loses | Doing::GivesUp => {
                let sent = |(line, _, _): &(usize, Micros, bool)| {
                    taken.is_some_and(|taken| (taken..deed.line).contains(line))
                };
                if story.releases.iter().any(sent) {
                    let what = "a slot was given back that had an owner".to_owned();
                    return report.violated("G2", what, (index, key), &[id]);
                }
                taken = None;
            }
            Doing::Admits => {}
        }
    }
}
