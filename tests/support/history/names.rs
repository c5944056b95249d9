//! G6: a name is requested only once, a released permit does not come back, and a permit that an unanswered exchange
//! may have acquired is released after that exchange can no longer run.

use super::{
    index::{Ask, Id, Index, Story, What},
    report::Report,
};

pub(super) fn check(index: &Index<'_>, report: &mut Report) {
    for (key, ledger) in &index.ledgers {
        for (id, story) in &ledger.stories {
            let found = used_again(story)
                .or_else(|| came_back(story))
                .or_else(|| ghost(index, *id, story));
            if let Some(what) = found {
                report.violated("G6", format!("#{} {what}", id.1), (index, key), &[*id]);
            }
        }
    }
}

/// A name may be requested again only if the store has answered that it is absent.
fn used_again(story: &Story) -> Option<&'static str> {
    let asks: Vec<&Ask> = story.asks.iter().filter(|ask| !ask.adopts).collect();
    let again = asks.windows(2).any(|pair| {
        let refused = pair[0]
            .answer
            .is_some_and(|(line, is_in)| !is_in && line < pair[1].line);
        !refused
    });
    let released = story.releases.first().map(|(line, _, _)| *line);
    let late = asks
        .last()
        .is_some_and(|ask| released.is_some_and(|line| line < ask.line));
    match (again, late) {
        (true, _) => Some("was asked for twice"),
        (_, true) => Some("was asked for after its release"),
        _ => None,
    }
}

/// Once released, only an unanswered exchange may bring the permit back, and only within its time limit.
fn came_back(story: &Story) -> Option<&'static str> {
    let mut released = None;
    for fact in &story.facts {
        match (fact.what, released) {
            (What::Released, _) => released = Some(fact.at_us),
            (What::Held { .. } | What::Waiting { .. }, Some(at)) => {
                let may_run = |ask: &Ask| ask.answer.is_none() && ask.not_after_us >= at;
                if !story.asks.iter().any(may_run) {
                    return Some("came back after its release");
                }
            }
            _ => {}
        }
    }
    None
}

/// Nobody knows whether the permit was acquired, so it must be released once that is decided.
fn ghost(index: &Index<'_>, id: Id, story: &Story) -> Option<&'static str> {
    let process = &index.history.processes[id.0];
    let bounds = index.history.bounds;
    let lost = story
        .asks
        .iter()
        .find(|ask| !ask.adopts && ask.answer.is_none())?;
    let last = process
        .lines
        .last()
        .map_or(0, |line| index.earliest(id.0, line.at_us));
    let end = process.killed.unwrap_or(last);
    let over = lost.not_after_us;
    // A wake-up may have reported the grant: then the permit is like any other.
    let told = story
        .facts
        .iter()
        .any(|fact| !matches!(fact.what, What::Released));
    let released = story
        .facts
        .iter()
        .filter(|fact| fact.what == What::Released);
    let released = released.map(|fact| fact.at_us).find(|at| *at > over);
    let most = bounds.poll_us + 2 * bounds.round_us + index.history.hampered(over, end, Some(id.0));
    if told || released.unwrap_or(end) <= over + most {
        return None;
    }
    Some("may be a ghost: it was not released in time")
}
